"""Defines the grid of the TPU kernels: the blocks, the order in which tiles are visited, and the state of each tile.

A tile belongs to a block of rows and a block of columns.  If a key head has several query heads and there are few
queries, as in decoding, the heads are further rows: row ``r`` is then query ``r % T`` of head ``r // T``.

The grid visits only live tiles.  If all tiles are live, it has a dimension for the rows and one for the columns; else
one dimension runs through a list of tiles, which is prefetched as scalars.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.kernels.attention.dynamic_tiles import compacted, run_time_states
from autopallas.kernels.attention.fills import tile_states
from autopallas.kernels.attention.schedule import TilePrograms, edges, tile_programs
from autopallas.kernels.attention.spec import AttentionSpec
from autopallas.kernels.attention.tiles import DEAD, FULL, HIDDEN, PARTIAL
from autopallas.kernels.refs import IndexMap, Number, Ref
from autopallas.kernels.tpu import LANES, Semantics, rounded
from autopallas.kernels.tpu_schedule_tracing import concrete

__all__ = ["Geometry", "Grid", "Place", "as_operands", "geometry", "is_listed", "revealed"]
__all__ += ["states_at_run_time"]

Array: TypeAlias = jax.Array
Axis: TypeAlias = Literal["B", "K", "G"]
Group: TypeAlias = Literal["row", "column", "tile", "all"]
"""What tiles have in common over which an output block sums: the rows, the columns, both, or nothing."""

_ROW_MULTIPLE = 16
"""Rows of a memory tile of 16-bit elements, a multiple of those of 32-bit elements."""
_FEW_QUERIES = 64
_MOST_SCALARS = 2**18
"""Bytes of scalar memory that lists may take."""
_FIRST, _LAST = 4, 8
"""Flags of a listed tile, beside its state."""


@dataclass(frozen=True, eq=False)
class Geometry:
    """Blocks of one attention, and the states of its tiles.

    Attributes:
      spec: the attention.
      merged: whether the query heads of a key head are further rows.
      groups: query heads per key head that are a dimension of the grid: 1 if they are rows.
      rows: T, or G T if the heads are rows.
      query_block, key_block: sizes of a tile.
      states: [row blocks, column blocks] of DEAD, PARTIAL, FULL.
      general, full: the programs for any tile, and for full ones.
      hidden: which of the tiles outside the grid are hidden, not dead.  Those of a block of rows count unless the
        maximum of each of its rows is at least ``least``; see :mod:`fills`.
      least: that bound.
    """

    spec: AttentionSpec
    merged: bool
    groups: int
    rows: int
    query_block: int
    key_block: int
    states: np.ndarray
    general: TilePrograms
    full: TilePrograms
    hidden: np.ndarray
    least: float

    @property
    def hides(self) -> bool:
        return bool(self.hidden.any())

    @property
    def whole(self) -> Geometry:
        """Geometry with the hidden tiles in the grid."""
        states = np.where(self.hidden, PARTIAL, self.states).astype(self.states.dtype)
        return replace(self, states=states, hidden=np.zeros_like(self.hidden))

    @property
    def row_blocks(self) -> int:
        return int(self.states.shape[0])

    @property
    def column_blocks(self) -> int:
        return int(self.states.shape[1])

    @property
    def row_lanes(self) -> int:
        """Lanes of a block of numbers per row."""
        return rounded(self.query_block, LANES)

    @property
    def ragged_rows(self) -> bool:
        """Whether the last block of rows reaches beyond the rows."""
        return self.rows % self.query_block != 0

    @property
    def ragged_columns(self) -> bool:
        return self.spec.key_length % self.key_block != 0

    def extent(self, axis: Axis) -> int:
        return {"B": self.spec.batch, "K": self.spec.key_heads, "G": self.groups}[axis]


@lru_cache(maxsize=256)
def geometry(spec: AttentionSpec, block_sizes: BlockSizes) -> Geometry:
    """Returns the geometry with these block sizes, made valid for Mosaic; a block may be longer than its axis."""
    merged = spec.groups > 1 and spec.query_length < _FEW_QUERIES
    rows = spec.query_length * (spec.groups if merged else 1)
    query_block = min(rounded(block_sizes.query_block, _ROW_MULTIPLE), rounded(rows, _ROW_MULTIPLE))
    key_block = min(rounded(block_sizes.key_block, LANES), rounded(spec.key_length, LANES))
    columns = edges(spec.key_length, key_block)
    of_queries = edges(spec.query_length, spec.query_length if merged else query_block)
    found, least = tile_states(spec, of_queries, columns)
    general, full = tile_programs(spec, of_queries, columns, found)
    states = np.repeat(found, len(edges(rows, query_block)), axis=0) if merged else found.copy()
    if (spec.live is not None and spec.live.sides) or 3 * 4 * states.size > _MOST_SCALARS:
        states[states == HIDDEN] = PARTIAL  # the side inputs decide about the list, or it would be too long
    hidden = states == HIDDEN
    states[hidden] = DEAD
    ragged = np.zeros(states.shape, bool)
    ragged[-1:, :] |= bool(rows % query_block)
    ragged[:, -1:] |= bool(spec.key_length % key_block)
    states[ragged & (states == FULL)] = PARTIAL
    states.setflags(write=False)
    groups = 1 if merged else spec.groups
    return Geometry(spec, merged, groups, rows, query_block, key_block, states, general, full, hidden, least)


class Place(NamedTuple):
    """Position of one step of a grid."""

    batch: Number
    head: Number
    group: Number
    row: Number
    column: Number
    state: Number
    """DEAD, PARTIAL or FULL; traced or known."""
    first: Number
    """Whether the step is the first one, and the last one, of its output block."""
    last: Number


Dimension: TypeAlias = tuple[str, Number, Semantics]
Tables: TypeAlias = tuple[Array | np.ndarray, Array | np.ndarray, Array | np.ndarray]
"""Row, column, and flags of each listed tile."""


@dataclass(frozen=True, eq=False)
class Grid:
    """The steps of one kernel: axes along which output blocks differ, then tiles, then axes that are summed over.

    Attributes:
      geometry: the blocks.
      outer: those of B, K, G along which the output varies.
      inner: those of B, K, G that it is summed over.
      group: what tiles of one output block have in common.
      tables: the list of tiles; None if the grid visits all.
      listed: length of the list; an array if it depends on side inputs.
      stride: length of the list of each batch entry; 0 if all have the same list.
    """

    geometry: Geometry
    outer: tuple[Axis, ...]
    inner: tuple[Axis, ...]
    group: Group
    tables: Tables | None = None
    listed: int | Array = 0
    stride: int = 0

    @staticmethod
    def of(geometry: Geometry, outer: Sequence[Axis], group: Group, states: Array | None = None) -> Grid:
        """Returns the grid of an output that varies along ``outer``, with a block for each ``group`` of tiles.

        Args:
          geometry: the blocks.
          outer, group: the output.
          states: states of the tiles that are known only at run time, from :func:`states_at_run_time`.
        """
        axes: tuple[Axis, ...] = ("B", "K", "G")
        inner = tuple(a for a in axes if a not in outer)
        plain = Grid(geometry, tuple(outer), inner, group)
        if not is_listed(geometry):
            return plain
        if states is not None:
            # An output that sums over batch entries visits the same tiles for each of them.
            states = states if "B" in outer else jnp.max(states, axis=0, keepdims=True)
            lists, most = compacted(states, group, _FIRST, _LAST)
            return replace(plain, tables=lists, listed=most, stride=geometry.states.size if len(states) > 1 else 0)
        tables = _listed(geometry.states, group)
        return replace(plain, tables=tables, listed=len(tables[0]))

    # ------------------------------------------------------------------ arguments of pallas_call

    @property
    def _tiles(self) -> tuple[Dimension, ...]:
        if self.tables is not None:
            return (("tile", self.listed, "arbitrary"),)
        row = ("row", self.geometry.row_blocks)
        column = ("column", self.geometry.column_blocks)
        if self.group == "column":
            return (*column, "parallel"), (*row, "arbitrary")
        row_order: Semantics = "arbitrary" if self.group == "all" else "parallel"
        return (*row, row_order), (*column, "parallel" if self.group == "tile" else "arbitrary")

    @property
    def dimensions(self) -> tuple[Dimension, ...]:
        """(name, extent, semantics) of each dimension, the innermost last."""
        outer: list[Dimension] = [(a, self.geometry.extent(a), "parallel") for a in self.outer]
        inner: list[Dimension] = [(a, self.geometry.extent(a), "arbitrary") for a in self.inner]
        return (*outer, *self._tiles, *inner)

    @property
    def alike(self) -> int:
        """How many of the first dimensions have steps of equal duration: ``outer``, and the first one of the tiles if
        these are not listed."""
        return len(self.outer) + (self.tables is None)

    def _at(self, ids: Sequence[Number], tables: Sequence[Ref]) -> dict[str, Number]:
        """Returns the position on each axis, including rows and columns, by the program ids and the list."""
        at = {name: i for (name, _, _), i in zip(self.dimensions, ids, strict=True)}
        if self.tables is not None:
            if self.stride:
                at["tile"] = at["B"] * self.stride + at["tile"]
            at |= {"row": tables[0][at["tile"]], "column": tables[1][at["tile"]]}
        return at

    def place(self, ids: Sequence[Number], tables: Sequence[Ref]) -> Place:
        """Returns the position of the step with these program ids; ``tables`` are the prefetched references."""
        at = self._at(ids, tables)
        if self.tables is not None:
            flags = tables[2][at["tile"]]
            state, first, last = flags & 3, (flags & _FIRST) != 0, (flags & _LAST) != 0
        else:
            state, first, last = int(self.geometry.states.flat[0]), True, True
            rows, columns = ("row", self.geometry.row_blocks), ("column", self.geometry.column_blocks)
            for name, extent in {"row": [columns], "column": [rows], "tile": [], "all": [rows, columns]}[self.group]:
                first, last = _ends(first, last, at[name], extent)
        for axis in self.inner:
            first, last = _ends(first, last, at[axis], self.geometry.extent(axis))
        return Place(at["B"], at["K"], at["G"], at["row"], at["column"], state, first, last)

    @property
    def prefetched(self) -> int:
        """How many of a kernel's references are those of the tables."""
        return 0 if self.tables is None else 3

    def here(self, refs: Sequence[Ref]) -> tuple[Place, Sequence[Ref]]:
        """Returns, in a kernel, the place of its step, and its references without those of the tables."""
        ids = [pl.program_id(n) for n in range(len(self.dimensions))]
        return self.place(ids, refs[: self.prefetched]), refs[self.prefetched :]

    def index_map(self, index: Callable[[dict[str, Number]], tuple[Number, ...]]) -> IndexMap:
        """Returns the index map of a block; ``index`` computes it from the positions on B, K, G, row and column."""
        count = len(self.dimensions)

        def of(*arguments: Ref) -> tuple[Number, ...]:
            return index(self._at(arguments[:count], arguments[count:]))

        return of


def _ends(first: Number, last: Number, position: Number, extent: int) -> tuple[Number, Number]:
    """Returns whether a step is the first, and the last, also along one more axis."""
    if extent == 1:
        return first, last
    here = position == 0, position == extent - 1
    both = [h if known is True else known & h for known, h in zip((first, last), here, strict=True)]
    return both[0], both[1]


def is_listed(geometry: Geometry) -> bool:
    """Returns whether tiles are listed: they are not all full, or a single one is dead."""
    states = geometry.states
    return not (np.all(states == FULL) or (states.size == 1 and states[0, 0] != DEAD))


def _listed(states: np.ndarray, group: Group) -> Tables:
    """Lists the tiles to visit: the live ones, and a dead one for each output block without any, to be written."""
    wanted = (states != DEAD) | (group == "tile")
    if group == "column":
        wanted[0] |= ~wanted.any(axis=0)
    elif group == "row":
        wanted[:, 0] |= ~wanted.any(axis=1)
    visited = np.argwhere(wanted)
    if group == "column":
        visited = visited[np.argsort(visited[:, 1], kind="stable")]
    flags = states[visited[:, 0], visited[:, 1]].astype(np.int32)
    if group == "tile":
        flags |= _FIRST | _LAST
    else:
        common = {"row": visited[:, 0], "column": visited[:, 1], "all": np.zeros(len(visited), int)}[group]
        changes = common[1:] != common[:-1]
        flags[np.concatenate([[True], changes])] |= _FIRST
        flags[np.concatenate([changes, [True]])] |= _LAST
    return visited[:, 0].astype(np.int32), visited[:, 1].astype(np.int32), flags


def states_at_run_time(shape: Geometry, sides: Sequence[Array]) -> Array | None:
    """Returns the states that side inputs decide, [B|1, row blocks, column blocks]; None if they decide nothing."""
    if shape.states.size == 1:
        return None
    spec = shape.spec
    entries = spec.batch if any(spec.sides[n].varies[0] for n in (spec.live.sides if spec.live else ())) else 1
    if 3 * 4 * entries * shape.states.size > _MOST_SCALARS:
        return None
    query_block = spec.query_length if shape.merged else shape.query_block
    states = run_time_states(spec, query_block, shape.key_block, sides)
    return jnp.repeat(states, shape.row_blocks, axis=1) if shape.merged and states is not None else states


def revealed(shape: Geometry, blocks: Array, others: bool = True) -> Array:
    """Returns the states of the tiles, [B|1, row blocks, column blocks], with the hidden ones of some blocks of rows.

    ``blocks`` [B, row blocks] tells which; ``others`` tells whether live tiles of other blocks are visited too.
    """
    if 3 * 4 * shape.spec.batch * shape.states.size > _MOST_SCALARS:
        blocks = jnp.any(blocks, axis=0, keepdims=True)
    every = jnp.asarray(np.where(shape.hidden, PARTIAL, shape.states), jnp.int32)
    return jnp.where(blocks[..., None], every, jnp.asarray(shape.states, jnp.int32) if others else DEAD)


def as_operands(tables: Tables | None) -> tuple[Array, ...]:
    """Returns the list of tiles as operands of the call."""
    with concrete():
        return () if tables is None else tuple(jnp.asarray(t, jnp.int32) for t in tables)
