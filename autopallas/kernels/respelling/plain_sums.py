"""Adds up a few numbers in a loop of the compiled program itself."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["LONGEST_COLUMN", "LONGEST_ROW", "plain_sum", "short_sums"]

LONGEST_ROW, LONGEST_COLUMN = 8, 128
"""Most numbers of a short sum over last axes, and over axes before others.  Longer rows fill vectors."""


def short_sums(
    shape: Sequence[int], axes: Sequence[int], longest_row: int = LONGEST_ROW, longest_column: int = LONGEST_COLUMN
) -> tuple[int, int, int] | None:
    """Returns how many elements stand before, along and behind the axes of a sum of few numbers.

    Args:
      shape: that of the operand.
      axes: those that are summed over.
      longest_row, longest_column: most numbers of a sum over last axes, and over axes before others.

    Returns:
      The three numbers; None where a sum has many numbers or one, where it is the only one, or where other axes stand
      between those that are summed over.
    """
    summed = [axis for axis in axes if shape[axis] > 1]
    if not summed or 0 in shape:
        return None
    first, last = min(summed), max(summed)
    if any(shape[axis] > 1 and axis not in axes for axis in range(first, last)):
        return None
    before, length, behind = math.prod(shape[:first]), math.prod(shape[first : last + 1]), math.prod(shape[last + 1 :])
    short = length <= (longest_row if behind == 1 else longest_column)
    return (before, length, behind) if short and before * behind > 1 else None


def plain_sum(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    """Returns the sum over some axes, which ``short_sums`` takes.

    XLA's CPU compiler hands a sum of float32, and a product that it adds up, to a library; nothing else is computed
    with it, and many sums of few numbers each take longer there than in a loop that is compiled.  What is handed over
    is told by its form, ``a + b``, and not by what it means: ``a - -b`` is the same number.

    Args:
      x: floats.
      axes: those that are summed over.
    """
    sizes = short_sums(x.shape, axes, x.size, x.size)
    assert sizes is not None
    kept = tuple(size for axis, size in enumerate(x.shape) if axis not in axes)
    zero = jnp.zeros((), x.dtype)
    found: jax.Array = lax.reduce(x.reshape(sizes), zero, lambda a, b: a - -b, (1,)).reshape(kept)
    return found
