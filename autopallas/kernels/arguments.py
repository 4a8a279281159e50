"""Checks the arguments of public functions, with errors that name the argument."""

from __future__ import annotations

from typing import TypeAlias

import jax
import jax.numpy as jnp

__all__ = ["check_block_sizes", "check_floating", "kind", "require"]

Array: TypeAlias = jax.Array


def require(condition: bool, message: str) -> None:
    """Raises ValueError with a message where a condition does not hold."""
    if not condition:
        raise ValueError(message)


def kind(x: object) -> str:
    """Returns the dtype of an array, or the name of the type of anything else."""
    return str(getattr(x, "dtype", type(x).__name__))


def check_floating(name: str, x: Array) -> None:
    """Raises TypeError for anything but a floating-point array."""
    if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name} must be a floating-point array, not {kind(x)}; convert it")


def check_block_sizes(given: object, wanted: type) -> None:
    """Raises TypeError for block sizes that are given and not those of the operation."""
    if given is not None and not isinstance(given, wanted):
        raise TypeError(f"block_sizes is a {type(given).__name__}; pass {wanted.__module__}.{wanted.__name__}")
