"""A small typical program for each operation: what ``doctor`` asks the implementations about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["SAMPLES"]


def _attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = jnp.einsum("btnd,bsnd->bnts", q, k) / q.shape[-1] ** 0.5
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    return jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(scores), v)


def _cross_entropy(x: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
    logits = (x @ w).astype(jnp.float32)
    picked = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def _grouped_matmul(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    return jax.lax.ragged_dot(x, w, sizes)


def _rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return wide.astype(x.dtype) * scale


def _layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    wide = centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + 1e-6)
    return wide.astype(x.dtype) * scale + bias


def _gated_mlp(x: jax.Array, gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(x @ gate) * (x @ up)


def _shapes(*shapes: tuple[int, ...], dtype: Any = jnp.bfloat16) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)


def _integers(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


SAMPLES: dict[str, tuple[Callable[..., jax.Array], tuple[jax.ShapeDtypeStruct, ...]]] = {
    "attention": (_attention, _shapes(*[(2, 1024, 8, 128)] * 3)),
    "cross_entropy": (_cross_entropy, (*_shapes((2048, 512), (512, 32768)), _integers(2048))),
    "grouped_matmul": (_grouped_matmul, (*_shapes((4096, 512), (8, 512, 1024)), _integers(8))),
    "rms_norm": (_rms_norm, _shapes((4096, 1024), (1024,))),
    "layer_norm": (_layer_norm, _shapes((4096, 1024), (1024,), (1024,))),
    "gated_mlp": (_gated_mlp, _shapes((4096, 1024), (1024, 4096), (1024, 4096))),
}
"""(the program, the types of its arguments) for each operation."""
