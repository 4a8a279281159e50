"""The forward of attention on a TPU: a running maximum and sum per row, over the columns of a block of rows.

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
    "contract",
    "doubtful",
    "exponentials",
    "forward",
    "kept_rows",
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
    """What a block of rows knows after some of its tiles.

    A number per row is in every lane of [bq, 128]: Mosaic moves nothing to combine it with a tile.
    """

    maximum: Array
    total: Array
    accumulator: Array | None  # [bq, Dv]
    kept: Array | None  # 1 where a `where` weight is True anywhere


def forward(
    spec: AttentionSpec,
    block_sizes: BlockSizes,
    query: Array,
    key: Array,
    value: Array,
    sides: Sequence[Array],
    sink: Array | None,
) -> tuple[Array, Array]:
    """(result [B, K, G, T, Dv], logsumexp [B, K, G, T]); see ``pallas_tpu.forward``."""
    shape = geometry(spec, block_sizes)
    blocks = [rows_block(shape, spec.value_head_size, spec.result_dtype), number_block(shape, F32)]

    def finish(running: _Running, out: Ref, logsumexp: Ref) -> None:
        assert running.accumulator is not None
        result = running.accumulator / widened(running.total, spec.value_head_size)
        if running.kept is not None:
            result = jnp.where(widened(running.kept, spec.value_head_size) > 0, result, 0.0)
        out[...] = result.astype(out.dtype)
        logsumexp[...] = as_row(running.maximum + jnp.log(running.total), shape.row_lanes)

    bounded = usual(spec, query, key, value, sides) if shape.hides else None

    def call(shape: Geometry, states: Array | None) -> tuple[Array, ...]:
        operands = query, key, value, sides, sink
        out, logsumexp = _call(shape, "autopallas_attention_tpu", blocks, finish, states, *operands)
        return out, from_rows(shape, logsumexp)

    out, logsumexp = _complete(shape, call, 1, bounded)
    return without_rows(shape, out), without_rows(shape, logsumexp)


def statistics(
    spec: AttentionSpec,
    block_sizes: BlockSizes,
    query: Array,
    key: Array,
    sides: Sequence[Array],
    sink: Array | None,
    bounded: Array | None,
) -> tuple[Array, Array]:
    """(maximum, sum of exponentials) of each row, [B, K, G, T]; ``bounded`` is :func:`fills.usual`."""
    shape = geometry(spec, block_sizes)

    def finish(running: _Running, maximum: Ref, total: Ref) -> None:
        maximum[...] = as_row(running.maximum, shape.row_lanes)
        total[...] = as_row(running.total, shape.row_lanes)

    blocks = [number_block(shape, F32)] * 2

    def call(shape: Geometry, states: Array | None) -> tuple[Array, ...]:
        name, operands = "autopallas_attention_tpu_statistics", (query, key, None, sides, sink)
        return tuple(from_rows(shape, x) for x in _call(shape, name, blocks, finish, states, *operands))

    maximum, total = (without_rows(shape, x) for x in _complete(shape, call, 0, bounded))
    return maximum, total


def _complete(
    shape: Geometry,
    call: Callable[[Geometry, Array | None], tuple[Array, ...]],
    decisive: int,
    bounded: Array | None,
) -> tuple[Array, ...]:
    """What a call gives for each row, [B, K, G, rows, ..], hidden tiles included where they count.

    Live tiles are visited first.  Blocks of rows whose greatest scores, or what ``decisive`` of the results bounds them
    by, do not show that hidden tiles weigh nothing are computed once more, from all tiles.
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
    """Of which blocks of rows hidden tiles count, [B, row blocks], by a number for each row [B, K, G, rows] that its
    greatest score is above, but for some logarithm of the number of keys."""
    great = maximum >= shape.least
    missing = shape.row_blocks * shape.query_block - shape.rows
    great = jnp.pad(great, [(0, 0)] * 3 + [(0, missing)], constant_values=True)
    great = great.reshape(*great.shape[:3], shape.row_blocks, shape.query_block)
    return ~(bounded & jnp.all(great, axis=(1, 2, 4)))


def _call(
    shape: Geometry,
    name: str,
    outputs: Sequence[Block],
    finish: Callable[..., None],
    states: Array | None,
    query: Array,
    key: Array,
    value: Array | None,
    sides: Sequence[Array],
    sink: Array | None,
) -> Sequence[Array]:
    spec = shape.spec
    states = states_at_run_time(shape, sides) if states is None else states
    grid = Grid.of(shape, ("B", "K", "G"), "row", states)
    inputs = [
        (rows_block(shape, spec.head_size, query.dtype), with_rows(shape, query, (True,) * 5)),
        (columns_block(shape, spec.head_size, key.dtype), key),
    ]
    if value is not None:
        inputs.append((columns_block(shape, spec.value_head_size, value.dtype), value))
    inputs += [
        (side_block(shape, s, stored(s)), side_operand(shape, s, x)) for s, x in zip(spec.sides, sides, strict=True)
    ]
    sink_side = None if spec.sink is None else SideSpec(F32, spec.sink)
    if sink_side is not None and sink is not None:
        inputs.append((side_block(shape, sink_side, F32), side_operand(shape, sink_side, sink)))
    keeps = value is not None and any(w.kind == "where" for w in spec.weights)
    scratch = [pltpu.VMEM((shape.query_block, tpu.LANES), F32) for _ in range(3 if keeps else 2)]
    if value is not None:
        scratch.append(pltpu.VMEM((shape.query_block, spec.value_head_size), F32))

    def kernel(*refs: Ref) -> None:
        tables, refs = refs[: 3 * (grid.tables is not None)], refs[3 * (grid.tables is not None) :]
        place = grid.place([pl.program_id(n) for n in range(len(grid.dimensions))], tables)
        given, refs = refs[: len(inputs)], refs[len(inputs) :]
        results, (maximum_ref, total_ref, *rest) = refs[: len(outputs)], refs[len(outputs) :]
        kept_ref = rest.pop(0) if keeps else None
        accumulator_ref = rest.pop(0) if rest else None
        q_ref, k_ref, *left = given
        v_ref = left.pop(0) if value is not None else None
        side_refs, sink_ref = left[: len(spec.sides)], left[len(spec.sides) :]

        def load() -> _Running:
            return _Running(
                maximum_ref[...],
                total_ref[...],
                None if accumulator_ref is None else accumulator_ref[...],
                None if kept_ref is None else kept_ref[...],
            )

        def store(running: _Running) -> None:
            for ref, x in ((maximum_ref, running.maximum), (total_ref, running.total), (kept_ref, running.kept)):
                if ref is not None and x is not None:
                    ref[...] = x
            if accumulator_ref is not None and running.accumulator is not None:
                accumulator_ref[...] = running.accumulator

        @when(place.first)
        def _() -> None:
            if sink_side is None:
                maximum_ref[...] = jnp.full(maximum_ref.shape, -jnp.inf, F32)
                total_ref[...] = jnp.zeros(total_ref.shape, F32)
            else:
                start = jnp.broadcast_to(loaded(shape, sink_side, sink_ref[0][...]), maximum_ref.shape)
                maximum_ref[...] = start
                total_ref[...] = jnp.where(start == -jnp.inf, 0.0, 1.0)
            for ref in (kept_ref, accumulator_ref):
                if ref is not None:
                    ref[...] = jnp.zeros(ref.shape, F32)

        def tile(programs: TilePrograms, general: bool) -> None:
            valid = valid_columns(shape, place, 1) if general else None
            here = sides_at(shape, place, [r[...] for r in side_refs])
            q, k = q_ref[...], k_ref[...]
            v = None if v_ref is None else v_ref[...]
            if general and shape.ragged_columns:
                exists = valid_columns(shape, place, 0)
                k = kept_rows(exists, k)
                v = None if v is None else kept_rows(exists, v)
            store(_step(spec, programs, here, q, k, v, valid, load()))

        visit(shape, place, tile)

        @when(place.last)
        def _() -> None:
            finish(load(), *results)

    types = [jax.ShapeDtypeStruct(b.tile, b.dtype) for b, _ in inputs[: 2 + (value is not None)]]
    price = tpu.cost_of(
        lambda q, k, v=None: _priced(shape, q, k, v),
        *types,
        times=_tiles(shape),
        arrays=[*(b.type for b, _ in inputs), *(b.type for b in outputs)],
    )
    found: Sequence[Array] = tpu.call(
        kernel,
        name=name,
        grid=[extent for _, extent, _ in grid.dimensions],
        semantics=[order for _, _, order in grid.dimensions],
        in_specs=[b.spec(grid) for b, _ in inputs],
        out_specs=[b.spec(grid) for b in outputs],
        out_shape=[b.type for b in outputs],
        scratch_shapes=scratch,
        cost=price,
        alike=grid.alike,
        prefetched=0 if grid.tables is None else 3,
    )(*as_operands(grid.tables), *(x for _, x in inputs))
    return found


def _step(
    spec: AttentionSpec,
    programs: TilePrograms,
    here: Tile,
    q: Array,
    k: Array,
    v: Array | None,
    valid: Array | None,
    carry: _Running,
) -> _Running:
    """What is known after one more tile; ``valid`` says which of its columns exist, if not all."""
    score = contract(q, k, (1, 1), spec.score_precision).astype(spec.score_dtype)
    x = logits(spec, programs, score, here)
    if valid is not None:
        x = jnp.where(valid, x, -jnp.inf)
        reached = jnp.where(valid, heights(spec, programs.inner_weights, x, here), -jnp.inf)
        highest = jnp.max(reached, axis=-1, keepdims=True)
    else:
        highest = row_maximum(spec, programs, score, x, here)
    maximum = jnp.maximum(carry.maximum, highest)
    # A row with nothing but -inf so far must stay at sum 0, where -inf - -inf would be NaN.
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
    accumulator = accumulator + contract(p, v, (1, 0), spec.value_precision)
    kept = carry.kept
    if kept is not None:
        kept = jnp.maximum(kept, _any(programs, here, p.shape, valid))
    return _Running(maximum, total, accumulator, kept)


def _any(programs: TilePrograms, here: Tile, shape: tuple[int, ...], valid: Array | None) -> Array:
    """1 for each row with a key that no `where` weight hides, else 0."""
    kept = jnp.ones((1, 1), bool)
    for weight in programs.weights:
        if weight.kind == "where":
            kept = kept & weight.program.evaluate(None, here.query, here.key, here.sides)
    kept = kept if valid is None else kept & valid
    return jnp.max(jnp.where(jnp.broadcast_to(kept, shape), 1.0, 0.0), axis=-1, keepdims=True)


def _priced(shape: Geometry, q: Array, k: Array, v: Array | None) -> Array:
    """What :func:`_step` costs, the programs aside."""
    x = contract(q, k, (1, 1), None)
    p = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))
    return jnp.sum(p, axis=-1) if v is None else contract(p.astype(v.dtype), v, (1, 0), None)


def _tiles(shape: Geometry) -> int:
    live = int((shape.states > 0).sum())
    return live * shape.spec.batch * shape.spec.key_heads * shape.groups


# ---------------------------------------------------------------------- shared with the backward


def when(condition: Number) -> Callable[[Callable[[], None]], None]:
    """``pl.when`` that knows True."""

    def run(body: Callable[[], None]) -> None:
        if condition is True:
            body()
        else:
            pl.when(condition)(body)

    return run


def plain_scale(spec: AttentionSpec, programs: TilePrograms) -> float | None:
    """What scores in float32 are multiplied with, if that is all that is done to them.

    None where it is not, or where operands are so precise that the scores' size times float32's rounding would show.
    """
    precise = max(spec.query_dtype.itemsize, spec.key_dtype.itemsize) > 2
    return None if precise or spec.score_dtype != F32 else scale_of(programs.score)


def exponentials(
    score: Array,
    x: Array,
    shift: Array,
    scale: float | None,
    spread: Callable[[Array], Array] = lambda shift: shift,
) -> Array:
    """exp(x - spread(shift)) on a tile; with ``scale``, of :func:`plain_scale`, by one multiplication less."""
    if scale is None:
        return jnp.exp(x - spread(shift))
    base = np.log2(np.e)
    return jnp.exp2(score * np.float32(scale * base) - spread(shift * np.float32(base)))


def visit(shape: Geometry, place: Place, tile: Callable[[TilePrograms, bool], None]) -> None:
    """``tile`` with the programs of a full tile, or with the general ones and True, as the tile is."""
    for state, programs, general in ((FULL, shape.full, False), (PARTIAL, shape.general, True)):
        if isinstance(place.state, int):
            if place.state == state:
                tile(programs, general)
        elif np.any(shape.states == state):
            pl.when(place.state == state)(partial(tile, programs, general))


def sides_at(shape: Geometry, place: Place, blocks: Sequence[Array], flipped: bool = False) -> Tile:
    """What the programs read on a tile, with the tile's axes, rows first unless flipped."""
    query, key = positions(shape, place.row, place.column, flipped)
    values = (loaded(shape, s, x, flipped) for s, x in zip(shape.spec.sides, blocks, strict=True))
    return Tile(query, key, tuple(values))


def valid_columns(shape: Geometry, place: Place, axis: int) -> Array | None:
    """Which columns of a tile exist, along an axis; None where all do."""
    if not shape.ragged_columns:
        return None
    return within(place.column * shape.key_block, shape.key_block, shape.spec.key_length, axis)


def kept_rows(exists: Array | None, x: Array) -> Array:
    """``x`` with zeros in the rows that do not exist: what is read beyond an array's end may be anything."""
    return x if exists is None else jnp.where(exists, x.astype(F32), 0.0).astype(x.dtype)


def narrowed(tile: Array, read: Dtype | None, operand: Array, precision: str | None, bounded: bool = False) -> Array:
    """The tile as its product with an operand takes it: see ``contents.narrow``.

    A TPU's matrix unit takes bfloat16 unless a higher precision is asked for, and so rounds the tile for the original's
    product too, whatever its dtype.  Rounded before, the tile is half as large.
    """
    if operand.dtype == jnp.bfloat16 and precision is None and not interpretation():
        read = operand.dtype
    return narrow(tile, read, operand, bounded)


def contract(a: Array, b: Array, axes: tuple[int, int], precision: str | None) -> Array:
    """The product of two matrices over one axis of each, accumulated in float32."""
    dtype = jnp.promote_types(a.dtype, b.dtype)
    # Mosaic knows one pass of bfloat16, and float32.
    wanted = None if precision is None else lax.Precision.HIGHEST
    dimensions = (((axes[0],), (axes[1],)), ((), ()))
    return lax.dot_general(
        a.astype(dtype), b.astype(dtype), dimensions, precision=wanted, preferred_element_type=jnp.float32
    )
