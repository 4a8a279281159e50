"""The arguments of random programs, and what programs do with their results to be differentiated."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["integers", "mask", "normal", "wave"]


def normal(draw: np.random.Generator, shape: tuple[int, ...], dtype: str, scale: float, offset: float) -> jax.Array:
    """Normally distributed numbers."""
    return jnp.asarray(draw.standard_normal(shape) * scale + offset, dtype)


def integers(draw: np.random.Generator, shape: tuple[int, ...], low: int, high: int, dtype: str) -> jax.Array:
    """Whole numbers from ``low`` to ``high``, the latter included."""
    return jnp.asarray(draw.integers(low, high, shape, endpoint=True), dtype)


def mask(draw: np.random.Generator, shape: tuple[int, ...], dtype: str, empty: bool) -> jax.Array:
    """True or 1 for two in three.  Unless ``empty``, the first of each row is."""
    kept = draw.random(shape) < 0.65
    if shape:
        kept[..., 0] |= not empty
    if empty and len(shape) > 1:
        kept[..., shape[-2] // 2, :] = False
    return jnp.asarray(kept, dtype)


def wave(tree: Any) -> Any:
    """A cotangent for each element of a result, no two alike."""
    return jax.tree.map(lambda x: jnp.sin(jnp.arange(x.size) * 0.7 + 0.3).reshape(x.shape).astype(x.dtype), tree)
