"""Describes one kernel of attention's backward: what it reads and gives, its memory, and the blocks of a grid."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from autopallas.compat import Dtype
from autopallas.kernels.attention.block_sizes import Schedule
from autopallas.kernels.attention.fill_proofs import Proof
from autopallas.kernels.attention.gpu_block_sizes import Tiles
from autopallas.kernels.attention.gpu_elements import Value
from autopallas.kernels.attention.gpu_grid import (
    WARPGROUP_ROWS,
    Loop,
    Steps,
    Visits,
    head_size_of,
    side_operand,
    stored,
    turned_sides,
    vector,
)
from autopallas.kernels.attention.gpu_layout import Layout, Turned, moved, padded
from autopallas.kernels.attention.gpu_order import Order, entry
from autopallas.kernels.attention.gpu_score_units import F16, Units, fit, halves
from autopallas.kernels.attention.gpu_warpgroups import ring
from autopallas.kernels.attention.operands import Operands, ScaledRows
from autopallas.kernels.attention.spec import AttentionSpec
from autopallas.kernels.gpu import mosaic, rounded, tile
from autopallas.kernels.refs import Number, Ref
from autopallas.sites.interpret import interpretation

__all__ = ["Block", "Memory", "Plan", "home_of"]

Array: TypeAlias = jax.Array
F32 = np.dtype(np.float32)


class Plan(NamedTuple):
    """The division of the work in one kernel.  Home blocks are of rows or columns; it streams the others.

    Attributes:
      spec: the attention.
      flipped: whether columns are at home: the tile is transposed.
      outputs: those of "query", "key" and "value" whose gradients it computes.
      numbers: side inputs whose gradient, a number per row (or less) or per column, comes with these; without outputs,
        "delta", the sum of p dp over each row, which is free of the result's rounding.
      visits: the blocks that each home block visits.
      warpgroups: the number of warpgroups that compute, each of them 64 rows or columns.
      away: rows or columns of a streamed block.
      stages: of the ring.
      head_size, value_head_size: those with which the kernel computes.
      dtype: of the operands that wgmma multiplies.
      halved: whether gradients of scores are multiplied in float16, by a copy of what is streamed.
      order: of the home blocks.
      through_memory: whether tiles go through shared memory before a product, as they must when interpreted.
    """

    spec: AttentionSpec
    flipped: bool
    outputs: tuple[str, ...]
    numbers: tuple[int | Literal["delta"], ...]
    visits: Visits
    warpgroups: int
    away: int
    stages: int
    head_size: int
    value_head_size: int
    dtype: Dtype
    halved: bool
    order: Order
    through_memory: bool

    @staticmethod
    def of(
        spec: AttentionSpec,
        kernel: Literal["query", "key_value"],
        tiles: Tiles,
        outputs: tuple[str, ...],
        operands: Operands,
        schedule: Schedule,
        proof: Proof | None,
    ) -> Plan:
        flipped = kernel == "key_value"
        home, away = tiles.warpgroups * WARPGROUP_ROWS, tiles.away
        row_block, column_block = (away, home) if flipped else (home, away)
        visits = Visits.of(spec, "column" if flipped else "row", row_block, column_block, operands.sides, proof)
        stages = min(tiles.stages, max(1, visits.most * (spec.groups if flipped else 1)))
        sizes = head_size_of(spec.head_size) or 0, head_size_of(spec.value_head_size) or 0
        numbers = _numbers_of(spec, flipped, outputs)
        dtype = np.dtype(operands.query.dtype)
        division = visits, tiles.warpgroups, away, stages, *sizes
        halved = fit(spec) and outputs not in ((), ("value",))
        length = spec.query_length * spec.groups if flipped else spec.key_length
        streamed = length * (sum(sizes) + halved * sizes[0]) * dtype.itemsize
        heads, sharing = spec.batch * spec.key_heads, 1 if flipped else spec.groups
        order = Order.of(visits, heads * sharing, schedule, streamed, sharing)
        return Plan(spec, flipped, outputs, numbers, *division, dtype, halved, order, bool(interpretation()))

    @property
    def persistent(self) -> bool:
        """Whether a block of threads computes several home blocks."""
        return self.order.lists is not None

    @property
    def home(self) -> int:
        return self.warpgroups * WARPGROUP_ROWS

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of a warpgroup's tile."""
        return WARPGROUP_ROWS, self.away

    @property
    def groups(self) -> int:
        """Query heads over which a home block sums."""
        return self.spec.groups if self.flipped else 1

    @property
    def heads(self) -> tuple[int, ...]:
        """Axes of the outputs, without rows or columns."""
        outer = self.spec.batch, self.spec.key_heads
        return outer if self.flipped else (*outer, self.spec.groups)

    @property
    def lengths(self) -> tuple[int, int]:
        """Rows and columns of all blocks."""
        blocks = (self.away, self.home) if self.flipped else (self.home, self.away)
        return rounded(self.spec.query_length, blocks[0]), rounded(self.spec.key_length, blocks[1])

    @property
    def sizes(self) -> dict[str, int]:
        """Head size of each gradient."""
        return {"query": self.head_size, "key": self.head_size, "value": self.value_head_size}

    @property
    def layouts(self) -> dict[str, Layout]:
        """Layout of each gradient."""
        return {name: Layout.of(order) for name, order in self.spec.layouts._asdict().items()}

    @property
    def inner(self) -> bool:
        """Whether anything but the probabilities is needed."""
        return self.outputs != ("value",)

    @property
    def turned(self) -> tuple[int, ...]:
        """Side inputs that come with the streamed rows, and are turned as they are read."""
        return turned_sides(self.spec, self.flipped)

    @property
    def floating(self) -> list[int]:
        """Side inputs that have a gradient."""
        return [i for i, s in enumerate(self.spec.sides) if s.differentiable]

    @property
    def unmasked(self) -> bool:
        """Whether a row that is streamed and does not exist has probabilities of zero, by its shift."""
        return self.flipped and fit(self.spec)

    def inputs(self, operands: Operands, scaled: ScaledRows, units: Units | None) -> list[Array]:
        """Returns the arrays in main memory; of what is not moved by TMA alone, rows and columns of whole blocks."""
        spec, (rows, columns) = self.spec, self.lengths
        query, key, value, sides, _ = operands
        layouts, d, dv = self.layouts, self.head_size, self.value_head_size
        queries, keys = moved(spec.query_length), moved(spec.key_length)
        of_rows = layouts["query"].padded(query, queries, d), layouts["query"].padded(scaled.dout, queries, dv)
        of_columns = layouts["key"].padded(key, keys, d), layouts["value"].padded(value, keys, dv)
        found = [*(of_columns if self.flipped else of_rows), *(of_rows if self.flipped else of_columns)]
        shape = *query.shape[:3], spec.query_length
        numbers = [padded(jnp.broadcast_to(x, shape), rows) for x in (scaled.shift, scaled.delta)]
        if self.unmasked and rows > spec.query_length:
            numbers[0] = jnp.where(np.arange(rows) < spec.query_length, numbers[0], jnp.inf)
        if self.halved:
            assert units is not None
            name, streamed, length = ("query", query, queries) if self.flipped else ("key", key, keys)
            copy, scale = halves(streamed)
            unit = units.keys if self.flipped else units.rows
            back = 1 / (unit * jnp.expand_dims(scale, tuple(range(2, unit.ndim))))
            both = [padded(x, columns if self.flipped else rows) for x in (unit, back)]
            found += [layouts[name].padded(copy, length, d), *both]
        # Without the barrier XLA would compute the sums of products within the copy that stacks them, one at a time.
        found += [jnp.stack(lax.optimization_barrier(numbers), axis=-2)]
        found += [*self.visits.operands, *self.order.operands]
        for n, (side, x) in enumerate(zip(spec.sides, sides, strict=True)):
            found.append(side_operand(side, x, rows, columns, self.flipped and n not in self.turned))
        return found

    @property
    def results(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Types of the outputs, and of the numbers."""
        length = self.lengths[1 if self.flipped else 0]
        # Gradients of float16 are in other units, and may be out of its range.
        kept = F32 if self.dtype == np.float16 else self.dtype
        shapes = (self.layouts[o].shape((*self.heads, length, self.sizes[o])) for o in self.outputs)
        outputs = (jax.ShapeDtypeStruct(shape, kept) for shape in shapes)
        return *outputs, *(jax.ShapeDtypeStruct((*self.heads, length), F32) for _ in self.numbers)

    def scratch(self) -> list[Ref]:
        """Returns shared memory and barriers, in the order of :class:`Memory`."""
        counts = (self.warpgroups, WARPGROUP_ROWS), (self.stages, self.away)
        shapes = [(*count, of) for count in counts for of in (self.head_size, self.value_head_size)]
        found = [tile(shape, self.dtype, widest=self.away * self.dtype.itemsize) for shape in shapes]
        if self.halved:
            found.append(tile((self.stages, self.away, self.head_size), F16, widest=self.away * F16.itemsize))
        if self.through_memory:
            dtypes = [self.dtype, F16] if self.halved else [self.dtype]
            found += [tile((self.warpgroups, WARPGROUP_ROWS, self.away), dtype) for dtype in dtypes]
        if self.flipped:
            found.append(mosaic().SMEM((self.stages, 2, self.away), jnp.float32))
        shape = self.stages, self.warpgroups, self.away, WARPGROUP_ROWS
        found += [tile(shape, stored(self.spec.sides[n])) for n in self.turned]
        at_home = mosaic().Barrier(num_arrivals=2, num_barriers=self.warpgroups)
        copies = 2 + self.halved + self.flipped + self.warpgroups * len(self.turned)
        again = [mosaic().Barrier(num_barriers=self.warpgroups)] if self.persistent else []
        return [*found, at_home, *ring(self.stages, self.warpgroups, copies), *again]


def _numbers_of(spec: AttentionSpec, flipped: bool, outputs: tuple[str, ...]) -> tuple[int | Literal["delta"], ...]:
    """Returns :attr:`Plan.numbers`."""
    if not outputs:
        return ("delta",)
    if outputs == ("value",):
        return ()
    sides = enumerate(spec.sides)
    return tuple(
        n for n, s in sides if s.differentiable and not (s.varies[3] and s.varies[4]) and s.varies[4] == flipped
    )


class _Pair(NamedTuple):
    """Queries and cotangents, or keys and values; of those that are streamed, the first in float16 too, or None."""

    first: Ref
    second: Ref
    halved: Ref = None

    @staticmethod
    def of(refs: Iterator[Ref], first: Layout, second: Layout) -> _Pair:
        """Returns a pair in main memory."""
        return _Pair(Turned(next(refs), first), Turned(next(refs), second))


class Memory(NamedTuple):
    """References of a kernel; None for what it lacks.

    Attributes:
      home, streamed: operands at home and streamed operands, in main memory.
      units: of what is at home, and the factors by which gradients in them are multiplied in the end.
      numbers: shift and delta of the rows, [B, K, G, 2, T].
      table, lists, sides: further operands.
      results: of :attr:`Plan.results`.
      home_shared, streamed_shared: operands of each warpgroup, and stages of the ring.
      staged, staged_half: the tile of each warpgroup, if it goes through shared memory; in float16.
      numbers_shared: stages of shift and delta, if rows are streamed.
      sides_shared: stages of the side inputs of :attr:`Plan.turned`, for each warpgroup.
      home_ready, ready, free: barriers of these.
      home_free: the barriers at which a persistent warpgroup gives back its operands at home.
    """

    home: _Pair
    streamed: _Pair
    units: tuple[Ref, ...]
    numbers: Ref
    table: Ref
    lists: Ref
    sides: tuple[Ref, ...]
    results: tuple[Ref, ...]
    home_shared: _Pair
    streamed_shared: _Pair
    staged: Ref
    staged_half: Ref
    numbers_shared: Ref
    sides_shared: Mapping[int, Ref]
    home_ready: Ref
    ready: Ref
    free: Ref
    home_free: Ref

    @staticmethod
    def of(plan: Plan, refs: Sequence[Ref]) -> Memory:
        left, layouts = iter(refs), plan.layouts
        rows, columns = (layouts["query"], layouts["query"]), (layouts["key"], layouts["value"])
        of_streamed = rows if plan.flipped else columns

        def given(wanted: bool) -> Ref:
            return next(left) if wanted else None

        home = _Pair.of(left, *(columns if plan.flipped else rows))
        streamed = _Pair.of(left, *of_streamed)
        if plan.halved:
            streamed = streamed._replace(halved=Turned(next(left), of_streamed[0]))
        return Memory(
            home=home,
            streamed=streamed,
            units=tuple(next(left) for _ in range(2 * plan.halved)),
            numbers=next(left),
            table=given(bool(plan.visits.operands)),
            lists=given(plan.persistent),
            sides=tuple(next(left) for _ in plan.spec.sides),
            results=(
                *(Turned(next(left), layouts[o]) for o in plan.outputs),
                *(next(left) for _ in plan.numbers),
            ),
            home_shared=_Pair(next(left), next(left)),
            streamed_shared=_Pair(next(left), next(left), given(plan.halved)),
            staged=given(plan.through_memory),
            staged_half=given(plan.through_memory and plan.halved),
            numbers_shared=given(plan.flipped),
            sides_shared={n: next(left) for n in plan.turned},
            home_ready=next(left),
            ready=next(left),
            free=next(left),
            home_free=given(plan.persistent),
        )


class Block(NamedTuple):
    """A block of threads, which has a home block.

    Attributes:
      plan, memory: of the kernel.
      warpgroup: the number of this warpgroup in the block; the last one only moves memory.
      outer: the indices of batch entry and key head; if rows are at home, of the query head of its group too.
      number: of the home block.
      steps, loops: the blocks to visit.
      listed: its place in the list of a persistent block of threads.
      done: steps of home blocks before it; None if there are none.
    """

    plan: Plan
    memory: Memory
    warpgroup: Array
    outer: tuple[Array, ...]
    number: Array
    steps: Steps
    loops: tuple[Loop, ...]
    listed: Number
    done: Array | None

    @staticmethod
    def of(plan: Plan, memory: Memory, listed: Number = 0, done: Array | None = None) -> Block:
        # The warpgroups that compute and the one that loads compute it each for itself: kept for the latter, it would
        # leave the registers of the former.
        outer, number = home_of(plan, memory, listed)
        steps, here = plan.visits.steps(memory.table, outer[0], number), lax.axis_index("warpgroup")
        return Block(plan, memory, here, outer, number, steps, tuple(plan.visits.loops(steps)), listed, done)

    @property
    def total(self) -> Number:
        """The number of steps."""
        return self.steps.total * self.plan.groups

    def slot(self, n: Number) -> Array:
        """Returns the stage of step ``n``."""
        return lax.rem(n if self.done is None else self.done + n, jnp.int32(self.plan.stages))

    def window(self, again: bool = False) -> tuple[tuple[Number, ...], Array]:
        """Returns what this warpgroup has at home: the indices of batch entry and heads, and the first position.

        Computed ``again``, they need not be kept in registers.
        """
        outer, number = self.outer, self.number
        if again:
            outer, number = home_of(self.plan, self.memory, self.listed)
        return outer, number * self.plan.home + self.warpgroup * WARPGROUP_ROWS

    def units(self, which: int) -> Value:
        """Returns for each position at home the unit of gradients of scores (0), or the factor that takes their
        products to the unit 1 (1); it need not be kept in registers."""
        outer, first = self.window(again=True)
        return vector(self.memory.units[which], (*outer, pl.ds(first, WARPGROUP_ROWS)), "along_0")

    def address(self, n: Number, loop: Loop) -> tuple[tuple[Number, ...], Number]:
        """Returns what step ``n`` streams: the indices of batch entry and heads, and the first position."""
        plan, groups = self.plan, self.plan.groups
        if not plan.flipped:
            return self.outer[:2], self.steps.block(n) * plan.away
        group = 0 if groups == 1 else lax.div(n - loop.first * groups, jnp.int32(loop.steps))
        step = n if groups == 1 else loop.first + lax.rem(n - loop.first * groups, jnp.int32(loop.steps))
        return (*self.outer, group), self.steps.block(step) * plan.away


def home_of(plan: Plan, memory: Memory, listed: Number) -> tuple[tuple[Array, ...], Array]:
    """Returns the indices of batch entry and heads, and the number of the home block, of a block of threads; of a
    persistent one, of the ``listed`` in its list.  They are computed anew, so that they need not be kept."""
    spec = plan.spec
    block = lax.optimization_barrier(lax.axis_index("block"))
    head, number = plan.order.place(block if memory.lists is None else entry(memory.lists, listed, block), memory.lists)
    outer: tuple[Array, ...]
    if plan.flipped:
        outer = lax.div(head, jnp.int32(spec.key_heads)), lax.rem(head, jnp.int32(spec.key_heads))
    else:
        key_head = lax.div(head, jnp.int32(spec.groups))
        k = lax.rem(key_head, jnp.int32(spec.key_heads))
        outer = lax.div(key_head, jnp.int32(spec.key_heads)), k, lax.rem(head, jnp.int32(spec.groups))
    return outer, number
