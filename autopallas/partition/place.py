"""Gives each site of a program over several devices its place: which device computes which part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jax.sharding import AxisType

from autopallas.graph import Graph
from autopallas.kernels.placed import PlacedSite
from autopallas.partition.assign import Indivisible, assign
from autopallas.partition.shardings import Shardings, spread
from autopallas.partition.survey import Found, survey
from autopallas.patterns.match import Match

__all__ = ["placed"]

_UNKNOWN = (
    "the program is divided among several devices, and how is not known here: that is seen where optimize is the "
    "outermost transformation, around jit"
)


def placed(
    program: Any, graph: Graph, matches: Sequence[Match], shardings: Shardings | None, strict: bool
) -> list[Match]:
    """The matches with placed sites where the compiler divides them; with an obstacle where that is not possible.

    Args:
      program: the original, as a closed jaxpr.
      graph: the same.
      matches: the sites.
      shardings: of its arguments and results; None where they are not known.
      strict: whether a failure in here is raised.
    """
    matches = [_hindered(m, reason) if (reason := _unsupported(_mesh(m))) else m for m in matches]
    concerned = [m for m in matches if not m.obstacle and _divisible_axes(m, shardings)]
    if not concerned and not (shardings is None and matches and spread(program)):
        return list(matches)
    if shardings is None:
        return [m if m.obstacle or _divisible_axes(m, None) is None else _hindered(m, _UNKNOWN) for m in matches]
    parts = [part for match in concerned for part in match.passes]
    try:
        found = iter(survey(program, graph, parts, shardings))
    except Exception as error:
        if strict:
            raise
        reason = f"how it is divided among devices could not be found out: {type(error).__name__}: {error}"
        return [_hindered(m, reason.split("\n")[0]) if m in concerned else m for m in matches]
    result = []
    for match in matches:
        if match in concerned:
            own = [next(found) for _ in match.passes]
            try:
                first, *then = (_placed(part, f, shardings) for part, f in zip(match.passes, own, strict=True))
                match = replace(first, then=tuple(then))
            except Indivisible as reason:
                match = _hindered(match, f"divided among devices as it is, no kernel can compute it: {reason}")
        result.append(match)
    return result


def _hindered(match: Match, reason: str) -> Match:
    return replace(match, obstacle=reason)


def _unsupported(mesh: Any) -> str:
    """What about a mesh is not supported, or an empty string."""
    if mesh is None or not _over(mesh):
        return ""
    if AxisType.Explicit in mesh.axis_types:
        return "its mesh has explicit axes, for which sites are not divided"
    if AxisType.Manual in mesh.axis_types:
        return "a shard_map over some of the mesh's axes is around it, and sites in it are not divided further"
    return ""


def _mesh(match: Match) -> Any:
    meshes = (getattr(getattr(a, "sharding", None), "mesh", None) for a in match.original.in_avals)
    return next((m for m in meshes if m is not None and not m.empty), None)


def _divisible_axes(match: Match, shardings: Shardings | None) -> frozenset[str] | None:
    """The mesh axes that the compiler divides a site over; None where a ``shard_map`` around it leaves none."""
    mesh = _mesh(match)
    if mesh is None:
        mesh = None if shardings is None else shardings.mesh
        return frozenset() if mesh is None else _over(mesh)
    left = _over(mesh)
    return left or (None if AxisType.Manual in mesh.axis_types else left)


def _over(mesh: Any) -> frozenset[str]:
    axes = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return frozenset(name for name, size, kind in axes if size > 1 and kind != AxisType.Manual)


def _placed(part: Match, found: Found, shardings: Shardings) -> Match:
    mesh = shardings.mesh
    if not hasattr(part.site, "divided"):
        raise Indivisible(f"{part.op} has no rule for it")
    sizes = dict(mesh.shape)
    shapes = [a.shape for a in part.original.in_avals]
    division = assign(part.site.parts(), part.site.sizes, shapes, found, sizes)
    return replace(part, site=PlacedSite(part.site, division, mesh))
