"""Knows which convolutions XLA's CPU compiler hands to a library as they stand.

The library computes convolutions of up to three axes of space with the channels last.  The compiler puts the axes of
others into that order, but only outside of loops and branches (JAX 0.10 to 0.12): inside, it sums them up one element
after the other.
"""

from __future__ import annotations

from jax import lax

from autopallas.graph import Node

__all__ = ["MOST_AXES", "in_a_loop_or_branch", "is_ordered", "ordered"]

MOST_AXES = 3
"""Axes of space up to which the library computes a convolution."""


def ordered(rank: int) -> lax.ConvDimensionNumbers:
    """Returns the library's order of axes: (batch, *space, features), and (*space, features, results) of weights."""
    space = range(1, rank - 1)
    image = (0, rank - 1, *space)
    return lax.ConvDimensionNumbers(image, (rank - 1, rank - 2, *range(rank - 2)), image)


def is_ordered(numbers: lax.ConvDimensionNumbers) -> bool:
    """Returns whether a convolution has its axes in the library's order."""
    rank = len(numbers.lhs_spec)
    return (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec) == ordered(rank)


def in_a_loop_or_branch(node: Node) -> bool:
    """Returns whether an equation stands in the body of a loop or in a branch."""
    return any(part.startswith(("scan", "while", "cond")) for part in node.body.path)
