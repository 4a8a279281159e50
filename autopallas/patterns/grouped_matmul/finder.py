"""Finds grouped matmuls and mixtures of experts; what reads either is imported by programs that may have one."""

from __future__ import annotations

from collections.abc import Sequence

from autopallas.faults import contained
from autopallas.graph import Graph
from autopallas.graph.edit import surviving
from autopallas.patterns import mixture_of_experts
from autopallas.patterns.match import Match, NearMiss

__all__ = ["find"]


def find(graph: Graph, assume_finite: bool = True) -> tuple[list[Match], list[NearMiss]]:
    """Finds every grouped matmul in a graph, and the near misses."""
    alive = surviving(graph, ())
    matches: list[Match] = []
    misses: Sequence[NearMiss] = ()
    if "ragged_dot_general" in graph.primitives:
        from autopallas.patterns.grouped_matmul.recognise import grouped

        matches, misses = grouped(graph, alive, assume_finite)
    dense: list[Match] = []
    missed: list[NearMiss] = []
    with contained():
        dense, missed = mixture_of_experts.find(graph, alive, assume_finite)
    return sorted([*matches, *dense], key=lambda match: match.results[0]), [*misses, *missed]
