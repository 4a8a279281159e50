"""Finds steps that a program writes one after the other, as a Python loop over a simulation's steps does.

The equations of such a loop are those of one step again and again: each reads what the same step computed, what one of
the two steps before computed at one place, or what is the same for all steps.  All of that is proved here for every
equation of every step; a program that keeps what its steps give, for a trajectory or for a gradient, is left alone.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from autopallas import array_types
from autopallas.compat import ClosedJaxpr
from autopallas.graph import Graph, Node
from autopallas.graph.custom_rules import ELEMENTWISE
from autopallas.graph.extract import jaxpr_of
from autopallas.graph.program_digests import digest
from autopallas.kernels.respelling.kind import Found
from autopallas.kernels.respelling.step_sequences import RepeatedSteps
from autopallas.patterns.equal_steps import kind_of, often

__all__ = ["LEAST_STEPS", "find"]

LEAST_STEPS = 4
_SHORTEST = 4
"""Fewest equations of a step."""
_MOST_AT_ONCE = 8
"""Most occurrences of a step's rarest equation in one step."""
_MOST_KINDS = 4
"""Most equations, the rarest first, by whose places a run is looked for."""
_MOST_RUNS = 16
"""Most runs of steps that are looked for among equations with no others between them."""
_MOVES = frozenset(
    """broadcast_in_dim concatenate copy expand_dims iota pad reshape rev slice squeeze stack transpose""".split()
)
_STEPS_HOLD = ELEMENTWISE | _MOVES

_FURTHEST = 2
"""Most steps between what gives a value and what reads it."""

_Place: TypeAlias = tuple[int | None, int]
"""Where an operand comes from: how many steps ago and the position in that step, or None and the number of a value that
no step gives."""


def find(graph: Graph) -> Iterator[tuple[Node, Found]]:
    """Yields the runs of equal steps, each with the node that ends it."""
    parts: dict[int, list[list[Node]]] = defaultdict(lambda: [[]])
    for node in graph.nodes:
        own = parts[id(node.body)]
        if node.name in _STEPS_HOLD and len(node.outputs) == 1 and not node.equation.effects:
            own[-1].append(node)
        elif own[-1]:
            own.append([])
    graph.steps.spend(len(graph.nodes))
    for nodes in itertools.chain.from_iterable(parts.values()):
        if len(nodes) >= LEAST_STEPS * _SHORTEST:
            yield from _of_part(graph, nodes)


def _of_part(graph: Graph, nodes: Sequence[Node]) -> Iterator[tuple[Node, Found]]:
    """Finds the runs among equations that steps may hold, with no others between them."""
    kinds = [(node, _kind(graph, node)) for node, _ in often(graph, nodes, LEAST_STEPS)]
    counts = Counter([kind for _, kind in kinds])
    chosen: list[tuple[Node, Hashable]] = [pair for pair in kinds if counts[pair[1]] >= LEAST_STEPS]
    for _ in range(_MOST_RUNS):
        run = _longest_run([kind for _, kind in chosen])
        if run is None:
            return
        first, period, count = run
        own = [node for node, _ in chosen[first : first + period * count]]
        found = _steps(graph, [own[k * period : (k + 1) * period] for k in range(count)])
        if found is not None:
            yield own[-1], found
        chosen[first : first + period * count] = [(own[0], None)]


def _kind(graph: Graph, node: Node) -> Hashable:
    """Returns what equations of the same position in two steps have in common."""
    known = graph.literals
    literals = tuple([known[n].tobytes() if n in known else None for n in node.inputs])
    return kind_of(graph, node), bool(node.params.get("weak_type")), literals


def _longest_run(kinds: Sequence[Hashable]) -> tuple[int, int, int] | None:
    """Returns where a run of equal steps begins, how many equations a step has, and how many steps there are, of the
    rarest equation that occurs often enough."""
    places: dict[Hashable, list[int]] = defaultdict(list)
    for place, kind in enumerate(kinds):
        if kind is not None:
            places[kind].append(place)
    often = [own for own in places.values() if len(own) >= LEAST_STEPS]
    for own in sorted(often, key=lambda own: (len(own), own))[:_MOST_KINDS]:
        for together in range(1, min(_MOST_AT_ONCE, len(own) // LEAST_STEPS) + 1):
            middle = len(own) // 2 - together // 2
            period = own[min(middle + together, len(own) - 1)] - own[min(middle, len(own) - 1 - together)]
            if period < _SHORTEST:
                continue
            first, end = _extended(kinds, own[min(middle, len(own) - 1 - together)], period)
            if (end - first) // period >= LEAST_STEPS:
                return first, period, (end - first) // period
    return None


def _extended(kinds: Sequence[Hashable], place: int, period: int) -> tuple[int, int]:
    """Returns the beginning and the end of what repeats with a period around a place."""
    first = place
    while first > 0 and kinds[first - 1] is not None and kinds[first - 1] == kinds[first - 1 + period]:
        first -= 1
    end = place + 1
    while end < len(kinds) and kinds[end] is not None and (end - period < first or kinds[end] == kinds[end - period]):
        end += 1
    return first, end


@dataclass(frozen=True, slots=True)
class _Links:
    """How the equations of all steps are linked.

    Attributes:
      read: numbers of what all steps read.
      first: by the position of an equation in a step, and how many steps later its result is read: the number that is
        read where there is no such step.
    """

    read: tuple[int, ...]
    first: dict[tuple[int, int], int]


def _steps(graph: Graph, blocks: Sequence[Sequence[Node]]) -> Found | None:
    links = _links(graph, blocks)
    if links is None or not links.first or any(number in graph.literals for number in links.first.values()):
        return None
    carried = sorted(links.first)

    def before(step: int) -> list[int]:
        """Returns the numbers of what a step is given by those before it."""
        return [blocks[step - ago][position].outputs[0] for position, ago in carried]

    within = {id(node) for block in blocks for node in block}
    count, at_hand = len(blocks), set(before(len(blocks) - 1))
    needed: list[int] = []
    for k, block in enumerate(blocks):
        for node in block:
            (number,) = node.outputs
            if number not in graph.returned and all(id(user) in within for user in graph.users[number]):
                continue
            if k < count - 1 and number not in at_hand:
                return None
            needed.append(number)
    first = [links.first[key] for key in carried]
    avals = [graph.avals[n] for n in (*first, *links.read, *needed)]
    if not needed or array_types.varying_axes(avals):
        return None
    if any(array_types.explicit_sharding(aval) is not None for aval in avals):
        return None
    operands = tuple(dict.fromkeys((*first, *links.read)))
    at = {number: position for position, number in enumerate(operands)}

    def program(step: int, results: Sequence[int]) -> ClosedJaxpr:
        return jaxpr_of(graph, blocks[step], [*before(step), *links.read], results)

    step, last = program(2, before(3)), program(count - 1, needed)
    steps = RepeatedSteps(
        key=digest([step, last]),
        step=step,
        last=last,
        first=tuple(at[number] for number in first),
        read=tuple(at[number] for number in links.read),
        count=count,
    )
    return Found((("steps", steps),), operands, tuple(needed))


def _links(graph: Graph, blocks: Sequence[Sequence[Node]]) -> _Links | None:
    """Returns how the equations of all steps are linked, which is the same in each; None if it is not."""
    at = {node.outputs[0]: (k, i) for k, block in enumerate(blocks) for i, node in enumerate(block)}
    expected = [_operands(at, _FURTHEST, node) for node in blocks[_FURTHEST]]
    if any(own is None for own in expected):
        return None
    first: dict[tuple[int, int], int] = {}
    for k, block in enumerate(blocks):
        for node, places in zip(block, expected, strict=True):
            given = _operands(at, k, node)
            if given is None or places is None:
                return None
            for (ago, number), (wanted, position) in zip(given, places, strict=True):
                if wanted is None or wanted <= k:
                    if (ago, number) != (wanted, position):
                        return None
                    continue
                (result,) = blocks[0][position].outputs
                alike = (graph.shape(number), graph.dtype(number)) == (graph.shape(result), graph.dtype(result))
                if ago is not None or not alike or first.setdefault((position, wanted - k), number) != number:
                    return None
    read = dict.fromkeys(n for own in expected if own is not None for ago, n in own if ago is None)
    for position, ago in [*first]:
        if any((position, less) not in first for less in range(1, ago)):
            return None
    return _Links(tuple(n for n in read if n not in graph.literals), first)


def _operands(at: dict[int, tuple[int, int]], step: int, node: Node) -> tuple[_Place, ...] | None:
    """Returns where the operands of an equation of a step come from; None if one comes from further away."""
    found: list[_Place] = []
    for number in node.inputs:
        if number not in at:
            found.append((None, number))
            continue
        other, position = at[number]
        if not 0 <= step - other <= _FURTHEST:
            return None
        found.append((step - other, position))
    return tuple(found)
