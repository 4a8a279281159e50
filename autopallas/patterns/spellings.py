"""Finds where a program computes the reference function of a pattern that the user declared.

The search takes two steps. First, the reference's value-numbered graph is laid over the program's by the names of
primitives alone, which tells the operands and the values of scalars. Then the reference is traced for exactly these
operands and scalars, and its equations are looked up with all their parameters. The loose first comparison only finds
out what to compare exactly.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import jax
import numpy as np
from jax.typing import ArrayLike

from autopallas import compat, jaxprs
from autopallas.compat import JaxprLike, Literal, Shaped, Var
from autopallas.custom.operation import site_for
from autopallas.custom.registry import Pattern
from autopallas.errors import OptionError, one_line
from autopallas.faults import contained
from autopallas.graph import Graph, Node, flatten
from autopallas.graph.edit import surviving
from autopallas.graph.extract import closed, jaxpr_of, nodes_between
from autopallas.graph.program_digests import digest
from autopallas.numerics.casts import kind_of
from autopallas.patterns.escapes import CALLS, complete
from autopallas.patterns.match import Match, NearMiss

__all__ = ["check", "find"]

_COMMUTATIVE = frozenset({"add", "mul", "add_any", "max", "min", "and", "or", "xor", "eq", "ne"})
_OTHER_AXES = "Give the operands the axes that the pattern declares, or declare another pattern for these."
_LOOPS = jaxprs.CHECKPOINTS | {"scan", "while", "cond", "shard_map"}


class Reference:
    """A reference function, traced and numbered for operands of certain types.

    With ``dissolved``, custom rules such as that of ``jax.nn.relu`` are replaced by what they compute, as JAX does when
    it differentiates.
    """

    def __init__(self, pattern: Pattern, types: Sequence[Shaped], scalars: dict[str, float], dissolved: bool = False):
        shapes = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in types]
        program = compat.make_jaxpr(lambda *x: pattern.reference(*x, **scalars), *shapes)
        if dissolved:
            program = compat.make_jaxpr(lambda *x: _dissolved(program, x), *shapes)
        self.graph = Graph(flatten(program))
        root = self.graph.root
        positions = self.graph.numbers[root]
        self.inputs = [positions[v] for v in root.invars]
        self.results = [a if isinstance(a, Literal) else positions[a] for a in root.outvars]

    @property
    def result(self) -> int:
        found = self.results[0]
        assert isinstance(found, int)
        return found


def _dissolved(program: JaxprLike, operands: Sequence[ArrayLike]) -> list[ArrayLike]:
    """Evaluates a closed jaxpr without its custom rules."""
    jaxpr, consts = jaxprs.open_jaxpr(program)
    known: dict[Var, ArrayLike] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *operands], strict=True))
    for equation in jaxpr.eqns:
        inputs = [atom.val if isinstance(atom, Literal) else known[atom] for atom in equation.invars]
        bodies = jaxprs.bodies(equation)
        if equation.primitive.name in CALLS or compat.is_plain_jit(equation):
            results: Sequence[ArrayLike] = _dissolved(bodies[0][2], inputs)
        else:
            read = list(dict.fromkeys(atom for atom in equation.invars if isinstance(atom, Var)))
            given = [Var(v.aval) for v in equation.outvars]
            alone = closed(read, given, [equation.replace(outvars=given)])
            results = compat.jaxpr_as_fun(alone)(*(known[v] for v in read))
        known.update(zip(equation.outvars, results, strict=True))
    return [atom.val if isinstance(atom, Literal) else known[atom] for atom in jaxpr.outvars]


def check(pattern: Pattern) -> None:
    """Checks that a reference can be looked for.

    Raises:
      OptionError: it cannot, with the reason.
    """

    def wrong(why: str) -> OptionError:
        return OptionError(f"the reference of the pattern {pattern.name} {why}")

    try:
        reference = Reference(pattern, pattern.shapes, pattern.marks)
    except Exception as error:
        raise wrong(f"cannot be traced: {one_line(error)}") from error
    graph = reference.graph
    if len(reference.results) != 1:
        raise wrong(f"returns {len(reference.results)} arrays, not one")
    if not isinstance(reference.results[0], int) or reference.result not in graph.definitions:
        raise wrong("computes nothing")
    if graph.constants:
        raise wrong("holds an array of its own; make it an operand")
    nodes, _ = nodes_between(graph, reference.inputs, [reference.result])
    for node in nodes:
        if node.name in _LOOPS:
            raise wrong(f"holds a {node.name}, which cannot be looked for")
        if node.equation.effects:
            raise wrong("has side effects")
    read = {number for node in nodes for number in node.inputs}
    for position, number in enumerate(reference.inputs):
        if number not in read:
            raise wrong(f"does not use its operand {position}")
    found = {_real(value) for number, value in graph.literals.items() if number in read and np.ndim(value) == 0}
    for name, mark in pattern.marks.items():
        if not any(_close(mark, value) for value in found):
            raise wrong(f"does not use its scalar {name} as it is given")


def find(graph: Graph, patterns: Sequence[Pattern]) -> tuple[list[Match], list[NearMiss]]:
    """Finds every use of declared patterns in a graph, and uses that cannot be replaced."""
    matches: list[Match] = []
    misses: list[NearMiss] = []
    alive = surviving(graph) if patterns else frozenset()
    for pattern in patterns:
        with contained(op=pattern.name):
            finders = [_Finder(graph, pattern, alive)]
            if finders[0].calls:
                finders.append(_Finder(graph, pattern, alive, dissolved=True))
            sites = [site for finder in finders for site in finder.sites()]
            found, missed = complete(graph, sites)
            matches += found
            misses += [*missed, *(miss for finder in finders for miss in finder.misses)]
    return matches, misses


def _real(literal: np.ndarray) -> float:
    """Returns the real part of a number: what else it has differs where equations are compared."""
    return float(np.real(literal))


def _close(mark: float, value: float) -> bool:
    return abs(mark - value) < 4e-3  # bfloat16 keeps three digits


class _Finder:
    """Looks for one pattern."""

    def __init__(self, graph: Graph, pattern: Pattern, alive: frozenset[int], dissolved: bool = False):
        self.graph, self.pattern, self.alive, self.dissolved = graph, pattern, alive, dissolved
        self.marks = pattern.marks
        self.shape = Reference(pattern, pattern.shapes, self.marks, dissolved)
        self.calls = any(node.name in CALLS for node in self.shape.graph.nodes)
        self._exact: dict[Hashable, Reference] = {}
        self.misses: list[NearMiss] = []

    def sites(self) -> Iterator[tuple[Match, Node]]:
        """Yields (forward, the node that gives its result) for each place, except those inside a place found before."""
        name = self.shape.graph.definitions[self.shape.result].name
        covered: set[int] = set()
        for node in reversed(self.graph.nodes):
            if node.name != name or node.outputs[0] not in self.alive or node.outputs[0] in covered:
                continue
            match = None
            with contained(node):
                match = self._match(node)
            if match is not None:
                covered.update(number for inner in match.equations for number in inner.outputs)
                yield match, node

    def _match(self, node: Node) -> Match | None:
        for bound in self._laid(self.shape.result, node.outputs[0], {}):
            operands = [bound.get(number) for number in self.shape.inputs]
            if None in operands:
                continue
            numbers = [n for n in operands if n is not None]
            if any(n in self.graph.literals for n in numbers):
                continue
            match = self._exactly(node, numbers, self._scalars(bound))
            if match is not None:
                return match
        return None

    # ------------------------------------------------------------------ by the names of primitives

    def _laid(self, ours: int, theirs: int, bound: dict[int, int]) -> Iterator[dict[int, int]]:
        """Yields the ways to lay a value of the reference over one of the program."""
        if ours in bound:
            if bound[ours] == theirs:
                yield bound
            return
        pattern = self.shape.graph
        if ours in self.shape.inputs:
            yield bound | {ours: theirs}
            return
        if ours in pattern.literals:
            if theirs in self.graph.literals:
                yield bound | {ours: theirs}
            return
        node, other = pattern.definitions.get(ours), self.graph.definitions.get(theirs)
        if node is None or other is None or node.name != other.name or len(node.inputs) != len(other.inputs):
            return
        if node.outputs.index(ours) != other.outputs.index(theirs):
            return
        orders = [other.inputs]
        if node.name in _COMMUTATIVE and len(other.inputs) == 2 and other.inputs[0] != other.inputs[1]:
            orders.append(other.inputs[::-1])
        for inputs in orders:
            yield from self._all_laid(list(zip(node.inputs, inputs, strict=True)), bound | {ours: theirs})

    def _all_laid(self, pairs: list[tuple[int, int]], bound: dict[int, int]) -> Iterator[dict[int, int]]:
        if not pairs:
            yield bound
            return
        for wider in self._laid(*pairs[0], bound):
            yield from self._all_laid(pairs[1:], wider)

    def _scalars(self, bound: dict[int, int]) -> dict[str, float]:
        """Returns the program's values of the scalars, from the literals that lie under theirs."""
        scalars: dict[str, float] = {}
        for number, value in self.shape.graph.literals.items():
            if number in bound and np.ndim(value) == 0 and kind_of(self.shape.graph.dtype(number)) in "fc":
                for name, mark in self.marks.items():
                    if _close(mark, _real(value)):
                        scalars.setdefault(name, _real(self.graph.literals[bound[number]]))
        return scalars

    # ------------------------------------------------------------------ with all their parameters

    def _exactly(self, node: Node, operands: Sequence[int], scalars: dict[str, float]) -> Match | None:
        """Returns the match, if the program computes exactly what the reference does from these operands."""
        graph, pattern = self.graph, self.pattern
        if set(scalars) != set(pattern.scalars):
            return None
        types = tuple((graph.shape(n), str(graph.dtype(n))) for n in operands)
        key = (types, tuple(sorted(scalars.items())))
        if key not in self._exact:
            try:
                self._exact[key] = Reference(pattern, [graph.avals[n] for n in operands], scalars, self.dissolved)
            except Exception:  # the reference does not accept these shapes
                return None
        reference = self._exact[key]
        if not isinstance(reference.results[0], int):
            return None
        numbers = _looked_up(graph, reference, operands, graph.frames[node.body])
        if numbers is None or numbers.get(reference.result) != node.outputs[0]:
            return None
        nodes, free = nodes_between(graph, operands, [node.outputs[0]])
        if free or any(inner.equation.effects for inner in nodes):
            return None
        values = list(dict.fromkeys(operands))
        positions = [values.index(number) for number in operands]
        avals = [graph.avals[number] for number in operands]
        try:
            site = site_for(pattern, avals, positions, graph.avals[node.outputs[0]], scalars)
        except (TypeError, ValueError) as error:
            reason = f"it computes the reference, but {error}"
            self.misses.append(
                NearMiss(pattern.name, jaxprs.location(node.equation), reason, node.outputs[0], _OTHER_AXES)
            )
            return None
        return Match(
            op=pattern.name,
            site=site,
            direction="forward",
            operands=tuple(values),
            results=(node.outputs[0],),
            equations=tuple(nodes),
            original=jaxpr_of(graph, nodes, values, [node.outputs[0]]),
            body=node.body,
            location=jaxprs.location(node.equation),
        )


def _looked_up(
    graph: Graph, reference: Reference, operands: Sequence[int], frame: tuple[int, ...]
) -> dict[int, int] | None:
    """Returns the program's number of each of the reference's values, or None where the program does not compute it."""
    known = dict(zip(reference.inputs, operands, strict=True))
    if len(known) != len(operands):
        return None
    nodes, _ = nodes_between(reference.graph, reference.inputs, [reference.result])
    for node in nodes:
        inputs: list[int] = []
        for number in node.inputs:
            if number in reference.graph.literals:
                literal = Literal(reference.graph.literals[number][()], reference.graph.avals[number])
                value = graph.find_literal(literal)
            else:
                value = known.get(number)
            if value is None:
                return None
            inputs.append(value)
        found: Sequence[int] | None = graph.find(node.equation, inputs, frame)
        if found is None and node.name in CALLS:
            found = _call(graph, node, inputs)
        if found is None:
            return None
        known.update(zip(node.outputs, found, strict=True))
    return known


def _call(graph: Graph, node: Node, inputs: Sequence[int]) -> Sequence[int] | None:
    """Returns the results of a call of a custom rule with the same primal, which keys cannot tell."""
    wanted = [digest([body]) for _, _, body in jaxprs.bodies(node.equation)]
    for user in graph.users.get(inputs[0], ()) if inputs else ():
        if user.name == node.name and list(user.inputs) == list(inputs):
            if [digest([body]) for _, _, body in jaxprs.bodies(user.equation)] == wanted:
                return user.outputs
    return None
