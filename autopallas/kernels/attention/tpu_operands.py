"""What the TPU kernels read and write: arrays in the layout of main memory, their blocks, and how a tile is read.

Numbers per row, such as the logsumexp, are [B, K, G, blocks, 1, lanes]: along the lanes, each block on its own, so that
they take no more memory than they have numbers.  A tile wants them along the sublanes; a transposition does that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from autopallas.compat import Dtype
from autopallas.kernels.attention.spec import SideSpec
from autopallas.kernels.attention.tpu_grid import Geometry, Grid
from autopallas.kernels.refs import Number
from autopallas.kernels.tpu import LANES, block_bytes

__all__ = [
    "Block",
    "as_column",
    "as_row",
    "columns_block",
    "number_block",
    "per_row",
    "rows_block",
    "side_block",
    "widened",
]

Array: TypeAlias = jax.Array


@dataclass(frozen=True, slots=True)
class Block:
    """How an array in main memory is cut.

    Attributes:
      shape: of the array.
      dtype: of the array.
      tile: the last dimensions of a block; it has size 1, and is squeezed, along the ones before.
      axes: for each dimension, the axis whose position selects the block, or None for the only one.
    """

    shape: tuple[int, ...]
    dtype: Dtype
    tile: tuple[int, ...]
    axes: tuple[str | None, ...]

    def spec(self, grid: Grid) -> pl.BlockSpec:
        def index(at: dict[str, Number]) -> tuple[Number, ...]:
            return tuple(0 if axis is None else at[axis] for axis in self.axes)

        squeezed = (None,) * (len(self.shape) - len(self.tile))
        return pl.BlockSpec((*squeezed, *self.tile), grid.index_map(index))

    @property
    def type(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self.dtype)

    @property
    def bytes(self) -> int:
        """Vector memory of one buffer."""
        return block_bytes(self.tile, self.dtype)


def rows_block(geometry: Geometry, size: int, dtype: DTypeLike) -> Block:
    """Of queries, results and their cotangents: [B, K, G, T, size]."""
    spec = geometry.spec
    shape = (spec.batch, spec.key_heads, geometry.groups, geometry.rows, size)
    return Block(shape, np.dtype(dtype), (geometry.query_block, size), ("B", "K", "G", "row", None))


def columns_block(geometry: Geometry, size: int, dtype: DTypeLike) -> Block:
    """Of keys and values: [B, K, S, size]."""
    spec = geometry.spec
    shape = (spec.batch, spec.key_heads, spec.key_length, size)
    return Block(shape, np.dtype(dtype), (geometry.key_block, size), ("B", "K", "column", None))


def number_block(geometry: Geometry, dtype: DTypeLike, varies: Sequence[bool] = (True,) * 4) -> Block:
    """Of numbers per row that vary over some of (B, K, G, T), the last one among them."""
    extents = [geometry.extent(a) for a in ("B", "K", "G")]
    shape = tuple(n if v else 1 for n, v in zip(extents, varies, strict=False))
    axes = tuple(a if v else None for a, v in zip("BKG", varies, strict=False))
    lanes = geometry.row_lanes
    return Block((*shape, geometry.row_blocks, 1, lanes), np.dtype(dtype), (1, lanes), (*axes, "row", None, None))


def side_block(geometry: Geometry, side: SideSpec, dtype: DTypeLike) -> Block:
    """Of a side input; see :func:`side_operand` for what becomes of the array."""
    b, k, g, t, s = merged(geometry, side.varies)
    if t and not s:
        return number_block(geometry, dtype, (b, k, g, t))
    extents = [geometry.extent(a) for a in ("B", "K", "G")]
    shape = tuple(n if v else 1 for n, v in zip(extents, (b, k, g), strict=True))
    axes = tuple(a if v else None for a, v in zip("BKG", (b, k, g), strict=True))
    rows, row_tile = (geometry.rows, geometry.query_block) if t else (1, 1)
    columns, column_tile = (geometry.spec.key_length, geometry.key_block) if s else (1, 1)
    tile_axes = ("row" if t else None, "column" if s else None)
    return Block((*shape, rows, columns), np.dtype(dtype), (row_tile, column_tile), (*axes, *tile_axes))


# ---------------------------------------------------------------------- to main memory and back


def merged(geometry: Geometry, varies: Sequence[bool]) -> tuple[bool, bool, bool, bool, bool]:
    """Over which of (B, K, G, T, S) an array varies for the grid: heads that are rows are no axis of it."""
    b, k, g, t, s = varies
    return (b, k, False, g or t, s) if geometry.merged else (b, k, g, t, s)


def with_rows(geometry: Geometry, array: Array, varies: Sequence[bool]) -> Array:
    """[B|1, K|1, G|1, T|1, ...] with the heads as rows where they are that; ``varies`` says where it is not size 1."""
    if not geometry.merged:
        return array
    spec = geometry.spec
    b, k, _, _, *rest = array.shape
    if varies[2] or varies[3]:
        array = jnp.broadcast_to(array, (b, k, spec.groups, spec.query_length, *rest))
    return array.reshape(b, k, 1, -1, *rest)


def without_rows(geometry: Geometry, array: Array, varies: Sequence[bool] = (True,) * 5) -> Array:
    """The inverse; what the array does not vary over is summed."""
    if not geometry.merged or not (varies[2] or varies[3]):
        return array
    spec = geometry.spec
    b, k, _, _, *rest = array.shape
    array = array.reshape(b, k, spec.groups, spec.query_length, *rest)
    summed = tuple(axis for axis in (2, 3) if not varies[axis])
    return jnp.sum(array, axis=summed, keepdims=True) if summed else array


def per_row(geometry: Geometry, array: Array) -> Array:
    """[B|1, K|1, G|1, T] as numbers per row."""
    *outer, rows = array.shape
    blocks, size, lanes = geometry.row_blocks, geometry.query_block, geometry.row_lanes
    array = jnp.pad(array, [(0, 0)] * len(outer) + [(0, blocks * size - rows)])
    array = array.reshape(*outer, blocks, 1, size)
    return jnp.pad(array, [(0, 0)] * (len(outer) + 2) + [(0, lanes - size)])


def from_rows(geometry: Geometry, array: Array) -> Array:
    """The inverse."""
    *outer, _, _, _ = array.shape
    return array[..., : geometry.query_block].reshape(*outer, -1)[..., : geometry.rows]


def side_operand(geometry: Geometry, side: SideSpec, array: Array) -> Array:
    """A side input [B|1, K|1, G|1, T|1, S|1] as :func:`side_block` cuts it, in a dtype that is read well."""
    array = with_rows(geometry, array, side.varies).astype(stored(side))
    _, _, _, t, s = merged(geometry, side.varies)
    return per_row(geometry, array[..., 0]) if t and not s else array


def stored(side: SideSpec) -> Dtype:
    """The dtype of a side input in main memory: booleans are bytes, what is small anyway has 32 bits."""
    fills_tiles = side.varies[3] and side.varies[4]
    if fills_tiles:
        return np.dtype(np.int8) if side.dtype == np.bool_ else side.dtype
    return np.dtype(np.float32) if side.differentiable else np.dtype(np.int32)


def loaded(geometry: Geometry, side: SideSpec, value: Array, flipped: bool = False) -> Array:
    """The block of a side input as the programs want it: [bq|1, bk|1], or [bk|1, bq|1] if flipped, in its own dtype."""
    _, _, _, t, s = merged(geometry, side.varies)
    if value.dtype.itemsize < 4:
        value = value.astype(jnp.float32 if side.differentiable else jnp.int32)
    if t and not s:
        value = value[:, : geometry.query_block] if flipped else as_column(value, geometry.query_block)[:, :1]
    elif s and not t:
        value = as_column(value, geometry.key_block)[:, :1] if flipped else value
    elif t and s and flipped:
        value = value.T
    return value != 0 if side.dtype == np.bool_ else value.astype(side.dtype)


# ---------------------------------------------------------------------- between lanes and sublanes


def as_column(row: Array, size: int) -> Array:
    """[1, lanes] as [size, 128], each number in every lane."""
    if not jnp.issubdtype(row.dtype, jnp.floating):
        return jnp.broadcast_to(row, (LANES, row.shape[1])).T[:size]
    # Sums with one term each: as exact as a transposition, and cheaper.
    parts = [row[:, start : start + LANES] for start in range(0, row.shape[1], LANES)]
    sums = [jnp.sum(jnp.where(_diagonal(), part, 0.0), axis=1, keepdims=True) for part in parts]
    column = sums[0] if len(sums) == 1 else jnp.concatenate(sums)
    return jnp.broadcast_to(column[:size], (size, LANES))


def as_row(column: Array, lanes: int) -> Array:
    """[size, 128] of floats, the same in every lane, as [1, lanes]; what is beyond the size is 0."""
    size = column.shape[0]
    if size < lanes:
        column = jnp.concatenate([column, jnp.zeros((lanes - size, LANES), column.dtype)])
    parts = [column[start : start + LANES] for start in range(0, lanes, LANES)]
    sums = [jnp.sum(jnp.where(_diagonal(), part, 0.0), axis=0, keepdims=True) for part in parts]
    return sums[0] if len(sums) == 1 else jnp.concatenate(sums, axis=1)


def _diagonal() -> Array:
    return _counted(LANES, 0) == _counted(LANES, 1)


def widened(column: Array, width: int) -> Array:
    """[size, 128], the same in every lane, as [size, width]: whole registers side by side, and nothing moves."""
    copies = -(-width // LANES)
    column = jnp.concatenate([column] * copies, axis=1) if copies > 1 else column
    return column if column.shape[1] == width else column[:, :width]


def positions(geometry: Geometry, row: Number, column: Number, flipped: bool = False) -> tuple[Array, Array]:
    """The query position of each row [bq, 1], and the key position of each column [1, bk]; flipped [1, bq], [bk, 1]."""
    rows = row * geometry.query_block + _counted(geometry.query_block, int(flipped))
    columns = column * geometry.key_block + _counted(geometry.key_block, int(not flipped))
    if geometry.merged:
        length = geometry.spec.query_length
        rows = jnp.zeros_like(rows) if length == 1 else lax.rem(rows, jnp.int32(length))
    return rows, columns


def within(start: Number, size: int, extent: int, axis: int) -> Array:
    """Whether the positions ``start ..`` exist: [size, 1] for axis 0, [1, size] for axis 1."""
    found: Array = start + _counted(size, axis) < extent
    return found


def _counted(size: int, axis: int) -> Array:
    """0, 1, .. along an axis of a matrix of one column or one row."""
    return lax.broadcasted_iota(jnp.int32, (size, 1) if axis == 0 else (1, size), axis)
