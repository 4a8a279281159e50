"""Adds numbers up in a loop of the compiled program itself."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["plain_sum"]


def plain_sum(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    """Returns the sum over some axes.

    XLA's CPU compiler hands a sum of float32, and a product that it adds up, to a library, with what reads it.  There
    many sums of few numbers each take longer than in a loop that is compiled; and in JAX 0.10 sums of products are
    wrong where many examples share a factor, as do the cotangents of a Jacobian.  What is handed over is told by its
    form, ``a + b``, and not by what it means: ``a - -b`` is the same number.

    Args:
      x: floats.
      axes: those that are summed over, none of them negative.
    """
    found: jax.Array = lax.reduce(x, jnp.zeros((), x.dtype), lambda a, b: a - -b, axes)
    return found
