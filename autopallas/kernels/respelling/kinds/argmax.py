"""Positions of the largest and smallest elements, as the first position that holds the extremum.

JAX computes them by a reduction of pairs, which CPUs do one by one.  Two plain reductions run on vectors: the extremum,
and the least position whose element is NaN, or else equals it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax

from autopallas.compat import JaxprEqn
from autopallas.kernels.respelling.kind import Kind, Sample, of_equation
from autopallas.kernels.respelling.spec import Plain, RespellingSpec

__all__ = ["KIND"]

_EXACT = 2**24
"""Positions up to which a float32 counts: reductions of floats are faster than those of integers."""
_WIDE, _NARROW = 16_000, 1_024
"""Elements behind an axis from which on an extremum is far away, and up to which axes of 32 to 63 were measured."""


def _parameters(equation: JaxprEqn) -> Mapping[str, Plain] | None:
    (operand,) = equation.invars
    axes, dtype = equation.params["axes"], operand.aval.dtype
    real = jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
    if not real or len(axes) != 1 or 0 in operand.aval.shape:
        return None
    index = str(jnp.dtype(equation.params["index_dtype"]))
    if operand.aval.shape[axes[0]] > jnp.iinfo(index).max:
        return None
    return {"function": equation.primitive.name, "axis": axes[0], "index_dtype": index}


def _original(spec: RespellingSpec, x: jax.Array) -> list[jax.Array]:
    function = lax.argmax if spec["function"] == "argmax" else lax.argmin
    return [function(x, cast(int, spec["axis"]), jnp.dtype(cast(str, spec["index_dtype"])))]


def _respelt(spec: RespellingSpec, x: jax.Array) -> list[jax.Array]:
    axis = cast(int, spec["axis"])
    extremum = (jnp.max if spec["function"] == "argmax" else jnp.min)(x, axis, keepdims=True)
    count = x.shape[axis]
    places = lax.broadcasted_iota(jnp.float32 if 2 * count <= _EXACT else jnp.int32, x.shape, axis)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return [jnp.min(jnp.where(x == extremum, places, count), axis).astype(cast(str, spec["index_dtype"]))]
    # A NaN comes before every extremum, which need not be NaN for that: of three axes XLA's CPU compiler drops some.
    ranked = jnp.where(x != x, places, jnp.where(x == extremum, places + count, 2 * count))
    found = jnp.min(ranked, axis)
    return [jnp.where(found < count, found, found - count).astype(cast(str, spec["index_dtype"]))]


# ---------------------------------------------------------------------- evidence


def _feature(spec: RespellingSpec) -> str:
    """Returns how long the axis is and where it stands; and whether so much lies behind it that the extremum of a row
    does not fit into the nearest cache, where with JAX 0.10 both reductions take twice as long as the original."""
    ((shape, dtype),) = spec.operands
    axis = cast(int, spec["axis"])
    behind = math.prod(shape[axis + 1 :])
    is_last, is_wide = axis == len(shape) - 1, behind > _WIDE
    if is_last or behind > _NARROW:
        length = "short" if shape[axis] < (32 if is_last else 64) else "long"
    else:
        length = next((name for name, most in (("short", 32), ("middle", 64)) if shape[axis] < most), "long")
    where = "last axis" if is_last else "other axis"
    floats = "floats" if jnp.issubdtype(dtype, jnp.floating) else "integers"
    return f"{floats}, {length} {where}{' of wide rows' if is_wide else ''}"


def _samples() -> Iterator[tuple[str, Sample]]:
    shapes = ((1, 32000), (64, 512), (4096, 8), (16, 32000), (128, 4096), (65536, 8), (128, 50257), (524288, 16))
    middle = ((32, 48, 48), (256, 48, 48))  # as in Viterbi decoding
    places = [*((shape, axis) for shape in shapes for axis in (0, 1)), *((shape, 1) for shape in middle)]
    for shape, axis in (*places, ((64, 17000), 0)):

        def function(x: jax.Array, axis: int = axis) -> jax.Array:
            return jnp.argmax(x, axis)

        name = f"{'x'.join(map(str, shape))}-{axis}"
        yield name, Sample(function, (jax.ShapeDtypeStruct(shape, jnp.float32),))


KIND = Kind(
    name="argmax",
    primitives=("argmax", "argmin"),
    numerics="identical",
    instead="the extremum, and the first position that holds it",
    match=of_equation(_parameters),
    original=_original,
    respelt=_respelt,
    feature=_feature,
    samples=_samples,
    # With AVX2 and JAX 0.10 five rows take 1.04 to 2.8 times as long that with AVX-512 and JAX 0.12 gain 1.3 to 6.
    elsewhere_from=math.inf,
)
