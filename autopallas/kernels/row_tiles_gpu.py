"""Rows in the registers of a GPU's block, whose threads share them.

Letters: N columns.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from autopallas.compat import Dtype
from autopallas.kernels.gpu import mosaic
from autopallas.kernels.refs import Ref

__all__ = ["LANES", "NARROW", "WARPS", "Tile"]

Array: TypeAlias = jax.Array

WARPS, LANES = 4, 32
_LOAD = 16
"""Bytes that a thread loads at once, at most."""
NARROW = 1024
"""Columns up to which a warp has a row of its own, whose threads then have 32 numbers each at most."""


class Tile(NamedTuple):
    """Rows that a block has at a time: [4, N], a warp for each, or one, [N]; and how threads share them.

    All arrays have the layout that suits x, so that what is computed of them need not be moved between threads.

    Attributes:
      narrow: whether there are four rows.
      columns: N.
      each: neighbouring columns that a thread has together.
    """

    narrow: bool
    columns: int
    each: int

    @staticmethod
    def of(rows: int, columns: int, dtype: Dtype) -> Tile:
        """Returns the tile of so many rows of a model, which are of a dtype."""
        tile = Tile(columns <= NARROW and rows % WARPS == 0, columns, 1)
        while 2 * tile.each * dtype.itemsize <= _LOAD and columns % (2 * tile.each * tile.threads) == 0:
            tile = tile._replace(each=2 * tile.each)
        return tile

    @property
    def threads(self) -> int:
        """How many share a row."""
        return LANES if self.narrow else WARPS * LANES

    @property
    def rows(self) -> int:
        return WARPS if self.narrow else 1

    @property
    def shape(self) -> tuple[int, ...]:
        return (WARPS, self.columns) if self.narrow else (self.columns,)

    @property
    def layout(self) -> Ref:
        """Of the rows in registers."""
        plgpu, each = mosaic(), self.each
        of_warp = LANES * each
        tiles = ((WARPS, of_warp), (each,)) if self.narrow else ((WARPS * of_warp,), (of_warp,), (each,))
        return plgpu.Layout.TILED(plgpu.Tiling(tiles), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)

    @property
    def of_columns(self) -> Ref:
        """Of what there is per column [N]: where each warp has a row, each has all of it."""
        return self.layout.reduce(0) if self.narrow else self.layout

    def at(self, ref: Ref, model: Array, number: Array) -> Ref:
        """Returns where tile ``number`` of a model is in an array [models, rows, N]."""
        return ref.at[model, pl.ds(number * WARPS, WARPS) if self.narrow else number]

    def loaded(self, ref: Ref, layout: Ref) -> Array:
        """Returns what is in memory, in float32."""
        found: Array = mosaic().load(ref, layout=layout, optimized=False)
        return found.astype(jnp.float32)

    def across(self, of_rows: Array) -> Array:
        """One number for each row, for all of its columns."""
        return self._broadcast(of_rows, 0) if self.narrow else of_rows

    def along(self, of_columns: Array) -> Array:
        """One number for each column, for all rows."""
        return self._broadcast(of_columns, 1) if self.narrow else of_columns

    def _broadcast(self, vector: Array, axis: int) -> Array:
        found: Array = mosaic().layout_cast(lax.broadcast_in_dim(vector, self.shape, (axis,)), self.layout)
        return found
