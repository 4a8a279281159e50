"""Knows whether XLA's convolutions multiply the zeros that padding and dilation insert.

A zero times infinity is NaN where it is multiplied, and nothing where it is skipped.  XLA's CPU compiler multiplies
these zeros in convolutions of narrow floats over one to three axes of space; in others, such as those of float64, it
skips them (seen with JAX 0.10 and 0.12).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autopallas.compat import Dtype

__all__ = ["assumed_finite"]

_NARROW = ("float16", "bfloat16", "float32")
_MOST_AXES = 3


def assumed_finite(
    dtypes: Iterable[Dtype], padding: Sequence[tuple[int, int]], dilation: Sequence[int]
) -> tuple[str, ...]:
    """Returns what has to hold for a convolution that multiplies its inserted zeros to equal XLA's, in words.

    Args:
      dtypes: those of both operands and the result.
      padding: before and after the left operand, along each axis of space.
      dilation: the distance of its elements, between which are zeros, along each axis of space.
    """
    inserts = max(map(max, padding)) > 0 or max(dilation) > 1
    multiplied = len(padding) <= _MOST_AXES and {str(dtype) for dtype in dtypes} <= {*_NARROW}
    return ("both operands are finite",) if inserts and not multiplied else ()
