"""Plans what the blocks of a GPU kernel visit, and reads the parts of side inputs that belong to a tile.

A block of threads owns 64 positions of one axis for each of its warpgroups, its *home* block, and streams blocks of the
other axis, the *away* blocks, through shared memory.  Queries are at home in the forward and for their own gradient,
keys for theirs.  The live away blocks of a home block are listed, full ones first, so that full and partial ones have
separate loops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import Literal, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopallas import compat
from autopallas.compat import Dtype
from autopallas.kernels.attention.dynamic_tiles import merged, unseen
from autopallas.kernels.attention.fill_proofs import Proof
from autopallas.kernels.attention.fills import tile_states
from autopallas.kernels.attention.gpu_elements import Value
from autopallas.kernels.attention.gpu_layout import padded
from autopallas.kernels.attention.schedule import TilePrograms, edges, tile_programs
from autopallas.kernels.attention.spec import AttentionSpec, SideSpec
from autopallas.kernels.attention.tiles import DEAD, FULL, HIDDEN, PARTIAL
from autopallas.kernels.gpu import mosaic
from autopallas.kernels.refs import Number, Ref

__all__ = [
    "WARPGROUP_ROWS",
    "Loop",
    "Place",
    "Steps",
    "Visits",
    "exists",
    "head_size_of",
    "side_operand",
    "side_values",
    "stored",
    "turned_sides",
    "vector",
]

Array: TypeAlias = jax.Array
Home: TypeAlias = Literal["row", "column"]

WARPGROUP_ROWS = 64
"""Rows of one wgmma."""

_HEAD_SIZES = (64, 96, 128, 192, 256)


def head_size_of(size: int) -> int | None:
    """Returns the head size with which the kernels compute, padding with zeros; None if the size is too large."""
    return next((n for n in _HEAD_SIZES if size <= n), None)


States = TypeVar("States", jax.Array, np.ndarray)
"""States of tiles, NumPy arrays if they are known while tracing."""


class Steps(NamedTuple):
    """The blocks that one home block visits: ``full`` full ones first, ``total`` in all; traced or known."""

    full: Number
    total: Number
    block: Callable[[Number], Number]


class Loop(NamedTuple):
    """Tiles that a home block visits one after another.

    Attributes:
      programs: of each tile.
      general: whether tiles may be partial.
      first, steps: the first step, and the number of steps.
    """

    programs: TilePrograms
    general: bool
    first: Number
    steps: Number


@dataclass(frozen=True, eq=False)
class Visits:
    """The away blocks that each home block visits.

    Attributes:
      home_blocks, away_blocks: their numbers.
      general, full: the programs for any tile, and for full ones.
      counts: the numbers of (full, all) away blocks, if all home blocks visit as many, else None.
      ordered: whether step n of every home block is block n.
      table: [B|1, home blocks, 2 + away blocks] of counts and blocks, or None if counts and order are known.
      known: the same as far as it is known while tracing: without hidden tiles, which are visited if it is not certain
        that they add nothing, and with tiles that side inputs leave out; None if these decide alone.
      has_full, has_partial: whether there are such tiles.
    """

    home_blocks: int
    away_blocks: int
    general: TilePrograms
    full: TilePrograms
    counts: tuple[int, int] | None
    ordered: bool
    table: Array | np.ndarray | None
    known: np.ndarray | None
    has_full: bool
    has_partial: bool

    @staticmethod
    def of(
        spec: AttentionSpec,
        home: Home,
        row_block: int,
        column_block: int,
        sides: Sequence[Array],
        proof: Proof | None = None,
        listed: bool = True,
    ) -> Visits:
        """Returns what each home block visits; without a proof, hidden tiles too, and if nothing is ``listed`` at run
        time, tiles that side inputs show to be dead."""
        rows, columns = edges(spec.query_length, row_block), edges(spec.key_length, column_block)
        found = tile_states(spec, rows, columns, hides=proof is not None and len(rows) * len(columns) > 1)
        general, full = tile_programs(spec, rows, columns, found.states)
        states = found.states.copy()
        if spec.key_length % column_block:
            states[:, -1][states[:, -1] == FULL] = PARTIAL
        if home == "column" and spec.query_length % row_block:
            states[-1][states[-1] == FULL] = PARTIAL
        static = states.T if home == "column" else states
        known = _listed(static[None], np)
        of_sides = None if proof is None or not listed else proof.unseen
        skipped = [x for x in (unseen(spec, sides) if listed else None, of_sides) if x is not None]
        certain = None
        if proof is not None and of_sides is None and found.hides:
            certain = proof.blocks(found.least, row_block)
        if skipped and states.size > 1:
            dead = [merged(x, row_block, column_block, *states.shape) for x in skipped]
            at_run_time = jnp.where(dead[0] | dead[-1], DEAD, PARTIAL)
            if certain is not None:
                at_run_time = _shown(at_run_time, states == HIDDEN, certain)
            turned = jnp.swapaxes(at_run_time, 1, 2) if home == "column" else at_run_time
            lists = _listed(turned, jnp)
            varied = known if np.any(known[0, :, 1] != known[0, 0, 1]) else None
            _, home_blocks, away_blocks = turned.shape
            return Visits(home_blocks, away_blocks, general, full, None, False, lists, varied, False, True)
        counts, order = known[0, :, :2], known[0, :, 2:]
        same = bool(np.all(counts == counts[:1])) and certain is None
        visited = counts[:, 1:] if certain is None else np.sum(static != DEAD, axis=1, keepdims=True)
        step = np.arange(order.shape[1])
        ordered = bool(np.all((order == step) | (step >= visited)))
        table: Array | np.ndarray | None = None if same and ordered else known
        if certain is not None and home == "row":  # hidden blocks follow the others
            found_counts = jnp.where(certain, counts[:, 0], 0), jnp.where(certain, counts[:, 1], visited[:, 0])
            entries = (len(certain), *known.shape[1:])
            table = jnp.broadcast_to(known, entries).at[..., :2].set(jnp.stack(found_counts, axis=-1))
        elif certain is not None:
            live = _shown(jnp.asarray(states, jnp.int32)[None], states == HIDDEN, certain)
            table, ordered = _listed(jnp.swapaxes(live, 1, 2), jnp), False
        return Visits(
            static.shape[0],
            static.shape[1],
            general,
            full,
            (int(counts[0, 0]), int(counts[0, 1])) if same else None,
            ordered,
            table,
            known,
            bool(np.any(states == FULL)),
            bool(np.any((states == PARTIAL) | (states == HIDDEN))),
        )

    @property
    def operands(self) -> tuple[Array, ...]:
        return () if self.table is None else (jnp.asarray(self.table, jnp.int32),)

    @property
    def longest_first(self) -> bool:
        """Whether later home blocks visit more, as blocks of rows do under a causal mask."""
        if self.counts is not None or self.known is None:
            return False
        totals = self.known[0, :, 1]
        return bool(totals[-1] > totals[0])

    def steps(self, table: Ref, entry: Number, home: Number) -> Steps:
        """Returns, in a kernel, what a home block visits."""
        if table is not None and table.shape[0] == 1:
            entry = 0
        full, total = self.counts or (table[entry, home, 0], table[entry, home, 1])
        if not self.has_full:
            full = 0
        return Steps(full, total, (lambda n: n) if self.ordered else lambda n: table[entry, home, 2 + n])

    def loops(self, steps: Steps) -> Iterator[Loop]:
        """Yields the loop over the full tiles, and that over the partial ones."""
        if self.has_full:
            yield Loop(self.full, False, 0, steps.full)
        if self.has_partial:
            yield Loop(self.general, True, steps.full, steps.total - steps.full)

    @property
    def ends_partial(self) -> bool:
        """Whether the last step of each block that has any is known to be in the loop over partial ones."""
        if not self.has_full:
            return True
        if self.counts is not None:
            return self.counts[1] > self.counts[0]
        counts = None if self.known is None else self.known[0, :, :2]
        return counts is not None and bool(np.all((counts[:, 1] > counts[:, 0]) | (counts[:, 1] == 0)))

    @property
    def most(self) -> int:
        """Number of steps of the longest list."""
        return self.counts[1] if self.counts is not None else self.away_blocks


def _shown(states: Array, hidden: np.ndarray, certain: Array) -> Array:
    """Returns states of tiles, [B|1, row blocks, column blocks], with none that is hidden.

    Hidden ones are dead where it is certain, [B|1, row blocks], that they add nothing.  Elsewhere no tile that is not
    dead is full, but partial: scores may be huge, and programs of full tiles round them in another way.
    """
    known = certain[..., None]
    return jnp.where(known & hidden, DEAD, jnp.where((states == DEAD) | (known & (states == FULL)), states, PARTIAL))


def _listed(states: States, numpy: ModuleType) -> States:
    """Turns states [E, home, away] into lists [E, home, 2 + away] of (full, all but hidden, the full, partial, hidden
    and dead blocks)."""
    rank = numpy.where(states == FULL, 0, numpy.where(states == DEAD, 3, numpy.where(states == HIDDEN, 2, 1)))
    order = numpy.argsort(rank, axis=-1, **({"stable": True} if numpy is jnp else {"kind": "stable"}))
    live = (states != DEAD) & (states != HIDDEN)
    counts = numpy.stack([(states == FULL).sum(-1), live.sum(-1)], axis=-1)
    found: States = numpy.concatenate([counts, order], axis=-1).astype(np.int32)
    return found


# ---------------------------------------------------------------------- positions and side inputs


class Place(NamedTuple):
    """Position of a tile: batch entry, heads, first row and first column; and which axis of the tile are the rows.

    With a ``length`` the rows are the queries, so many each, of several heads, one head after the other.
    """

    batch: Number
    head: Number
    group: Number
    row: Number
    column: Number
    shape: tuple[int, int]
    flipped: bool = False
    length: int | None = None

    @property
    def rows(self) -> tuple[Literal["along_0", "along_1"], int]:
        return ("along_1", self.shape[1]) if self.flipped else ("along_0", self.shape[0])

    @property
    def columns(self) -> tuple[Literal["along_0", "along_1"], int]:
        return ("along_0", self.shape[0]) if self.flipped else ("along_1", self.shape[1])

    def outer(self, varies: Sequence[bool]) -> tuple[Number, Number, Number]:
        b, k, g = (i if v else 0 for i, v in zip((self.batch, self.head, self.group), varies, strict=False))
        return b, k, g

    def again(self) -> Place:
        """Returns the same place in a form that the compiler does not recognise as the same."""
        row, column = (lax.optimization_barrier(jnp.asarray(x, jnp.int32)) for x in (self.row, self.column))
        return self._replace(row=row, column=column)

    def positions(self) -> dict[str, Value]:
        """Returns the query and the key position of each element."""
        plgpu = mosaic()

        def counted(kind: Literal["along_0", "along_1"], size: int, start: Number) -> Value:
            layout = plgpu.Layout.WGMMA.reduce(1 if kind == "along_0" else 0)
            found = plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout)
            return Value(kind, found + jnp.full((size,), start, jnp.int32))

        query, key = counted(*self.rows, self.row), counted(*self.columns, self.column)
        if self.length == 1:
            query = Value("scalar", jnp.int32(0))
        elif self.length is not None:
            query = query._replace(array=lax.rem(query.array, jnp.full_like(query.array, self.length)))
        return {"query": query, "key": key}


def vector(ref: Ref, index: tuple[object, ...], kind: Literal["along_0", "along_1"]) -> Value:
    """Reads a number for each row or column of a tile from main memory."""
    plgpu = mosaic()
    layout = plgpu.Layout.WGMMA.reduce(1 if kind == "along_0" else 0)
    return Value(kind, plgpu.load(ref.at[index], layout=layout, optimized=False))


def stored(side: SideSpec) -> Dtype:
    """Returns the dtype of a side input in main memory."""
    if side.varies[3] and side.varies[4]:
        return np.dtype(np.int8) if side.dtype == np.bool_ else side.dtype
    return np.dtype(np.float32) if side.differentiable else np.dtype(np.int32)


def side_operand(side: SideSpec, array: Array, rows: int, columns: int, flipped: bool) -> Array:
    """Lays out a side input [B|1, K|1, G|1, T|1, S|1] for :func:`side_values`, padded to whole blocks."""
    _, _, _, t, s = side.varies
    array = padded(array.astype(stored(side)), rows if t else 1, columns if s else 1)
    if t and s:
        return jnp.swapaxes(array, -1, -2) if flipped else array
    shape = array.shape[:3]
    return array.reshape(*shape, -1) if t or s else array.reshape(shape)


def turned_sides(spec: AttentionSpec, flipped: bool) -> tuple[int, ...]:
    """Returns the side inputs that a kernel with transposed tiles turns as it reads them from shared memory.

    The instruction for it moves 16 bits; others are transposed in main memory.
    """
    if not flipped or not compat.mosaic_gpu_turns_tiles():
        return ()
    filling = (n for n, s in enumerate(spec.sides) if s.varies[3] and s.varies[4])
    return tuple(n for n in filling if stored(spec.sides[n]).itemsize == 2)


def side_values(
    spec: AttentionSpec, refs: Sequence[Ref], place: Place, shared: Mapping[int, Ref] = MappingProxyType({})
) -> dict[str, Value]:
    """Reads the parts of the side inputs that belong to a tile; those in ``shared`` memory lie there, not turned."""
    found = {}
    for n, (side, ref) in enumerate(zip(spec.sides, refs, strict=True)):
        if n in shared:
            plgpu = mosaic()
            array = plgpu.load(shared[n].transpose((1, 0)), layout=plgpu.Layout.WGMMA, optimized=False)
            found[f"side{n}"] = Value("tile", array if array.dtype == side.dtype else array.astype(side.dtype))
        else:
            found[f"side{n}"] = _side_value(side, ref, place)
    return found


def _side_value(side: SideSpec, ref: Ref, place: Place) -> Value:
    from jax.experimental import pallas as pl

    index = place.outer(side.varies)
    _, _, _, t, s = side.varies
    if t and s:
        plgpu = mosaic()
        starts = (place.column, place.row) if place.flipped else (place.row, place.column)
        window = tuple(pl.ds(start, size) for start, size in zip(starts, place.shape, strict=True))
        array = plgpu.load(ref.at[*index, *window], layout=plgpu.Layout.WGMMA, optimized=False)
        found = Value("tile", array)
    elif t or s:
        kind, size = place.rows if t else place.columns
        found = vector(ref, (*index, pl.ds(place.row if t else place.column, size)), kind)
    else:
        found = Value("scalar", ref[index])
    if side.dtype == np.bool_:
        return Value(found.kind, lax.ne(found.array, lax.full_like(found.array, 0)))
    return found if found.array.dtype == side.dtype else Value(found.kind, found.array.astype(side.dtype))


def exists(place: Place, spec: AttentionSpec) -> Array:
    """Returns which elements of a tile are not beyond the end of the streamed axis, over which sums run."""
    name, length = ("query", spec.query_length) if place.flipped else ("key", spec.key_length)
    return Value("along_1", place.positions()[name].array < length).widened("tile", place.shape)
