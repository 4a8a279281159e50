"""Describes what a step computes of sums of exponentials, and along which axes of an exponent arrays lie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from autopallas.compat import Literal
from autopallas.graph import Graph, Node

__all__ = [
    "MOVES", "Axes", "ExponentialSum", "Factor", "Group", "Plan", "Product", "Reduction", "Term",
    "axes_after", "axes_before", "moved", "scalar_of",
]  # fmt: skip

Axes = tuple[int, ...]
"""For each axis of an array, the axis of the exponent that it stands for, or -1 where the array is the same for all."""

MOVES = frozenset({"broadcast_in_dim", "expand_dims", "reshape", "squeeze", "transpose"})


@dataclass(frozen=True, slots=True)
class Term:
    """A summand of an exponent.

    Attributes:
      number: the value.
      axes: its axes.
      factors: what it is multiplied with or divided by one after the other, as ("mul" or "div", number of a scalar), or
        ("neg", 0).
    """

    number: int
    axes: Axes
    factors: tuple[tuple[str, int], ...]

    @property
    def held(self) -> frozenset[int]:
        return frozenset(axis for axis in self.axes if axis >= 0)

    @property
    def numbers(self) -> tuple[int, ...]:
        """All values that it is computed of."""
        return (self.number, *(number for name, number in self.factors if name != "neg"))


@dataclass(frozen=True, slots=True)
class Group:
    """Summands of an exponent that are exponentiated together.

    Attributes:
      terms: these.
      axes: the exponent's axes that any of them has, in order.
      constant: whether they are the same in all steps.
    """

    terms: tuple[Term, ...]
    axes: tuple[int, ...]
    constant: bool


@dataclass(frozen=True, slots=True)
class ExponentialSum:
    """A sum of exponentials.

    Attributes:
      exponent: number of the exponent x, before a maximum is subtracted.
      shape: its shape.
      reduced: the axes that are summed over.
      groups: its summands that have any of these.
      outside: its other summands.
      maxima: numbers of the maximum, as far as it is but moved and guarded, with their axes.
      exponential: number of exp(x - maximum).
      guarded: those of the maximum's numbers in which one that is not finite is replaced by 0.
    """

    exponent: int
    shape: tuple[int, ...]
    reduced: frozenset[int]
    groups: tuple[Group, ...]
    outside: tuple[Term, ...]
    maxima: tuple[tuple[int, Axes], ...]
    exponential: int
    guarded: frozenset[int]

    @property
    def kept(self) -> tuple[int, ...]:
        """The axes that are left of the exponent's, but those of one element."""
        return tuple(axis for axis, size in enumerate(self.shape) if size > 1 and axis not in self.reduced)

    @property
    def is_guarded(self) -> bool:
        """Whether 0 is subtracted in the place of a maximum that is not finite."""
        return self.maxima[-1][0] in self.guarded

    @property
    def own_axes(self) -> Axes:
        """The exponent's own axes."""
        return tuple(axis if size > 1 else -1 for axis, size in enumerate(self.shape))

    @property
    def summed(self) -> frozenset[int]:
        """The axes that are summed over, but those of one element."""
        return frozenset(self.own_axes) & self.reduced

    @property
    def terms(self) -> tuple[Term, ...]:
        """All summands of the exponent."""
        return (*(term for group in self.groups for term in group.terms), *self.outside)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Factor:
    """An array by which exponentials are multiplied or divided.

    Attributes:
      number: the value.
      axes: its axes.
      divides: whether it divides.
    """

    number: int
    axes: Axes
    divides: bool


@dataclass(frozen=True, slots=True)
class Product:
    """Exponentials times arrays that lack axes.

    Attributes:
      place: which of the sums the exponentials belong to.
      axes: the axes of the product.
      factors: the arrays.
      negative: whether its sign is changed.
    """

    place: int
    axes: Axes
    factors: tuple[Factor, ...] = ()
    negative: bool = False


@dataclass(frozen=True, slots=True)
class Reduction:
    """The sum of a product over some axes of the exponent.

    Attributes:
      product: number of the product.
      reduced: the axes.
      axes: those of the result.
    """

    product: int
    reduced: frozenset[int]
    axes: Axes


@dataclass(eq=False)
class Plan:
    """What a step computes of sums of exponentials.

    Attributes:
      graph: the step.
      constants: numbers of what is the same in all steps.
      zeros: numbers of inputs that are zero in each element.
      sums: the sums.
      products: the exponentials times arrays, by number.
      reductions: sums of these, by number.
    """

    graph: Graph
    constants: frozenset[int]
    zeros: frozenset[int]
    sums: tuple[ExponentialSum, ...]
    products: dict[int, Product] = field(default_factory=dict)
    reductions: dict[int, Reduction] = field(default_factory=dict)

    @cached_property
    def inputs(self) -> list[int]:
        """Numbers of the step's inputs."""
        root = self.graph.root
        return [self.graph.numbers[root][v] for v in root.invars]

    @cached_property
    def results(self) -> list[int | Literal]:
        """Numbers of the step's results, or literals."""
        numbers = self.graph.numbers[self.graph.root]
        return [v if isinstance(v, Literal) else numbers[v] for v in self.graph.root.outvars]

    @cached_property
    def maxima(self) -> dict[int, tuple[int, Axes]]:
        """For each number of a maximum, the position of its sum, and its axes."""
        return {n: (place, axes) for place, one in enumerate(self.sums) for n, axes in one.maxima}

    def _reads(self, number: int) -> Sequence[int]:
        """Returns what a value is computed of."""
        if number in self.maxima:
            return [n for term in self.sums[self.maxima[number][0]].terms for n in term.numbers]
        if number in self.reductions or number in self.products:
            product = self.products[self.reductions[number].product if number in self.reductions else number]
            factors = [factor.number for factor in product.factors]
            return [*factors, *(n for term in self.sums[product.place].terms for n in term.numbers)]
        node = self.graph.definitions.get(number)
        return () if node is None else node.inputs

    @cached_property
    def needed(self) -> frozenset[int]:
        """Numbers of what has to be computed, and of the inputs that are read."""
        found, todo = set[int](), [n for n in self.results if not isinstance(n, Literal)]
        while todo:
            number = todo.pop()
            if number not in found:
                found.add(number)
                todo += self._reads(number)
        return frozenset(found)

    @cached_property
    def sums_of_products(self) -> dict[int, list[int]]:
        """For each product, the sums of it that have to be computed."""
        found: dict[int, list[int]] = {}
        for number, reduction in self.reductions.items():
            if number in self.needed:
                found.setdefault(reduction.product, []).append(number)
        return found

    @cached_property
    def schedule(self) -> list[Node]:
        """What has to be computed, in order."""
        return [node for node in self.graph.nodes if not self.needed.isdisjoint(node.outputs)]

    @property
    def elements(self) -> int:
        """Number of exponentials that the step takes as it is written."""
        return sum(one.elements for one in self.sums)


def moved(graph: Graph, node: Node) -> list[int] | None:
    """Returns where each axis of an equation's only array is in its result, or -1 where it has one element; None where
    the equation does more than move axes and repeat the array along them."""
    name, params = node.name, node.params
    if name not in MOVES:
        return None
    before, after = graph.shape(node.inputs[0]), graph.shape(node.outputs[0])
    if name == "transpose":
        return [params["permutation"].index(axis) for axis in range(len(before))]
    if name == "broadcast_in_dim":
        return [
            int(axis) if size == after[axis] else -1
            for axis, size in zip(params["broadcast_dimensions"], before, strict=True)
        ]
    if name == "reshape" and params["dimensions"] is not None:
        return None
    own, new = ([axis for axis, size in enumerate(shape) if size != 1] for shape in (before, after))
    if [before[axis] for axis in own] != [after[axis] for axis in new]:
        return None
    places = dict(zip(own, new, strict=True))
    return [places.get(axis, -1) for axis in range(len(before))]


def axes_before(graph: Graph, node: Node, axes: Axes) -> Axes | None:
    """Returns the axes of an array of the axes of what it is moved to."""
    places = moved(graph, node)
    if places is None:
        return None
    size = graph.shape(node.inputs[0])
    return tuple(axes[p] if p >= 0 and n != 1 else -1 for p, n in zip(places, size, strict=True))


def axes_after(graph: Graph, node: Node, axes: Axes) -> Axes | None:
    """Returns the axes of what an array of some axes is moved to."""
    places = moved(graph, node)
    if places is None:
        return None
    found = [-1] * len(graph.shape(node.outputs[0]))
    for place, axis in zip(places, axes, strict=True):
        if place >= 0:
            found[place] = axis
    return tuple(found)


def scalar_of(graph: Graph, number: int) -> int | None:
    """Returns the number of the scalar that an array repeats."""
    while graph.shape(number):
        node = graph.definitions.get(number)
        if node is None or moved(graph, node) is None:
            return None
        number = node.inputs[0]
    return number
