"""The contents of a tile: what the programs of a specification give on it, and their derivatives.

Everything here is a function of arrays that broadcast against the tile [..., t, s], so that it can be called in a loop
of XLA's as well as inside a Pallas kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from autopallas.kernels.attention.schedule import TilePrograms
from autopallas.kernels.attention.spec import AttentionSpec, Weight
from autopallas.program import Program

__all__ = ["Tile", "any_kept", "greatest", "logits", "narrow", "row_maximum", "weighted", "weighted_vjp"]

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
    x = programs.score.evaluate(score, here.query, here.key, here.sides)
    return jnp.broadcast_to(x, score.shape).astype(spec.accumulation_dtype)


def row_maximum(spec: AttentionSpec, programs: TilePrograms, score: Array, x: Array) -> Array:
    """max over the keys of x.  An increasing function of the score alone is applied to the highest score instead."""
    if not programs.increasing:
        return jnp.max(x, axis=-1, keepdims=True)
    highest = jnp.max(score, axis=-1, keepdims=True)
    return programs.score.evaluate(highest, None, None, ()).astype(spec.accumulation_dtype)


def greatest(spec: AttentionSpec, program: Program, score: Array, here: Tile) -> Array:
    """max over the keys of a program like the score's."""
    y = program.evaluate(score, here.query, here.key, here.sides)
    return jnp.max(jnp.broadcast_to(y, score.shape).astype(spec.accumulation_dtype), axis=-1, keepdims=True)


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


def narrow(tile: Array, operand: Array, bounded: bool) -> Array:
    """The tile in the dtype of its dot.  Rounding to bfloat16 keeps the range; float16 holds only what is below 1."""
    if operand.dtype == jnp.bfloat16 or (bounded and operand.dtype == jnp.float16):
        return tile.astype(operand.dtype)
    return tile
