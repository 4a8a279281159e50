"""Finds LayerNorm, centred rows divided by their standard deviation, in any spelling (:mod:`row_moments`)."""

from __future__ import annotations

from autopallas.graph import Graph
from autopallas.kernels.layer_norm.operation import OPERATION, LayerNormSpec
from autopallas.patterns.match import Match, NearMiss
from autopallas.patterns.residual_sums import with_residual as widened
from autopallas.patterns.row_moments import found_normalisations

__all__ = ["find", "widened"]


def find(graph: Graph, assume_finite: bool = True) -> tuple[list[Match], list[NearMiss]]:
    """Finds every LayerNorm in a graph, and the near misses."""
    return found_normalisations(graph, OPERATION.name, LayerNormSpec, centred=True)
