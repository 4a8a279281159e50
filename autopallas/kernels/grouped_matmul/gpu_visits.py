"""Which rows a GPU's tile holds, and with the weights of which groups they are multiplied: tables for the kernels.

The ends of the groups cut the rows into segments; all rows of one belong to the same groups: to one, as a rule, to none
behind the last, and to several where negative sizes make groups overlap.  A visit is a tile of rows of which those of
one segment are computed; it starts where the segment does, or up to 7 rows before it, or where a tile before it ended.

Everything is a comparison of all with all and a sum, which XLA makes few kernels of; there are no sorts and scatters.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

__all__ = ["ALIGNED", "AT", "COUNT", "FIRST", "HIGH", "LAST", "LOW", "Visits", "capacity", "group_bounds", "visits"]

Array: TypeAlias = jax.Array

AT, LOW, HIGH, FIRST, LAST, COUNT = range(6)
"""Columns of the table: the tile's first row; the first that is computed and the one behind the last, counted from it;
the first and the last of these rows' groups, and how many those are."""

ALIGNED = 8
"""Rows of which TMA's tiles in shared memory are made: where tiles may start."""


class Visits(NamedTuple):
    """What a kernel reads."""

    table: Array
    """int32 [capacity, 6], of which the first ``number`` rows count."""
    number: Array
    """Of visits, int32 [1]."""
    bounds: Array
    """First row of each group and the one behind its last, int32 [B G, 2]."""


def capacity(batch: int, rows: int, groups: int, block: int) -> int:
    """Returns the most visits that there can be."""
    segments = batch * (groups + 1)
    return (batch * rows + (ALIGNED - 1) * segments) // block + segments


def group_bounds(group_sizes: Array, rows: int) -> Array:
    """int32 [B, G, 2]: where the groups of B examples, whose rows stand one behind the other, start and end."""
    ends = jnp.cumsum(group_sizes, axis=1, dtype=group_sizes.dtype)
    origin = jnp.arange(group_sizes.shape[0], dtype=jnp.int32)[:, None] * rows
    parts = [jnp.clip(x, 0, rows).astype(jnp.int32) + origin for x in (ends - group_sizes, ends)]
    return jnp.stack(parts, axis=2)


def visits(group_sizes: Array, rows: int, block: int) -> Visits:
    """Returns the tables for results that are rows.

    Args:
      group_sizes: [B, G], integers.
      rows: M, of each example.
      block: rows of a tile.
    """
    batch, groups = group_sizes.shape
    bounds = group_bounds(group_sizes, rows)
    origin = jnp.arange(batch, dtype=jnp.int32)[:, None] * rows
    edges = _ascending(jnp.concatenate([origin, bounds[:, :, 1], origin + rows], axis=1))
    begin, end = edges[:, :-1], edges[:, 1:]

    inside = (bounds[:, None, :, 0] <= begin[:, :, None]) & (begin[:, :, None] < bounds[:, None, :, 1])
    number = jnp.arange(batch * groups, dtype=jnp.int32).reshape(batch, 1, groups)
    first = jnp.min(jnp.where(inside, number, batch * groups), axis=2)
    last = jnp.max(jnp.where(inside, number, -1), axis=2)
    count = jnp.sum(inside, axis=2, dtype=jnp.int32)

    origin = begin // ALIGNED * ALIGNED
    tiles = jnp.where(end > begin, (end - origin + (block - 1)) // block, 0).reshape(-1)
    total = jnp.cumsum(tiles, dtype=jnp.int32)
    visit = jnp.arange(capacity(batch, rows, groups, block), dtype=jnp.int32)
    segment = jnp.minimum(jnp.sum(total[None, :] <= visit[:, None], axis=1, dtype=jnp.int32), tiles.shape[0] - 1)
    columns = [x.reshape(-1) for x in (origin, begin, end, total - tiles, first, last, count)]
    origin, begin, end, before, *groups_of = (
        x[:, 0] for x in jnp.split(jnp.stack(columns, axis=1)[segment], 7, axis=1)
    )
    at = origin + (visit - before) * block
    low, high = (jnp.clip(x - at, 0, block) for x in (begin, end))
    table = jnp.stack([at, low, high, *groups_of], axis=1)
    return Visits(table, total[-1:], bounds.reshape(-1, 2))


def _ascending(values: Array) -> Array:
    """Each row sorted."""
    place = jnp.arange(values.shape[1], dtype=jnp.int32)
    this, other = values[:, :, None], values[:, None, :]
    before = (other < this) | ((other == this) & (place[None, :] < place[:, None]))
    rank = jnp.sum(before, axis=2, dtype=jnp.int32)
    chosen = rank[:, None, :] == place[None, :, None]
    return jnp.sum(jnp.where(chosen, values[:, None, :], 0), axis=2, dtype=jnp.int32)
