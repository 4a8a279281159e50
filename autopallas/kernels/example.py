"""Makes arrays to try kernels on: floats as after a normalisation, and the base of every operation's example inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from autopallas.compat import Dtype, Shaped
from autopallas.sites import random_keys

__all__ = ["harmless", "is_float", "normal"]

Array = np.ndarray


def is_float(dtype: Dtype) -> bool:
    """Returns whether arrays of the dtype hold real numbers: NumPy's floats, bfloat16 and the like."""
    return bool(jnp.issubdtype(dtype, jnp.floating))


def normal(random: np.random.Generator, shape: Sequence[int], dtype: DTypeLike, scale: float = 1.0) -> Array:
    """Returns normally distributed numbers."""
    return np.asarray(random.standard_normal(tuple(shape), np.float32) * np.float32(scale), dtype)


def harmless(random: np.random.Generator, types: Sequence[Shaped]) -> list[Array]:
    """Returns one array for each operand of a site, before the operation fills in those with a meaning.

    Args:
      random: where the numbers come from.
      types: what has a shape and a dtype.

    Returns:
      Positive numbers around 1, for a logarithm may be taken of them; True; zeros; random keys, as JAX's arrays.
    """

    def one(kind: Shaped) -> Array:
        if jnp.issubdtype(kind.dtype, jax.dtypes.prng_key):
            return cast(Array, random_keys.keys(kind.dtype, kind.shape, int(random.integers(2**31))))
        dtype = np.dtype(kind.dtype)
        if is_float(dtype):
            return np.asarray(random.uniform(0.5, 1.5, kind.shape), dtype)
        return np.full(kind.shape, dtype == np.bool_, dtype)

    return [one(kind) for kind in types]
