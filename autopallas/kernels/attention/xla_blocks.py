"""Blocks of rows of an attention in plain JAX: their windows of the operands, what a tile reads, and its dots.

Letters: B batch, K key heads, G query heads per key head, T query length, S key length, D and Dv head sizes.  A tile is
[b, k, G, t, s]; axes b, k and G of size 1 are dropped, because XLA's CPU loops vectorise worse with them.  Dots are
batched over b and k, and the groups are merged into the rows.  Arrays of all rows lack the axis of one group too: with
it XLA gives equal arrays different layouts, copies them into each other, and has further kernels to compile for that.
Loops read arrays of rows and of columns :func:`merged`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopallas.kernels.attention.fills import usual
from autopallas.kernels.attention.operands import Operands
from autopallas.kernels.attention.schedule import Carry, Schedule, Window, accumulate, cut, divided, loop
from autopallas.kernels.attention.spec import AttentionSpec
from autopallas.kernels.attention.tile_values import Tile, narrow
from autopallas.kernels.even_blocks import Part, Start
from autopallas.sites.device import Device

__all__ = [
    "RowBlock",
    "TiledAttention",
    "add_sides",
    "counted_once",
    "merged",
    "over_rows",
    "reduced",
    "rows_by_columns",
    "rows_by_score_gradients",
    "rows_by_weights",
    "rows_shape",
    "scores",
    "tile",
    "times_keys",
    "times_values",
    "unrepeated",
]

Array: TypeAlias = jax.Array


class TiledAttention(NamedTuple):
    """One attention, as the loops over its tiles read it.

    Attributes:
      spec: the attention.
      plan: the blocks and the tiles to visit.
      operands: its operands, with queries, keys and values merged.
      bounded: the result of :func:`fills.usual`; None if there are no hidden tiles.
    """

    spec: AttentionSpec
    plan: Schedule
    operands: Operands
    bounded: Array | None

    @staticmethod
    def of(spec: AttentionSpec, plan: Schedule, operands: Operands, dout: Array | None = None) -> TiledAttention:
        """Returns an attention from the kernel's operands, and in a backward from the result's cotangent, merged."""
        query, key, value, sides, sink = operands
        operands = Operands(merged(query), merged(key), merged(value), sides, sink)
        return TiledAttention(spec, plan, operands, usual(spec, operands, dout) if plan.hides else None)

    def reveals(self, least: Array) -> Array:
        """Returns whether the hidden tiles of a block of rows count, a boolean scalar.

        Args:
          least: the least of its rows' maxima, NaN where one is.
        """
        assert self.bounded is not None
        return ~(self.bounded & (least >= self.plan.least))


@dataclass(frozen=True, slots=True, eq=False)
class RowBlock:
    """Position of a block of rows of some heads of some batch entries; starts may be traced, sizes are static."""

    spec: AttentionSpec
    batch: tuple[Start, int]
    heads: tuple[Start, int]
    block: Start
    query: Part

    @property
    def groups(self) -> int:
        return self.spec.groups

    @property
    def size(self) -> int:
        return self.query.size

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a tile, its columns aside: (b, k, G, t), without those of b, k and G that are 1."""
        return (*(n for n in (self.batch[1], self.heads[1], self.groups) if n != 1), self.size)

    @property
    def _outer(self) -> tuple[int, ...]:
        """Sizes of a part of an array of rows before the axis of rows."""
        return (self.batch[1], self.heads[1], *(n for n in (self.groups,) if n != 1))

    @property
    def numbers_window(self) -> Window:
        """Window of this block in an array of the :func:`rows_shape`."""
        return self.window("BKT" if self.groups == 1 else "BKGT")

    @property
    def rows_window(self) -> Window:
        """Window of this block in an array of the :func:`rows_shape` and one more axis, d."""
        return [*self.numbers_window, None]

    def restored(self, x: Array) -> Array:
        """Reshapes [..., t, d] to a part of an array with :attr:`rows_window`."""
        return x.reshape(*self._outer, *x.shape[-2:])

    def rows(self, x: Array) -> Array:
        """Returns this block of merged rows, with the groups merged into its rows: [..., G t, d]."""
        x = x.reshape(*rows_shape(self.spec), x.shape[-1])
        return self.grouped(cut(x, self.rows_window).reshape(*self.shape, x.shape[-1]))

    def numbers(self, x: Array) -> Array:
        """Returns this block of an array with a number for each row: [..., t]."""
        return cut(x, self.numbers_window).reshape(self.shape)

    def grouped(self, x: Array) -> Array:
        """Reshapes [..., G, t, d] to [..., G t, d], the shape of the dots: they need no repeated keys or values."""
        return x if self.groups == 1 else x.reshape(*x.shape[:-3], -1, x.shape[-1])

    def ungrouped(self, x: Array) -> Array:
        """Reshapes [..., G t, d] to [..., G, t, d]."""
        return x if self.groups == 1 else x.reshape(*x.shape[:-2], self.groups, -1, x.shape[-1])

    def columns(self, x: Array, columns: Part) -> Array:
        """Returns a block of merged columns for these heads: [..., s, d]."""
        x = x.reshape(self.spec.batch, self.spec.key_heads, self.spec.key_length, x.shape[-1])
        x = cut(x, self.window("BKS-", columns))
        return lax.squeeze(x, [axis for axis in (0, 1) if x.shape[axis] == 1])

    def unmerged(self, x: Array) -> Array:
        """Reshapes [..., d, s] to [b, k, d, s]."""
        return x.reshape(self.batch[1], self.heads[1], *x.shape[-2:])

    def side_window(self, varies: Sequence[bool], columns: Part) -> Window:
        return [part if v else None for part, v in zip(self.window("BKGTS", columns), varies, strict=True)]

    def side(self, x: Array, varies: Sequence[bool], columns: Part) -> Array:
        """Returns the part of a side input that belongs to a tile, with the tile's axes."""
        sizes = (self.batch[1], self.heads[1], self.groups)
        x = cut(x, self.side_window(varies, columns))
        return lax.squeeze(x, [axis for axis, size in enumerate(sizes) if size == 1])

    def window(self, axes: str, columns: Part | None = None) -> Window:
        """Returns the window of an operand whose dimensions are ``axes``; "-" is a whole dimension."""
        keys = None if columns is None else columns.window
        parts = {"B": self.batch, "K": self.heads, "G": None, "T": self.query.window, "S": keys, "-": None}
        return [parts[a] for a in axes]


def over_rows(plan: Schedule, spec: AttentionSpec, body: Callable[[RowBlock, Carry], Carry], carry: Carry) -> Carry:
    """Returns ``carry`` after ``body`` for each block of rows."""
    batch_steps, head_steps = spec.batch // plan.batch_step, spec.key_heads // plan.head_step

    def place(n: Start) -> RowBlock:
        outer, block = divided(n, plan.row_blocks) if batch_steps * head_steps > 1 else (0, n)
        batch, heads = divided(outer, head_steps)
        return RowBlock(
            spec,
            (batch * plan.batch_step if batch_steps > 1 else 0, plan.batch_step),
            (heads * plan.head_step, plan.head_step),
            block,
            plan.rows(block),
        )

    return loop(batch_steps * head_steps * plan.row_blocks, lambda n, c: body(place(n), c), carry)


def rows_shape(spec: AttentionSpec) -> tuple[int, ...]:
    """Returns the shape of an array with a number for each row: [B, K, T], or [B, K, G, T] where G is not 1."""
    return (spec.batch, spec.key_heads, *(n for n in (spec.groups,) if n != 1), spec.query_length)


def merged(x: Array) -> Array:
    """Returns rows or columns [B, K, ..., d] as [B, K ..., d], the form in which loops read them.

    What a program has as [B, T, N, D] is transposed first.  XLA gives the result a layout in which nothing moves, and
    copies it for a loop, which has another: one kernel computes the array, a second one copies it, and a third one
    computes it again for what reads it outside of the loop.  Merged axes leave no layout but that of the loop.
    """
    return x.reshape(x.shape[0], -1, x.shape[-1])


def tile(spec: AttentionSpec, place: RowBlock, columns: Part, sides: Sequence[Array]) -> Tile:
    """Returns what the programs read on a tile, with the tile's axes."""
    tiles = (place.side(x, s.varies, columns) for x, s in zip(sides, spec.sides, strict=True))
    leading = (1,) * (len(place.shape) - 1)

    # Together, so that XLA does not count a block's rows before the loop over its tiles, by a kernel of its own.
    row, column = lax.optimization_barrier((jnp.asarray(place.query.start), jnp.asarray(columns.start)))

    def positions(start: Array, shape: tuple[int, int]) -> Array:
        # Counted in the tile's own shape, which XLA does within the loops that read it.
        axis = len(leading) + (shape[0] == 1)
        return start.astype(jnp.int32) + lax.broadcasted_iota(jnp.int32, (*leading, *shape), axis)

    return Tile(positions(row, (place.size, 1)), positions(column, (1, columns.size)), tuple(tiles))


def unrepeated(x: Array, here: Tile, columns: Part, rows: Part | None = None) -> Array:
    """Returns a tile of logits with -infinity where an earlier one has had its column, or its row if those count."""
    repeated = None
    if columns.first is not None:
        repeated = here.key < columns.first
    if rows is not None and rows.first is not None:
        above = here.query < rows.first
        repeated = above if repeated is None else repeated | above
    return x if repeated is None else jnp.where(repeated, -jnp.inf, x)


def counted_once(x: Array, part: Part) -> Array:
    """Returns a block of rows or columns [..., n, d] with 0 where an earlier one has had them: weights of 0 times an
    infinity would be NaN."""
    if part.first is None:
        return x
    at = part.start + lax.broadcasted_iota(jnp.int32, (part.size, 1), 0)
    return jnp.where(at < part.first, 0, x)


def reduced(tile: Array, varies: Sequence[bool]) -> Array:
    """Sums a tile over the axes along which a side input does not vary."""
    return jnp.sum(tile, axis=tuple(a for a, v in enumerate(varies) if not v), keepdims=True)


def _unsqueezed(place: RowBlock, tile: Array, varies: Sequence[bool]) -> Array:
    """Reshapes a side input's gradient on a tile to all five axes."""
    sizes = (place.batch[1], place.heads[1], place.groups)
    return tile.reshape(*(n if v else 1 for n, v in zip(sizes, varies, strict=False)), *tile.shape[-2:])


def add_sides(
    spec: AttentionSpec,
    place: RowBlock,
    columns: Part,
    totals: tuple[Array, ...],
    contributions: Sequence[tuple[Array, ...]],
) -> tuple[Array, ...]:
    """Returns the gradients of the differentiable side inputs, with what a tile contributes to them."""
    differentiable = [s for s in spec.sides if s.differentiable]
    for contribution in contributions:
        if contribution:
            totals = tuple(
                accumulate(
                    total, place.side_window(s.varies, columns), _unsqueezed(place, c.astype(total.dtype), s.varies)
                )
                for total, s, c in zip(totals, differentiable, contribution, strict=True)
            )
    return totals


# ---------------------------------------------------------------------- dots of a tile


def _dot(spec: AttentionSpec, a: Array, b: Array, contract: tuple[int, int], precision: str | None) -> Array:
    dtype = jnp.promote_types(a.dtype, b.dtype)
    if spec.accumulation_dtype == np.float64:
        dtype = jnp.dtype(np.float64)
    elif dtype.itemsize == 2 and Device.current().platform == "cpu":
        dtype = jnp.dtype(np.float32)  # as XLA does, except in some layouts, in which running the dot fails
    batch = tuple(range(a.ndim - 2))
    return lax.dot_general(
        a.astype(dtype),
        b.astype(dtype),
        (((a.ndim + contract[0],), (b.ndim + contract[1],)), (batch, batch)),
        precision=None if precision is None else lax.Precision[precision],
        preferred_element_type=spec.accumulation_dtype,
    )


def scores(spec: AttentionSpec, place: RowBlock, q: Array, k: Array) -> Array:
    """Computes q k^T, rounded like the original's scores."""
    return place.ungrouped(_dot(spec, q, k, (-1, -1), spec.score_precision)).astype(spec.score_dtype)


def times_values(spec: AttentionSpec, place: RowBlock, p: Array, v: Array) -> Array:
    """Computes p v for probabilities [..., t, s] and values [..., s, Dv]; p is rounded like the original's."""
    bounded = not any(w.kind == "multiply" for w in spec.inner_weights + spec.weights)
    p = place.grouped(narrow(p, spec.reads_weights, v, bounded))
    return place.ungrouped(_dot(spec, p, v, (-1, -2), spec.value_precision))


def times_keys(spec: AttentionSpec, place: RowBlock, ds: Array, k: Array) -> Array:
    """Computes ds k for gradients ds of scores [..., t, s] and keys [..., s, D]."""
    ds = place.grouped(narrow(ds, spec.reads_score_gradients, k, False))
    return place.ungrouped(_dot(spec, ds, k, (-1, -2), spec.score_precision))


def rows_by_columns(spec: AttentionSpec, place: RowBlock, do: Array, v: Array) -> Array:
    """Computes do v^T for cotangents do [..., G t, Dv] and values [..., s, Dv]: [..., t, s]."""
    return place.ungrouped(_dot(spec, do, v, (-1, -1), spec.value_precision))


def rows_by_weights(spec: AttentionSpec, place: RowBlock, do: Array, p: Array) -> Array:
    """Computes do^T p for probabilities p [..., t, s]: the gradient of values, transposed, [..., Dv, s]."""
    p = place.grouped(narrow(p, spec.reads_weights, do, False))
    return _dot(spec, do, p, (-2, -2), spec.value_precision)


def rows_by_score_gradients(spec: AttentionSpec, place: RowBlock, q: Array, ds: Array) -> Array:
    """Computes q^T ds for gradients ds of scores [..., t, s]: the gradient of keys, transposed, [..., D, s]."""
    ds = place.grouped(narrow(ds, spec.reads_score_gradients, q, False))
    return _dot(spec, q, ds, (-2, -2), spec.score_precision)
