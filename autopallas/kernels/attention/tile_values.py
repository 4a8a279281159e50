"""Evaluates the programs of a specification and their derivatives on a tile.

All functions take arrays that broadcast against the tile [..., t, s], and can be called in a loop of XLA as well as
inside a Pallas kernel.
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
from autopallas.sites.elementwise import ElementwiseProgram, reproducible, rounded

__all__ = [
    "Tile",
    "any_kept",
    "exponentials",
    "exponentials_vjp",
    "greatest",
    "halves",
    "heights",
    "logits",
    "logsumexp",
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
    """Returns what is exponentiated, without the shift.

    A compiler may leave a product unrounded where it subtracts the shift in the same instruction, but not where the
    shift is computed.  For scores as large as a mask's fill, the difference would be that rounding alone.
    """
    program = reproducible(programs.score)
    x = program.evaluate(score, here.query, here.key, here.sides)
    x = jnp.broadcast_to(x, score.shape).astype(spec.accumulation_dtype)
    return rounded(x) if program.scales_last else x


def row_maximum(spec: AttentionSpec, programs: TilePrograms, score: Array, x: Array, here: Tile) -> Array:
    """Returns the maximum of :func:`heights` over the keys.

    If the score program is an increasing function of the score alone, it is applied to the highest score instead.
    """
    if programs.inner_weights:
        return jnp.max(heights(spec, programs.inner_weights, x, here), axis=-1, keepdims=True)
    if not programs.increasing:
        return jnp.max(x, axis=-1, keepdims=True)
    highest = jnp.max(score, axis=-1, keepdims=True)
    return programs.score.evaluate(highest, None, None, ()).astype(spec.accumulation_dtype)


def greatest(spec: AttentionSpec, program: ElementwiseProgram, score: Array, here: Tile) -> Array:
    """Returns the maximum over the keys of a program like the score's."""
    y = reproducible(program).evaluate(score, here.query, here.key, here.sides)
    return jnp.max(jnp.broadcast_to(y, score.shape).astype(spec.accumulation_dtype), axis=-1, keepdims=True)


def heights(spec: AttentionSpec, weights: Sequence[Weight], x: Array, here: Tile) -> Array:
    """Returns log |exp(x) weights|, whose maximum is the shift of the exponentials.

    It is -inf for a key of weight 0, so that such a key, however great its x, does not make the others underflow.
    Weights are bounded by exp(-83) and exp(83) in float32; the exponentials then stay in range.
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
    """Computes exp((x - shift) / 2), two of which, with a weight between them, make an exponential.

    A key of weight 0 may have an x so far above the shift that its exponential is out of the dtype's range.  This half
    times the weight is 0, and the gradient of the weight, which may be small enough, is still in range.
    """
    half = (x - shift) * 0.5
    # An infinite x stays infinite: the original's exponential times 0 is NaN too.
    return jnp.exp(jnp.where(half < jnp.inf, jnp.minimum(half, _greatest_exponent(x.dtype)), half))


def _greatest_exponent(dtype: DTypeLike) -> float:
    """Returns the greatest number whose exponential is finite in a dtype, rounded down."""
    return float(np.floor(np.log(float(jnp.finfo(dtype).max))))


def exponentials(weights: Sequence[Weight], x: Array, shift: Array, here: Tile) -> Array:
    """Computes exp(x - shift) times weights.

    Without weights the shift is at least the greatest x.  A compiler may leave one of the two unrounded, which may give
    their difference the wrong sign if the numbers are huge.
    """
    if not weights:
        exponent = x - shift
        return jnp.exp(jnp.where(exponent > 0, 0, exponent))
    half = halves(x, shift)
    return weighted(weights, half, here) * half


def exponentials_vjp(
    spec: AttentionSpec, weights: Sequence[Weight], x: Array, shift: Array, here: Tile
) -> tuple[Array, Callable[[Array], tuple[Array, tuple[Array, ...]]]]:
    """Computes :func:`exponentials`, and the map from their cotangent to those of x and of the weights' side inputs."""
    if not weights:
        e = exponentials(weights, x, shift, here)
        return e, lambda cotangent: (e * cotangent, ())
    half = halves(x, shift)
    one_half, vjp = weighted_vjp(spec, weights, half, here)

    def pull(cotangent: Array) -> tuple[Array, tuple[Array, ...]]:
        dhalf, sides = vjp(half * cotangent)
        return half * dhalf, sides

    return one_half * half, pull


def logsumexp(maximum: Array, total: Array) -> tuple[Array, Array]:
    """Returns the logsumexp of rows, and the factor with which the probabilities are exp(x - logsumexp) times it.

    The logarithm is that of the sum's size: weights may make the sum negative, and then the factor is negative.

    The factor is 1 or -1 but for rounding.  The logsumexp's rounding error, about 1e-7 of its size, would be the
    relative error of the probabilities: in a row whose keys are all masked with -1e9 it is -1e9 + log(S) = -1e9, and
    every probability would be 1.

    Args:
      maximum: the greatest logit of each row; -inf for a row without any.
      total: the sum of exp(x - maximum).
    """
    found = jnp.where(maximum == -jnp.inf, -jnp.inf, maximum + jnp.log(jnp.abs(total)))
    factor = jnp.exp(found - maximum) * reciprocal(total)
    return found, jnp.where(jnp.isfinite(found), factor, 1)


def reciprocal(total: Array) -> Array:
    """Returns the factor of a row's probabilities from its sum of exponentials.

    A row without any key has the sum 0.  Its probabilities are 0 by a mask, or NaN; an infinite factor would turn zeros
    into NaNs, in the gradient of every key of the row.
    """
    return jnp.where(total == 0, 1, 1 / total)


def weighted(weights: Sequence[Weight], p: Array, here: Tile) -> Array:
    """Applies weights to ``p``."""
    for weight in weights:
        w = weight.program.evaluate(None, here.query, here.key, here.sides)
        p = jnp.where(w, p, 0) if weight.kind == "where" else p * w.astype(p.dtype)
    return p


def weighted_vjp(
    spec: AttentionSpec, weights: Sequence[Weight], p: Array, here: Tile
) -> tuple[Array, Callable[[Array], tuple[Array, tuple[Array, ...]]]]:
    """Returns ``p`` with its weights, and the map from its cotangent to those of ``p`` and the side inputs."""
    if not weights:
        return p, lambda cotangent: (cotangent, ())

    def apply(p: Array, floating: tuple[Array, ...]) -> Array:
        return weighted(weights, p, here.with_floating(spec, floating))

    result, vjp = jax.vjp(apply, p, here.floating(spec))
    return result, lambda cotangent: vjp(cotangent)


def any_kept(weights: Sequence[Weight], here: Tile, shape: tuple[int, ...]) -> Array:
    """Returns for each row whether the ``where`` weights keep any key."""
    kept = jnp.ones((1,) * len(shape), bool)
    for weight in weights:
        if weight.kind == "where":
            kept = kept & weight.program.evaluate(None, here.query, here.key, here.sides)
    return jnp.any(jnp.broadcast_to(kept, shape), axis=-1, keepdims=True)


def narrow(tile: Array, read: Dtype | None, operand: Array, bounded: bool) -> Array:
    """Rounds a tile to the dtype of the operand that it is multiplied with, if the original's product does so.

    The original's product reads the tile in the dtype ``read``.  bfloat16 keeps the range of float32; to float16 only
    ``bounded`` tiles are rounded, whose elements are at most 1.
    """
    if read == operand.dtype and (operand.dtype == jnp.bfloat16 or (bounded and operand.dtype == jnp.float16)):
        return tile.astype(operand.dtype)
    return tile
