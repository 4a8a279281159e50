"""Computes again, for a backward, what is elementwise and would be kept for it from the forward.

The forward of a train step leaves its backward several arrays that follow from one of them, element by element: from
what goes into an activation follow the activation, which the gradient of the next weight reads, and its derivative;
from the rows that are normalised follow the normalised ones, and what their scale and shift make of them.  One of these
arrays is kept instead, and the others are computed anew where the backward first reads one of them, as
``jax.checkpoint`` does around functions that a user chooses [1].  So is it with the arrays that a scan over layers
stacks for that of the backward.

[1] Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import is_

from autopallas import jaxprs
from autopallas.compat import ClosedJaxpr, JaxprLike
from autopallas.graph.edit import Edit, rebuild
from autopallas.graph.flatten import Body, flatten
from autopallas.report.records import Rematerialised
from autopallas.rewrite.rematerialisation.conditions import Extent
from autopallas.rewrite.rematerialisation.kept import Kept
from autopallas.rewrite.rematerialisation.stacks import with_less_stacked

__all__ = ["rematerialise"]

_LOOPS = frozenset({"scan", "while"})
_LEAST_GAIN = 0.05
"""Part of the largest number of bytes that are needed at once, as estimated, by which it has to be smaller at least."""


def rematerialise(
    program: ClosedJaxpr, extent: Extent = "everywhere", platform: str = "cpu"
) -> tuple[ClosedJaxpr, tuple[Rematerialised, ...]]:
    """Returns a program that computes elementwise values again where it would have kept them, and which these are.

    Args:
      program: flat, but for its loops, in which the same is done.
      extent: where this is done.
      platform: what the program is for, since compilers differ in what keeps equations apart that are equal.

    Returns:
      The program as it is, and an empty tuple, where the memory that it needs would hardly be less.
    """
    told: list[Rematerialised] = []
    root = flatten(program)
    found = _changed(rebuild(root, dict.fromkeys(_loops(root), Edit())), told, extent, platform)
    assert isinstance(found, ClosedJaxpr)
    return (found, tuple(told)) if told else (program, ())


def _loops(body: Body) -> Iterator[Body]:
    """Yields a body and those of loops in it, but not those of loops in anything else."""
    yield body
    for position, children in body.children.items():
        if body.equations[position].primitive.name in _LOOPS:
            for child in children:
                yield from _loops(child.body)


def _changed(program: JaxprLike, told: list[Rematerialised], extent: Extent, platform: str) -> JaxprLike:
    jaxpr, consts = jaxprs.open_jaxpr(program)
    equations = [
        jaxprs.with_bodies(e, lambda body: _changed(body, told, extent, platform)) if e.primitive.name in _LOOPS else e
        for e in jaxpr.eqns
    ]
    stacked, records = with_less_stacked(jaxpr, equations, extent == "fast stacks")
    if records and sum(one.bytes for one in records) >= _LEAST_GAIN * Kept(jaxpr, equations).most_bytes():
        equations = stacked
        told += records
    kept = Kept(jaxpr, equations) if extent == "everywhere" else None
    if kept is not None and (groups := kept.groups()):
        again = kept.rewritten(groups, platform)
        if Kept(jaxpr, again).most_bytes() <= (1 - _LEAST_GAIN) * kept.most_bytes():
            equations = again
            told += map(kept.record, groups)
    if len(equations) == len(jaxpr.eqns) and all(map(is_, equations, jaxpr.eqns)):
        return program
    return jaxprs.rebuild(program, jaxpr.constvars, consts, jaxpr.invars, jaxpr.outvars, equations)
