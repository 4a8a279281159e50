"""Follows a sum over some rows to the sum over further rows that alone reads it: the two are one sum."""

from __future__ import annotations

from collections.abc import Set

import jax.numpy as jnp

from autopallas.graph import Graph, Node, Space
from autopallas.graph.labels import Atom, Dimension, View

__all__ = ["summed_further"]

_AXES_OF_SIZE_ONE = frozenset({"reshape", "squeeze", "expand_dims", "broadcast_in_dim"})
"""Primitives that may do nothing but add or drop axes of size one."""


def summed_further(graph: Graph, space: Space, node: Node, view: View, free: Set[Atom]) -> tuple[Node, View, Set[Atom]]:
    """Returns the sum that ends a sum over some rows, its dimensions, and the rows over which it does not run.

    Such are the sums that make the gradient of a bias which each example under ``vmap`` repeats for all of its rows.
    Between them may stand axes of size one, and casts of floats, whose rounding is then left out.

    Args:
      graph, space: the program, and the labels of its values.
      node: a ``reduce_sum`` over rows.
      view: the dimensions of its result.
      free: the rows over which it does not run, though it might.
    """
    last, seen = node, view
    while free and last.outputs[0] not in graph.returned:
        users = {id(user): user for user in graph.users[last.outputs[0]]}
        following = next(iter(users.values()), None)
        if len(users) != 1 or following is None or following.body is not node.body:
            break
        if following.name == "reduce_sum":
            axes = set(following.params["axes"])
            reduced = {atom for axis in axes for atom in space.resolve(seen[axis][1])}
            if not reduced <= free:
                break
            last, seen = following, tuple(dimension for axis, dimension in enumerate(seen) if axis not in axes)
            if reduced:
                node, view, free = last, seen, free - reduced
        else:
            restated = _restated(graph, last, following, seen)
            if restated is None:
                break
            last, seen = following, restated
    return node, view, free


def _restated(graph: Graph, node: Node, following: Node, view: View) -> View | None:
    """Returns the dimensions of a value that was cast, or to which axes of size one were added, or from which they were
    dropped; None where more is done than that."""
    number, result = node.outputs[0], following.outputs[0]
    if following.name == "convert_element_type":
        return view if all(jnp.issubdtype(graph.dtype(n), jnp.floating) for n in (number, result)) else None
    if following.name not in _AXES_OF_SIZE_ONE:
        return None
    before, after = graph.shape(number), graph.shape(result)
    if [size for size in before if size != 1] != [size for size in after if size != 1]:
        return None
    larger = iter([dimension for dimension, size in zip(view, before, strict=True) if size != 1])
    one: Dimension = (0, ())
    return tuple(one if size == 1 else next(larger) for size in after)
