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

from autopallas.compat import ClosedJaxpr, JaxprAtom, JaxprEqn, Var
from autopallas.graph import Body, Graph, Node, flatten
from autopallas.graph.edit import surviving
from autopallas.graph.loop_slices import is_zero
from autopallas.kernels.respelling.exponential_plan import (
    MOVES,
    Axes,
    ExponentialSum,
    Group,
    Plan,
    Term,
    axes_after,
    axes_before,
    moved,
    scalar_of,
)
from autopallas.kernels.respelling.exponential_proof import Proof
from autopallas.kernels.respelling.small_exponentials import are_told

__all__ = ["may_sum", "planned"]

_DEEPEST, _MOST_TERMS, _MOST_GROUPS = 16, 8, 3
_LEAST_RATIO = 4
"""Exponentials that a step takes, over those that are left."""
_SUMS = frozenset({"add", "add_any", "sub"})
_SAME = frozenset({"copy", "stop_gradient"})


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
    return plan if Proof(plan, alive).holds() and not are_told(plan, carried or {}) else None


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
        if name in _SUMS | MOVES | {"neg", "mul", "div"}:
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
            if node.name == "mul" and scalar_of(graph, right) is None:
                left, right = right, left
            scalar = scalar_of(graph, right)
            if scalar is None or not graph.shape(left):
                return False
            return self.read(left, axes, ((node.name, scalar), *factors), depth + 1)
        before = axes_before(graph, node, axes)
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
            if node.inputs[1] not in zeros and not is_zero(graph, node.inputs[1]):
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
            after = axes_after(graph, node, axes)
            assert after is not None
            axes = after
        maxima.append((node.outputs[0], axes))
    if any(a not in (-1, axis) for axis, a in enumerate(axes)):
        return None  # not subtracted where it was taken
    if any(a == -1 and shape[axis] > 1 and axis not in reduced for axis, a in enumerate(axes)):
        return None
    return reduced, maxima, guarded
