"""Reports attention over few keys of each query: those that ``top_k`` chose, or the edges of a graph.

No kernel has a list of keys for each query. One pass over the equations follows the exponentials of scores to the
product with values that were gathered by the numbers of the chosen keys, or to the sum over the edges of each node.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Set

from autopallas import jaxprs
from autopallas.graph import Graph, Node
from autopallas.graph.custom_rules import ELEMENTWISE, is_elementwise_call
from autopallas.graph.labels import is_product
from autopallas.patterns.advice import CHOSEN_KEYS, EDGES
from autopallas.patterns.attention.resemblance import EXPONENTIALS, KEEPS
from autopallas.patterns.forward import LAYOUT, in_backward
from autopallas.patterns.match import NearMiss

__all__ = ["few_keys"]

_CHOSEN = (
    "the probabilities are those of keys that top_k chose for each query, whose values are gathered: no kernel reads "
    "a list of keys"
)
_SEGMENTS = "the softmax runs over the edges of each node, which scatters add up: no kernel reads a list of edges"
_CHOICES = frozenset({"top_k", "approx_top_k"})
_SQUARES = frozenset({"mul", "square", "integer_pow", "dot_general"})
_MOVES = LAYOUT | {"concatenate", "slice", "convert_element_type", "reduce_max", "gather", "stop_gradient", "copy"}
_LONGEST = 6
"""Most changes of layout between a sum over edges and its division by the normaliser."""


def few_keys(graph: Graph, alive: Set[int]) -> Iterator[NearMiss]:
    """Yields a near miss for each attention over keys that top_k chose, and for each softmax over edges."""
    if EXPONENTIALS.isdisjoint(graph.primitives):
        return
    if not _CHOICES.isdisjoint(graph.primitives) or any(map(_adds_up, graph.nodes)):
        yield from _Followed(graph).misses(alive)


def _adds_up(node: Node) -> bool:
    """Returns whether an equation is a sum over edges: a scatter that is no gradient of a gather."""
    return node.name == "scatter-add" and not in_backward(node)


class _Followed:
    """What is known of values, by their numbers, while the equations are followed in order.

    Attributes:
      scores: those that come from a product by elementwise steps, layout and gathers.
      chosen, numbers: the scores that a choice gives, and the keys' numbers; with the choice.
      gathered: the values of chosen keys, with the choice.
      weights: exponentials of scores, with how many there are and the choice, if there was one.
      summed: the choices of which the exponentials are added up over the keys.
      totals: what sums over edges of such exponentials enter, with the number of the edges' nodes.
    """

    def __init__(self, graph: Graph):
        self.graph = graph
        self.scores: set[int] = set()
        self.chosen: dict[int, Node] = {}
        self.numbers: dict[int, Node] = {}
        self.gathered: dict[int, Node] = {}
        self.weights: dict[int, tuple[int, Node | None]] = {}
        self.summed: set[int] = set()
        self.totals: dict[int, int] = {}

    def misses(self, alive: Set[int]) -> Iterator[NearMiss]:
        sums: list[Node] = []
        read: list[tuple[Node, Node]] = []
        for node in self.graph.nodes:
            if len(node.outputs) == 0:
                continue
            if alive.isdisjoint(node.outputs) or in_backward(node):
                continue
            if node.name in ("dot_general", "reduce_sum") and (choice := self._read_by(node)) is not None:
                read.append((node, choice))
            if node.name == "scatter-add":
                sums.append(node)
            self._follow(node)
        for node, choice in read:
            if id(choice) in self.summed:
                yield self._miss(node, _CHOSEN, CHOSEN_KEYS)
        for node in sums:
            if self._sums_edges(node):
                yield self._miss(node, _SEGMENTS, EDGES)

    def _miss(self, node: Node, reason: str, advice: str) -> NearMiss:
        return NearMiss("attention", jaxprs.location(node.equation), reason, node.outputs[0], advice)

    def _follow(self, node: Node) -> None:
        name, inputs, output = node.name, node.inputs, node.outputs[0]
        moves = name in _MOVES or name in ELEMENTWISE or is_elementwise_call(node.equation)
        if self._is_score(node) or moves and any(i in self.scores for i in inputs):
            self.scores.add(output)
        if name in _CHOICES and inputs[0] in self.scores:
            self.scores.add(output)
            self.chosen[output] = self.numbers[node.outputs[1]] = node
            return
        if name in EXPONENTIALS and output in self.scores:
            choice = next((self.chosen[i] for i in inputs if i in self.chosen), None)
            self.weights[output] = math.prod(self.graph.shape(output)), choice
        elif moves and name != "gather":
            for known in (self.chosen, self.numbers, self.gathered):
                found = next((known[i] for i in inputs if i in known), None)
                if found is not None and not (known is self.gathered and self._adds(node)):
                    known[output] = found
        if name in KEEPS and name != "gather" or name == "dot_general" and is_product(node):
            weight = next((self.weights[i] for i in inputs if i in self.weights), None)
            if weight is not None:
                self.weights[output] = weight
        if name == "reduce_sum" and inputs[0] in self.weights and (of := self.weights[inputs[0]][1]) is not None:
            self.summed.add(id(of))
        if name == "gather" and inputs[1] in self.numbers and self._is_shared(node, self.numbers[inputs[1]]):
            self.gathered[output] = self.numbers[inputs[1]]
        if name == "scatter-add" and inputs[2] in self.weights:
            self.totals[output] = inputs[1]
        elif moves:
            total = next((self.totals[i] for i in inputs if i in self.totals), None)
            if total is not None:
                self.totals[output] = total

    def _is_score(self, node: Node) -> bool:
        if node.name == "dot_general":
            return not is_product(node)
        inner = self.graph.definitions.get(node.inputs[0]) if node.name == "reduce_sum" else None
        return inner is not None and inner.name in _SQUARES

    def _is_shared(self, gather: Node, choice: Node) -> bool:
        """Returns whether several queries choose among the same rows: what experts compute is each token's own."""
        graph = self.graph
        (scored,), kept = (graph.shape(choice.inputs[0])[-1:], graph.shape(choice.outputs[0])[-1])
        return math.prod(graph.shape(gather.outputs[0])) * scored > math.prod(graph.shape(gather.inputs[0])) * kept

    def _adds(self, node: Node) -> bool:
        """Returns whether a node adds to gathered values what is not gathered, as an expert adds its bias."""
        others = [i for i in node.inputs if i not in self.gathered]
        return node.name in ("add", "add_any", "sub") and any(self.graph.shape(i) for i in others)

    def _read_by(self, node: Node) -> Node | None:
        """Returns the choice of keys whose values a contraction sums with their weights."""
        pair = node.inputs
        if node.name == "reduce_sum":
            inner = self.graph.definitions.get(node.inputs[0])
            if inner is None or not (inner.name == "mul" or is_product(inner)):
                return None
            pair = inner.inputs
        for weight, value in (pair, pair[::-1]):
            choice = self.weights[weight][1] if weight in self.weights else None
            if choice is not None and self.gathered.get(value) is choice:
                return choice
        return None

    def _sums_edges(self, node: Node) -> bool:
        """Returns whether a scatter adds up values of edges with a softmax's weights, or is divided by their sum."""
        added = self.weights.get(node.inputs[2])
        if added is None or math.prod(self.graph.shape(node.inputs[2])) <= added[0]:
            return False
        where = node.inputs[1]
        if self.totals.get(node.inputs[2]) == where:
            return True
        todo, steps = [node.outputs[0]], 0
        while todo and steps < _LONGEST:
            steps += 1
            for user in self.graph.users[todo.pop()]:
                if user.name in ("div", "mul") and any(self.totals.get(i) == where for i in user.inputs):
                    return True
                if user.name in LAYOUT or user.name == "convert_element_type":
                    todo.append(user.outputs[0])
        return False
