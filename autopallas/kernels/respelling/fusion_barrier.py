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
      alike: something of the same type that takes little time to compile; it never runs.  An operand of that type takes
        its place, which needs nothing to be compiled.
      operands: arrays.
    """
    taken = lax.optimization_barrier(jnp.asarray(True))
    type_ = jax.eval_shape(alike, *operands)
    same = [i for i, x in enumerate(operands) if (x.shape, x.dtype) == (type_.shape, type_.dtype)]
    result: jax.Array = lax.cond(taken, function, (lambda *given: given[same[0]]) if same else alike, *operands)
    return result
