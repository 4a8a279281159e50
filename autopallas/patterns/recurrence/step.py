"""One step of a loop as a flat list of equations."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax.numpy as jnp

from autopallas import compat, jaxprs
from autopallas.compat import JaxprAtom, JaxprEqn, Var
from autopallas.graph import Body, Graph
from autopallas.graph.array_slices import Place
from autopallas.graph.identities import Identity, identity, may_be_identity
from autopallas.graph.loop_slices import is_zero
from autopallas.graph.repeated_axes import varies
from autopallas.patterns.advice import CAPTURED, SIDE_EFFECTS
from autopallas.patterns.match import Mismatch

__all__ = ["Scan", "Step", "Written", "identities", "is_inexact", "needed", "scans", "varying"]

_DISSOLVED = jaxprs.CHECKPOINTS | {"jit", "pjit"}
"""Equations in a step whose one body stands for them: a checkpoint within a step keeps nothing that matters here."""


@dataclass(frozen=True, slots=True)
class Written:
    """How an array that a loop carries is made of what its steps write.

    Attributes:
      place: where each step writes.
      first: the array before the loop, in the body around it.
      adds: whether slices are added to it, rather than put into it.
      left: sums that the loop carries, and that are added to it at the end: (the carried variable, where).
    """

    place: Place
    first: JaxprAtom
    adds: bool
    left: tuple[tuple[Var, Place], ...] = ()


@dataclass(frozen=True, eq=False, slots=True)
class Scan:
    """A loop of a program that is given slices and gives slices: as it is written, or by
    :func:`~autopallas.patterns.recurrence.by_slices.by_slices`.

    Attributes:
      outer, position: the body that has it, and its position there.
      body: its own body.
      length, reverse: the number of steps, and whether the last slices come first.
      constants, carries, slices: the inputs of a step.
      given: for each of these, in this order, what the loop is given, in the body around it.
      ends: what the loop gives, there: the carried values at the end, and then what it stacks, or arrays made of that.
        The program has no variable for rows of an array that are carried.
      places: where the slices lie that are not the first array's in the order of the steps; where carried rows of an
        array lie before the first step.
      tables: for slices and carried rows of an array that steps write too, its place among ``ends``.
      written: the arrays that are made of what the loop stacks, by their places among ``ends``.
      zeros: carried values that are zero before the first step, whatever ``given`` says.
      unchanged: what the loop gives as it was given it: what it gives, and what it is given.
      made: the numbers of what this form computes and the program has in another way, by the keys of equations.
      step: its step, where that is known already.
    """

    outer: Body
    position: int
    body: Body
    length: int
    reverse: bool
    constants: list[Var]
    carries: list[Var]
    slices: list[Var]
    given: list[JaxprAtom]
    ends: list[Var]
    places: Mapping[Var, Place] = field(default_factory=dict)
    tables: Mapping[Var, int] = field(default_factory=dict)
    written: Mapping[int, Written] = field(default_factory=dict)
    zeros: frozenset[Var] = frozenset()
    unchanged: Sequence[tuple[Var, JaxprAtom]] = ()
    made: Mapping[Hashable, int] = field(default_factory=dict)
    step: Step | None = None

    @staticmethod
    def of(outer: Body, position: int, body: Body) -> Scan:
        """Returns a scan as it is written."""
        equation, inputs = outer.equations[position], body.invars
        constants, carried = compat.scan_parts(equation)
        last = constants + carried
        parts = inputs[:constants], inputs[constants:last], inputs[last:]
        length, reverse = int(equation.params["length"]), bool(equation.params["reverse"])
        return Scan(outer, position, body, length, reverse, *parts, list(equation.invars), list(equation.outvars))

    @property
    def equation(self) -> JaxprEqn:
        return self.outer.equations[self.position]

    @property
    def is_backward(self) -> bool:
        """Whether autodiff made it."""
        return self.outer.transposed or self.body.transposed

    @property
    def inputs(self) -> list[Var]:
        return [*self.constants, *self.carries, *self.slices]

    @property
    def outputs(self) -> list[JaxprAtom]:
        """What a step carries on and gives."""
        return [*self.body.outvars] if self.step is None else [*self.step.after, *self.step.results]

    @property
    def carried(self) -> int:
        return len(self.carries)

    def end_numbers(self, graph: Graph) -> list[int]:
        """Returns the numbers of what the loop gives; -1 for what the program has no variable for."""
        numbers = graph.numbers[self.outer]
        return [numbers.get(v, -1) for v in self.ends]

    def numbers(self, graph: Graph) -> Mapping[Var, int]:
        """Returns the numbers of a step's variables."""
        return graph.numbers[self.body] if self.step is None else self.step.numbers


def scans(graph: Graph) -> list[Scan]:
    """Returns the scans of a program, as they are written."""
    return [
        Scan.of(outer, position, children[0].body)
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
      identities: the variables that are identity matrices, times a number.
      varies: for each constant that is the same along a dimension, along which dimensions it may vary.
    """

    constants: list[Var]
    carries: list[Var]
    slices: list[Var]
    equations: list[JaxprEqn]
    after: list[JaxprAtom]
    results: list[JaxprAtom]
    numbers: Mapping[Var, int]
    zeros: frozenset[Var]
    identities: Mapping[Var, Identity] = field(default_factory=dict)
    varies: Mapping[Var, tuple[bool, ...]] = field(default_factory=dict)

    @staticmethod
    def of(graph: Graph, scan: Scan) -> Step:
        """Returns the step of a scan, with all that it stacks.

        Raises:
          Mismatch: the step does more than compute.
        """
        if scan.step is not None:
            return scan.step
        body, carried = scan.body, scan.carried
        equations: list[JaxprEqn] = []
        names: dict[Var, JaxprAtom] = {}
        numbers: dict[Var, int] = {}
        _flatten(graph, body, equations, names, numbers)
        graph.steps.spend(len(equations))
        outputs = jaxprs.renamed(body.outvars, names)
        equations = needed(equations, outputs)
        return Step(
            scan.constants,
            scan.carries,
            scan.slices,
            equations,
            outputs[:carried],
            outputs[carried:],
            numbers,
            frozenset(v for v in scan.constants if is_zero(graph, numbers[v])),
            identities(graph, numbers, scan.constants, equations),
            varying(graph, numbers, scan.constants),
        )

    @property
    def inputs(self) -> list[Var]:
        return [*self.constants, *self.carries, *self.slices]

    def with_results(self, places: Sequence[int]) -> Step:
        """Returns the step with some of its results alone, and what they need."""
        results = [self.results[i] for i in places]
        equations = needed(self.equations, [*self.after, *results])
        return replace(self, equations=equations, results=results)

    def with_equations(self, equations: Sequence[JaxprEqn]) -> Step:
        """Returns the step with other equations for the same variables, without those that it does not need."""
        return replace(self, equations=needed(equations, [*self.after, *self.results]))

    def until(self, places: Sequence[int]) -> Step:
        """Returns the step with those equations alone that some of the carried values need after it."""
        return replace(self, equations=needed(self.equations, [self.after[place] for place in places]))

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


def identities(
    graph: Graph, numbers: Mapping[Var, int], constants: Sequence[Var], equations: Sequence[JaxprEqn]
) -> dict[Var, Identity]:
    """Returns the constants and comparisons of a step that are identity matrices."""
    compared = (v for e in equations if e.primitive.name == "eq" for v in e.outvars if v in numbers)
    may_be = (v for v in (*constants, *compared) if may_be_identity(v.aval))
    return {v: found for v in may_be if (found := identity(graph, numbers[v])) is not None}


def varying(graph: Graph, numbers: Mapping[Var, int], constants: Sequence[Var]) -> dict[Var, tuple[bool, ...]]:
    """Returns the constants that are the same along a dimension, with the dimensions along which they may vary."""
    return {v: own for v in constants if not all(own := varies(graph, numbers[v]))}


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
        if equation.primitive.name in jaxprs.VARYING:  # not there where a loop is taken out of a shard_map
            names.update(zip(equation.outvars, jaxprs.renamed(equation.invars, names), strict=True))
            continue
        children = body.children.get(position, [])
        if names and any(isinstance(atom, Var) and atom in names for atom in equation.invars):
            equation = equation.replace(invars=jaxprs.renamed(equation.invars, names))
        if len(children) == 1 and equation.primitive.name in _DISSOLVED:
            inner = children[0].body
            names.update(zip(inner.invars, equation.invars, strict=True))
            _flatten(graph, inner, equations, names, numbers)
            names.update(zip(equation.outvars, jaxprs.renamed(inner.outvars, names), strict=True))
            continue
        equations.append(equation)


def needed(equations: Sequence[JaxprEqn], wanted: Iterable[JaxprAtom]) -> list[JaxprEqn]:
    """Returns the equations that compute some values, in order."""
    read = {atom for atom in wanted if isinstance(atom, Var)}
    found = []
    for equation in reversed(equations):
        if not read.isdisjoint(equation.outvars):
            found.append(equation)
            read.update(atom for atom in equation.invars if isinstance(atom, Var))
    return found[::-1]


def is_inexact(atom: JaxprAtom) -> bool:
    """Returns whether a variable or literal is real or complex floating point, so that it can have a gradient."""
    return bool(jnp.issubdtype(atom.aval.dtype, jnp.inexact))
