"""Runs loops whose steps hand on to the next one the slices that it will read.

XLA's CPU compiler fuses the reading of a slice, whose place it does not know, with what is computed of it, and then
computes some of that one number after the other.  What a loop carries lies in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from autopallas.kernels.respelling.chunks import Arrays

__all__ = ["scan_ahead"]


def scan_ahead(
    step: Callable[[Arrays, Arrays, Arrays], tuple[Arrays, Arrays]],
    first: Arrays,
    slices: Sequence[jax.Array],
    ahead: Sequence[jax.Array],
    length: int,
    *,
    reverse: bool,
    unroll: int,
) -> tuple[Arrays, Arrays]:
    """Runs a loop.

    Args:
      step: from what is carried, the step's ``slices``, and those of ``ahead``, to what is carried on, and results.
      first: what is carried at the beginning.
      slices: arrays of which each step reads a slice along the first axis.
      ahead: the same, of arrays whose slices are read by the step before.
      length: the number of steps.
      reverse: whether the last slices come first.
      unroll: steps that are compiled as one.

    Returns:
      What is carried at the end, and the results of all steps along the first axis.
    """
    if not ahead:
        return lax.scan(
            lambda carried, own: step(carried, own, []), first, list(slices), length, reverse, unroll=unroll
        )
    last = length - 1

    def at(t: jax.Array | int) -> Arrays:
        return [lax.dynamic_index_in_dim(x, t, 0, keepdims=False) for x in ahead]

    def one(state: tuple[Arrays, Arrays], own: tuple[Arrays, jax.Array]) -> tuple[tuple[Arrays, Arrays], Arrays]:
        carried, results = step(state[0], own[0], state[1])
        following = jnp.maximum(own[1] - 1, 0) if reverse else jnp.minimum(own[1] + 1, last)
        return (carried, at(following)), results

    state, numbers = (first, at(last if reverse else 0)), jnp.arange(length, dtype=jnp.int32)
    (ends, _), found = lax.scan(one, state, (list(slices), numbers), length, reverse, unroll=unroll)
    return ends, found
