"""Streaming attention in plain JAX: no T x S array exists, whatever the mask, in either direction.

The algorithm is FlashAttention-2 (Dao 2023, https://arxiv.org/abs/2307.08691): blocks of queries outside, blocks of
keys inside, a running maximum and a running sum; the backward recomputes each tile from the logsumexp.  The score
program is evaluated tile by tile, its derivative by ``jax.vjp``.

Letters: B batch, K key heads, G query heads per key head, T query length, S key length, D and Dv head sizes; a tile is
[b, k, G, t, s], of which axes b, k and G that have size 1 are dropped (XLA's CPU loops vectorise worse with them).
There is no padding: a block that does not divide its axis leaves a last, shorter block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.kernels.attention.fills import usual
from autopallas.kernels.attention.schedule import (
    Carry,
    Schedule,
    Start,
    TilePrograms,
    Window,
    accumulate,
    cut,
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
    narrow,
    reciprocal,
    row_maximum,
    weighted,
    weighted_vjp,
)
from autopallas.sites.device import Device
from autopallas.sites.elementwise import ElementwiseProgram
from autopallas.sites.operation import Supported, Unsupported

__all__ = ["backward", "forward", "supports"]

Array: TypeAlias = jax.Array


def supports(spec: AttentionSpec, device: Device) -> Supported | Unsupported:
    """Everything a specification can say, on every platform."""
    return Supported()


class _Running(NamedTuple):
    """What a block of rows knows after some of its tiles."""

    maximum: Array  # [..., t, 1]
    total: Array  # [..., t, 1]
    accumulator: Array  # [..., t, Dv]
    kept: Array | None  # [..., t, 1]: whether a `where` weight is True anywhere; None without such weights
    statistics: tuple[Array, ...] = ()  # [..., t, 1] each


def forward(
    spec: AttentionSpec,
    block_sizes: BlockSizes,
    query: Array,
    key: Array,
    value: Array,
    sides: Sequence[Array] = (),
    sink: Array | None = None,
) -> tuple[Array, ...]:
    """Attention.

    Args:
      spec: what to compute.
      block_sizes: the tile.
      query: [B, K, G, T, D].
      key: [B, K, S, D].
      value: [B, K, S, Dv].
      sides: the spec's side inputs, each [B|1, K|1, G|1, T|1, S|1].
      sink: [B|1, K|1, G|1, T|1, 1], or None.

    Returns:
      The result [B, K, G, T, Dv] and the logsumexp of each row [B, K, G, T], or instead of it the statistics.
    """
    plan = schedule(spec, block_sizes)
    bounded = usual(spec, query, key, value, sides) if plan.hides else None
    shape = (spec.batch, spec.key_heads, spec.groups, spec.query_length)
    out = jnp.zeros((*shape, spec.value_head_size), spec.result_dtype)
    statistics = (jnp.zeros(shape, spec.accumulation_dtype),) * spec.row_results

    def rows(place: _Rows, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        running = _stream(spec, plan, place, query, key, value, sides, sink, bounded)
        if spec.statistics is None:
            result = running.accumulator / running.total
            if running.kept is not None:
                result = jnp.where(running.kept, result, 0)
            found = [running.maximum + jnp.log(running.total)]
        else:
            result = running.accumulator
            kept = () if running.kept is None else (running.kept,)
            found = [running.total, running.maximum, *running.statistics, *kept]
        window = place.window("BKGT")
        stored = (store(c, window, place.restored(x)[..., 0]) for c, x in zip(carry[1:], found, strict=True))
        return store(carry[0], place.window("BKGT-"), place.restored(result)), *stored

    with jax.named_scope("autopallas_attention_xla"):
        results: tuple[Array, ...] = _over_rows(plan, spec, rows, (out, *statistics))
    return results


def _stream(
    spec: AttentionSpec,
    plan: Schedule,
    place: _Rows,
    query: Array,
    key: Array,
    value: Array | None,
    sides: Sequence[Array],
    sink: Array | None,
    bounded: Array | None,
) -> _Running:
    """One block of rows over all tiles that count.  Without values: the row statistics alone.

    ``bounded`` is :func:`fills.usual`, where there are hidden tiles.
    """
    q = place.rows(query)
    shape = place.shape
    where_weights = spec.keeps and value is not None
    if sink is None:
        maximum = jnp.full((*shape, 1), -jnp.inf, spec.accumulation_dtype)
        total = jnp.zeros_like(maximum)
    else:
        assert spec.sink is not None
        maximum = jnp.broadcast_to(place.side(sink, spec.sink, (0, 1)), (*shape, 1)).astype(spec.accumulation_dtype)
        total = jnp.where(maximum == -jnp.inf, 0, jnp.ones_like(maximum))
    width = spec.value_head_size if value is not None else 0
    start = _Running(
        maximum,
        total,
        jnp.zeros((*shape, width), spec.accumulation_dtype),
        jnp.zeros((*shape, 1), bool) if where_weights else None,
        tuple(
            jnp.full((*shape, 1), 0 if isinstance(s, tuple) else -jnp.inf, spec.accumulation_dtype)
            for s in spec.statistics or ()
        ),
    )

    def tile(key_start: Start, key_size: int, programs: TilePrograms, carry: _Running) -> _Running:
        columns = (key_start, key_size)
        here = _tile(spec, place, columns, sides)
        score = _scores(spec, place, q, place.columns(key, columns))
        x = logits(spec, programs, score, here)
        maximum = jnp.maximum(carry.maximum, row_maximum(spec, programs, score, x, here))
        # A row with nothing but -inf so far must stay at sum 0, where -inf - -inf would be NaN.
        finite_maximum = jnp.where(maximum == -jnp.inf, 0, maximum)
        shrink = jnp.exp(carry.maximum - finite_maximum)
        e = exponentials(programs.inner_weights, x, finite_maximum, here)
        total = carry.total * shrink + jnp.sum(e, axis=-1, keepdims=True)
        if value is None:
            return carry._replace(maximum=maximum, total=total)
        p = weighted(programs.weights, e, here)
        accumulator = carry.accumulator * shrink + _times_values(spec, place, p, place.columns(value, columns))
        kept = carry.kept
        if kept is not None:
            kept = kept | any_kept(programs.weights, here, p.shape)

        def statistic(wanted: ElementwiseProgram | tuple[Weight, ...], before: Array) -> Array:
            if isinstance(wanted, tuple):
                return before * shrink + jnp.sum(weighted(wanted, e, here), axis=-1, keepdims=True)
            if wanted == spec.score and sink is None and not spec.inner_weights:
                return maximum
            return jnp.maximum(before, greatest(spec, wanted, score, here))

        statistics = tuple(map(statistic, spec.statistics or (), carry.statistics))
        return _Running(maximum, total, accumulator, kept, statistics)

    def reveals(carry: _Running) -> Array:
        assert bounded is not None
        return ~(bounded & jnp.all(carry.maximum >= plan.least))

    return plan.over_columns(place.block, tile, start, reveals)


def backward(
    spec: AttentionSpec,
    block_sizes: BlockSizes,
    query: Array,
    key: Array,
    value: Array,
    sides: Sequence[Array],
    sink: Array | None,
    out: Array,
    logsumexp: Array,
    dout: Array,
    dsums: Sequence[Array] | None = None,
) -> tuple[Array, Array, Array, tuple[Array | None, ...], Array | None]:
    """Gradients of :func:`forward`'s first result, from its operands and results and the cotangent ``dout``.

    With ``spec.statistics``, ``logsumexp`` is the maximum among the results, and ``dsums`` are the cotangents of the
    sum and of further sums.

    Returns:
      dquery, dkey, dvalue, the gradients of the side inputs (None for integers and booleans), dsink (None without a
      sink), each in its operand's shape and dtype.
    """
    plan = schedule(spec, block_sizes)
    gradients = _Gradients.zeros(spec, query, key, value, sides, sink)
    bounded = usual(spec, query, key, value, sides, dout) if plan.hides else None

    def rows(place: _Rows, carry: _Gradients) -> _Gradients:
        operands = (query, key, value, sides, sink)
        return _backward_rows(spec, plan, place, carry, *operands, out, normalizers, dout, dsums, bounded)

    with jax.named_scope("autopallas_attention_xla_backward"):
        normalizers = jnp.where(logsumexp == -jnp.inf, 0, logsumexp), jnp.ones_like(logsumexp)
        if spec.statistics is None:
            normalizers = _normalizers(spec, plan, query, key, sides, sink, logsumexp, bounded)
        found = _over_rows(plan, spec, rows, gradients)
    dsides = iter(found.sides)
    return (
        found.query,
        jnp.swapaxes(found.key, -1, -2).astype(key.dtype),
        jnp.swapaxes(found.value, -1, -2).astype(value.dtype),
        tuple(next(dsides).astype(s.dtype) if s.differentiable else None for s in spec.sides),
        None if found.sink is None or sink is None else found.sink.astype(sink.dtype),
    )


def _normalizers(
    spec: AttentionSpec,
    plan: Schedule,
    query: Array,
    key: Array,
    sides: Sequence[Array],
    sink: Array | None,
    logsumexp: Array,
    bounded: Array | None,
) -> tuple[Array, Array]:
    """(shift, factor) [B, K, G, T] such that the probabilities are exp(x - shift) * factor.

    The logsumexp serves where it can.  Its rounding error, about 1e-7 of its size, is the probabilities' relative
    error: a row whose every key is masked with -1e9 has logsumexp -1e9 + log(S) = -1e9, and every probability would be
    1.  With such rows, and where the sum may not be positive, maximum and sum are computed anew.
    """

    def anew() -> tuple[Array, Array]:
        def rows(place: _Rows, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            running = _stream(spec, plan, place, query, key, None, sides, sink, bounded)
            found = (running.maximum, reciprocal(running.total))
            window = place.window("BKGT")
            shift, factor = (store(c, window, place.restored(f)[..., 0]) for c, f in zip(carry, found, strict=True))
            return shift, factor

        empty = jnp.zeros_like(logsumexp)
        shift, factor = _over_rows(plan, spec, rows, (empty, empty))
        return shift, factor

    if spec.inner_weights:
        return anew()
    large = jnp.isfinite(logsumexp) & (jnp.abs(logsumexp) > _LARGE_LOGSUMEXP)
    shift, factor = lax.cond(jnp.any(large), anew, lambda: (logsumexp, jnp.ones_like(logsumexp)))
    return shift, factor


_LARGE_LOGSUMEXP = 256.0


class _Gradients(NamedTuple):
    """Accumulators over the whole operands.  The rows of ``query`` are written once, so it has its final dtype.

    Those of keys and values are transposed: rows^T tile contracts the minor axis of the one and the major axis of the
    other, as XLA's CPU dots like it; tile^T rows takes them twice as long.
    """

    query: Array
    key: Array  # [B, K, D, S]
    value: Array  # [B, K, Dv, S]
    sides: tuple[Array, ...]  # of the differentiable side inputs
    sink: Array | None

    @staticmethod
    def zeros(
        spec: AttentionSpec, query: Array, key: Array, value: Array, sides: Sequence[Array], sink: Array | None
    ) -> _Gradients:
        def like(x: Array) -> Array:
            return jnp.zeros(x.shape, spec.accumulation_dtype)

        floating = tuple(like(x) for x, s in zip(sides, spec.sides, strict=True) if s.differentiable)
        dquery = jnp.zeros(query.shape, query.dtype)
        dkey, dvalue = like(jnp.swapaxes(key, -1, -2)), like(jnp.swapaxes(value, -1, -2))
        return _Gradients(dquery, dkey, dvalue, floating, None if sink is None else like(sink))


def _backward_rows(
    spec: AttentionSpec,
    plan: Schedule,
    place: _Rows,
    gradients: _Gradients,
    query: Array,
    key: Array,
    value: Array,
    sides: Sequence[Array],
    sink: Array | None,
    out: Array,
    normalizers: tuple[Array, Array],
    dout: Array,
    dsums: Sequence[Array] | None,
    bounded: Array | None,
) -> _Gradients:
    """The contributions of one block of rows.

    With P = e / sum, c = dout v^T and the outer weights w: out = (P w) v, and for any weights, with or without a sink,
    dx = P (w c - delta) where delta = sum_S P w c = rowsum(dout * out).  Of numerator and sum apart, P is e and delta
    the sum's negative cotangent.
    """
    dtype = spec.accumulation_dtype
    shift, factor = (place.rows(x[..., None]) for x in normalizers)
    q, do = place.rows(query), place.rows(dout)
    if dsums is None:
        delta = jnp.sum(do.astype(dtype) * place.rows(out).astype(dtype), axis=-1, keepdims=True)
    else:
        delta = -place.rows(dsums[0][..., None])
    # Everything below is linear in the cotangent, so that the factor of P goes there, where it costs nothing.
    # The product with the probabilities is rounded as they are, in one factor or the other.
    kept = do.dtype if spec.reads_weights == do.dtype else dtype
    do, delta = (do * factor).astype(kept), delta * factor
    # The barrier keeps XLA from folding the transposition back into the dots.
    q_transposed, do_transposed = lax.optimization_barrier((jnp.swapaxes(q, -1, -2), jnp.swapaxes(do, -1, -2)))
    shift, delta = place.ungrouped(shift), place.ungrouped(delta)
    further = [place.ungrouped(place.rows(dsum[..., None])) for dsum in (dsums or ())[1:]]

    def row_sums(key_start: Start, key_size: int, programs: TilePrograms, sums: Array) -> Array:
        columns = (key_start, key_size)
        here = _tile(spec, place, columns, sides)
        x = logits(spec, programs, _scores(spec, place, q, place.columns(key, columns)), here)
        p = weighted(spec.weights, exponentials(spec.inner_weights, x, shift, here), here)
        dp = _rows_by_columns(spec, place, do, place.columns(value, columns))
        return sums + jnp.sum(p * dp, axis=-1, keepdims=True)

    def reveals(_: object) -> Array:
        assert unhidden is not None
        return unhidden

    unhidden = None
    if bounded is not None:  # a weight of 0 gives 0 unless it is multiplied with what is not finite
        finite = [jnp.all(jnp.isfinite(x)) for x in (delta, factor, *further)]
        unhidden = ~(bounded & jnp.all(shift >= plan.least) & jnp.all(jnp.stack(finite)))

    if dsums is None and spec.rounding_adds_up:
        delta = plan.over_columns(place.block, row_sums, jnp.zeros_like(delta), reveals) * place.ungrouped(factor)

    def tile(
        key_start: Start, key_size: int, programs: TilePrograms, carry: tuple[Array, _Gradients]
    ) -> tuple[Array, _Gradients]:
        dq, gradients = carry
        columns = (key_start, key_size)
        here = _tile(spec, place, columns, sides)
        k, v = place.columns(key, columns), place.columns(value, columns)
        score = _scores(spec, place, q, k)

        def from_score(score: Array, floating: tuple[Array, ...]) -> Array:
            return logits(spec, programs, score, here.with_floating(spec, floating))

        x, logits_vjp = jax.vjp(from_score, score, here.floating(spec))
        p_normal, exponentials_pull = exponentials_vjp(spec, programs.inner_weights, x, shift, here)
        p, outer_vjp = weighted_vjp(spec, programs.weights, p_normal, here)
        dvalue = _rows_by_weights(spec, place, do_transposed, p)
        dp = _rows_by_columns(spec, place, do, v)
        dp_normal, *outer_sides = outer_vjp(dp)
        for weights, dsum in zip(spec.sums, further, strict=True):
            _, sum_vjp = weighted_vjp(spec, weights, p_normal, here)
            de, sum_sides = sum_vjp(jnp.broadcast_to(dsum, p_normal.shape))
            dp_normal, outer_sides = dp_normal + de, [*outer_sides, sum_sides]
        # d(e / sum) = P (.. - delta): the derivative of the sum is the same for each key of the row.
        dx, inner_sides = exponentials_pull(dp_normal - delta)
        dscore, score_sides = logits_vjp(dx.astype(x.dtype))
        dq = dq + _times_keys(spec, place, dscore, k)
        window = place.window("BK-S", columns)
        dkey = _rows_by_score_gradients(spec, place, q_transposed, dscore)
        updates = gradients._replace(
            key=accumulate(gradients.key, window, place.unmerged(dkey)),
            value=accumulate(gradients.value, window, place.unmerged(dvalue)),
            sides=_add_sides(spec, place, columns, gradients.sides, (score_sides, inner_sides, *outer_sides)),
        )
        return dq, updates

    start = jnp.zeros((*place.shape, spec.head_size), dtype)
    dq, gradients = plan.over_columns(place.block, tile, (start, gradients), reveals)
    gradients = gradients._replace(query=store(gradients.query, place.window("BKGT-"), place.restored(dq)))
    if sink is not None and gradients.sink is not None and spec.sink is not None:
        weight = jnp.exp(place.side(sink, spec.sink, (0, 1)).astype(dtype) - shift)
        dsink = _reduced(place.restored(-weight * delta), spec.sink)
        gradients = gradients._replace(sink=accumulate(gradients.sink, place.side_window(spec.sink, (0, 1)), dsink))
    return gradients


# Where things are.


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """A block of rows of some heads of some batch entries; starts may be traced, sizes are static."""

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
        """(b, k, G, t), without those of b, k and G that are 1."""
        return (*(n for n in (self.batch[1], self.heads[1], self.groups) if n != 1), self.size)

    def squeezed(self, x: Array) -> Array:
        """[b|1, k|1, G|1, ...] without the axes that a tile drops."""
        sizes = (self.batch[1], self.heads[1], self.groups)
        return lax.squeeze(x, [axis for axis, size in enumerate(sizes) if size == 1])

    def restored(self, x: Array) -> Array:
        """[..., t, d] as [b, k, G, t, d]."""
        return x.reshape(self.batch[1], self.heads[1], self.groups, *x.shape[-2:])

    def rows(self, x: Array) -> Array:
        """This block of [B, K, G, T, d], with the groups merged into the rows: [..., G t, d]."""
        return self.grouped(self.squeezed(cut(x, self.window("BKGT-"))))

    def grouped(self, x: Array) -> Array:
        """[..., G, t, d] as [..., G t, d], the shape of the dots: they need no repeated keys or values."""
        return x if self.groups == 1 else x.reshape(*x.shape[:-3], -1, x.shape[-1])

    def ungrouped(self, x: Array) -> Array:
        """[..., G t, d] as [..., G, t, d]."""
        return x if self.groups == 1 else x.reshape(*x.shape[:-2], self.groups, -1, x.shape[-1])

    def columns(self, x: Array, columns: tuple[Start, int]) -> Array:
        """A block of [B, K, S, d] for these heads: [..., s, d]."""
        x = cut(x, self.window("BKS-", columns))
        return lax.squeeze(x, [axis for axis in (0, 1) if x.shape[axis] == 1])

    def unmerged(self, x: Array) -> Array:
        """[..., d, s] with both axes b and k."""
        return x.reshape(self.batch[1], self.heads[1], *x.shape[-2:])

    def side_window(self, varies: Sequence[bool], columns: tuple[Start, int]) -> Window:
        return [part if v else None for part, v in zip(self.window("BKGTS", columns), varies, strict=True)]

    def side(self, x: Array, varies: Sequence[bool], columns: tuple[Start, int]) -> Array:
        """The part of a side input that belongs to a tile, with the tile's axes."""
        return self.squeezed(cut(x, self.side_window(varies, columns)))

    def window(self, axes: str, columns: tuple[Start, int] | None = None) -> Window:
        """The window of an operand whose dimensions are ``axes``; "-" is a whole dimension."""
        parts = {"B": self.batch, "K": self.heads, "G": None, "T": self.query, "S": columns, "-": None}
        return [parts[a] for a in axes]


def _over_rows(plan: Schedule, spec: AttentionSpec, body: Callable[[_Rows, Carry], Carry], carry: Carry) -> Carry:
    """``carry`` after ``body`` for each block of rows, the shorter last one included."""
    batch_steps, head_steps = spec.batch // plan.batch_step, spec.key_heads // plan.head_step

    def place(n: Start, blocks: int, size: int) -> _Rows:
        block = n % blocks if blocks > 1 else 0
        outer = n // blocks if blocks > 1 else n
        heads, batch = (outer % head_steps, outer // head_steps) if head_steps > 1 else (0, outer)
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
    """What the programs read on a tile, with the tile's axes."""
    query = jnp.asarray(place.query[0], jnp.int32) + np.arange(place.size, dtype=np.int32)
    key = jnp.asarray(columns[0], jnp.int32) + np.arange(columns[1], dtype=np.int32)
    tiles = (place.side(x, s.varies, columns) for x, s in zip(sides, spec.sides, strict=True))
    leading = (1,) * (len(place.shape) - 1)
    return Tile(query.reshape(*leading, -1, 1), key.reshape(*leading, 1, -1), tuple(tiles))


def _reduced(tile: Array, varies: Sequence[bool]) -> Array:
    """The tile summed over the axes along which a side input does not vary."""
    return jnp.sum(tile, axis=tuple(a for a, v in enumerate(varies) if not v), keepdims=True)


def _unsqueezed(place: _Rows, tile: Array, varies: Sequence[bool]) -> Array:
    """A side input's gradient on a tile, with all five axes."""
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


# The dots of a tile: batched over b and k, the groups merged into the rows.


def _dot(spec: AttentionSpec, a: Array, b: Array, contract: tuple[int, int], precision: str | None) -> Array:
    dtype = jnp.promote_types(a.dtype, b.dtype)
    if spec.accumulation_dtype == np.float64:
        dtype = jnp.dtype(np.float64)
    elif dtype.itemsize == 2 and Device.current().platform == "cpu":
        dtype = jnp.dtype(np.float32)  # XLA does so too, but in some layouts forgets it and fails when the dot runs
    batch = tuple(range(a.ndim - 2))
    return lax.dot_general(
        a.astype(dtype),
        b.astype(dtype),
        (((a.ndim + contract[0],), (b.ndim + contract[1],)), (batch, batch)),
        precision=None if precision is None else lax.Precision[precision],
        preferred_element_type=spec.accumulation_dtype,
    )


def _scores(spec: AttentionSpec, place: _Rows, q: Array, k: Array) -> Array:
    """q k^T, rounded as the original's were."""
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
