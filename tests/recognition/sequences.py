"""Sequences of tokens with labels, as public losses take them, and lists of such losses."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from support.catalogue import array

__all__ = ["B", "D", "T", "V", "arguments"]

B, T, D, V = 2, 6, 4, 11


def arguments(dtype: Any = jnp.float32) -> tuple[Any, Any, Any]:
    """w [D, V], x [B, T, D], y [B, T]."""
    labels = jnp.arange(B * T).reshape(B, T) * 5 % V
    return array(D, V, dtype=dtype, seed=1), array(B, T, D, dtype=dtype, seed=2), labels
