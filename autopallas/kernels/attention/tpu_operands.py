"""Lays out what the TPU kernels read and write: arrays in main memory, their blocks, and how a tile is read.

Numbers of the rows, such as the logsumexp, are [B, K, G, blocks, 1, lanes]: each block lies along the lanes, so that
hardly any memory is padding.  A tile needs them along the sublanes, by a transposition.
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
    """The division of an array in main memory into blocks.

    Attributes:
      shape: of the array.
      dtype: of the array.
      tile: the last dimensions of a block; the others have size 1, and are squeezed.
      axes: for each dimension, the axis whose position selects the block, or None for a single block.
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
        """Bytes of vector memory of one buffer."""
        return block_bytes(self.tile, self.dtype)


def rows_block(geometry: Geometry, size: int, dtype: DTypeLike) -> Block:
    """Returns the block of queries, results or their cotangents, [B, K, G, T, size]."""
    spec = geometry.spec
    shape = (spec.batch, spec.key_heads, geometry.groups, geometry.rows, size)
    return Block(shape, np.dtype(dtype), (geometry.query_block, size), ("B", "K", "G", "row", None))


def columns_block(geometry: Geometry, size: int, dtype: DTypeLike) -> Block:
    """Returns the block of keys or values, [B, K, S, size]."""
    spec = geometry.spec
    shape = (spec.batch, spec.key_heads, spec.key_length, size)
    return Block(shape, np.dtype(dtype), (geometry.key_block, size), ("B", "K", "column", None))


def number_block(geometry: Geometry, dtype: DTypeLike, varies: Sequence[bool] = (True,) * 4) -> Block:
    """Returns the block of numbers of the rows that vary along some of (B, K, G, T), including T."""
    extents = [geometry.extent(a) for a in ("B", "K", "G")]
    shape = tuple(n if v else 1 for n, v in zip(extents, varies, strict=False))
    axes = tuple(a if v else None for a, v in zip("BKG", varies, strict=False))
    lanes = geometry.row_lanes
    return Block((*shape, geometry.row_blocks, 1, lanes), np.dtype(dtype), (1, lanes), (*axes, "row", None, None))


def side_block(geometry: Geometry, side: SideSpec, dtype: DTypeLike) -> Block:
    """Returns the block of a side input, which :func:`side_operand` lays out."""
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


# ---------------------------------------------------------------------- layout in main memory


def merged(geometry: Geometry, varies: Sequence[bool]) -> tuple[bool, bool, bool, bool, bool]:
    """Returns along which of (B, K, G, T, S) an array varies in the grid, which has no axis G if the heads are rows."""
    b, k, g, t, s = varies
    return (b, k, False, g or t, s) if geometry.merged else (b, k, g, t, s)


def with_rows(geometry: Geometry, array: Array, varies: Sequence[bool]) -> Array:
    """Merges the heads of [B|1, K|1, G|1, T|1, ...] into the rows, if the grid does; ``varies`` tells its axes."""
    if not geometry.merged:
        return array
    spec = geometry.spec
    b, k, _, _, *rest = array.shape
    if varies[2] or varies[3]:
        array = jnp.broadcast_to(array, (b, k, spec.groups, spec.query_length, *rest))
    return array.reshape(b, k, 1, -1, *rest)


def without_rows(geometry: Geometry, array: Array, varies: Sequence[bool] = (True,) * 5) -> Array:
    """Inverts :func:`with_rows`; sums over the axes along which the array does not vary."""
    if not geometry.merged or not (varies[2] or varies[3]):
        return array
    spec = geometry.spec
    b, k, _, _, *rest = array.shape
    array = array.reshape(b, k, spec.groups, spec.query_length, *rest)
    summed = tuple(axis for axis in (2, 3) if not varies[axis])
    return jnp.sum(array, axis=summed, keepdims=True) if summed else array


def per_row(geometry: Geometry, array: Array) -> Array:
    """Lays out [B|1, K|1, G|1, T] as numbers of the rows."""
    *outer, rows = array.shape
    blocks, size, lanes = geometry.row_blocks, geometry.query_block, geometry.row_lanes
    array = jnp.pad(array, [(0, 0)] * len(outer) + [(0, blocks * size - rows)])
    array = array.reshape(*outer, blocks, 1, size)
    return jnp.pad(array, [(0, 0)] * (len(outer) + 2) + [(0, lanes - size)])


def from_rows(geometry: Geometry, array: Array) -> Array:
    """Inverts :func:`per_row`."""
    *outer, _, _, _ = array.shape
    return array[..., : geometry.query_block].reshape(*outer, -1)[..., : geometry.rows]


def side_operand(geometry: Geometry, side: SideSpec, array: Array) -> Array:
    """Lays out a side input [B|1, K|1, G|1, T|1, S|1] for :func:`side_block`, in a dtype that is read efficiently."""
    array = with_rows(geometry, array, side.varies).astype(stored(side))
    _, _, _, t, s = merged(geometry, side.varies)
    return per_row(geometry, array[..., 0]) if t and not s else array


def stored(side: SideSpec) -> Dtype:
    """Returns the dtype of a side input in main memory: booleans are bytes; what does not fill tiles has 32 bits."""
    fills_tiles = side.varies[3] and side.varies[4]
    if fills_tiles:
        return np.dtype(np.int8) if side.dtype == np.bool_ else side.dtype
    return np.dtype(np.float32) if side.differentiable else np.dtype(np.int32)


def loaded(geometry: Geometry, side: SideSpec, value: Array, flipped: bool = False) -> Array:
    """Returns a side input's block as programs read it: [bq|1, bk|1], or [bk|1, bq|1] if flipped, in its own dtype."""
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
    """Turns [1, lanes] into [size, 128], with each number in every lane."""
    if not jnp.issubdtype(row.dtype, jnp.floating):
        return jnp.broadcast_to(row, (LANES, row.shape[1])).T[:size]
    # Sums with one nonzero term each are as exact as a transposition, and cheaper.
    parts = [row[:, start : start + LANES] for start in range(0, row.shape[1], LANES)]
    sums = [jnp.sum(jnp.where(_diagonal(), part, 0.0), axis=1, keepdims=True) for part in parts]
    column = sums[0] if len(sums) == 1 else jnp.concatenate(sums)
    return jnp.broadcast_to(column[:size], (size, LANES))


def as_row(column: Array, lanes: int) -> Array:
    """Turns [size, 128] of floats, the same in every lane, into [1, lanes], with zeros beyond the size."""
    size = column.shape[0]
    if size < lanes:
        column = jnp.concatenate([column, jnp.zeros((lanes - size, LANES), column.dtype)])
    parts = [column[start : start + LANES] for start in range(0, lanes, LANES)]
    sums = [jnp.sum(jnp.where(_diagonal(), part, 0.0), axis=0, keepdims=True) for part in parts]
    return sums[0] if len(sums) == 1 else jnp.concatenate(sums, axis=1)


def _diagonal() -> Array:
    return _counted(LANES, 0) == _counted(LANES, 1)


def widened(column: Array, width: int) -> Array:
    """Widens [size, 128], the same in every lane, to [size, width]: repeats whole registers, without moving data."""
    copies = -(-width // LANES)
    column = jnp.concatenate([column] * copies, axis=1) if copies > 1 else column
    return column if column.shape[1] == width else column[:, :width]


def positions(geometry: Geometry, row: Number, column: Number, flipped: bool = False) -> tuple[Array, Array]:
    """Returns the query positions of rows [bq, 1], and key positions of columns [1, bk]; flipped [1, bq], [bk, 1]."""
    rows = row * geometry.query_block + _counted(geometry.query_block, int(flipped))
    columns = column * geometry.key_block + _counted(geometry.key_block, int(not flipped))
    if geometry.merged:
        length = geometry.spec.query_length
        rows = jnp.zeros_like(rows) if length == 1 else lax.rem(rows, jnp.int32(length))
    return rows, columns


def within(start: Number, size: int, extent: int, axis: int) -> Array:
    """Returns whether the positions ``start ..`` exist, [size, 1] for axis 0, [1, size] for axis 1."""
    found: Array = start + _counted(size, axis) < extent
    return found


def _counted(size: int, axis: int) -> Array:
    """Returns 0, 1, .. along an axis of a matrix of one column or one row."""
    return lax.broadcasted_iota(jnp.int32, (size, 1) if axis == 0 else (1, size), axis)
