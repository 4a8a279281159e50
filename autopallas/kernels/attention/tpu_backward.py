"""Computes the backward of attention on a TPU: each tile is recomputed from the logsumexp.

There is one kernel for each set of gradients that sum over the same tiles: the gradient of queries sums over the
columns of a block of rows, those of keys and values over the rows of a block of columns and the query heads, and that
of a side input over all axes along which it does not vary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from autopallas.compat import Dtype
from autopallas.kernels import tpu
from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.kernels.attention.fills import usual
from autopallas.kernels.attention.operands import Cotangents, Gradients, Operands, Residuals, ScaledRows
from autopallas.kernels.attention.schedule import TilePrograms
from autopallas.kernels.attention.spec import AttentionSpec, SideSpec, Weight
from autopallas.kernels.attention.tile_values import Tile, halves, logits, reciprocal, weighted
from autopallas.kernels.attention.tpu_forward import (
    doubtful,
    exponentials,
    kept_rows,
    narrow_operands,
    narrowed,
    plain_scale,
    sides_at,
    statistics,
    valid_columns,
    visit,
    when,
)
from autopallas.kernels.attention.tpu_grid import (
    Axis,
    Geometry,
    Grid,
    Group,
    Place,
    as_operands,
    geometry,
    revealed,
    states_at_run_time,
)
from autopallas.kernels.attention.tpu_operands import (
    Block,
    as_column,
    as_row,
    columns_block,
    from_rows,
    merged,
    number_block,
    per_row,
    rows_block,
    side_block,
    side_operand,
    stored,
    widened,
    with_rows,
    within,
    without_rows,
)
from autopallas.kernels.refs import Ref
from autopallas.kernels.tpu_schedule_tracing import assume, is_simulated

__all__ = ["backward"]

Array: TypeAlias = jax.Array
F32 = np.dtype(np.float32)

_LARGE_LOGSUMEXP = 256.0
"""Beyond it the logsumexp's rounding shows in the probabilities, and maximum and sum are recomputed."""


class _Backward(NamedTuple):
    """What every kernel of a backward is made of.

    Attributes:
      shape: the blocks.
      states: what only the run time knows of the tiles.
      inputs: queries, keys, values, cotangents, shift, delta and side inputs: blocks and arrays.
    """

    shape: Geometry
    states: Array | None
    inputs: tuple[tuple[Block, Array], ...]

    def gradients(self, name: str, outer: Sequence[Axis], group: Group, outputs: Sequence[_Output]) -> Sequence[Array]:
        """Runs a kernel whose outputs vary over ``outer``, with a block for each ``group`` of tiles."""
        return _call(Grid.of(self.shape, outer, group, self.states), name, self.inputs, outputs)


def backward(
    spec: AttentionSpec, block_sizes: BlockSizes, operands: Operands, residuals: Residuals, cotangents: Cotangents
) -> Gradients:
    """Computes the gradients; see ``pallas_tpu.backward``."""
    shape = geometry(spec, block_sizes)
    dout, sink = cotangents.out, operands.sink
    bounded = usual(spec, operands, dout) if shape.hides else None
    shift, factor = _normalizers(spec, block_sizes, operands, residuals.shift, bounded)
    # Everything after the probabilities is linear in the cotangent, which is multiplied by their factor instead.
    scaled = dout.astype(F32) * factor[..., None]
    delta = jnp.sum(scaled * residuals.out.astype(F32), axis=-1)
    # The cotangent is rounded as the original's product rounds the probabilities.
    kept = dout.dtype if spec.reads_weights == dout.dtype else F32
    rows = ScaledRows(scaled.astype(kept), shift, delta)
    inputs = _inputs(shape, operands, rows)
    states = states_at_run_time(shape, operands.sides)
    if bounded is not None and not is_simulated():
        # A weight of 0 contributes 0 unless it is multiplied by infinity or NaN.
        bounded &= jnp.all(jnp.isfinite(delta)) & jnp.all(jnp.isfinite(factor))
        states = revealed(shape, doubtful(shape, with_rows(shape, shift, (True,) * 5), bounded))
        shape = shape.whole
    own = _Backward(shape, states, inputs)
    if spec.sums_over_keys:
        rows = rows._replace(delta=_delta(own, sink, shift))
        own = own._replace(inputs=_inputs(shape, operands, rows))
    dq_block = rows_block(shape, spec.head_size, operands.query.dtype)
    (dquery,) = own.gradients("query", ("B", "K", "G"), "row", [_Output("query", dq_block)])
    dk_block = columns_block(shape, spec.head_size, operands.key.dtype)
    dv_block = columns_block(shape, spec.value_head_size, operands.value.dtype)
    outputs = [_Output("key", dk_block), _Output("value", dv_block)]
    dkey, dvalue = own.gradients("key_value", ("B", "K"), "column", outputs)
    dsides = tuple(
        _side_gradient(own, number, side).astype(x.dtype) if side.differentiable else None
        for number, (side, x) in enumerate(zip(spec.sides, operands.sides, strict=True))
    )
    dsink = None
    if sink is not None and spec.sink is not None:
        weight = jnp.exp(sink.astype(F32) - shift[..., None])
        summed = tuple(axis for axis, varies in enumerate(spec.sink) if not varies)
        dsink = jnp.sum(-weight * rows.delta[..., None], axis=summed, keepdims=True).astype(sink.dtype)
    return Gradients(without_rows(shape, dquery), dkey, dvalue, dsides, dsink)


def _delta(own: _Backward, sink: Array | None, shift: Array) -> Array:
    """Computes delta, [B, K, G, T], from the tiles' probabilities, rounded as other kernels will round them.

    What the keys of a row contribute to a sink or a slope then cancels, except for the roundings of single tiles.
    """
    shape = own.shape
    outputs = [_Output(name, number_block(shape, F32), True) for name in ("delta", "total")]
    rows = own.gradients("delta", ("B", "K", "G"), "row", outputs)
    delta, total = (without_rows(shape, from_rows(shape, x)) for x in rows)
    if sink is not None:
        total = total + jnp.exp(sink.astype(F32) - shift[..., None])[..., 0]
    return jnp.where(total != 0, delta / jnp.where(total != 0, total, 1), 0)


def _normalizers(
    spec: AttentionSpec, block_sizes: BlockSizes, operands: Operands, logsumexp: Array, bounded: Array | None
) -> tuple[Array, Array]:
    """Returns (shift, factor), each [B, K, G, T], such that the probabilities are exp(x - shift) * factor.

    The logsumexp is used if it is precise enough.  Its rounding error, about 1e-7 of its size, is the relative error of
    the probabilities; and if weights enter the sum, it may not be a logarithm at all.
    """

    def recomputed() -> tuple[Array, Array]:
        maximum, total = statistics(spec, block_sizes, operands, bounded)
        return maximum, reciprocal(total)

    if spec.inner_weights:
        return recomputed()
    if is_simulated():
        assume("no row has a large logsumexp")
        return logsumexp, jnp.ones_like(logsumexp)
    large = jnp.isfinite(logsumexp) & (jnp.abs(logsumexp) > _LARGE_LOGSUMEXP)
    shift, factor = lax.cond(jnp.any(large), recomputed, lambda: (logsumexp, jnp.ones_like(logsumexp)))
    return shift, factor


def _inputs(shape: Geometry, operands: Operands, rows: ScaledRows) -> tuple[tuple[Block, Array], ...]:
    """Returns what every kernel of the backward reads."""
    spec, every = shape.spec, (True,) * 5
    query, key, value, sides, _ = operands
    numbers = number_block(shape, F32)
    return (
        (rows_block(shape, spec.head_size, query.dtype), with_rows(shape, query, every)),
        (columns_block(shape, spec.head_size, key.dtype), key),
        (columns_block(shape, spec.value_head_size, value.dtype), value),
        (rows_block(shape, spec.value_head_size, rows.dout.dtype), with_rows(shape, rows.dout, every)),
        *((numbers, per_row(shape, with_rows(shape, x, every))) for x in (rows.shift, rows.delta)),
        *((side_block(shape, s, stored(s)), side_operand(shape, s, x)) for s, x in zip(spec.sides, sides, strict=True)),
    )


@dataclass(frozen=True, slots=True)
class _Output:
    """An output of a kernel.

    Attributes:
      of: "query", "key", "value", or the number of a side input, for its gradient; or "delta" or "total".
      block: its block.
      transposed: whether it has one number for each row; these lie along the lanes.
    """

    of: str | int
    block: Block
    transposed: bool = False

    def accumulator(self, shape: Geometry) -> tuple[int, int]:
        rows, columns = self.block.tile
        return (shape.query_block, 1) if self.transposed else (rows, columns)


def _side_gradient(own: _Backward, number: int, side: SideSpec) -> Array:
    """Computes the gradient of a side input, [B|1, K|1, G|1, T|1, S|1], in float32."""
    shape = own.shape
    b, k, g, t, s = merged(shape, side.varies)
    axes: tuple[Axis, ...] = ("B", "K", "G")
    outer = [axis for axis, varies in zip(axes, (b, k, g), strict=True) if varies]
    group: Group = "tile" if t and s else "row" if t else "column" if s else "all"
    output = _Output(number, side_block(shape, side, F32), t and not s)
    (found,) = own.gradients(f"side{number}", outer, group, [output])
    if output.transposed:
        found = from_rows(shape, found)[..., None]
    return without_rows(shape, found, side.varies)


# ---------------------------------------------------------------------- the kernel


class _Memory(NamedTuple):
    """References of a kernel, without those of its tables.

    Attributes:
      tiles: of queries, keys, values and cotangents.
      numbers: of shift and delta.
      sides: of the side inputs.
      results, accumulators: one each for every output.
      columns: shift and delta along the sublanes, if all tiles of a block of rows follow each other; else empty.
    """

    tiles: Sequence[Ref]
    numbers: Sequence[Ref]
    sides: Sequence[Ref]
    results: Sequence[Ref]
    accumulators: Sequence[Ref]
    columns: Sequence[Ref]

    @staticmethod
    def of(refs: Sequence[Ref], sides: int, outputs: int) -> _Memory:
        given, rest = refs[: 6 + sides], refs[6 + sides :]
        return _Memory(
            given[:4], given[4:6], given[6:], rest[:outputs], rest[outputs : 2 * outputs], rest[2 * outputs :]
        )


def _call(grid: Grid, name: str, inputs: Sequence[tuple[Block, Array]], outputs: Sequence[_Output]) -> Sequence[Array]:
    shape = grid.geometry
    chosen = [o.of for o in outputs]
    # Numbers of a block of rows are turned once if all tiles of the block follow each other.
    turned_once = chosen in (["query"], ["delta", "total"])
    turned = [pltpu.VMEM((shape.query_block, tpu.LANES), F32)] * (2 if turned_once else 0)
    types = [jax.ShapeDtypeStruct(b.tile, b.dtype) for b, _ in inputs[:4]]
    live = int((shape.states > 0).sum()) * shape.spec.batch * shape.spec.key_heads * shape.groups
    found: Sequence[Array] = tpu.call(
        partial(_kernel, grid, outputs),
        name=f"autopallas_attention_tpu_backward_{name}",
        grid=[extent for _, extent, _ in grid.dimensions],
        semantics=[order for _, _, order in grid.dimensions],
        in_specs=[b.spec(grid) for b, _ in inputs],
        out_specs=[o.block.spec(grid) for o in outputs],
        out_shape=[o.block.type for o in outputs],
        scratch_shapes=[*(pltpu.VMEM(o.accumulator(shape), F32) for o in outputs), *turned],
        cost=tpu.cost_of(
            lambda q, k, v, do: _priced(q, k, v, do, chosen),
            *types,
            times=live,
            arrays=[*(b.type for b, _ in inputs), *(o.block.type for o in outputs)],
        ),
        alike=grid.alike,
        prefetched=grid.prefetched,
    )(*as_operands(grid.tables), *(x for _, x in inputs))
    return found


def _kernel(grid: Grid, outputs: Sequence[_Output], *refs: Ref) -> None:
    """Visits one tile: the first one of an output block clears the sums, the last one writes the results."""
    shape, (place, rest) = grid.geometry, grid.here(refs)
    memory = _Memory.of(rest, len(shape.spec.sides), len(outputs))
    chosen = [o.of for o in outputs]
    # Scores in the thousands that are summed in another order than the forward's give other probabilities, which shows
    # beside wide operands.
    flipped = chosen == ["key", "value"] and narrow_operands(shape.spec)

    @when(place.first)
    def _() -> None:
        for ref in memory.accumulators:
            ref[...] = jnp.zeros(ref.shape, F32)
        for ref, rows in zip(memory.columns, memory.numbers, strict=False):
            ref[...] = as_column(rows[...], shape.query_block)

    def numbers(ref: Ref, position: int) -> Array:
        """Reads numbers of the rows as they are combined with a tile."""
        if flipped:
            row: Array = ref[...]
            return row[:, : shape.query_block]
        columns = memory.columns
        column = columns[position][...] if columns else as_column(ref[...], shape.query_block)
        return widened(column, shape.key_block)

    def tile(programs: TilePrograms, general: bool) -> None:
        shift, delta = (numbers(ref, n) for n, ref in enumerate(memory.numbers))
        tile = _GradientTile(shape, programs, place, general, flipped, shift, delta)
        blocks = [ref[...] for ref in (*memory.tiles, *memory.sides)]
        found = tile.contributions(blocks[:4], blocks[4:], chosen)
        for ref, contribution in zip(memory.accumulators, found, strict=True):
            ref[...] += contribution

    visit(shape, place, tile)

    @when(place.last)
    def _() -> None:
        for output, ref, accumulator in zip(outputs, memory.results, memory.accumulators, strict=True):
            total = accumulator[...]
            if output.transposed:
                total = as_row(jnp.broadcast_to(total, (shape.query_block, tpu.LANES)), shape.row_lanes)
            ref[...] = total.astype(ref.dtype)


def _priced(q: Array, k: Array, v: Array, do: Array, chosen: Sequence[str | int]) -> list[Array]:
    """Computes what a tile needs, the programs aside, from which the cost is estimated."""
    p = jnp.exp(tpu.dot(q, k, (1, 1), None))
    ds = p * tpu.dot(do, v, (1, 1), None)
    parts = {"query": lambda: tpu.dot(ds, k, (1, 0), None), "key": lambda: tpu.dot(ds.T, q, (1, 0), None),
             "value": lambda: tpu.dot(p.T, do, (1, 0), None), "delta": lambda: jnp.sum(ds),
             "total": lambda: jnp.sum(p)}  # fmt: skip
    return [parts[c]() if isinstance(c, str) else jnp.sum(ds) for c in chosen]


@dataclass(frozen=True, slots=True, eq=False)
class _GradientTile:
    """One tile of the backward.

    Attributes:
      shape, programs, place: of the tile.
      general: whether some of its rows or columns may not exist.
      flipped: whether its axes are columns and rows, as for the gradients of keys and values.
      shift, delta: numbers of the rows that broadcast against the tile.
    """

    shape: Geometry
    programs: TilePrograms
    place: Place
    general: bool
    flipped: bool
    shift: Array
    delta: Array

    def contributions(
        self, operands: Sequence[Array], sides: Sequence[Array], chosen: Sequence[str | int]
    ) -> list[Array]:
        """Computes what the tile adds to each of the chosen gradients.

        With P = e / sum, c = dout v^T and the outer weights w: out = (P w) v.  For any weights, with or without a sink,
        dx = P (w c - delta), where delta = sum_S P w c = rowsum(dout * out).
        """
        shape, spec, programs = self.shape, self.shape.spec, self.programs
        here = sides_at(shape, self.place, sides, self.flipped)
        q, k, v, do = self._existing_operands(operands)
        numbers = [c for c in chosen if isinstance(c, int)]
        tile_shape = (shape.key_block, shape.query_block) if self.flipped else (shape.query_block, shape.key_block)
        varied = tuple(jnp.broadcast_to(here.sides[n], tile_shape) for n in numbers)

        def with_varied(varied: tuple[Array, ...]) -> Tile:
            sides = list(here.sides)
            for n, x in zip(numbers, varied, strict=True):
                sides[n] = x
            return here._replace(sides=tuple(sides))

        def weighting(weights: tuple[Weight, ...]) -> Callable[[Array, tuple[Array, ...]], Array]:
            return lambda p, varied: weighted(weights, p, with_varied(varied))

        def from_score(score: Array, varied: tuple[Array, ...]) -> Array:
            return logits(spec, programs, score, with_varied(varied))

        score = self._product(q, k, spec.score_precision).astype(spec.score_dtype)
        x, pull_score = jax.vjp(from_score, score, varied)
        columns = self._columns_exist(int(not self.flipped))
        # As in the forward: where a compiler leaves x unrounded in one of the two, the probabilities are not the same.
        x = x if columns is None else jnp.where(columns, x, -jnp.inf)
        scale = None if numbers or programs.inner_weights else plain_scale(spec, programs)
        if programs.inner_weights:
            half = self._existing(halves(x, self.shift))
            weighted_half, pull_inner = jax.vjp(weighting(programs.inner_weights), half, varied)
            p_normal = self._existing(weighted_half * half)
        else:
            p_normal = self._existing(exponentials(score, x, self.shift, scale))
        p, pull_outer = jax.vjp(weighting(programs.weights), p_normal, varied)
        found: dict[str | int, Array] = {}
        if "delta" in chosen:
            c = self._product(do, v, spec.value_precision)
            return [jnp.sum(self._existing(x), axis=1, keepdims=True) for x in (p * c, p_normal)]
        if "value" in chosen:
            p = self._existing(p) if programs.weights else p
            found["value"] = self._summed_over_rows(p, do, spec.reads_weights, spec.value_precision)
        dp_normal, outer_sides = pull_outer(self._product(do, v, spec.value_precision))
        # d(e / sum) = P (.. - delta): the derivative of the sum is the same for each key of the row.
        if programs.inner_weights:
            dhalf, inner_sides = pull_inner(half * (dp_normal - self.delta))
            dx = half * dhalf
        else:
            dx, inner_sides = p_normal * (dp_normal - self.delta), None
        if scale is None:
            dscore, score_sides = pull_score(self._existing(dx).astype(x.dtype))
            dscore = self._existing(dscore)
        else:  # the sums are scaled instead, which are smaller than the tile
            dscore, score_sides = self._existing(dx), None
        factor = 1 if scale is None else np.float32(scale)
        if "query" in chosen:
            found["query"] = self._times_columns(dscore, k) * factor
        if "key" in chosen:
            read = spec.reads_score_gradients
            found["key"] = self._summed_over_rows(dscore, q, read, spec.score_precision) * factor
        for position, n in enumerate(numbers):
            parts = [part[position].astype(F32) for part in (score_sides, inner_sides, outer_sides) if part is not None]
            total = self._existing(sum(parts[1:], parts[0]))
            *_, t, s = merged(shape, spec.sides[n].varies)
            total = total if s else jnp.sum(total, axis=1, keepdims=True)
            found[n] = total if t else jnp.sum(total, axis=0, keepdims=True)
        return [found[c] for c in chosen]

    # ------------------------------------------------------------------ dots, by the orientation of the tile

    def _product(self, rows: Array, columns: Array, precision: str | None) -> Array:
        """Multiplies [bq, d] and [bk, d] to the tile."""
        return tpu.dot(columns, rows, (1, 1), precision) if self.flipped else tpu.dot(rows, columns, (1, 1), precision)

    def _summed_over_rows(self, tile: Array, rows: Array, read: Dtype | None, precision: str | None) -> Array:
        """Multiplies the tile, which the original's product reads in the dtype ``read``, and [bq, d] to [bk, d]."""
        tile = narrowed(tile, read, rows, precision)
        return tpu.dot(tile, rows, (1 if self.flipped else 0, 0), precision)

    def _times_columns(self, dscore: Array, k: Array) -> Array:
        """Multiplies the tile's gradient and [bk, d] to [bq, d]."""
        spec = self.shape.spec
        dscore = narrowed(dscore, spec.reads_score_gradients, k, spec.score_precision)
        return tpu.dot(dscore, k, (1, 0), spec.score_precision)

    # ------------------------------------------------------------------ rows and columns that do not exist

    def _rows_exist(self, axis: int) -> Array | None:
        shape = self.shape
        if not self.general or not shape.ragged_rows:
            return None
        return within(self.place.row * shape.query_block, shape.query_block, shape.rows, axis)

    def _columns_exist(self, axis: int) -> Array | None:
        return valid_columns(self.shape, self.place, axis) if self.general else None

    def _existing_operands(self, operands: Sequence[Array]) -> tuple[Array, Array, Array, Array]:
        q, k, v, do = operands
        rows, columns = self._rows_exist(0), self._columns_exist(0)
        return kept_rows(rows, q), kept_rows(columns, k), kept_rows(columns, v), kept_rows(rows, do)

    def _existing(self, tile: Array) -> Array:
        """Sets the elements of rows and columns that do not exist to zero."""
        for exists in (self._rows_exist(int(self.flipped)), self._columns_exist(int(not self.flipped))):
            if exists is not None:
                tile = jnp.where(exists, tile, jnp.zeros_like(tile))
        return tile
