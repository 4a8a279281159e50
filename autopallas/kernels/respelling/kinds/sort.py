"""Sorts of floats through integers that have the same order, and of what is sorted along with a key by its places.

JAX compares floats by several operations, so that NaNs come last and -0.0 equals 0.0.  Integers of the same order are
compared by one.  Of several operands XLA calls a function for each comparison on CPUs, which it inlines for one: so a
key of up to 32 bits and its place stand in one integer of 64, by which the operands are picked.  Equal keys keep their
order, since their places differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopallas.compat import Dtype
from autopallas.graph import Graph, Node
from autopallas.kernels.respelling.kind import Found, Kind, Sample
from autopallas.kernels.respelling.spec import RespellingSpec
from autopallas.numerics.classes import Numerics

__all__ = ["KIND"]


def _match(graph: Graph, node: Node) -> Found | None:
    """Returns a sort by one floating key, with or without further operands, or by an integer of up to 32 bits with
    some."""
    params = node.equation.params
    first = graph.dtype(node.inputs[0])
    packed = len(node.inputs) > 1 and jnp.issubdtype(first, jnp.integer) and _packs(first)
    if params["num_keys"] != 1 or not (packed or jnp.issubdtype(first, jnp.floating)):
        return None
    shape = graph.shape(node.inputs[0])
    if any(n in graph.literals for n in node.inputs) or 0 in shape or shape[params["dimension"]] < 2:
        return None
    key = node.outputs[0]
    read = len(node.inputs) == 1 or bool(graph.users.get(key)) or key in graph.returned
    results = node.outputs if read else node.outputs[1:]
    parameters = (("dimension", params["dimension"]), ("key", read), ("stable", bool(params["is_stable"])))
    return Found(parameters, node.inputs, results)


def _original(spec: RespellingSpec, *operands: jax.Array) -> list[jax.Array]:
    found = lax.sort(operands, cast(int, spec["dimension"]), cast(bool, spec["stable"]), 1)
    return list(found if spec["key"] else found[1:])


def _respelt(spec: RespellingSpec, *operands: jax.Array) -> list[jax.Array]:
    # Along another axis than the last XLA's CPU compiler copies one element after the other, each from far away.
    axis = cast(int, spec["dimension"])
    found = _sorted(spec, *(jnp.moveaxis(x, axis, -1) for x in operands))
    return [jnp.moveaxis(x, -1, axis) for x in found]


def _sorted(spec: RespellingSpec, x: jax.Array, *others: jax.Array) -> Sequence[jax.Array]:
    """Returns the results for operands that are sorted along their last axis."""
    stable = cast(bool, spec["stable"])
    if not others:
        return [_value(lax.sort(_key(x, equal_zeros=False), -1, stable, 1), x.dtype)]
    carried = (x, *others) if spec["key"] else others
    if _packs(x.dtype):
        places = _places(x)
        return [jnp.take_along_axis(other, places, -1, mode="promise_in_bounds") for other in carried]
    return lax.sort((_key(x, equal_zeros=True), *carried), -1, stable, 1)[1:]


def _packs(dtype: Dtype) -> bool:
    """Returns whether a key and its place fit into one integer."""
    return np.dtype(dtype).itemsize <= 4


def _places(x: jax.Array) -> jax.Array:
    """Returns where along the last axis each of the sorted elements comes from."""
    key = _key(x, equal_zeros=True) if jnp.issubdtype(x.dtype, jnp.floating) else _signed(x)
    with jax.enable_x64(True):
        place = lax.broadcasted_iota(jnp.int64, x.shape, x.ndim - 1)
        half = jnp.asarray(32, jnp.int64)
        packed = lax.shift_left(key.astype(jnp.int64), half) | place
        found = lax.sort(packed, -1, is_stable=False)
        return (found & jnp.asarray(2**32 - 1, jnp.int64)).astype(jnp.int32)


def _integer(dtype: Dtype) -> Dtype:
    return np.dtype(f"int{8 * np.dtype(dtype).itemsize}")


def _flipped(bits: jax.Array) -> jax.Array:
    """Reverses the order of negative numbers, which floats have by their magnitude; its own inverse."""
    width = 8 * bits.dtype.itemsize - 1
    largest = jnp.asarray(jnp.iinfo(bits.dtype).max, bits.dtype)
    return bits ^ (lax.shift_right_arithmetic(bits, jnp.asarray(width, bits.dtype)) & largest)


def _key(x: jax.Array, equal_zeros: bool) -> jax.Array:
    """Returns integers in the order of floats, every NaN the last."""
    if equal_zeros:
        x = jnp.where(x == 0, jnp.zeros((), x.dtype), x)
    return _flipped(lax.bitcast_convert_type(jnp.where(x != x, jnp.full((), jnp.nan, x.dtype), x), _integer(x.dtype)))


def _signed(x: jax.Array) -> jax.Array:
    """Returns signed integers in the order of integers."""
    if x.dtype != jnp.uint32:
        return x.astype(jnp.int32)
    return lax.bitcast_convert_type(x ^ jnp.asarray(1 << 31, jnp.uint32), jnp.int32)


def _value(key: jax.Array, dtype: Dtype) -> jax.Array:
    return lax.bitcast_convert_type(_flipped(key), dtype)


def _numerics(spec: RespellingSpec) -> Numerics:
    """Returns "identical" where the floats are carried along, in their own order.  Floats that are sorted alone come
    back from integers, -0.0 before 0.0; equal ones may change places where the sort is not stable."""
    return "identical" if len(spec.operands) > 1 and spec["stable"] else "reordered"


# ---------------------------------------------------------------------- evidence


def _feature(spec: RespellingSpec) -> str:
    """Returns how many operands are sorted together, and how long the axis is."""
    shape, _ = spec.operands[0]
    length = "short" if shape[cast(int, spec["dimension"])] < 32 else "long"
    together = len(spec.operands) - (0 if spec["key"] else 1)
    if len(spec.operands) == 1:
        return f"alone, {length} axis"
    packed = "" if _packs(spec.operands[0][1]) else " in 64 bits"
    kind = "" if jnp.issubdtype(spec.operands[0][1], jnp.floating) else "integers "
    return f"{kind}carrying {together}{packed}, {length} axis"


def _fill(spec: RespellingSpec, random: np.random.Generator, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Numbers the further integers along the axis, as for an argsort, and draws keys that are integers from all."""
    axis = cast(int, spec["dimension"])

    def one(array: np.ndarray) -> np.ndarray:
        if array.dtype.kind not in "iu":
            return array
        along = np.arange(array.shape[axis], dtype=array.dtype)
        return np.broadcast_to(along.reshape([-1 if d == axis else 1 for d in range(array.ndim)]), array.shape).copy()

    key = arrays[0]
    if key.dtype.kind in "iu":
        limits = np.iinfo(key.dtype)
        key = random.integers(limits.min, limits.max, key.shape, key.dtype, endpoint=True)
    return [key, *map(one, arrays[1:])]


_INTEGERS: tuple[tuple[int, ...], ...] = ((1024,), (8192,), (65536,), (524288,), (64, 4096), (4096, 8), (65536, 8))
"""Shapes of samples whose keys are integers."""


def _samples() -> Iterator[tuple[str, Sample]]:
    for shape in ((1, 32000), (4096, 8), (16, 32000), (65536, 8), (128, 50257), (524288, 16)):
        given = (jax.ShapeDtypeStruct(shape, jnp.float32),)
        name = f"{shape[0]}x{shape[1]}"
        yield f"sort-{name}", Sample(lambda x: lax.sort(x), given)
        yield f"argsort-{name}", Sample(lambda x: jnp.argsort(x), given)
        yield f"both-{name}", Sample(lambda x: lax.sort_key_val(x, lax.broadcasted_iota(jnp.int32, x.shape, 1)), given)
    for own in _INTEGERS:
        bits, ids = (jax.ShapeDtypeStruct(own, dtype) for dtype in (jnp.uint32, jnp.int32))
        name = "x".join(map(str, own))
        yield f"argsort-integers-{name}", Sample(lambda x: jnp.argsort(x), (ids,))
        yield (
            f"shuffle-{name}",
            Sample(lambda x, y: lax.sort_key_val(x, y)[1], (bits, ids)),
        )


KIND = Kind(
    name="sort",
    primitives=("sort",),
    numerics=_numerics,
    instead="a sort of integers that have the order of the floats, and of their places where others are sorted along",
    match=_match,
    original=_original,
    respelt=_respelt,
    feature=_feature,
    samples=_samples,
    elsewhere_from=9.0,  # one of 8.75 with AVX-512 and JAX 0.10 takes 2.6 times as long with AVX2 and 0.12
    fill=_fill,
)
