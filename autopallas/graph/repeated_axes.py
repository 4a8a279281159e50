"""Tells along which dimensions a value may vary, as far as the equations before it say so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopallas.graph.custom_rules import ELEMENTWISE

if TYPE_CHECKING:
    from autopallas.graph.numbering import Graph

__all__ = ["varies"]

_MOST = 8
"""Largest number of equations to look through."""


def varies(graph: Graph, number: int, most: int = _MOST) -> tuple[bool, ...]:
    """Returns for each dimension of a value whether it may vary along it: what is broadcast does not.

    Args:
      graph: the program.
      number: the value.
      most: how many equations before it are looked at, one after the other.
    """
    shape = graph.shape(number)
    node = graph.definitions.get(number)
    if number in graph.literals or node is None or len(node.outputs) != 1 or most <= 0:
        return (True,) * len(shape)
    if node.name == "broadcast_in_dim" and len(node.inputs) == 1:
        own, before = varies(graph, node.inputs[0], most - 1), graph.shape(node.inputs[0])
        found = [False] * len(shape)
        for axis, place in enumerate(node.params["broadcast_dimensions"]):
            found[int(place)] = own[axis] and before[axis] == shape[int(place)]
        return tuple(found)
    if len(node.inputs) <= 2 and node.name in ELEMENTWISE:
        each = [varies(graph, n, most // 2) for n in node.inputs if graph.shape(n)]
        if all(len(own) == len(shape) for own in each) and each:
            return tuple(any(own[axis] for own in each) for axis in range(len(shape)))
    return (True,) * len(shape)
