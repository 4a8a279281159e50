"""Finds RMSNorm, rows divided by the root of their mean square, in any spelling (:mod:`row_moments`)."""

from __future__ import annotations

from autopallas.graph import Graph
from autopallas.kernels.rms_norm.operation import OPERATION, RmsNormSpec
from autopallas.patterns.match import Match, NearMiss
from autopallas.patterns.residual_sums import with_residual as widened
from autopallas.patterns.row_moments import found_normalisations

__all__ = ["find", "widened"]


def find(graph: Graph, assume_finite: bool = True) -> tuple[list[Match], list[NearMiss]]:
    """Finds every RMSNorm in a graph, and the near misses."""
    return found_normalisations(graph, OPERATION.name, RmsNormSpec, centred=False)
