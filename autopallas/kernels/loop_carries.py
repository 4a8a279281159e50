"""Makes the arrays that loops begin with, so that they take XLA's CPU compiler little time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from autopallas.compat import Dtype
from autopallas.sites.device import Device

__all__ = ["filled"]


def filled(shape: Sequence[int], dtype: Dtype, value: float = 0.0) -> jax.Array:
    """Returns an array of one number, which a loop carries and writes.

    On CPUs the numbers are written along one axis: XLA's compiler takes half as long over that as over four axes, and
    compiles arrays of one size once.  Without the barrier it would give the numbers the shape in which they are read.
    """
    if Device.current().platform != "cpu" or len(shape) < 2:
        return jnp.full(shape, value, dtype)
    flat: jax.Array = lax.optimization_barrier(jnp.full(math.prod(shape), value, dtype))
    return flat.reshape(shape)
