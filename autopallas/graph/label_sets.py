"""Splits gathers of several elements per row, such as the logits of the best labels, into one gather per element.

``take_along_axis(z, labels)`` with K labels per row equals K gathers of one label per row, side by side; the scatter of
its derivative is the sum of K scatters.  A kernel picks one element per row.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import lax

from autopallas.compat import JaxprEqn, Literal, Var

__all__ = ["apart", "gathered", "label_set", "scattered"]

_MOST = 16
"""Largest number of labels per row: each is compared with every position of the vocabulary."""


def label_set(equation: JaxprEqn) -> tuple[Var, int] | None:
    """Returns the indices of a gather or scatter of several elements of each row, and their axis along which these lie.

    All axes of the operand except one are batch axes of the indices, so that the row is known.
    """
    numbers, indices = equation.params["dimension_numbers"], equation.invars[1]
    if equation.primitive.name == "gather":
        windows, gone, along = numbers.offset_dims, numbers.collapsed_slice_dims, numbers.start_index_map
        batching = numbers.start_indices_batching_dims
        if any(size != 1 for size in equation.params["slice_sizes"]):
            return None
    else:
        windows, gone = numbers.update_window_dims, numbers.inserted_window_dims
        along, batching = numbers.scatter_dims_to_operand_dims, numbers.scatter_indices_batching_dims
    rank = len(equation.invars[0].aval.shape)
    if windows or len(along) != 1 or tuple(gone) != tuple(along) or len(batching) != rank - 1:
        return None
    if isinstance(indices, Literal):
        return None
    shape = indices.aval.shape
    several = [d for d, n in enumerate(shape[:-1]) if d not in batching and n != 1]
    if len(several) != 1 or not 1 < shape[several[0]] <= _MOST:
        return None
    return indices, several[0]


def apart(array: jax.Array, axis: int) -> Sequence[jax.Array]:
    """Splits an array along an axis into its elements, each of which keeps the axis with size 1."""
    return [lax.slice_in_dim(array, k, k + 1, 1, axis) for k in range(array.shape[axis])]


def gathered(equation: JaxprEqn, axis: int, array: jax.Array, indices: jax.Array) -> jax.Array:
    """Computes a gather as one gather for each label."""
    return lax.concatenate([equation.primitive.bind(array, i, **equation.params) for i in apart(indices, axis)], axis)


def scattered(equation: JaxprEqn, axis: int, zeros: jax.Array, indices: jax.Array, updates: jax.Array) -> jax.Array:
    """Computes a scatter into zeros as the sum of one scatter for each label."""
    found: jax.Array | None = None
    for index, update in zip(apart(indices, axis), apart(updates, axis), strict=True):
        one = equation.primitive.bind(zeros, index, update, **equation.params)
        found = one if found is None else lax.add(found, one)
    assert found is not None
    return found
