"""Decides by their place in the source code which sites may be replaced: the options ``only`` and ``deny``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

from autopallas.compat import JaxprEqn
from autopallas.faults import contained
from autopallas.graph import Body, Graph
from autopallas.graph.places import places_of
from autopallas.options import Options
from autopallas.patterns.match import Match
from autopallas.place_selectors import Places, first_that_selects, selector_of
from autopallas.tuning import lock as lockfile

__all__ = ["deny_places", "names_places", "selecting_nothing"]


def deny_places(graph: Graph, matches: Sequence[Match], options: Options) -> list[Match]:
    """Returns the sites, those at places that options or the lockfile deny with the reason.

    Raises:
      OptionError: the options name a lockfile that cannot be read.
    """
    settings = _settings(options)
    return list(_judged(graph, matches, settings)) if settings else list(matches)


def selecting_nothing(graph: Graph, matches: Sequence[Match], options: Options) -> tuple[str, ...]:
    """Returns, in words, which of the places that options or the lockfile name are those of no site.

    Where one site's places cannot be told, nothing is said.
    """
    settings = _settings(options)
    if not settings:
        return ()
    every: list[Places] = []
    for match in matches:
        known = len(every)
        with contained(match.location, match.op, "plan"):
            every.append(places_of(graph, _equations(graph, match)))
        if len(every) == known:
            return ()
    return tuple(
        f"{option} {text!r} selects no site{source}"
        for deny, only, source in settings
        for option, texts in (("deny", deny), ("only", only))
        for text in texts
        if not any(selector_of(text).selects(places) for places in every)
    )


def names_places(options: Options) -> bool:
    """Returns whether options or the lockfile name places that are denied, or alone are allowed."""
    return bool(_settings(options))


_Setting: TypeAlias = tuple[tuple[str, ...], tuple[str, ...], str]
"""What is denied, what alone is allowed, and where that is set, if not by the options."""


def _settings(options: Options) -> list[_Setting]:
    """Returns the settings in force that name places."""
    lock = None if options.lock is None else lockfile.read(options.lock)
    settings = [(options.deny, options.only or (), "")]
    if lock is not None:
        settings.append((lock.deny, lock.only, f" (lockfile {options.lock})"))
    return [setting for setting in settings if setting[0] or setting[1]]


def _judged(graph: Graph, matches: Sequence[Match], settings: Sequence[_Setting]) -> Iterator[Match]:
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
            groups = [own, *([pair] for pair in _elsewhere(graph, match, own))]
            reasons = [
                _reason(places, deny, only) + source
                for places in (places_of(graph, group) for group in groups)
                for deny, only, source in settings
            ]
            denied = next((reason for reason in reasons if reason.startswith("denied")), "") if own else denied
        yield replace(match, denied=denied) if denied else match


def _reason(places: Places, deny: tuple[str, ...], only: tuple[str, ...]) -> str:
    """Returns why a site at these places is denied; an empty string if it is not."""
    if found := first_that_selects(deny, places):
        return f"denied by {found}"
    if only and not first_that_selects(only, places):
        return f"denied by its place, since only {', '.join(only)} {'is' if len(only) == 1 else 'are'} allowed"
    return ""


def _elsewhere(graph: Graph, match: Match, own: Sequence[tuple[Body, JaxprEqn]]) -> Iterator[tuple[Body, JaxprEqn]]:
    """Yields the other equations that compute a site's results: where a program does so twice, it is replaced twice."""
    known = {id(equation) for _, equation in own}
    for number in match.results:
        for body, position in graph.occurrences(number):
            equation = body.equations[position]
            if id(equation) not in known and position not in body.children:
                known.add(id(equation))
                yield body, equation


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
            for body in graph.bodies_with(number):
                position, _ = graph.positions[body][number]
                if position >= 0:
                    found[id(body.equations[position])] = body, body.equations[position]
    return list(found.values())
