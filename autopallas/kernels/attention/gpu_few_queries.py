"""Computes the forward of attention of few queries on an H100, as in a step of decoding: its keys are what takes time.

The query heads that share keys are rows of one tile, so that keys and values are read once.  Where these heads are
fewer than processors, several blocks of threads divide the keys of each, as in Flash-Decoding (Dao et al. 2023,
https://crfm.stanford.edu/2023/10/12/flashdecoding.html): each gives the maximum and the sum of exponentials of its
keys, and their weighted sum of values, which plain JAX joins.  Two warpgroups that compute divide the steps of a block
further, if one holds all rows: what one has to wait for, the other need not.

What is divided are the steps that are visited, so that an example with fewer keys is divided as evenly.  Where side
inputs hide keys, these are the blocks from the first that has any to the last: a cache has its keys in one piece, and
XLA finds these two with less than it takes to list blocks.

Keys and values are read as they lie if their number is a multiple of 8: TMA fills what is behind their end with zeros,
and drops rows of a result that there are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from autopallas.kernels import gpu
from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.kernels.attention.dynamic_tiles import run_time_states
from autopallas.kernels.attention.gpu_block_sizes import Tiles, divided
from autopallas.kernels.attention.gpu_grid import (
    WARPGROUP_ROWS,
    Loop,
    Place,
    Steps,
    Visits,
    head_size_of,
    side_operand,
)
from autopallas.kernels.attention.gpu_layout import Layout, Turned
from autopallas.kernels.attention.gpu_softmax import Running, advanced
from autopallas.kernels.attention.gpu_warpgroups import (
    fill,
    multiplied,
    parts,
    products,
    ring,
    share_registers,
    vectors,
)
from autopallas.kernels.attention.operands import Operands, Results
from autopallas.kernels.attention.spec import AttentionSpec, Layouts, SideSpec
from autopallas.kernels.attention.tiles import DEAD
from autopallas.kernels.gpu import mosaic, rounded, store, tile
from autopallas.kernels.refs import Number, Ref
from autopallas.sites.interpret import interpretation

__all__ = ["forward"]

Array: TypeAlias = jax.Array
F32 = np.dtype(np.float32)
_SEARCHED_FROM = 48 * 2**20
"""Bytes of keys and values from which it is found before which blocks of them a mask by side inputs shows.

An H100 reads so many in about the time that five small kernels of XLA's are estimated to take that find it."""


def forward(spec: AttentionSpec, blocks: BlockSizes, operands: Operands) -> Results:
    """Computes result, logsumexp and the factor of the probabilities; see ``pallas_gpu.forward``."""
    plan, packed = _Plan.of(spec, blocks, operands)
    return _joined(spec, plan, _call(plan, packed), operands.sink)


# ---------------------------------------------------------------------- the plan


class _Plan(NamedTuple):
    """The division of the work.

    Attributes:
      spec: the attention, of which the query heads of a group are rows one after the other, without the sink.
      length: queries of a head, if there are several heads in a tile, or one query.
      visits: the blocks of keys that are visited.
      pieces: the first of them, and their number, of each example, if side inputs decide, [B|1, 2].
      tiles: their sizes.
      blocks: the number of blocks of threads that divide the keys of a head.
      head_size, value_head_size: those with which the kernel computes.
      through_memory: whether probabilities go through shared memory, as they must when interpreted.
    """

    spec: AttentionSpec
    length: int | None
    visits: Visits
    pieces: Array | None
    tiles: Tiles
    blocks: int
    head_size: int
    value_head_size: int
    through_memory: bool

    @staticmethod
    def of(spec: AttentionSpec, blocks: BlockSizes, operands: Operands) -> tuple[_Plan, Operands]:
        """Returns the plan, and the operands of its spec."""
        found = divided(spec, blocks)
        assert found is not None
        tiles, count = found
        # Whether hidden tiles add nothing would be known only after all keys have been read.
        visits = Visits.of(spec, "row", spec.query_length, tiles.away, operands.sides, listed=False)
        pieces = None
        if gpu.array_bytes(operands.key, operands.value) >= _SEARCHED_FROM and visits.away_blocks > 1:
            pieces = _pieces(spec, tiles.away, operands.sides)
        if pieces is not None:  # their blocks have nothing in common
            visits = replace(visits, counts=None, ordered=True, table=None, has_full=False, has_partial=True)
        sizes = head_size_of(spec.head_size) or 0, head_size_of(spec.value_head_size) or 0
        tiles = replace(tiles, stages=min(tiles.stages, max(-(-visits.most // count), 1)))
        packed, given = _packed(spec, operands)
        length = spec.query_length if spec.groups > 1 or spec.query_length == 1 else None
        return _Plan(packed, length, visits, pieces, tiles, count, *sizes, bool(interpretation())), given

    @property
    def heads(self) -> int:
        return self.spec.batch * self.spec.key_heads

    @property
    def divides(self) -> int:
        """How many warpgroups divide the steps of a block: each has all rows."""
        return self.tiles.warpgroups if self.spec.query_length <= WARPGROUP_ROWS else 1

    @property
    def lines(self) -> int:
        """Rows of a tile, some of which there may not be."""
        return self.tiles.warpgroups // self.divides * WARPGROUP_ROWS

    @property
    def shares(self) -> int:
        """The number of parts of the keys of a head, of each of which there is a result."""
        return self.blocks * self.divides

    def inputs(self, operands: Operands) -> list[Array]:
        """Returns the arrays in main memory."""
        spec, columns = self.spec, rounded(self.spec.key_length, self.tiles.away)
        query, key, value, sides, _ = operands
        of_query, of_key, of_value = map(Layout.of, spec.layouts)
        keys = _moved(spec.key_length)
        found = [
            of_query.padded(query, _moved(spec.query_length), self.head_size),
            of_key.padded(key, keys, self.head_size),
            of_value.padded(value, keys, self.value_head_size),
        ]
        found += self.visits.operands if self.pieces is None else (self.pieces,)
        return found + [side_operand(s, x, self.lines, columns, False) for s, x in zip(spec.sides, sides, strict=True)]

    @property
    def results(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Types of the weighted sums of values, the maxima and the sums, and whether any key is kept."""
        spec = self.spec
        outer = self.shares, spec.batch, spec.key_heads
        numbers = jax.ShapeDtypeStruct((*outer, self.lines), F32)
        sums = jax.ShapeDtypeStruct((*outer, _moved(spec.query_length), self.value_head_size), F32)
        return (sums, numbers, numbers) + (numbers,) * spec.keeps

    def scratch(self, operands: Operands) -> list[Ref]:
        """Returns shared memory and barriers, in the order of :class:`_Memory`."""
        w, away, stages = self.tiles.warpgroups, self.tiles.away, self.tiles.stages
        dtype, with_rows = operands.value.dtype, w // self.divides
        found = [
            tile((with_rows, WARPGROUP_ROWS, self.head_size), operands.query.dtype),
            tile((stages, away, self.head_size), operands.key.dtype),
            tile((stages, away, self.value_head_size), dtype),
            tile((w, WARPGROUP_ROWS, self.value_head_size), F32),
        ]
        staged = [tile((w, WARPGROUP_ROWS, away), dtype)] * self.through_memory
        rings = [*ring(stages, with_rows), *ring(stages, with_rows)]
        return [*found, *staged, mosaic().Barrier(num_barriers=with_rows), *rings]


def _pieces(spec: AttentionSpec, away: int, sides: Sequence[Array]) -> Array | None:
    """Returns the first block of keys that an example shows, and the number up to the last one, [B|1, 2]; None if side
    inputs do not decide."""
    states = run_time_states(spec, spec.query_length, away, sides)
    if states is None:
        return None
    shown, count = states[:, 0] != DEAD, states.shape[2]
    block = jnp.arange(count, dtype=jnp.int32)
    first = jnp.min(jnp.where(shown, block, count), axis=1)
    last = jnp.max(jnp.where(shown, block, -1), axis=1)
    return jnp.stack([first, jnp.maximum(last - first + 1, 0)], axis=1)


def _moved(length: int) -> int:
    """Returns the length of an axis of which TMA moves groups of 8: such an axis is no longer, or a multiple."""
    return length if length < 8 else rounded(length, 8)


def _packed(spec: AttentionSpec, operands: Operands) -> tuple[AttentionSpec, Operands]:
    """Returns the attention whose rows are the queries of all heads of a group, head after head."""
    groups, length = spec.groups, spec.query_length
    if groups == 1:
        return replace(spec, sink=None), operands._replace(sink=None)

    def joined(x: Array) -> Array:
        wide = jnp.broadcast_to(x, (*x.shape[:2], groups, length, x.shape[-1]))
        return wide.reshape(*x.shape[:2], 1, groups * length, x.shape[-1])

    def of_rows(side: SideSpec) -> bool:
        return side.varies[2] or side.varies[3]

    specs = tuple(replace(s, varies=(*s.varies[:2], False, of_rows(s), s.varies[4])) for s in spec.sides)
    sides = tuple(joined(x) if of_rows(s) else x for s, x in zip(spec.sides, operands.sides, strict=True))
    layouts = spec.layouts._replace(query=Layouts().query)
    own = replace(spec, groups=1, query_length=groups * length, sides=specs, sink=None, layouts=layouts)
    return own, operands._replace(query=joined(operands.query), sides=sides, sink=None)


def _joined(spec: AttentionSpec, plan: _Plan, found: Sequence[Array], sink: Array | None) -> Results:
    """Joins what the shares of the keys give; the sink, which has no key, is one more share."""
    sums, *numbers = found
    outer = spec.batch, spec.key_heads, spec.groups, spec.query_length
    rows = plan.spec.query_length
    maxima, totals, *kept = (x[..., :rows].reshape(plan.shares, *outer) for x in numbers)
    maximum = jnp.max(maxima, axis=0)
    logit = None if sink is None else sink[..., 0].astype(F32)
    if logit is not None:
        maximum = jnp.maximum(maximum, logit)
    # A share that has seen only -inf has the sum 0; without the zero, -inf - -inf would be NaN.
    finite = jnp.where(maximum == -jnp.inf, 0.0, maximum)
    shrink = jnp.exp(maxima - finite)
    total = jnp.sum(totals * shrink, axis=0)
    if logit is not None:
        total = total + jnp.exp(logit - finite)
    sums = sums[..., :rows, : spec.value_head_size].reshape(plan.shares, *outer, spec.value_head_size)
    out = jnp.sum(sums * shrink[..., None], axis=0) / total[..., None]
    if kept:
        out = jnp.where(jnp.any(kept[0] > 0.0, axis=0)[..., None], out, 0.0)
    # As gpu_forward does it: a NaN that the maximum does not have is in the sum.
    logsumexp = maximum + jnp.log(jnp.abs(total))
    factor = jnp.where(total == 0.0, 1.0, jnp.exp(logsumexp - maximum) / total)
    return Results(out.astype(spec.result_dtype), (logsumexp,), factor)


# ---------------------------------------------------------------------- the kernel


class _Memory(NamedTuple):
    """References of the kernel; None for what it lacks.

    Attributes:
      query, key, value, table, sides: operands in main memory.
      sums, numbers: of :attr:`_Plan.results`.
      query_shared, key_shared, value_shared: each 64 rows of queries, and the ring's stages of keys and values.
      stored: the weighted sums of each warpgroup, for TMA.
      staged: the probabilities of each warpgroup, if they go through shared memory.
      query_ready, key_ready, key_free, value_ready, value_free: barriers of these.
    """

    query: Turned
    key: Turned
    value: Turned
    table: Ref
    sides: tuple[Ref, ...]
    sums: Ref
    numbers: tuple[Ref, ...]
    query_shared: Ref
    key_shared: Ref
    value_shared: Ref
    stored: Ref
    staged: Ref
    query_ready: Ref
    key_ready: Ref
    key_free: Ref
    value_ready: Ref
    value_free: Ref

    @staticmethod
    def of(plan: _Plan, refs: Sequence[Ref]) -> _Memory:
        left = iter(refs)
        query, key, value = (Turned(next(left), Layout.of(order)) for order in plan.spec.layouts)
        return _Memory(
            query=query,
            key=key,
            value=value,
            table=next(left) if plan.visits.operands or plan.pieces is not None else None,
            sides=tuple(next(left) for _ in plan.spec.sides),
            sums=next(left),
            numbers=tuple(next(left) for _ in plan.results[1:]),
            query_shared=next(left),
            key_shared=next(left),
            value_shared=next(left),
            stored=next(left),
            staged=next(left) if plan.through_memory else None,
            query_ready=next(left),
            key_ready=next(left),
            key_free=next(left),
            value_ready=next(left),
            value_free=next(left),
        )


class _Block(NamedTuple):
    """A block of threads, which computes a part of the keys of one head.

    Attributes:
      plan, memory: of the kernel.
      warpgroup: the number of this warpgroup in the block; the last one only moves memory.
      number: the number of this block among those of the head.
      batch, head: the batch entry and the key head.
      steps: the blocks of keys to visit.
    """

    plan: _Plan
    memory: _Memory
    warpgroup: Array
    number: Array
    batch: Array
    head: Array
    steps: Steps

    @staticmethod
    def of(plan: _Plan, memory: _Memory) -> _Block:
        place, number = gpu.unravelled(lax.axis_index("block"), plan.blocks)
        batch, head = gpu.unravelled(place, plan.spec.key_heads)
        if plan.pieces is None:
            steps = plan.visits.steps(memory.table, batch, 0)
        else:
            entry = batch if len(plan.pieces) > 1 else 0
            first = memory.table[entry, 0]
            steps = Steps(0, memory.table[entry, 1], lambda n: first + n)
        steps = _part(steps, number, plan.blocks, plan.pieces is not None or plan.visits.ordered)
        return _Block(plan, memory, lax.axis_index("warpgroup"), number, batch, head, steps)


def _part(steps: Steps, number: Array, parts: int, consecutive: bool = False) -> Steps:
    """Returns the steps of one of several parts: each has as many of the full and of the partial ones.

    Where blocks are ``consecutive``, the first one's number is computed before: ptxas of CUDA 13.0 ends with a
    segmentation fault for some kernels that add it in each step.
    """
    if parts == 1:
        return steps

    def count(of_all: Number) -> Array:
        return lax.div(of_all - number + (parts - 1), jnp.int32(parts))

    if consecutive:
        first = steps.block(number)
        return Steps(count(steps.full), count(steps.total), lambda n: first + n * parts)
    return Steps(count(steps.full), count(steps.total), lambda n: steps.block(number + n * parts))


def _call(plan: _Plan, operands: Operands) -> tuple[Array, ...]:
    tiles, inputs, results = plan.tiles, plan.inputs(operands), plan.results
    scores = plan.heads * plan.visits.most * plan.lines * tiles.away
    found: tuple[Array, ...] = gpu.call(
        partial(_kernel, plan),
        name="autopallas_attention_gpu_few_queries",
        grid={"block": plan.heads * plan.blocks},
        out_type=results,
        scratch=plan.scratch(operands),
        warpgroups=tiles.warpgroups + 1,
        flops=2 * scores * (plan.head_size + plan.value_head_size),
        transcendentals=scores,
        bytes_accessed=gpu.array_bytes(*inputs, *results),
        approximate=True,
        by_lanes=True,
    )(*inputs)
    return found


def _kernel(plan: _Plan, *refs: Ref) -> None:
    own = _Block.of(plan, _Memory.of(plan, refs))
    pl.when(own.warpgroup < plan.tiles.warpgroups)(partial(_compute, own))
    pl.when(own.warpgroup == plan.tiles.warpgroups)(partial(_load, own))


def _compute(own: _Block) -> None:
    """Computes 64 rows of a tile, as many of them as there are, in one of the warpgroups that divide the steps."""
    plgpu, plan, memory, here = mosaic(), own.plan, own.memory, own.warpgroup
    share_registers(plan.tiles.warpgroups, computes=True)
    at, part = (here, jnp.int32(0)) if plan.divides == 1 else (jnp.int32(0), here)
    rows = pl.ds(at * WARPGROUP_ROWS, WARPGROUP_ROWS)

    @pl.when(part == 0)
    def _() -> None:
        window = memory.query.at[own.batch, own.head, 0, rows]
        plgpu.copy_gmem_to_smem(window, memory.query_shared.at[at], memory.query_ready.at[at])

    zeros = jnp.zeros((WARPGROUP_ROWS, plan.value_head_size), F32)
    running = Running(
        plgpu.layout_cast(zeros, plgpu.Layout.WGMMA),
        vectors(-jnp.inf),
        vectors(0.0),
        vectors(0.0) if plan.spec.keeps else None,
    )
    plgpu.barrier_wait(memory.query_ready.at[at])
    for loop in plan.visits.loops(_part(own.steps, part, plan.divides)):
        step = partial(_step, own, at, part, loop)
        running = lax.fori_loop(loop.first, loop.first + loop.steps, step, running)
    memory.stored.at[here][...] = running.accumulator
    plgpu.commit_smem()
    outer = own.number * plan.divides + part, own.batch, own.head
    plgpu.copy_smem_to_gmem(memory.stored.at[here], memory.sums.at[*outer, rows])
    kept = () if running.kept is None else (running.kept,)
    for ref, numbers in zip(memory.numbers, (running.maximum, running.total, *kept), strict=True):
        store(ref.at[*outer, rows], numbers)
    plgpu.wait_smem_to_gmem(0)


def _step(own: _Block, at: Array, part: Array, loop: Loop, n: Number, running: Running) -> Running:
    """Returns the state after one more tile: the n-th of a warpgroup's part."""
    plgpu, plan, memory = mosaic(), own.plan, own.memory
    shape = WARPGROUP_ROWS, plan.tiles.away
    n = part + n * plan.divides
    start = own.steps.block(n) * plan.tiles.away
    place = Place(own.batch, own.head, 0, at * WARPGROUP_ROWS, start, shape, length=plan.length)
    slot = lax.rem(n, jnp.int32(plan.tiles.stages))
    plgpu.barrier_wait(memory.key_ready.at[slot])
    (score,) = products([(memory.query_shared.at[at], memory.key_shared.at[slot])], shape)
    plgpu.barrier_arrive(memory.key_free.at[slot])
    p, running = advanced(plan.spec, memory.sides, loop, place, score, running)
    accumulator = running.accumulator
    assert accumulator is not None
    plgpu.barrier_wait(memory.value_ready.at[slot])
    staged = None if memory.staged is None else memory.staged.at[own.warpgroup]
    for weights in parts(p, plan.spec.reads_weights, memory.value.dtype, plan.spec.value_precision):
        accumulator = multiplied(weights, memory.value_shared.at[slot], accumulator, staged)
    plgpu.barrier_arrive(memory.value_free.at[slot])
    return running._replace(accumulator=accumulator)


def _load(own: _Block) -> None:
    """Fills the ring with keys and values."""
    plgpu, plan, memory = mosaic(), own.plan, own.memory
    share_registers(plan.tiles.warpgroups, computes=False)

    def load(_: int, n: Number, slot: Array) -> None:
        window = own.batch, own.head, pl.ds(own.steps.block(n) * plan.tiles.away, plan.tiles.away)
        plgpu.copy_gmem_to_smem(memory.key.at[window], memory.key_shared.at[slot], memory.key_ready.at[slot])
        plgpu.copy_gmem_to_smem(memory.value.at[window], memory.value_shared.at[slot], memory.value_ready.at[slot])

    def free(slot: Array) -> None:
        plgpu.barrier_wait(memory.key_free.at[slot])
        plgpu.barrier_wait(memory.value_free.at[slot])

    fill([(0, own.steps.total)], plan.tiles.stages, load, free)
