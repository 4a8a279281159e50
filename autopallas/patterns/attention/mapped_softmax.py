"""Names softmaxes that a loop computes batch by batch or head by head, between products that stand outside."""

from __future__ import annotations

from collections.abc import Iterator, Set

from autopallas import compat, jaxprs
from autopallas.graph import Graph, Node
from autopallas.graph.custom_rules import ELEMENTWISE
from autopallas.patterns.advice import SOFTMAX_AT_ONCE
from autopallas.patterns.forward import COPIES, in_backward
from autopallas.patterns.match import NearMiss

__all__ = ["mapped_softmaxes"]

_REASON = "a loop computes the softmax piece by piece, between products that stand outside of it"
_FURTHEST = 16
"""Most equations between a product and the loop."""
_EXPONENTIALS = frozenset({"exp", "exp2"})


def mapped_softmaxes(graph: Graph, alive: Set[int]) -> Iterator[NearMiss]:
    """Yields a near miss for each loop that carries nothing and normalises slices of a product, where another product
    reads what it stacks."""
    for node in graph.nodes:
        if node.name != "scan" or in_backward(node):
            continue
        constants, carried = compat.scan_parts(node.equation)
        if carried or not _normalises(node):
            continue
        products = [found for n in node.inputs[constants:] if (found := _product_before(graph, n)) is not None]
        stacked = [n for n in node.outputs if n in alive and _is_multiplied(graph, n)]
        shapes = [graph.shape(n) for n in node.inputs[constants:]]
        if products and any(graph.shape(n) in shapes for n in stacked):
            yield NearMiss("attention", jaxprs.location(node.equation), _REASON, products[0], SOFTMAX_AT_ONCE)


def _normalises(node: Node) -> bool:
    """Returns whether a step exponentiates and sums, and multiplies no matrices."""
    inner = (body for _, _, body in jaxprs.bodies(node.equation))
    names = {equation.primitive.name for equation in jaxprs.every_equation(*inner)}
    return not names.isdisjoint(_EXPONENTIALS) and "reduce_sum" in names and "dot_general" not in names


def _product_before(graph: Graph, number: int) -> int | None:
    """Returns the result of a contraction from which a value comes element by element."""
    for _ in range(_FURTHEST):
        node = graph.definitions.get(number)
        if node is None:
            return None
        if node.name == "dot_general":
            return number
        if node.name not in COPIES and node.name not in ELEMENTWISE:
            return None
        shape = graph.shape(node.outputs[0])
        whole = [n for n in node.inputs if node.name in COPIES or graph.shape(n) == shape]
        number = next((n for n in whole if n in graph.definitions), node.inputs[0])
    return None


def _is_multiplied(graph: Graph, number: int) -> bool:
    """Returns whether a contraction reads a value, perhaps in another layout or dtype."""
    todo = [number]
    for _ in range(_FURTHEST):
        if not todo:
            return False
        for user in graph.users[todo.pop()]:
            if user.name == "dot_general" and not in_backward(user):
                return True
            if user.name in COPIES:
                todo += user.outputs
    return False
