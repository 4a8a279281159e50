"""Measures how far a result is from the oracle's, and judges whether that is allowed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from autopallas.compat import Array
from autopallas.numerics.promote import in_float64
from autopallas.numerics.rounding import Source
from autopallas.sites import random_keys

__all__ = ["Comparison", "Errors", "compare", "errors", "tolerance", "tolerance_of"]

_TOLERANCES = {
    "float64": (1e-12, 5e-12),
    "float32": (1e-5, 5e-5),
    "float16": (4e-3, 1e-2),
    "bfloat16": (2e-2, 4e-2),
}
"""Per dtype: tolerances (of values, of gradients).  Those of float64 account for the oracle, which is no more precise
than that: they allow some four thousand roundings, 1e-12, where float32's allow eighty."""
_ROUNDINGS = 4
"""Number of roundings to allow in a dtype that the table lacks."""


@dataclass(frozen=True, slots=True)
class Errors:
    """Distance of an array from the oracle's, over the elements that are finite in the oracle and the original."""

    max_absolute: float
    mean_absolute: float
    max_relative: float
    """max |x - oracle| / max |oracle|; the absolute error where the oracle is zero throughout."""
    mean_relative: float
    """mean |x - oracle| / mean |oracle|; the absolute error where the oracle is zero throughout."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Comparison of one result: how far the original and the rewritten program are from the float64 oracle.

    For integers, booleans and random keys the oracle is the original, and the error is the share that differs.
    """

    name: str
    """Path of the result in what the function returns, such as "[0]['loss']"."""
    dtype: str
    shape: tuple[int, ...]
    original: Errors
    rewritten: Errors
    allowed: float
    """Upper limit of the rewritten ``max_relative``: the tolerance or twice the original's, whichever is larger."""
    non_finite: int
    """Number of elements that are NaN or infinite and were not in the original."""
    ok: bool


def tolerance(dtype: DTypeLike, gradient: bool) -> float:
    """Returns the relative error that is allowed regardless of the original's own error.

    Args:
      dtype: the least precise floating-point dtype that the original rounds to on the way to the value.
      gradient: whether a backward kernel contributed to it.

    Example:
      >>> tolerance("bfloat16", gradient=False)
      0.02
    """
    name = np.dtype(jnp.finfo(dtype).dtype).name  # for a complex dtype, that of its parts
    if name in _TOLERANCES:
        return _TOLERANCES[name][gradient]
    return _ROUNDINGS * float(jnp.finfo(dtype).eps) * (2 if gradient else 1)


def tolerance_of(dtype: DTypeLike, source: Source) -> float:
    """Returns the tolerance of a result of a dtype, given what is known of the original's roundings before it."""
    if not jnp.issubdtype(dtype, np.inexact):
        return 0.0
    return tolerance(dtype if source.dtype is None else source.dtype, source.gradient)


def errors(x: Array, original: Array, oracle: Array) -> Errors:
    """Measures the distance of ``x`` from the oracle, over the elements that are finite everywhere.

    Args:
      x, original: arrays of the same dtype.
      oracle: the float64 (or complex128) array.
    """
    counts = np.isfinite(in_float64(original)) & np.isfinite(oracle) & np.isfinite(in_float64(x))
    wanted = np.abs(oracle[counts])
    distance = np.abs(in_float64(x)[counts] - oracle[counts])
    if not distance.size:
        return Errors(0.0, 0.0, 0.0, 0.0)
    worst, mean = float(distance.max()), float(distance.mean())
    return Errors(worst, mean, _relative(worst, float(wanted.max()), x), _relative(mean, float(wanted.mean()), x))


def _relative(distance: float, size: float, x: Array) -> float:
    """Divides a distance by a size that is at least the smallest with relative precision.

    Results below a dtype's normal numbers have no relative precision, since processors flush them to zero.
    """
    if size == 0 or distance == 0:
        return distance
    kind = jnp.finfo(x.dtype)
    return distance / max(size, float(kind.tiny) / float(kind.eps))


def compare(
    name: str, original: Array, rewritten: Array, oracle: Array, allowed: float, perturbed: Sequence[Array] = ()
) -> Comparison:
    """Judges one result.

    Args:
      name: the result's name in the comparison.
      original, rewritten: the result from the two programs.
      oracle: the result from :class:`autopallas.numerics.oracle.Oracle`.
      allowed: the tolerance.
      perturbed: further samples of the original's own error: its results for arguments a rounding away.  They affect
        only ``allowed`` in the comparison.

    Returns:
      The comparison.
    """
    shape, dtype = tuple(np.shape(original)), str(original.dtype)
    if not jnp.issubdtype(original.dtype, np.inexact):
        share = _share_that_differs(original, rewritten)
        return Comparison(name, dtype, shape, Errors(*[0.0] * 4), Errors(*[share] * 4), 0.0, 0, share == 0)
    own = errors(original, original, oracle)
    ours = errors(rewritten, original, oracle)
    samples = [own, *(errors(x, original, oracle) for x in perturbed)]
    bound = max(allowed, 2 * max(sample.max_relative for sample in samples))
    introduced = _introduced(in_float64(original), in_float64(rewritten), in_float64(_as(oracle, original.dtype)))
    return Comparison(name, dtype, shape, own, ours, bound, introduced, introduced == 0 and ours.max_relative <= bound)


def _as(oracle: Array, dtype: DTypeLike) -> np.ndarray:
    """Rounds the oracle's result to a dtype; what is beyond its range becomes infinite."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(oracle).astype(dtype)


def _introduced(original: np.ndarray, rewritten: np.ndarray, exact: np.ndarray) -> int:
    """Counts NaNs in place of anything else, and infinities in place of a finite number or of the other infinity,
    unless that is the wrong one, as the ``exact`` result tells."""
    nan = np.isnan(rewritten) & ~np.isnan(original)
    infinite = np.isinf(rewritten) & ~np.isnan(original) & (rewritten != original)
    right = np.isinf(original) & (rewritten == exact)
    return int(np.sum(nan | (infinite & ~right)))


def _share_that_differs(original: Array, rewritten: Array) -> float:
    if isinstance(original, jax.Array) and isinstance(rewritten, jax.Array):
        original, rewritten = random_keys.data(original), random_keys.data(rewritten)
    if original.dtype == jax.dtypes.float0 or not np.size(original):
        return 0.0
    return float(np.mean(np.asarray(original) != np.asarray(rewritten)))
