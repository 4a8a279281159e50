"""Tells of gated MLPs whose projections add up several products, as those with low-rank adapters (LoRA) do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from autopallas import jaxprs
from autopallas.graph import Graph, Node
from autopallas.graph.labels import is_product
from autopallas.patterns.forward import COPIES, in_backward
from autopallas.patterns.gated_mlp.candidates import MOVES, is_elementwise
from autopallas.patterns.match import NearMiss

__all__ = ["with_adapters"]

_REASON = "a projection adds up several products, such as one of weights and one of a low-rank adapter"
_ADVICE = (
    "Add what an adapter learnt to the weights where it is not trained: x @ (w + scale * a @ b). The kernel computes "
    "each projection as one product."
)
_MOST_STEPS = 48
"""Most equations between a product and what it is multiplied with."""
_LINEAR = COPIES | {"add", "add_any", "sub", "neg", "copy", "name", "stop_gradient", "reduce_precision"}


class _Projection(NamedTuple):
    """What one factor is computed from: its contractions, and whether anything else than sums and known factors stands
    between."""

    contractions: tuple[Node, ...]
    activated: bool


def with_adapters(graph: Graph, alive: frozenset[int]) -> Iterator[NearMiss]:
    """Yields a near miss for each product of an activated projection and another one of the same value, at least one of
    which adds to a product a further one that goes through fewer numbers."""
    for node in graph.nodes:
        if node.name != "mul" or node.outputs[0] not in alive or in_backward(node) or len(set(node.inputs)) != 2:
            continue
        first, second = (_projection(graph, number) for number in node.inputs)
        if first is None or second is None or first.activated == second.activated:
            continue
        if len(first.contractions) == len(second.contractions) == 1:
            continue
        if _reads(graph, first) & _reads(graph, second):
            yield NearMiss("gated_mlp", jaxprs.location(node.equation), _REASON, node.outputs[0], _ADVICE)


def _projection(graph: Graph, number: int) -> _Projection | None:
    """Reads a factor back to its contractions; None where it is longer than a projection."""
    seen: dict[int, None] = {number: None}
    todo = [number]
    contractions: dict[int, Node] = {}
    activated = False
    while todo:
        node = graph.definitions.get(todo.pop())
        if node is None:
            continue
        if node.name == "dot_general" and not is_product(node):
            contractions[node.outputs[0]] = node
            continue
        if node.name not in MOVES and not is_elementwise(node):
            continue
        scaled = node.name in ("mul", "div") and len([i for i in node.inputs if _is_computed(graph, i)]) == 1
        activated |= not scaled and node.name not in _LINEAR and node.name not in MOVES
        todo += [i for i in node.inputs if i not in seen]
        seen.update(dict.fromkeys(node.inputs))
        if len(seen) > _MOST_STEPS or len(contractions) > 4:
            return None
    return _Projection(tuple(contractions.values()), activated) if contractions else None


def _is_computed(graph: Graph, number: int) -> bool:
    """Returns whether something else than a copy or a layout of an input or a literal gives a value."""
    node = graph.definitions.get(_origin(graph, number))
    return node is not None and number not in graph.literals


def _reads(graph: Graph, projection: _Projection) -> set[int]:
    """Returns the values of which a factor is a projection: one of its contractions reads each, and all others do so
    through one more contraction, which gives fewer numbers of each row than they do."""
    given = [{_origin(graph, i) for i in node.inputs} for node in projection.contractions]
    return {
        x
        for x in set().union(*given)
        if sum(x in own for own in given) == 1
        and all(x in own or _adapts(graph, node, x) for own, node in zip(given, projection.contractions, strict=True))
    }


def _adapts(graph: Graph, node: Node, x: int) -> bool:
    size = math.prod(graph.shape(node.outputs[0]))
    return any(2 * math.prod(graph.shape(i)) <= size and x in _read_within(graph, i) for i in node.inputs)


def _read_within(graph: Graph, number: int) -> set[int]:
    """Returns what the contraction reads that gives a value, scaled or not."""
    for _ in range(4):
        node = graph.definitions.get(_origin(graph, number))
        if node is None:
            return set()
        if node.name == "dot_general":
            return {_origin(graph, i) for i in node.inputs}
        computed = [i for i in node.inputs if _is_computed(graph, i)]
        if node.name not in ("mul", "div", "neg") or len(computed) != 1:
            return set()
        (number,) = computed
    return set()


def _origin(graph: Graph, number: int) -> int:
    """Returns the value before casts and changes of layout."""
    for _ in range(8):
        node = graph.definitions.get(number)
        if node is None or node.name not in COPIES or len(node.inputs) != 1:
            return number
        (number,) = node.inputs
    return number
