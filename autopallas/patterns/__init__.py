"""One module per reference computation; each turns graph nodes into a Match or a NearMiss with a reason."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from autopallas.graph import Graph
from autopallas.graph.edit import surviving
from autopallas.patterns.match import Match, NearMiss

__all__ = ["Match", "NearMiss", "find"]

_PATTERNS = ("attention", "cross_entropy", "grouped_matmul")


def find(graph: Graph, ops: Iterable[str] | None, assume_finite: bool) -> tuple[list[Match], list[NearMiss]]:
    """All sites in a graph of the operations asked for (None: of every one), and what nearly was one."""
    matches: list[Match] = []
    misses: list[NearMiss] = []
    for name in _PATTERNS:
        if ops is None or name in ops:
            found, missed = importlib.import_module(f"autopallas.patterns.{name}").find(graph, assume_finite)
            matches += found
            misses += missed
    if matches and misses:  # what a site does in the program's place, its backward included, holds no near misses
        still = surviving(graph, {number for match in matches for number in match.replaced})
        misses = [miss for miss in misses if miss.value in still]
    return matches, misses
