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


def _shapes(*shapes: tuple[int, ...], dtype: Any = jnp.bfloat16) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)


def _integers(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


SAMPLES: dict[str, tuple[Callable[..., jax.Array], tuple[jax.ShapeDtypeStruct, ...]]] = {
    "attention": (_attention, _shapes(*[(2, 1024, 8, 128)] * 3)),
    "cross_entropy": (_cross_entropy, (*_shapes((2048, 512), (512, 32768)), _integers(2048))),
    "grouped_matmul": (_grouped_matmul, (*_shapes((4096, 512), (8, 512, 1024)), _integers(8))),
}
"""(the program, the types of its arguments) for each operation."""
