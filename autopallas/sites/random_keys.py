"""Arrays of random keys as ``jax.random.key`` makes them, whose dtypes NumPy does not know."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from autopallas.compat import Dtype

__all__ = ["data", "dtype_named", "dtype_of", "keys"]

_IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")
"""JAX's own."""


@functools.cache
def dtype_of(implementation: str) -> Dtype:
    """Returns the dtype of the keys of an implementation, by JAX's name of it.

    Example:
      >>> dtype_of("threefry2x32")
      key<fry>
    """
    found: Dtype = jax.eval_shape(lambda: jax.random.key(0, impl=implementation)).dtype
    return found


def dtype_named(name: str) -> Dtype | None:
    """Returns the dtype of a name, if it is that of keys of one of JAX's own implementations.

    Example:
      >>> dtype_named("key<fry>"), dtype_named("float32")
      (key<fry>, None)
    """
    return next((dtype for dtype in map(dtype_of, _IMPLEMENTATIONS) if dtype.name == name), None)


def data(array: jax.Array) -> jax.Array:
    """Returns an array that holds no keys: the words of keys, uint32[..., words], or the array itself.

    Example:
      >>> data(jax.random.key(7, impl="threefry2x32"))
      Array([0, 7], dtype=uint32)
    """
    return jax.random.key_data(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array


def keys(dtype: Dtype, shape: Sequence[int], seed: int) -> jax.Array:
    """Returns different keys.

    Args:
      dtype: that of the keys of one of JAX's own implementations.
      shape: shape of the result.
      seed: where they come from.

    Raises:
      ValueError: the keys are of another implementation.

    Example:
      >>> keys(dtype_of("rbg"), (2, 3), 0).shape
      (2, 3)
    """
    own = next((name for name in _IMPLEMENTATIONS if dtype_of(name) == dtype), None)
    if own is None:
        raise ValueError(f"{dtype} is the dtype of none of JAX's own keys")
    return jax.random.split(jax.random.key(seed, impl=own), tuple(shape))
