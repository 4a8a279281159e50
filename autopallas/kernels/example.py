"""Makes arrays to try kernels on: floats as after a normalisation, and the base of every operation's example inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from autopallas.compat import Shaped
from autopallas.numerics.casts import is_floating
from autopallas.sites import random_keys

__all__ = ["decaying", "harmless", "normal"]

Array = np.ndarray


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
        if is_floating(dtype):
            return np.asarray(random.uniform(0.5, 1.5, kind.shape), dtype)
        return np.full(kind.shape, dtype == np.bool_, dtype)

    return [one(kind) for kind in types]


def decaying(arrays: Sequence[Array]) -> list[Array]:
    """Returns arrays whose floats are a tenth: a loop computes decays of them, such as exponentials, and its states
    would overflow."""
    return [(array * 0.1).astype(array.dtype) if is_floating(array.dtype) else array for array in arrays]
