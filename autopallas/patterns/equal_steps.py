"""What all finders of equal steps look at: equations by body, those that occur often, and what equal ones share."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import TypeAlias

from autopallas.graph import Graph, Node
from autopallas.graph.keys import hashable

__all__ = ["Named", "by_body", "kind_of", "often"]

Named: TypeAlias = tuple[Node, Hashable]
"""An equation, and its name with the shape of its first result."""


def by_body(graph: Graph, holds: Callable[[Node], bool]) -> list[list[Node]]:
    """Returns the equations that steps may hold, those of each body together."""
    parts: dict[int, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        if holds(node):
            parts[id(node.body)].append(node)
    graph.steps.spend(len(graph.nodes))
    return [*parts.values()]


def often(graph: Graph, nodes: Sequence[Node], least: int) -> list[Named]:
    """Returns the equations of whose name and shape there are at least so many."""
    avals = graph.avals
    named = [(node.name, avals[node.outputs[0]].shape) for node in nodes]
    counts = Counter(named)
    return [(node, name) for node, name in zip(nodes, named, strict=True) if counts[name] >= least]


def kind_of(graph: Graph, node: Node) -> tuple[Hashable, ...]:
    """Returns what equations of the same position in two steps have in common, but for where operands come from and
    whether types are weak."""
    avals = graph.avals
    types = tuple([(aval.shape, aval.dtype) for n in (*node.inputs, *node.outputs) for aval in (avals[n],)])
    said: Hashable = ()
    if node.params:
        number = graph.parameters(node.equation)
        said = hashable(node.params) if number is None else number
    return node.name, said, types
