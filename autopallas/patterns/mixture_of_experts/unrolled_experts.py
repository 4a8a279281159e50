"""Finds experts that are written out one after the other, whose results are added where they were chosen, and that no
site reads."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass

from autopallas import compat, jaxprs
from autopallas.graph import Graph, Node
from autopallas.graph.custom_rules import ELEMENTWISE, is_elementwise_call
from autopallas.graph.labels import is_product
from autopallas.kernels.mixture_of_experts.operation import OPERATION
from autopallas.patterns.advice import WEIGHTS_FIRST
from autopallas.patterns.forward import LAYOUT
from autopallas.patterns.match import NearMiss

__all__ = ["written_out"]

_BEHIND = 40
"""Most values behind a term among which its product is looked for, or behind a condition its comparison."""
_SAME = LAYOUT | {"convert_element_type", "copy", "slice"}
_CONDITIONS = _SAME | {"or", "reduce_or", "reduce_max", "and", "not"}


@dataclass(frozen=True, slots=True)
class _Chain:
    """A sum to which terms were added under conditions: numbers that were compared, and products of the terms."""

    experts: frozenset[int]
    products: frozenset[int]


def written_out(graph: Graph, alive: Set[int], read: Set[int]) -> Iterator[NearMiss]:
    """Yields a near miss for each sum of several experts' results under conditions; ``read`` are the products of
    sites."""
    chains: dict[int, _Chain] = {}
    longer: set[int] = set()
    for node in graph.nodes:
        if node.name not in ("add", "select_n") or node.outputs[0] not in alive:
            continue
        if node.body.transposed or compat.is_transposed(node.equation):
            continue
        for base, condition, term in _links(graph, node):
            number, product = _compared(graph, condition), _product(graph, term)
            if number is None or product is None:
                continue
            before = chains.get(base, _Chain(frozenset(), frozenset()))
            chains[node.outputs[0]] = _Chain(before.experts | {number}, before.products | {product})
            longer.add(base)
            break
    for root, chain in chains.items():
        if root in longer or min(len(chain.experts), len(chain.products)) < 2 or not read.isdisjoint(chain.products):
            continue
        yield NearMiss(
            OPERATION.name,
            jaxprs.location(graph.definitions[root].equation),
            "experts compute every token, one after the other, and what each computes is added where it was chosen, in "
            "a way that is not read as one sum over the experts",
            root,
            WEIGHTS_FIRST,
        )


def _links(graph: Graph, node: Node) -> Iterator[tuple[int, int, int]]:
    """Yields (sum before, condition, term) for ways to read a node as a sum to which a term is added where a condition
    holds."""
    if node.name == "add":
        for base, term in (node.inputs, node.inputs[::-1]):
            chosen = graph.definitions.get(term)
            if chosen is not None and chosen.name == "select_n" and len(chosen.inputs) == 3:
                which, *cases = chosen.inputs
                zeros = [_is_zero(graph, case) for case in cases]
                if zeros.count(True) == 1:
                    yield base, which, cases[zeros.index(False)]
    elif len(node.inputs) == 3:
        which, *cases = node.inputs
        for base, other in (cases, cases[::-1]):
            added = graph.definitions.get(other)
            if added is not None and added.name == "add" and base in added.inputs:
                yield base, which, added.inputs[1 - added.inputs.index(base)]


def _is_zero(graph: Graph, number: int) -> bool:
    number = _restated(graph, number)
    return number in graph.literals and not graph.literals[number].any()


def _restated(graph: Graph, number: int) -> int:
    """Returns the value that a value restates."""
    for _ in range(_BEHIND):
        node = graph.definitions.get(number)
        if node is None or node.name not in _SAME:
            break
        (number, *_) = node.inputs
    return number


def _compared(graph: Graph, condition: int) -> int | None:
    """Returns the whole number that a condition compares something with, if there is one."""
    todo, seen = [condition], set[int]()
    while todo and len(seen) < _BEHIND:
        number = todo.pop()
        node = graph.definitions.get(number)
        if node is None or number in seen:
            continue
        seen.add(number)
        graph.steps.spend()
        if node.name == "eq":
            for other in node.inputs:
                literal = graph.literals.get(_restated(graph, other))
                if literal is not None and literal.size == 1 and literal.dtype.kind in "iu":
                    return int(literal.reshape(()))
        elif node.name in _CONDITIONS:
            todo += node.inputs
    return None


def _product(graph: Graph, term: int) -> int | None:
    """Returns the nearest product behind a term, of those that elementwise operations lead to."""
    todo, seen = [term], set[int]()
    while todo and len(seen) < _BEHIND:
        number = todo.pop(0)
        node = graph.definitions.get(number)
        if node is None or number in seen:
            continue
        seen.add(number)
        graph.steps.spend()
        if node.name == "dot_general" and not is_product(node):
            return number
        if node.name in ELEMENTWISE or node.name in _SAME or is_product(node) or is_elementwise_call(node.equation):
            todo += node.inputs
    return None
