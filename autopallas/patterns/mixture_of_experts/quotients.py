"""Judges quotients in the weights of experts: 0 / 0 is not zero.

A weight that is zero for an expert that was not chosen stays zero when it is divided by a nonzero number. Where the
divisor may be zero, as the sum of a token's weights is if the token has no expert at all, the program gives NaN. A site
that leaves out what was not chosen gives NaN too if the token has at least one expert, since its weight is a quotient
of zeros as well.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from autopallas.graph import Graph, Node
from autopallas.graph.custom_rules import ELEMENTWISE
from autopallas.patterns.mixture_of_experts.axes import choice_axes
from autopallas.patterns.mixture_of_experts.signs import Signs

__all__ = ["Quotients"]

_FACTORS = 8
_LAYOUT = frozenset(
    "reshape transpose broadcast_in_dim squeeze expand_dims slice convert_element_type copy name".split()
)


class Quotients:
    """Answers questions about the quotients of one sum over experts.

    Args:
      graph: the program.
      chosen: the numbers of the values that say which expert is chosen.
      certain: whether every token surely has an expert.
    """

    def __init__(self, graph: Graph, chosen: Collection[int], certain: Callable[[], bool]):
        self._graph, self._chosen, self._certain = graph, frozenset(chosen), certain
        self._signs = Signs(graph)
        self._depends: dict[int, bool] = {}
        self._axes = choice_axes(graph)
        self._is_certain: bool | None = None

    def divides(self, divisor: int, zero: int) -> bool:
        """Returns whether a ``zero`` may still be left out after it is divided."""
        if self._signs.positive(divisor):
            return True
        if self._is_certain is None:
            self._is_certain = self._certain()
        if not self._is_certain:
            return False
        if not self.depends(divisor):
            return True
        # The divisor is the same for every expert, and zero only where all weights are.
        return not self._axes[divisor] and self._sums(divisor, zero)

    def multiplies(self, factor: int, zero: int) -> bool:
        """Returns whether a factor leaves a ``zero`` zero: no quotient in it may be infinite or NaN."""
        graph, seen, todo = self._graph, set(), [factor]
        certain: bool | None = None
        while todo:
            number = todo.pop()
            node = graph.definitions.get(number)
            if node is None or number in seen:
                continue
            seen.add(number)
            graph.steps.spend()
            if not self.depends(number):
                if certain is None:
                    certain = self._certain()
                if certain:
                    continue
            divisor = _divisor(node)
            if divisor is not None and not self.divides(divisor, zero):
                return False
            if node.name in ELEMENTWISE or node.name in _LAYOUT or node.name.startswith("reduce_"):
                todo += node.inputs
        return True

    def depends(self, number: int) -> bool:
        """Returns whether a value is computed from values that say which expert is chosen."""
        graph, known = self._graph, self._depends
        first = min(self._chosen, default=0)
        todo = [number]
        while todo:
            value = todo[-1]
            if value in known:
                todo.pop()
                continue
            node = graph.definitions.get(value)
            if value in self._chosen or node is None or value < first:
                known[value] = value in self._chosen
                continue
            waiting = [i for i in node.inputs if i not in known]
            if waiting:
                todo += waiting
            else:
                graph.steps.spend()
                known[value] = any(known[i] for i in node.inputs)
        return known[number]

    def _sums(self, divisor: int, zero: int) -> bool:
        """Returns whether a divisor is the sum of what is divided, or of a factor of it, without negative terms: if the
        divisor is zero, so is what is divided."""
        graph = self._graph
        node = graph.definitions.get(self._core(divisor))
        if node is None or node.name != "reduce_sum" or not self._signs.nonnegative(node.inputs[0]):
            return False
        summed, factors = self._core(node.inputs[0]), [self._core(zero)]
        for factor in factors:
            product = graph.definitions.get(factor)
            if factor == summed:
                return True
            if product is not None and product.name == "mul" and len(factors) < _FACTORS:
                factors += map(self._core, product.inputs)
        return False

    def _core(self, number: int) -> int:
        graph = self._graph
        while (node := graph.definitions.get(number)) is not None and node.name in _LAYOUT:
            graph.steps.spend()
            number = node.inputs[0]
        return number


def _divisor(node: Node) -> int | None:
    """Returns the operand that must not be zero for the result to be finite."""
    if node.name == "div":
        return node.inputs[1]
    if node.name == "rsqrt" or node.name == "integer_pow" and node.params["y"] < 0 or node.name == "pow":
        return node.inputs[0]
    return None
