"""Completes sites whose inner values are needed elsewhere, by their backward or by other computations.

A site none of whose inner values is needed elsewhere is complete as it is. For any other site, the backward is looked
for. If the program holds it, and nothing else reads inner values, forward and backward are replaced together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax.numpy as jnp

from autopallas import jaxprs
from autopallas.custom.site import OwnSite
from autopallas.faults import contained
from autopallas.graph import Body, Graph, Node
from autopallas.graph.edit import surviving
from autopallas.patterns.backward import Backward, Forward, Lookup, Search, settle
from autopallas.patterns.carry import is_available
from autopallas.patterns.match import BackwardMatch, Match, NearMiss
from autopallas.sites.declared import DeclaredSite

__all__ = ["CALLS", "complete"]

CALLS = frozenset({"custom_jvp_call", "custom_vjp_call"})
"""Equations with bodies that may be part of a site, each as a whole."""


_APART = (
    "Compute what else needs the value in a separate function, called only where its result is needed; or declare a "
    "pattern that ends at the value."
)
_LONGEST = 32
"""Longest chain of additions in which the sum of a value's cotangents is looked for."""


def complete(graph: Graph, sites: Sequence[tuple[Match, Node]]) -> tuple[list[Match], list[NearMiss]]:
    """Returns the sites of one pattern that can be replaced, with their backwards, and near misses for the others.

    Args:
      graph: the program.
      sites: (the forward, the node that gives its result) of each. A match's site tells by ``uses`` which of its values
        each operand is; where a backward is found, it gets one operand for each use.
    """
    alone, leaks = list(sites), []
    while True:  # sites may share inner values, such as the mean of the same squares
        still = surviving(graph, {number for match, _ in alone for number in match.results})
        leaking = [pair for pair in alone if _inner(graph, pair[0]) & still]
        if not leaking:
            break
        leaks += leaking
        alone = [pair for pair in alone if pair not in leaking]
    matches = [match for match, _ in alone]
    waiting: list[tuple[Match, Node, Search | None]] = []
    for match, node in leaks:
        search = None
        with contained(match.location):
            search = _search(graph, match)
        waiting.append((match, node, search))
    searches = [search for *_, search in waiting if search is not None]
    given = {number for match in matches for number in match.results}
    settled: list[Search] = []
    with contained():
        settled = settle(graph, Lookup(graph), searches, given) if searches else []
    misses: list[NearMiss] = []
    for match, node, search in waiting:
        whole = None
        with contained(match.location):
            whole = _with_backward(graph, match, search) if search is not None and search in settled else None
        if whole is not None:
            matches.append(whole)
        else:
            misses.append(NearMiss(match.op, match.location, _escape(graph, match), node.outputs[0], _APART))
    return matches, misses


def _inner(graph: Graph, match: Match) -> set[int]:
    """Returns the values between operands and result, except those that are made of literals alone."""
    constant: set[int] = set()
    for node in match.equations:
        if all(number in graph.literals or number in constant for number in node.inputs):
            constant.update(node.outputs)
    return {number for node in match.equations for number in node.outputs} - constant - set(match.results)


def _escape(graph: Graph, match: Match) -> str:
    """Describes which inner value is needed elsewhere, and where."""
    own = {id(node) for node in match.equations}
    for number in sorted(_inner(graph, match) & surviving(graph, match.results)):
        for user in graph.users[number]:
            if id(user) not in own:
                return f"a value in the middle of it is also used by {user.name} at {jaxprs.location(user.equation)}"
    return "a value in the middle of it is used elsewhere"


def _search(graph: Graph, match: Match) -> Search | None:
    inside = {n for e in match.equations for n in e.outputs}
    forward = Forward(graph, match.body, match.results[0], inside.__contains__, calls=CALLS)
    if not forward.complete or any(use.number not in match.operands for use in forward.uses):
        return None
    wanted = [i for i, u in enumerate(forward.uses) if jnp.issubdtype(u.variable.aval.dtype, jnp.floating)]
    return Search(forward, wanted, ())


def _with_backward(graph: Graph, match: Match, search: Search) -> Match | None:
    """Returns the match with the backwards that were found, and with one operand for each use."""
    forward = search.forward
    numbers = [use.number for use in forward.uses]
    still = surviving(graph, search.replaced())
    backwards = []
    for backward in search.found:
        cotangents = _gradients(graph, backward, numbers, still)
        body = None if not cotangents else _home(graph, backward.cotangent, [number for _, number in cotangents])
        if body is None or not all(is_available(graph, number, (match.body,), body, True) for number in numbers):
            return None
        backwards.append(BackwardMatch(body, backward.cotangent, tuple(cotangents), backward.mapped))
    if not backwards:
        return None
    site = match.site
    assert isinstance(site, OwnSite | DeclaredSite)
    return replace(
        match,
        site=replace(site, uses=tuple(match.operands.index(number) for number in numbers)),
        direction="forward+backward",
        operands=tuple(numbers),
        original=forward.jaxpr(),
        backwards=tuple(backwards),
    )


def _home(graph: Graph, cotangent: int, gradients: Sequence[int]) -> Body | None:
    for body, positions in graph.positions.items():
        if cotangent in positions and all(positions.get(number, (-1,))[0] >= 0 for number in gradients):
            return body
    return None


def _gradients(
    graph: Graph, backward: Backward, numbers: Sequence[int], still: frozenset[int]
) -> list[tuple[int, int]]:
    """Returns pairs (use, number of its cotangent), each number once; an empty list where that cannot be.

    Among the uses of one value, the first pair has the use that is to receive the cotangent of them all. The cotangents
    of these uses must do nothing but add up: then only their sum counts, wherever else it goes. ``still`` are the
    values that are computed beside the site.
    """
    of_value: dict[int, list[tuple[int, int]]] = {}
    for use, levels in backward.levels.items():
        of_value.setdefault(numbers[use], []).append((use, levels[0].cotangent))
    gradients: list[tuple[int, int]] = []
    for uses in of_value.values():
        found = [cotangent for _, cotangent in uses]
        for use, cotangent in uses:
            others = {number for number in found if number != cotangent}
            if found.count(cotangent) == 1 and _meet(graph, cotangent, others, still):
                rest = {number: other for other, number in uses if number != cotangent}
                gradients += [(use, cotangent), *((other, number) for number, other in rest.items())]
                break
        else:
            return []
    return gradients


def _readers(graph: Graph, number: int, still: frozenset[int]) -> list[Node]:
    """Returns the nodes that read a value beside the site."""
    return [node for node in graph.users[number] if node.equation.effects or not still.isdisjoint(node.outputs)]


def _meet(graph: Graph, number: int, others: set[int], still: frozenset[int]) -> bool:
    """Returns whether values go into one sum and into nothing else before it, and ``number`` goes into it once."""
    chain = [number]
    while len(chain) < _LONGEST and len(users := _readers(graph, chain[-1], still)) == 1:
        if users[0].name != "add_any":
            break
        chain.append(users[0].outputs[0])
    return not others or any(
        _times(graph, number, total, still) == 1 and all(_times(graph, other, total, still) for other in others)
        for total in chain
    )


def _times(graph: Graph, number: int, total: int, still: frozenset[int]) -> int:
    """Counts how often a value is added into ``total``; 0 where the value, or a sum with it, goes anywhere else."""
    if number == total:
        return 1
    if number > total or number in graph.returned:
        return 0
    times = 0
    for user in _readers(graph, number, still):
        further = _times(graph, user.outputs[0], total, still) if user.name == "add_any" else 0
        if not further:
            return 0
        times += user.inputs.count(number) * further
    return times
