"""The backward of attention in plain JAX: recomputes each tile from a number for each row.

Letters: B batch, K key heads, G query heads per key head, T query length, S key length, D and Dv head sizes.
"""

from __future__ import annotations

from functools import partial, reduce
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.kernels.attention.operands import Cotangents, Gradients, Operands, Residuals
from autopallas.kernels.attention.schedule import TilePrograms, accumulate, schedule, store
from autopallas.kernels.attention.spec import AttentionSpec
from autopallas.kernels.attention.tile_values import exponentials, exponentials_vjp, logits, weighted, weighted_vjp
from autopallas.kernels.attention.xla_blocks import (
    RowBlock,
    TiledAttention,
    add_sides,
    counted_once,
    merged,
    over_rows,
    reduced,
    rows_by_columns,
    rows_by_score_gradients,
    rows_by_weights,
    rows_shape,
    scores,
    tile,
    times_keys,
    unrepeated,
)
from autopallas.kernels.even_blocks import ONE, Part
from autopallas.kernels.plain_sums import plain_sum
from autopallas.sites.elementwise import rounded

__all__ = ["backward"]

Array: TypeAlias = jax.Array
_LARGE = 16.0
"""Beyond it a row's maximum multiplies the rounding of delta, in gradients that sum over its keys or that the score
multiplies, by so much that delta is computed from the tiles: 16 roundings of float32 are 1e-6, a tenth of the
tolerance of values."""


class _Accumulators(NamedTuple):
    """Gradients of the whole operands.  The rows of ``query`` are written once, so that it has its final dtype.

    Those of keys and values are transposed: a product rows^T tile keeps the minor axis of the tile, and tile^T rows
    takes XLA's CPU dots longer.
    """

    query: Array
    key: Array  # [B, K, D, S]
    value: Array  # [B, K, Dv, S]
    sides: tuple[Array, ...]  # of the differentiable side inputs
    sink: Array | None

    @staticmethod
    def zeros(spec: AttentionSpec, operands: Operands) -> _Accumulators:
        def like(x: Array) -> Array:
            return jnp.zeros(x.shape, spec.accumulation_dtype)

        sink = operands.sink
        floating = tuple(like(x) for x, s in zip(operands.sides, spec.sides, strict=True) if s.differentiable)
        dquery = jnp.zeros((*rows_shape(spec), spec.head_size), operands.query.dtype)
        dkey, dvalue = like(jnp.swapaxes(operands.key, -1, -2)), like(jnp.swapaxes(operands.value, -1, -2))
        return _Accumulators(dquery, dkey, dvalue, floating, None if sink is None else like(sink))

    def finished(self, spec: AttentionSpec, operands: Operands) -> Gradients:
        """Returns the gradients in the operands' shapes and dtypes."""
        dsides = iter(self.sides)
        return Gradients(
            self.query.reshape(operands.query.shape),
            jnp.swapaxes(self.key, -1, -2).astype(operands.key.dtype),
            jnp.swapaxes(self.value, -1, -2).astype(operands.value.dtype),
            tuple(next(dsides).astype(s.dtype) if s.differentiable else None for s in spec.sides),
            None if self.sink is None or operands.sink is None else self.sink.astype(operands.sink.dtype),
        )


class _Backward(NamedTuple):
    """The backward of an attention, as the loops over its tiles read it.

    Attributes:
      attention: the attention.
      cotangents: of the forward's results.
      shift, factor: [B, K, G, T] each: the probabilities are exp(x - shift) * factor.
      delta: the sum of the gradients of probabilities, each times its probability; [B, K, G, T].
      maximum: where a row's hidden tiles may add nothing, its shift, else -infinity; [B, K, G, T].  None if there are
        none.
    """

    attention: TiledAttention
    cotangents: Cotangents
    shift: Array
    factor: Array
    delta: Array
    maximum: Array | None


def backward(
    spec: AttentionSpec, block_sizes: BlockSizes, operands: Operands, residuals: Residuals, cotangents: Cotangents
) -> Gradients:
    """Recomputes each tile, and adds its contributions to all gradients."""
    plan = schedule(spec, block_sizes)
    shape = rows_shape(spec)
    cotangents = Cotangents(merged(cotangents.out), tuple(x.reshape(shape) for x in cotangents.sums))
    start = _Accumulators.zeros(spec, operands)
    own = TiledAttention.of(spec, plan, operands, cotangents.out)
    with jax.named_scope("autopallas_attention_xla_backward"):
        shift = residuals.shift.reshape(shape)
        if spec.statistics is not None:
            shift = jnp.where(shift == -jnp.inf, 0, shift)
        factor = jnp.ones_like(shift) if residuals.factor is None else residuals.factor.reshape(shape)
        if spec.statistics is None:
            dtype = spec.accumulation_dtype
            products = cotangents.out.astype(dtype) * merged(residuals.out).astype(dtype)
            delta = plain_sum(products, (products.ndim - 1,)).reshape(shape)
        else:
            delta = -cotangents.sums[0]
        delta, maximum = delta * factor, None
        if plan.hides:
            # A weight of 0 contributes 0 unless it is multiplied by infinity or NaN.
            multiplied = (delta, factor, *cotangents.sums[1:])
            finite = reduce(jnp.logical_and, map(jnp.isfinite, multiplied))
            maximum = jnp.where(finite, plan.decisive(shift), -jnp.inf)
        reading = _Backward(own, cotangents, shift, factor, delta, maximum)
        found = over_rows(plan, spec, partial(_add_rows, reading), start)
    return found.finished(spec, operands)


class _BackwardRows(NamedTuple):
    """A block of rows in the backward.

    Attributes:
      attention, place: the attention, and which rows these are.
      q, do: queries, and cotangents times the factor of the probabilities, [..., G t, d].
      shift, factor, delta: numbers for each row, [..., t].
      sums: cotangents of the statistics that are sums, [..., t] each.
      maximum: [..., t].
    """

    attention: TiledAttention
    place: RowBlock
    q: Array
    do: Array
    shift: Array
    factor: Array
    delta: Array
    sums: tuple[Array, ...]
    maximum: Array | None

    @staticmethod
    def of(own: _Backward, place: RowBlock) -> _BackwardRows:
        spec, cotangents = own.attention.spec, own.cotangents

        q, do = place.rows(own.attention.operands.query), place.rows(cotangents.out)
        # Everything below is linear in the cotangent, which is cheaper to multiply by the factor than each tile.
        # The cotangent is rounded as the original's product rounds the probabilities.
        kept = do.dtype if spec.reads_weights == do.dtype else spec.accumulation_dtype
        do = (do * place.rows(own.factor[..., None])).astype(kept)
        sums = tuple(map(place.numbers, cotangents.sums[1:]))
        maximum = None if own.maximum is None else place.numbers(own.maximum)
        shift, factor, delta = map(place.numbers, (own.shift, own.factor, own.delta))
        return _BackwardRows(own.attention, place, q, do, shift, factor, delta, sums, maximum)


def _add_rows(own: _Backward, place: RowBlock, gradients: _Accumulators) -> _Accumulators:
    """Adds the contributions of one block of rows."""
    (spec, plan, operands, _), rows = own.attention, _BackwardRows.of(own, place)
    least = None if rows.maximum is None else jnp.min(rows.maximum)

    def reveals(_: object) -> Array:
        assert least is not None
        return own.attention.reveals(least)

    if spec.statistics is None and spec.delta_counts:

        def from_tiles() -> Array:
            delta: Array = lax.fori_loop(0, 2, refined, jnp.zeros_like(rows.delta))
            return delta

        def refined(_: Array, delta: Array) -> Array:
            """Adds what the gradients of a row's logits leave with this delta: less each time, down to a rounding."""
            beside = jnp.zeros_like(delta)
            if operands.sink is not None and spec.sink is not None:
                sink = place.side(operands.sink, spec.sink, ONE).astype(spec.accumulation_dtype)
                beside = beside + jnp.exp(sink[..., 0] - rows.shift)
            step = partial(_delta_tile, rows._replace(delta=delta))
            sums, total = plan.over_columns(place.block, step, (-beside * delta, beside), reveals)
            return delta + jnp.where(total == 0, 0, sums / jnp.where(total == 0, 1, total))

        if spec.rounding_adds_up:
            delta = from_tiles()
        else:
            large = jnp.isfinite(rows.shift) & (jnp.abs(rows.shift) > _LARGE)
            delta = lax.cond(jnp.any(large), from_tiles, lambda: rows.delta)
        rows = rows._replace(delta=delta)
    start = jnp.zeros((*place.shape, spec.head_size), spec.accumulation_dtype)
    dq, gradients = plan.over_columns(place.block, partial(_gradient_tile, rows), (start, gradients), reveals)
    dq = place.restored(dq)
    written = store if place.query.first is None else accumulate
    gradients = gradients._replace(query=written(gradients.query, place.rows_window, dq.astype(gradients.query.dtype)))
    if operands.sink is not None and gradients.sink is not None and spec.sink is not None:
        sink = place.side(operands.sink, spec.sink, ONE).astype(spec.accumulation_dtype)
        weight = jnp.exp(sink - rows.shift[..., None])
        dsink = counted_once(-weight * rows.delta[..., None], place.query)
        dsink = reduced(dsink.reshape(place.batch[1], place.heads[1], place.groups, *dsink.shape[-2:]), spec.sink)
        gradients = gradients._replace(sink=accumulate(gradients.sink, place.side_window(spec.sink, ONE), dsink))
    return gradients


def _delta_tile(
    rows: _BackwardRows, columns: Part, programs: TilePrograms, sums: tuple[Array, Array]
) -> tuple[Array, Array]:
    """Adds one tile to what the gradients of a row's logits leave when they are added up, and to the sum of its
    exponentials, by which delta is corrected: so the gradients, as they are rounded, add up to zero."""
    spec, operands, place = rows.attention.spec, rows.attention.operands, rows.place
    here = tile(spec, place, columns, operands.sides)
    x = logits(spec, programs, scores(spec, place, rows.q, place.columns(operands.key, columns)), here)
    x = unrepeated(x, here, columns, place.query)
    e = exponentials(spec.inner_weights, x, rows.shift[..., None], here)
    dp = rows_by_columns(spec, place, rows.do, place.columns(operands.value, columns))
    added = weighted(spec.weights, e, here) * dp - e * rows.delta[..., None], e
    return sums[0] + jnp.sum(added[0], axis=-1), sums[1] + jnp.sum(added[1], axis=-1)


def _gradient_tile(
    rows: _BackwardRows,
    columns: Part,
    programs: TilePrograms,
    carry: tuple[Array, _Accumulators],
) -> tuple[Array, _Accumulators]:
    """Adds the contributions of one tile.

    With P = e / sum, c = dout v^T and the outer weights w: out = (P w) v.  For any weights, with or without a sink,
    dx = P (w c - delta), where delta = sum_S P w c = rowsum(dout * out).  If numerator and sum are separate results, P
    is e, and delta the negative cotangent of the sum.
    """
    spec, operands, place = rows.attention.spec, rows.attention.operands, rows.place
    dq, gradients = carry
    here = tile(spec, place, columns, operands.sides)
    k, v = place.columns(operands.key, columns), place.columns(operands.value, columns)
    score = scores(spec, place, rows.q, k)

    def from_score(score: Array, floating: tuple[Array, ...]) -> Array:
        return logits(spec, programs, score, here.with_floating(spec, floating))

    x, logits_vjp = jax.vjp(from_score, score, here.floating(spec))
    x = unrepeated(x, here, columns, place.query)  # so that its probabilities are 0, and what it contributes
    p_normal, exponentials_pull = exponentials_vjp(spec, programs.inner_weights, x, rows.shift[..., None], here)
    p, outer_vjp = weighted_vjp(spec, programs.weights, p_normal, here)
    dvalue = rows_by_weights(spec, place, rows.do, p)
    dp = rows_by_columns(spec, place, rows.do, v)
    dp_normal, *outer_sides = outer_vjp(dp)
    if spec.weights and spec.delta_counts:
        dp_normal = rounded(dp_normal)  # as delta's terms are: unrounded, what they leave does not cancel
    for weights, dsum in zip(spec.sums, rows.sums, strict=True):
        _, sum_vjp = weighted_vjp(spec, weights, p_normal, here)
        de, sum_sides = sum_vjp(jnp.broadcast_to(dsum[..., None], p_normal.shape))
        dp_normal, outer_sides = dp_normal + de, [*outer_sides, sum_sides]
    # d(e / sum) = P (.. - delta): the derivative of the sum is the same for each key of the row.
    dx, inner_sides = exponentials_pull(dp_normal - rows.delta[..., None])
    if spec.statistics is None and not spec.inner_weights:
        # The only key with a weight in its row has no gradient; delta, which is summed up elsewhere, leaves roundings.
        dx = jnp.where(p_normal * rows.factor[..., None] == 1, dx * 0, dx)  # but NaN stays
    dscore, score_sides = logits_vjp(dx.astype(x.dtype))
    dq = dq + times_keys(spec, place, dscore, k)
    window = place.window("BK-S", columns)
    dkey = rows_by_score_gradients(spec, place, rows.q, dscore)
    updates = gradients._replace(
        key=accumulate(gradients.key, window, place.unmerged(dkey)),
        value=accumulate(gradients.value, window, place.unmerged(dvalue)),
        sides=add_sides(spec, place, columns, gradients.sides, (score_sides, inner_sides, *outer_sides)),
    )
    return dq, updates
