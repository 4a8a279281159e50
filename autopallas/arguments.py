"""Splits the arguments of a call into arrays, which a trace can follow, and leaves that are held fixed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.typing import ArrayLike

from autopallas.compat import Array, PyTree

__all__ = ["Untraceable", "join", "split", "traceable"]


class Untraceable(TypeError):
    """Raised for a value that no trace can follow, such as a string or an arbitrary object."""


@dataclass(frozen=True, slots=True)
class Static:
    """The part of a call that is held fixed: its structure, and the leaves that are not arrays.

    It is hashable, and equal only for leaves of the same type: 1, 1.0 and True are different arguments.
    """

    structure: jax.tree_util.PyTreeDef
    leaves: tuple[tuple[type, object] | None, ...]
    """Per leaf: None for an array, otherwise (type, value)."""


def traceable(leaf: object) -> bool:
    """Returns whether ``jax.jit`` accepts a leaf of this type."""
    return (
        isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int, float, complex))
        or hasattr(leaf, "__jax_array__")
        or hasattr(leaf, "aval")
        or (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))
    )


def _is_array(leaf: object) -> bool:
    return traceable(leaf) and not isinstance(leaf, (bool, int, float, complex)) or isinstance(leaf, np.generic)


def split(args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> tuple[list[Array], Static]:
    """Returns (the arrays among the leaves, the rest)."""
    leaves, structure = jax.tree.flatten((tuple(args), kwargs))
    arrays = [leaf for leaf in leaves if _is_array(leaf)]
    return arrays, Static(structure, tuple(None if _is_array(leaf) else (type(leaf), leaf) for leaf in leaves))


def join(static: Static, arrays: Sequence[ArrayLike]) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
    """Inverts :func:`split`."""
    left = iter(arrays)
    leaves = [next(left) if fixed is None else fixed[1] for fixed in static.leaves]
    args, kwargs = jax.tree.unflatten(static.structure, leaves)
    return args, kwargs
