"""Types of arrays on meshes: how they are sharded over explicit axes, and over which manual axes they vary."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.typing import DTypeLike

from autopallas.compat import MeshLike, Shaped, ShapedArray

__all__ = [
    "array_type",
    "axis_types",
    "cotangent_like",
    "divided_like",
    "explicit_sharding",
    "invariant_type",
    "lowered_on_mesh_of",
    "mesh_in_force",
    "on_mesh_of",
    "set_mesh",
    "shape_of",
    "typed_like",
    "varied_alike",
    "varying_axes",
    "whole_type",
]

Value = TypeVar("Value")


def explicit_sharding(aval: object) -> NamedSharding | None:
    """Returns the sharding in an array's type if its mesh has explicit axes; otherwise None."""
    sharding = getattr(aval, "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    if mesh is None or mesh.empty or jax.sharding.AxisType.Explicit not in mesh.axis_types:
        return None
    return sharding


def axis_types(aval: object) -> tuple[AxisType, ...]:
    """Returns the types of the axes of the mesh in an array's type; none where there is no mesh."""
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    return () if mesh is None or mesh.empty else tuple(mesh.axis_types)


def shape_of(aval: Shaped) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of an array, and its sharding if its type has explicit mesh axes."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=explicit_sharding(aval))


def typed_like(aval: Shaped) -> jax.ShapeDtypeStruct:
    """Like :func:`shape_of`, but keeps an automatic mesh too, since derivatives are written differently on one."""
    sharding = getattr(aval, "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    if mesh is None or mesh.empty:
        return shape_of(aval)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)


def cotangent_like(aval: Shaped) -> jax.ShapeDtypeStruct:
    """Like :func:`typed_like`, of an array's cotangent: what is yet to be summed over explicit mesh axes has one that
    is the same along them, and the other way round."""
    typed = typed_like(aval)
    sharding = explicit_sharding(typed)
    if sharding is None or not (sharding.spec.unreduced or sharding.spec.reduced):
        return typed
    spec = sharding.spec
    turned = jax.sharding.PartitionSpec(*spec.partitions, unreduced=spec.reduced, reduced=spec.unreduced)
    return jax.ShapeDtypeStruct(typed.shape, typed.dtype, sharding=sharding.update(spec=turned))


def array_type(
    shape: Sequence[int], dtype: DTypeLike, operands: Sequence[Shaped], like: Shaped | None = None
) -> ShapedArray:
    """Returns the type of an array computed from ``operands``.

    It varies over every manual mesh axis that they vary over.  Over explicit mesh axes it is sharded as ``like``, which
    has its shape, or its shape without leading axes.
    """
    inside: list[Any] = [a for a in operands if hasattr(a, "manual_axis_type") and a.manual_axis_type.varying]
    sharding = explicit_sharding(like)
    if sharding is not None and like is not None:
        further = [None] * (len(shape) - len(like.shape))
        sharding = sharding.update(spec=jax.sharding.PartitionSpec(*further, *sharding.spec))
    if not inside:
        return ShapedArray(tuple(shape), dtype, **({} if sharding is None else {"sharding": sharding}))
    varying = frozenset().union(*(a.manual_axis_type.varying for a in inside))
    if sharding is None:  # the sharding names the mesh whose axes these are
        sharding = inside[0].sharding.update(spec=jax.sharding.PartitionSpec(*[None] * len(shape)))
    varied: ShapedArray = inside[0].update(
        shape=tuple(shape),
        dtype=dtype,
        weak_type=False,
        sharding=sharding,
        manual_axis_type=type(inside[0].manual_axis_type)(varying=varying),
    )
    return varied


def divided_like(x: jax.Array, like: object) -> jax.Array:
    """Returns ``x`` with the sharding that a type has over explicit axes; unchanged if the type has none."""
    wanted = explicit_sharding(like)
    if wanted is None or explicit_sharding(jax.typeof(x)) == wanted:
        return x
    result: jax.Array = jax.sharding.reshard(x, wanted)
    return result


def varying_axes(avals: Sequence[object]) -> frozenset[str]:
    """Returns the manual mesh axes over which any of some arrays varies, by their types."""
    found = frozenset[str]()
    for aval in avals:  # of most programs none
        kind = getattr(aval, "manual_axis_type", None)
        if kind is not None and kind.varying:
            found |= kind.varying
    return found


def varied_alike(arrays: Sequence[Value], operands: Sequence[object]) -> list[Value]:
    """Returns arrays that vary over every manual axis over which any of ``operands`` varies.

    The transpose of that sums cotangents over the axes which are new.
    """
    axes = varying_axes(list(map(jax.typeof, operands)))

    def varied(x: Value) -> Value:
        missing = tuple(sorted(axes - varying_axes([jax.typeof(x)])))
        return cast("Value", jax.lax.pcast(cast("jax.Array", x), missing, to="varying")) if missing else x

    return list(map(varied, arrays)) if axes else list(arrays)


def invariant_type(aval: ShapedArray) -> ShapedArray:
    """Returns an array's type, changed to be invariant along every manual mesh axis."""
    kind = getattr(aval, "manual_axis_type", None)
    return aval.update(manual_axis_type=type(kind)()) if kind is not None and kind.varying else aval


def whole_type(aval: ShapedArray) -> ShapedArray:
    """Like :func:`invariant_type`, but also removes explicit mesh axes, since there is only one device then."""
    if explicit_sharding(aval) is not None:
        return ShapedArray(aval.shape, aval.dtype)
    return invariant_type(aval)


def on_mesh_of(avals: Sequence[object]) -> AbstractContextManager[object]:
    """Returns a context with the mesh of some arrays in force, as it is where a program computes with them."""
    meshes = (getattr(getattr(aval, "sharding", None), "mesh", None) for aval in avals)
    mesh = next((m for m in meshes if isinstance(m, jax.sharding.AbstractMesh) and not m.empty), None)
    if mesh is None or mesh == jax.sharding.get_abstract_mesh():
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh)


def lowered_on_mesh_of(avals: Sequence[object]) -> AbstractContextManager[object]:
    """Returns the same context, but an empty mesh where there is none: JAX lowers under one, and finds there again what
    was traced under one before."""
    meshes = [getattr(getattr(aval, "sharding", None), "mesh", None) for aval in avals]
    if jax.sharding.get_abstract_mesh().empty and all(mesh is None or mesh.empty for mesh in meshes):
        return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))
    return on_mesh_of(avals)


def mesh_in_force() -> Mesh | None:
    """Returns the mesh of ``jax.set_mesh``, or None."""
    mesh: Mesh = jax.sharding.get_mesh()
    return None if mesh.empty else mesh


def set_mesh(mesh: MeshLike | None) -> AbstractContextManager[object]:
    """Returns a context with a mesh in force; for None, the present one stays in force."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(cast(Mesh, mesh))
