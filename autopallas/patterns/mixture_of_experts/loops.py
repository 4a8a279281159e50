"""Recognises experts that are written out one after the other: equal computations on other matrices, added or stacked.

The computations are walked through together. Where all do the same to the same values, one of them stands for all. They
differ where they read slices of one array, or arrays of their own, or count. Mapped over these inputs, the one
computation gives what the loop gives. The sum over experts is then a sum over an axis, as in the spellings without a
loop.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopallas import compat, jaxprs
from autopallas.compat import ClosedJaxpr, Dtype, Jaxpr, JaxprAtom, JaxprEqn, Literal, Shaped, ShapedArray, Var
from autopallas.graph import Graph, Node
from autopallas.graph.custom_rules import rule_of
from autopallas.graph.extract import closed, jaxpr_of, nodes_between
from autopallas.graph.labels import is_product
from autopallas.numerics.casts import counts_exactly, kind_of
from autopallas.patterns.advice import CAPTURED, CHOOSE_FEW
from autopallas.patterns.expressions import Scope
from autopallas.patterns.match import Mismatch
from autopallas.patterns.mixture_of_experts.axes import choice_axes
from autopallas.patterns.mixture_of_experts.choice import Choices
from autopallas.patterns.mixture_of_experts.refusals import DENSE
from autopallas.patterns.mixture_of_experts.signs import Signs
from autopallas.patterns.mixture_of_experts.steps import Steps

__all__ = ["Loop", "added_on_the_way", "even_sums", "loop_at", "rolled", "selected_on_the_way"]

_STEPS_TO_STACK = 16
_MOST = 4096
_REPEATS = frozenset({"convert_element_type", "broadcast_in_dim", "reshape", "squeeze", "expand_dims"})


@dataclass(frozen=True, slots=True)
class _Leaf:
    """An input of the computations: ``mapped`` stacks one value for each along the first axis; without it, all share
    one."""

    numbers: tuple[int, ...]
    mapped: Callable[[Sequence[jax.Array]], jax.Array] | None = None
    axis: int | None = None
    """Axis of ``numbers[0]`` along which each computation reads one slice."""


@dataclass(slots=True)
class Loop:
    """Equal computations of several experts.

    Attributes:
      target: the sum or the concatenation of their results.
      axis: the axis along which they are concatenated; None where they are added.
      count: how many there are.
      visited: the values that they compute.
      products: the contractions among these values.
      leaves: what they read.
      term: one of them, as a jaxpr from the leaves.
    """

    target: int
    axis: int | None
    joined: bool
    """Whether the results have that axis already, of size 1."""
    count: int
    visited: set[int] = field(default_factory=set)
    products: set[int] = field(default_factory=set)
    leaves: list[_Leaf] = field(default_factory=list)
    term: ClosedJaxpr | None = None
    compares: bool = False
    """Whether the computations compare something with the number of an expert, that is, with their position in the
    loop."""

    def choices(self, graph: Graph, root: int) -> set[int]:
        """Returns the values that tell which expert is chosen, beside those in the computations."""
        scope = Scope(graph)
        space = scope.space
        sliced = [(leaf.numbers[0], leaf.axis) for leaf in self.leaves if leaf.axis is not None]
        if self.compares:  # they may read shared values at their own numbers
            shared = [leaf.numbers[0] for leaf in self.leaves if leaf.mapped is None and leaf.numbers]
            bits = choice_axes(graph)
            sliced += [(n, d) for n in shared for d, size in enumerate(graph.shape(n))
                       if size == self.count and bits[n] >> d & 1]  # fmt: skip
        # The ends of the experts' rows are part of the site: their counts are read too.
        numbers = {leaf.numbers[0] for leaf in self.leaves if leaf.numbers and graph.name(leaf.numbers[0]) == "cumsum"}
        for number, axis in sliced:
            ref = space.full(number)
            found = Choices(scope, space.resolve(ref.view[axis][1]))
            found.search(ref)
            numbers |= {choice.number for choice in found.found}
        if root != self.target:
            contraction = space.contraction(space.full(root))
            if contraction is not None:
                found = Choices(scope, space.resolve([x for _, atoms in contraction[2] for x in atoms]))
                for factor in contraction[:2]:
                    found.search(factor)
                numbers |= {choice.number for choice in found.found}
        return numbers


def loop_at(graph: Graph, root: int) -> Loop | None:
    """Finds the loop whose results are added to the value ``root``, or stacked and then summed to it."""
    node = graph.definitions.get(root)
    if node is None or not jnp.issubdtype(graph.dtype(root), jnp.floating):
        return None
    if node.name == "scan":
        return _scan(graph, node, root)
    if node.name == "add":
        terms = _added(graph, root)
        return None if terms is None else _loop(graph, Loop(root, None, False, len(terms)), terms)
    if node.name == "select_n":
        cases = _cases(graph, node) if len(node.inputs) > 3 else _selected(graph, root)
        return None if cases is None else _loop(graph, Loop(root, None, False, len(cases.values)), cases.values, cases)
    for stack, value in _stacks(graph, root):
        if stack.name == "scan":
            scan = _scan(graph, stack, value)
            if scan is not None:
                return scan
            continue
        joined = stack.name == "concatenate"
        axis = int(stack.params["dimension" if joined else "axis"])
        loop = _loop(graph, Loop(stack.outputs[0], axis, joined, len(stack.inputs)), stack.inputs)
        if loop is not None:
            return loop
    return None


def _added(graph: Graph, root: int) -> tuple[int, ...] | None:
    """Returns the terms of a sum that is written out, in order."""
    terms: list[int] = []
    value = root
    while graph.name(value) == "add" and len(terms) < _MOST:
        left, right = graph.definitions[value].inputs
        if graph.shape(left) != graph.shape(value) or graph.shape(right) != graph.shape(value):
            break
        terms.append(right)
        value = left
    if not _is_zero(graph, value):
        if graph.name(value) == "add":  # the literal zero with which Python's sum begins
            ends = [i for i in graph.definitions[value].inputs if not _is_zero(graph, i)]
            value = ends[0] if len(ends) == 1 else value
        terms.append(value)
    return tuple(terms[::-1]) if len(terms) > 1 else None


@dataclass(frozen=True, slots=True)
class _Cases:
    """Experts one of which is selected by a number: expert e by the number e + ``first``.

    Attributes:
      values: what the experts compute.
      number: the number of the value that selects.
      tests: the comparisons of that value in the program, and the selections.
      repeated: the comparison with 0, and the same repeated along further axes.
    """

    values: tuple[int, ...]
    number: int
    first: int
    tests: frozenset[int] = frozenset()
    repeated: tuple[int, int] | None = None


def _cases(graph: Graph, node: Node) -> _Cases | None:
    """Reads a selection among several cases; some of the first and some of the last cases may be zero."""
    number, *cases = node.inputs
    if kind_of(graph.dtype(number)) != "i" or not Signs(graph).counts_below(number, len(cases)):
        return None
    wanted = [i for i, case in enumerate(cases) if not _is_zero(graph, case)]
    if len(wanted) < 2 or wanted != list(range(wanted[0], wanted[-1] + 1)):
        return None
    return _Cases(tuple(cases[i] for i in wanted), number, wanted[0])


def _selected(graph: Graph, root: int) -> _Cases | None:
    """Reads ``where(chosen == e, y[e], where(...))``.

    One number is compared with 0, 1, ..., so that at most one comparison holds; where none does, zero is selected.
    """
    found: dict[int, int] = {}
    compared: set[int] = set()
    tests: set[int] = set()
    ways: set[tuple[tuple[Hashable, tuple[int, ...]], ...]] = set()
    repeated: tuple[int, int] | None = None
    value = root
    while graph.name(value) == "select_n" and len(found) < _MOST:
        graph.steps.spend()
        which, *cases = graph.definitions[value].inputs
        test = graph.definitions.get(_without_repeats(graph, which))
        if len(cases) != 2 or test is None or test.name != "eq":
            return None
        numbers = [(n, _literal(graph, other)) for n, other in (test.inputs, test.inputs[::-1])]
        number, own = next(((n, e) for n, e in numbers if e is not None), (-1, None))
        if own is None or own in found or kind_of(graph.dtype(number)) not in "iu":
            return None
        compared.add(number)
        way, between = [], which
        while between != test.outputs[0]:
            node = graph.definitions[between]
            way.append((graph.key(node.equation, (), ()), graph.shape(between)))
            tests.add(between)
            between = node.inputs[0]
        ways.add(tuple(way))
        tests |= {value, test.outputs[0]}
        found[own] = cases[1]
        if own == 0:
            repeated = test.outputs[0], which
        value = cases[0]
    if len(compared) != 1 or len(ways) != 1 or any(key is None for way in ways for key, _ in way):
        return None
    if sorted(found) != list(range(len(found))) or len(found) < 2 or not _is_zero(graph, value):
        return None
    return _Cases(tuple(found[e] for e in range(len(found))), compared.pop(), 0, frozenset(tests), repeated)


def _without_repeats(graph: Graph, number: int) -> int:
    """Returns a value without the axes along which it is repeated."""
    while graph.name(number) in ("broadcast_in_dim", "reshape", "squeeze", "expand_dims"):
        number = graph.definitions[number].inputs[0]
    return number


def _literal(graph: Graph, number: int) -> int | None:
    """Returns the whole number that all elements of a value are equal to, if it is known."""
    literal = graph.literals.get(_without_repeats(graph, number))
    return int(literal) if literal is not None and literal.dtype.kind in "iu" and literal.ndim == 0 else None


def even_sums(graph: Graph) -> dict[int, tuple[str | None, int]]:
    """Returns, per partial sum of a written-out sum, the primitive that computes all its terms (None if they differ)
    and the first partial sum."""
    found: dict[int, tuple[str | None, int]] = {}
    for node in graph.nodes:
        if node.name != "add":
            continue
        left, right = node.inputs
        name, first = graph.name(right), node.outputs[0]
        before = found.get(left)
        if before is not None and graph.shape(left) == graph.shape(right):
            name, first = (name if before[0] == name else None), before[1]
        elif not _is_zero(graph, left) and graph.name(left) != name:
            name = graph.name(left) if _is_zero(graph, right) else None
        found[node.outputs[0]] = name, first
    return found


def added_on_the_way(graph: Graph, root: int) -> list[int]:
    """Returns the sums of fewer terms that a sum is made of."""
    sums: list[int] = []
    value = root
    while graph.name(value) == "add" and len(sums) < _MOST:
        sums.append(value)
        value = graph.definitions[value].inputs[0]
    return sums


def _is_zero(graph: Graph, number: int) -> bool:
    node = graph.definitions.get(number)
    while node is not None and node.name in ("broadcast_in_dim", "convert_element_type"):
        number = node.inputs[0]
        node = graph.definitions.get(number)
    return number in graph.literals and bool(np.all(graph.literals[number] == 0))


def _stacks(graph: Graph, root: int) -> Iterator[tuple[Node, int]]:
    """Yields the concatenations of single slices, and the loops, a few steps before a value, each with its result."""
    seen: set[int] = set()
    todo = [(root, 0)]
    while todo:
        number, steps = todo.pop(0)
        node = graph.definitions.get(number)
        if node is None or number in seen or steps > _STEPS_TO_STACK:
            continue
        seen.add(number)
        if node.name in ("stack", "scan"):
            yield node, number
        elif node.name == "concatenate":
            axis = int(node.params["dimension"])
            if len(node.inputs) > 1 and all(graph.shape(i)[axis] == 1 for i in node.inputs):
                yield node, number
        elif number == root or node.name in ("reshape", "transpose", "broadcast_in_dim", "mul", "convert_element_type",
                                             "squeeze", "dot_general", "select_n"):  # fmt: skip
            todo += [(i, steps + 1) for i in node.inputs]


def _loop(graph: Graph, loop: Loop, values: Sequence[int], cases: _Cases | None = None) -> Loop | None:
    """Builds a loop whose results are ``values``, added up; of ``cases``, each counts only where it is selected."""
    if len({graph.name(v) for v in values}) != 1 or len(set(values)) != len(values) or len(values) < 2:
        return None
    walk = _Walk(graph, loop, cases)
    result = walk.atom(tuple(values))
    if not loop.products or isinstance(result, Literal):
        return None
    loop.visited.add(loop.target)
    loop.compares = walk.compares
    loop.term = closed(walk.inputs, [result], walk.equations)
    if cases is not None:
        _select(graph, loop, cases, walk.inputs)
    return loop


def _select(graph: Graph, loop: Loop, cases: _Cases, inputs: Sequence[Var]) -> None:
    """Makes the term of a loop zero where its expert is not selected."""
    loop.compares = True
    loop.visited |= cases.tests
    first = _without_repeats(graph, cases.number) if cases.repeated is None else cases.number
    start, end = cases.repeated or (first, cases.number)
    nodes, _ = nodes_between(graph, [start], [end])
    loop.visited.update(n for node in nodes for n in node.outputs)
    repeat = compat.jaxpr_as_fun(jaxpr_of(graph, nodes, [start], [end]))
    assert loop.term is not None
    value, number = compat.jaxpr_as_fun(loop.term), graph.avals[first]
    loop.leaves.append(_Leaf((first,)))
    loop.leaves.append(_Leaf((), lambda _: jnp.arange(loop.count, dtype=number.dtype)))

    def term(*given: jax.Array) -> jax.Array:
        *own, which, expert = given
        (found,) = value(*own)
        if cases.repeated is not None:
            (holds,) = repeat(which == expert)
        else:
            holds = repeat(which - cases.first if cases.first else which)[0] == expert
        return jnp.where(holds, found, jnp.zeros((), found.dtype))

    types: list[Shaped] = [v.aval for v in inputs] + [number, jax.ShapeDtypeStruct((), number.dtype)]
    loop.term = compat.make_jaxpr(term, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in types))


def selected_on_the_way(graph: Graph, root: int) -> Iterator[int]:
    """Yields the selections of fewer experts that a selection is made of."""
    while graph.name(root) == "select_n":
        yield root
        root = graph.definitions[root].inputs[1]


def _scan(graph: Graph, node: Node, value: int) -> Loop | None:
    """Reads a scan as a loop over experts, whose results it stacks, or whose sum is all that it carries.

    Beside a sum it may count its steps, and the rows of earlier experts. Instead of adding, it may select what an
    expert computes, if no two experts are selected for one element.
    """
    equation = node.equation
    consts, carried = compat.scan_parts(equation)
    place = node.outputs.index(value)
    body, _ = jaxprs.open_jaxpr(equation.params["jaxpr"])
    carries = body.invars[consts : consts + carried]
    stacked, length = place >= carried, equation.params["length"]
    counters = [i for i in range(carried) if _counts(graph, node, body, consts, i)]
    steps = Steps(graph, node)
    before = {i: found for i in range(carried) if i not in counters and (found := steps.running_sum(i)) is not None}
    others = [i for i in range(carried) if i not in counters and i not in before]
    if equation.effects or others != ([] if stacked else [place]):
        return None
    if equation.params["reverse"] and (counters or before):
        return None
    if not stacked:
        if not _is_zero(graph, node.inputs[consts + place]):
            return None
        if not _accumulates(body, consts, place):
            if not steps.selects(place):
                return None
            if not steps.selects_one(place):
                if not (steps.contracts and (counters or before or _slices(graph, node, consts + carried))):
                    return None
                raise Mismatch(
                    f"{DENSE}, in a loop that selects what they compute, and an element may be selected for two of "
                    "them",
                    advice=CHOOSE_FEW,
                )
    axis = 0 if stacked else None
    own = {number for number in node.outputs if graph.definitions.get(number) is node}
    loop = Loop(value, axis, False, length, set(own), own)
    given = [*node.inputs[:consts], *node.inputs[consts + carried :]]
    variables = [*body.invars[:consts], *body.invars[consts + carried :]]
    for i, number in enumerate(given):
        loop.leaves.append(_Leaf((number,)) if i < consts else _Leaf((number,), lambda arrays: arrays[0], 0))
    for i in counters:
        loop.leaves.append(_Leaf((), partial(_positions, length, carries[i].aval.dtype)))
        variables.append(carries[i])
    for i, number in before.items():
        loop.leaves.append(_Leaf((number,), _before))
        variables.append(carries[i])
    run = compat.jaxpr_as_fun(equation.params["jaxpr"])
    last = len(given)

    def term(*own: jax.Array) -> jax.Array:
        known = dict(zip([*counters, *before], own[last:], strict=True))
        carry = [known.get(i, jnp.zeros(v.aval.shape, v.aval.dtype)) for i, v in enumerate(carries)]
        return run(*own[:consts], *carry, *own[consts:last])[place]

    loop.term = compat.make_jaxpr(term, *(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in variables))
    loop.compares = bool(counters or before or _slices(graph, node, consts + carried))
    return loop


def _before(counts: Sequence[jax.Array]) -> jax.Array:
    """Counts the rows of the experts before each one."""
    return jnp.cumsum(counts[0], axis=0, dtype=counts[0].dtype) - counts[0]


def _positions(count: int, dtype: Dtype, _: Sequence[jax.Array]) -> jax.Array:
    return jnp.arange(count, dtype=dtype)


def _counts(graph: Graph, node: Node, body: Jaxpr, consts: int, place: int) -> bool:
    """Returns whether a scan counts its steps, from zero on, in what it carries at a place."""
    carry, after = body.invars[consts + place], body.outvars[place]
    if _literal(graph, node.inputs[consts + place]) != 0 or carry.aval.shape or kind_of(carry.aval.dtype) not in "iu":
        return False
    equation = next((e for e in body.eqns if after in e.outvars), None)
    if equation is None or equation.primitive.name != "add":
        return False
    steps = [a for a in equation.invars if a is not carry]
    by_one = len(steps) == 1 and isinstance(steps[0], Literal) and int(steps[0].val) == 1
    return by_one and counts_exactly(carry.aval.dtype, int(node.params["length"]))


def _slices(graph: Graph, node: Node, first: int) -> list[int]:
    """Returns the numbers of the single integers that a scan reads one by one."""
    position = node.body.defined[node.equation.outvars[0]]
    (child,) = node.body.children[position]
    numbers = graph.numbers[child.body]
    return [numbers[v] for v in child.body.invars[first:] if v.aval.size == 1 and kind_of(v.aval.dtype) in "iu"]


def _accumulates(body: Jaxpr, consts: int, place: int) -> bool:
    """Returns whether a loop's body adds something to what it carries at a place, and does nothing else with it."""
    carry = body.invars[consts + place]
    readers = [e for e in body.eqns if any(a is carry for a in e.invars)]
    if len(readers) != 1 or readers[0].primitive.name != "add" or body.outvars[place] is not readers[0].outvars[0]:
        return False
    if sum(a is carry or a is readers[0].outvars[0] for a in body.outvars) != 1:
        return False
    return all(a is carry or getattr(a, "aval", None) == carry.aval for a in readers[0].invars)


class _Walk:
    """Walks through equal computations together and writes one of them down."""

    def __init__(self, graph: Graph, loop: Loop, cases: _Cases | None = None):
        self.graph, self.loop, self._cases = graph, loop, cases
        self.inputs: list[Var] = []
        self.equations: list[JaxprEqn] = []
        self.compares = False
        """Whether a counting value is compared."""
        self._known: dict[tuple[int, ...], JaxprAtom | None] = {}
        self._counting: set[Var] = set()

    def atom(self, values: tuple[int, ...]) -> JaxprAtom:
        """Returns the atom that stands for these values, one of each computation."""
        values = self._plain(values)
        todo = [values]
        while todo:
            current = todo[-1]
            if current not in self._known:
                self.graph.steps.spend(len(current))
                self._known[current] = self._same(current)
                if self._known[current] is None:
                    nodes = self._equal(current)
                    inputs = [] if nodes is None else list(zip(*(node.inputs for node in nodes), strict=True))
                    operands = [self._plain(own) for own in inputs]
                    waiting = [own for own in operands if own not in self._known]
                    if waiting:
                        del self._known[current]
                        todo += waiting[::-1]
                        continue
                    self._known[current] = (
                        self._differing(current) if nodes is None else self._equation(current, nodes, operands)
                    )
            todo.pop()
        found = self._known[values]
        assert found is not None
        return found

    def _plain(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """Strips selections between a value and the same value with a stopped derivative, and marks them as visited.

        JAX's map of a switch makes such selections where another expert is selected.
        """
        if self._cases is None or len(values) != self.loop.count:
            return values
        graph, found = self.graph, []
        for expert, value in enumerate(values):
            node = graph.definitions.get(value)
            if node is not None and node.name == "select_n" and len(node.inputs) == 3:
                if not self._selects(node.inputs[0], expert):
                    return values
                stopped, kept = node.inputs[1:]
                way = self._stops(stopped, kept)
                if way:
                    self.loop.visited |= {value, *way}
                    value = kept
            found.append(value)
        return tuple(found)

    def _selects(self, number: int, expert: int) -> bool:
        """Returns whether a value tells that an expert is the selected one; if so, marks what computes it as
        visited."""
        graph, cases = self.graph, self._cases
        compared = _without_repeats(graph, number)
        test = graph.definitions.get(compared)
        if test is None or test.name != "eq" or cases is None:
            return False
        selecting = _without_repeats(graph, cases.number)
        for n, other in (test.inputs, test.inputs[::-1]):
            if _without_repeats(graph, n) == selecting and _literal(graph, other) == expert + cases.first:
                nodes, _ = nodes_between(graph, [selecting], [number])
                self.loop.visited.update(output for node in nodes for output in node.outputs)
                return True
        return False

    def _stops(self, stopped: int, kept: int) -> list[int]:
        """Returns the values between one with a stopped derivative and the same one without; none if they differ
        otherwise."""
        graph, way = self.graph, []
        while stopped != kept:
            first, second = graph.definitions.get(stopped), graph.definitions.get(kept)
            if first is None:
                return []
            graph.steps.spend()
            way.append(stopped)
            if first.name == "stop_gradient":
                stopped = first.inputs[0]
            elif second is not None and first.name in _REPEATS and self._key(first) == self._key(second):
                stopped, kept = first.inputs[0], second.inputs[0]
            else:
                return []
        return way

    def _same(self, values: tuple[int, ...]) -> JaxprAtom | None:
        graph = self.graph
        first = values[0]
        if any(v != first for v in values):
            return None
        if first in graph.literals:
            return Literal(graph.literals[first], graph.avals[first])
        return self._input(_Leaf((first,)), graph.avals[first])

    def _equal(self, values: tuple[int, ...]) -> list[Node] | None:
        """Returns the equations that compute these values, if they do the same."""
        graph = self.graph
        nodes = [graph.definitions[v] for v in values if v in graph.definitions]
        if len(nodes) != len(values) or len({id(node) for node in nodes}) != len(nodes):
            return None
        places = {node.outputs.index(v) for node, v in zip(nodes, values, strict=True)}
        if len({self._key(node) for node in nodes}) != 1 or len(places) != 1:
            return None
        return None if any(node.equation.effects for node in nodes) or not nodes[0].inputs else nodes

    def _equation(
        self, values: tuple[int, ...], nodes: list[Node], operands: list[tuple[int, ...]]
    ) -> JaxprAtom | None:
        graph = self.graph
        atoms = [self._known[own] for own in operands]
        outputs = [Var(graph.avals[n]) for n in nodes[0].outputs]
        self.equations.append(nodes[0].equation.replace(invars=atoms, outvars=outputs))
        if any(isinstance(atom, Var) and atom in self._counting for atom in atoms):
            self.compares = self.compares or nodes[0].name == "eq"
            if nodes[0].name in _REPEATS:
                self._counting.update(outputs)
        for numbers, variable in zip(zip(*(node.outputs for node in nodes), strict=True), outputs, strict=True):
            self._known[numbers] = variable
            self.loop.visited.update(numbers)
            if nodes[0].name == "dot_general" and not is_product(nodes[0]):
                self.loop.products.update(numbers)
        return self._known[values]

    def _key(self, node: Node) -> Hashable:
        """Returns a key that is equal for equations that do the same."""
        if node.name == "custom_jvp_call":
            rule = rule_of(node.equation)
            return id(node) if rule is None else (node.name, rule)
        if jaxprs.bodies(node.equation):
            return id(node)
        key = self.graph.key(node.equation, (), ())
        return id(node) if key is None else key

    def _differing(self, values: tuple[int, ...]) -> Var:
        graph, count = self.graph, self.loop.count
        aval = graph.avals[values[0]]
        if all(v in graph.literals for v in values):
            numbers = [graph.literals[v] for v in values]
            dtype = np.dtype(aval.dtype)
            if kind_of(dtype) in "iu" and [int(n) for n in numbers] == list(range(count)):
                counting = self._input(_Leaf((), lambda _: jnp.arange(count, dtype=dtype)), aval)
                self._counting.add(counting)
                return counting
            return self._input(_Leaf((), lambda _: jnp.asarray(np.stack(numbers))), aval)
        sliced = self._sliced(values)
        if sliced is not None:
            return self._input(sliced, aval)
        return self._input(_Leaf(values, lambda arrays: jnp.stack(arrays)), aval)

    def _sliced(self, values: tuple[int, ...]) -> _Leaf | None:
        """Returns the array whose slices along one axis these values are, from the first to the last."""
        graph = self.graph
        nodes = [graph.definitions.get(v) for v in values]
        if nodes[0] is not None and nodes[0].name == "unstack" and nodes[0].outputs == values:
            along = int(nodes[0].params["axis"])
            self.loop.visited.update(values)
            return _Leaf(nodes[0].inputs, lambda arrays: jnp.moveaxis(arrays[0], along, 0), along)
        if any(node is None or node.name != "slice" for node in nodes):
            return None
        given = [node for node in nodes if node is not None]
        (source, *others) = set(self._plain(tuple(node.inputs[0] for node in given)))
        starts = np.array([node.params["start_indices"] for node in given])
        moving = [axis for axis in range(starts.shape[1]) if len(set(starts[:, axis].tolist())) > 1]
        if others or len(moving) != 1 or any(s != 1 for node in given for s in node.params["strides"] or ()):
            return None
        (axis,) = moving
        shape = list(graph.shape(source))
        if starts[:, axis].tolist() != list(range(shape[axis])) or starts.sum() != starts[:, axis].sum():
            return None
        shape[axis] = 1
        if any(list(graph.shape(v)) != shape for v in values):
            return None
        self.loop.visited.update(values)
        return _Leaf((source,), lambda arrays: jnp.expand_dims(jnp.moveaxis(arrays[0], axis, 0), axis + 1), axis)

    def _input(self, leaf: _Leaf, aval: ShapedArray) -> Var:
        self.loop.leaves.append(leaf)
        self.inputs.append(Var(aval))
        return self.inputs[-1]


def rolled(graph: Graph, root: int, loop: Loop) -> ClosedJaxpr:
    """Rewrites the program of a graph with a map over experts in the place of the loop."""
    inputs = [graph.numbers[graph.root][v] for v in graph.root.invars]
    wanted = list(dict.fromkeys(number for leaf in loop.leaves for number in leaf.numbers))
    nodes, missing = nodes_between(graph, inputs, wanted)
    if missing:
        raise Mismatch("a captured array is read in a loop over experts", advice=CAPTURED)
    before = compat.jaxpr_as_fun(jaxpr_of(graph, nodes, inputs, wanted))
    nodes, missing = nodes_between(graph, [*inputs, loop.target], [root])
    if missing:
        raise Mismatch("a captured array is read behind a loop over experts", advice=CAPTURED)
    after = compat.jaxpr_as_fun(jaxpr_of(graph, nodes, [*inputs, loop.target], [root]))

    assert loop.term is not None
    term = compat.jaxpr_as_fun(loop.term)

    def function(*operands: jax.Array) -> jax.Array:
        arrays = dict(zip(wanted, before(*operands), strict=True))
        given = []
        for leaf in loop.leaves:
            own = [arrays[number] for number in leaf.numbers]
            given.append(own[0] if leaf.mapped is None else leaf.mapped(own))
        axes = [None if leaf.mapped is None else 0 for leaf in loop.leaves]
        (each,) = jax.vmap(term, in_axes=axes)(*given)
        if loop.axis is not None:
            whole = jnp.moveaxis(jnp.squeeze(each, loop.axis + 1) if loop.joined else each, 0, loop.axis)
        else:
            whole = lax.reduce(each, np.zeros((), each.dtype), lax.add, (0,))
        return after(*operands, whole)[0] if loop.target != root else whole

    return compat.make_jaxpr(function, *(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in graph.root.invars))
