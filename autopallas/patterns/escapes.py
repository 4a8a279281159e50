"""Completes sites whose inner values are needed elsewhere, by their backward or by other computations.

A site none of whose inner values is needed elsewhere is complete as it is. For any other site, the backward is looked
for. If the program holds it, and nothing else reads inner values, forward and backward are replaced together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace

import jax.numpy as jnp

from autopallas import compat, jaxprs
from autopallas.faults import contained
from autopallas.graph import Body, Graph, Node
from autopallas.graph.body_links import homes_of, may_be_given
from autopallas.graph.edit import surviving
from autopallas.graph.extract import with_further_inputs
from autopallas.patterns.backward import Backward, Lookup
from autopallas.patterns.carry import is_available
from autopallas.patterns.derivatives import DERIVATIVES, further_derivative
from autopallas.patterns.examples import of_examples
from autopallas.patterns.forward import COPIES, Forward, PerExample, RectifiedApart
from autopallas.patterns.match import BackwardMatch, Match, Mismatch, NearMiss
from autopallas.patterns.settling import Search, settle
from autopallas.sites.declared import DeclaredSite

__all__ = ["CALLS", "Beside", "complete"]

CALLS = frozenset({"custom_jvp_call", "custom_vjp_call"})
"""Equations with bodies that may be part of a site, each as a whole."""


_APART = (
    "Compute what else needs the value in a separate function, called only where its result is needed; or declare a "
    "pattern that ends at the value."
)
_DIFFERENTIATED = (
    "Where a custom_vjp writes the backward, leave it out: the one that JAX makes is recognised, and kernels keep "
    "nothing for it but their operands. Otherwise take the gradient of the whole loss inside the optimized function."
)
_MOST_SUMS = 1024
"""Most additions in which the sum of a value's cotangents is looked for."""


def complete(
    graph: Graph, sites: Sequence[tuple[Match, Node]], kind: type[Forward] = Forward
) -> tuple[list[Match], list[NearMiss]]:
    """Returns the sites of one pattern that can be replaced, with their backwards, and near misses for the others.

    Args:
      graph: the program.
      sites: (the forward, the node that gives its result) of each. A match's site tells by ``uses`` which of its values
        each operand is; where a backward is found, it gets one operand for each use.
      kind: how the forwards are differentiated: a rectified one is looked for where a loop holds what was a rectifier.
    """
    alone, leaks = list(sites), []
    while True:  # sites may share inner values, such as the mean of the same squares
        still = surviving(graph, {number for match, _ in alone for number in match.results})
        leaking = [pair for pair in alone if _inner(graph, pair[0]) & still]
        if not leaking:
            break
        leaks += leaking
        gone = set(map(id, leaking))
        alone = [pair for pair in alone if id(pair) not in gone]
    matches = [match for match, _ in alone]
    waiting: list[tuple[Match, Node, Search | None]] = []
    for match, node in leaks:
        search = None
        with contained(match.location):
            search = _search(graph, match, kind)
        waiting.append((match, node, search))
    searches = [search for *_, search in waiting if search is not None]
    given = {number for match in matches for number in match.results}
    settled: list[Search] = []
    with contained():
        settled = settle(graph, Lookup.of(graph), searches, given) if searches else []
    whole = _with_backwards(graph, [(match, search) for match, _, search in waiting if search in settled])
    matches += whole.values()
    misses = [
        NearMiss(match.op, match.location, reason, node.outputs[0], advice)
        for match, node, _ in waiting
        for reason, advice in [_escape(graph, match)]
        if match.results not in whole
    ]
    return matches, misses


def _inner(graph: Graph, match: Match) -> set[int]:
    """Returns the values between operands and result, except those that are made of literals alone, and operands in
    another dtype or layout: where these are needed elsewhere too, they are computed there as they were."""
    constant: set[int] = set()
    copies: set[int] = set()
    for node in match.equations:
        if all(number in graph.literals or number in constant for number in node.inputs):
            constant.update(node.outputs)
        elif node.name in COPIES and (node.inputs[0] in match.operands or node.inputs[0] in copies):
            copies.update(node.outputs)
    return {number for node in match.equations for number in node.outputs} - constant - copies - set(match.results)


def _escape(graph: Graph, match: Match) -> tuple[str, str]:
    """Describes which inner value is needed elsewhere, and where; returns that and the advice."""
    own = {id(node) for node in match.equations}
    alive = surviving(graph)
    readers = [
        user
        for number in sorted(_inner(graph, match) & alive)
        for user in graph.users[number]
        if id(user) not in own and not alive.isdisjoint(user.outputs)
    ]
    if not readers:
        return "a value in the middle of it is used elsewhere", _APART
    others = [user for user in readers if not (user.body.transposed or compat.is_transposed(user.equation))]
    user = (others or readers)[0]
    reason = f"a value in the middle of it is also used by {user.name} at {jaxprs.location(user.equation)}"
    if (derivative := further_derivative(graph, user, match.equations)) is not None:
        return f"{reason}, in {derivative}", DERIVATIVES
    if others:
        return reason, _APART
    return f"{reason}, in a backward that is not as JAX's differentiation writes it", _DIFFERENTIATED


def _search(graph: Graph, match: Match, kind: type[Forward]) -> Search | None:
    inside = {n for e in match.equations for n in e.outputs}
    forward = kind(graph, match.body, match.results[0], inside.__contains__, CALLS, repeats=True)
    if isinstance(forward, RectifiedApart) and not forward.differs:
        return None
    if not forward.complete or any(use.number not in match.operands for use in forward.uses):
        return None
    wanted = [i for i, u in enumerate(forward.uses) if jnp.issubdtype(u.variable.aval.dtype, jnp.floating)]
    return Search(forward, wanted, (), by_example=True)


def _with_backwards(graph: Graph, waiting: Sequence[tuple[Match, Search | None]]) -> dict[tuple[int, ...], Match]:
    """Returns the matches, by their results, with the backwards that were found for them; drops those of which a
    cotangent is needed that kernels do not give.

    What each may give depends on what else is computed beside it: on what the other kernels read, and not on how the
    program computes it. Where one is dropped, its equations stay, and the others are looked at again.
    """
    left = [(match, search) for match, search in waiting if search is not None]
    while left:
        read = [_read(search) for _, search in left]
        reads = {n: values for (_, search), values in zip(left, read, strict=True) for n in search.replaced()}
        still = surviving(graph, reads, reads)
        kernels = Counter(number for values in read for number in values)
        found: dict[tuple[int, ...], Match] = {}
        for (match, search), own in zip(left, read, strict=True):
            with contained(match.location):
                beside = Beside(graph, still, kernels, own)
                if (whole := _with_backward(match, search, beside)) is not None:
                    found[match.results] = whole
        if len(found) == len(left):
            return found
        left = [(match, search) for match, search in left if match.results in found]
    return {}


def _read(search: Search) -> set[int]:
    """Returns the values that the kernels of a site read."""
    return {use.number for use in search.forward.uses} | {backward.cotangent for backward in search.found}


def _with_backward(match: Match, search: Search, beside: Beside) -> Match | None:
    """Returns the match with the backwards that were found, and with one operand for each use."""
    graph, forward = beside.graph, search.forward
    numbers = [use.number for use in forward.uses]
    # What is made of literals alone, such as decays before a loop, the forward computes by itself.
    further = [number for number in match.operands if number not in numbers]
    numbers += further
    homes = _homes(graph, match, numbers)
    backwards = []
    if any(backward.moved for backward in search.found):
        return None
    for backward in search.found:
        cotangents = _gradients(backward, numbers, beside)
        places = homes_of(graph, backward.cotangent, [number for _, number in cotangents]) if cotangents else []
        if not places or not all(_is_at_hand(graph, number, homes, places[0]) for number in numbers):
            return None
        body = places[0]
        backwards.append(BackwardMatch(body, backward.cotangent, tuple(cotangents), backward.mapped))
    if not backwards:
        return None
    site = match.site
    assert isinstance(site, DeclaredSite)
    whole = replace(
        match,
        site=replace(site, uses=tuple(match.operands.index(number) for number in numbers)),
        direction="forward+backward",
        operands=tuple(numbers),
        original=with_further_inputs(forward.jaxpr(), [graph.avals[number] for number in further]),
        backwards=tuple(backwards),
        homes=homes,
    )
    if not isinstance(forward, PerExample):
        return whole
    if further:
        return None
    with suppress(Mismatch):
        return of_examples(whole, forward, search.found)
    return None


def _is_at_hand(graph: Graph, number: int, homes: tuple[Body, ...], body: Body) -> bool:
    """Returns whether a kernel's operand is at hand in a body, or can be brought there."""
    return is_available(graph, number, homes, body, True) or may_be_given(graph, number, body)


def _homes(graph: Graph, match: Match, numbers: Sequence[int]) -> tuple[Body, ...]:
    """Returns the bodies that compute a site's result and have its operands: its own, and those in which a checkpoint
    computes it again, whose loops the loops of the backward follow."""
    places = (body for body, position in graph.occurrences(match.results[0]) if position not in body.children)
    others = (body for body in places if graph.positions[body].keys() >= set(numbers))
    return tuple(dict.fromkeys((match.body, *others)))


def _gradients(backward: Backward, numbers: Sequence[int], beside: Beside) -> list[tuple[int, int]]:
    """Returns pairs (use, number of its cotangent), each number once; an empty list where that cannot be.

    Among the uses of one value, the first pair has the use that is to receive the cotangent of them all. The cotangents
    of these uses must do nothing but add up: then only their sum counts, wherever else it goes. So all of them have to
    be the program's: a derivative that somebody wrote may have one of them, and something else for the others.
    """
    of_value: dict[int, list[tuple[int, int]]] = {}
    for use, levels in backward.levels.items():
        of_value.setdefault(numbers[use], []).append((use, levels[0].cotangent))
    if any(numbers[use] in of_value for use in backward.lacking):
        return []
    gradients: list[tuple[int, int]] = []
    for uses in of_value.values():
        found = [cotangent for _, cotangent in uses]
        for use, cotangent in uses:
            if beside.meet(cotangent, found):
                rest = {number: other for other, number in uses if number != cotangent}
                gradients += [(use, cotangent), *((other, number) for number, other in rest.items())]
                break
        else:
            return []
    return gradients


def _widens(graph: Graph, node: Node) -> bool:
    """Returns whether a node gives floats more digits, and no greater range, beyond which a sum would be infinite."""
    if node.name != "convert_element_type":
        return False
    dtypes = graph.dtype(node.inputs[0]), graph.dtype(node.outputs[0])
    if not all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
        return False
    before, after = map(jnp.finfo, dtypes)
    return bool(before.maxexp == after.maxexp and before.nmant <= after.nmant)


@dataclass(frozen=True, slots=True)
class Beside:
    """What is computed beside a site: the values that the program still computes, and those that other kernels read.

    Attributes:
      graph: the program.
      still: the values that the program still computes.
      kernels: for each value, the number of sites whose kernels read it.
      own: the values that the kernels of this site read.
    """

    graph: Graph
    still: frozenset[int]
    kernels: Mapping[int, int] = field(default_factory=dict)
    own: Set[int] = frozenset()

    def _another_reads(self, number: int) -> bool:
        """Returns whether the kernels of another site read a value."""
        return self.kernels.get(number, 0) > (number in self.own)

    def _readers(self, number: int) -> list[Node]:
        """Returns the nodes that read a value."""
        return [n for n in self.graph.users[number] if n.equation.effects or not self.still.isdisjoint(n.outputs)]

    def meet(self, number: int, every: Sequence[int]) -> bool:
        """Returns whether values go into one sum and into nothing else before it, each as often as it is among them,
        and ``number`` is so once.

        Each may be widened first, as where layers cast what they read one by one: their sum, which the kernel rounds
        once, is as near then as theirs after a rounding each.
        """
        wanted = Counter(every)
        if wanted[number] != 1 or len(wanted) == 1:
            return wanted[number] == 1
        terms = {value: Counter({value: 1}) for value in wanted}  # how often each value is added into these
        for _ in range(_MOST_SUMS):
            if len(terms) == 1:
                return wanted == next(iter(terms.values()))
            first = min(terms)  # all that is added up comes before its sum
            readers = self._readers(first)
            if first in self.graph.returned or self._another_reads(first):
                return False
            if len(readers) == 1 and _widens(self.graph, readers[0]):
                terms[readers[0].outputs[0]] = terms.pop(first)
                continue
            if not readers or any(node.name != "add_any" for node in readers):
                return False
            added = terms.pop(first)
            for node in readers:
                total = terms.setdefault(node.outputs[0], Counter())
                for value, times in added.items():
                    total[value] += times * node.inputs.count(first)
        return False
