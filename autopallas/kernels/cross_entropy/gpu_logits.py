"""Tiles of logits in the registers of a Hopper GPU: what the kernels of cross-entropy have in common.

The logits are a matrix product through the pipeline of :mod:`autopallas.kernels.gpu_pipeline`.  Each of the two
consumers has 64 rows of the tile, and looks at them strip by strip.

Letters: N rows (tokens), D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from autopallas.compat import Dtype
from autopallas.kernels.cross_entropy.spec import CrossEntropySpec
from autopallas.kernels.cross_entropy.tiles import Tile
from autopallas.kernels.gpu import SHARED_MEMORY, mosaic, rounded, shared_bytes, tile
from autopallas.kernels.gpu_pipeline import CONSUMERS, PAIR, PART, REGISTERS, Ring, placed, steps_of, tiles
from autopallas.kernels.refs import Ref
from autopallas.sites.elementwise import ElementwiseProgram, Score

__all__ = ["ALIGNED", "ROWS", "Logits", "Plan", "Vectors", "each_tile", "of_wide", "padded", "paired", "value_of"]

Array: TypeAlias = jax.Array
Stored: TypeAlias = tuple[tuple[int, ...], DTypeLike]
"""Shape and dtype of something in shared memory."""

ROWS = CONSUMERS * PART
ALIGNED = 64
"""What the sizes of x and of the weight are padded to multiples of, and where parts of the vocabulary begin."""


class Plan(NamedTuple):
    """The tile of logits and the pipeline.

    Attributes:
      columns: of the tile, positions in the vocabulary.
      stages: how many steps of 64 along D the loads are ahead.
      strip: columns that are looked at together.
      beside: what else is in shared memory.
    """

    columns: int
    stages: int
    strip: int
    beside: tuple[Stored, ...]

    @staticmethod
    def of(spec: CrossEntropySpec, columns: int, strip: int, beside: Sequence[Stored]) -> Plan:
        """Returns as many stages as fit into shared memory, 6 at most."""
        wide = max(PART, min(columns, rounded(spec.vocabulary, PART)))
        for stages in range(min(6, max(2, -(-spec.hidden // PART))), 2, -1):
            if (plan := Plan(wide, stages, strip, tuple(beside))).shared_bytes(spec) <= SHARED_MEMORY:
                return plan
        return Plan(wide, 2, strip, tuple(beside))

    def shapes(self, spec: CrossEntropySpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of the stages of x and of the weight."""
        w = (self.columns, PART) if spec.vocabulary_major else (PART, self.columns)
        return (self.stages, CONSUMERS, PART, PART), (self.stages, *w)

    def shared_bytes(self, spec: CrossEntropySpec) -> int:
        """Of one block."""
        x, w = self.shapes(spec)
        parts = [(x, spec.row_dtype), (w, spec.weight_dtype), *self.beside]
        return shared_bytes(parts, barriers=2 * self.stages)

    def scratch(self, spec: CrossEntropySpec, rows: int) -> list[Ref]:
        """Returns the ring of stages: its memory, and its barriers."""
        x, w = self.shapes(spec)
        barriers = Ring.barriers(self.stages, CONSUMERS + 1, paired(rows))
        return [tile(x, spec.row_dtype), tile(w, spec.weight_dtype), *barriers]


def paired(rows: int) -> bool:
    """Whether two blocks are a cluster, and take tiles of rows that stand one behind the other: both multiply the same
    columns of the weight."""
    return -(-rows // ROWS) % 2 == 0


class Logits(NamedTuple):
    """This is a product of x and the weight in main memory, of which the warpgroups make tiles.

    Attributes:
      spec, plan: what is multiplied, and how.
      x, w: [rows, D] and the weight.
      ring: the stages.
      column_tiles: how many tiles there are along the vocabulary.
      start: the column of the first of them, a multiple of 64; None for 0.
    """

    spec: CrossEntropySpec
    plan: Plan
    x: Ref
    w: Ref
    ring: Ring
    column_tiles: int
    start: Ref | None = None

    @property
    def paired(self) -> bool:
        return paired(self.x.shape[0])

    @property
    def row_tiles(self) -> int:
        """How many tiles, or pairs of them, there are along the rows."""
        count: int = -(-self.x.shape[0] // ROWS)
        return count // 2 if self.paired else count

    def place(self, index: Array) -> tuple[Array, Array]:
        """The tile of this number is at (row, column); of a pair's number, this block's tile."""
        row, column = placed(index, self.row_tiles, self.column_tiles)
        return 2 * row + lax.axis_index(PAIR) if self.paired else row, column


Visit: TypeAlias = Callable[[Array, Array, Array], None]
"""``visit(row, number, logits)``: the first row, the number of the tile along the vocabulary, and [64, columns] in
float32."""


def each_tile(own: Logits, visit: Visit) -> None:
    """The body of a kernel is a visit by each consumer of its part of each of the block's tiles."""
    plgpu = mosaic()
    count = own.row_tiles * own.column_tiles
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == CONSUMERS)
    def produce() -> None:
        plgpu.set_max_registers(REGISTERS[1], action="decrease")
        first_column = jnp.int32(0) if own.start is None else pl.multiple_of(own.start[0], ALIGNED)
        own.ring.drain(tiles(count, partial(_load_tile, own, first_column)))

    @pl.when(warpgroup < CONSUMERS)
    def consume() -> None:
        plgpu.set_max_registers(REGISTERS[0], action="increase")
        tiles(count, partial(_compute_tile, own, warpgroup, visit))
        plgpu.wait_smem_to_gmem(0)


def _load_tile(own: Logits, first_column: Array, index: Array, step: Array) -> Array:
    """The producer loads what a tile is the product of, and returns the steps done."""
    plgpu, plan, ring = mosaic(), own.plan, own.ring
    row, column = own.place(index)

    def load(k: Array, step: Array) -> Array:
        def copies(slot: Array, barrier: Ref) -> None:
            along = pl.ds(k * PART, PART)
            across = pl.ds(first_column + column * plan.columns, plan.columns)
            for i in range(CONSUMERS):
                part = pl.ds(row * ROWS + i * PART, PART)
                plgpu.copy_gmem_to_smem(own.x.at[part, along], ring.first.at[slot, i], barrier)
            block = (across, along) if own.spec.vocabulary_major else (along, across)
            both = PAIR if own.paired else None
            plgpu.copy_gmem_to_smem(own.w.at[block], ring.second.at[slot], barrier, collective_axes=both)

        ring.load(step, copies)
        return jnp.add(step, 1)

    return steps_of(0, -(-own.x.shape[1] // PART), load, step)


def _compute_tile(own: Logits, warpgroup: Array, visit: Visit, index: Array, step: Array) -> Array:
    """A consumer computes and visits its part of a tile, and returns the steps done."""
    spec, ring, steps = own.spec, own.ring, -(-own.x.shape[1] // PART)
    row, column = own.place(index)

    def product(sum_: Ref) -> Array:
        def use(i: Array, slot: Array) -> None:
            a, b = ring.first.at[slot, warpgroup], ring.second.at[slot]
            mosaic().wgmma(sum_, a, b.transpose((1, 0)) if spec.vocabulary_major else b)

        ring.consume(step, jnp.int32(steps), use)
        total: Array = sum_[...]
        # ptxas may move conversions to 16 bits to where wgmma still adds to the sums, and then has each wgmma wait for
        # the one before (C7514).  It does not move an addition, nor leave it out: -0 becomes 0.
        return total + 0.0 if spec.logit_dtype.itemsize == 2 else total

    logits = pl.run_scoped(product, mosaic().ACC((PART, own.plan.columns), jnp.float32))
    visit(row * ROWS + warpgroup * PART, column, logits)
    return jnp.add(step, steps)


# ---------------------------------------------------------------------- side inputs


Along: TypeAlias = Literal["rows", "columns", "alone"]


@dataclass(frozen=True, slots=True)
class Vectors:
    """Side inputs [N|1, V|1] of which none varies over both, as a kernel has them: along rows, along columns, alone."""

    kinds: tuple[Along, ...]
    dtypes: tuple[Dtype, ...]

    @staticmethod
    def of(arrays: Sequence[Array]) -> Vectors:
        kinds: list[Along] = ["alone" if a.size == 1 else "rows" if a.shape[1] == 1 else "columns" for a in arrays]
        return Vectors(tuple(kinds), tuple(np.dtype(a.dtype) for a in arrays))

    def operands(self, arrays: Sequence[Array], rows: int, columns: int) -> list[Array]:
        """One [rows], [columns] or [1] each, of 32 bits."""
        lengths = {"rows": rows, "columns": columns, "alone": 1}
        return [
            padded(a.reshape(-1).astype(np.float32 if jnp.issubdtype(t, jnp.floating) else np.int32), (lengths[kind],))
            for a, kind, t in zip(arrays, self.kinds, self.dtypes, strict=True)
        ]

    def of_rows(self, refs: Sequence[Ref], at: Array) -> list[Array | None]:
        """Returns what does not vary over the columns, for the 64 rows from ``at`` on."""
        return [None if kind == "columns" else self._read(n, refs[n], at, PART) for n, kind in enumerate(self.kinds)]

    def strip(
        self,
        spec: CrossEntropySpec,
        logits: Array,
        position: tuple[Array, Array],
        refs: Sequence[Ref],
        of_rows: Sequence[Array | None],
    ) -> Tile:
        """Logits [64, c] with everything else there, which are all of this shape; ``position`` is the first entry's."""
        layout = mosaic().Layout.WGMMA
        query = mosaic().broadcasted_iota(jnp.int32, logits.shape, 0, layout=layout) + position[0]
        key = mosaic().broadcasted_iota(jnp.int32, logits.shape, 1, layout=layout) + position[1]
        sides = []
        for n, value in enumerate(of_rows):
            along = 0
            if value is None:
                value, along = self._read(n, refs[n], position[1], logits.shape[1]), 1
            sides.append(lax.broadcast_in_dim(value, logits.shape, (along,) if value.ndim else ()))
        return Tile(logits.astype(spec.logit_dtype), query, key, tuple(sides))

    def _read(self, number: int, ref: Ref, at: Array, length: int) -> Array:
        kind, dtype = self.kinds[number], self.dtypes[number]
        if kind == "alone":
            value: Array = ref[0]
        else:
            layout = mosaic().Layout.WGMMA.reduce(1 if kind == "rows" else 0)
            value = mosaic().load(ref.at[pl.ds(at, length)], layout=layout, optimized=False)
        return value != 0 if dtype == np.bool_ else value.astype(dtype)


def value_of(program: ElementwiseProgram, tile: Tile) -> Array:
    """Returns the program's value on a tile of logits."""
    wide = of_wide(program)
    if wide is None:
        return program.evaluate(tile.score, tile.query, tile.key, tile.sides)
    # ptxas rounds two numbers to bfloat16 in one instruction only where their bits are read together. What is rounded
    # to be widened again takes one each, in the unit that computes exponentials too.
    bits = lax.bitcast_convert_type(tile.score, jnp.uint16).astype(jnp.uint32)
    score = lax.bitcast_convert_type(lax.shift_left(bits, jnp.uint32(16)), jnp.float32)
    return wide.evaluate(score, tile.query, tile.key, tile.sides)


@cache
def of_wide(program: ElementwiseProgram) -> ElementwiseProgram | None:
    """Returns the program of logits that are held in float32, where it widens those that it has, of bfloat16, and else
    does not read them; None where it computes with them in bfloat16."""
    narrow, wide = Score(np.dtype(jnp.bfloat16)), np.dtype(np.float32)
    places = {n for n, given in enumerate(program.inputs) if given == narrow}
    readers = [i for i in program.instructions if not places.isdisjoint(i.arguments)]
    widens = all(i.primitive is lax.convert_element_type_p and i.dtype == wide for i in readers)
    if not places or not widens or program.result in places:
        return None
    return replace(program, inputs=tuple(Score(wide) if given == narrow else given for given in program.inputs))


def padded(array: Array, shape: Sequence[int]) -> Array:
    """With zeros behind each axis; the array itself where there is nothing to add."""
    added = [(0, new - old) for old, new in zip(array.shape, shape, strict=True)]
    return jnp.pad(array, added) if any(n for _, n in added) else array
