"""Plans what the streaming attention visits: windows of the operands, and the order of the tiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.kernels.attention.fills import fill_of, tile_states
from autopallas.kernels.attention.intervals import Ranges
from autopallas.kernels.attention.spec import AttentionSpec, Weight
from autopallas.kernels.attention.tiles import FULL, HIDDEN, PARTIAL, Edges, increasing, simplified
from autopallas.kernels.even_blocks import Part, Start
from autopallas.sites.block_sizes import dividing, evened
from autopallas.sites.elementwise import ElementwiseProgram

__all__ = [
    "Schedule",
    "TilePrograms",
    "Window",
    "accumulate",
    "cut",
    "divided",
    "edges",
    "loop",
    "running_blocks",
    "schedule",
    "store",
    "tile_programs",
]

_FEW = 4
"""Tiles without a mask for each masked one up to which all are taken as masked: a loop of their own makes none of these
faster (measured: 0.97x to 1.06x), and is a sixth of what the site costs to compile."""

Carry = TypeVar("Carry")
Window: TypeAlias = Sequence[tuple[Start, int] | None]
"""For each dimension (start, size), or None for all of it."""


def cut(array: jax.Array, window: Window) -> jax.Array:
    """Returns the part of ``array`` in ``window``."""
    starts, sizes = _resolved(array, window)
    return array if sizes == array.shape else lax.dynamic_slice(array, starts, sizes, allow_negative_indices=False)


def accumulate(array: jax.Array, window: Window, update: jax.Array) -> jax.Array:
    """Returns ``array`` with ``update`` added in ``window``."""
    starts, sizes = _resolved(array, window)
    if sizes == array.shape:
        return array + update
    return _written(array, lax.dynamic_slice(array, starts, sizes, allow_negative_indices=False) + update, starts)


def store(array: jax.Array, window: Window, update: jax.Array) -> jax.Array:
    """Returns ``array`` with ``update`` written in ``window``."""
    starts, sizes = _resolved(array, window)
    update = update.astype(array.dtype)
    return update if sizes == array.shape else _written(array, update, starts)


def _written(array: jax.Array, update: jax.Array, starts: list[jax.Array]) -> jax.Array:
    return lax.dynamic_update_slice(array, update, starts, allow_negative_indices=False)


def element(table: np.ndarray, *place: Start) -> jax.Array:
    """Returns a number of a table, int32, at a place that is known to be in it.

    Indexing would spend several equations on negative numbers, as slices do where these are allowed: to compile and to
    run them is a good part of what loops over small tiles cost.
    """
    at = [jnp.asarray(index, jnp.int32) for index in place]
    found = lax.dynamic_slice(table.astype(np.int32), at, (1,) * table.ndim, allow_negative_indices=False)
    return found.reshape(())


def _resolved(array: jax.Array, window: Window) -> tuple[list[jax.Array], tuple[int, ...]]:
    parts = [(0, size) if part is None else part for part, size in zip(window, array.shape, strict=True)]
    return [jnp.asarray(start, jnp.int32) for start, _ in parts], tuple(size for _, size in parts)


def divided(number: Start, divisor: int) -> tuple[Start, Start]:
    """Returns the quotient and the remainder of a number that is not negative."""
    if divisor == 1:
        return number, 0
    if isinstance(number, int):
        return divmod(number, divisor)
    wide, by = number.astype(jnp.uint32), np.uint32(divisor)  # XLA spends more equations on numbers with signs
    return lax.div(wide, by).astype(number.dtype), lax.rem(wide, by).astype(number.dtype)


def loop(count: int | jax.Array, body: Callable[[Start, Carry], Carry], carry: Carry) -> Carry:
    """Returns ``carry`` after ``body(0, .) .. body(count - 1, .)``; a count known to be 0 or 1 makes no loop."""
    if isinstance(count, int) and count <= 1:
        return body(0, carry) if count else carry
    result: Carry = lax.fori_loop(0, count, body, carry)
    return result


@dataclass(frozen=True, slots=True)
class TilePrograms:
    """The programs of a spec, simplified for one class of tiles."""

    score: ElementwiseProgram
    inner_weights: tuple[Weight, ...]
    weights: tuple[Weight, ...]
    increasing: bool
    """Whether the score program is a non-decreasing function of the score alone."""


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """Blocks of rows and columns, and the tiles to visit for each block of rows."""

    query_block: int
    key_block: int
    batch_step: int
    head_step: int
    states: np.ndarray
    """[row blocks, column blocks] of DEAD, PARTIAL, FULL, HIDDEN."""
    least: float
    """If a row's maximum is this great, keys in hidden tiles have no weight."""
    full: TilePrograms
    partial: TilePrograms
    query_length: int
    key_length: int

    @property
    def row_blocks(self) -> int:
        return len(self.states)

    def rows(self, block: Start) -> Part:
        """Returns a block of rows by its number."""
        return Part.of(self.query_length, self.query_block, block)

    def columns(self, block: Start) -> Part:
        """Returns a block of columns by its number."""
        return Part.of(self.key_length, self.key_block, block)

    @property
    def hides(self) -> bool:
        """Whether there are hidden tiles."""
        return bool(np.any(self.states == HIDDEN))

    def decisive(self, maxima: jax.Array) -> jax.Array:
        """Returns the maxima of rows beside which keys in hidden tiles have no weight, -infinity for the other rows."""
        return jnp.where(maxima >= self.least, maxima, -jnp.inf)

    def over_columns(
        self,
        row_block: Start,
        tile: Callable[[Part, TilePrograms, Carry], Carry],
        carry: Carry,
        reveals: Callable[[Carry], jax.Array] | None = None,
    ) -> Carry:
        """Returns ``carry`` after ``tile(columns, programs, .)`` for each tile of a block of rows.

        Live tiles come first, those without a mask before the others.  Hidden tiles follow if ``reveals(carry)``, a
        boolean scalar, or without ``reveals``.
        """
        chosen = self.states[row_block : row_block + 1] if isinstance(row_block, int) else self.states
        full, partial, hidden = (chosen == state for state in (FULL, PARTIAL, HIDDEN))
        carry = self._over(row_block, full, self.full, tile, carry)
        return self._over(row_block, partial | hidden, self.partial, tile, carry, partial, reveals)

    def _over(
        self,
        row_block: Start,
        hits: np.ndarray,
        programs: TilePrograms,
        tile: Callable[[Part, TilePrograms, Carry], Carry],
        carry: Carry,
        first: np.ndarray | None = None,
        reveals: Callable[[Carry], jax.Array] | None = None,
    ) -> Carry:
        """Returns ``carry`` after the tiles ``hits`` [rows or 1, column blocks] of a block of rows.

        Tiles that are ``first`` come before the others, which are visited only while ``reveals(carry)``.
        """
        counts = hits.sum(axis=1)
        if not counts.max(initial=0):
            return carry
        # Columns are in ascending order; what follows the count is never read.
        rank = ~hits if first is None else 2 - hits.astype(int) - first
        order = np.argsort(rank, axis=1, kind="stable")[:, : counts.max()].astype(np.int32)
        row = 0 if isinstance(row_block, int) else row_block

        follows = _affine(order[:, 0], counts > 0) if _consecutive(order, counts) else None

        def visit(n: Start, carry: Carry) -> Carry:
            block = element(order, row, n) if follows is None else _of_row(*follows, row) + n
            return tile(self.columns(block), programs, carry)

        def of_row(numbers: np.ndarray) -> Start:
            same = _affine(numbers, np.ones(len(numbers), bool))
            return element(numbers, row) if same is None else _of_row(*same, row)

        if first is None or reveals is None or np.all(first == hits):
            return loop(of_row(counts), visit, carry)
        certain, most = of_row(first.sum(axis=1)), of_row(counts)

        def goes_on(state: tuple[jax.Array, Carry]) -> jax.Array:
            n, carry = state
            return (n < certain) | ((n < most) & reveals(carry))

        def step(state: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
            n, carry = state
            return n + 1, visit(n, carry)

        result: Carry = lax.while_loop(goes_on, step, (jnp.zeros((), jnp.int32), carry))[1]
        return result


def _consecutive(order: np.ndarray, counts: np.ndarray) -> bool:
    """Returns whether the first ``counts`` numbers of each row follow each other."""
    steps = np.arange(order.shape[1])
    return bool(np.all((order == order[:, :1] + steps) | (steps >= counts[:, None])))


def _affine(numbers: np.ndarray, counting: np.ndarray) -> tuple[int, int] | None:
    """Returns (first, step) if ``numbers[row]`` is ``first + step * row`` for each row that counts: a sum costs less to
    compile than a table."""
    rows = np.flatnonzero(counting)
    step = int(numbers[rows[1]] - numbers[rows[0]]) // int(rows[1] - rows[0]) if len(rows) > 1 else 0
    first = int(numbers[rows[0]]) - step * int(rows[0])
    return (first, step) if np.all(numbers[rows] == first + step * rows) else None


def _of_row(first: int, step: int, row: Start) -> Start:
    return first + step * row if step else first


def edges(length: int, block: int) -> Edges:
    """Returns (start, stop) of each block of an axis."""
    return tuple((start, min(start + block, length)) for start in range(0, length, block))


def tile_programs(
    spec: AttentionSpec, rows: Edges, columns: Edges, states: np.ndarray
) -> tuple[TilePrograms, TilePrograms]:
    """Returns the programs for any tile, and those for the full ones among the tiles ``rows[i] x columns[j]``."""
    general = TilePrograms(spec.score, spec.inner_weights, spec.weights, increasing(spec.score))
    full = general
    where = np.argwhere(states == FULL)
    if (spec.live is not None or fill_of(spec) is not None) and len(where):
        ranges = Ranges(*np.array([(*rows[i], *columns[j]) for i, j in where], np.int64).T)

        def resolved(weights: tuple[Weight, ...]) -> tuple[Weight, ...]:
            return tuple(Weight(w.kind, simplified(w.program, ranges)) for w in weights)

        score = simplified(spec.score, ranges)
        full = TilePrograms(score, resolved(spec.inner_weights), resolved(spec.weights), increasing(score))
    return general, full


def running_blocks(spec: AttentionSpec, block_sizes: BlockSizes) -> BlockSizes:
    """Returns the sizes of the blocks of a schedule: near those that are asked for, and dividing the axes if any do."""
    fitted = block_sizes.fitted(spec)

    def running(block: int, length: int) -> int:
        return evened(dividing(block, length), length)

    return BlockSizes(running(fitted.query_block, spec.query_length), running(fitted.key_block, spec.key_length))


@lru_cache(maxsize=256)
def schedule(spec: AttentionSpec, block_sizes: BlockSizes) -> Schedule:
    """Returns the schedule of an attention, computed once, from positions alone."""
    blocks = running_blocks(spec, block_sizes)
    rows, columns = edges(spec.query_length, blocks.query_block), edges(spec.key_length, blocks.key_block)
    # A last block of rows computes those that it repeats again; what a last block of columns repeats is left out.
    rows = (*rows[:-1], (rows[-1][1] - blocks.query_block, rows[-1][1]))
    states, least = tile_states(spec, rows, columns)
    if spec.key_length % blocks.key_block and (spec.live is not None or fill_of(spec) is not None):
        last = np.arange(len(columns)) == len(columns) - 1
        states = np.where(last & (states == FULL), PARTIAL, states)  # the mask may hide keys that it repeats
    general, full = tile_programs(spec, rows, columns, states)
    if 0 < np.count_nonzero(states == FULL) <= _FEW * np.count_nonzero(states == PARTIAL):
        states = np.where(states == FULL, PARTIAL, states)
    batch_step, head_step = blocks.heads_per_step(spec)
    return Schedule(
        query_block=blocks.query_block,
        key_block=blocks.key_block,
        batch_step=batch_step,
        head_step=head_step,
        states=states,
        least=least,
        full=full,
        partial=general,
        query_length=spec.query_length,
        key_length=spec.key_length,
    )
