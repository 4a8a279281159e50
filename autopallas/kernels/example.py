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

__all__ = ["decaying", "harmless", "is_drawn", "normal"]

Array = np.ndarray


def is_drawn(dtype: DTypeLike) -> bool:
    """Returns whether numbers of a dtype are drawn at random: real and complex floating ones."""
    return is_floating(np.dtype(dtype)) or _is_complex(dtype)


def _is_complex(dtype: DTypeLike) -> bool:
    return bool(np.issubdtype(dtype, np.complexfloating))


def normal(random: np.random.Generator, shape: Sequence[int], dtype: DTypeLike, scale: float = 1.0) -> Array:
    """Returns normally distributed numbers, of which complex ones have a variance of 1 in all, times a scale."""
    found = random.standard_normal(tuple(shape), np.float32) * np.float32(scale)
    if _is_complex(dtype):
        found = (found + 1j * (random.standard_normal(tuple(shape), np.float32) * np.float32(scale))) * 0.5**0.5
    return np.asarray(found, dtype)


def harmless(random: np.random.Generator, types: Sequence[Shaped]) -> list[Array]:
    """Returns one array for each operand of a site, before the operation fills in those with a meaning.

    Args:
      random: where the numbers come from.
      types: what has a shape and a dtype.

    Returns:
      Numbers around 1, positive ones or complex ones, for a logarithm may be taken of them; True; zeros; random keys,
      as JAX's arrays.
    """

    def one(kind: Shaped) -> Array:
        if jnp.issubdtype(kind.dtype, jax.dtypes.prng_key):
            return cast(Array, random_keys.keys(kind.dtype, kind.shape, int(random.integers(2**31))))
        dtype = np.dtype(kind.dtype)
        if is_floating(dtype):
            return np.asarray(random.uniform(0.5, 1.5, kind.shape), dtype)
        if _is_complex(dtype):
            return np.asarray(random.uniform(0.5, 1.5, kind.shape) + 1j * random.uniform(-1, 1, kind.shape), dtype)
        return np.full(kind.shape, dtype == np.bool_, dtype)

    return [one(kind) for kind in types]


def decaying(arrays: Sequence[Array]) -> list[Array]:
    """Returns arrays whose floats are a tenth: a loop computes decays of them, such as exponentials, and its states
    would overflow."""
    return [(array * 0.1).astype(array.dtype) if is_drawn(array.dtype) else array for array in arrays]
