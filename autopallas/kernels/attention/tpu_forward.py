"""Computes the forward of attention on a TPU: for each block of rows, a running maximum and sum over its columns.

FlashAttention-2 (Dao 2023, https://arxiv.org/abs/2307.08691).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from autopallas.compat import Dtype
from autopallas.kernels import tpu
from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.kernels.attention.fills import usual
from autopallas.kernels.attention.operands import Operands, Results
from autopallas.kernels.attention.schedule import TilePrograms
from autopallas.kernels.attention.spec import AttentionSpec, SideSpec
from autopallas.kernels.attention.tile_values import Tile, halves, heights, logits, narrow, row_maximum, weighted
from autopallas.kernels.attention.tiles import FULL, PARTIAL, scale_of
from autopallas.kernels.attention.tpu_grid import (
    Geometry,
    Grid,
    Place,
    as_operands,
    geometry,
    revealed,
    states_at_run_time,
)
from autopallas.kernels.attention.tpu_operands import (
    Block,
    as_row,
    columns_block,
    from_rows,
    loaded,
    number_block,
    positions,
    rows_block,
    side_block,
    side_operand,
    stored,
    widened,
    with_rows,
    within,
    without_rows,
)
from autopallas.kernels.refs import Number, Ref
from autopallas.kernels.tpu_schedule_tracing import assume, is_simulated
from autopallas.sites.interpret import interpretation

__all__ = [
    "doubtful",
    "exponentials",
    "forward",
    "kept_rows",
    "narrow_operands",
    "narrowed",
    "plain_scale",
    "sides_at",
    "statistics",
    "valid_columns",
    "visit",
    "when",
]

Array: TypeAlias = jax.Array
F32 = np.dtype(np.float32)


class _Running(NamedTuple):
    """The state of a block of rows after some of its tiles.

    A number for each row is in every lane of [bq, 128]: Mosaic then combines it with a tile without moving data.
    """

    maximum: Array
    total: Array
    accumulator: Array | None  # [bq, Dv]
    kept: Array | None  # 1 if the `where` weights keep any key


def forward(spec: AttentionSpec, block_sizes: BlockSizes, operands: Operands) -> Results:
    """Computes result and logsumexp; see ``pallas_tpu.forward``."""
    shape = geometry(spec, block_sizes)
    blocks = rows_block(shape, spec.value_head_size, spec.result_dtype), number_block(shape, F32)
    bounded = usual(spec, operands) if shape.hides else None

    def call(shape: Geometry, states: Array | None) -> tuple[Array, ...]:
        kernel = _Kernel.of(shape, states, operands, "autopallas_attention_tpu", blocks, values=True)
        out, logsumexp = _call(kernel, operands)
        return out, from_rows(shape, logsumexp)

    out, logsumexp = _complete(shape, call, 1, bounded)
    return Results(without_rows(shape, out), (without_rows(shape, logsumexp),))


def statistics(
    spec: AttentionSpec, block_sizes: BlockSizes, operands: Operands, bounded: Array | None
) -> tuple[Array, Array]:
    """Returns the maximum and the sum of exponentials of each row, [B, K, G, T]; values are not read.

    ``bounded`` is the result of :func:`fills.usual`; None if there are no hidden tiles.
    """
    shape = geometry(spec, block_sizes)
    blocks = (number_block(shape, F32),) * 2

    def call(shape: Geometry, states: Array | None) -> tuple[Array, ...]:
        kernel = _Kernel.of(shape, states, operands, "autopallas_attention_tpu_statistics", blocks, values=False)
        return tuple(from_rows(shape, x) for x in _call(kernel, operands))

    maximum, total = (without_rows(shape, x) for x in _complete(shape, call, 0, bounded))
    return maximum, total


def _complete(
    shape: Geometry,
    call: Callable[[Geometry, Array | None], tuple[Array, ...]],
    decisive: int,
    bounded: Array | None,
) -> tuple[Array, ...]:
    """Returns the results of ``call`` for each row, [B, K, G, rows, ..], with hidden tiles where they count.

    First only live tiles are visited.  A block of rows is computed again from all tiles, unless its greatest scores
    show that hidden tiles have no weight.  The result number ``decisive`` bounds these scores, or is their maximum.
    """
    found = call(shape, None)
    if not shape.hides:
        return found
    if is_simulated():
        assume("each row has a score far above its mask's fill")
        return found
    assert bounded is not None
    blocks = doubtful(shape, found[decisive], bounded)

    def again() -> tuple[Array, ...]:
        rows = jnp.repeat(blocks, shape.query_block, axis=1)[:, None, None, : shape.rows]
        complete = call(shape.whole, revealed(shape, blocks, others=False))
        return tuple(
            jnp.where(rows if x.ndim == rows.ndim else rows[..., None], x, before)
            for x, before in zip(complete, found, strict=True)
        )

    completed: tuple[Array, ...] = lax.cond(jnp.any(blocks), again, lambda: found)
    return completed


def doubtful(shape: Geometry, maximum: Array, bounded: Array) -> Array:
    """Returns for which blocks of rows hidden tiles count, [B, row blocks].

    ``maximum`` is a number for each row, [B, K, G, rows], that exceeds the row's greatest score at most by some
    logarithm of the number of keys.
    """
    great = maximum >= shape.least
    missing = shape.row_blocks * shape.query_block - shape.rows
    great = jnp.pad(great, [(0, 0)] * 3 + [(0, missing)], constant_values=True)
    great = great.reshape(*great.shape[:3], shape.row_blocks, shape.query_block)
    return ~(bounded & jnp.all(great, axis=(1, 2, 4)))


# ---------------------------------------------------------------------- the kernel


class _Kernel(NamedTuple):
    """A kernel over the columns of each block of rows.

    Attributes:
      name: of the call.
      grid: its steps.
      inputs: the blocks of queries, keys, values, side inputs and sink, each if it is read.
      outputs: the blocks of result and logsumexp; without values, of maximum and sum.
      values: whether the result is computed, not only the numbers for each row.
    """

    name: str
    grid: Grid
    inputs: tuple[Block, ...]
    outputs: tuple[Block, ...]
    values: bool

    @staticmethod
    def of(
        shape: Geometry,
        states: Array | None,
        operands: Operands,
        name: str,
        outputs: tuple[Block, ...],
        values: bool,
    ) -> _Kernel:
        """Plans a kernel; ``states`` of the tiles are found from the side inputs by default."""
        spec = shape.spec
        states = states_at_run_time(shape, operands.sides) if states is None else states
        grid = Grid.of(shape, ("B", "K", "G"), "row", states)
        inputs = [
            rows_block(shape, spec.head_size, operands.query.dtype),
            columns_block(shape, spec.head_size, operands.key.dtype),
        ]
        if values:
            inputs.append(columns_block(shape, spec.value_head_size, operands.value.dtype))
        inputs += [side_block(shape, s, stored(s)) for s in spec.sides]
        if spec.sink is not None:
            inputs.append(side_block(shape, SideSpec(F32, spec.sink), F32))
        return _Kernel(name, grid, tuple(inputs), outputs, values)

    @property
    def shape(self) -> Geometry:
        return self.grid.geometry

    @property
    def sink(self) -> SideSpec | None:
        """The sink, as a side input."""
        return None if self.shape.spec.sink is None else SideSpec(F32, self.shape.spec.sink)

    @property
    def keeps(self) -> bool:
        """Whether it records that `where` weights keep a key."""
        return self.values and self.shape.spec.keeps

    @property
    def scratch(self) -> list[Ref]:
        """Vector memory for the state of a block of rows, in the order of :class:`_Memory`."""
        rows = self.shape.query_block
        numbers = [pltpu.VMEM((rows, tpu.LANES), F32) for _ in range(3 if self.keeps else 2)]
        return [*numbers, pltpu.VMEM((rows, self.shape.spec.value_head_size), F32)] if self.values else numbers

    @property
    def cost(self) -> pl.CostEstimate:
        types = [jax.ShapeDtypeStruct(b.tile, b.dtype) for b in self.inputs[: 2 + self.values]]
        return tpu.cost_of(
            _priced, *types, times=_tiles(self.shape), arrays=[b.type for b in (*self.inputs, *self.outputs)]
        )


class _Memory(NamedTuple):
    """References of a kernel, without those of its tables; None for what it lacks."""

    query: Ref
    key: Ref
    value: Ref | None
    sides: tuple[Ref, ...]
    sink: Ref | None
    results: tuple[Ref, ...]
    maximum: Ref
    total: Ref
    kept: Ref | None
    accumulator: Ref | None

    @staticmethod
    def of(own: _Kernel, refs: Sequence[Ref]) -> _Memory:
        left = iter(refs)
        return _Memory(
            query=next(left),
            key=next(left),
            value=next(left) if own.values else None,
            sides=tuple(next(left) for _ in own.shape.spec.sides),
            sink=next(left) if own.sink is not None else None,
            results=tuple(next(left) for _ in own.outputs),
            maximum=next(left),
            total=next(left),
            kept=next(left) if own.keeps else None,
            accumulator=next(left) if own.values else None,
        )

    def load(self) -> _Running:
        return _Running(
            self.maximum[...],
            self.total[...],
            None if self.accumulator is None else self.accumulator[...],
            None if self.kept is None else self.kept[...],
        )

    def store(self, running: _Running) -> None:
        pairs = (
            (self.maximum, running.maximum),
            (self.total, running.total),
            (self.kept, running.kept),
            (self.accumulator, running.accumulator),
        )
        for ref, x in pairs:
            if ref is not None and x is not None:
                ref[...] = x


def _call(own: _Kernel, operands: Operands) -> Sequence[Array]:
    """Runs a kernel on the operands in the layout of main memory."""
    shape, grid = own.shape, own.grid
    arrays = [with_rows(shape, operands.query, (True,) * 5), operands.key]
    if own.values:
        arrays.append(operands.value)
    arrays += [side_operand(shape, s, x) for s, x in zip(shape.spec.sides, operands.sides, strict=True)]
    if own.sink is not None and operands.sink is not None:
        arrays.append(side_operand(shape, own.sink, operands.sink))
    found: Sequence[Array] = tpu.call(
        partial(_kernel, own),
        name=own.name,
        grid=[extent for _, extent, _ in grid.dimensions],
        semantics=[order for _, _, order in grid.dimensions],
        in_specs=[b.spec(grid) for b in own.inputs],
        out_specs=[b.spec(grid) for b in own.outputs],
        out_shape=[b.type for b in own.outputs],
        scratch_shapes=own.scratch,
        cost=own.cost,
        alike=grid.alike,
        prefetched=grid.prefetched,
    )(*as_operands(grid.tables), *arrays)
    return found


def _kernel(own: _Kernel, *refs: Ref) -> None:
    """Visits one tile: the first one of a block of rows starts its state, the last one writes its results."""
    shape, (place, rest) = own.shape, own.grid.here(refs)
    memory = _Memory.of(own, rest)

    @when(place.first)
    def _() -> None:
        _start(own, memory)

    def tile(programs: TilePrograms, general: bool) -> None:
        read = _TileOperands.of(shape, place, memory, general)
        memory.store(_advanced(shape.spec, programs, read, memory.load()))

    visit(shape, place, tile)

    @when(place.last)
    def _() -> None:
        _finish(own, memory)


def _start(own: _Kernel, memory: _Memory) -> None:
    """Writes the state before the first tile; a sink is already in its maximum and sum."""
    if own.sink is None or memory.sink is None:
        memory.maximum[...] = jnp.full(memory.maximum.shape, -jnp.inf, F32)
        memory.total[...] = jnp.zeros(memory.total.shape, F32)
    else:
        start = jnp.broadcast_to(loaded(own.shape, own.sink, memory.sink[...]), memory.maximum.shape)
        memory.maximum[...] = start
        memory.total[...] = jnp.where(start == -jnp.inf, 0.0, 1.0)
    for ref in (memory.kept, memory.accumulator):
        if ref is not None:
            ref[...] = jnp.zeros(ref.shape, F32)


def _finish(own: _Kernel, memory: _Memory) -> None:
    """Writes result and logsumexp; without values, maximum and sum."""
    shape, running, (first, second) = own.shape, memory.load(), memory.results
    if running.accumulator is None:
        first[...] = as_row(running.maximum, shape.row_lanes)
        second[...] = as_row(running.total, shape.row_lanes)
        return
    size = shape.spec.value_head_size
    result = running.accumulator / widened(running.total, size)
    if running.kept is not None:
        result = jnp.where(widened(running.kept, size) > 0, result, 0.0)
    first[...] = result.astype(first.dtype)
    second[...] = as_row(running.maximum + jnp.log(jnp.abs(running.total)), shape.row_lanes)


class _TileOperands(NamedTuple):
    """Values that one tile is computed from.

    Attributes:
      here: positions and side inputs.
      query, key, value: [bq, D], [bk, D] and [bk, Dv]; ``value`` is None if it is not read.
      valid: which of the columns exist, [1, bk]; None for all.
    """

    here: Tile
    query: Array
    key: Array
    value: Array | None
    valid: Array | None

    @staticmethod
    def of(shape: Geometry, place: Place, memory: _Memory, general: bool) -> _TileOperands:
        """Reads a tile; if it is ``general``, some of its columns may not exist."""
        valid = valid_columns(shape, place, 1) if general else None
        here = sides_at(shape, place, [r[...] for r in memory.sides])
        q, k = memory.query[...], memory.key[...]
        v = None if memory.value is None else memory.value[...]
        if general and shape.ragged_columns:
            exists = valid_columns(shape, place, 0)
            k = kept_rows(exists, k)
            v = None if v is None else kept_rows(exists, v)
        return _TileOperands(here, q, k, v, valid)


def _advanced(spec: AttentionSpec, programs: TilePrograms, read: _TileOperands, carry: _Running) -> _Running:
    """Returns the state after one more tile."""
    here, q, k, v, valid = read
    score = tpu.dot(q, k, (1, 1), spec.score_precision).astype(spec.score_dtype)
    x = logits(spec, programs, score, here)
    if valid is not None:
        x = jnp.where(valid, x, -jnp.inf)
        reached = jnp.where(valid, heights(spec, programs.inner_weights, x, here), -jnp.inf)
        highest = jnp.max(reached, axis=-1, keepdims=True)
    else:
        highest = row_maximum(spec, programs, score, x, here)
    maximum = jnp.maximum(carry.maximum, highest)
    # A row that has seen only -inf keeps the sum 0; without the zero, -inf - -inf would be NaN.
    finite_maximum = jnp.where(maximum == -jnp.inf, 0.0, maximum)
    shrink = jnp.exp(carry.maximum - finite_maximum)
    scale = plain_scale(spec, programs) if valid is None else None
    if programs.inner_weights:
        half = halves(x, widened(finite_maximum, x.shape[1]))
        e = weighted(programs.inner_weights, half, here) * half
        e = e if valid is None else jnp.where(valid, e, 0.0)
    else:
        e = exponentials(score, x, finite_maximum, scale, lambda maximum: widened(maximum, x.shape[1]))
    total = carry.total * shrink + jnp.sum(e, axis=-1, keepdims=True)
    if v is None or carry.accumulator is None:
        return carry._replace(maximum=maximum, total=total)
    p = weighted(programs.weights, e, here)
    if valid is not None and programs.weights:
        p = jnp.where(valid, p, 0.0)
    bounded = not any(w.kind == "multiply" for w in spec.inner_weights + spec.weights)
    accumulator = carry.accumulator * widened(shrink, v.shape[1])
    p = narrowed(p, spec.reads_weights, v, spec.value_precision, bounded)
    accumulator = accumulator + tpu.dot(p, v, (1, 0), spec.value_precision)
    kept = carry.kept
    if kept is not None:
        kept = jnp.maximum(kept, _any(programs, here, p.shape, valid))
    return _Running(maximum, total, accumulator, kept)


def _any(programs: TilePrograms, here: Tile, shape: tuple[int, ...], valid: Array | None) -> Array:
    """Returns 1 for each row with a key that no `where` weight hides, else 0."""
    kept = jnp.ones((1, 1), bool)
    for weight in programs.weights:
        if weight.kind == "where":
            kept = kept & weight.program.evaluate(None, here.query, here.key, here.sides)
    kept = kept if valid is None else kept & valid
    return jnp.max(jnp.where(jnp.broadcast_to(kept, shape), 1.0, 0.0), axis=-1, keepdims=True)


def _priced(q: Array, k: Array, v: Array | None = None) -> Array:
    """Computes what :func:`_advanced` does, the programs aside, from which the cost is estimated."""
    x = tpu.dot(q, k, (1, 1), None)
    p = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))
    return jnp.sum(p, axis=-1) if v is None else tpu.dot(p.astype(v.dtype), v, (1, 0), None)


def _tiles(shape: Geometry) -> int:
    """Counts the tiles to visit."""
    live = int((shape.states > 0).sum())
    return live * shape.spec.batch * shape.spec.key_heads * shape.groups


# ---------------------------------------------------------------------- shared with the backward


def when(condition: Number) -> Callable[[Callable[[], None]], None]:
    """Does what ``pl.when`` does, without a branch if the condition is known to be True."""

    def run(body: Callable[[], None]) -> None:
        if condition is True:
            body()
        else:
            pl.when(condition)(body)

    return run


def plain_scale(spec: AttentionSpec, programs: TilePrograms) -> float | None:
    """Returns the factor of scores in float32, if the program only multiplies by it.

    Returns None otherwise, or if operands are so precise that the scores' size times float32's rounding would show.
    """
    return scale_of(programs.score) if narrow_operands(spec) and spec.score_dtype == F32 else None


def narrow_operands(spec: AttentionSpec) -> bool:
    """Whether queries and keys are rounded so coarsely that the last digits of their float32 products say nothing."""
    return max(spec.query_dtype.itemsize, spec.key_dtype.itemsize) <= 2


def exponentials(
    score: Array,
    x: Array,
    shift: Array,
    scale: float | None,
    spread: Callable[[Array], Array] = lambda shift: shift,
) -> Array:
    """Computes exp(x - spread(shift)) on a tile; a ``scale``, of :func:`plain_scale`, saves one multiplication."""
    if scale is None:
        return jnp.exp(x - spread(shift))
    base = np.log2(np.e)
    return jnp.exp2(score * np.float32(scale * base) - spread(shift * np.float32(base)))


def visit(shape: Geometry, place: Place, tile: Callable[[TilePrograms, bool], None]) -> None:
    """Calls ``tile`` with the programs of full tiles and False, or with the general ones and True, by its state."""
    for state, programs, general in ((FULL, shape.full, False), (PARTIAL, shape.general, True)):
        if isinstance(place.state, int):
            if place.state == state:
                tile(programs, general)
        elif np.any(shape.states == state):
            pl.when(place.state == state)(partial(tile, programs, general))


def sides_at(shape: Geometry, place: Place, blocks: Sequence[Array], flipped: bool = False) -> Tile:
    """Returns what the programs read on a tile, with the tile's axes, rows first unless flipped."""
    query, key = positions(shape, place.row, place.column, flipped)
    values = (loaded(shape, s, x, flipped) for s, x in zip(shape.spec.sides, blocks, strict=True))
    return Tile(query, key, tuple(values))


def valid_columns(shape: Geometry, place: Place, axis: int) -> Array | None:
    """Returns which columns of a tile exist, along an axis; None if all columns of every tile do."""
    if not shape.ragged_columns:
        return None
    return within(place.column * shape.key_block, shape.key_block, shape.spec.key_length, axis)


def kept_rows(exists: Array | None, x: Array) -> Array:
    """Sets the rows that do not exist to zero: what is read beyond the end of an array is undefined."""
    return x if exists is None else jnp.where(exists, x.astype(F32), 0.0).astype(x.dtype)


def narrowed(tile: Array, read: Dtype | None, operand: Array, precision: str | None, bounded: bool = False) -> Array:
    """Rounds a tile as its product with an operand reads it: see ``tile_values.narrow``.

    A TPU's matrix unit takes bfloat16 unless a higher precision is asked for, and so rounds the tile in the original's
    product too, whatever its dtype.  Rounded earlier, the tile is half as large.
    """
    if operand.dtype == jnp.bfloat16 and precision is None and not interpretation():
        read = operand.dtype
    return narrow(tile, read, operand, bounded)
