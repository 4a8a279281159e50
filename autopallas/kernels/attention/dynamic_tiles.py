"""Decides at run time which tiles have to be computed, by side inputs: segment ids, lengths, masks.

The decision is exact, made once per mask, and needs no array of the size of the scores: ``spec.live`` is evaluated for
one block of rows at a time.  On a GPU, where each of these would be several small kernels, it is evaluated for as many
rows as give few million tiles of one row, within the kernel that reduces it to these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp

from autopallas.kernels.attention.spec import AttentionSpec
from autopallas.kernels.attention.tiles import DEAD, PARTIAL

__all__ = ["UNIT", "by_units", "compacted", "merged", "run_time_states", "unseen"]

Array: TypeAlias = jax.Array
Decide: TypeAlias = Callable[[Array, Array, Sequence[Array]], Array]

UNIT = 64
"""Rows and keys of the tiles that are decided together on a GPU; those of its kernels are multiples, or parts."""
_AT_ONCE = 2**22
"""Tiles of one row that are decided at once there."""


def run_time_states(spec: AttentionSpec, query_block: int, key_block: int, sides: Sequence[Array]) -> Array | None:
    """Returns [B|1, row blocks, column blocks] of DEAD and PARTIAL, or None if nothing may be skipped.

    The rule is that of ``tiles.tile_map``: a tile is dead only if all its elements are, for every head, and each of its
    rows has a live key elsewhere.

    Args:
      spec: the attention.
      query_block, key_block: sizes of a tile; the last block of an axis may reach beyond its end.
      sides: the side inputs, each [B|1, K|1, G|1, T|1, S|1].
    """
    live = spec.live
    if live is None or not live.sides or not spec.assume_finite:
        return None
    rows, columns = -(-spec.query_length // query_block), -(-spec.key_length // key_block)
    s = jnp.arange(columns * key_block, dtype=jnp.int32).reshape(1, 1, 1, 1, columns, key_block)

    def cut(x: Array) -> Array:
        """Reshapes a side input to [row blocks, B|1, K|1, G|1, bq|1, column blocks|1, bk|1]."""
        b, k, g, height, width = x.shape
        tall, wide = (rows, query_block) if height > 1 else (1, 1), (columns, key_block) if width > 1 else (1, 1)
        missing = (tall[0] * tall[1] - height, wide[0] * wide[1] - width)
        x = jnp.pad(x, [(0, 0)] * 3 + [(0, n) for n in missing]).reshape(b, k, g, *tall, *wide)
        return jnp.broadcast_to(jnp.moveaxis(x, 3, 0), (rows, b, k, g, tall[1], *wide))

    read = {n: cut(sides[n]) for n in live.sides}

    def block(inputs: tuple[Array, dict[int, Array]]) -> Array:
        """Returns whether tiles of one block of rows have to be computed, [B|1, column blocks]."""
        start, here = inputs
        t = (start + jnp.arange(query_block, dtype=jnp.int32)).reshape(1, 1, 1, query_block, 1, 1)
        alive = live.evaluate(None, t, s, [here.get(n, jnp.zeros((), jnp.int32)) for n in range(len(sides))])
        alive = alive & (t < spec.query_length) & (s < spec.key_length)
        alive = jnp.broadcast_to(alive, (*alive.shape[:3], query_block, columns, key_block))
        alive = jnp.any(alive, axis=5)
        has_key = jnp.any(alive, axis=4) | (t >= spec.query_length)[..., 0, 0]
        return jnp.any(alive, axis=(1, 2, 3)) | ~jnp.all(has_key, axis=(1, 2, 3))[:, None]

    starts = jnp.arange(rows, dtype=jnp.int32) * query_block
    wanted = jnp.moveaxis(jax.lax.map(block, (starts, read)), 0, 1)
    return jnp.where(wanted, PARTIAL, DEAD).astype(jnp.int32)


def unseen(spec: AttentionSpec, sides: Sequence[Array]) -> Array | None:
    """Returns which tiles :func:`run_time_states` has as DEAD, of :data:`UNIT` rows and keys, [B|1, rows, keys]."""
    live = spec.live
    if live is None or not live.sides or not spec.assume_finite:
        return None

    def decide(t: Array, s: Array, given: Sequence[Array]) -> Array:
        alive = live.evaluate(None, t, s, given) & (s < spec.key_length)
        seen = jnp.any(jnp.broadcast_to(alive, _widened(alive, t, s)), axis=-1)
        return ~seen & jnp.any(seen, axis=-1, keepdims=True)

    return by_units(spec, sides, live.sides, decide)


def by_units(spec: AttentionSpec, sides: Sequence[Array], read: Collection[int], decide: Decide) -> Array:
    """Returns of which tiles of :data:`UNIT` rows and keys something holds in each row of each head, [B|1, rows, keys].

    Args:
      spec: the attention.
      sides: the side inputs, each [B|1, K|1, G|1, T|1, S|1].
      read: those that are read.
      decide: is given positions of some rows and of all keys, [rows, 1, 1] and [tiles, UNIT], of which the last may
        be beyond the end, and the side inputs at these, [B|1, K|1, G|1, rows|1, tiles|1, UNIT|1]; returns what holds
        in each row of each tile, [B|1, K|1, G|1, rows, tiles].
    """
    columns = -(-spec.key_length // UNIT)
    key = jnp.arange(columns * UNIT, dtype=jnp.int32).reshape(columns, UNIT)
    heads = math.prod(max((sides[n].shape[axis] for n in read), default=1) for axis in range(3))
    most = max(1, _AT_ONCE // (heads * columns * UNIT))
    units = -(-spec.query_length // UNIT)
    parts = -(-units // most)
    height = -(-units // parts) * UNIT  # rows of a part
    missing = parts * height - spec.query_length

    def cut(x: Array) -> Array:
        """Reshapes a side input to [parts, B|1, K|1, G|1, rows|1, tiles|1, UNIT|1]."""
        tall, wide = x.shape[3] > 1, x.shape[4] > 1
        x = jnp.pad(x, [(0, 0)] * 3 + [(0, missing * tall), (0, wide * (columns * UNIT - spec.key_length))])
        x = x.reshape(*x.shape[:3], *((parts, height) if tall else (1, 1)), *((columns, UNIT) if wide else (1, 1)))
        return jnp.broadcast_to(jnp.moveaxis(x, 3, 0), (parts, *x.shape[:3], *x.shape[4:]))

    def part(inputs: tuple[Array, dict[int, Array]]) -> Array:
        start, here = inputs
        row = (start + jnp.arange(height, dtype=jnp.int32)).reshape(height, 1, 1)
        holds = decide(row, key, [here.get(n, jnp.zeros((), x.dtype)) for n, x in enumerate(sides)])
        holds |= row[..., 0] >= spec.query_length
        return jnp.all(holds.reshape(*holds.shape[:3], height // UNIT, UNIT, columns), axis=(1, 2, 4))

    cuts = {n: cut(sides[n]) for n in read}
    starts = jnp.arange(parts, dtype=jnp.int32) * height
    if parts == 1:
        return part((starts[0], {n: x[0] for n, x in cuts.items()}))[:, :units]
    found = jnp.moveaxis(jax.lax.map(part, (starts, cuts)), 0, 1)
    return found.reshape(len(found), -1, columns)[:, :units]


def _widened(x: Array, row: Array, key: Array) -> tuple[int, ...]:
    """Returns the shape of what is known of each element, [B|1, K|1, G|1, rows, tiles, UNIT]."""
    return *((1,) * (6 - x.ndim) + x.shape)[:3], len(row), *key.shape


def merged(holds: Array, row_block: int, column_block: int, rows: int, columns: int) -> Array:
    """Returns the same for blocks of other sizes, multiples or parts of :data:`UNIT`, [B|1, rows, columns]."""
    for axis, (block, count) in enumerate([(row_block, rows), (column_block, columns)], 1):
        if block < UNIT:
            holds = jnp.repeat(holds, UNIT // block, axis)
        else:
            ratio = block // UNIT
            widths = [(0, (count * ratio - holds.shape[axis]) if n == axis else 0) for n in range(3)]
            holds = jnp.pad(holds, widths, constant_values=True)
            holds = jnp.all(holds.reshape(*holds.shape[:axis], count, ratio, *holds.shape[axis + 1 :]), axis=axis + 1)
        holds = jax.lax.slice_in_dim(holds, 0, count, axis=axis)
    return holds


def compacted(
    states: Array, group: Literal["row", "column", "tile", "all"], first: int, last: int
) -> tuple[tuple[Array, Array, Array], Array]:
    """Returns the tiles to visit as three lists, concatenated over batch entries, and the length of the longest one.

    Args:
      states: [B|1, row blocks, column blocks].
      group: what the tiles of one output block have in common.
      first, last: flags of an output block's first and last tile, which are added to the state.

    Returns:
      Row, column and flags of each tile, each [B|1 * tiles].  Entries after the last live one repeat it, as dead.
    """
    _, rows, columns = states.shape
    wanted = (states != DEAD) | (group == "tile")
    if group == "column":  # an output block without a live tile has to be written too
        wanted = wanted.at[:, 0].set(wanted[:, 0] | ~jnp.any(wanted, axis=1))
    elif group == "row":
        wanted = wanted.at[:, :, 0].set(wanted[:, :, 0] | ~jnp.any(wanted, axis=2))
    elif group == "all":
        wanted = wanted.at[:, 0, 0].set(wanted[:, 0, 0] | ~jnp.any(wanted, axis=(1, 2)))
    if group == "column":
        wanted, states = jnp.swapaxes(wanted, 1, 2), jnp.swapaxes(states, 1, 2)
    across = rows if group == "column" else columns
    wanted, states = wanted.reshape(len(wanted), -1), states.reshape(len(states), -1)
    count = jnp.sum(wanted, axis=1, keepdims=True, dtype=jnp.int32)
    step = jnp.arange(wanted.shape[1], dtype=jnp.int32)[None]
    order = jnp.argsort(~wanted, axis=1, stable=True).astype(jnp.int32)
    order = jnp.take_along_axis(order, jnp.minimum(step, count - 1), axis=1)
    outer, inner = order // across, order % across
    common = {"row": outer, "column": outer, "tile": order, "all": jnp.zeros_like(order)}[group]
    changes = common[:, 1:] != common[:, :-1]
    ends = jnp.ones_like(changes[:, :1])
    begins = jnp.concatenate([ends, changes], axis=1)
    finishes = jnp.concatenate([changes, ends], axis=1) | (step == count - 1)
    flags = jnp.take_along_axis(states, order, axis=1) + first * begins + last * finishes
    flags = jnp.where(step < count, flags, DEAD).astype(jnp.int32)
    row, column = (inner, outer) if group == "column" else (outer, inner)
    lists = (row.reshape(-1), column.reshape(-1), flags.reshape(-1))
    return lists, jnp.max(count)
