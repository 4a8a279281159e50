"""Which tile of rows meets which group, and when: the tables that a kernel's grid follows.

A visit is one tile of rows together with one group that owns some of them.  Visits come in an order in which those of
one result stand next to each other, so that a result is written once.  Their number depends on the data and has a bound
that does not: a group brings one more tile than its rows fill where it starts inside a tile that another one began.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["Visits", "capacity", "even_bounds", "group_bounds", "visits_by_group", "visits_by_tile"]

Array: TypeAlias = jax.Array


class Visits(NamedTuple):
    """One entry per visit, int32 [capacity], of which the first ``number`` are to be made."""

    tile: Array
    group: Array
    begin: Array
    """The first row of the tile that the group owns, counted from the tile's first."""
    end: Array
    """Behind the last one; not above ``begin`` where the group owns none."""
    first: Array
    """1 at the first visit of a result."""
    last: Array
    """1 at the last one."""
    number: Array
    """Of visits, [], int32."""


def capacity(rows: int, row_block: int, groups: int) -> int:
    """Returns the most visits that there can be."""
    return -(-rows // row_block) + groups - 1


def group_bounds(group_sizes: Array, rows: int) -> tuple[Array, Array, Array]:
    """(start, end, whether no group overlaps another) of B examples, whose rows stand one example behind the other.

    Args:
      group_sizes: [B, G], integers.
      rows: M, of each example.

    Returns:
      start and end [B G], int32, within the example's rows; and a boolean [].
    """
    ends = jnp.cumsum(group_sizes, axis=1, dtype=group_sizes.dtype)
    origin = jnp.arange(group_sizes.shape[0], dtype=jnp.int32)[:, None] * rows
    start, end = ((jnp.clip(x, 0, rows).astype(jnp.int32) + origin).reshape(-1) for x in (ends - group_sizes, ends))
    return start, end, jnp.all(group_sizes >= 0)


def even_bounds(batch: int, groups: int, rows: int) -> tuple[Array, Array]:
    """(start, end) as of :func:`group_bounds`, as constants, of groups of equal sizes, as nearly as there are rows."""
    edges = np.arange(groups + 1) * rows // groups + np.arange(batch)[:, None] * rows
    bounds = edges[:, :-1].reshape(-1).astype(np.int32), edges[:, 1:].reshape(-1).astype(np.int32)
    return cast(tuple[Array, Array], bounds)  # NumPy's, which stand for JAX's


def visits_by_tile(start: Array, end: Array, rows: int, row_block: int) -> Visits:
    """For results that are rows: tile by tile, each with the groups in it, or with none if there are none.

    Args:
      start, end: [G], rows of each group, ascending and apart.
      rows: of all tiles.
      row_block: rows of one.
    """
    groups, tiles = start.shape[0], -(-rows // row_block)
    owns = end > start
    with_rows = jnp.argsort(~owns, stable=True)
    edge = jnp.arange(tiles, dtype=jnp.int32)[:, None] * row_block
    before = jnp.sum(owns & (end <= edge), axis=1, dtype=jnp.int32)
    begun = jnp.sum(owns & (start < edge + row_block), axis=1, dtype=jnp.int32)
    visits = jnp.maximum(begun - before, 1)
    tile, nth, number = _numbered(visits, capacity(rows, row_block, groups))
    rank = before[tile] + nth
    # A tile without a group waits for the weights of the next one, which are wanted soon.
    group = with_rows[jnp.minimum(rank, groups - 1)].astype(jnp.int32)
    inside = (rank < begun[tile]) & (nth < visits[tile])
    return _visits(tile, group, inside, nth, visits[tile], start, end, row_block, number)


def visits_by_group(start: Array, end: Array, rows: int, row_block: int) -> Visits:
    """For results that are groups: group by group, each with its tiles, or with one if it has no rows.

    Arguments as in :func:`visits_by_tile`.
    """
    groups, tiles = start.shape[0], -(-rows // row_block)
    owns = end > start
    foremost = start // row_block
    visits = jnp.where(owns, -(-end // row_block) - foremost, 1)
    group, nth, number = _numbered(visits, capacity(rows, row_block, groups))
    tile = jnp.minimum(foremost[group] + nth, tiles - 1)
    return _visits(tile, group, owns[group], nth, visits[group], start, end, row_block, number)


def _numbered(visits: Array, length: int) -> tuple[Array, Array, Array]:
    """(result, number within the result) of each visit, [length], and how many there are."""
    total = jnp.cumsum(visits, dtype=jnp.int32)
    visit = jnp.arange(length, dtype=jnp.int32)
    result = jnp.minimum(jnp.searchsorted(total, visit, side="right"), visits.shape[0] - 1).astype(jnp.int32)
    return result, visit - (total - visits)[result], total[-1]


def _visits(
    tile: Array,
    group: Array,
    inside: Array,
    nth: Array,
    visits: Array,
    start: Array,
    end: Array,
    row_block: int,
    number: Array,
) -> Visits:
    begin, behind = (jnp.where(inside, jnp.clip(x[group] - tile * row_block, 0, row_block), 0) for x in (start, end))
    first, last = (nth == 0).astype(jnp.int32), (nth == visits - 1).astype(jnp.int32)
    return Visits(tile, group, begin, behind, first, last, number)
