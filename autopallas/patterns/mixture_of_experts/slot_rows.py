"""Computes what the rows are that a program picks from slots of experts, from the indices by which it picks them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from autopallas.graph import Space
from autopallas.graph.labels import Atom, View
from autopallas.patterns.mixture_of_experts.reading import SlotRows

__all__ = ["Index", "RowsOfSlots"]


class Index(NamedTuple):
    """Positions of rows.

    Attributes:
      expert: the expert of each row.
      inside: whether the row's place exists.
      reached: whether the row is read from a slot, at its place or as the nearest one.
      positions: per label, the position of each row along it; that of the nearest slot where the row is read from none.
    """

    expert: jax.Array
    inside: jax.Array
    reached: jax.Array
    positions: Mapping[Atom, jax.Array]


class RowsOfSlots:
    """Computes rows picked from slots, for any array with a place for each slot."""

    def __init__(self, rows: SlotRows, space: Space):
        self._rows, self._space = rows, space

    def index(self, indices: jax.Array) -> Index:
        """Computes the positions of the rows from the indices of the gather."""
        space, shape = self._space, indices.shape[:-1]
        if indices.dtype.itemsize < 4:
            indices = indices.astype(jnp.int32)
        positions: dict[Atom, jax.Array] = {}
        inside = reached = jnp.ones(shape, bool)
        for place in self._rows.pick.places:
            own, end = indices[..., place.part], place.first + space.extent(place.labels)
            read = _clipped(own, 0, place.size)
            nearest = _clipped(read, place.first, end)
            inside, reached = inside & (own == read), reached & (read == nearest)
            positions |= self._along(place.labels, (nearest - place.first).astype(jnp.int32))
        for axis, (_, atoms) in enumerate(self._rows.pick.rows):
            positions |= self._along(atoms, lax.broadcasted_iota(jnp.int32, shape, axis))
        return Index(self._joined(self._rows.expert, positions, shape), inside, reached, positions)

    def of(self, array: jax.Array, view: View, index: Index) -> jax.Array:
        """Picks the rows of an array: axes of rows, then those of the array that have no labels in its ``view``."""
        placed = [d for d, (_, atoms) in enumerate(view) if atoms]
        shape = index.inside.shape
        where = tuple(view[d][0] + self._joined(view[d][1], index.positions, shape) for d in placed)
        return jnp.moveaxis(array, placed, range(len(placed))).at[where].get(mode="clip")

    def _along(self, atoms: Sequence[Atom], position: jax.Array) -> dict[Atom, jax.Array]:
        """Splits the positions along an axis into positions along its labels."""
        found: dict[Atom, jax.Array] = {}
        for atom in reversed(self._space.resolve(atoms)):
            size = self._space.extent((atom,))
            found[atom], position = position % size, position // size
        return found

    def _joined(self, atoms: Sequence[Atom], positions: Mapping[Atom, jax.Array], shape: Sequence[int]) -> jax.Array:
        """Joins the positions along labels into the position along their axis."""
        found = jnp.zeros(shape, jnp.int32)
        for atom in self._space.resolve(atoms):
            found = found * self._space.extent((atom,)) + positions[atom]
        return found


def _clipped(numbers: jax.Array, start: int, end: int) -> jax.Array:
    """Clips numbers to the range from ``start`` to ``end - 1``."""
    return lax.clamp(jnp.full((), start, numbers.dtype), numbers, jnp.full((), end - 1, numbers.dtype))
