"""Sums of exponentials of sums of arrays that lack axes, as the steps of hidden Markov models have: what they are.

``logsumexp(a[:, :, None] + b[None], axis=1)`` takes an exponential of each sum.  It is the logarithm of a product of
two matrices of exponentials, ``log(exp(a) @ exp(b))``, with the largest number of each row of a and of each column of b
taken out before.  Here such sums are found in a step of a loop, with what else the step computes of the exponentials:
the gradient of a logsumexp is a sum of products with them too.

The numbers ``e = exp(x - m)`` and ``s = sum(e)`` depend on the maximum m that the program subtracts, which is as costly
as the sum.  So the step is computed with the logsumexp itself in its place: then e is ``exp(x - logsumexp(x))``, a
product of arrays that lack axes, and s is 1.  That is the same exactly if everything that leaves the step is
homogeneous, of degree 0, in the factor by which e and s differ; this is proved for each value of the step.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from autopallas.compat import ClosedJaxpr, JaxprAtom, JaxprEqn, Literal, Var
from autopallas.graph import Body, Graph, Node, flatten
from autopallas.graph.edit import surviving
from autopallas.kernels.respelling.small_exponentials import are_told

__all__ = ["ExponentialSum", "Factor", "Plan", "Product", "Reduction", "Term", "may_sum", "planned"]

Axes = tuple[int, ...]
"""For each axis of an array, the axis of the exponent that it stands for, or -1 where the array is the same for all."""

_DEEPEST, _MOST_TERMS, _MOST_GROUPS = 16, 8, 3
_LEAST_RATIO = 4
"""Exponentials that a step takes, over those that are left."""
_MOVES = frozenset({"broadcast_in_dim", "expand_dims", "reshape", "squeeze", "transpose"})
_SUMS = frozenset({"add", "add_any", "sub"})
_SAME = frozenset({"copy", "stop_gradient"})
_SIGNS = frozenset({"ge", "gt", "le", "lt", "eq", "ne"})


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


def planned(
    step: ClosedJaxpr, constants: int, zeros: Container[int] = (), carried: Mapping[int, int] | None = None
) -> Plan | None:
    """Returns what a step computes of sums of exponentials, or None where there are none, or it does more with them.

    Args:
      step: from constants and other values to results.
      constants: how many of its inputs are the same in all steps.
      zeros: positions of inputs that are zero in each element.
      carried: the positions of carried values among its results, with those among its inputs.
    """
    body = flatten(step)
    if body.consts or body.children or not _may_sum(body) or any(e.effects for e in body.equations):
        return None
    graph = Graph(body)
    same = _constants(graph, constants)
    zero = frozenset(graph.numbers[graph.root][v] for i, v in enumerate(graph.root.invars) if i in zeros)
    alive = surviving(graph)
    found = [_sum(graph, node, same, zero) for node in graph.nodes if node.name == "exp" and node.outputs[0] in alive]
    sums = tuple(one for one in found if one is not None)
    if not sums:
        return None
    plan = Plan(graph, same, zero, sums)
    return plan if _Proof(plan, alive).holds() and not are_told(plan, carried or {}) else None


def may_sum(step: ClosedJaxpr) -> bool:
    """Returns whether a step may sum exponentials of sums: a quick look."""
    return _may_sum(flatten(step))


def _may_sum(body: Body) -> bool:
    made = {v: e for e in body.equations for v in e.outvars}
    for equation in body.equations:
        if equation.primitive.name == "exp":
            less = _made_by(equation.invars[0], made)
            if less is not None and less.primitive.name == "sub" and _has_smaller_part(less.invars[0], made):
                return True
    return False


def _made_by(atom: JaxprAtom, made: Mapping[Var, JaxprEqn]) -> JaxprEqn | None:
    """Returns the equation that gives a value; None for inputs and literals."""
    return made.get(atom) if isinstance(atom, Var) else None


def _has_smaller_part(exponent: JaxprAtom, made: Mapping[Var, JaxprEqn]) -> bool:
    """Returns whether something is added to a part of an exponent that is repeated to its shape."""
    size, todo = exponent.aval.size, [exponent]
    for _ in range(_DEEPEST):
        equation = _made_by(todo.pop(), made) if todo else None
        if equation is None:
            continue
        name = equation.primitive.name
        if name in _SUMS and any(_source_size(v, made) < size for v in equation.invars if isinstance(v, Var)):
            return True
        if name in _SUMS | _MOVES | {"neg", "mul", "div"}:
            todo += [v for v in equation.invars if isinstance(v, Var) and v.aval.size == size]
    return False


def _source_size(atom: JaxprAtom, made: Mapping[Var, JaxprEqn]) -> int:
    """Returns the number of elements of what an array repeats."""
    equation = _made_by(atom, made)
    repeats = equation is not None and equation.primitive.name == "broadcast_in_dim"
    return int((equation.invars[0] if repeats and equation is not None else atom).aval.size)


def _constants(graph: Graph, count: int) -> frozenset[int]:
    """Returns the numbers of what is the same in all steps."""
    numbers = graph.numbers[graph.root]
    found = {numbers[v] for v in graph.root.invars[:count]} - {numbers[v] for v in graph.root.invars[count:]}
    found |= {*graph.constants, *graph.literals}
    for node in graph.nodes:
        if found.issuperset(node.inputs):
            found.update(node.outputs)
    return frozenset(found)


# ---------------------------------------------------------------------- axes


def moved(graph: Graph, node: Node) -> list[int] | None:
    """Returns where each axis of an equation's only array is in its result, or -1 where it has one element; None where
    the equation does more than move axes and repeat the array along them."""
    name, params = node.name, node.params
    if name not in _MOVES:
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


def _axes_before(graph: Graph, node: Node, axes: Axes) -> Axes | None:
    """Returns the axes of an array of the axes of what it is moved to."""
    places = moved(graph, node)
    if places is None:
        return None
    size = graph.shape(node.inputs[0])
    return tuple(axes[p] if p >= 0 and n != 1 else -1 for p, n in zip(places, size, strict=True))


def _axes_after(graph: Graph, node: Node, axes: Axes) -> Axes | None:
    """Returns the axes of what an array of some axes is moved to."""
    places = moved(graph, node)
    if places is None:
        return None
    found = [-1] * len(graph.shape(node.outputs[0]))
    for place, axis in zip(places, axes, strict=True):
        if place >= 0:
            found[place] = axis
    return tuple(found)


def _scalar(graph: Graph, number: int) -> int | None:
    """Returns the number of the scalar that an array repeats."""
    while graph.shape(number):
        node = graph.definitions.get(number)
        if node is None or moved(graph, node) is None:
            return None
        number = node.inputs[0]
    return number


# ---------------------------------------------------------------------- one sum


class _Terms:
    """Reads the summands of an exponent."""

    def __init__(self, graph: Graph, same: Container[int], shape: tuple[int, ...]):
        self.graph, self.same = graph, same
        self.all = frozenset(axis for axis, size in enumerate(shape) if size > 1)
        self.found: list[Term] = []

    def read(self, number: int, axes: Axes, factors: tuple[tuple[str, int], ...] = (), depth: int = 0) -> bool:
        """Adds a value's summands, and returns whether each lacks an axis or is the same in all steps."""
        graph = self.graph
        graph.steps.spend(1)
        own = tuple(a if size > 1 else -1 for a, size in zip(axes, graph.shape(number), strict=True))
        lacks = self.all - set(own)
        if not lacks and number not in self.same:
            return depth < _DEEPEST and self._inner(number, axes, factors, depth)
        self.found.append(Term(number, own, factors))
        return len(self.found) <= _MOST_TERMS

    def _inner(self, number: int, axes: Axes, factors: tuple[tuple[str, int], ...], depth: int) -> bool:
        graph = self.graph
        node = graph.definitions.get(number)
        if node is None:
            return False
        if node.name in _SUMS or node.name == "neg":
            signs = [(), (("neg", 0),)] if node.name == "sub" else [(), ()] if node.name in _SUMS else [(("neg", 0),)]
            # The innermost comes first: a term is multiplied on its way out.
            return all(
                self.read(n, axes if graph.shape(n) else (), (*sign, *factors), depth + 1)
                for n, sign in zip(node.inputs, signs, strict=True)
            )
        if node.name in ("mul", "div"):
            left, right = node.inputs
            if node.name == "mul" and _scalar(graph, right) is None:
                left, right = right, left
            scalar = _scalar(graph, right)
            if scalar is None or not graph.shape(left):
                return False
            return self.read(left, axes, ((node.name, scalar), *factors), depth + 1)
        before = _axes_before(graph, node, axes)
        return before is not None and self.read(node.inputs[0], before, factors, depth + 1)


def _sum(graph: Graph, node: Node, same: Container[int], zeros: Container[int]) -> ExponentialSum | None:
    """Returns the sum that an exponential belongs to, or None."""
    less = graph.definitions.get(node.inputs[0])
    if less is None or less.name != "sub" or any(n in graph.literals for n in less.inputs):
        return None
    exponent, subtracted = less.inputs
    shape = graph.shape(exponent)
    if graph.shape(less.outputs[0]) != shape or str(graph.dtype(exponent)) not in ("float32", "float64"):
        return None
    if node.params.get("accuracy") is not None:
        return None
    maximum = _maximum(graph, exponent, subtracted, zeros)
    if maximum is None:
        return None
    reduced, maxima, guarded = maximum
    terms = _Terms(graph, same, shape)
    if not terms.read(exponent, tuple(range(len(shape)))) or any(
        graph.dtype(n) != graph.dtype(exponent) for term in terms.found for n in term.numbers
    ):
        return None
    groups = _groups([term for term in terms.found if term.held & reduced], same)
    held = frozenset(axis for group in groups for axis in group.axes)
    every = frozenset(axis for axis in reduced if shape[axis] > 1)
    if not 2 <= len(groups) <= _MOST_GROUPS or not every or not every <= held:
        return None
    left = sum(math.prod(shape[axis] for axis in group.axes) for group in groups if not group.constant)
    if left == 0 or math.prod(shape) < _LEAST_RATIO * left:
        return None
    return ExponentialSum(
        exponent=exponent,
        shape=shape,
        reduced=reduced,
        groups=tuple(groups),
        outside=tuple(term for term in terms.found if not term.held & reduced),
        maxima=tuple(maxima),
        exponential=node.outputs[0],
        guarded=guarded,
    )


def _groups(terms: Sequence[Term], same: Container[int]) -> list[Group]:
    """Returns terms together with those that have all of their axes, unless the former alone change in each step."""
    found: list[Group] = []
    for term in sorted(terms, key=lambda term: -len(term.held)):
        constant = all(n in same for n in term.numbers)
        whole = [g for g in found if term.held <= set(g.axes) and (constant or not g.constant)]
        if whole:
            smallest = min(whole, key=lambda g: len(g.axes))
            place = found.index(smallest)
            found[place] = Group((*smallest.terms, term), smallest.axes, smallest.constant)
        else:
            found.append(Group((term,), tuple(sorted(term.held)), constant))
    return found


def _maximum(
    graph: Graph, exponent: int, subtracted: int, zeros: Container[int]
) -> tuple[frozenset[int], list[tuple[int, Axes]], frozenset[int]] | None:
    """Returns over which axes of an exponent its maximum is subtracted, the numbers that the maximum has on its way,
    with their axes, and those of them in which one that is not finite is replaced by 0; None where something else is
    subtracted."""
    chain: list[Node] = []
    guarded, number = frozenset[int](), subtracted
    while len(chain) < _DEEPEST:
        graph.steps.spend(1)
        node = graph.definitions.get(number)
        if node is None:
            return None
        chain.append(node)
        if node.name == "reduce_max":
            break
        if node.name == "select_n":
            number = node.inputs[-1]
            test = graph.definitions.get(node.inputs[0])
            if len(node.inputs) != 3 or test is None or test.name != "is_finite" or test.inputs != (number,):
                return None
            if node.inputs[1] not in zeros and not _is_zero(graph, node.inputs[1]):
                return None
            guarded = frozenset(later.outputs[0] for later in chain)
        elif node.name == "max":
            numbers = [n for n in node.inputs if graph.literals.get(n, 0) != -math.inf]
            if len(numbers) != 1:
                return None
            (number,) = numbers
        elif node.name in _SAME or moved(graph, node) is not None:
            (number,) = node.inputs
        else:
            return None
    last = chain[-1]
    if last.name != "reduce_max" or last.inputs != (exponent,):
        return None
    shape = graph.shape(exponent)
    reduced = frozenset(int(axis) for axis in last.params["axes"])
    axes: Axes = tuple(axis if shape[axis] > 1 else -1 for axis in range(len(shape)) if axis not in reduced)
    maxima = [(last.outputs[0], axes)]
    for node in reversed(chain[:-1]):
        if moved(graph, node) is not None:
            after = _axes_after(graph, node, axes)
            assert after is not None
            axes = after
        maxima.append((node.outputs[0], axes))
    if any(a not in (-1, axis) for axis, a in enumerate(axes)):
        return None  # not subtracted where it was taken
    if any(a == -1 and shape[axis] > 1 and axis not in reduced for axis, a in enumerate(axes)):
        return None
    return reduced, maxima, guarded


def _is_zero(graph: Graph, number: int) -> bool:
    """Returns whether each element of a value is a literal 0."""
    scalar = _scalar(graph, number)
    return scalar is not None and scalar in graph.literals and not np.any(graph.literals[scalar])


# ---------------------------------------------------------------------- the proof


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


class _Proof:
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
        if name not in ("reduce_sum", *_MOVES) and len(graph.shape(node.outputs[0])) != len(own.axes):
            return False, None
        if moved(graph, node) is not None:
            axes = _axes_after(graph, node, own.axes)
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
        return number in self.plan.zeros or _is_zero(self.graph, number)

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
            axes_after = _axes_after(graph, node, product.axes)
            assert axes_after is not None
            products[number] = Product(product.place, axes_after, product.factors, product.negative)

    def _factor(self, number: int, product: Product) -> tuple[int, Axes] | None:
        """Returns what an array is before it is repeated to the shape of a product, and its axes; None where it lacks
        none."""
        graph, axes = self.graph, product.axes
        if not graph.shape(number):
            return number, ()
        while (node := graph.definitions.get(number)) is not None:
            before = _axes_before(graph, node, axes)
            if before is None:
                break
            number, axes = node.inputs[0], before
            if not graph.shape(number):
                return number, ()
        axes = tuple(a if n > 1 else -1 for a, n in zip(axes, graph.shape(number), strict=True))
        shape = self.plan.sums[product.place].shape
        whole = {axis for axis, size in enumerate(shape) if size > 1}
        return (number, axes) if whole - set(axes) else None
