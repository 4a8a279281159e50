"""Finds the products of two projections among the values of a program, in one pass over its equations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import jax.numpy as jnp

from autopallas.graph import Graph, Node
from autopallas.graph.custom_rules import ELEMENTWISE, is_elementwise_call
from autopallas.graph.labels import is_product
from autopallas.patterns.forward import LAYOUT, in_backward

__all__ = ["MOVES", "Candidate", "candidates", "is_elementwise", "is_joined"]

_CUT = frozenset({"slice", "split", "squeeze", "unstack", "reshape", "gather", "dynamic_slice"})
MOVES = LAYOUT | _CUT | {"concatenate", "stack"}
"""Changes of layout, and parts of arrays."""
_JOINS = frozenset({"mul", "div"})
_FURTHER = frozenset({"mul", "div", "neg", "convert_element_type"})
"""Operations on a product of both that still give such a product."""
_LONGEST = 16
"""Most steps from a product to what is made of it."""

Candidate: TypeAlias = tuple[Node, Node | None]
"""The node that gives the hidden units, and the one of the product that reads them, if there is one."""

_Sources: TypeAlias = frozenset[int]
_NONE: _Sources = frozenset()
_MANY: _Sources = frozenset({-1, -2, -3})
"""Stands for more contractions than two."""


class _Origins:
    """Knows from which contractions each value comes by elementwise operations and changes of layout alone.

    Attributes:
      of: by number, the contractions; :data:`_MANY` for more than two.
      cut: the values on the way to which a part of an array was taken.
    """

    def __init__(self, graph: Graph):
        self.of: dict[int, _Sources] = {}
        self.cut: set[int] = set()
        of = self.of
        for node in graph.nodes:
            if node.name == "dot_general" and not is_product(node):
                of[node.outputs[0]] = frozenset(node.outputs)
            elif node.name in MOVES or node.name == "dot_general" or is_elementwise(node):
                given = [of[i] for i in node.inputs if i in of]
                if given:
                    own = given[0] if len(given) == 1 else given[0].union(*given[1:])
                    of.update(dict.fromkeys(node.outputs, own if len(own) <= 2 else _MANY))
                    if node.name in _CUT or not self.cut.isdisjoint(node.inputs):
                        self.cut.update(node.outputs)

    def joins(self, node: Node) -> bool:
        """Returns whether a node multiplies what comes from one contraction with what comes from another, or from
        another part of the same."""
        if not (node.name in _JOINS or is_product(node)) or len(node.inputs) != 2:
            return False
        first, second = self.of.get(node.inputs[0], _NONE), self.of.get(node.inputs[1], _NONE)
        if len(first) != 1 or len(second) != 1 or node.inputs[0] == node.inputs[1]:
            return False
        return first != second or all(i in self.cut for i in node.inputs)


def is_elementwise(node: Node) -> bool:
    """Returns whether a node computes each element of its result from the same element of its operands."""
    return len(node.outputs) == 1 and (node.name in ELEMENTWISE or is_elementwise_call(node.equation))


def candidates(graph: Graph, alive: frozenset[int]) -> Iterator[Sequence[Candidate]]:
    """Yields the places where hidden units may be computed, each as what to try, the best first: with the product that
    reads them, without it, and without what else is done to the product of both projections."""
    origins = _Origins(graph)
    seen: set[int] = set()
    for node in graph.nodes:
        if not origins.joins(node) or node.outputs[0] not in alive or in_backward(node):
            continue
        if not jnp.issubdtype(graph.dtype(node.outputs[0]), jnp.floating):
            continue
        top = _top(graph, origins, node, alive)
        if top.outputs[0] in seen:
            continue
        seen.add(top.outputs[0])
        tries: list[Candidate] = [(top, reader) for reader in _readers(graph, top, alive)]
        tries.append((top, None))
        if top is not node:
            tries.append((node, None))
        yield tries


def _top(graph: Graph, origins: _Origins, node: Node, alive: frozenset[int]) -> Node:
    """Returns the last value that is still a product of both: with casts, known factors and further factors of them."""
    for _ in range(_LONGEST):
        own = origins.of[node.outputs[0]]
        further = [
            user
            for user in graph.users[node.outputs[0]]
            if user.name in _FURTHER
            and not alive.isdisjoint(user.outputs)
            and origins.of[user.outputs[0]] == own
            and user.inputs.count(node.outputs[0]) == 1
            and not in_backward(user)
        ]
        if len(further) != 1:
            return node
        node = further[0]
    return node


def is_joined(graph: Graph, node: Node) -> bool:
    """Returns whether contractions read a value beside others in one array alone, as a block's output projection reads
    what its attention and its gated MLP compute."""
    return bool(_readers(graph, node, None, joined=True)) and not _readers(graph, node, None)


def _readers(graph: Graph, node: Node, alive: frozenset[int] | None, joined: bool = False) -> list[Node]:
    """Returns the contractions that read a value, perhaps in another layout; with ``joined``, also those that read it
    beside others in one array.  Without ``alive``, what nothing needs counts too."""
    through = LAYOUT | {"concatenate"} if joined else LAYOUT
    found: list[Node] = []
    todo = [(node.outputs[0], 0)]
    while todo:
        number, depth = todo.pop()
        for user in graph.users[number]:
            if (alive is not None and alive.isdisjoint(user.outputs)) or in_backward(user):
                continue
            if user.name == "dot_general" and not is_product(user):
                found.append(user)
            elif user.name in through and depth < 4:
                todo.append((user.outputs[0], depth + 1))
    return found[:4]
