"""Advances the running softmax of a GPU kernel of attention by one tile of scores, in the registers of a warpgroup."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopallas.kernels.attention.gpu_elements import Value, forward_elements, scale_of
from autopallas.kernels.attention.gpu_grid import Loop, Place, exists, side_values
from autopallas.kernels.attention.spec import AttentionSpec
from autopallas.kernels.attention.tile_values import halves
from autopallas.kernels.gpu import mosaic
from autopallas.kernels.refs import Ref

__all__ = ["LOG2E", "Running", "advanced"]

Array: TypeAlias = jax.Array
F32 = np.dtype(np.float32)
LOG2E = math.log2(math.e)


class Running(NamedTuple):
    """The state of a block of rows after some of its tiles; numbers of the rows are [64]."""

    accumulator: Array | None  # [64, Dv]
    maximum: Array
    total: Array
    kept: Array | None  # 1 if the `where` weights keep any key


def advanced(
    spec: AttentionSpec, sides: Sequence[Ref], loop: Loop, place: Place, score: Array, running: Running
) -> tuple[Array, Running]:
    """Returns the weights of one tile, and the state after it, its product with the values aside.

    The exponentials are of base 2.  A plain scale is folded into their factor, which the compiler merges with the
    subtraction.  Otherwise the maximum is subtracted first: a fill of -1e30 times log2(e) minus itself is far from 0.
    """
    programs, general, shape = loop.programs, loop.general, place.shape
    elements = forward_elements(spec, programs)

    def across(rows: Array) -> Array:
        return lax.broadcast_in_dim(rows, shape, (0,))

    plain = not general and spec.score_dtype == F32 and not programs.inner_weights
    scale = scale_of(programs.score) if plain else None
    known: dict[str, Value] = {}
    if scale is None or len(elements) > 1:
        known = place.positions() | side_values(spec, sides, place)
    valid = exists(place, spec) if general and spec.key_length % shape[1] else None
    if scale is not None:
        maximum = jnp.maximum(running.maximum, jnp.max(score, axis=1) * np.float32(scale))
        e = jnp.exp2(score * np.float32(scale * LOG2E) - across(maximum * np.float32(LOG2E)))
        finite = maximum
    else:
        rounded_score = Value("tile", score.astype(spec.score_dtype))
        x = elements["logit"].on(shape, known | {"score": rounded_score}).result().widened("tile", shape)
        if valid is not None:
            x = jnp.where(valid, x, -jnp.inf)
        reached = x
        if "height" in elements:
            reached = elements["height"].on(shape, known | {"x": Value("tile", x)}).result().widened("tile", shape)
            reached = reached if valid is None else jnp.where(valid, reached, -jnp.inf)
        maximum = jnp.maximum(running.maximum, jnp.max(reached, axis=1))
        # A row that has seen only -inf keeps the sum 0; without the zero, -inf - -inf would be NaN.
        finite = jnp.where(maximum == -jnp.inf, 0.0, maximum)
        e = halves(x, across(finite)) if "inner" in elements else jnp.exp2((x - across(finite)) * np.float32(LOG2E))
    shrink = jnp.exp2((running.maximum - finite) * np.float32(LOG2E))

    def weighted(name: str, e: Array) -> Array:
        if name not in elements:
            return e
        e = elements[name].on(shape, known | {"e": Value("tile", e)}).result().widened("tile", shape)
        return e if valid is None else jnp.where(valid, e, 0.0)

    if "inner" in elements:
        e = weighted("inner", e) * e
    total = running.total * shrink + jnp.sum(e, axis=1)
    running = running._replace(maximum=maximum, total=total)
    if running.accumulator is None:
        return e, running
    p = weighted("outer", e)
    kept = running.kept
    if kept is not None:
        seen = elements["kept"].on(shape, known).result().widened("tile", shape) if "kept" in elements else None
        ones = jnp.full(shape, 1.0, F32)
        seen = ones if seen is None else jnp.where(seen, ones, 0.0)
        seen = mosaic().layout_cast(seen if valid is None else jnp.where(valid, seen, 0.0), mosaic().Layout.WGMMA)
        kept = jnp.maximum(kept, jnp.max(seen, axis=1))
    accumulator = running.accumulator * lax.broadcast_in_dim(shrink, running.accumulator.shape, (0,))
    return p, running._replace(accumulator=accumulator, kept=kept)
