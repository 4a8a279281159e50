"""Finds mixtures of experts; what reads one is imported by programs that have a sum that may be one."""

from __future__ import annotations

from autopallas.faults import contained
from autopallas.graph import Graph
from autopallas.patterns.match import Match, NearMiss
from autopallas.patterns.mixture_of_experts.candidates import candidates
from autopallas.patterns.mixture_of_experts.token_loops import one_by_one
from autopallas.patterns.mixture_of_experts.unrolled_experts import written_out

__all__ = ["find"]


def find(graph: Graph, alive: frozenset[int], assume_finite: bool) -> tuple[list[Match], list[NearMiss]]:
    """Finds every mixture in a graph in which every expert computes every token, and the near misses."""
    matches: dict[int, Match] = {}
    misses: dict[int, NearMiss] = {}
    products: set[int] = set()
    if nodes := candidates(graph, alive):
        from autopallas.patterns.mixture_of_experts.recognise import dense

        matches, misses, products = dense(graph, nodes, alive, assume_finite)
    places: dict[str, NearMiss] = {}  # a sum that is written in parts is one miss
    for root, miss in misses.items():
        if root not in matches:
            places.setdefault(miss.location, miss)
    with contained():
        for miss in one_by_one(graph, alive):
            if miss.value not in matches and not any(miss.value in match.replaced for match in matches.values()):
                places.setdefault(miss.location, miss)
    with contained():
        for miss in written_out(graph, alive, products):
            places.setdefault(miss.location, miss)
    return [matches[root] for root in sorted(matches)], list(places.values())
