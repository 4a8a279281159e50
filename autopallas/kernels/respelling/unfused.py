"""Keeps a computation apart from what is around it, where XLA would fuse it with that."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from autopallas.compat import ArrayFunction

__all__ = ["unfused"]


def unfused(function: ArrayFunction, alike: ArrayFunction, *operands: jax.Array) -> jax.Array:
    """Computes a function in a branch that is always taken.

    XLA fuses no branch with what is around it.  Elementwise equations, fused with what computes their operands, compute
    that anew for each element that they read.  A barrier does not keep them apart, since XLA removes barriers before it
    fuses, but it hides that the branch is taken.

    Args:
      function: what is computed of the operands, an array.
      alike: something of the same type that takes little time to compile; it never runs.
      operands: arrays.
    """
    taken = lax.optimization_barrier(jnp.asarray(True))
    result: jax.Array = lax.cond(taken, function, alike, *operands)
    return result
