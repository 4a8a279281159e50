"""Finds linear attention; what reads one is imported by programs that may have one."""

from __future__ import annotations

from autopallas.graph import Graph
from autopallas.patterns.linear_attention.candidates import candidates
from autopallas.patterns.match import Match, NearMiss

__all__ = ["find"]


def find(graph: Graph, assume_finite: bool = True) -> tuple[list[Match], list[NearMiss]]:
    """Finds every causal linear attention in a graph, and the near misses."""
    nodes = candidates(graph) if assume_finite else []
    if not nodes:
        return [], []
    from autopallas.patterns.linear_attention.recognise import found

    return found(graph, nodes)
