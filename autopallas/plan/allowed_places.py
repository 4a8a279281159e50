"""Decides by their place in the source code which sites may be replaced: the options ``only`` and ``deny``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopallas.compat import JaxprEqn
from autopallas.faults import contained
from autopallas.graph import Body, Graph
from autopallas.graph.places import places_of
from autopallas.options import Options
from autopallas.patterns.match import Match
from autopallas.place_selectors import Places, first_that_selects
from autopallas.tuning import lock as lockfile

__all__ = ["deny_places"]


def deny_places(graph: Graph, matches: Sequence[Match], options: Options) -> list[Match]:
    """Returns the sites, those at places that options or the lockfile deny with the reason.

    Raises:
      OptionError: the options name a lockfile that cannot be read.
    """
    lock = None if options.lock is None else lockfile.read(options.lock)
    settings = [(options.deny, options.only or (), "")]
    if lock is not None:
        settings.append((lock.deny, lock.only, f" (lockfile {options.lock})"))
    if not any(deny or only for deny, only, _ in settings):
        return list(matches)
    return list(_judged(graph, matches, settings))


def _judged(
    graph: Graph, matches: Sequence[Match], settings: Sequence[tuple[tuple[str, ...], tuple[str, ...], str]]
) -> Iterator[Match]:
    equations: dict[Match, list[tuple[Body, JaxprEqn]]] = {}
    for match in matches:
        equations[match] = []
        with contained(match.location, match.op, "plan"):
            equations[match] = _equations(graph, match)
    held = Counter(id(equation) for own in equations.values() for _, equation in own)
    for match in matches:
        denied = "it could not be told whether its place is denied"  # a site in doubt stays as it is
        with contained(match.location, match.op, "plan"):
            # What several sites share is written at one of their places.
            own = [pair for pair in equations[match] if held[id(pair[1])] == 1] or equations[match]
            places = places_of(graph, own)
            reasons = [_reason(places, deny, only) + source for deny, only, source in settings]
            denied = next((reason for reason in reasons if reason.startswith("denied")), "") if own else denied
        yield replace(match, denied=denied) if denied else match


def _reason(places: Places, deny: tuple[str, ...], only: tuple[str, ...]) -> str:
    """Returns why a site at these places is denied; an empty string if it is not."""
    if found := first_that_selects(deny, places):
        return f"denied by {found}"
    if only and not first_that_selects(only, places):
        return f"denied by its place, since only {', '.join(only)} {'is' if len(only) == 1 else 'are'} allowed"
    return ""


def _equations(graph: Graph, match: Match) -> list[tuple[Body, JaxprEqn]]:
    """Returns the equations that compute a site's results from its operands, each with the body that holds it."""
    found: dict[int, tuple[Body, JaxprEqn]] = {}
    seen = set(match.operands)
    todo = list(match.results)
    while todo:
        number = todo.pop()
        if number in seen:
            continue
        seen.add(number)
        node = graph.definitions.get(number)
        if node is not None:
            found[id(node.equation)] = node.body, node.equation
            todo += node.inputs
        elif number in match.results:  # of a loop
            for body, known in graph.positions.items():
                place = known.get(number)
                if place is not None and place[0] >= 0:
                    found[id(body.equations[place[0]])] = body, body.equations[place[0]]
    return list(found.values())
