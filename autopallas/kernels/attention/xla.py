"""Computes attention by streaming, in plain JAX: no T x S array exists, whatever the mask, in either direction.

The algorithm is FlashAttention-2 (Dao 2023, https://arxiv.org/abs/2307.08691): an outer loop over blocks of queries, an
inner loop over blocks of keys, a running maximum and a running sum.  The backward recomputes each tile from the
logsumexp.  The score program is evaluated tile by tile; its derivative is that of ``jax.vjp``.

Letters: B batch, K key heads, G query heads per key head, T query length, S key length, D and Dv head sizes.  A tile is
[b, k, G, t, s]; axes b, k and G of size 1 are dropped, because XLA's CPU loops vectorise worse with them.  Nothing is
padded: blocks have a size near the one that is asked for that divides the axis; where there is none, the last block
repeats the end of the one before.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.kernels.attention.operands import Operands, Results
from autopallas.kernels.attention.schedule import TilePrograms, running_blocks, schedule, store
from autopallas.kernels.attention.spec import AttentionSpec, Weight
from autopallas.kernels.attention.tile_values import (
    any_kept,
    exponentials,
    greatest,
    logits,
    logsumexp,
    row_maximum,
    weighted,
)
from autopallas.kernels.attention.xla_backward import backward
from autopallas.kernels.attention.xla_blocks import (
    RowBlock,
    TiledAttention,
    counted_once,
    over_rows,
    rows_shape,
    scores,
    tile,
    times_values,
    unrepeated,
)
from autopallas.kernels.even_blocks import ONE, Part
from autopallas.numerics.classes import Numerics
from autopallas.sites.device import Device
from autopallas.sites.elementwise import ElementwiseProgram
from autopallas.sites.operation import Supported, Unsupported
from autopallas.sites.spec import Sizes

__all__ = ["GAINS_ON", "NUMERICS", "backward", "forward", "running_sizes", "supports"]

NUMERICS: Numerics = "tolerance"
"""How its results relate to the original's."""

GAINS_ON = {"gpu": ("memory",)}
"""What it gains by platform, if that is not everything: on an H200 its loops had 0.31 of the original's speed (B8 T1024
N12 D64, causal, bfloat16, with gradients)."""

Array: TypeAlias = jax.Array


def supports(spec: AttentionSpec, device: Device) -> Supported | Unsupported:
    """Supports every specification on every platform."""
    return Supported()


def running_sizes(spec: AttentionSpec, block_sizes: BlockSizes, device: Device) -> Sizes:
    """Returns the sizes of the blocks that are computed, forward and backward."""
    return running_blocks(spec, block_sizes).to_dict()


class _ForwardRows(NamedTuple):
    """A block of rows in the forward.

    Attributes:
      attention, place: the attention, and which rows these are.
      q: the queries, [..., G t, D].
    """

    attention: TiledAttention
    place: RowBlock
    q: Array


class _Running(NamedTuple):
    """The state of a block of rows after some of its tiles.

    Numbers of rows have one axis: LLVM writes out a loop over as few numbers as a block has rows, for a whole
    exponential each.
    """

    maximum: Array  # [rows]
    total: Array  # [rows]
    accumulator: Array  # [..., t, Dv]
    kept: Array | None  # [rows]: whether the `where` weights keep any key; None without such weights
    statistics: tuple[Array, ...] = ()  # [rows] each

    def column(self, x: Array) -> Array:
        """Reshapes numbers of rows [rows] to [..., t, 1]."""
        return x.reshape(*self.accumulator.shape[:-1], 1)


def forward(spec: AttentionSpec, block_sizes: BlockSizes, operands: Operands) -> Results:
    """Computes each block of rows in one pass over its tiles."""
    plan = schedule(spec, block_sizes)
    shape = rows_shape(spec)
    whole = operands.query.shape[:-1]
    own = TiledAttention.of(spec, plan, operands)
    out = jnp.zeros((*shape, spec.value_head_size), spec.result_dtype)
    numbers = (jnp.zeros(shape, spec.accumulation_dtype),) * (spec.row_results + spec.has_factor)

    def rows(place: RowBlock, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        running = _stream(own, place)
        if spec.statistics is None:
            result = running.accumulator / running.column(running.total)
            if running.kept is not None:
                result = jnp.where(running.column(running.kept), result, 0)
            found = [*logsumexp(running.maximum, running.total)]
        else:
            result = running.accumulator
            kept = () if running.kept is None else (running.kept,)
            found = [running.total, running.maximum, *running.statistics, *kept]
        window = place.numbers_window
        found = [place.restored(running.column(x))[..., 0] for x in found]
        stored = (store(c, window, x) for c, x in zip(carry[1:], found, strict=True))
        return store(carry[0], place.rows_window, place.restored(result)), *stored

    with jax.named_scope("autopallas_attention_xla"):
        result, *found = over_rows(plan, spec, rows, (out, *numbers))
    found = [x.reshape(whole) for x in found]
    result = result.reshape(*whole, spec.value_head_size)
    return Results(result, tuple(found[: spec.row_results]), *found[spec.row_results :])


def _stream(own: TiledAttention, place: RowBlock) -> _Running:
    """Returns the state of a block of rows after all tiles that count."""
    rows = _ForwardRows(own, place, place.rows(own.operands.query))

    def reveals(carry: _Running) -> Array:
        return own.reveals(jnp.min(carry.maximum))

    return own.plan.over_columns(place.block, partial(_advanced, rows), _initial(own, place), reveals)


def _initial(own: TiledAttention, place: RowBlock) -> _Running:
    """Returns the state of a block of rows before its first tile; a sink is already in its maximum and sum."""
    spec, sink, shape = own.spec, own.operands.sink, place.shape
    dtype, rows = spec.accumulation_dtype, math.prod(shape)
    if sink is None:
        maximum = jnp.full(rows, -jnp.inf, dtype)
        total = jnp.zeros_like(maximum)
    else:
        assert spec.sink is not None
        maximum = jnp.broadcast_to(place.side(sink, spec.sink, ONE), (*shape, 1)).astype(dtype).reshape(rows)
        total = jnp.where(maximum == -jnp.inf, 0, jnp.ones_like(maximum))
    return _Running(
        maximum,
        total,
        jnp.zeros((*shape, spec.value_head_size), dtype),
        jnp.zeros(rows, bool) if spec.keeps else None,
        tuple(jnp.full(rows, 0 if isinstance(s, tuple) else -jnp.inf, dtype) for s in spec.statistics or ()),
    )


def _below_roundings(maximum: Array) -> Array:
    """Returns maxima from which no logit is further below, by rounding alone, than an exponential reaches.

    A compiler subtracts the shift from a product that it does not round, as the maximum is: at 1e10 the greatest logit
    may be 512 below it, and the sum of its row would be 0.  There the shift is one rounding lower.  What is above it
    has the exponential 1.
    """
    found = jnp.finfo(maximum.dtype)
    size = jnp.abs(maximum)
    large = (size >= 2**7 / found.eps) & (size < jnp.inf)
    return jnp.where(large, jnp.maximum(maximum - size * found.eps, found.min), maximum)


def _advanced(rows: _ForwardRows, columns: Part, programs: TilePrograms, carry: _Running) -> _Running:
    """Returns the state of a block of rows after one more tile."""
    spec, operands, place = rows.attention.spec, rows.attention.operands, rows.place
    here = tile(spec, place, columns, operands.sides)
    score = scores(spec, place, rows.q, place.columns(operands.key, columns))
    x = unrepeated(logits(spec, programs, score, here), here, columns)
    maximum = row_maximum(spec, programs, score, x, here).reshape(-1)
    if spec.statistics is None and not programs.inner_weights:  # halves of exponentials are not bounded by 1
        maximum = _below_roundings(maximum)
    maximum = jnp.maximum(carry.maximum, maximum)
    # A row that has seen only -inf keeps the sum 0; without the zero, -inf - -inf would be NaN.
    finite_maximum = jnp.where(maximum == -jnp.inf, 0, maximum)
    shrink = jnp.exp(carry.maximum - finite_maximum)
    e = exponentials(programs.inner_weights, x, carry.column(finite_maximum), here)
    total = carry.total * shrink + jnp.sum(e, axis=-1).reshape(-1)
    p = weighted(programs.weights, e, here)
    accumulator = carry.accumulator * carry.column(shrink)
    value = counted_once(place.columns(operands.value, columns), columns)
    accumulator = accumulator + times_values(spec, place, p, value)
    kept = carry.kept
    if kept is not None:
        kept = kept | any_kept(programs.weights, here, p.shape).reshape(-1)

    def statistic(wanted: ElementwiseProgram | tuple[Weight, ...], before: Array) -> Array:
        if isinstance(wanted, tuple):
            return before * shrink + jnp.sum(weighted(wanted, e, here), axis=-1).reshape(-1)
        if wanted == spec.score and operands.sink is None and not spec.inner_weights:
            return maximum
        return jnp.maximum(before, greatest(spec, wanted, score, here).reshape(-1))

    statistics = tuple(map(statistic, spec.statistics or (), carry.statistics))
    return _Running(maximum, total, accumulator, kept, statistics)
