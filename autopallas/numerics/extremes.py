"""The largest and the smallest number of a dtype."""

from __future__ import annotations

import jax.numpy as jnp

from autopallas.compat import Dtype

__all__ = ["extreme"]


def extreme(dtype: Dtype, largest: bool) -> float | int:
    """Returns what no number of a dtype is greater than, or less than: an infinity, of floats."""
    if jnp.issubdtype(dtype, jnp.floating):
        return float("inf") if largest else -float("inf")
    limits = jnp.iinfo(dtype)
    return int(limits.max if largest else limits.min)
