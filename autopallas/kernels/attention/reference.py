"""Computes attention by its formula: the oracle of the tests, and the implementation to read first.

It has the T x S arrays that the others avoid.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from autopallas.kernels.accumulation import einsum
from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.kernels.attention.operands import Cotangents, Gradients, Operands, Residuals, Results
from autopallas.kernels.attention.spec import AttentionSpec, Weight
from autopallas.kernels.attention.tile_values import Tile, exponentials, heights, logsumexp, weighted
from autopallas.numerics.classes import Numerics
from autopallas.sites.device import Device
from autopallas.sites.operation import Supported, Unsupported

__all__ = ["NUMERICS", "backward", "forward", "supports"]

NUMERICS: Numerics = "tolerance"
"""How its results relate to the original's."""

Array: TypeAlias = jax.Array


def supports(spec: AttentionSpec, device: Device) -> Supported | Unsupported:
    """Supports every specification on every platform."""
    return Supported()


def forward(spec: AttentionSpec, block_sizes: BlockSizes | None, operands: Operands) -> Results:
    """Computes the formula of :class:`AttentionSpec`, line by line."""
    query, key, value, sides, sink = operands
    dtype = spec.accumulation_dtype
    t = jnp.arange(spec.query_length, dtype=jnp.int32).reshape(1, 1, 1, -1, 1)
    s = jnp.arange(spec.key_length, dtype=jnp.int32).reshape(1, 1, 1, 1, -1)

    score = einsum("bkgtd,bksd->bkgts", query, key, dtype, spec.score_precision).astype(spec.score_dtype)
    x = jnp.broadcast_to(spec.score.evaluate(score, t, s, sides), score.shape).astype(dtype)
    here = Tile(t, s, tuple(sides))
    maximum = jnp.max(heights(spec, spec.inner_weights, x, here), axis=-1, keepdims=True)
    if sink is not None:
        maximum = jnp.maximum(maximum, sink.astype(dtype))
    maximum = lax.stop_gradient(maximum)
    if spec.statistics is not None:
        maximum, highest = jnp.where(maximum == -jnp.inf, 0, maximum), maximum
    e = exponentials(spec.inner_weights, x, maximum, here)
    total = jnp.sum(e, axis=-1, keepdims=True)
    if sink is not None:
        total = total + jnp.exp(sink.astype(dtype) - maximum)
    p = weighted(spec.weights, e / total if spec.statistics is None else e, here)
    out = einsum("bkgts,bksd->bkgtd", p, value.astype(dtype), dtype, spec.value_precision).astype(spec.result_dtype)
    if spec.statistics is None:
        found, factor = logsumexp(maximum, total)
        return Results(out, (found[..., 0],), factor[..., 0])
    further = (
        jnp.sum(weighted(y, e, here), -1)
        if isinstance(y, tuple)
        else jnp.broadcast_to(y.evaluate(score, t, s, sides), score.shape).max(-1)
        for y in spec.statistics
    )
    kept = (jnp.any(weighted(masks, jnp.ones_like(e), here) != 0, -1),) if (masks := _masks(spec)) else ()
    statistics = (total[..., 0], highest[..., 0], *further, *kept)
    return Results(out, tuple(statistic.astype(dtype) for statistic in statistics))


def _masks(spec: AttentionSpec) -> list[Weight]:
    return [weight for weight in spec.weights if weight.kind == "where"]


def backward(
    spec: AttentionSpec,
    block_sizes: BlockSizes | None,
    operands: Operands,
    residuals: Residuals,
    cotangents: Cotangents,
) -> Gradients:
    """Differentiates :func:`forward` by ``jax.vjp``."""
    query, key, value, sides, sink = operands
    differentiable = [n for n, side in enumerate(spec.sides) if side.differentiable]

    def results(
        query: Array, key: Array, value: Array, floating: Sequence[Array], sink: Array | None
    ) -> Array | tuple[Array, list[Array]]:
        merged = list(sides)
        for n, side in zip(differentiable, floating, strict=True):
            merged[n] = side
        out, rows, _ = forward(spec, block_sizes, Operands(query, key, value, tuple(merged), sink))
        if spec.statistics is None:
            return out
        further = zip(spec.statistics, rows[2:], strict=False)
        return out, [rows[0], *(row for statistic, row in further if isinstance(statistic, tuple))]

    _, vjp = jax.vjp(results, query, key, value, [sides[n] for n in differentiable], sink)
    given = cotangents.out if spec.statistics is None else (cotangents.out, list(cotangents.sums))
    dquery, dkey, dvalue, dfloating, dsink = vjp(given)
    dsides: list[Array | None] = [None] * len(sides)
    for n, gradient in zip(differentiable, dfloating, strict=True):
        dsides[n] = gradient
    return Gradients(dquery, dkey, dvalue, tuple(dsides), dsink)
