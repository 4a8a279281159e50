"""The contents of a tile: what the programs of a specification give on it, and their derivatives.

Everything here is a function of arrays that broadcast against the tile [..., t, s], so that it can be called in a loop
of XLA's as well as inside a Pallas kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from autopallas.compat import Dtype
from autopallas.kernels.attention.schedule import TilePrograms
from autopallas.kernels.attention.spec import AttentionSpec, Weight
from autopallas.sites.elementwise import ElementwiseProgram

__all__ = [
    "Tile",
    "any_kept",
    "exponentials",
    "exponentials_vjp",
    "greatest",
    "halves",
    "heights",
    "logits",
    "narrow",
    "reciprocal",
    "row_maximum",
    "weighted",
    "weighted_vjp",
]

Array: TypeAlias = jax.Array


class Tile(NamedTuple):
    """Positions and side inputs of one tile, each of a shape that broadcasts against [..., t, s]."""

    query: Array
    key: Array
    sides: tuple[Array, ...]

    def floating(self, spec: AttentionSpec) -> tuple[Array, ...]:
        return tuple(x for x, s in zip(self.sides, spec.sides, strict=True) if s.differentiable)

    def with_floating(self, spec: AttentionSpec, floating: tuple[Array, ...]) -> Tile:
        values = iter(floating)
        sides = (next(values) if s.differentiable else x for x, s in zip(self.sides, spec.sides, strict=True))
        return self._replace(sides=tuple(sides))


def logits(spec: AttentionSpec, programs: TilePrograms, score: Array, here: Tile) -> Array:
    """What is exponentiated, but for the shift.

    A compiler may leave a product unrounded where the shift is taken from it in the same instruction, but not where the
    shift is found.  Of scores as large as a mask's fill nothing but that rounding would be left.
    """
    x = programs.score.evaluate(score, here.query, here.key, here.sides)
    x = jnp.broadcast_to(x, score.shape).astype(spec.accumulation_dtype)
    return jnp.where(x == x, x, jnp.nan) if programs.score.scales_last else x


def row_maximum(spec: AttentionSpec, programs: TilePrograms, score: Array, x: Array, here: Tile) -> Array:
    """max over the keys of :func:`heights`.  An increasing function of the score alone is applied to the highest score
    instead."""
    if programs.inner_weights:
        return jnp.max(heights(spec, programs.inner_weights, x, here), axis=-1, keepdims=True)
    if not programs.increasing:
        return jnp.max(x, axis=-1, keepdims=True)
    highest = jnp.max(score, axis=-1, keepdims=True)
    return programs.score.evaluate(highest, None, None, ()).astype(spec.accumulation_dtype)


def greatest(spec: AttentionSpec, program: ElementwiseProgram, score: Array, here: Tile) -> Array:
    """max over the keys of a program like the score's."""
    y = program.evaluate(score, here.query, here.key, here.sides)
    return jnp.max(jnp.broadcast_to(y, score.shape).astype(spec.accumulation_dtype), axis=-1, keepdims=True)


def heights(spec: AttentionSpec, weights: Sequence[Weight], x: Array, here: Tile) -> Array:
    """The logarithm of the size of exp(x) times weights, of which the greatest is subtracted: -inf for a key whose
    weight is 0, so that such a key, however great its x, takes nothing from the others.

    Of weights beyond exp(-83) and exp(83) in float32 the bound counts: what is left in the exponentials is in range.
    """
    if not weights:
        return x
    dtype = spec.accumulation_dtype
    farthest = _greatest_exponent(dtype) - 5
    size = jnp.zeros((1,) * x.ndim, dtype)
    for weight in weights:
        w = weight.program.evaluate(None, here.query, here.key, here.sides)
        if weight.kind == "where":
            size = jnp.where(w, size, -jnp.inf)
        else:
            magnitude = jnp.abs(w.astype(dtype))
            size = jnp.where(magnitude == 0, -jnp.inf, size + jnp.log(magnitude))
    bounded = jnp.minimum(jnp.maximum(size, -farthest), farthest)
    return jnp.where(size == -jnp.inf, -jnp.inf, x + bounded)


def halves(x: Array, shift: Array) -> Array:
    """exp((x - shift) / 2), two of which, with a weight between them, make an exponential.

    A key of weight 0 may have an x so far above the shift that its exponential is beyond the dtype.  Times the weight
    that is 0, and what the weight's derivative multiplies it with may be small enough to bring it back.
    """
    half = (x - shift) * 0.5
    # An infinite x stays that: the original's exponential times 0 is NaN too.
    return jnp.exp(jnp.where(half < jnp.inf, jnp.minimum(half, _greatest_exponent(x.dtype)), half))


def _greatest_exponent(dtype: DTypeLike) -> float:
    """What the exponential of a dtype is finite of, rounded down."""
    return float(np.floor(np.log(float(jnp.finfo(dtype).max))))


def exponentials(weights: Sequence[Weight], x: Array, shift: Array, here: Tile) -> Array:
    """exp(x - shift) times weights.

    Without weights the shift is the greatest x, or more.  What a compiler leaves unrounded in one of them and not in
    the other may make huge numbers differ the wrong way round.
    """
    if not weights:
        exponent = x - shift
        return jnp.exp(jnp.where(exponent > 0, 0, exponent))
    half = halves(x, shift)
    return weighted(weights, half, here) * half


def exponentials_vjp(
    spec: AttentionSpec, weights: Sequence[Weight], x: Array, shift: Array, here: Tile
) -> tuple[Array, Callable[[Array], tuple[Array, tuple[Array, ...]]]]:
    """:func:`exponentials`, and the map from their cotangent to those of x and of the side inputs of the weights."""
    if not weights:
        e = exponentials(weights, x, shift, here)
        return e, lambda cotangent: (e * cotangent, ())
    half = halves(x, shift)
    one_half, vjp = weighted_vjp(spec, weights, half, here)

    def pull(cotangent: Array) -> tuple[Array, tuple[Array, ...]]:
        dhalf, sides = vjp(half * cotangent)
        return half * dhalf, sides

    return one_half * half, pull


def reciprocal(total: Array) -> Array:
    """The factor of a row by its sum of exponentials.

    A row without any key has the sum 0.  Its probabilities are 0 by a mask, or no numbers; an infinite factor would
    turn the former into the latter, for every key that the row's cotangent reaches.
    """
    return jnp.where(total == 0, 1, 1 / total)


def weighted(weights: Sequence[Weight], p: Array, here: Tile) -> Array:
    for weight in weights:
        w = weight.program.evaluate(None, here.query, here.key, here.sides)
        p = jnp.where(w, p, 0) if weight.kind == "where" else p * w.astype(p.dtype)
    return p


def weighted_vjp(
    spec: AttentionSpec, weights: Sequence[Weight], p: Array, here: Tile
) -> tuple[Array, Callable[[Array], tuple[Array, tuple[Array, ...]]]]:
    """``p`` with its weights, and the map from that result's cotangent to those of ``p`` and the side inputs."""
    if not weights:
        return p, lambda cotangent: (cotangent, ())

    def apply(p: Array, floating: tuple[Array, ...]) -> Array:
        return weighted(weights, p, here.with_floating(spec, floating))

    result, vjp = jax.vjp(apply, p, here.floating(spec))
    return result, lambda cotangent: vjp(cotangent)


def any_kept(weights: Sequence[Weight], here: Tile, shape: tuple[int, ...]) -> Array:
    kept = jnp.ones((1,) * len(shape), bool)
    for weight in weights:
        if weight.kind == "where":
            kept = kept & weight.program.evaluate(None, here.query, here.key, here.sides)
    return jnp.any(jnp.broadcast_to(kept, shape), axis=-1, keepdims=True)


def narrow(tile: Array, read: Dtype | None, operand: Array, bounded: bool) -> Array:
    """The tile as its dot with an operand takes it: in the operand's dtype where the original's product reads it in
    that dtype, ``read``, too; else as it is.

    Rounding to bfloat16 keeps the range; float16 holds only what is below 1.
    """
    if read == operand.dtype and (operand.dtype == jnp.bfloat16 or (bounded and operand.dtype == jnp.float16)):
        return tile.astype(operand.dtype)
    return tile
