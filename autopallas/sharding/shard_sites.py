"""Shards each site of a program over several devices: decides which device computes which part."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeGuard

import jax
from jax.sharding import AxisType

from autopallas import array_types
from autopallas.compat import ClosedJaxpr, MeshLike, Shaped
from autopallas.errors import one_line
from autopallas.faults import contained
from autopallas.graph import Graph
from autopallas.patterns.match import Match
from autopallas.sharding.assignment import Indivisible, assign
from autopallas.sharding.call_shardings import Shardings, spread
from autopallas.sharding.communication import communicates_no_more
from autopallas.sharding.propagation import Divided, Found, propagated
from autopallas.sites.calls import SiteDescription
from autopallas.sites.division import Divisible, Division
from autopallas.sites.sharded_site import ShardedSite, divisible

__all__ = ["shard_sites"]

_UNKNOWN = (
    "the program is divided among several devices, and how is not known here: that is seen where optimize is the "
    "outermost transformation, around jit"
)

_WHOLE = "the program is divided among several devices, and there is no rule by which this site could be"


def shard_sites(
    program: ClosedJaxpr, graph: Graph, matches: Sequence[Match], shardings: Shardings | None, strict: bool
) -> list[Match]:
    """Returns the matches, with sharded sites where the compiler shards them; with an obstacle if that is impossible.

    Args:
      program: the original, as a closed jaxpr.
      graph: the same program as a graph.
      matches: the sites.
      shardings: the shardings of its arguments and results; None where they are not known.
      strict: whether to raise failures that occur here.
    """
    outside = None if shardings is None else shardings.mesh

    def typed(match: Match) -> Match:
        if reason := _unsupported(match, outside):
            return _with_obstacle(match, reason)
        if _divisible_axes(match, shardings) and not all(hasattr(part.site, "shardable_axes") for part in match.passes):
            return _with_obstacle(match, _WHOLE)
        return _typed(match, graph, shardings) if _is_explicit(match) else match

    matches = _each(matches, typed)
    concerned = [m for m in matches if _is_concerned(m) and _divisible_axes(m, shardings)]
    if not concerned and not (shardings is None and matches and spread(program)):
        return list(matches)
    if shardings is None:
        left = [_is_concerned(m) and _divisible_axes(m, None) is not None for m in matches]
        return [_with_obstacle(m, _UNKNOWN) if own else m for m, own in zip(matches, left, strict=True)]
    known = shardings

    def looked_up(some: Sequence[Match]) -> dict[Match, list[Found]]:
        found = iter(propagated(program, graph, [part for match in some for part in match.passes], known))
        return {match: [next(found) for _ in match.passes] for match in some}

    found: dict[Match, list[Found]] = {}
    try:
        found = looked_up(concerned)
    except Exception:
        if strict:
            raise  # otherwise each match is looked up alone, so that only the faulty one fails

    def divided(match: Match) -> Match:
        if match not in concerned:
            return match
        own = found[match] if match in found else looked_up([match])[match]
        mesh = _mesh(match)
        # Where its axes are not all automatic, the mesh of the operands' types applies, as inside a shard_map over
        # some axes.  Otherwise the arguments' mesh applies, where it is known, since it names the devices.
        named = mesh is not None and set(mesh.axis_types) != {AxisType.Auto}
        entered = mesh is not None and outside is not None and mesh.axis_types != outside.axis_types  # by auto_axes
        match = _divided(match, own, mesh if named or entered or outside is None else outside)
        return _as_typed(match, graph) if mesh is not None and AxisType.Explicit in mesh.axis_types else match

    return _each(matches, divided)


def _each(matches: Sequence[Match], work: Callable[[Match], Match]) -> list[Match]:
    """Applies ``work`` to each match; a match on which it fails gets an obstacle."""
    result = []
    for match in matches:
        with contained(match.location, match.op, "partition") as attempt:
            match = work(match)
        if attempt.error:
            match = _with_obstacle(match, f"how it is divided among devices could not be found out: {attempt.error}")
        result.append(match)
    return result


def _with_obstacle(match: Match, reason: str) -> Match:
    return replace(match, obstacle=reason)


def _unsupported(match: Match, outside: MeshLike | None) -> str:
    """Returns what is not supported about the mesh of a site's operands or of the program's arguments, or ""."""
    mesh = _mesh(match)
    for part in match.passes:
        types: dict[str, set[AxisType]] = {}
        for m in _meshes([*part.original.in_avals, *part.original.out_avals]):
            for name, kind in zip(m.axis_names, m.axis_types, strict=True):
                types.setdefault(name, set()).add(kind)
        if any(kinds >= {AxisType.Auto, AxisType.Explicit} for kinds in types.values()):
            return "its operands and results are on meshes with axes of different types"
    if mesh is None and outside is not None and AxisType.Explicit in outside.axis_types and _over(outside):
        return "the program's mesh has explicit axes, and the types of the site's operands do not name it"
    return ""


def _mesh(match: Match) -> MeshLike | None:
    return next(iter(_meshes(match.original.in_avals)), None)


def _meshes(avals: Sequence[object]) -> list[MeshLike]:
    meshes = (getattr(getattr(a, "sharding", None), "mesh", None) for a in avals)
    return [m for m in meshes if m is not None and not m.empty]


def _divisible_axes(match: Match, shardings: Shardings | None) -> frozenset[str] | None:
    """Returns the mesh axes that the compiler may shard a site over; None if a ``shard_map`` around it leaves none."""
    mesh = _mesh(match)
    if mesh is None:
        mesh = None if shardings is None else shardings.mesh
        return frozenset() if mesh is None else _over(mesh)
    left = _over(mesh)
    return left or (None if AxisType.Manual in mesh.axis_types else left)


def _over(mesh: MeshLike) -> frozenset[str]:
    axes = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return frozenset(name for name, size, kind in axes if size > 1 and kind != AxisType.Manual)


def _is_explicit(match: Match) -> bool:
    """Returns whether the types of a site's operands tell their sharding."""
    mesh = _mesh(match)
    return not match.obstacle and mesh is not None and _kinds(mesh) == {AxisType.Explicit}


def _kinds(mesh: MeshLike) -> set[AxisType]:
    """Returns the types of the axes that a site may be sharded over."""
    return {kind for kind in mesh.axis_types if kind != AxisType.Manual}


def _is_concerned(match: Match) -> bool:
    return not match.obstacle and not isinstance(match.site, ShardedSite)


def _typed(match: Match, graph: Graph, shardings: Shardings | None) -> Match:
    """Shards a match whose operands' types tell their sharding; adds an obstacle where that is impossible."""
    mesh = _mesh(match)
    found = [_by_types(part) for part in match.passes]
    assert mesh is not None
    if not _over(mesh):  # no axis has several devices, so the site also works without being sharded
        alone = _divided(match, found, mesh)
        return match if alone.obstacle else alone
    if shardings is None and jax.process_count() > 1:
        return _with_obstacle(match, _UNKNOWN)
    return _divided(_with_typed_gradients(match, graph), found, mesh)


def _with_typed_gradients(match: Match, graph: Graph) -> Match:
    """Adds an obstacle to a match if a gradient is sharded in another way than its operand."""
    for part in match.passes:
        for backward in part.backwards:
            types = [(part.original.in_avals[i], graph.avals[number]) for i, number in backward.gradients]
            if any(array_types.explicit_sharding(a) != array_types.explicit_sharding(b) for a, b in types):
                return _with_obstacle(match, "a gradient is divided in another way than what it is the gradient of")
    return match


def _as_typed(match: Match, graph: Graph) -> Match:
    """Adds an obstacle to a match if its automatic sharding disagrees with the explicit types of its results."""
    match = _with_typed_gradients(match, graph)
    for part in match.passes if not match.obstacle else ():
        types = [array_types.explicit_sharding(a) for a in part.original.out_avals]
        assert isinstance(part.site, ShardedSite)
        if list(part.site.result_shardings()) != types:
            return _with_obstacle(match, "its results are divided over explicit axes in another way than it is")
    return match


def _by_types(part: Match) -> Found:
    original, prelude = part.original, getattr(part.site, "prelude", None)
    operands, results = ([_dimensions(a) for a in avals] for avals in (original.in_avals, original.out_avals))
    between: list[Divided | None] = []
    if prelude is not None and prelude.witness is not None:
        inside = [_dimensions(a) for a in prelude.witness.out_avals[len(results) :]]
        operands, between = inside[: len(prelude.reads)], inside[len(prelude.reads) :]
    elif prelude is not None:
        given = list(map(array_types.shape_of, original.in_avals))
        # JAX refers weakly to the function, which an object without a dictionary does not allow.
        operands = list(map(_dimensions, jax.eval_shape(lambda arrays: prelude(arrays), given)))
    return Found(dict(enumerate(operands)), dict(enumerate(between)), dict(enumerate(results)), exact=True)


def _dimensions(aval: Shaped) -> Divided | None:
    sharding = array_types.explicit_sharding(aval)
    if sharding is None:
        return ((),) * len(aval.shape)
    if sharding.spec.unreduced or sharding.spec.reduced:
        return None
    named = [*sharding.spec, *[None] * (len(aval.shape) - len(sharding.spec))]
    return tuple(() if axes is None else (axes,) if isinstance(axes, str) else tuple(axes) for axes in named)


def _divided(match: Match, found: Sequence[Found], mesh: MeshLike | None) -> Match:
    if match.obstacle:
        return match
    try:
        first, *then = (_sharded(part, f, mesh) for part, f in zip(match.passes, found, strict=True))
        return replace(first, then=tuple(then))
    except Indivisible as reason:
        return _with_obstacle(match, f"divided among devices as it is, no kernel can compute it: {reason}")


def _is_divisible(site: SiteDescription) -> TypeGuard[Divisible]:
    return hasattr(site, "per_device")


def _sharded(part: Match, found: Found, mesh: MeshLike | None) -> Match:
    if not _is_divisible(part.site):
        raise Indivisible(f"{part.op} has no rule for it")
    assert mesh is not None
    sizes = {axis: size for axis, size in mesh.shape.items() if axis in divisible(mesh)}
    whole = ShardedSite(part.site, Division(tuple(sizes.items()), ()), mesh)
    shapes = [a.shape for a in whole.given_types(part.original.in_avals)]

    def divided(site: Divisible, gathers: bool = False) -> ShardedSite:
        axes = site.shardable_axes()
        return replace(whole, site=site, division=assign(axes, site.sizes, shapes, found, sizes, gathers))

    try:
        return replace(part, site=divided(part.site))
    except Indivisible:
        further = part.site.operation.hook("sharded", "with_sharded_groups")
        apart = None if further is None or found.exact else further(part.site)
        if apart is None:
            raise
        # No rule tells whether the compiler sums partial results or gathers the operand, so both are tried.
        for site, gathers in ((apart, False), (part.site, True)):
            with contextlib.suppress(Indivisible):
                sharded = divided(site, gathers)
                if _communicates_no_more(part, sharded, found):
                    return replace(part, site=sharded)
        raise


def _communicates_no_more(part: Match, site: ShardedSite, found: Found) -> bool:
    try:
        return communicates_no_more(part, site, found)
    except Exception as error:
        reason = one_line(error)
        raise Indivisible(f"what it sends could not be found out: {reason}") from error
