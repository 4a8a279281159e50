"""Sums of a few numbers each: which these are, and how they are added up."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax

from autopallas.kernels.plain_sums import plain_sum

__all__ = ["LONGEST_COLUMN", "LONGEST_ROW", "short_sum", "short_sums"]

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


def short_sum(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    """Returns the sum over some axes, which ``short_sums`` takes, in a loop of the compiled program itself.

    Args:
      x: floats.
      axes: those that are summed over.
    """
    sizes = short_sums(x.shape, axes, x.size, x.size)
    assert sizes is not None
    kept = tuple(size for axis, size in enumerate(x.shape) if axis not in axes)
    return plain_sum(x.reshape(sizes), (1,)).reshape(kept)
