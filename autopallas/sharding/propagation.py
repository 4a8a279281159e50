"""Reads how Shardy would shard a program's values before the program is compiled: runs Shardy's propagation on the
lowered original, with marks on the sites' operands and results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import jax

from autopallas import array_types, compat
from autopallas.compat import ClosedJaxpr
from autopallas.compile.outside_trace import isolated
from autopallas.graph import Graph
from autopallas.patterns.match import Match
from autopallas.plan.decision import Decision
from autopallas.rewrite.sites import splice
from autopallas.sharding.call_shardings import Shardings

__all__ = ["Divided", "Found", "propagated"]

Divided: TypeAlias = tuple[tuple[str, ...], ...]
"""Mesh axes over which each dimension of an array is sharded."""


@dataclass(slots=True)
class Found:
    """Shardings of a site's operands, its results and intermediate values; None where uses differ or it is unknown.

    ``exact``: whether the results' shardings hold where the results are computed, not only where they are used.
    """

    operands: dict[int, Divided | None] = field(default_factory=dict)
    between: dict[int, Divided | None] = field(default_factory=dict)
    results: dict[int, Divided | None] = field(default_factory=dict)
    exact: bool = False


def propagated(program: ClosedJaxpr, graph: Graph, parts: Sequence[Match], shardings: Shardings) -> list[Found]:
    """Returns the shardings found for each part, in order.

    Args:
      program: the original, as a closed jaxpr.
      graph: the same program as a graph.
      parts: the sites, each pass on its own.
      shardings: the shardings of the program's arguments and results.
    """
    marked = splice(graph, [replace(p, then=()) for p in parts], [_numbered(i) for i in range(len(parts))])
    types = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s, weak_type=getattr(a, "weak_type", False))
        for a, s in zip(program.in_avals, shardings.arguments, strict=True)
    ]

    def lowered() -> list[tuple[str, Divided | None]]:
        mesh = shardings.mesh
        with array_types.set_mesh(mesh):
            results = list(shardings.results)
            function = jax.jit(compat.jaxpr_as_fun(marked), out_shardings=results if any(results) else None)
            return compat.propagated(function.trace(*types).lower())

    found = [Found() for _ in parts]
    for name, divided in isolated(lowered):
        number, kind, position = name.split()
        one = found[int(number)]
        places = {"operand": one.operands, "between": one.between, "result": one.results}[kind]
        if places.setdefault(int(position), divided) != divided:
            places[int(position)] = None
    return found


def _numbered(number: int) -> Decision:
    return Decision("applied", "", "", mark=number)
