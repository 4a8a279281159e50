"""Finds losses that take the sigmoid of each logit, such as one of all pairs of images and texts: near misses, since no
kernel computes them.

The anchor is the logarithm of a sigmoid. What is computed of it has to be linear up to a sum over rows and columns, as
in a loss; and what it is computed of has to come from a product whose operands both have an axis of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Set

from autopallas import jaxprs
from autopallas.compat import JaxprLike, is_transposed
from autopallas.graph import Graph, Node
from autopallas.graph.custom_rules import is_elementwise_call
from autopallas.graph.labels import is_product
from autopallas.patterns.advice import SIGMOIDS
from autopallas.patterns.forward import LAYOUT
from autopallas.patterns.match import NearMiss

__all__ = ["sigmoid_losses"]

_MOVES = LAYOUT | {"convert_element_type", "copy", "copy_p", "name", "neg", "slice", "concatenate"}
_SUMS = frozenset({"add", "add_any", "sub"})
_SCALES = frozenset({"mul", "div", "select_n"})
_BOUNDS = frozenset({"max", "min", "clamp", "abs", "integer_pow", "tanh"})
_LONGEST = 64
"""Most values through which a loss is followed from a logarithm in either direction."""


def sigmoid_losses(graph: Graph, needed: Set[int]) -> Iterator[NearMiss]:
    """Yields a near miss for each product of whose logits a loss takes the sigmoids.

    Args:
      graph: the program.
      needed: the values that are needed where other sites are replaced.
    """
    said: set[int] = set()
    for node in graph.nodes:
        if len(node.outputs) != 1 or node.outputs[0] not in needed or not _is_logarithm_of_sigmoid(graph, node):
            continue
        logits, dots = _before(graph, node)
        dots = [dot for dot in dots if dot.outputs[0] in needed and _has_rows_and_columns(graph, dot)]
        if not dots or not said.isdisjoint(dot.outputs[0] for dot in dots):
            continue
        if _is_added_up(graph, node.outputs[0], logits):
            said.update(dot.outputs[0] for dot in dots)
            dot = max(dots, key=lambda dot: math.prod(graph.shape(dot.outputs[0])))
            where = jaxprs.location(node.equation)
            reason = f"the loss takes the sigmoid of each logit, not the softmax of each row, at {where}"
            yield NearMiss("cross_entropy", jaxprs.location(dot.equation), reason, dot.outputs[0], SIGMOIDS)


def _is_logarithm_of_sigmoid(graph: Graph, node: Node) -> bool:
    """Returns whether a node gives a softplus, ``log1p(exp(z))``, or ``log(sigmoid(z))``."""
    if is_elementwise_call(node.equation):
        return any(_takes_logarithm(body) for _, _, body in jaxprs.bodies(node.equation))
    if node.name not in ("log", "log1p"):
        return False
    at = node.inputs[0]
    for _ in range(_LONGEST):
        before = graph.definitions.get(at)
        if before is None:
            return False
        if before.name == "logistic" or (before.name == "exp" and node.name == "log1p"):
            return True
        varying = [i for i in before.inputs if i not in graph.literals]
        if len(varying) != 1 or before.name not in ("max", "min", "clamp", "add", "sub", *_MOVES):
            return False
        (at,) = varying
    return False


def _takes_logarithm(body: JaxprLike) -> bool:
    """Returns whether a function takes ``log1p`` of an exponential."""
    equations = jaxprs.open_jaxpr(body)[0].eqns
    names = {equation.primitive.name for equation in equations}
    return {"log1p", "exp"} <= names or any(_takes_logarithm(b) for e in equations for _, _, b in jaxprs.bodies(e))


def _before(graph: Graph, node: Node) -> tuple[set[int], list[Node]]:
    """Returns the values on the ways from products to a logarithm, elementwise and through changes of layout, and these
    products."""
    found: set[int] = set()
    dots: list[Node] = []
    todo = [*node.inputs]
    while todo and len(found) < _LONGEST:
        value = todo.pop()
        before = graph.definitions.get(value)
        if value in found or value in graph.literals or before is None:
            continue
        found.add(value)
        if before.name == "dot_general" and not is_product(before):
            dots.append(before)
        elif before.name in _MOVES | _SUMS | _SCALES | _BOUNDS | {"exp", "logistic"} or is_product(before):
            todo += before.inputs
    return found, dots


def _has_rows_and_columns(graph: Graph, dot: Node) -> bool:
    """Returns whether both operands of a contraction have several elements along axes that only they have."""
    contracting, batch = dot.params["dimension_numbers"]
    for number, summed, shared in zip(dot.inputs, contracting, batch, strict=True):
        if math.prod(n for axis, n in enumerate(graph.shape(number)) if axis not in (*summed, *shared)) < 2:
            return False
    return True


def _is_added_up(graph: Graph, logarithm: int, logits: Set[int]) -> bool:
    """Returns whether a value is a term of a loss: it is weighted by what the logits do not give, and added up over at
    least two axes, or over all that there are, and nothing else is computed of it before that."""
    summed: dict[int, int] = {logarithm: 0}
    """Values that depend on the logarithm linearly, with the number of axes over which it was summed before."""
    todo = [logarithm]
    while todo and len(summed) < _LONGEST:
        value = todo.pop()
        axes = summed[value]
        if axes >= 2 or (axes and math.prod(graph.shape(value)) == 1):
            return True
        for user in graph.users[value]:
            if user.body.transposed or is_transposed(user.equation):  # gradients of what is no loss are added up too
                continue
            if user.name == "reduce_sum":
                shape = graph.shape(value)
                after = axes + sum(shape[axis] > 1 for axis in user.params["axes"])
            elif _is_linear(user, value, logits, summed.keys()):
                after = axes
            else:
                continue
            for result in user.outputs:
                if result not in summed:
                    summed[result] = after
                    todo.append(result)
    return False


def _is_linear(user: Node, value: int, logits: Set[int], terms: Set[int]) -> bool:
    """Returns whether a result depends linearly on an operand, whatever the others are but the logits themselves."""
    if user.name in _MOVES or user.name in _SUMS:
        return True
    if user.name not in _SCALES and not is_product(user):
        return False
    if user.inputs[0] != value and (user.name == "div" or (user.name == "select_n" and user.inputs[0] in terms)):
        return False
    return user.name == "select_n" or logits.isdisjoint(user.inputs)
