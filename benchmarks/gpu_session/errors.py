"""Compares results of kernels with those in float32, row by row, and bit by bit with those of another run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["ROW_TOLERANCE", "Errors", "compared", "poison", "same_bits"]

ROW_TOLERANCE = 0.1
"""Largest error of a row.

Attention of bfloat16 was within 0.0075 of float32 when interpreted, once what rounding the result adds to dq is counted
as wanted (up to 0.23 on an H100, where it was not); a causal mask that shows one key too many gives 0.24 and more."""

_SMALLEST = 0.1
"""Norm below which a row is measured against this share of the root mean square of all norms: rows that cancel to
almost nothing, such as the first row of dq under a causal mask, consist of rounding."""

_BESIDE_OTHERS = 1e-2
"""The same for whole arrays, such as dq of a single key, which is 0: this share of the median of all results."""

_NOT_FINITE = 1e30


class Errors(NamedTuple):
    """Differences of results from what is wanted; the largest over all arrays.

    Attributes:
      largest: max |x - wanted| / max |wanted|.
      total: the norm of the difference over that of what is wanted.
      row: the same for the worst row along the last axis.
    """

    largest: float
    total: float
    row: float


def compared(found: Sequence[Any], wanted: Sequence[Any], smallest: float = _SMALLEST) -> Errors:
    """Compares arrays in float32.  NaN or infinity must be where they are wanted, and nowhere else.

    Args:
      found, wanted: arrays.
      smallest: share of the root mean square of all norms of rows that a row is taken to have at least.

    Example:
      >>> compared([jnp.ones((4, 8))], [jnp.ones((4, 8))])
      Errors(largest=0.0, total=0.0, row=0.0)
    """
    scale = _BESIDE_OTHERS * np.median(np.stack([np.asarray(_sizes(w)) for w in wanted]), axis=0)
    least = np.append(np.maximum(scale, 1e-6), smallest).astype(np.float32)
    each = [np.asarray(_difference(x, w, least)) for x, w in zip(found, wanted, strict=True)]
    largest, total, row = (float(x) for x in np.max(np.stack(each), axis=0))
    return Errors(largest, total, row)


def _rows(array: jax.Array) -> jax.Array:
    return array.astype(jnp.float32).reshape(-1, *array.shape[-1:])


@jax.jit
def _sizes(wanted: jax.Array) -> jax.Array:
    """Returns the largest number, and the root mean square of the norms of rows."""
    w = _rows(jnp.where(jnp.isfinite(wanted), wanted, 0))
    return jnp.stack([jnp.max(jnp.abs(w)), jnp.sqrt(jnp.sum(jnp.square(w)) / len(w))])


@jax.jit
def _difference(found: jax.Array, wanted: jax.Array, least: jax.Array) -> jax.Array:
    """Returns :class:`Errors` of one array; ``least`` is what :func:`_sizes` is taken to be at least, and the share."""
    x, w = _rows(found), _rows(wanted)
    finite = jnp.isfinite(w)
    agree = jnp.all(jnp.where(finite, jnp.isfinite(x), (x == w) | (jnp.isnan(x) & jnp.isnan(w))))
    x, w = (jnp.where(finite, a, 0.0) for a in (x, w))
    rows, norms = (jnp.sqrt(jnp.sum(jnp.square(a), axis=-1)) for a in (x - w, w))
    mean = jnp.maximum(jnp.sqrt(jnp.mean(jnp.square(norms))), least[1])
    errors = jnp.stack(
        [
            jnp.max(jnp.abs(x - w)) / jnp.maximum(jnp.max(jnp.abs(w)), least[0]),
            jnp.sqrt(jnp.mean(jnp.square(rows))) / mean,
            jnp.max(rows / jnp.maximum(norms, least[2] * mean)),
        ]
    )
    return jnp.where(agree & jnp.all(jnp.isfinite(errors)), errors, _NOT_FINITE)


@jax.jit
def same_bits(first: Sequence[jax.Array], second: Sequence[jax.Array]) -> jax.Array:
    """Returns whether arrays agree in every bit, NaNs included."""

    def bits(x: jax.Array) -> jax.Array:
        size = x.dtype.itemsize * 8
        return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{size}")) if x.dtype != bool else x

    return jnp.all(jnp.stack([jnp.all(bits(a) == bits(b)) for a, b in zip(first, second, strict=True)]))


def poison(types: Sequence[Any]) -> None:
    """Fills memory with NaN and frees it, so that what a kernel does not write shows, where the allocator reuses it."""
    filled = [jnp.full(t.shape, jnp.nan if jnp.issubdtype(t.dtype, jnp.inexact) else 1, t.dtype) for t in types]
    jax.block_until_ready(filled)
