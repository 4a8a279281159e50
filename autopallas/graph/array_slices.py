"""Slices of arrays along one axis, one for each step of a loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

__all__ = ["Place", "integers_of", "plus_slices", "slices_at", "with_axis", "with_slices"]

_MOST_RUNS = 4
"""Most runs of positions that are sliced one by one and put together."""


@dataclass(frozen=True)
class Place:
    """Position of a slice along one axis of an array, for all steps.

    Attributes:
      axis: the axis.
      positions: the positions, in the order of the loop's slices.
    """

    axis: int
    positions: tuple[int, ...]

    @cached_property
    def runs(self) -> tuple[Run, ...] | None:
        """The positions as a few runs of equal distances; None where they are many."""
        positions, found, begin = np.asarray(self.positions), list[Run](), 0
        distances = np.diff(positions)
        while begin < len(positions):
            if len(found) == _MOST_RUNS:
                return None
            step = int(distances[begin]) if begin < len(distances) else 1
            others = np.flatnonzero(distances[begin:] != step)
            count = 1 + (int(others[0]) if others.size else len(distances) - begin)
            found.append(Run(int(positions[begin]), step, count))
            begin += count
        return tuple(found)

    @property
    def first(self) -> int | None:
        """The smallest position if they are consecutive, else None."""
        alone = self.runs is not None and len(self.runs) == 1 and abs(self.runs[0].step) == 1
        return min(self.positions[0], self.positions[-1]) if alone else None

    @property
    def falls(self) -> bool:
        return self.positions[0] > self.positions[-1]


class Run(NamedTuple):
    """Positions at equal distances: the first one, the distance, and how many there are."""

    first: int
    step: int
    length: int


def slices_at(array: jax.Array, place: Place) -> jax.Array:
    """Returns the slices of an array, with the steps in front; the axis stays, of size 1."""
    if place.runs is not None:
        found = jnp.concatenate([_run(array, place.axis, run) for run in place.runs], place.axis)
    else:
        found = jnp.take(array, np.asarray(place.positions), axis=place.axis, mode="clip")
    return jnp.expand_dims(jnp.moveaxis(found, place.axis, 0), place.axis + 1)


def _run(array: jax.Array, axis: int, run: Run) -> jax.Array:
    """Returns the part of an array at some positions."""
    ends = run.first, run.first + run.step * (run.length - 1)
    found = lax.slice_in_dim(array, min(ends), max(ends) + 1, abs(run.step) or 1, axis)
    if run.step == 0:
        return jnp.broadcast_to(found, (*array.shape[:axis], run.length, *array.shape[axis + 1 :]))
    return lax.rev(found, (axis,)) if run.step < 0 else found


def _along(slices: jax.Array, place: Place) -> jax.Array:
    """Returns stacked slices side by side along their axis."""
    found = jnp.moveaxis(jnp.squeeze(slices, place.axis + 1), 0, place.axis)
    return lax.rev(found, (place.axis,)) if place.first is not None and place.falls else found


def with_slices(array: jax.Array, place: Place, slices: jax.Array) -> jax.Array:
    """Returns an array with other slices."""
    block = _along(slices, place)
    if place.first is not None:
        whole = block.shape == array.shape
        return block if whole else lax.dynamic_update_slice_in_dim(array, block, place.first, place.axis)
    return array.at[(slice(None),) * place.axis + (_positions(place),)].set(block, unique_indices=True)


def plus_slices(array: jax.Array, place: Place, slices: jax.Array) -> jax.Array:
    """Returns an array with slices added to it."""
    block = _along(slices, place)
    if place.first is not None:
        if block.shape == array.shape:
            return array + block
        here = lax.slice_in_dim(array, place.first, place.first + len(place.positions), axis=place.axis)
        return lax.dynamic_update_slice_in_dim(array, here + block, place.first, place.axis)
    return array.at[(slice(None),) * place.axis + (_positions(place),)].add(block)


def _positions(place: Place) -> jax.Array | np.ndarray:
    """Returns the positions, computed from runs of equal distances where they are a few."""
    if place.runs is None:
        return np.asarray(place.positions)
    return jnp.concatenate([run.first + run.step * lax.iota(np.int32, run.length) for run in place.runs])


def integers_of(known: np.ndarray) -> jax.Array:
    """Returns known integers with the steps in front: computed, where those of one step are one that goes up or down by
    equal distances, so that the program does not hold them."""
    count = known.shape[0]
    if known.size == count > 1 and known.dtype.kind in "iu":
        steps = known.reshape(-1).astype(np.int64)
        first, by = int(steps[0]), int(steps[1]) - int(steps[0])
        small = max(-int(steps.min()), int(steps.max()), abs(by)) < 2**31
        if small and np.array_equal(first + by * np.arange(count), steps):
            return (first + by * lax.iota(np.int32, count)).astype(known.dtype).reshape(known.shape)
    return jnp.asarray(known)


def with_axis(x: jax.Array, shape: Sequence[int], place: Place) -> jax.Array:
    """Returns a slice of an array with the axis along which it was cut, of size 1."""
    return x.reshape((*shape[: place.axis], 1, *shape[place.axis + 1 :]))
