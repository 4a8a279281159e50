"""The Pallas kernel: one pass over the rows, a block of them at a time."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

ROWS = 256
"""Rows of one block.  Fewer where there are fewer; the last block may reach beyond the end."""


def _kernel(x_ref: Any, scale_ref: Any, out_ref: Any, *, eps: float) -> None:
    x = x_ref[...].astype(jnp.float32)
    normalised = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    out_ref[...] = (normalised * scale_ref[...].astype(jnp.float32)).astype(out_ref.dtype)


def rms_norm(x: jax.Array, scale: jax.Array, *, eps: float, interpret: bool = False) -> jax.Array:
    """As the reference; ``interpret`` runs it on any device, slowly, for tests."""
    size = x.shape[-1]
    rows = x.reshape(-1, size)
    block = min(ROWS, rows.shape[0])
    out = pl.pallas_call(
        functools.partial(_kernel, eps=eps),
        grid=(pl.cdiv(rows.shape[0], block),),
        in_specs=[pl.BlockSpec((block, size), lambda i: (i, 0)), pl.BlockSpec((1, size), lambda i: (0, 0))],
        out_specs=pl.BlockSpec((block, size), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct(rows.shape, x.dtype),
        cost_estimate=pl.CostEstimate(
            flops=4 * rows.size,
            transcendentals=rows.shape[0],
            bytes_accessed=2 * rows.size * x.dtype.itemsize + size * scale.dtype.itemsize,
        ),
        interpret=interpret,
        name="own_rms_norm",
    )(rows, scale.reshape(1, size))
    return out.reshape(x.shape)
