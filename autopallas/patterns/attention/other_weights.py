"""Reports what is an attention but for its weights: sigmoids or rectifiers of scores, or softmaxes of distances."""

from __future__ import annotations

from collections.abc import Iterator, Set

from autopallas import compat, jaxprs
from autopallas.graph import Graph, Node, Ref
from autopallas.graph.custom_rules import ELEMENTWISE, called_program, is_elementwise_call
from autopallas.graph.labels import Atom, is_product
from autopallas.patterns.advice import DISTANCES, POINTWISE
from autopallas.patterns.expressions import Scope
from autopallas.patterns.forward import LAYOUT
from autopallas.patterns.match import NearMiss

__all__ = ["other_weights"]

_SIGMOID = "the weights are sigmoids of the scores, each by itself: no softmax normalises them over the keys"
_RECTIFIER = "the weights are rectified scores, each by itself: no softmax normalises them over the keys"
_DISTANCE = (
    "the scores are sums of squared differences of queries and keys, and no product: kernels would lose the digits "
    "that the squares of both have in common"
)
_MOST = 24
"""Most values on the way from a product to the scores."""
_FURTHEST = 48
"""Most values behind keys and values among which their projection is looked for."""
_BEHIND = ELEMENTWISE | LAYOUT | {"concatenate", "slice", "split", "reduce_sum", "custom_jvp_call", "copy", "name"}


def other_weights(graph: Graph, alive: Set[int]) -> Iterator[NearMiss]:
    """Yields a near miss for each product of projected values and such weights of projected queries and keys."""
    if graph.primitives.isdisjoint(("logistic", "max", "square", "integer_pow")):
        return
    for node in graph.nodes:
        if node.name != "dot_general" or is_product(node) or alive.isdisjoint(node.outputs):
            continue
        if not node.params["dimension_numbers"][1][0] or node.body.transposed or compat.is_transposed(node.equation):
            continue
        reason = _reason(graph, node)
        if reason:
            advice = DISTANCES if reason == _DISTANCE else POINTWISE
            yield NearMiss("attention", jaxprs.location(node.equation), reason, node.outputs[0], advice)


def _reason(graph: Graph, node: Node) -> str:
    scope = Scope(graph)
    space = scope.space
    contraction = space.contraction(space.full(node.outputs[0]))
    if contraction is None:
        return ""
    left, right, contracted = contraction
    for weights, value in ((left, right), (right, left)):
        keys = {atom for _, own in contracted for atom in space.resolve(own)}
        batch = (space.atoms(weights) & space.atoms(value)) - keys
        if keys and batch and _is_of_inputs(graph, value.value, batch):
            reason = _of_weights(scope, weights, keys, batch)
            if reason:
                return reason
    return ""


def _of_weights(scope: Scope, weights: Ref, keys: set[Atom], batch: frozenset[Atom] | set[Atom]) -> str:
    """Follows weights back to the product or the sum of distances that they are made of."""
    space, graph = scope.space, scope.graph
    todo: list[tuple[Ref, str, bool]] = [(weights, "", False)]
    seen: set[tuple[int, str, bool]] = set()
    while todo and len(seen) < _MOST:
        ref, reason, divided = todo.pop()
        at = space.canonical(ref)
        if (at.value, reason, divided) in seen:
            continue
        seen.add((at.value, reason, divided))
        name, node = scope.name(at), graph.definitions.get(at.value)
        if node is None:
            continue
        if name == "dot_general" and not is_product(node):
            if reason in (_SIGMOID, _RECTIFIER) and _is_of_queries_and_keys(scope, at, keys, batch):
                return reason
            continue
        if name == "reduce_sum":
            if reason == _DISTANCE and divided and _is_distance(scope, at, keys):
                return reason
            continue
        operands = space.operands(at)
        if operands is None:
            continue
        divided = divided or (name == "div" and not scope.number(operands[1]))
        if name == "logistic" and not reason:
            reason = _SIGMOID
        elif _rectifies(scope, node, operands) and not reason:
            reason = _RECTIFIER
        elif scope.exponential(at) is not None:
            if reason:
                continue
            reason = _DISTANCE
        todo += [(operand, reason, divided) for operand in operands if keys & space.atoms(operand)]
    return ""


def _rectifies(scope: Scope, node: Node, operands: list[Ref]) -> bool:
    if node.name == "max":
        return any(scope.number(operand) == 0 for operand in operands)
    program = called_program(node.equation) if is_elementwise_call(node.equation) else None
    return program is not None and program.primitives == {"max"}


def _is_of_queries_and_keys(scope: Scope, scores: Ref, keys: set[Atom], batch: frozenset[Atom] | set[Atom]) -> bool:
    """Returns whether scores are a product of projected keys, and of queries that lack their axis."""
    space = scope.space
    contraction = space.contraction(scores)
    if contraction is None:
        return False
    first, second = space.atoms(contraction[0]), space.atoms(contraction[1])
    if not (batch <= first and batch <= second) or bool(keys & first) == bool(keys & second):
        return False
    key, query = (contraction[0], second) if keys & first else (contraction[1], first)
    other = first if keys & first else second
    return bool(query - other) and _is_of_inputs(scope.graph, key.value, batch)


def _is_distance(scope: Scope, total: Ref, keys: set[Atom]) -> bool:
    """Returns whether a sum is that of squares of differences, of something along the keys and something without."""
    space = scope.space
    operand, _ = space.reduced(total)
    at = space.canonical(operand)
    node, operands = scope.graph.definitions.get(at.value), space.operands(at)
    if node is None or not operands:
        return False
    squares = node.name == "square" or (node.name == "integer_pow" and node.params["y"] == 2)
    squares |= node.name == "mul" and len(operands) == 2 and space.same(*operands)
    difference = space.canonical(operands[0])
    terms = space.operands(difference) if squares and scope.name(difference) == "sub" else None
    return bool(terms) and [bool(keys & space.atoms(term)) for term in terms or ()].count(True) == 1


def _is_of_inputs(graph: Graph, number: int, batch: frozenset[Atom] | set[Atom]) -> bool:
    """Returns whether a value is no parameter: it is made of a product, as of activations and a matrix, or all three
    operands have two axes of a batch, as of examples and heads; those of several models have one."""
    if len(batch) > 1:
        return True
    todo, seen = [number], set[int]()
    while todo and len(seen) < _FURTHEST:
        node = graph.definitions.get(own := todo.pop())
        if own in seen or node is None:
            continue
        seen.add(own)
        if node.name == "dot_general":
            return True
        if node.name in _BEHIND:
            todo += node.inputs
    return False
