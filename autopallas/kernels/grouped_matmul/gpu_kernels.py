"""The bodies of grouped matmul's GPU kernels: TMA loads by one warpgroup, wgmma by two, persistent blocks.

The pipeline is that of :mod:`autopallas.kernels.gpu_pipeline`: the consumers find the next tile's operands when they
have stored the last one.

Letters: T all rows, K and N the weights' two sides, G groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from autopallas.kernels.gpu import call, mosaic, tile, unravelled
from autopallas.kernels.gpu_pipeline import CONSUMERS, PAIR, PART, REGISTERS, Ring, grid, placed, steps_of, tiles
from autopallas.kernels.grouped_matmul.gpu_tiles import STORED, WIDENED, SharedOperand, Tile
from autopallas.kernels.grouped_matmul.gpu_visits import ALIGNED, AT, COUNT, FIRST, HIGH, LAST, LOW
from autopallas.kernels.grouped_matmul.spec import GroupedMatmulSpec
from autopallas.kernels.refs import Ref
from autopallas.sites.elementwise import Constant, Input, Score, Side, bind

__all__ = ["rows_call", "weights_call"]

Array: TypeAlias = jax.Array

_REGISTERS = (192, 40, 88)
"""Registers per thread of a consumer, of the producer, and of the warpgroup that widens weights, together no more than
the 128 that each of four warpgroups starts with."""


def rows_call(spec: GroupedMatmulSpec, tile_: Tile, total: int, columns: int) -> Callable[..., Array]:
    """Returns the kernel as a function of (table, number, bounds, rows [T, inner], weights [groups, ...], *scales).

    Scales are float32 [groups, blocks of K, blocks of N]; those that vary from weight to weight along K have it last.

    Args:
      spec, tile_: what to compute ("forward" or "dlhs"), and how.
      total: T.
      columns: of the result, as far as they are there to be stored.
    """
    inner = spec.contracting if spec.use == "forward" else spec.columns
    out_type = jax.ShapeDtypeStruct((total, columns), spec.output_dtype)
    size = spec.first_dtype.itemsize
    shared = tile_.shared_operand(columns)
    return call(
        partial(_rows_kernel, spec, tile_, shared),
        name=f"autopallas_grouped_matmul_{spec.use}",
        **grid(shared is not None),
        out_type=out_type,
        scratch=_scratch(spec, tile_, shared),
        warpgroups=CONSUMERS + 1 + (spec.widening is not None),
        flops=2 * total * inner * columns,
        bytes_accessed=size * total * inner
        + spec.stored_dtype.itemsize * spec.batch * spec.groups * inner * columns
        + total * columns * spec.output_dtype.itemsize,
    )


def weights_call(spec: GroupedMatmulSpec, tile_: Tile, total: int, groups: int, k: int, n: int) -> Callable[..., Array]:
    """Returns the kernel of "drhs" as a function of (bounds, lhs [T, K], dout [T, N]), with the result [groups, K,
    N]."""
    size = spec.first_dtype.itemsize
    shared = tile_.shared_operand(n, k)
    return call(
        partial(_weights_kernel, spec, tile_, shared),
        name="autopallas_grouped_matmul_drhs",
        **grid(shared is not None),
        out_type=jax.ShapeDtypeStruct((groups, k, n), spec.result_dtype),
        scratch=_scratch(spec, tile_, shared),
        warpgroups=CONSUMERS + 1,
        flops=2 * total * k * n,
        bytes_accessed=size * total * (k + n) + groups * k * n * spec.result_dtype.itemsize,
    )


def _scratch(spec: GroupedMatmulSpec, tile_: Tile, shared: SharedOperand | None) -> list[Ref]:
    plgpu = mosaic()
    first, second, stored, *ladder = tile_.shapes(spec)
    widens = spec.widening is not None
    transfers = tile_.row_parts + tile_.column_parts
    barriers = Ring.barriers(tile_.stages, transfers, shared is not None, CONSUMERS + widens)
    made = [tile(*first), tile(*second, widest=tile_.second_swizzle(spec)), tile(*stored), *barriers]
    if not ladder:
        return [*made, plgpu.Barrier(num_arrivals=CONSUMERS)]
    cut, *wide = ladder
    made.append(plgpu.SMEM(*cut))
    return [*made, *(tile(*shape) for shape in wide), *(Ring.barriers(WIDENED, 1) if widens else ())]


def _of_pair(tiles_: int, paired: bool) -> int:
    """How many tiles, or pairs of them, there are along an axis."""
    return tiles_ // 2 if paired else tiles_


def _of_block(number: Array, paired: bool) -> Array:
    """The number of this block's tile, of that of a pair."""
    return 2 * number + lax.axis_index(PAIR) if paired else number


# ---------------------------------------------------------------------- rows by weights


class _Rows(NamedTuple):
    """This is the kernel of rows by weights, as its warpgroups see it.

    Attributes:
      spec, tile, shared: what is computed, and how.
      table, bounds: of the visits, and of the groups.
      rows, weights, scales, out: operands and result in main memory.
      ring: the stages.
      wide: the stages of weights as they are multiplied, which one more warpgroup makes of those that are stored in 8
        bits; None where there is none.
      stored, ladder: what whole and cut tiles go through on their way out.
      passes: steps of the pipeline that one group takes.
      column_tiles: how many there are side by side; or pairs, if blocks share an operand, which is that of the rows.
      visits: how many there are.
      warpgroup: which one this is.
    """

    spec: GroupedMatmulSpec
    tile: Tile
    shared: SharedOperand | None
    table: Ref
    bounds: Ref
    rows: Ref
    weights: Ref
    scales: Sequence[Ref]
    out: Ref
    ring: Ring
    wide: Ring | None
    stored: Ref
    ladder: Ref
    passes: int
    column_tiles: int
    visits: Array
    warpgroup: Array

    @property
    def transposed(self) -> bool:
        """Whether the weights' columns are what is summed over."""
        return self.spec.use == "dlhs"

    def place(self, index: Array) -> tuple[Array, Array]:
        """The tile of this number is at (visit, column); of a pair's number, this block's tile."""
        visit, column = placed(index, self.visits, self.column_tiles)
        return visit, _of_block(column, self.shared is not None)

    @property
    def multiplied(self) -> Ref:
        """The weights of all stages, as they are multiplied."""
        return self.ring.second if self.wide is None else self.wide.second


def _rows_kernel(spec: GroupedMatmulSpec, tile_: Tile, shared: SharedOperand | None, *refs: Ref) -> None:
    (table, number, bounds, rows, weights), given = refs[:5], refs[5:]
    scales, given = given[: len(spec.scales)], given[len(spec.scales) :]
    out, first, second, stored, full, free, ladder, *rest = given
    plgpu = mosaic()
    ring = Ring(first, second, full, free, tile_.stages)
    wide = Ring(second, rest[0], rest[1], rest[2], WIDENED) if rest else None
    visits, warpgroup = number[0], lax.axis_index("warpgroup")
    own = _Rows(
        spec, tile_, shared, table, bounds, rows, weights, scales, out, ring, wide, stored, ladder,
        passes=-(-rows.shape[1] // tile_.inner),
        column_tiles=_of_pair(-(-out.shape[1] // tile_.columns), shared is not None),
        visits=visits, warpgroup=warpgroup,
    )  # fmt: skip

    # Registers do not hold what an activation needs of both kinds of tiles.
    halves = tile_.halves and spec.epilogue is None
    whole, halved = _shared_out(visits * own.column_tiles, halves)
    registers = REGISTERS if wide is None else _REGISTERS[:2]

    @pl.when(warpgroup == CONSUMERS)
    def produce() -> None:
        plgpu.set_max_registers(registers[1], action="decrease")
        steps = tiles(whole, partial(_load_rows, own, tuple(range(tile_.row_parts))))
        if halves:
            steps = tiles(2 * halved, partial(_load_half, own, whole), steps)
        ring.drain(steps)

    if wide is not None:

        @pl.when(warpgroup == CONSUMERS + 1)
        def widen() -> None:
            plgpu.set_max_registers(_REGISTERS[2], action="decrease")
            steps = tiles(whole, partial(_widen_tile, own))
            if halves:
                steps = tiles(2 * halved, partial(_widen_half, own, whole), steps)
            wide.drain(steps)

    @pl.when(warpgroup < CONSUMERS)
    def consume() -> None:
        plgpu.set_max_registers(registers[0], action="increase")
        steps = tiles(whole, lambda index, step: _compute_rows(own, _whole(own), index, step))
        if halves:
            tiles(2 * halved, partial(_compute_half, own, whole), steps)
        plgpu.wait_smem_to_gmem(0)


def _shared_out(count: Array, halves: bool) -> tuple[Array, Array]:
    """How many tiles are computed whole, and how many behind them as two halves.

    Tiles go around the blocks. Where those of the last round are for half of the blocks or fewer, two compute one.
    """
    if not halves:
        return count, jnp.int32(0)
    blocks = lax.axis_size("block")
    rest = lax.rem(count, jnp.int32(blocks))
    halved = jnp.where(2 * rest <= blocks, rest, 0)
    return count - halved, halved


class _Share(NamedTuple):
    """Part of a tile that one consumer computes.

    Attributes:
      row_part: which 64 of the tile's rows.
      first: in which part of a stage these are.
      start: the first column, counted from the tile's.
      columns: how many.
      second: the columns of a stage, by its slot.
    """

    row_part: Array
    first: Array
    start: Array
    columns: int
    second: Callable[[Array], Ref]


def _whole(own: _Rows) -> _Share:
    """The consumers share the rows of a tile of 128, and the columns of one of 64."""
    row_part, column_part = _parts(own.tile, own.warpgroup)
    columns, second = own.tile.part_columns, own.multiplied
    start = column_part * columns
    return _Share(row_part, row_part, start, columns, lambda slot: second.at[slot, column_part])


def _half(own: _Rows, half: Array) -> _Share:
    """The consumers share the columns of 64 rows of a tile."""
    columns = own.tile.columns // 2
    start = own.warpgroup * columns

    def second(slot: Array) -> Ref:
        stage = own.multiplied.at[slot, 0]
        return stage.at[pl.ds(start, columns)] if own.transposed else stage.at[:, pl.ds(start, columns)]

    return _Share(half, jnp.int32(0), start, columns, second)


def _load_half(own: _Rows, begin: Array, index: Array, step: Array) -> Array:
    tile_number, half = unravelled(index, 2)
    return _load_rows(own, (half,), begin + tile_number, step)


def _compute_half(own: _Rows, begin: Array, index: Array, step: Array) -> Array:
    tile_number, half = unravelled(index, 2)
    return _compute_rows(own, _half(own, half), begin + tile_number, step)


def _parts(tile_: Tile, warpgroup: Array) -> tuple[Array, Array]:
    """A consumer has these parts of a tile's rows and of its columns."""
    row_part = warpgroup if tile_.row_parts == 2 else jnp.int32(0)
    column_part = warpgroup if tile_.column_parts == 2 else jnp.int32(0)
    return row_part, column_part


def _load_rows(own: _Rows, row_parts: Sequence[Array | int], index: Array, step: Array) -> Array:
    """The producer loads what these parts of a tile of the result are the product of, and returns the steps done."""
    plgpu, tile_, ring = mosaic(), own.tile, own.ring
    visit, column = own.place(index)
    at = pl.multiple_of(own.table[visit, AT], ALIGNED)

    def load(weights: Array, k: Array, step: Array) -> None:
        def copies(slot: Array, barrier: Ref) -> None:
            along = pl.ds(k * tile_.inner, tile_.inner)
            for i, part in enumerate(row_parts):
                rows = pl.ds(at + part * PART, PART)
                both = PAIR if own.shared == "first" else None
                plgpu.copy_gmem_to_smem(own.rows.at[rows, along], ring.first.at[slot, i], barrier, collective_axes=both)
            for _ in range(tile_.row_parts - len(row_parts)):
                plgpu.barrier_arrive(barrier)
            for i in range(tile_.column_parts):
                start = column * tile_.columns + i * tile_.part_columns
                across = pl.ds(start, tile_.part_columns)
                block = (weights, across, along) if own.transposed else (weights, along, across)
                plgpu.copy_gmem_to_smem(own.weights.at[block], ring.second.at[slot, i], barrier)

        ring.load(step, copies)

    return _steps(own, visit, load, step)


def _steps(own: _Rows, visit: Array, body: Callable[[Array, Array, Array], None], step: Array) -> Array:
    """Calls ``body(weights, k, step)`` for each step of a tile: the place of its group's weights, and the step's number
    within that group; returns the steps done."""
    begin = own.table[visit, AT] + own.table[visit, LOW]

    def group_steps(group: Array, step: Array) -> Array:
        # Of groups between the first and the last some may not have these rows, where groups overlap.
        has = (own.bounds[group, 0] <= begin) & (begin < own.bounds[group, 1])
        weights = lax.rem(group, jnp.int32(own.weights.shape[0]))

        def one(k: Array, step: Array) -> Array:
            body(weights, k, step)
            return jnp.add(step, 1)

        return steps_of(0, jnp.where(has, own.passes, 0), one, step)

    return steps_of(own.table[visit, FIRST], own.table[visit, LAST] + 1, group_steps, step)


def _widen_half(own: _Rows, begin: Array, index: Array, step: Array) -> Array:
    tile_number, _ = unravelled(index, 2)
    return _widen_tile(own, begin + tile_number, step)


def _widen_tile(own: _Rows, index: Array, step: Array) -> Array:
    """A warpgroup makes of a tile's weights, as they are stored, those that are multiplied; returns the steps done.

    Numbers of 8 bits become float32 in registers, which is exact, and what the program makes of them is rounded as the
    program rounds it.
    """
    plgpu, tile_, ring, wide = mosaic(), own.tile, own.ring, own.wide
    assert wide is not None
    visit, column = own.place(index)

    def widen(weights: Array, k: Array, step: Array) -> None:
        slot, to = ring.slot(step), wide.slot(step)
        scales = _Scales(own, weights, column, k, 0)  # while the weights are being loaded
        plgpu.barrier_wait(ring.full.at[slot])

        @pl.when(step >= WIDENED)
        def wait() -> None:
            plgpu.barrier_wait(wide.free.at[to])

        for i in range(tile_.column_parts):
            stored, multiplied = ring.second.at[slot, i], wide.second.at[to, i]
            rows, columns = multiplied.shape
            if i:
                scales = _Scales(own, weights, column, k, i)
            together = min(columns, tile_.second_swizzle(own.spec))
            for r, c in itertools.product(range(0, rows, PART), range(0, columns, together)):
                down = pl.ds(r, PART)
                read = plgpu.load(stored.at[down, pl.ds(c, together)], layout=plgpu.Layout.WGMMA_UPCAST_4X)
                for strip in range(0, together, STORED):
                    value = _widened(own, read[:, strip : strip + STORED], scales.of(r, c + strip))
                    multiplied.at[down, pl.ds(c + strip, STORED)][...] = value
        plgpu.commit_smem()
        plgpu.barrier_arrive(ring.free.at[slot])
        plgpu.barrier_arrive(wide.full.at[to])

    return _steps(own, visit, widen, step)


class _Scales:
    """The scales of a part of a step's weights, which are loaded when this is made: of 64 rows or columns at a time."""

    def __init__(self, own: _Rows, weights: Array, column: Array, k: Array, part: int):
        plgpu, tile_ = mosaic(), own.tile
        rows, columns = own.ring.second.shape[2:]
        start = column * tile_.columns + part * tile_.part_columns
        row, column = (start, k * tile_.inner) if own.transposed else (k * tile_.inner, start)
        layout, spec = plgpu.Layout.WGMMA_UPCAST_4X, own.spec
        self._parts: list[dict[tuple[int, int], Array]] = []
        for ref, numbers in zip(own.scales, spec.scales, strict=True):
            side, (_, k_numbers, n_numbers) = spec.varying_side(numbers), numbers
            parts: dict[tuple[int, int], Array] = {}
            for r, c in itertools.product(range(0, rows, PART), range(0, columns, PART)):
                # One that has one number along a side is the same for all parts along it.
                first = (r if k_numbers > 1 else 0, c if n_numbers > 1 else 0)
                if first in parts:
                    parts[r, c] = parts[first]
                    continue
                k_block = _block(row + r, spec.contracting, k_numbers)
                n_block = _block(column + c, spec.columns, n_numbers)
                if side is None:
                    parts[r, c] = ref[weights, k_block, n_block]
                    continue
                along = pl.ds((row + r, column + c)[side], PART)
                found = plgpu.load(
                    ref.at[weights, (n_block, k_block)[side], along], layout=layout.reduce(1 - side), optimized=False
                )
                parts[r, c] = lax.broadcast_in_dim(found, (PART, PART), (side,))
            self._parts.append(parts)

    def of(self, row: int, column: int) -> list[Array]:
        """Those of 64 x 64 weights from here on."""
        return [parts[row, column] for parts in self._parts]


def _block(at: Array, size: int, numbers: int) -> Array | int:
    """The block of a side that has this position; the last one behind the end."""
    return 0 if numbers == 1 else jnp.minimum(lax.div(at, jnp.int32(size // numbers)), numbers - 1)


def _widened(own: _Rows, stored: Array, scales: Sequence[Array]) -> Array:
    program = own.spec.widening
    assert program is not None

    def load(i: Input) -> Array:
        if isinstance(i, Constant):
            return jnp.asarray(i.value, i.dtype)
        assert isinstance(i, Score | Side)
        return stored.astype(jnp.float32) if isinstance(i, Score) else scales[i.position].astype(i.dtype)

    return program.run(load, bind)


def _compute_rows(own: _Rows, share: _Share, index: Array, step: Array) -> Array:
    """A consumer computes and stores its part of a tile of the result, and returns the steps done."""
    spec, tile_, ring, row_part = own.spec, own.tile, own.ring, share.row_part
    visit, column = own.place(index)
    steps = own.table[visit, COUNT] * own.passes

    def product(sum_: Ref) -> Array:
        def use(i: Array, slot: Array) -> None:
            b = share.second(slot if own.wide is None else own.wide.slot(step + i))
            mosaic().wgmma(sum_, ring.first.at[slot, share.first], b.transpose((1, 0)) if own.transposed else b)

        ring.consume(step, steps, use, beside=own.wide)
        total: Array = sum_[...]
        return total

    value = pl.run_scoped(product, mosaic().ACC((PART, share.columns), jnp.float32))
    at = pl.multiple_of(own.table[visit, AT], ALIGNED) + row_part * PART
    low, high = (jnp.clip(own.table[visit, c] - row_part * PART, 0, PART) for c in (LOW, HIGH))
    start = column * tile_.columns + share.start

    @pl.when(high - low == PART)
    def whole() -> None:
        rows = pl.ds(at, PART)
        _store(spec, value, own.stored.at[own.warpgroup], lambda c: own.out.at[rows, pl.ds(start + c, STORED)])

    @pl.when((high > low) & (high - low < PART))
    def part() -> None:
        target = lambda row, n, c: own.out.at[pl.ds(at + row, n), pl.ds(start + c, STORED)]  # noqa: E731
        _store_part(spec, value, own.ladder.at[own.warpgroup], low, high, target)

    after: Array = step + steps
    return after


def _store(spec: GroupedMatmulSpec, value: Array, stored: Ref, target: Callable[[int], Ref]) -> None:
    """The tile in strips of columns, of which some are written, and then read by TMA, together.

    An activation needs the registers of a strip: there strips go one at a time, through one buffer and the other.
    """
    plgpu = mosaic()
    buffers = stored.shape[0]
    together = buffers if spec.epilogue is None else 1
    starts = range(0, value.shape[1], STORED)
    for begin in range(0, len(starts), together):
        places = {n % buffers: starts[n] for n in range(begin, min(begin + together, len(starts)))}
        strips = [spec.finished(value[:, c : c + STORED].astype(spec.result_dtype)) for c in places.values()]
        # Of the last tile, and of what was written here before, nothing is read any more.
        plgpu.wait_smem_to_gmem(buffers - together if begin else 0, wait_read_only=True)
        for place, strip in zip(places, strips, strict=True):
            stored.at[place][...] = strip
        plgpu.commit_smem()  # what was written by threads is now there for TMA
        for place, c in places.items():
            plgpu.copy_smem_to_gmem(stored.at[place], target(c))


def _store_part(
    spec: GroupedMatmulSpec,
    value: Array,
    ladder: Ref,
    low: Array,
    high: Array,
    target: Callable[[Array, int, int], Ref],
) -> None:
    """The rows ``low .. high`` of the tile, in powers of two, because the boxes that TMA moves have fixed sizes."""
    plgpu = mosaic()
    held = high - low
    for c in range(0, value.shape[1], STORED):
        strip = spec.finished(value[:, c : c + STORED].astype(spec.result_dtype))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        ladder[...] = strip
        plgpu.commit_smem()
        for size in (PART >> n for n in range(1, PART.bit_length())):
            row = low + (held & -(2 * size))  # behind the larger parts

            @pl.when((held & size) != 0)
            def rung(size: int = size, row: Array = row, c: int = c) -> None:
                plgpu.copy_smem_to_gmem(ladder.at[pl.ds(row, size)], target(row, size, c))


# ---------------------------------------------------------------------- gradient of the weights


class _Weights(NamedTuple):
    """This is the kernel of the gradient of the weights, as its warpgroups see it.

    Attributes:
      spec, tile, shared: what is computed, and how.
      bounds: of the groups.
      lhs, dout, out: operands and result in main memory.
      ring: the stages.
      stored: what tiles go through on their way out.
      masked: the barrier at which the consumers have cleared a stage.
      row_tiles, column_tiles: of one group; or pairs, along the axis whose tiles share an operand.
      warpgroup: which one this is.
    """

    spec: GroupedMatmulSpec
    tile: Tile
    shared: SharedOperand | None
    bounds: Ref
    lhs: Ref
    dout: Ref
    out: Ref
    ring: Ring
    stored: Ref
    masked: Ref
    row_tiles: int
    column_tiles: int
    warpgroup: Array

    def place(self, index: Array) -> tuple[Array, Array, Array]:
        """The tile of this number is at (group, row, column)."""
        each = self.row_tiles * self.column_tiles
        group = lax.div(index, jnp.int32(each))
        row, column = placed(index - group * each, self.row_tiles, self.column_tiles)
        return group, _of_block(row, self.shared == "second"), _of_block(column, self.shared == "first")

    def extent(self, group: Array) -> tuple[Array, Array, Array, Array]:
        """A group takes (first row loaded, its first and the one behind its last, counted from there, steps)."""
        begin, end = self.bounds[group, 0], self.bounds[group, 1]
        at = pl.multiple_of(lax.div(begin, jnp.int32(ALIGNED)) * ALIGNED, ALIGNED)
        steps = lax.div(end - at + (self.tile.inner - 1), jnp.int32(self.tile.inner))
        return at, begin - at, end - at, jnp.where(end > begin, steps, 0)


def _weights_kernel(spec: GroupedMatmulSpec, tile_: Tile, shared: SharedOperand | None, *refs: Ref) -> None:
    bounds, lhs, dout, out, first, second, stored, full, free, masked = refs
    plgpu = mosaic()
    ring = Ring(first, second, full, free, tile_.stages)
    groups, inner, columns = out.shape
    row_tiles = _of_pair(-(-inner // tile_.rows), shared == "second")
    column_tiles = _of_pair(-(-columns // tile_.columns), shared == "first")
    count, warpgroup = groups * row_tiles * column_tiles, lax.axis_index("warpgroup")
    own = _Weights(
        spec, tile_, shared, bounds, lhs, dout, out, ring, stored, masked, row_tiles, column_tiles, warpgroup
    )

    @pl.when(warpgroup == CONSUMERS)
    def produce() -> None:
        plgpu.set_max_registers(REGISTERS[1], action="decrease")
        ring.drain(tiles(count, partial(_load_weights, own)))

    @pl.when(warpgroup < CONSUMERS)
    def consume() -> None:
        plgpu.set_max_registers(REGISTERS[0], action="increase")
        tiles(count, partial(_compute_weights, own, _parts(tile_, warpgroup)))
        plgpu.wait_smem_to_gmem(0)


def _load_weights(own: _Weights, index: Array, step: Array) -> Array:
    """The producer loads what a tile of the result is the product of, and returns the steps done."""
    plgpu, tile_, ring = mosaic(), own.tile, own.ring
    group, row, column = own.place(index)
    at, _, _, steps = own.extent(group)

    def load(m: Array, step: Array) -> Array:
        def copies(slot: Array, barrier: Ref) -> None:
            along = pl.ds(at + m * tile_.inner, tile_.inner)
            for i in range(tile_.row_parts):
                across = pl.ds(row * tile_.rows + i * PART, PART)
                both = PAIR if own.shared == "first" else None
                plgpu.copy_gmem_to_smem(
                    own.lhs.at[along, across], ring.first.at[slot, i], barrier, collective_axes=both
                )
            for i in range(tile_.column_parts):
                start = column * tile_.columns + i * tile_.part_columns
                across = pl.ds(start, tile_.part_columns)
                both = PAIR if own.shared == "second" else None
                plgpu.copy_gmem_to_smem(
                    own.dout.at[along, across], ring.second.at[slot, i], barrier, collective_axes=both
                )

        ring.load(step, copies)
        return jnp.add(step, 1)

    return steps_of(0, steps, load, step)


def _compute_weights(own: _Weights, parts: tuple[Array, Array], index: Array, step: Array) -> Array:
    """A consumer computes and stores its part of a tile of the result, and returns the steps done."""
    tile_, ring, (row_part, column_part) = own.tile, own.ring, parts
    group, row, column = own.place(index)
    _, low, high, steps = own.extent(group)

    def product(sum_: Ref) -> Array:
        def use(i: Array, slot: Array) -> None:
            first_row, behind = low - i * tile_.inner, high - i * tile_.inner

            @pl.when((first_row > 0) | (behind < tile_.inner))
            def edge() -> None:
                _clear(own, slot, first_row, behind)

            mosaic().wgmma(sum_, ring.first.at[slot, row_part].transpose((1, 0)), ring.second.at[slot, column_part])

        ring.consume(step, steps, use)
        total: Array = sum_[...]
        return total

    value = pl.run_scoped(product, mosaic().ACC((PART, tile_.part_columns), jnp.float32))
    down = row * tile_.rows + row_part * PART
    start = column * tile_.columns + column_part * tile_.part_columns
    target = lambda c: own.out.at[group, pl.ds(down, PART), pl.ds(start + c, STORED)]  # noqa: E731
    _store(own.spec, value, own.stored.at[own.warpgroup], target)
    after: Array = step + steps
    return after


def _clear(own: _Weights, slot: Array, low: Array, high: Array) -> None:
    """The consumers put zeros into a stage's rows beside ``low .. high``, and wait until all are there.

    Rows beside the group's are another's, and may be inf or NaN, so that both operands are cleared there.  Of what both
    warpgroups read each clears every other strip, and waits for the other.
    """
    plgpu, warpgroup = mosaic(), own.warpgroup

    def strip(ref: Ref) -> None:
        value = ref[...]
        row = lax.broadcasted_iota(jnp.int32, value.shape, 0)
        ref[...] = jnp.where((row >= low) & (row < high), value, jnp.zeros_like(value))

    for ref, parts in ((own.ring.first, own.tile.row_parts), (own.ring.second, own.tile.column_parts)):
        part = ref.at[slot, warpgroup if parts == 2 else 0]
        strips, each = part.shape[1] // PART, 3 - parts
        for i in range(strips // each):
            at = i * each + (warpgroup if each == 2 else 0)
            strip(part.at[:, pl.ds(at * PART, PART)])
        if strips % each:
            pl.when(warpgroup == 0)(partial(strip, part.at[:, pl.ds((strips - 1) * PART, PART)]))
    plgpu.commit_smem()
    plgpu.barrier_arrive(own.masked)
    plgpu.barrier_wait(own.masked)
