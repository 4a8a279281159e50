"""One module per reference computation; each turns graph nodes into a Match or a NearMiss with a reason."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from autopallas.custom.registry import declared
from autopallas.environment import OPERATIONS
from autopallas.faults import contained
from autopallas.graph import Graph
from autopallas.graph.edit import surviving
from autopallas.patterns.match import Match, NearMiss
from autopallas.patterns.order import in_some_order
from autopallas.patterns.routers import without_routers

__all__ = ["Match", "NearMiss", "find"]


def find(graph: Graph, ops: Iterable[str] | None, assume_finite: bool) -> tuple[list[Match], list[NearMiss]]:
    """All sites in a graph of the operations asked for (None: of every one), and what nearly was one.

    Sites of own patterns come first.  They may lie within others, or others within them, until it is planned which of
    them are applied.  Where failures are collected (:mod:`autopallas.faults`), an exception in one candidate costs that
    candidate, and one in what a pattern prepares costs that pattern.
    """
    matches: list[Match] = []
    misses: list[NearMiss] = []
    for name in OPERATIONS:
        if ops is None or name in ops:
            graph.steps.begin()
            with contained(op=name, stage="recognition"):
                found, missed = importlib.import_module(f"autopallas.patterns.{name}").find(graph, assume_finite)
                taken = {number for match in matches for number in match.replaced}  # self-attention looks like a loss
                matches += [match for match in found if taken.isdisjoint(match.replaced)]
                misses += missed
                if found:
                    graph.replaced = frozenset(number for match in matches for number in match.replaced)
    if ops is None and (patterns := declared()):
        with contained(op="own patterns", stage="recognition"):
            own = importlib.import_module("autopallas.patterns.spellings")
            found, missed = own.find(graph, patterns)
            matches = [*found, *matches]
            misses += missed
    alive = surviving(graph) if matches else frozenset[int]()
    matches = [match for match in matches if not alive.isdisjoint(match.replaced)]  # nothing computes the others
    matches, waiting = in_some_order(graph, _once(matches))
    misses += waiting
    if misses:  # what a site does in the program's place, its backward included, holds no near misses
        reads = {number: read for match in matches for number, read in match.reads.items()}
        still = surviving(graph, {number for match in matches for number in match.replaced}, reads)
        misses = [miss for miss in misses if miss.value < 0 or miss.value in still]
    return without_routers(graph, matches, misses)


def _once(matches: list[Match]) -> list[Match]:
    """The matches without those that give a value that an earlier one gives."""
    taken: set[int] = set()
    kept = []
    for match in matches:
        if taken.isdisjoint(match.replaced):
            kept.append(match)
            taken.update(match.replaced)
    return kept
