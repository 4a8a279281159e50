"""Computes attention by ``tokamax.dot_product_attention``: with a scale, and a causal mask or window.

What it may compute is proved as for cuDNN (:mod:`autopallas.kernels.attention.cudnn`), for the same reasons.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.kernels.attention.cudnn import reduced
from autopallas.kernels.attention.operands import Cotangents, Gradients, Operands, Residuals, Results
from autopallas.kernels.attention.spec import AttentionSpec
from autopallas.sites.device import Device
from autopallas.sites.operation import Supported, Unsupported

__all__ = ["backward", "candidates", "forward", "supports"]

Array = jax.Array

TILES = False
"""Whether there are tiles; tokamax chooses its own."""

_SIXTEEN_BITS = frozenset({"bfloat16", "float16"})


def supports(spec: AttentionSpec, device: Device) -> Supported | Unsupported:
    """Supports 16-bit operands, on CPUs float32 too, and only a scale and a mask of positions besides the dots."""
    if not device.here:
        return Unsupported("programs for another machine do not call tokamax: what it chooses there is unknown")
    names = {d.name for d in (spec.query_dtype, spec.key_dtype, spec.value_dtype, spec.result_dtype)}
    allowed = _SIXTEEN_BITS | ({"float32"} if device.platform == "cpu" else set())
    if len(names) > 1 or not names <= allowed:
        return Unsupported(f"it is used with operands and results all of one of {', '.join(sorted(allowed))}")
    if spec.reads_weights != spec.value_dtype:
        return Unsupported(f"tokamax rounds probabilities to {spec.value_dtype}, and the original does not")
    if spec.sink is not None or spec.statistics is not None or spec.weights or spec.inner_weights:
        return Unsupported("tokamax's attention has no sinks, no weights beside the softmax, and no row programs")
    if names != {"float32"} and "HIGHEST" in (spec.score_precision, spec.value_precision):
        return Unsupported("the original asks for the highest precision")
    if reduced(spec) is None:
        return Unsupported("its score program is not proven to be a scale with a causal mask, a window, or no mask")
    return Supported()


def candidates(spec: AttentionSpec, device: Device) -> tuple[BlockSizes, ...]:
    """Returns one: tokamax chooses its blocks itself."""
    return (BlockSizes.get_default(),)


def forward(spec: AttentionSpec, block_sizes: BlockSizes, operands: Operands) -> Results:
    """Calls tokamax.  The logsumexp is left out: :func:`backward` needs none, and no other one follows this forward."""
    with jax.named_scope("autopallas_attention_tokamax"):
        out = _attention(spec, *operands[:3])
    return Results(out, (jnp.zeros(out.shape[:-1], spec.accumulation_dtype),))


def backward(
    spec: AttentionSpec, block_sizes: BlockSizes, operands: Operands, residuals: Residuals, cotangents: Cotangents
) -> Gradients:
    """Differentiates :func:`forward` by ``jax.vjp``, which runs tokamax's own backward; its forward is part of it."""
    with jax.named_scope("autopallas_attention_tokamax_backward"):
        _, pull_back = jax.vjp(lambda q, k, v: _attention(spec, q, k, v), *operands[:3])
        dquery, dkey, dvalue = pull_back(cotangents.out.astype(spec.result_dtype))
    return Gradients(dquery, dkey, dvalue, tuple(None for _ in spec.sides), None)


def _attention(spec: AttentionSpec, query: Array, key: Array, value: Array) -> Array:
    """Computes the result [B, K, G, T, Dv] from tokamax's [B, T, N, D]."""
    import tokamax

    wanted = reduced(spec)
    assert wanted is not None
    q = jnp.moveaxis(query.reshape(spec.batch, -1, *query.shape[3:]), 1, 2)
    k, v = (jnp.moveaxis(x, 1, 2) for x in (key, value))
    out = tokamax.dot_product_attention(
        q,
        k,
        v,
        scale=wanted.scale,
        is_causal=wanted.causal,
        local_window_size=None if wanted.window is None else (wanted.window, 0),
        precision=jax.lax.Precision.HIGHEST if query.dtype == np.float32 else None,
    )
    found: Array = jnp.moveaxis(out, 1, 2).reshape(*query.shape[:4], -1).astype(spec.result_dtype)
    return found
