"""What models compute, in plain JAX.  This is the oracle, and what programs are searched for."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, scale: jax.Array, *, eps: float) -> jax.Array:
    """RMSNorm over the last axis.

    Args:
      x: [..., D], floating point.
      scale: [D].
      eps: added to the mean square.

    Returns:
      [..., D].
    """
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * scale
