"""Computes the gradient of a bias that fills tiles, on an H100: sums over the heads and examples that share a tile.

Blocks of threads stay on the multiprocessors and take tile after tile of the gradient.  One warpgroup loads queries and
cotangents, keys and values ahead, over the end of a tile too; the others compute scores, gradients of probabilities and
what follows from them, and keep sums in registers.  Tiles that no row sees are not computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from autopallas.kernels import gpu
from autopallas.kernels.attention.fill_proofs import Proof
from autopallas.kernels.attention.fills import TileStates, tile_states
from autopallas.kernels.attention.gpu_elements import Elements, Value, backward_elements
from autopallas.kernels.attention.gpu_grid import (
    WARPGROUP_ROWS,
    Place,
    head_size_of,
    side_operand,
    side_values,
    vector,
)
from autopallas.kernels.attention.gpu_layout import Layout, Turned, moved, padded
from autopallas.kernels.attention.gpu_warpgroups import ring, share_registers, started
from autopallas.kernels.attention.operands import Operands, ScaledRows
from autopallas.kernels.attention.schedule import TilePrograms, edges
from autopallas.kernels.attention.spec import AttentionSpec
from autopallas.kernels.attention.tiles import DEAD, HIDDEN, increasing
from autopallas.kernels.gpu import SHARED_MEMORY, mosaic, rounded, shared_bytes, store, tile
from autopallas.kernels.refs import Number, Ref
from autopallas.sites.device import Device

__all__ = ["tile_gradient"]

Array: TypeAlias = jax.Array
Dot: TypeAlias = Callable[..., Array]
F32 = np.dtype(np.float32)
BLOCK = WARPGROUP_ROWS
SHAPE = (BLOCK, BLOCK)

_STAGES = ((2, 4), (2, 3), (2, 2), (1, 4), (1, 3), (1, 2), (1, 1))
"""Numbers of stages of rows and of columns, best first, of which the first that shared memory holds is taken."""


class _Plan(NamedTuple):
    """The kernel of one gradient: a tile of it is 64 rows for each warpgroup that computes, and 64 columns at a time.

    Attributes:
      spec: the attention.
      number: the side input.
      outer: [B|1, K|1, G|1], the axes of the gradient.
      inner: the axes that it is summed over.
      head_size, value_head_size: those with which the kernel computes.
      warpgroups: those that compute.
      across: how many times 64 columns a tile has.
      row_stages, stages: of rows of queries and cotangents, and of 64 columns of keys and values.
      skips: whether hidden tiles may be skipped.
    """

    spec: AttentionSpec
    number: int
    outer: tuple[int, ...]
    inner: tuple[int, ...]
    head_size: int
    value_head_size: int
    warpgroups: int
    across: int
    row_stages: int
    stages: int
    skips: bool

    @staticmethod
    def of(spec: AttentionSpec, number: int, skips: bool) -> _Plan:
        varies, extents = spec.sides[number].varies, (spec.batch, spec.key_heads, spec.groups)
        outer = tuple(n if v else 1 for n, v in zip(extents, varies, strict=False))
        inner = tuple(1 if v else n for n, v in zip(extents, varies, strict=False))
        sizes = head_size_of(spec.head_size) or 0, head_size_of(spec.value_head_size) or 0
        # A length that is not even in tiles of 64 would have the gradient copied, to cut what is more.
        warpgroups = 1 if -(-spec.query_length // BLOCK) % 2 else 2
        # Registers hold the sums of two tiles beside the numbers of one if little else is read.
        slender = max(sizes) <= 128 and len(spec.sides) == 1
        across = 2 if slender and -(-spec.key_length // BLOCK) % 2 == 0 else 1
        plans = (_Plan(spec, number, outer, inner, *sizes, warpgroups, across, *stages, skips) for stages in _STAGES)
        return next(plan for plan in plans if plan.shared_memory <= SHARED_MEMORY)

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory of a block."""
        tiles = [(shape, self.spec.query_dtype) for shape in self.shapes]
        return shared_bytes(tiles, barriers=2 * (self.row_stages + self.stages))

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of queries, cotangents, keys and values in shared memory."""
        sizes = self.head_size, self.value_head_size
        rows = [(self.row_stages, self.warpgroups, BLOCK, size) for size in sizes]
        return [*rows, *((self.stages, BLOCK, size) for size in sizes)]

    @property
    def lengths(self) -> tuple[int, int]:
        """Rows and columns of all tiles."""
        return rounded(self.spec.query_length, self.size[0]), rounded(self.spec.key_length, self.size[1])

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns of a tile."""
        return BLOCK * self.warpgroups, BLOCK * self.across

    @property
    def tiles(self) -> tuple[int, int]:
        """Numbers of tiles along rows and columns."""
        (rows, columns), (height, width) = self.lengths, self.size
        return rows // height, columns // width

    @property
    def steps(self) -> int:
        """The number of heads and examples that share a tile."""
        return math.prod(self.inner)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Layouts of queries, cotangents, keys and values."""
        query, key, value = map(Layout.of, self.spec.layouts)
        return query, query, key, value

    @property
    def elements(self) -> Elements:
        spec = self.spec
        programs = TilePrograms(spec.score, spec.inner_weights, spec.weights, increasing(spec.score))
        return backward_elements(spec, programs)

    @property
    def states(self) -> TileStates:
        """The tiles' states, of which none is hidden if nothing can be shown of these."""
        spec, (height, width) = self.spec, self.size
        return tile_states(spec, edges(spec.query_length, height), edges(spec.key_length, width), self.skips)

    @property
    def order(self) -> tuple[np.ndarray | None, int]:
        """Numbers of the tiles, in row-major order, those that are seen first, then hidden ones, and how many are seen.

        None if all are seen.
        """
        states = self.states.states.reshape(-1)
        rank = np.where(states == DEAD, 2, states == HIDDEN)
        seen = int(np.sum(rank == 0))
        if seen == len(states):
            return None, seen
        return np.argsort(rank, kind="stable").astype(np.int32), seen

    def order_at_run_time(self, proof: Proof | None) -> Array | None:
        """Returns the order; where tiles are hidden, with how many of them are added up as a last number."""
        order, seen = self.order
        if order is None or proof is None or not self.states.hides:
            return None if order is None else jnp.asarray(order)
        states, least = self.states
        certain = jnp.all(proof.blocks(least, self.size[0]))
        added = jnp.where(certain, seen, int(np.sum(states != DEAD)))
        return jnp.concatenate([jnp.asarray(order), added[None].astype(jnp.int32)])

    def inputs(self, operands: Operands, scaled: ScaledRows, proof: Proof | None) -> list[Array]:
        """Returns the arrays in main memory; what is not moved by TMA is padded to whole tiles."""
        spec, (rows, columns), d, dv = self.spec, self.lengths, self.head_size, self.value_head_size
        query, key, value, sides, _ = operands
        queries, keys = moved(spec.query_length), moved(spec.key_length)
        arrays = (query, queries, d), (scaled.dout, queries, dv), (key, keys, d), (value, keys, dv)
        found = [layout.padded(*array) for layout, array in zip(self.layouts, arrays, strict=True)]
        shape = spec.batch, spec.key_heads, spec.groups, spec.query_length
        found += [padded(jnp.broadcast_to(x, shape), rows) for x in (scaled.shift, scaled.delta)]
        found += [side_operand(s, x, rows, columns, False) for s, x in zip(spec.sides, sides, strict=True)]
        order = self.order_at_run_time(proof)
        return found if order is None else [*found, order]


class _Memory(NamedTuple):
    """References of the kernel.

    Attributes:
      tiles: queries, cotangents, keys and values in main memory.
      shift, delta, sides: further operands.
      order: of the tiles, or None.
      result: the gradient.
      shared: stages of the first four in shared memory.
      rows_ready, rows_free, ready, free: barriers of the stages of rows, and of those of columns.
    """

    tiles: Sequence[Ref]
    shift: Ref
    delta: Ref
    sides: Sequence[Ref]
    order: Ref
    result: Ref
    shared: Sequence[Ref]
    rows_ready: Ref
    rows_free: Ref
    ready: Ref
    free: Ref

    @staticmethod
    def of(plan: _Plan, refs: Sequence[Ref]) -> _Memory:
        tiles = [Turned(ref, layout) for ref, layout in zip(refs[:4], plan.layouts, strict=True)]
        sides = refs[6 : 6 + len(plan.spec.sides)]
        *order, result = refs[6 + len(sides) : -8]
        return _Memory(tiles, refs[4], refs[5], sides, order[0] if order else None, result, refs[-8:-4], *refs[-4:])


def tile_gradient(spec: AttentionSpec, number: int, operands: Operands, rows: ScaledRows, proof: Proof | None) -> Array:
    """Computes the gradient of the side input ``number``, [B|1, K|1, G|1, T, S], in its dtype.

    With queries of float16 the gradient is in float32.  Without a proof hidden tiles are added too.
    """
    plan, dtype = _Plan.of(spec, number, proof is not None), operands.query.dtype
    inputs, lengths = plan.inputs(operands, rows, proof), plan.lengths
    kept = F32 if dtype == np.float16 else spec.sides[number].dtype
    result = jax.ShapeDtypeStruct((*plan.outer, *lengths), kept)
    _, seen = plan.order
    times = plan.steps * math.prod(plan.outer) * seen * math.prod(plan.size)
    all_tiles = math.prod(plan.outer) * math.prod(plan.tiles)
    blocks = min(all_tiles, gpu.processors(Device.current()))
    found: Array = gpu.call(
        partial(_kernel, plan, blocks),
        name=f"autopallas_attention_gpu_backward_side{number}",
        grid={"block": blocks},
        out_type=result,
        scratch=[
            *(tile(shape, dtype) for shape in plan.shapes),
            *ring(plan.row_stages, plan.warpgroups, copies=2 * plan.warpgroups),
            *ring(plan.stages, plan.warpgroups, copies=2),
        ],
        warpgroups=plan.warpgroups + 1,
        flops=2 * times * (plan.head_size + plan.value_head_size),
        transcendentals=times,
        bytes_accessed=gpu.array_bytes(*inputs, result),
        approximate=True,
        by_lanes=True,
    )(*inputs)
    return found[..., : spec.query_length, : spec.key_length]


class _Item(NamedTuple):
    """A tile of the gradient.

    Attributes:
      owned: its indices along ``outer``.
      row, column: its first ones.
      steps: how many heads and examples are added; 0 if no row sees it.
    """

    owned: tuple[Number, ...]
    row: Array
    column: Array
    steps: Number

    @staticmethod
    def of(plan: _Plan, memory: _Memory, number: Array) -> _Item:
        _, seen = plan.order
        head, at = gpu.unravelled(number, math.prod(plan.tiles))
        steps: Number = plan.steps
        if memory.order is not None:
            added: Number = memory.order[math.prod(plan.tiles)] if plan.states.hides else seen
            steps = jnp.where(at < added, jnp.int32(steps), jnp.int32(0))
            at = memory.order[at]
        at_row, at_column = gpu.unravelled(at, plan.tiles[1])
        return _Item(_unravelled(head, plan.outer), at_row * plan.size[0], at_column * plan.size[1], steps)

    def heads(self, plan: _Plan, n: Number) -> tuple[Number, Number, Number]:
        """Returns the indices of the batch entry and heads of step ``n``."""
        summed = _unravelled(n, plan.inner)
        varies = plan.spec.sides[plan.number].varies
        b, k, g = (o if v else s for o, s, v in zip(self.owned, summed, varies, strict=False))
        return b, k, g


def _kernel(plan: _Plan, blocks: int, *refs: Ref) -> None:
    memory, warpgroup = _Memory.of(plan, refs), lax.axis_index("warpgroup")
    pl.when(warpgroup < plan.warpgroups)(lambda: _compute(plan, blocks, memory, warpgroup))
    pl.when(warpgroup == plan.warpgroups)(lambda: _load(plan, blocks, memory))


def _count(plan: _Plan, blocks: int) -> Array:
    """Returns how many tiles this block of threads takes."""
    all_tiles = math.prod(plan.outer) * math.prod(plan.tiles)
    return lax.div(jnp.int32(all_tiles + blocks - 1) - lax.axis_index("block"), jnp.int32(blocks))


def _load(plan: _Plan, blocks: int, memory: _Memory) -> None:
    """Fills the stages."""
    plgpu = mosaic()
    share_registers(plan.warpgroups, computes=False)

    def fetch(which: int, window: tuple[object, ...], slot: tuple[Number, ...], ready: Ref) -> None:
        plgpu.copy_gmem_to_smem(memory.tiles[which].at[window], memory.shared[which].at[slot], ready)

    def load(item: _Item, n: Array, done: Array) -> None:
        b, k, g = item.heads(plan, n)
        slot = lax.rem(done, jnp.int32(plan.row_stages))
        pl.when(done >= plan.row_stages)(partial(plgpu.barrier_wait, memory.rows_free.at[slot]))
        for w in range(plan.warpgroups):
            for which in (0, 1):
                window = (b, k, g, pl.ds(item.row + w * BLOCK, BLOCK))
                fetch(which, window, (slot, w), memory.rows_ready.at[slot])
        for c in range(plan.across):
            number = done * plan.across + c
            place = lax.rem(number, jnp.int32(plan.stages))
            pl.when(number >= plan.stages)(partial(plgpu.barrier_wait, memory.free.at[place]))
            for which in (2, 3):
                fetch(which, (b, k, pl.ds(item.column + c * BLOCK, BLOCK)), (place,), memory.ready.at[place])

    def take(i: Array, done: Array) -> Array:
        item = _Item.of(plan, memory, lax.axis_index("block") + i * blocks)

        @pl.loop(0, item.steps)
        def _(n: Array) -> None:
            load(item, n, done + n)

        return done + item.steps

    done = lax.fori_loop(0, _count(plan, blocks), take, jnp.int32(0))
    # Every arrival is observed, and shared memory is not released while wgmma reads it.
    for total, stages, free in (
        (done, plan.row_stages, memory.rows_free),
        (done * plan.across, plan.stages, memory.free),
    ):
        used = jnp.minimum(total, stages)

        @pl.loop(0, used)
        def _(n: Array, total: Array = total, used: Array = used, stages: int = stages, free: Ref = free) -> None:
            plgpu.barrier_wait(free.at[lax.rem(total - used + n, jnp.int32(stages))])


def _compute(plan: _Plan, blocks: int, memory: _Memory, here: Array) -> None:
    """Computes the rows of a warpgroup of each tile."""
    plgpu = mosaic()
    share_registers(plan.warpgroups, computes=True)

    def take(i: Array, done: Array) -> Array:
        item = _Item.of(plan, memory, lax.axis_index("block") + i * blocks)
        zeros = plgpu.layout_cast(jnp.zeros(SHAPE, F32), plgpu.Layout.WGMMA)
        totals = lax.fori_loop(
            0, item.steps, partial(_add_head, plan, memory, here, item, done), (zeros,) * plan.across
        )
        rows = pl.ds(item.row + here * BLOCK, BLOCK)
        for c, total in enumerate(totals):
            at = memory.result.at[*item.owned, rows, pl.ds(item.column + c * BLOCK, BLOCK)]
            store(at, total.astype(memory.result.dtype))
        return done + item.steps

    lax.fori_loop(0, _count(plan, blocks), take, jnp.int32(0))


def _add_head(
    plan: _Plan, memory: _Memory, here: Array, item: _Item, done: Array, n: Array, totals: tuple[Array, ...]
) -> tuple[Array, ...]:
    """Adds one of the heads and examples that share the tile; ``done`` were added to others before."""
    plgpu, spec, added = mosaic(), plan.spec, []
    # Addresses are computed for each step: registers would not hold them.
    here = lax.optimization_barrier(here)
    b, k, g = item.heads(plan, n)
    row = item.row + here * BLOCK
    window = (b, k, g, pl.ds(row, BLOCK))
    shift, delta = (vector(ref, window, "along_0") for ref in (memory.shift, memory.delta))
    slot = lax.rem(done + n, jnp.int32(plan.row_stages))
    floating = [i for i, s in enumerate(spec.sides) if s.differentiable]
    for c, total in enumerate(totals):
        place = Place(b, k, g, row, item.column + c * BLOCK, SHAPE)
        known = place.positions() | side_values(spec, memory.sides, place) | {"shift": shift}
        at = lax.rem((done + n) * plan.across + c, jnp.int32(plan.stages))
        if c == 0:
            plgpu.barrier_wait(memory.rows_ready.at[slot])
        plgpu.barrier_wait(memory.ready.at[at])
        q, do, k_tile, v_tile = memory.shared
        pairs = [(q.at[slot, here], k_tile.at[at]), (do.at[slot, here], v_tile.at[at])]

        def gradient(score: Dot, dp: Dot, known: dict[str, Value] = known, at: Array = at, c: int = c) -> Array:
            known["score"] = Value("tile", score().astype(spec.score_dtype))
            elements = plan.elements.on(SHAPE, known)
            known_dp = Value("tile", dp())
            plgpu.barrier_arrive(memory.free.at[at])
            if c == plan.across - 1:
                plgpu.barrier_arrive(memory.rows_free.at[slot])
            _, _, dsides = elements.given({"dp": known_dp, "delta": delta}).result()
            found: Array = dsides[floating.index(plan.number)].widened("tile", SHAPE)
            return found.astype(F32)

        added.append(total + started(pairs, SHAPE, gradient))
    return tuple(added)


def _unravelled(n: Number, extents: tuple[int, ...]) -> tuple[Number, ...]:
    """Returns the index of element n of an array, in row-major order."""
    found: list[Number] = []
    for extent in reversed(extents):
        found.append(lax.rem(n, jnp.int32(extent)) if extent > 1 else 0)
        n = lax.div(n, jnp.int32(extent)) if extent > 1 else n
    return tuple(reversed(found))
