"""Both projections of a tile of hidden units on a Hopper GPU: two accumulators of wgmma, and the program on them.

The pipeline is that of :mod:`autopallas.kernels.gpu_pipeline`.  A stage holds a tile of x and one of each weight.  A
consumer has 64 rows of both projections in registers, evaluates programs there, and stores their values alone: the
hidden units, or in a backward pass, which has their cotangent, also the cotangents of both projections.  In a forward
pass whose rows have an even number of tiles two blocks are a cluster, with tiles one below the other, and load the
weights together; with what a backward pass computes beside, that spills registers.

Letters: B models, M rows, K features, H hidden units.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from autopallas.compat import Dtype
from autopallas.kernels.gpu import SHARED_MEMORY, array_bytes, call, mosaic, rounded, shared_bytes, tile
from autopallas.kernels.gpu_pipeline import CONSUMERS, PAIR, PART, REGISTERS, Ring, grid, placed, steps_of, tiles
from autopallas.kernels.refs import Ref
from autopallas.sites.elementwise import Constant, ElementwiseProgram, Input, Score, Side, bind

__all__ = ["Tile", "units"]

Array: TypeAlias = jax.Array

_ROWS = CONSUMERS * PART
_STORED = 64
"""Columns of the result that go through shared memory at a time, at most."""
_SHORT = 24
"""Instructions of all programs up to which the registers hold what is computed of so many columns; else of half."""
_READ = 4
"""Instructions for which the registers of a vector count that these programs read too."""
_COLUMNS = 128
"""Columns of each projection: the two accumulators of a consumer then take 128 registers of a thread."""
_MOST_STAGES = 6
_ALIGNED = 8
"""Rows that TMA moves together."""


class Tile(NamedTuple):
    """The pipeline of a block: columns of each projection, features of a step, how many steps are loaded ahead, and
    columns that are computed and stored together."""

    columns: int
    inner: int
    stages: int
    strip: int = _STORED

    @staticmethod
    def of(hidden: int, features: int, dtype: Dtype, result: Dtype, instructions: int = 0) -> Tile:
        """Returns the tile with as many stages as fit into shared memory and there are steps for."""
        columns = min(_COLUMNS, rounded(hidden, _STORED))
        strip = _STORED if instructions <= _SHORT else _STORED // 2
        wanted = min(_MOST_STAGES, max(2, -(-features // PART)))
        found = (Tile(columns, PART, stages, strip) for stages in range(wanted, 1, -1))
        fewest = Tile(columns, PART, 2, strip)
        return next((one for one in found if one.shared_bytes(dtype, result) <= SHARED_MEMORY), fewest)

    def shapes(self, dtype: Dtype, result: Dtype) -> Iterator[tuple[tuple[int, ...], Dtype]]:
        """Shape and dtype of everything in shared memory: x, both weights, and twice the result on its way out."""
        yield (self.stages, CONSUMERS, PART, self.inner), dtype
        yield (self.stages, 2, self.inner, self.columns), dtype
        yield (CONSUMERS, 2, PART, self.strip), result

    def shared_bytes(self, dtype: Dtype, result: Dtype) -> int:
        """Of one block."""
        return shared_bytes(self.shapes(dtype, result), barriers=2 * self.stages)


def units(
    programs: Sequence[ElementwiseProgram],
    dtype: Dtype,
    x: Array,
    gate: Array,
    up: Array,
    vectors: Sequence[Array | None] = (),
    cotangent: Array | None = None,
) -> list[Array]:
    """Returns the values [B, M, H] of programs of all hidden units, in a dtype.

    Args:
      programs: of the gate's product as the score, and as side inputs the other one, the vectors, and the cotangent.
      dtype: of the results.
      x: [B, M, K].
      gate, up: [B, K, H].
      vectors: [B, H] each; None for one that no program reads.
      cotangent: [B, M, H]; None where no program reads it.
    """
    (models, rows, features), hidden = x.shape, gate.shape[2]
    x = _padded(x, _ALIGNED, PART)
    gate, up = (_padded(weight, PART, PART) for weight in (gate, up))
    instructions = sum(len(program.instructions) for program in programs)
    instructions += _READ * sum(vector is not None for vector in vectors)
    tile_ = Tile.of(hidden, features, x.dtype, dtype, instructions)
    given: dict[int, Array] = {}
    for position, vector in enumerate(vectors, 1):
        if vector is not None:
            wide = jnp.broadcast_to(vector, (models, hidden)).astype(jnp.float32)
            given[position] = _padded(wide[:, None], 1, tile_.columns)[:, 0]
    if cotangent is not None:
        # Threads read it, and not TMA, which would leave out what is behind the end.
        given[1 + len(vectors)] = _padded(cotangent, _ROWS, tile_.columns)
    out_type = jax.ShapeDtypeStruct((*x.shape[:2], gate.shape[2]), dtype)
    paired = cotangent is None and -(-x.shape[1] // _ROWS) % 2 == 0
    barriers = Ring.barriers(tile_.stages, CONSUMERS + 2, paired)
    kernel = call(
        partial(_kernel, tuple(programs), tuple(given), tile_, paired),
        name="autopallas_gated_mlp_forward" if cotangent is None else "autopallas_gated_mlp_backward",
        **grid(paired),
        out_type=(out_type,) * len(programs),
        scratch=[*(tile(*shape) for shape in tile_.shapes(x.dtype, dtype)), *barriers],
        warpgroups=CONSUMERS + 1,
        flops=4 * models * rows * features * hidden,
        bytes_accessed=array_bytes(x, gate, up, *given.values(), *(out_type,) * len(programs)),
        transcendentals=models * rows * hidden * len(programs),
    )
    return [found[:, :rows, :hidden] for found in kernel(x, gate, up, *given.values())]


def _padded(array: Array, rows: int, columns: int) -> Array:
    """With zeros behind the last two axes up to a multiple; the array itself where there is nothing to add."""
    added = [rounded(n, multiple) - n for n, multiple in zip(array.shape[1:], (rows, columns), strict=True)]
    return jnp.pad(array, [(0, 0), *((0, n) for n in added)]) if any(added) else array


class _Block(NamedTuple):
    """This is the kernel as its warpgroups see it.

    Attributes:
      programs, tile: what is computed, and how.
      x, gate, up, beside, outs: operands and results in main memory; further side inputs by their positions.
      ring: the stages.
      stored: what tiles go through on their way out.
      paired: whether two blocks load the weights together.
      row_tiles, column_tiles: of one model; of rows, pairs of tiles if blocks are paired.
      steps: of the pipeline that a tile takes.
      warpgroup: which one this is.
    """

    programs: Sequence[ElementwiseProgram]
    tile: Tile
    x: Ref
    gate: Ref
    up: Ref
    beside: Mapping[int, Ref]
    outs: Sequence[Ref]
    ring: Ring
    stored: Ref
    paired: bool
    row_tiles: int
    column_tiles: int
    steps: int
    warpgroup: Array

    def place(self, index: Array) -> tuple[Array, Array, Array]:
        """The tile of this number is at (model, first row, first column); of a pair's number, this block's tile."""
        each = self.row_tiles * self.column_tiles
        model = lax.div(index, jnp.int32(each))
        row, column = placed(index - model * each, self.row_tiles, self.column_tiles)
        if self.paired:
            row = 2 * row + lax.axis_index(PAIR)
        return model, row * _ROWS, column * self.tile.columns


def _kernel(
    programs: Sequence[ElementwiseProgram], positions: Sequence[int], tile_: Tile, paired: bool, *refs: Ref
) -> None:
    (x, gate, up), rest = refs[:3], refs[3:]
    beside, rest = dict(zip(positions, rest, strict=False)), rest[len(positions) :]
    outs, (first, second, stored, full, free) = rest[: len(programs)], rest[len(programs) :]
    plgpu = mosaic()
    warpgroup = lax.axis_index("warpgroup")
    models, rows, hidden = outs[0].shape
    row_tiles = -(-rows // _ROWS)
    own = _Block(
        programs, tile_, x, gate, up, beside, outs, Ring(first, second, full, free, tile_.stages), stored,
        paired, row_tiles=row_tiles // (1 + paired), column_tiles=-(-hidden // tile_.columns),
        steps=-(-x.shape[2] // tile_.inner), warpgroup=warpgroup,
    )  # fmt: skip
    count = models * own.row_tiles * own.column_tiles

    @pl.when(warpgroup == CONSUMERS)
    def produce() -> None:
        plgpu.set_max_registers(REGISTERS[1], action="decrease")
        own.ring.drain(tiles(count, partial(_load, own)))

    @pl.when(warpgroup < CONSUMERS)
    def consume() -> None:
        plgpu.set_max_registers(REGISTERS[0], action="increase")
        tiles(count, partial(_compute, own))
        plgpu.wait_smem_to_gmem(0)


def _load(own: _Block, index: Array, step: Array) -> Array:
    """The producer loads what a tile of the result is computed from, and returns the steps done."""
    plgpu, tile_, ring = mosaic(), own.tile, own.ring
    model, row, column = own.place(index)
    across = pl.ds(column, tile_.columns)

    def load(k: Array, step: Array) -> Array:
        along = pl.ds(k * tile_.inner, tile_.inner)

        def copies(slot: Array, barrier: Ref) -> None:
            for i in range(CONSUMERS):
                part = pl.ds(row + i * PART, PART)
                plgpu.copy_gmem_to_smem(own.x.at[model, part, along], ring.first.at[slot, i], barrier)
            both = PAIR if own.paired else None
            for i, weight in enumerate((own.gate, own.up)):
                block = weight.at[model, along, across]
                plgpu.copy_gmem_to_smem(block, ring.second.at[slot, i], barrier, collective_axes=both)

        ring.load(step, copies)
        return jnp.add(step, 1)

    return steps_of(0, own.steps, load, step)


def _compute(own: _Block, index: Array, step: Array) -> Array:
    """A consumer computes and stores its rows of a tile of the result, and returns the steps done."""
    plgpu, ring = mosaic(), own.ring
    model, row, column = own.place(index)

    def products(gate: Ref, up: Ref) -> tuple[Array, Array]:
        def use(i: Array, slot: Array) -> None:
            for n, sum_ in enumerate((gate, up)):
                plgpu.wgmma(sum_, ring.first.at[slot, own.warpgroup], ring.second.at[slot, n])

        ring.consume(step, own.steps, use, started=2)
        return gate[...], up[...]

    sums = plgpu.ACC((PART, own.tile.columns), jnp.float32)
    gate, up = pl.run_scoped(products, sums, sums)
    rows, stored = pl.ds(row + own.warpgroup * PART, PART), own.stored.at[own.warpgroup]
    width = own.tile.strip
    strips = own.tile.columns // width
    if strips * len(own.programs) % 2:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # else the last tile's last strip would be in the first buffer
    number = 0
    for i in range(strips):
        part, across = slice(i * width, (i + 1) * width), pl.ds(column + i * width, width)
        sides = {0: up[:, part]}
        for position, ref in own.beside.items():
            of_rows = len(ref.shape) == 3
            layout = plgpu.Layout.WGMMA if of_rows else plgpu.Layout.WGMMA.reduce(0)
            place = ref.at[(model, rows, across) if of_rows else (model, across)]
            read = plgpu.load(place, layout=layout, optimized=False)
            sides[position] = read if of_rows else lax.broadcast_in_dim(read, (PART, width), (1,))
        for program, out in zip(own.programs, own.outs, strict=True):
            strip = _value(program, gate[:, part], sides).astype(stored.dtype)
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            stored.at[number % 2][...] = strip
            plgpu.commit_smem()  # what was written by threads is now there for TMA
            plgpu.copy_smem_to_gmem(stored.at[number % 2], out.at[model, rows, across])
            number += 1
    return step + own.steps


def _value(program: ElementwiseProgram, gate: Array, sides: Mapping[int, Array]) -> Array:
    def load(i: Input) -> Array:
        if isinstance(i, Constant):
            return jnp.asarray(i.value, i.dtype)
        assert isinstance(i, Score | Side)
        return (gate if isinstance(i, Score) else sides[i.position]).astype(i.dtype)

    return jnp.broadcast_to(program.run(load, bind), gate.shape)
