"""What the steps of a loop write: slices of arrays, and sums over the steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from autopallas.compat import Dtype
from autopallas.kernels.respelling.exact_sums import Sums, added_exactly
from autopallas.kernels.respelling.step_evaluation import SUMMED

__all__ = ["Written", "empty", "whole_of", "with_step"]

Written: TypeAlias = list["jax.Array | Sums"]
"""What the steps have written so far: arrays with slices, and sums."""


def empty(shape: Sequence[int], dtype: Dtype, axis: int) -> jax.Array | Sums:
    """Returns an array of zeros for what the steps give; a sum of floats has what rounding lost beside it."""
    if axis != SUMMED or not jnp.issubdtype(dtype, jnp.inexact):
        return jnp.zeros(shape, dtype)
    zeros = jnp.zeros(shape, jnp.promote_types(dtype, jnp.float32))
    return zeros, zeros


def whole_of(written: jax.Array | Sums) -> jax.Array:
    """Returns what all steps have written."""
    return written[0] if isinstance(written, tuple) else written


def with_step(written: jax.Array | Sums, own: jax.Array, t: jax.Array, axis: int) -> jax.Array | Sums:
    """Returns an array with what step t gives."""
    if isinstance(written, tuple):
        return added_exactly(*written, own.astype(written[0].dtype))
    if axis == SUMMED:
        return written + own.astype(written.dtype)
    return lax.dynamic_update_slice_in_dim(written, own, t, axis)
