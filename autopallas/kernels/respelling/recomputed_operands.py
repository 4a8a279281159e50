"""Finds operands that XLA computes anew in a loop of the program, and writes once for its library."""

from __future__ import annotations

import math

from autopallas.graph import Graph, Node
from autopallas.graph.custom_rules import is_elementwise_call
from autopallas.graph.edit import surviving

__all__ = ["FOR_OTHERS", "is_computed_for_others"]

FOR_OTHERS = "computed_for_others"
"""Parameter of a respelling whose operand is such, for which rows hold from a greater gain on."""

_CHEAP = frozenset(
    "abs add add_any and clamp convert_element_type integer_pow max min mul neg not or select_n sign square sub".split()
)
"""Primitives that the compiler computes anew in each loop that reads their result."""
_LAYOUT = frozenset({"expand_dims", "reshape", "squeeze"})
_FARTHEST = 16
"""Equations that are looked at to learn of what an operand is computed."""


def is_computed_for_others(graph: Graph, node: Node, deeply: bool = False) -> bool:
    """Returns whether an operand of an equation costs little to compute, and other equations read it too.

    Args:
      graph: of the program.
      node: the equation.
      deeply: whether all counts that the operand is computed of at little cost, and not what is negated alone.
    """
    passed = _LAYOUT | _CHEAP if deeply else _LAYOUT | {"neg"}
    least = max(math.prod(graph.shape(number)) for number in node.inputs)
    todo, seen = [(node, number) for number in node.inputs], {node}
    while todo and len(seen) < _FARTHEST:
        reader, number = todo.pop()
        definition = graph.definitions.get(number)
        if definition is None or definition in seen or math.prod(graph.shape(number)) < least:
            continue
        seen.add(definition)
        if definition.name in _CHEAP and _has_other_readers(graph, number, reader):
            return True
        if definition.name in passed or deeply and is_elementwise_call(definition.equation):
            todo += [(definition, n) for n in definition.inputs if n not in graph.literals]
    graph.steps.spend(len(seen))
    return False


def _has_other_readers(graph: Graph, number: int, reader: Node) -> bool:
    if number in graph.returned or number in graph.read:
        return True
    alive = surviving(graph)
    return any(user is not reader and not alive.isdisjoint(user.outputs) for user in graph.users.get(number, ()))
