"""Defines types for values inside a Pallas kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax

__all__ = ["IndexMap", "Number", "Ref", "Types"]

Ref: TypeAlias = Any
"""A reference to a kernel's memory, a part of one, or a barrier; or what asks for one. JAX gives them no type."""

Number: TypeAlias = jax.Array | int
"""A number inside a kernel or an index map: a position, a step, a condition; computed there, or known before."""

Types: TypeAlias = jax.ShapeDtypeStruct | Sequence[jax.ShapeDtypeStruct]
"""Shapes and dtypes of a kernel's results."""

IndexMap: TypeAlias = Callable[..., tuple[Number, ...]]
"""Function from the program ids and the prefetched tables to the position of a block."""
