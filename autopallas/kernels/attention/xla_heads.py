"""Computes attention without a mask with the heads on two axes, in plain JAX: the form that XLA fuses on CPUs.

XLA's CPU compiler makes one kernel of product, softmax and product, without a T x S array in memory, where the products
have two batch axes.  A batch of one sequence is dropped before it looks, so that the heads are the only axis left.
Here they are two axes of [2, N / 2], or [N / 2, 2], and each product has its operands in that layout.
"""

from __future__ import annotations

from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from autopallas.kernels.accumulation import einsum
from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.kernels.attention.operands import Cotangents, Gradients, Operands, Residuals, Results
from autopallas.kernels.attention.spec import AttentionSpec
from autopallas.numerics.classes import Numerics
from autopallas.sites.device import Device
from autopallas.sites.operation import Supported, Unsupported

__all__ = ["NUMERICS", "backward", "candidates", "forward", "supports"]

NUMERICS: Numerics = "tolerance"
"""How its results relate to the original's."""

Array: TypeAlias = jax.Array

TILES = False
"""Whether there are tiles; without them block sizes are ignored."""


def supports(spec: AttentionSpec, device: Device) -> Supported | Unsupported:
    """Supports one sequence, an even number of key heads, and only a softmax of each score between the products."""
    if device.platform != "cpu":
        return Unsupported("it is for XLA's CPU compiler")
    if spec.batch != 1 or spec.key_heads % 2:
        return Unsupported("it is for one sequence and an even number of key heads")
    if spec.live is not None or spec.mask_class != "full":
        return Unsupported("it computes every score, and a mask leaves some out")
    if spec.sides or spec.inner_weights or spec.weights or spec.sink or spec.statistics is not None:
        return Unsupported("XLA fuses a softmax without side inputs, weights, sinks and row programs")
    return Supported()


def candidates(spec: AttentionSpec, device: Device) -> tuple[BlockSizes, ...]:
    """Returns one: there are no tiles."""
    return (BlockSizes.get_default().fitted(spec),)


def forward(spec: AttentionSpec, block_sizes: BlockSizes, operands: Operands) -> Results:
    """Computes the attention from two products and a softmax, which XLA fuses."""
    with jax.named_scope("autopallas_attention_xla_heads"):
        out, logsumexp = _attention(spec, operands.query, operands.key, operands.value)
    return Results(out, (logsumexp,))


def backward(
    spec: AttentionSpec, block_sizes: BlockSizes, operands: Operands, residuals: Residuals, cotangents: Cotangents
) -> Gradients:
    """Differentiates :func:`forward` by ``jax.vjp``."""
    with jax.named_scope("autopallas_attention_xla_heads_backward"):
        _, pull_back = jax.vjp(lambda q, k, v: _attention(spec, q, k, v)[0], *operands[:3])
        dquery, dkey, dvalue = pull_back(cotangents.out)
    return Gradients(dquery, dkey, dvalue, (), None)


def _attention(spec: AttentionSpec, query: Array, key: Array, value: Array) -> tuple[Array, Array]:
    """Computes the result [1, K, G, T, Dv] and the logsumexp [1, K, G, T]."""
    dtype, rows = spec.accumulation_dtype, spec.groups * spec.query_length
    q = query.reshape(2, -1, rows, spec.head_size)  # the groups of a key head are further rows
    k, v = (x.reshape(2, -1, spec.key_length, x.shape[-1]) for x in (key, value))
    t = jnp.tile(jnp.arange(spec.query_length, dtype=jnp.int32), spec.groups).reshape(1, 1, rows, 1)
    s = jnp.arange(spec.key_length, dtype=jnp.int32).reshape(1, 1, 1, -1)
    score = einsum("abtd,absd->abts", q, k, spec.score_dtype, spec.score_precision)
    x = jnp.broadcast_to(spec.score.evaluate(score, t, s, ()), score.shape).astype(dtype)
    maximum = lax.stop_gradient(jnp.max(x, axis=-1, keepdims=True))
    e = jnp.exp(x - maximum)
    total = jnp.sum(e, axis=-1, keepdims=True)
    p = (e / total).astype(spec.reads_weights)
    wide = jnp.promote_types(p.dtype, v.dtype)
    out = einsum("abts,absd->abtd", p.astype(wide), v.astype(wide), spec.result_dtype, spec.value_precision)
    logsumexp = maximum + jnp.log(total)
    shape = (1, spec.key_heads, spec.groups, spec.query_length)
    return out.reshape(*shape, spec.value_head_size), logsumexp.reshape(shape)
