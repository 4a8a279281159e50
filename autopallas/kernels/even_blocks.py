"""Divides an axis into blocks of one size, whether that divides the axis or not."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

__all__ = ["ONE", "Part", "Start"]

Start: TypeAlias = int | jax.Array


class Part(NamedTuple):
    """A block of an axis.

    All blocks have one size, so that one loop computes them: where it does not divide the axis, the last one ends with
    the axis, and repeats the end of the one before.

    Attributes:
      start: the first position; may be traced.
      size: the number of positions.
      first: the first position that the block before does not have; None where no block of the axis repeats any.
    """

    start: Start
    size: int
    first: Start | None = None

    @property
    def window(self) -> tuple[Start, int]:
        return self.start, self.size

    @staticmethod
    def of(length: int, size: int, block: Start) -> Part:
        """Returns a block of an axis by its number."""
        first = block * size
        if length % size == 0:
            return Part(first, size)
        return Part(
            min(first, length - size) if isinstance(first, int) else jnp.minimum(first, length - size), size, first
        )


ONE = Part(0, 1)
"""The only block of an axis of length 1, that of the keys of a sink."""
