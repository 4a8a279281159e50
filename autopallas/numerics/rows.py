"""Measures errors row by row, so that the largest value of an array hides no row of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from autopallas.compat import Array
from autopallas.numerics.promote import in_float64

__all__ = ["RowErrors", "row_errors"]

_SLACK = 4
"""Factor between the tolerance of a row's norm and that of an array's largest value, and between the error of a row and
that of the original in the same row: a row has few numbers, so chance weighs more."""
_NOISE = 4 * float(np.finfo(np.float32).eps)
"""Norm of an error, relative to the norm of the largest row, below which a row of nothing but zero or rounding is no
breach: kernels compute in float32, and what cancels exactly in the original may leave a rounding of the largest values.
"""
_ORACLE = 1e-12
"""Norm of a row, relative to that of the largest, below which it may be the oracle's own rounding of zero."""
_ROUNDING = 0.01
"""Error of the original, relative to a row's norm, from which on the row is taken for rounding, as in the gradient of a
softmax that is saturated: such rows are judged by the original's largest error in any of them."""


@dataclass(frozen=True, slots=True)
class RowErrors:
    """The row with the largest error beyond what is allowed for it, or else the one with the largest error.

    Attributes:
      row: its position: an index for each axis but the last; of an array with one axis, the element's.
      error: ``|x - oracle| / |oracle|`` of this row, with Euclidean norms.
      allowed: upper limit of the error in this row.
      ok: whether no row is beyond its limit.
    """

    row: tuple[int, ...]
    error: float
    allowed: float
    ok: bool


def row_errors(
    x: Array, original: Array, oracle: Array, allowed: float, perturbed: Sequence[Array] = ()
) -> RowErrors | None:
    """Judges an array row by row, over the elements that are finite everywhere.

    A row is what lies along the last axis; an array with one axis has rows of one element.

    Args:
      x, original: results of the same dtype.
      oracle: the same in float64.
      allowed: the tolerance of the array's largest value.
      perturbed: results of the original for arguments a rounding away, as further samples of its own error.

    Returns:
      The row to name, or None where there are no floating-point numbers.

    Example:
      >>> ones = np.ones((3, 2), np.float32)
      >>> row_errors(ones * np.float32([[1], [1], [1.5]]), ones, ones.astype(float), 1e-5)
      RowErrors(row=(2,), error=0.5, allowed=4e-05, ok=False)
    """
    if not np.size(x) or not jnp.issubdtype(x.dtype, np.inexact):
        return None
    exact = _rows(oracle)
    counts = np.isfinite(exact) & np.isfinite(_rows(original)) & np.isfinite(_rows(x))
    norms = _norms(np.where(counts, exact, 0))
    kind = jnp.finfo(x.dtype)
    least = max(float(kind.tiny) / float(kind.eps), np.finfo(np.float64).tiny)
    scale = np.maximum(norms, least)

    def distance(y: Array) -> np.ndarray:
        return _norms(np.where(counts, _rows(y) - exact, 0))

    with np.errstate(invalid="ignore", over="ignore"):
        own = np.max([np.nan_to_num(distance(y), posinf=0.0) for y in (original, *perturbed)], axis=0)
        found = distance(x)
    limits = np.maximum(_SLACK * allowed, _SLACK * own / scale)
    largest = norms.max(initial=0.0)
    few_digits = max(_ROUNDING, 16 * float(kind.eps))
    nothing = (norms <= max(least, _ORACLE * largest)) | (own > few_digits * norms)
    rounding = max(_NOISE * largest, _SLACK * float(np.max(own, where=nothing, initial=0.0)))
    beyond = np.where(nothing & (found <= rounding), 0, found / scale / limits)
    worst = int(np.argmax(beyond if (beyond > 1).any() else found / scale))
    shape = np.shape(x) if np.ndim(x) == 1 else np.shape(x)[:-1]
    row = tuple(int(i) for i in np.unravel_index(worst, shape))
    return RowErrors(row, float(found[worst] / scale[worst]), float(limits[worst]), not (beyond > 1).any())


def _rows(x: Array) -> np.ndarray:
    wide = in_float64(x)
    return wide.reshape(-1, wide.shape[-1]) if wide.ndim > 1 else wide.reshape(-1, 1)


def _norms(rows: np.ndarray) -> np.ndarray:
    """Returns Euclidean norms of rows, without overflow."""
    sizes = np.abs(rows)
    largest = np.max(sizes, axis=1, initial=0.0, keepdims=True)
    scaled = np.divide(sizes, largest, out=np.zeros_like(sizes), where=largest > 0)
    found: np.ndarray = largest[:, 0] * np.sqrt(np.sum(scaled * scaled, axis=1))
    return found
