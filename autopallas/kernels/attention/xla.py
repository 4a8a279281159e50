"""Computes attention by streaming, in plain JAX: no T x S array exists, whatever the mask, in either direction.

The algorithm is FlashAttention-2 (Dao 2023, https://arxiv.org/abs/2307.08691): an outer loop over blocks of queries, an
inner loop over blocks of keys, a running maximum and a running sum.  The backward recomputes each tile from the
logsumexp.  The score program is evaluated tile by tile; its derivative is that of ``jax.vjp``.

Letters: B batch, K key heads, G query heads per key head, T query length, S key length, D and Dv head sizes.  A tile is
[b, k, G, t, s]; axes b, k and G of size 1 are dropped, because XLA's CPU loops vectorise worse with them.  Nothing is
padded: a block size that does not divide its axis leaves a shorter last block.
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

from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.kernels.attention.fills import usual
from autopallas.kernels.attention.operands import Cotangents, Gradients, Operands, Residuals, Results
from autopallas.kernels.attention.schedule import (
    Carry,
    Schedule,
    Start,
    TilePrograms,
    Window,
    accumulate,
    cut,
    divided,
    loop,
    schedule,
    store,
)
from autopallas.kernels.attention.spec import AttentionSpec, Weight
from autopallas.kernels.attention.tile_values import (
    Tile,
    any_kept,
    exponentials,
    exponentials_vjp,
    greatest,
    logits,
    logsumexp,
    narrow,
    row_maximum,
    weighted,
    weighted_vjp,
)
from autopallas.numerics.classes import Numerics
from autopallas.sites.device import Device
from autopallas.sites.elementwise import ElementwiseProgram
from autopallas.sites.operation import Supported, Unsupported

__all__ = ["NUMERICS", "backward", "forward", "supports"]

NUMERICS: Numerics = "tolerance"
"""How its results relate to the original's."""

Array: TypeAlias = jax.Array


def supports(spec: AttentionSpec, device: Device) -> Supported | Unsupported:
    """Supports every specification on every platform."""
    return Supported()


class _Attention(NamedTuple):
    """One attention, as the loops over its tiles read it.

    Attributes:
      spec: the attention.
      plan: the blocks and the tiles to visit.
      operands: its operands.
      bounded: the result of :func:`fills.usual`; None if there are no hidden tiles.
    """

    spec: AttentionSpec
    plan: Schedule
    operands: Operands
    bounded: Array | None


class _ForwardRows(NamedTuple):
    """A block of rows in the forward.

    Attributes:
      attention, place: the attention, and which rows these are.
      q: the queries, [..., G t, D].
    """

    attention: _Attention
    place: _Rows
    q: Array


class _Running(NamedTuple):
    """The state of a block of rows after some of its tiles."""

    maximum: Array  # [..., t, 1]
    total: Array  # [..., t, 1]
    accumulator: Array  # [..., t, Dv]
    kept: Array | None  # [..., t, 1]: whether the `where` weights keep any key; None without such weights
    statistics: tuple[Array, ...] = ()  # [..., t, 1] each


def forward(spec: AttentionSpec, block_sizes: BlockSizes, operands: Operands) -> Results:
    """Computes each block of rows in one pass over its tiles."""
    plan = schedule(spec, block_sizes)
    own = _Attention(spec, plan, operands, usual(spec, operands) if plan.hides else None)
    shape = (spec.batch, spec.key_heads, spec.groups, spec.query_length)
    out = jnp.zeros((*shape, spec.value_head_size), spec.result_dtype)
    numbers = (jnp.zeros(shape, spec.accumulation_dtype),) * (spec.row_results + spec.has_factor)

    def rows(place: _Rows, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        running = _stream(own, place)
        if spec.statistics is None:
            result = running.accumulator / running.total
            if running.kept is not None:
                result = jnp.where(running.kept, result, 0)
            found = [*logsumexp(running.maximum, running.total)]
        else:
            result = running.accumulator
            kept = () if running.kept is None else (running.kept,)
            found = [running.total, running.maximum, *running.statistics, *kept]
        window = place.window("BKGT")
        stored = (store(c, window, place.restored(x)[..., 0]) for c, x in zip(carry[1:], found, strict=True))
        return store(carry[0], place.window("BKGT-"), place.restored(result)), *stored

    with jax.named_scope("autopallas_attention_xla"):
        result, *found = _over_rows(plan, spec, rows, (out, *numbers))
    return Results(result, tuple(found[: spec.row_results]), *found[spec.row_results :])


def _stream(own: _Attention, place: _Rows) -> _Running:
    """Returns the state of a block of rows after all tiles that count."""
    rows = _ForwardRows(own, place, place.rows(own.operands.query))

    def reveals(carry: _Running) -> Array:
        assert own.bounded is not None
        return ~(own.bounded & jnp.all(carry.maximum >= own.plan.least))

    return own.plan.over_columns(place.block, partial(_advanced, rows), _initial(own, place), reveals)


def _initial(own: _Attention, place: _Rows) -> _Running:
    """Returns the state of a block of rows before its first tile; a sink is already in its maximum and sum."""
    spec, sink, shape = own.spec, own.operands.sink, place.shape
    dtype = spec.accumulation_dtype
    if sink is None:
        maximum = jnp.full((*shape, 1), -jnp.inf, dtype)
        total = jnp.zeros_like(maximum)
    else:
        assert spec.sink is not None
        maximum = jnp.broadcast_to(place.side(sink, spec.sink, (0, 1)), (*shape, 1)).astype(dtype)
        total = jnp.where(maximum == -jnp.inf, 0, jnp.ones_like(maximum))
    return _Running(
        maximum,
        total,
        jnp.zeros((*shape, spec.value_head_size), dtype),
        jnp.zeros((*shape, 1), bool) if spec.keeps else None,
        tuple(jnp.full((*shape, 1), 0 if isinstance(s, tuple) else -jnp.inf, dtype) for s in spec.statistics or ()),
    )


def _advanced(rows: _ForwardRows, key_start: Start, key_size: int, programs: TilePrograms, carry: _Running) -> _Running:
    """Returns the state of a block of rows after one more tile."""
    spec, operands, place, columns = rows.attention.spec, rows.attention.operands, rows.place, (key_start, key_size)
    here = _tile(spec, place, columns, operands.sides)
    score = _scores(spec, place, rows.q, place.columns(operands.key, columns))
    x = logits(spec, programs, score, here)
    maximum = jnp.maximum(carry.maximum, row_maximum(spec, programs, score, x, here))
    # A row that has seen only -inf keeps the sum 0; without the zero, -inf - -inf would be NaN.
    finite_maximum = jnp.where(maximum == -jnp.inf, 0, maximum)
    shrink = jnp.exp(carry.maximum - finite_maximum)
    e = exponentials(programs.inner_weights, x, finite_maximum, here)
    total = carry.total * shrink + jnp.sum(e, axis=-1, keepdims=True)
    p = weighted(programs.weights, e, here)
    accumulator = carry.accumulator * shrink
    accumulator = accumulator + _times_values(spec, place, p, place.columns(operands.value, columns))
    kept = carry.kept
    if kept is not None:
        kept = kept | any_kept(programs.weights, here, p.shape)

    def statistic(wanted: ElementwiseProgram | tuple[Weight, ...], before: Array) -> Array:
        if isinstance(wanted, tuple):
            return before * shrink + jnp.sum(weighted(wanted, e, here), axis=-1, keepdims=True)
        if wanted == spec.score and operands.sink is None and not spec.inner_weights:
            return maximum
        return jnp.maximum(before, greatest(spec, wanted, score, here))

    statistics = tuple(map(statistic, spec.statistics or (), carry.statistics))
    return _Running(maximum, total, accumulator, kept, statistics)


# ---------------------------------------------------------------------- backward


class _Accumulators(NamedTuple):
    """Gradients of the whole operands.  The rows of ``query`` are written once, so that it has its final dtype.

    Those of keys and values are transposed: a product rows^T tile contracts the minor axis of the one and the major
    axis of the other, which suits XLA's CPU dots; tile^T rows takes them twice as long.
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
        dquery = jnp.zeros(operands.query.shape, operands.query.dtype)
        dkey, dvalue = like(jnp.swapaxes(operands.key, -1, -2)), like(jnp.swapaxes(operands.value, -1, -2))
        return _Accumulators(dquery, dkey, dvalue, floating, None if sink is None else like(sink))

    def finished(self, spec: AttentionSpec, operands: Operands) -> Gradients:
        """Returns the gradients in the operands' shapes and dtypes."""
        dsides = iter(self.sides)
        return Gradients(
            self.query,
            jnp.swapaxes(self.key, -1, -2).astype(operands.key.dtype),
            jnp.swapaxes(self.value, -1, -2).astype(operands.value.dtype),
            tuple(next(dsides).astype(s.dtype) if s.differentiable else None for s in spec.sides),
            None if self.sink is None or operands.sink is None else self.sink.astype(operands.sink.dtype),
        )


class _Backward(NamedTuple):
    """The backward of an attention, as the loops over its tiles read it.

    Attributes:
      attention: the attention.
      out: the forward's result.
      cotangents: of the forward's results.
      shift, factor: [B, K, G, T] each: the probabilities are exp(x - shift) * factor.
    """

    attention: _Attention
    out: Array
    cotangents: Cotangents
    shift: Array
    factor: Array


def backward(
    spec: AttentionSpec, block_sizes: BlockSizes, operands: Operands, residuals: Residuals, cotangents: Cotangents
) -> Gradients:
    """Recomputes each tile, and adds its contributions to all gradients."""
    plan = schedule(spec, block_sizes)
    start = _Accumulators.zeros(spec, operands)
    own = _Attention(spec, plan, operands, usual(spec, operands, cotangents.out) if plan.hides else None)
    with jax.named_scope("autopallas_attention_xla_backward"):
        shift, factor = residuals.shift, residuals.factor
        if spec.statistics is not None:
            shift = jnp.where(shift == -jnp.inf, 0, shift)
        factor = jnp.ones_like(shift) if factor is None else factor
        reading = _Backward(own, residuals.out, cotangents, shift, factor)
        found = _over_rows(plan, spec, partial(_add_rows, reading), start)
    return found.finished(spec, operands)


class _BackwardRows(NamedTuple):
    """A block of rows in the backward.

    Attributes:
      attention, place: the attention, and which rows these are.
      q, do: queries, and cotangents times the factor of the probabilities, [..., G t, d].
      q_transposed, do_transposed: the same, [..., d, G t].
      shift, delta: numbers for each row, [..., t, 1]; ``delta`` is the sum of the gradients of probabilities, each
        times its probability.
      factor: of the probabilities, [..., G t, 1].
      sums: cotangents of the statistics that are sums, [..., t, 1] each.
    """

    attention: _Attention
    place: _Rows
    q: Array
    do: Array
    q_transposed: Array
    do_transposed: Array
    shift: Array
    factor: Array
    delta: Array
    sums: tuple[Array, ...]

    @staticmethod
    def of(own: _Backward, place: _Rows) -> _BackwardRows:
        spec, cotangents = own.attention.spec, own.cotangents
        dtype = spec.accumulation_dtype
        shift, factor = (place.rows(x[..., None]) for x in (own.shift, own.factor))
        q, do = place.rows(own.attention.operands.query), place.rows(cotangents.out)
        if spec.statistics is None:
            delta = jnp.sum(do.astype(dtype) * place.rows(own.out).astype(dtype), axis=-1, keepdims=True)
        else:
            delta = -place.rows(cotangents.sums[0][..., None])
        # Everything below is linear in the cotangent, which is cheaper to multiply by the factor than each tile.
        # The cotangent is rounded as the original's product rounds the probabilities.
        kept = do.dtype if spec.reads_weights == do.dtype else dtype
        do, delta = (do * factor).astype(kept), delta * factor
        # The barrier keeps XLA from folding the transpositions back into the dots.
        q_transposed, do_transposed = lax.optimization_barrier((jnp.swapaxes(q, -1, -2), jnp.swapaxes(do, -1, -2)))
        shift, delta = place.ungrouped(shift), place.ungrouped(delta)
        sums = tuple(place.ungrouped(place.rows(dsum[..., None])) for dsum in cotangents.sums[1:])
        return _BackwardRows(own.attention, place, q, do, q_transposed, do_transposed, shift, factor, delta, sums)

    def reveals(self) -> Array | None:
        """Returns whether the hidden tiles of these rows count, a boolean scalar; None if there are none."""
        bounded = self.attention.bounded
        if bounded is None:
            return None
        usual = self.shift >= self.attention.plan.least
        # A weight of 0 contributes 0 unless it is multiplied by infinity or NaN.
        for x in (self.delta, self.place.ungrouped(self.factor), *self.sums):
            usual &= jnp.isfinite(x)
        return ~(bounded & jnp.all(usual))


def _add_rows(own: _Backward, place: _Rows, gradients: _Accumulators) -> _Accumulators:
    """Adds the contributions of one block of rows."""
    (spec, plan, operands, _), rows = own.attention, _BackwardRows.of(own, place)
    revealed = rows.reveals()

    def reveals(_: object) -> Array:
        assert revealed is not None
        return revealed

    if spec.statistics is None and spec.rounding_adds_up:
        sums = plan.over_columns(place.block, partial(_delta_tile, rows), jnp.zeros_like(rows.delta), reveals)
        rows = rows._replace(delta=sums * place.ungrouped(rows.factor))
    start = jnp.zeros((*place.shape, spec.head_size), spec.accumulation_dtype)
    dq, gradients = plan.over_columns(place.block, partial(_gradient_tile, rows), (start, gradients), reveals)
    gradients = gradients._replace(query=store(gradients.query, place.window("BKGT-"), place.restored(dq)))
    if operands.sink is not None and gradients.sink is not None and spec.sink is not None:
        sink = place.side(operands.sink, spec.sink, (0, 1)).astype(spec.accumulation_dtype)
        weight = jnp.exp(sink - rows.shift)
        dsink = _reduced(place.restored(-weight * rows.delta), spec.sink)
        gradients = gradients._replace(sink=accumulate(gradients.sink, place.side_window(spec.sink, (0, 1)), dsink))
    return gradients


def _delta_tile(rows: _BackwardRows, key_start: Start, key_size: int, programs: TilePrograms, sums: Array) -> Array:
    """Adds one tile to the delta of a block of rows, the factor of the probabilities aside."""
    spec, operands, place, columns = rows.attention.spec, rows.attention.operands, rows.place, (key_start, key_size)
    here = _tile(spec, place, columns, operands.sides)
    x = logits(spec, programs, _scores(spec, place, rows.q, place.columns(operands.key, columns)), here)
    p = weighted(spec.weights, exponentials(spec.inner_weights, x, rows.shift, here), here)
    dp = _rows_by_columns(spec, place, rows.do, place.columns(operands.value, columns))
    return sums + jnp.sum(p * dp, axis=-1, keepdims=True)


def _gradient_tile(
    rows: _BackwardRows,
    key_start: Start,
    key_size: int,
    programs: TilePrograms,
    carry: tuple[Array, _Accumulators],
) -> tuple[Array, _Accumulators]:
    """Adds the contributions of one tile.

    With P = e / sum, c = dout v^T and the outer weights w: out = (P w) v.  For any weights, with or without a sink,
    dx = P (w c - delta), where delta = sum_S P w c = rowsum(dout * out).  If numerator and sum are separate results, P
    is e, and delta the negative cotangent of the sum.
    """
    spec, operands, place, columns = rows.attention.spec, rows.attention.operands, rows.place, (key_start, key_size)
    dq, gradients = carry
    here = _tile(spec, place, columns, operands.sides)
    k, v = place.columns(operands.key, columns), place.columns(operands.value, columns)
    score = _scores(spec, place, rows.q, k)

    def from_score(score: Array, floating: tuple[Array, ...]) -> Array:
        return logits(spec, programs, score, here.with_floating(spec, floating))

    x, logits_vjp = jax.vjp(from_score, score, here.floating(spec))
    p_normal, exponentials_pull = exponentials_vjp(spec, programs.inner_weights, x, rows.shift, here)
    p, outer_vjp = weighted_vjp(spec, programs.weights, p_normal, here)
    dvalue = _rows_by_weights(spec, place, rows.do_transposed, p)
    dp = _rows_by_columns(spec, place, rows.do, v)
    dp_normal, *outer_sides = outer_vjp(dp)
    for weights, dsum in zip(spec.sums, rows.sums, strict=True):
        _, sum_vjp = weighted_vjp(spec, weights, p_normal, here)
        de, sum_sides = sum_vjp(jnp.broadcast_to(dsum, p_normal.shape))
        dp_normal, outer_sides = dp_normal + de, [*outer_sides, sum_sides]
    # d(e / sum) = P (.. - delta): the derivative of the sum is the same for each key of the row.
    dx, inner_sides = exponentials_pull(dp_normal - rows.delta)
    dscore, score_sides = logits_vjp(dx.astype(x.dtype))
    dq = dq + _times_keys(spec, place, dscore, k)
    window = place.window("BK-S", columns)
    dkey = _rows_by_score_gradients(spec, place, rows.q_transposed, dscore)
    updates = gradients._replace(
        key=accumulate(gradients.key, window, place.unmerged(dkey)),
        value=accumulate(gradients.value, window, place.unmerged(dvalue)),
        sides=_add_sides(spec, place, columns, gradients.sides, (score_sides, inner_sides, *outer_sides)),
    )
    return dq, updates


# ---------------------------------------------------------------------- windows of the operands


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Position of a block of rows of some heads of some batch entries; starts may be traced, sizes are static."""

    batch: tuple[Start, int]
    heads: tuple[Start, int]
    groups: int
    block: Start
    query: tuple[Start, int]

    @property
    def size(self) -> int:
        return self.query[1]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a tile, its columns aside: (b, k, G, t), without those of b, k and G that are 1."""
        return (*(n for n in (self.batch[1], self.heads[1], self.groups) if n != 1), self.size)

    def squeezed(self, x: Array) -> Array:
        """Takes from [b|1, k|1, G|1, ...] the axes that a tile drops."""
        sizes = (self.batch[1], self.heads[1], self.groups)
        return lax.squeeze(x, [axis for axis, size in enumerate(sizes) if size == 1])

    def restored(self, x: Array) -> Array:
        """Reshapes [..., t, d] to [b, k, G, t, d]."""
        return x.reshape(self.batch[1], self.heads[1], self.groups, *x.shape[-2:])

    def rows(self, x: Array) -> Array:
        """Returns this block of [B, K, G, T, d], with the groups merged into the rows: [..., G t, d]."""
        return self.grouped(self.squeezed(cut(x, self.window("BKGT-"))))

    def grouped(self, x: Array) -> Array:
        """Reshapes [..., G, t, d] to [..., G t, d], the shape of the dots: they need no repeated keys or values."""
        return x if self.groups == 1 else x.reshape(*x.shape[:-3], -1, x.shape[-1])

    def ungrouped(self, x: Array) -> Array:
        """Reshapes [..., G t, d] to [..., G, t, d]."""
        return x if self.groups == 1 else x.reshape(*x.shape[:-2], self.groups, -1, x.shape[-1])

    def columns(self, x: Array, columns: tuple[Start, int]) -> Array:
        """Returns a block of [B, K, S, d] for these heads: [..., s, d]."""
        x = cut(x, self.window("BKS-", columns))
        return lax.squeeze(x, [axis for axis in (0, 1) if x.shape[axis] == 1])

    def unmerged(self, x: Array) -> Array:
        """Reshapes [..., d, s] to [b, k, d, s]."""
        return x.reshape(self.batch[1], self.heads[1], *x.shape[-2:])

    def side_window(self, varies: Sequence[bool], columns: tuple[Start, int]) -> Window:
        return [part if v else None for part, v in zip(self.window("BKGTS", columns), varies, strict=True)]

    def side(self, x: Array, varies: Sequence[bool], columns: tuple[Start, int]) -> Array:
        """Returns the part of a side input that belongs to a tile, with the tile's axes."""
        return self.squeezed(cut(x, self.side_window(varies, columns)))

    def window(self, axes: str, columns: tuple[Start, int] | None = None) -> Window:
        """Returns the window of an operand whose dimensions are ``axes``; "-" is a whole dimension."""
        parts = {"B": self.batch, "K": self.heads, "G": None, "T": self.query, "S": columns, "-": None}
        return [parts[a] for a in axes]


def _over_rows(plan: Schedule, spec: AttentionSpec, body: Callable[[_Rows, Carry], Carry], carry: Carry) -> Carry:
    """Returns ``carry`` after ``body`` for each block of rows, including a shorter last one."""
    batch_steps, head_steps = spec.batch // plan.batch_step, spec.key_heads // plan.head_step

    def place(n: Start, blocks: int, size: int) -> _Rows:
        outer, block = divided(n, blocks) if batch_steps * head_steps > 1 else (0, n)
        batch, heads = divided(outer, head_steps)
        return _Rows(
            (batch * plan.batch_step if batch_steps > 1 else 0, plan.batch_step),
            (heads * plan.head_step, plan.head_step),
            spec.groups,
            block,
            (block * plan.query_block, size),
        )

    blocks = plan.whole_row_blocks
    outer = batch_steps * head_steps
    carry = loop(outer * blocks, lambda n, c: body(place(n, blocks, plan.query_block), c), carry)
    if tail := plan.query_length - blocks * plan.query_block:

        def last(n: Start, carry: Carry) -> Carry:
            at = place(n, 1, tail)
            return body(_Rows(at.batch, at.heads, spec.groups, blocks, (blocks * plan.query_block, tail)), carry)

        carry = loop(outer, last, carry)
    return carry


def _tile(spec: AttentionSpec, place: _Rows, columns: tuple[Start, int], sides: Sequence[Array]) -> Tile:
    """Returns what the programs read on a tile, with the tile's axes."""
    query = jnp.asarray(place.query[0], jnp.int32) + np.arange(place.size, dtype=np.int32)
    key = jnp.asarray(columns[0], jnp.int32) + np.arange(columns[1], dtype=np.int32)
    tiles = (place.side(x, s.varies, columns) for x, s in zip(sides, spec.sides, strict=True))
    leading = (1,) * (len(place.shape) - 1)
    return Tile(query.reshape(*leading, -1, 1), key.reshape(*leading, 1, -1), tuple(tiles))


def _reduced(tile: Array, varies: Sequence[bool]) -> Array:
    """Sums a tile over the axes along which a side input does not vary."""
    return jnp.sum(tile, axis=tuple(a for a, v in enumerate(varies) if not v), keepdims=True)


def _unsqueezed(place: _Rows, tile: Array, varies: Sequence[bool]) -> Array:
    """Reshapes a side input's gradient on a tile to all five axes."""
    sizes = (place.batch[1], place.heads[1], place.groups)
    return tile.reshape(*(n if v else 1 for n, v in zip(sizes, varies, strict=False)), *tile.shape[-2:])


def _add_sides(
    spec: AttentionSpec,
    place: _Rows,
    columns: tuple[Start, int],
    totals: tuple[Array, ...],
    contributions: Sequence[tuple[Array, ...]],
) -> tuple[Array, ...]:
    differentiable = [s for s in spec.sides if s.differentiable]
    for contribution in contributions:
        if contribution:
            totals = tuple(
                accumulate(
                    total, place.side_window(s.varies, columns), _unsqueezed(place, c.astype(total.dtype), s.varies)
                )
                for total, s, c in zip(totals, differentiable, contribution, strict=True)
            )
    return totals


# ---------------------------------------------------------------------- dots of a tile
# They are batched over b and k, and the groups are merged into the rows.


def _dot(spec: AttentionSpec, a: Array, b: Array, contract: tuple[int, int], precision: str | None) -> Array:
    dtype = jnp.promote_types(a.dtype, b.dtype)
    if spec.accumulation_dtype == np.float64:
        dtype = jnp.dtype(np.float64)
    elif dtype.itemsize == 2 and Device.current().platform == "cpu":
        dtype = jnp.dtype(np.float32)  # as XLA does, except in some layouts, in which running the dot fails
    batch = tuple(range(a.ndim - 2))
    return lax.dot_general(
        a.astype(dtype),
        b.astype(dtype),
        (((a.ndim + contract[0],), (b.ndim + contract[1],)), (batch, batch)),
        precision=None if precision is None else lax.Precision[precision],
        preferred_element_type=spec.accumulation_dtype,
    )


def _scores(spec: AttentionSpec, place: _Rows, q: Array, k: Array) -> Array:
    """Computes q k^T, rounded like the original's scores."""
    return place.ungrouped(_dot(spec, q, k, (-1, -1), spec.score_precision)).astype(spec.score_dtype)


def _times_values(spec: AttentionSpec, place: _Rows, p: Array, v: Array) -> Array:
    bounded = not any(w.kind == "multiply" for w in spec.inner_weights + spec.weights)
    p = place.grouped(narrow(p, spec.reads_weights, v, bounded))
    return place.ungrouped(_dot(spec, p, v, (-1, -2), spec.value_precision))


def _times_keys(spec: AttentionSpec, place: _Rows, ds: Array, k: Array) -> Array:
    ds = place.grouped(narrow(ds, spec.reads_score_gradients, k, False))
    return place.ungrouped(_dot(spec, ds, k, (-1, -2), spec.score_precision))


def _rows_by_columns(spec: AttentionSpec, place: _Rows, do: Array, v: Array) -> Array:
    return place.ungrouped(_dot(spec, do, v, (-1, -1), spec.value_precision))


def _rows_by_weights(spec: AttentionSpec, place: _Rows, do_transposed: Array, p: Array) -> Array:
    p = place.grouped(narrow(p, spec.reads_weights, do_transposed, False))
    return _dot(spec, do_transposed, p, (-1, -2), spec.value_precision)


def _rows_by_score_gradients(spec: AttentionSpec, place: _Rows, q_transposed: Array, ds: Array) -> Array:
    ds = place.grouped(narrow(ds, spec.reads_score_gradients, q_transposed, False))
    return _dot(spec, q_transposed, ds, (-1, -2), spec.score_precision)
