"""What the variables of a tree of bodies are computed from, so that one walk tells what a program still computes.

A scan's results need what its steps carry for them, as JAX removes dead code: of a loop, branch or checkpoint only the
results that are read, and what these are computed from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import compress

from jax.interpreters.partial_eval import dce_rules

from autopallas import compat, jaxprs
from autopallas.compat import JaxprAtom, JaxprEqn, Var
from autopallas.graph.custom_rules import CUSTOM_RULES
from autopallas.graph.flatten import Body, Child
from autopallas.graph.numbering import Graph, computes

__all__ = ["Needs"]

_STRAIGHT = jaxprs.CHECKPOINTS | {"jit", "pjit", "shard_map"}
"""Equations whose results are those of the one body that they hold, whose inputs are their operands."""
_NONE: tuple[int, ...] = ()


class Unknown(Exception):
    """A program has an equation of which only JAX knows what its results need."""


class Needs:
    """What each variable needs, of all bodies of a graph.

    A cell stands for a variable, for a value that a loop carries, or for an equation.

    Args:
      graph: a graph none of whose equations has side effects.

    Raises:
      Unknown: what results of an equation need is JAX's to know.
    """

    def __init__(self, graph: Graph):
        self._positions = graph.positions  # and not the graph, which is let go when nothing else has it
        self._cells: dict[Var, int] = {}
        self._needs: list[Sequence[int]] = []
        self._numbers: list[int] = []
        """Per cell, the number of the value that the program computes if it needs the cell; -1 for none."""
        self._together: dict[int, list[int]] = {}
        """Per equation of several results, which it computes together: their cells."""
        self._computed: dict[int, list[tuple[Body, Var, bool]]] = {}
        """Per number, where it is computed: the body, the variable, and whether a scan gives it."""
        self._add(graph.root, graph.numbers, False)
        self._results = self._of(graph.root.outvars)

    def reached(self, given: frozenset[int], reads: Mapping[int, Iterable[int]]) -> frozenset[int]:
        """Returns the numbers of what is still computed where the values in ``given`` are computed elsewhere, from
        those that ``reads`` names."""
        changed: dict[int, Sequence[int]] = {}
        for number in given:
            for body, variable, by_scan in self._computed.get(number, ()):
                places, first = self._positions[body], variable
                if by_scan:  # it may stack its slices as they are, which is the array that it reads
                    first = places.get(number, (0, variable))[1]
                own = [places[n][1] for n in reads.get(number, ()) if n in places]
                changed[self._cells[variable]] = self._of(own if first is variable else [first])
        seen, needs = bytearray(len(self._needs)), self._needs
        todo = [*self._results]
        while todo:
            cell = todo.pop()
            if not seen[cell]:
                seen[cell] = 1
                todo += needs[cell] if cell not in changed else changed[cell]
        for equation, results in self._together.items():
            if seen[equation]:
                for cell in results:
                    seen[cell] = 1
        for cell in changed:
            seen[cell] = 0
        return frozenset(compress(self._numbers, seen)) - {-1}

    # ------------------------------------------------------------------ construction

    def _new(self, needs: Sequence[int] = _NONE, number: int = -1) -> int:
        self._needs.append(needs)
        self._numbers.append(number)
        return len(self._needs) - 1

    def _cell(self, variable: Var) -> int:
        cell = self._cells.get(variable)
        if cell is None:
            cell = self._cells[variable] = len(self._needs)
            self._needs.append(_NONE)
            self._numbers.append(-1)
        return cell

    def _of(self, atoms: Iterable[JaxprAtom]) -> list[int]:
        return [self._cell(atom) for atom in atoms if isinstance(atom, Var)]

    def _set(self, variable: Var, needs: Sequence[int], number: int) -> None:
        cell = self._cell(variable)
        self._needs[cell], self._numbers[cell] = needs, number

    def _add(self, body: Body, of_bodies: Mapping[Body, Mapping[Var, int]], whole: bool) -> None:
        """Enters the equations of a body; ``whole`` tells whether JAX leaves the body as it is."""
        numbers = of_bodies[body]
        for position, equation in enumerate(body.equations):
            children = body.children.get(position, ())
            by_scan = equation.primitive.name == "scan"
            if by_scan or computes(body, position):
                for variable in equation.outvars:
                    self._computed.setdefault(numbers[variable], []).append((body, variable, by_scan))
            divisible = not whole and equation.primitive in dce_rules
            if divisible and children:
                self._holding(equation, children, numbers)
            elif divisible and equation.primitive.name != "custom_jvp_call":
                raise Unknown
            else:
                needed = self._of(equation.invars)
                for child in children:
                    needed += self._of(child.body.outvars)
                if len(equation.outvars) == 1:
                    self._set(equation.outvars[0], needed, numbers[equation.outvars[0]])
                else:
                    together = self._new(needed)
                    for variable in equation.outvars:
                        self._set(variable, (together,), numbers[variable])
                    self._together[together] = self._of(equation.outvars)
            for child in children:
                self._add(child.body, of_bodies, not divisible)

    def _holding(self, equation: JaxprEqn, children: Sequence[Child], numbers: Mapping[Var, int]) -> None:
        """Enters an equation of whose bodies only a part may be needed."""
        name, bodies = equation.primitive.name, [child.body for child in children]
        if name == "scan":
            constants, carried = compat.scan_parts(equation)
            self._reads(bodies[0].invars[:constants], equation.invars[:constants])
            self._reads(bodies[0].invars[constants + carried :], equation.invars[constants + carried :])
            self._carried(equation, bodies[0], constants, constants, carried, numbers)
            for variable, atom in zip(equation.outvars[carried:], bodies[0].outvars[carried:], strict=True):
                self._set(variable, self._of([atom]), numbers[variable])
        elif name == "while":
            of_condition, of_body = equation.params["cond_nconsts"], equation.params["body_nconsts"]
            (condition,) = [child.body for child in children if child.parameter == "cond_jaxpr"]
            (body,) = [child.body for child in children if child.parameter == "body_jaxpr"]
            self._reads(condition.invars[:of_condition], equation.invars[:of_condition])
            self._reads(body.invars[:of_body], equation.invars[of_condition : of_condition + of_body])
            carries = self._carried(
                equation, body, of_body, of_condition + of_body, len(equation.outvars), numbers, condition.outvars
            )
            for variable, carry in zip(condition.invars[of_condition:], carries, strict=True):
                self._set(variable, (carry,), -1)
        elif name == "cond":
            for body in bodies:
                self._reads(body.invars, equation.invars[1:])
            for i, variable in enumerate(equation.outvars):
                read = [equation.invars[0], *(body.outvars[i] for body in bodies)]
                self._set(variable, self._of(read), numbers[variable])
        elif name in _STRAIGHT or name in CUSTOM_RULES:
            (body,) = bodies
            further: list[int] = []
            if name in CUSTOM_RULES:  # their rules may read what the bodies do not
                further.append(self._new(self._of(equation.invars)))
            if len(body.invars) == len(equation.invars):
                self._reads(body.invars, equation.invars)
            elif name not in CUSTOM_RULES:
                raise Unknown
            for variable, atom in zip(equation.outvars, body.outvars, strict=True):
                self._set(variable, [*further, *self._of([atom])], numbers[variable])
        else:
            raise Unknown

    def _reads(self, variables: Sequence[Var], atoms: Sequence[JaxprAtom]) -> None:
        """Enters that inputs of a body are an equation's operands."""
        for variable, atom in zip(variables, atoms, strict=True):
            if isinstance(atom, Var):
                self._set(variable, (self._cell(atom),), -1)

    def _carried(
        self,
        equation: JaxprEqn,
        body: Body,
        inside: int,
        outside: int,
        count: int,
        numbers: Mapping[Var, int],
        condition: Sequence[JaxprAtom] = (),
    ) -> list[int]:
        """Enters what a loop carries: a first value, what each step makes of it, and the last one, all together.

        Args:
          equation: the loop.
          body: that of its steps.
          inside: the position of the first carried value among the body's inputs.
          outside: that among the equation's operands.
          count: how many are carried.
          numbers: those of the variables around the loop.
          condition: what decides whether there is another step.

        Returns:
          The cells of the carried values.
        """
        carries = []
        for i, variable in enumerate(equation.outvars[:count]):
            carry = self._new(self._of([equation.invars[outside + i], body.outvars[i], *condition]), numbers[variable])
            self._set(variable, (carry,), -1)
            self._set(body.invars[inside + i], (carry,), -1)
            carries.append(carry)
        return carries
