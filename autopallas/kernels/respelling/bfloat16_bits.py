"""Numbers of bfloat16 as integers: XLA's CPU compiler of JAX 0.10 stacks, sets and carries these in place."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["BFLOAT16", "as_bits", "of_bits", "with_dtype"]

BFLOAT16 = jnp.dtype(jnp.bfloat16)


def as_bits(x: jax.Array) -> jax.Array:
    """Returns the bits of bfloat16 numbers as integers, and any other array as it is."""
    found: jax.Array = lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == BFLOAT16 else x
    return found


def of_bits(x: jax.Array) -> jax.Array:
    """Returns the bfloat16 numbers that have these bits."""
    found: jax.Array = lax.bitcast_convert_type(x, BFLOAT16)
    return found


def with_dtype(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns numbers that :func:`as_bits` was given, of their dtype."""
    return of_bits(x) if dtype == BFLOAT16 else x
