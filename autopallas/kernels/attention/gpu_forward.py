"""Computes the forward of attention on an H100: warpgroups of 64 rows each compute, and one only moves memory.

The algorithm is FlashAttention-2 (Dao 2023, https://arxiv.org/abs/2307.08691) with the division of work of
FlashAttention-3 (Shah et al. 2024, https://arxiv.org/abs/2407.08608): the last warpgroup fills a ring of stages with
keys and values by TMA; the others wait until a stage is filled, use it, and release it.  Two that compute take turns,
as there: one multiplies while the other computes exponentials.  Persistent blocks of threads go through lists of blocks
of rows (:mod:`.gpu_order`): the last warpgroup then loads the queries too, and runs ahead, over the end of a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from autopallas.kernels import gpu
from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.kernels.attention.fill_proofs import Proof
from autopallas.kernels.attention.gpu_block_sizes import forward_tiles, schedule_of
from autopallas.kernels.attention.gpu_grid import (
    WARPGROUP_ROWS,
    Loop,
    Place,
    Steps,
    Visits,
    head_size_of,
    side_operand,
    vector,
)
from autopallas.kernels.attention.gpu_layout import Layout, Turned, moved, padded
from autopallas.kernels.attention.gpu_order import Order, entry, list_length
from autopallas.kernels.attention.gpu_softmax import LOG2E, Running, advanced
from autopallas.kernels.attention.gpu_warpgroups import (
    drain,
    fill,
    multiplied,
    parts,
    products,
    ring,
    share_registers,
    vectors,
)
from autopallas.kernels.attention.operands import Operands, Residuals, Results
from autopallas.kernels.attention.spec import AttentionSpec
from autopallas.kernels.attention.tile_values import reciprocal
from autopallas.kernels.gpu import mosaic, rounded, store, tile
from autopallas.kernels.refs import Number, Ref
from autopallas.sites.interpret import interpretation

__all__ = ["forward", "normalizers", "statistics"]

Array: TypeAlias = jax.Array
F32 = np.dtype(np.float32)
_LARGE_LOGSUMEXP = 256.0
"""Beyond it the logsumexp's rounding shows in the probabilities, and maximum and sum are recomputed."""


def forward(spec: AttentionSpec, blocks: BlockSizes, operands: Operands) -> Results:
    """Computes result, logsumexp and the factor of the probabilities; see ``pallas_gpu.forward``."""
    out, logsumexp, factor = _call(_Plan.of(spec, blocks, operands, values=True), operands)
    return Results(out, (logsumexp,), factor)


def statistics(spec: AttentionSpec, blocks: BlockSizes, operands: Operands) -> tuple[Array, Array]:
    """Returns the maximum and the sum of exponentials of each row, [B, K, G, T]; values are not read."""
    maximum, total = _call(_Plan.of(spec, blocks, operands, values=False), operands)
    return maximum, total


def normalizers(
    spec: AttentionSpec, block_sizes: BlockSizes, operands: Operands, residuals: Residuals
) -> tuple[Array, Array]:
    """Returns (shift, factor), each [B, K, G, T], such that the probabilities are exp(x - shift) * factor."""

    def recomputed() -> tuple[Array, Array]:
        maximum, total = statistics(spec, block_sizes, operands)
        return maximum, reciprocal(total)

    if spec.inner_weights:  # what they drop may exceed the logsumexp by far
        return recomputed()
    logsumexp, factor = residuals.shift, residuals.factor
    if factor is not None:
        return logsumexp, factor
    large = jnp.isfinite(logsumexp) & (jnp.abs(logsumexp) > _LARGE_LOGSUMEXP)
    shift, factor = lax.cond(jnp.any(large), recomputed, lambda: (logsumexp, jnp.ones_like(logsumexp)))
    return shift, factor


# ---------------------------------------------------------------------- the kernel


class _Plan(NamedTuple):
    """The division of the work.

    Attributes:
      spec: the attention.
      visits: the blocks of keys that each block of rows visits.
      warpgroups: the number of warpgroups that compute, each of them 64 rows.
      key_block: keys of a tile.
      stages: of the ring.
      head_size, value_head_size: those with which the kernel computes.
      values: whether the result is computed, not only the numbers for each row.
      order: of the blocks of rows.
      through_memory: whether probabilities go through shared memory, as they must when interpreted.
    """

    spec: AttentionSpec
    visits: Visits
    warpgroups: int
    key_block: int
    stages: int
    head_size: int
    value_head_size: int
    values: bool
    order: Order
    through_memory: bool

    @staticmethod
    def of(spec: AttentionSpec, blocks: BlockSizes, operands: Operands, values: bool) -> _Plan:
        tiles = forward_tiles(spec, blocks)
        proof = Proof.of(spec, operands)
        visits = Visits.of(spec, "row", tiles.warpgroups * WARPGROUP_ROWS, tiles.away, operands.sides, proof)
        stages = min(tiles.stages, max(visits.most, 1))
        sizes = head_size_of(spec.head_size) or 0, head_size_of(spec.value_head_size) or 0
        streamed = spec.key_length * sum(sizes) * operands.key.dtype.itemsize
        heads, schedule = spec.batch * spec.key_heads * spec.groups, schedule_of(spec, blocks) if values else ""
        order = Order.of(visits, heads, schedule, streamed, sharing=spec.groups)
        division = visits, tiles.warpgroups, tiles.away, stages, *sizes
        return _Plan(spec, *division, values, order, bool(interpretation()))

    @property
    def query_block(self) -> int:
        return self.warpgroups * WARPGROUP_ROWS

    @property
    def persistent(self) -> bool:
        """Whether a block of threads computes several blocks of rows."""
        return self.order.lists is not None

    @property
    def takes_turns(self) -> bool:
        """Whether the warpgroups that compute take turns with the tensor cores; both visit the same tiles."""
        return self.warpgroups == 2 and self.values

    @property
    def heads(self) -> tuple[int, int, int]:
        return self.spec.batch, self.spec.key_heads, self.spec.groups

    @property
    def rows(self) -> int:
        """Rows of all blocks."""
        return rounded(self.spec.query_length, self.query_block)

    def inputs(self, operands: Operands) -> list[Array]:
        """Returns the arrays in main memory; what is not moved by TMA is padded to whole blocks."""
        spec, rows, columns = self.spec, self.rows, rounded(self.spec.key_length, self.key_block)
        query, key, value, sides, sink = operands
        of_query, of_key, of_value = map(Layout.of, spec.layouts)
        keys = moved(spec.key_length)
        found = [
            of_query.padded(query, moved(spec.query_length), self.head_size),
            of_key.padded(key, keys, self.head_size),
        ]
        if self.values:
            found.append(of_value.padded(value, keys, self.value_head_size))
        found += [*self.visits.operands, *self.order.operands]
        found += [side_operand(s, x, rows, columns, False) for s, x in zip(spec.sides, sides, strict=True)]
        if sink is not None:
            numbers = jnp.broadcast_to(sink[..., 0].astype(F32), (*self.heads, spec.query_length))
            found.append(padded(numbers, rows))
        return found

    @property
    def results(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Types of result, logsumexp and factor; without values, of maximum and sum."""
        numbers = jax.ShapeDtypeStruct((*self.heads, self.rows), F32)
        if not self.values:
            return numbers, numbers
        shape = Layout.of(self.spec.layouts.query).shape((*self.heads, self.rows, self.value_head_size))
        return jax.ShapeDtypeStruct(shape, self.spec.result_dtype), numbers, numbers

    def scratch(self, operands: Operands) -> list[Ref]:
        """Returns shared memory and barriers, in the order of :class:`_Memory`."""
        w, bk, stages, value = self.warpgroups, self.key_block, self.stages, operands.value
        found = [
            tile((w, WARPGROUP_ROWS, self.head_size), operands.query.dtype),
            tile((stages, bk, self.head_size), operands.key.dtype),
        ]
        barriers = [mosaic().Barrier(num_barriers=w), *ring(stages, w)]
        if self.values:
            found.append(tile((stages, bk, self.value_head_size), value.dtype))
            barriers += ring(stages, w)
        if self.through_memory and self.values:
            found.append(tile((w, WARPGROUP_ROWS, bk), value.dtype))
        if self.takes_turns:
            barriers.append(mosaic().Barrier(num_arrivals=2))
        if self.persistent:
            barriers.append(mosaic().Barrier(num_barriers=w))
        return [*found, *barriers]


class _Memory(NamedTuple):
    """References of the kernel; None for what it lacks.

    Attributes:
      query, key, value, table, lists, sides, sink: operands in main memory.
      results: of :attr:`_Plan.results`.
      query_shared, key_shared, value_shared: queries of each warpgroup, and the ring's stages of keys and values.
      staged: the probabilities of each warpgroup, if they go through shared memory.
      query_ready, key_ready, key_free, value_ready, value_free: barriers of these.
      turn: the barrier at which two warpgroups take turns.
      query_free: the barriers at which a persistent warpgroup gives back its queries.
    """

    query: Turned
    key: Turned
    value: Ref
    table: Ref
    lists: Ref
    sides: tuple[Ref, ...]
    sink: Ref
    results: tuple[Ref, ...]
    query_shared: Ref
    key_shared: Ref
    value_shared: Ref
    staged: Ref
    query_ready: Ref
    key_ready: Ref
    key_free: Ref
    value_ready: Ref
    value_free: Ref
    turn: Ref
    query_free: Ref

    @staticmethod
    def of(plan: _Plan, refs: Sequence[Ref]) -> _Memory:
        left = iter(refs)
        of_query, of_key, of_value = map(Layout.of, plan.spec.layouts)
        return _Memory(
            query=Turned(next(left), of_query),
            key=Turned(next(left), of_key),
            value=Turned(next(left), of_value) if plan.values else None,
            table=next(left) if plan.visits.operands else None,
            lists=next(left) if plan.persistent else None,
            sides=tuple(next(left) for _ in plan.spec.sides),
            sink=next(left) if plan.spec.sink is not None else None,
            results=(
                *(Turned(next(left), of_query) for _ in range(plan.values)),
                *(next(left) for _ in plan.results[plan.values :]),
            ),
            query_shared=next(left),
            key_shared=next(left),
            value_shared=next(left) if plan.values else None,
            staged=next(left) if plan.through_memory and plan.values else None,
            query_ready=next(left),
            key_ready=next(left),
            key_free=next(left),
            value_ready=next(left) if plan.values else None,
            value_free=next(left) if plan.values else None,
            turn=next(left) if plan.takes_turns else None,
            query_free=next(left) if plan.persistent else None,
        )


class _Block(NamedTuple):
    """A block of threads, which computes a block of rows of one query head.

    Attributes:
      plan, memory: of the kernel.
      warpgroup: the number of this warpgroup in the block; the last one only moves memory.
      batch, head, group: the batch entry, the key head, and the query head of its group.
      home: the number of the block of rows.
      steps: the blocks of keys to visit.
      done: steps of blocks of rows before it; None if there are none.
    """

    plan: _Plan
    memory: _Memory
    warpgroup: Array
    batch: Array
    head: Array
    group: Array
    home: Array
    steps: Steps
    done: Array | None

    @staticmethod
    def of(plan: _Plan, memory: _Memory, n: Number = 0, done: Array | None = None) -> _Block:
        """Returns what this block of threads computes; a persistent one the ``n``-th, after so many steps."""
        spec, visits = plan.spec, plan.visits
        warpgroup = lax.axis_index("warpgroup")
        listed = memory.lists
        number = lax.axis_index("block") if listed is None else entry(listed, n)
        head, home = plan.order.place(number, listed)
        group = lax.rem(head, jnp.int32(spec.groups))
        b, k = lax.div(head, jnp.int32(spec.groups * spec.key_heads)), lax.div(head, jnp.int32(spec.groups))
        k = lax.rem(k, jnp.int32(spec.key_heads))
        return _Block(plan, memory, warpgroup, b, k, group, home, visits.steps(memory.table, b, home), done)

    def rows(self, warpgroup: Number) -> tuple[object, ...]:
        """Returns the index of the rows of a warpgroup."""
        base = self.home * self.plan.query_block + warpgroup * WARPGROUP_ROWS
        return self.batch, self.head, self.group, pl.ds(base, WARPGROUP_ROWS)

    def slot(self, n: Number) -> Array:
        """Returns the stage of step ``n``."""
        return lax.rem(n if self.done is None else self.done + n, jnp.int32(self.plan.stages))


def _call(plan: _Plan, operands: Operands) -> tuple[Array, ...]:
    """Runs the kernel, and cuts its results to the attention's sizes."""
    spec, visits = plan.spec, plan.visits
    inputs, results = plan.inputs(operands), plan.results
    tile_sizes = plan.query_block * plan.key_block
    live = math.prod(plan.heads) * visits.home_blocks * visits.most
    found = gpu.call(
        partial(_kernel, plan),
        name="autopallas_attention_gpu" + ("" if plan.values else "_statistics"),
        grid={"block": plan.order.blocks},
        out_type=results,
        scratch=plan.scratch(operands),
        warpgroups=plan.warpgroups + 1,
        flops=2 * live * tile_sizes * (plan.head_size + (plan.value_head_size if plan.values else 0)),
        transcendentals=live * tile_sizes,
        bytes_accessed=gpu.array_bytes(*inputs, *results),
        approximate=True,
        by_lanes=True,
    )(*inputs)
    cut = spec.query_length
    out = (Layout.of(spec.layouts.query).cut(x, cut, spec.value_head_size) for x in found[: plan.values])
    return *out, *(numbers[..., :cut] for numbers in found[plan.values :])


def _kernel(plan: _Plan, *refs: Ref) -> None:
    memory = _Memory.of(plan, refs)
    if plan.persistent:
        warpgroup = lax.axis_index("warpgroup")
        pl.when(warpgroup < plan.warpgroups)(partial(_compute_all, plan, memory, warpgroup))
        pl.when(warpgroup == plan.warpgroups)(partial(_load_all, plan, memory))
        return
    own = _Block.of(plan, memory)
    pl.when(own.warpgroup < plan.warpgroups)(partial(_compute, own))
    pl.when(own.warpgroup == plan.warpgroups)(partial(_load, own))


def _compute(own: _Block) -> None:
    """Computes the 64 rows of a warpgroup."""
    plgpu, plan, memory, here = mosaic(), own.plan, own.memory, own.warpgroup
    share_registers(plan.warpgroups, computes=True)
    window = own.rows(here)
    plgpu.copy_gmem_to_smem(memory.query.at[window], memory.query_shared.at[here], memory.query_ready.at[here])
    running = _visited(own)
    if plan.takes_turns:
        pl.when(here == 0)(partial(_switch, memory))
    _store(own, window, running)


def _compute_all(plan: _Plan, memory: _Memory, here: Array) -> None:
    """Computes the 64 rows of a warpgroup of each block of rows that this block of threads has.

    Of two warpgroups the second is half a step behind, from one block to the next too: each lets the other multiply
    before it writes its results.
    """
    plgpu = mosaic()
    share_registers(plan.warpgroups, computes=True)
    if plan.takes_turns:
        pl.when(here == 1)(partial(_switch, memory))

    def take(n: Array, done: Array) -> Array:
        own = _Block.of(plan, memory, n, done)
        running = _visited(own)
        pl.when(own.steps.total == 0)(lambda: plgpu.barrier_arrive(memory.query_free.at[here]))
        if plan.takes_turns:
            plgpu.barrier_arrive(memory.turn)
        _store(own, own.rows(here), running)
        if plan.takes_turns:
            plgpu.barrier_wait(memory.turn)
        return done + own.steps.total

    lax.fori_loop(0, list_length(memory.lists), take, jnp.int32(0))
    if plan.takes_turns:
        pl.when(here == 0)(partial(_switch, memory))


def _visited(own: _Block) -> Running:
    """Returns the state of the rows of a warpgroup after all their tiles."""
    plgpu, plan, memory, here = mosaic(), own.plan, own.memory, own.warpgroup
    base = own.home * plan.query_block + here * WARPGROUP_ROWS
    start = vectors(-jnp.inf), vectors(0.0)
    if memory.sink is not None:
        first = vector(memory.sink, own.rows(here), "along_0").array
        start = first, jnp.where(first == -jnp.inf, 0.0, 1.0)
    accumulator = kept = None
    if plan.values:
        accumulator = plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS, plan.value_head_size), F32), plgpu.Layout.WGMMA)
        kept = vectors(0.0) if plan.spec.keeps else None
    running = Running(accumulator, *start, kept)
    plgpu.barrier_wait(memory.query_ready.at[here])
    if plan.takes_turns and not plan.persistent:
        pl.when(here == 1)(partial(_switch, memory))
    for loop in plan.visits.loops(own.steps):
        step = partial(_advanced, own, base, loop)
        running = lax.fori_loop(loop.first, loop.first + loop.steps, step, running)
    return running


def _switch(memory: _Memory) -> None:
    """Lets the other warpgroup multiply, and waits until it has started and lets this one."""
    mosaic().barrier_arrive(memory.turn)
    mosaic().barrier_wait(memory.turn)


def _advanced(own: _Block, base: Array, loop: Loop, n: Number, running: Running) -> Running:
    """Returns the state after one more tile; ``base`` is the first row, and ``n`` the step."""
    plgpu, plan, memory, here = mosaic(), own.plan, own.memory, own.warpgroup
    shape = WARPGROUP_ROWS, plan.key_block
    place = Place(own.batch, own.head, own.group, base, own.steps.block(n) * plan.key_block, shape)
    slot = own.slot(n)
    plgpu.barrier_wait(memory.key_ready.at[slot])
    switch = partial(_switch, memory) if plan.takes_turns else None
    (score,) = products([(memory.query_shared.at[here], memory.key_shared.at[slot])], shape, switch)
    plgpu.barrier_arrive(memory.key_free.at[slot])
    if plan.persistent and (loop.general or not plan.visits.ends_partial):
        pl.when(n == own.steps.total - 1)(lambda: plgpu.barrier_arrive(memory.query_free.at[here]))
    p, running = advanced(plan.spec, memory.sides, loop, place, score, running)
    if running.accumulator is None:
        return running
    weights = parts(p, plan.spec.reads_weights, memory.value.dtype, plan.spec.value_precision)
    if plan.takes_turns:
        # All of the softmax comes before the turn, which the compiler would not see.
        weights, running = lax.optimization_barrier((weights, running))
        plgpu.barrier_arrive(memory.turn)
    plgpu.barrier_wait(memory.value_ready.at[slot])
    if plan.takes_turns:
        plgpu.barrier_wait(memory.turn)
    staged = None if memory.staged is None else memory.staged.at[here]
    accumulator = running.accumulator
    assert accumulator is not None
    for part in weights:
        accumulator = multiplied(part, memory.value_shared.at[slot], accumulator, staged)
    plgpu.barrier_arrive(memory.value_free.at[slot])
    return running._replace(accumulator=accumulator)


def _store(own: _Block, window: tuple[object, ...], running: Running) -> None:
    """Writes result, logsumexp and factor; without values, maximum and sum."""
    first, second, *third = own.memory.results
    if running.accumulator is None:
        store(first.at[window], running.maximum)
        store(second.at[window], running.total)
        return
    shape = running.accumulator.shape
    result = running.accumulator / lax.broadcast_in_dim(running.total, shape, (0,))
    if running.kept is not None:
        result = jnp.where(lax.broadcast_in_dim(running.kept, shape, (0,)) > 0.0, result, 0.0)
    store(first.at[window], result.astype(own.plan.spec.result_dtype))
    logsumexp = running.maximum + jnp.log(jnp.abs(running.total))
    store(second.at[window], logsumexp)
    # Of the rounded logsumexp; see tile_values.logsumexp.
    factor = jnp.exp2((logsumexp - running.maximum) * np.float32(LOG2E)) / running.total
    store(third[0].at[window], jnp.where(running.total == 0.0, 1.0, factor))


def _load(own: _Block) -> None:
    """Fills the ring with keys and values."""
    share_registers(own.plan.warpgroups, computes=False)
    fill([(0, own.steps.total)], own.plan.stages, partial(_load_step, own), partial(_free, own.plan, own.memory))


def _load_all(plan: _Plan, memory: _Memory) -> None:
    """Fills the ring with keys and values, and loads queries when those before are not read any more.

    The first keys and values of a block of rows are loaded before its queries, since they need not wait for these.
    """
    plgpu = mosaic()
    share_registers(plan.warpgroups, computes=False)
    free = partial(_free, plan, memory)

    def queries(own: _Block, n: Number) -> None:
        for w in range(plan.warpgroups):
            pl.when(n > 0)(partial(plgpu.barrier_wait, memory.query_free.at[w]))
            plgpu.copy_gmem_to_smem(memory.query.at[own.rows(w)], memory.query_shared.at[w], memory.query_ready.at[w])

    def take(n: Array, done: Array) -> Array:
        own = _Block.of(plan, memory, n, done)

        def load(part: int, step: Array, slot: Array) -> None:
            _load_step(own, part, step, slot)
            pl.when(step == 0)(partial(queries, own, n))

        pl.when(own.steps.total == 0)(partial(queries, own, n))
        fill([(0, own.steps.total)], plan.stages, load, free, done)
        return done + own.steps.total

    done = lax.fori_loop(0, list_length(memory.lists), take, jnp.int32(0))
    drain(done, plan.stages, free)
    for w in range(plan.warpgroups):
        plgpu.barrier_wait(memory.query_free.at[w])


def _load_step(own: _Block, _: int, n: Number, slot: Array) -> None:
    """Loads the keys and values of a step."""
    plgpu, plan, memory = mosaic(), own.plan, own.memory
    window = own.batch, own.head, pl.ds(own.steps.block(n) * plan.key_block, plan.key_block)
    plgpu.copy_gmem_to_smem(memory.key.at[window], memory.key_shared.at[slot], memory.key_ready.at[slot])
    if plan.values:
        plgpu.copy_gmem_to_smem(memory.value.at[window], memory.value_shared.at[slot], memory.value_ready.at[slot])


def _free(plan: _Plan, memory: _Memory, slot: Array) -> None:
    """Waits for the last use of keys and values."""
    plgpu = mosaic()
    plgpu.barrier_wait(memory.key_free.at[slot])
    if plan.values:
        plgpu.barrier_wait(memory.value_free.at[slot])
