"""Products that sum in a given dtype, as the references of several operations compute them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

__all__ = ["einsum"]


def einsum(equation: str, a: jax.Array, b: jax.Array, dtype: DTypeLike, precision: str | None) -> jax.Array:
    """Returns ``jnp.einsum`` of two operands.

    Args:
      equation: as of ``jnp.einsum``.
      a, b: floats.
      dtype: of the sums, and of the result.  In float64 the factors are multiplied so, too.
      precision: the name of one in :class:`jax.lax.Precision`, or None for the default.
    """
    if dtype == jnp.float64:
        a, b = a.astype(dtype), b.astype(dtype)
    wanted = None if precision is None else lax.Precision[precision]
    return jnp.einsum(equation, a, b, precision=wanted, preferred_element_type=dtype)
