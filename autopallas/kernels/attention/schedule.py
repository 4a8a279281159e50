"""What the streaming attention visits: windows of the operands, and the order of the tiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.kernels.attention.intervals import Ranges
from autopallas.kernels.attention.spec import AttentionSpec, Weight
from autopallas.kernels.attention.tiles import DEAD, FULL, PARTIAL, Edges, increasing, simplified, tile_map
from autopallas.program import Program

__all__ = [
    "Schedule",
    "TilePrograms",
    "Window",
    "accumulate",
    "cut",
    "edges",
    "loop",
    "schedule",
    "store",
    "tile_programs",
]

Carry = TypeVar("Carry")
Start: TypeAlias = int | jax.Array
Window: TypeAlias = Sequence[tuple[Start, int] | None]
"""Per dimension (start, size), or None for all of it."""


def cut(array: jax.Array, window: Window) -> jax.Array:
    """The part of ``array`` in ``window``."""
    starts, sizes = _resolved(array, window)
    return array if sizes == array.shape else lax.dynamic_slice(array, starts, sizes)


def accumulate(array: jax.Array, window: Window, update: jax.Array) -> jax.Array:
    """``array`` with ``update`` added in ``window``."""
    starts, sizes = _resolved(array, window)
    if sizes == array.shape:
        return array + update
    return lax.dynamic_update_slice(array, lax.dynamic_slice(array, starts, sizes) + update, starts)


def store(array: jax.Array, window: Window, update: jax.Array) -> jax.Array:
    """``array`` with ``update`` written in ``window``."""
    starts, sizes = _resolved(array, window)
    update = update.astype(array.dtype)
    return update if sizes == array.shape else lax.dynamic_update_slice(array, update, starts)


def _resolved(array: jax.Array, window: Window) -> tuple[list[Any], tuple[int, ...]]:
    parts = [(0, size) if part is None else part for part, size in zip(window, array.shape, strict=True)]
    return [jnp.asarray(start, jnp.int32) for start, _ in parts], tuple(size for _, size in parts)


def loop(count: int | jax.Array, body: Callable[[Start, Carry], Carry], carry: Carry) -> Carry:
    """``carry`` after ``body(0, .) .. body(count - 1, .)``; a count known to be 0 or 1 makes no loop."""
    if isinstance(count, int) and count <= 1:
        return body(0, carry) if count else carry
    result: Carry = lax.fori_loop(0, count, body, carry)
    return result


@dataclass(frozen=True, slots=True)
class TilePrograms:
    """The programs of a spec, as they are to be evaluated on one class of tiles."""

    score: Program
    inner_weights: tuple[Weight, ...]
    weights: tuple[Weight, ...]
    increasing: bool
    """Whether the score program is a non-decreasing function of the score and of nothing else."""


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """Blocks of rows and columns, and the tiles to visit for each block of rows."""

    query_block: int
    key_block: int
    batch_step: int
    head_step: int
    states: np.ndarray[Any, np.dtype[Any]]
    """[row blocks, column blocks] of DEAD, PARTIAL, FULL; a last, shorter block is one of them."""
    full: TilePrograms
    partial: TilePrograms
    query_length: int
    key_length: int

    @property
    def whole_row_blocks(self) -> int:
        return self.query_length // self.query_block

    @property
    def whole_column_blocks(self) -> int:
        return self.key_length // self.key_block

    def over_columns(
        self, row_block: Start, tile: Callable[[Start, int, TilePrograms, Carry], Carry], carry: Carry
    ) -> Carry:
        """``carry`` after ``tile(key_start, key_size, programs, .)`` for each live tile of a block of rows."""
        whole = self.whole_column_blocks
        static = isinstance(row_block, int)
        chosen = self.states[row_block : row_block + 1] if static else self.states[: self.whole_row_blocks]
        for state, programs in ((FULL, self.full), (PARTIAL, self.partial)):
            hits = chosen[:, :whole] == state
            counts = hits.sum(axis=1)
            if not counts.max(initial=0):
                continue
            # Columns in ascending order first; what follows the count is never read.
            order = np.argsort(~hits, axis=1, kind="stable")[:, : counts.max()].astype(np.int32)
            row = 0 if static else row_block

            def visit(n: Start, carry: Carry, order: Any = order, row: Start = row, programs: Any = programs) -> Carry:
                if np.all(order == order[:, :1] + np.arange(order.shape[1])) and np.all(order[:, 0] == order[0, 0]):
                    block: Any = int(order[0, 0]) + n
                else:
                    block = jnp.asarray(order)[row, n]
                return tile(block * self.key_block, self.key_block, programs, carry)

            same = int(counts[0]) if np.all(counts == counts[0]) else None
            carry = loop(same if same is not None else jnp.asarray(counts.astype(np.int32))[row_block], visit, carry)
        if self.key_length % self.key_block:
            tail = chosen[:, whole]
            if np.any(tail != DEAD):  # computing a dead tile is a waste, never wrong
                programs = self.full if np.all(tail == FULL) else self.partial
                start = whole * self.key_block
                carry = tile(start, self.key_length - start, programs, carry)
        return carry


def edges(length: int, block: int) -> Edges:
    """(start, stop) of each block of an axis."""
    return tuple((start, min(start + block, length)) for start in range(0, length, block))


def tile_programs(
    spec: AttentionSpec, rows: Edges, columns: Edges, states: np.ndarray[Any, np.dtype[Any]]
) -> tuple[TilePrograms, TilePrograms]:
    """The programs of any tile, and those of the full ones among the tiles ``rows[i] x columns[j]``."""
    general = TilePrograms(spec.score, spec.inner_weights, spec.weights, increasing(spec.score))
    full = general
    where = np.argwhere(states == FULL)
    if spec.live is not None and len(where):
        ranges = Ranges(*np.array([(*rows[i], *columns[j]) for i, j in where], np.int64).T)

        def resolved(weights: tuple[Weight, ...]) -> tuple[Weight, ...]:
            return tuple(Weight(w.kind, simplified(w.program, ranges)) for w in weights)

        score = simplified(spec.score, ranges)
        full = TilePrograms(score, resolved(spec.inner_weights), resolved(spec.weights), increasing(score))
    return general, full


@lru_cache(maxsize=256)
def schedule(spec: AttentionSpec, block_sizes: BlockSizes) -> Schedule:
    """The schedule of an attention; computed once, from positions alone."""
    blocks = block_sizes.fitted(spec)
    rows, columns = edges(spec.query_length, blocks.query_block), edges(spec.key_length, blocks.key_block)
    states = tile_map(spec, rows, columns)
    general, full = tile_programs(spec, rows, columns, states)
    batch_step, head_step = blocks.heads_per_step(spec)
    return Schedule(
        query_block=blocks.query_block,
        key_block=blocks.key_block,
        batch_step=batch_step,
        head_step=head_step,
        states=states,
        full=full,
        partial=general,
        query_length=spec.query_length,
        key_length=spec.key_length,
    )
