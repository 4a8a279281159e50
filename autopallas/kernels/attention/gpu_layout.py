"""Reads and writes arrays of the GPU kernels of attention in the order of axes that the program has.

A kernel's operands lie in memory in the order of their axes.  An array that the program has as [B, T, N, D] would be
copied to become [B, K, G, T, D]; so a kernel takes it as it lies, and TMA moves windows whose rows are N * D numbers
apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from autopallas.compat import Dtype
from autopallas.kernels.gpu import rounded
from autopallas.kernels.refs import Ref

__all__ = ["Layout", "Turned", "moved", "padded"]

Array: TypeAlias = jax.Array


def padded(array: Array, *lengths: int) -> Array:
    """Pads the last axes of an array with zeros to these lengths."""
    leading = array.ndim - len(lengths)
    missing = [length - n for n, length in zip(array.shape[leading:], lengths, strict=True)]
    return jnp.pad(array, [(0, 0)] * leading + [(0, n) for n in missing]) if any(missing) else array


def moved(length: int) -> int:
    """Returns the length with which an axis of rows or keys is read.

    TMA gives zeros behind the end of an array, so that blocks may reach beyond it; but Mosaic has it move tiles of 8.
    """
    return rounded(length, 8)


class Layout(NamedTuple):
    """The order of an array's axes in memory, from major to minor; the last axis is the last one there too."""

    order: tuple[int, ...]

    @staticmethod
    def of(order: tuple[int, ...]) -> Layout:
        """Returns the order of one of the program's arrays, or the canonical one if its last axis is another.

        wgmma multiplies rows whose numbers are next to each other.
        """
        last = len(order) - 1
        return Layout(order if order[last] == last else tuple(range(len(order))))

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape in memory of an array of this canonical shape."""
        return tuple(shape[axis] for axis in self.order)

    def from_canonical(self, array: Array) -> Array:
        """Transposes a canonical array to how it lies in memory."""
        return jnp.transpose(array, self.order)

    def to_canonical(self, array: Array) -> Array:
        """Inverts :meth:`from_canonical`."""
        return jnp.transpose(array, [self.order.index(axis) for axis in range(array.ndim)])

    def padded(self, array: Array, length: int, size: int) -> Array:
        """Returns a canonical array as it lies in memory, its last two axes padded to these lengths."""
        return padded(self.from_canonical(array), *self.shape((*array.shape[:-2], length, size)))

    def cut(self, array: Array, length: int, size: int) -> Array:
        """Returns the canonical array of one in memory, its last two axes cut to these lengths."""
        kept = (*(slice(None) for _ in self.order[2:]), slice(length), slice(size))
        return self.to_canonical(array[tuple(kept[axis] for axis in self.order)])


class Turned(NamedTuple):
    """A reference to an array in memory, which is indexed as the canonical array."""

    ref: Ref
    layout: Layout

    @property
    def dtype(self) -> Dtype:
        found: Dtype = self.ref.dtype
        return found

    @property
    def at(self) -> Turned:
        """The reference, to be indexed by the first canonical axes: ``at[batch, head, rows]``."""
        return self

    def __getitem__(self, index: Any) -> Ref:
        order = self.layout.order
        whole = (*index, *(slice(None) for _ in order[len(index) :]))
        return self.ref.at[tuple(whole[axis] for axis in order)]
