"""Proves that all results of a step are the same with a logsumexp in the place of each maximum that it subtracts."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass

from autopallas.graph import Node
from autopallas.graph.loop_slices import is_zero
from autopallas.kernels.respelling.exponential_plan import (
    MOVES,
    Axes,
    Factor,
    Plan,
    Product,
    Reduction,
    axes_after,
    axes_before,
    moved,
)

__all__ = ["Proof"]

_SUMS = frozenset({"add", "add_any", "sub"})
_SAME = frozenset({"copy", "stop_gradient"})
_SIGNS = frozenset({"ge", "gt", "le", "lt", "eq", "ne"})


@dataclass(frozen=True, slots=True)
class _Degree:
    """By what a value differs where a logsumexp is in the place of a maximum.

    Attributes:
      place: the sum, whose value s it is about.
      logarithm: whether log s is added to it, or it is multiplied by s.
      times: how often, or to which power.
      axes: the axes of s that its axes are, or -1.
    """

    place: int
    logarithm: bool
    times: int
    axes: Axes


class Proof:
    """Proves that all results of a step are the same with a logsumexp in the place of each maximum."""

    def __init__(self, plan: Plan, alive: Container[int]):
        self.plan, self.graph, self.alive = plan, plan.graph, alive
        self.degrees: dict[int, _Degree] = {}
        self.maxima: dict[int, int] = {}
        for place, one in enumerate(plan.sums):
            for number, axes in one.maxima:
                self.degrees[number] = _Degree(place, True, 1, axes)
                self.maxima[number] = place
            plan.products[one.exponential] = Product(place, tuple(range(len(one.shape))))

    def holds(self) -> bool:
        graph, owners = self.graph, [n for one in self.plan.sums for n, _ in one.maxima]
        if len(owners) != len(set(owners)):
            return False  # one maximum of two sums
        for node in graph.nodes:
            if len(node.outputs) != 1:
                if not self.degrees.keys().isdisjoint(node.inputs):
                    return False
                continue
            (number,) = node.outputs
            if number in self.maxima or number not in self.alive:
                continue
            if not self.degrees.keys().isdisjoint(node.inputs) and not self._is_guard(node):
                known, degree = self._degree(node)
                if not known:
                    return False
                if degree is not None:
                    self.degrees[number] = degree
            self._note_product(node)
        graph.steps.spend(len(graph.nodes))
        return self.degrees.keys().isdisjoint(graph.returned)

    def _is_guard(self, node: Node) -> bool:
        """Returns whether a value tells whether a maximum is finite, and nothing else reads it."""
        users = self.graph.users.get(node.outputs[0], ())
        return (
            node.name == "is_finite"
            and node.inputs[0] in self.maxima
            and node.outputs[0] not in self.graph.returned
            and all(user.outputs[0] in self.maxima or user.outputs[0] not in self.alive for user in users)
        )

    def _degree(self, node: Node) -> tuple[bool, _Degree | None]:
        """Returns whether the degree of a value is known, and the degree; None for 0."""
        graph = self.graph
        degrees = [self.degrees.get(n) for n in node.inputs]
        own = next(d for d in degrees if d is not None)
        if any(d is not None and d.place != own.place for d in degrees):
            return False, None
        name = node.name
        if name in _SAME:
            return True, own
        if name not in ("reduce_sum", *MOVES) and len(graph.shape(node.outputs[0])) != len(own.axes):
            return False, None
        if moved(graph, node) is not None:
            axes = axes_after(graph, node, own.axes)
            assert axes is not None
            return True, _Degree(own.place, own.logarithm, own.times, axes)
        if name in _SUMS and own.logarithm:
            sign = -1 if name == "sub" else 1
            return self._joined(degrees, [1, sign])
        if own.logarithm:
            return (True, _Degree(own.place, False, own.times, own.axes)) if name == "exp" else (False, None)
        if name == "log":
            return True, _Degree(own.place, True, own.times, own.axes)
        if name in ("abs", "neg"):
            return True, own
        if name == "sign":
            return True, None
        if name in ("mul", "div"):
            return self._joined(degrees, [1, -1 if name == "div" else 1])
        if name in ("integer_pow", "square"):
            power = int(node.params.get("y", 2))
            return True, _Degree(own.place, False, own.times * power, own.axes) if power else None
        if name in _SUMS:
            return degrees[0] == degrees[1], own
        if name in _SIGNS:
            return any(self._is_zero(n) for n in node.inputs), None
        if name == "select_n":
            alike = all(
                d == own or d is None and self._is_zero(n) for d, n in zip(degrees[1:], node.inputs[1:], strict=True)
            )
            return alike and degrees[0] is None, own
        if name == "reduce_sum":
            removed = {int(axis) for axis in node.params["axes"]}
            axes = tuple(a for axis, a in enumerate(own.axes) if axis not in removed)
            return all(own.axes[axis] == -1 for axis in removed), _Degree(own.place, False, own.times, axes)
        return False, None

    def _is_zero(self, number: int) -> bool:
        return number in self.plan.zeros or is_zero(self.graph, number)

    def _joined(self, degrees: Sequence[_Degree | None], signs: Sequence[int]) -> tuple[bool, _Degree | None]:
        """Returns the degree of a product, or of a sum of logarithms."""
        own = [d for d in degrees if d is not None]
        if any((d.logarithm, d.axes) != (own[0].logarithm, own[0].axes) for d in own):
            return False, None
        times = sum(sign * d.times for d, sign in zip(degrees, signs, strict=True) if d is not None)
        return True, _Degree(own[0].place, own[0].logarithm, times, own[0].axes) if times else None

    def _note_product(self, node: Node) -> None:
        """Notes that a value is a product, or a sum of one."""
        graph, products = self.graph, self.plan.products
        (number,) = node.outputs
        given = [n for n in node.inputs if n in products]
        if len(given) != 1 or number in products:
            return
        product = products[given[0]]
        if node.name == "neg":
            products[number] = Product(product.place, product.axes, product.factors, not product.negative)
        elif node.name == "mul" or node.name == "div" and node.inputs[0] == given[0]:
            if node.inputs[0] != node.inputs[1] and graph.shape(number) == graph.shape(given[0]):
                (other,) = [n for n in node.inputs if n != given[0]]
                found = self._factor(other, product)
                if found is not None:
                    factors = (*product.factors, Factor(*found, divides=node.name == "div"))
                    products[number] = Product(product.place, product.axes, factors, product.negative)
        elif node.name == "reduce_sum":
            removed = {int(axis) for axis in node.params["axes"]}
            reduced = frozenset(product.axes[axis] for axis in removed) - {-1}
            axes = tuple(a for axis, a in enumerate(product.axes) if axis not in removed)
            self.plan.reductions[number] = Reduction(given[0], reduced, axes)
        elif moved(graph, node) is not None and math.prod(graph.shape(number)) == math.prod(graph.shape(given[0])):
            after = axes_after(graph, node, product.axes)
            assert after is not None
            products[number] = Product(product.place, after, product.factors, product.negative)

    def _factor(self, number: int, product: Product) -> tuple[int, Axes] | None:
        """Returns what an array is before it is repeated to the shape of a product, and its axes; None where it lacks
        none."""
        graph, axes = self.graph, product.axes
        if not graph.shape(number):
            return number, ()
        while (node := graph.definitions.get(number)) is not None:
            before = axes_before(graph, node, axes)
            if before is None:
                break
            number, axes = node.inputs[0], before
            if not graph.shape(number):
                return number, ()
        axes = tuple(a if n > 1 else -1 for a, n in zip(axes, graph.shape(number), strict=True))
        shape = self.plan.sums[product.place].shape
        whole = {axis for axis, size in enumerate(shape) if size > 1}
        return (number, axes) if whole - set(axes) else None
