"""One step of a loop as a flat list of equations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autopallas import compat
from autopallas.compat import JaxprAtom, JaxprEqn, Literal, Var
from autopallas.graph import Body, Graph
from autopallas.graph.loop_slices import is_zero
from autopallas.patterns.advice import CAPTURED, SIDE_EFFECTS
from autopallas.patterns.match import Mismatch

__all__ = ["Scan", "Step", "scans"]

_DISSOLVED = frozenset({"remat", "remat2", "checkpoint", "jit", "pjit"})
"""Equations in a step whose one body stands for them: a checkpoint within a step keeps nothing that matters here."""


@dataclass(frozen=True, eq=False, slots=True)
class Scan:
    """A scan of a program: the body that has it, its position there, and its own body."""

    outer: Body
    position: int
    body: Body

    @property
    def equation(self) -> JaxprEqn:
        return self.outer.equations[self.position]

    @property
    def constants(self) -> int:
        return compat.scan_parts(self.equation)[0]

    @property
    def carried(self) -> int:
        return compat.scan_parts(self.equation)[1]

    @property
    def length(self) -> int:
        return int(self.equation.params["length"])

    @property
    def reverse(self) -> bool:
        return bool(self.equation.params["reverse"])


def scans(graph: Graph) -> list[Scan]:
    """Returns the scans of a program."""
    return [
        Scan(outer, position, children[0].body)
        for outer in graph.numbers
        for position, children in outer.children.items()
        if outer.equations[position].primitive.name == "scan"
    ]


@dataclass(frozen=True, eq=False, slots=True)
class Step:
    """One step: inputs, equations without inner checkpoints, and results.

    Attributes:
      constants, carries, slices: the inputs.
      equations: those that the results need, in order.
      after: the carried values after the step.
      results: what the loop stacks.
      numbers: the number of each variable in the program's graph.
      zeros: the constants that are zero.
    """

    constants: list[Var]
    carries: list[Var]
    slices: list[Var]
    equations: list[JaxprEqn]
    after: list[JaxprAtom]
    results: list[JaxprAtom]
    numbers: Mapping[Var, int]
    zeros: frozenset[Var]

    @staticmethod
    def of(graph: Graph, scan: Scan, results: Sequence[int] | None = None) -> Step:
        """Returns the step of a scan, with all that it stacks or with the results of these places.

        Raises:
          Mismatch: the step does more than compute.
        """
        body, constants, carried = scan.body, scan.constants, scan.carried
        equations: list[JaxprEqn] = []
        names: dict[Var, JaxprAtom] = {}
        numbers: dict[Var, int] = {}
        _flatten(graph, body, equations, names, numbers)
        graph.steps.spend(len(equations))
        outputs = [_named(names, atom) for atom in body.outvars]
        stacked = outputs[carried:] if results is None else [outputs[carried + i] for i in results]
        after = outputs[:carried]
        return Step(
            body.invars[:constants],
            body.invars[constants : constants + carried],
            body.invars[constants + carried :],
            _needed(equations, [*after, *stacked]),
            after,
            stacked,
            numbers,
            frozenset(v for v in body.invars[:constants] if is_zero(graph, numbers[v])),
        )

    @property
    def inputs(self) -> list[Var]:
        return [*self.constants, *self.carries, *self.slices]

    def with_results(self, places: Sequence[int]) -> Step:
        """Returns the step with some of its results alone, and what they need."""
        results = [self.results[i] for i in places]
        equations = _needed(self.equations, [*self.after, *results])
        return replace(self, equations=equations, results=results)

    def with_equations(self, equations: Sequence[JaxprEqn]) -> Step:
        """Returns the step with other equations for the same variables, without those that it does not need."""
        return replace(self, equations=_needed(equations, [*self.after, *self.results]))

    def dependencies(self) -> dict[Var, int]:
        """Returns for each variable which carried values it depends on, as bits."""
        found = dict.fromkeys((*self.constants, *self.slices), 0)
        found |= {v: 1 << i for i, v in enumerate(self.carries)}
        for equation in self.equations:
            bits = 0
            for atom in equation.invars:
                if isinstance(atom, Var):
                    bits |= found[atom]
            found.update(dict.fromkeys(equation.outvars, bits))
        return found


def _flatten(
    graph: Graph, body: Body, equations: list[JaxprEqn], names: dict[Var, JaxprAtom], numbers: dict[Var, int]
) -> None:
    """Appends the equations of a body; ``names`` gets the values of the variables that have others."""
    if body.constvars:
        raise Mismatch("a step reads arrays that are part of the program's text", advice=CAPTURED)
    numbers.update(graph.numbers[body])
    for position, equation in enumerate(body.equations):
        if compat.has_side_effects(equation):
            raise Mismatch(
                f"a step has an effect beside its results, by {equation.primitive.name}", advice=SIDE_EFFECTS
            )
        children = body.children.get(position, [])
        if names and any(isinstance(atom, Var) and atom in names for atom in equation.invars):
            equation = equation.replace(invars=[_named(names, atom) for atom in equation.invars])
        if len(children) == 1 and equation.primitive.name in _DISSOLVED:
            inner = children[0].body
            names.update(zip(inner.invars, equation.invars, strict=True))
            _flatten(graph, inner, equations, names, numbers)
            names.update(zip(equation.outvars, [_named(names, atom) for atom in inner.outvars], strict=True))
            continue
        equations.append(equation)


def _named(names: Mapping[Var, JaxprAtom], atom: JaxprAtom) -> JaxprAtom:
    return atom if isinstance(atom, Literal) else names.get(atom, atom)


def _needed(equations: Sequence[JaxprEqn], wanted: Iterable[JaxprAtom]) -> list[JaxprEqn]:
    """Returns the equations that compute some values, in order."""
    read = {atom for atom in wanted if isinstance(atom, Var)}
    found = []
    for equation in reversed(equations):
        if not read.isdisjoint(equation.outvars):
            found.append(equation)
            read.update(atom for atom in equation.invars if isinstance(atom, Var))
    return found[::-1]
