"""Drops sites that wait for each other: each is right by itself, but no order of the program computes them all."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from autopallas.graph import Graph
from autopallas.patterns.match import Match, NearMiss

__all__ = ["circle", "in_some_order"]

_EACH_OTHER = (
    "it waits for what another site computes, and that one for what it computes",
    "Where both are products of logits, write one product of the concatenated weights, whose softmax runs over all of "
    "them. Else split the function in two, each optimized by itself.",
)
_ITSELF = (
    "some of what it reads is computed from its own results",
    "Split the function in two, each optimized by itself, so that the first computes what the second reads.",
)


def in_some_order(graph: Graph, matches: Sequence[Match]) -> tuple[list[Match], list[NearMiss]]:
    """Returns the matches without those that wait for each other, and near misses for the dropped ones.

    A kernel reads all of its operands before it gives the first of its results. If only one of two results of a program
    reads a certain value, they may so end up in a circle with the results of another kernel. In each circle, the match
    that reads the fewest elements is dropped.
    """
    kept, left_out = list(matches), []
    while kept and (around := circle(graph, kept)):
        least = min(around, key=lambda match: _size(graph, match.operands))
        kept.remove(least)
        reason, advice = _EACH_OTHER if len(around) > 1 else _ITSELF
        left_out.append(NearMiss(least.op, least.location, reason, min(least.replaced), advice))
    return kept, left_out


def _size(graph: Graph, numbers: Iterable[int]) -> int:
    return sum(math.prod(graph.shape(number)) for number in numbers)


def circle(graph: Graph, matches: Sequence[Match]) -> list[Match]:
    """Returns the matches in one circle, if there is any."""
    reads = {number: read for match in reversed(matches) for number, read in match.reads.items()}  # the first counts
    done: set[int] = set()
    path: dict[int, None] = {}  # in order
    for start in reads:
        todo = [start]
        while todo:
            number = todo[-1]
            if number in done:
                todo.pop()
            elif number in path:
                todo.pop()
                path.pop(number)
                done.add(number)
            else:
                path[number] = None
                node = graph.definitions.get(number)
                read = reads.get(number, () if node is None else node.inputs)
                for other in read:
                    if other in path:
                        numbers = list(path)
                        around = set(numbers[numbers.index(other) :])
                        return [match for match in matches if not around.isdisjoint(match.replaced)]
                    if other not in done:
                        todo.append(other)
    return []
