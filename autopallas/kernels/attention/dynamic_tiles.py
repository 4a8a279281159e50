"""Decides at run time which tiles have to be computed, by side inputs: segment ids, lengths, masks.

The decision is exact, made once per mask, and needs no array of the size of the scores: ``spec.live`` is evaluated for
one block of rows at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp

from autopallas.kernels.attention.spec import AttentionSpec
from autopallas.kernels.attention.tiles import DEAD, PARTIAL

__all__ = ["compacted", "run_time_states"]

Array: TypeAlias = jax.Array


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
