"""Equations that a loop's other form has and the program lacks: sums of two values, and values in another shape.

Their results have numbers, so that derivatives of one loop are found in the other form of another.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import jax
from jax import lax

from autopallas import array_types, compat, jaxprs
from autopallas.compat import ArrayFunction, JaxprAtom, JaxprEqn, Literal, ShapedArray, Var
from autopallas.graph import Graph
from autopallas.patterns.recurrence.step import Scan, Step

__all__ = ["MadeEquations"]


class MadeEquations:
    """Makes equations of a loop's other form.

    Attributes:
      numbers: of the step's variables, and of those that are made.
      known: the numbers of what is made of values that the program has, by the keys of equations: elsewhere these would
        be taken for equations of the program.
    """

    def __init__(self, graph: Graph, scan: Scan, step: Step, equations: list[JaxprEqn]):
        self.graph, self.frame, self.equations = graph, graph.frames[scan.body], equations
        self.numbers: dict[Var, int] = dict(step.numbers)
        self.known: dict[Hashable, int] = {}
        self._made_of: dict[Var, tuple[JaxprEqn, list[int]]] = {}
        """By the variables that were made, the equations and the numbers of their operands."""

    def variable(self, aval: ShapedArray) -> Var:
        """Returns a variable for a value that the program lacks."""
        found = Var(array_types.array_type(aval.shape, aval.dtype, [aval], aval))
        self.numbers[found] = self.graph.further(found.aval)
        return found

    def sum(self, first: JaxprAtom, second: JaxprAtom, result: Var | None = None) -> JaxprAtom:
        """Appends the sum of two values as derivatives have it; ``result`` is its variable, where there is one."""
        return self._made(lambda a, b: jax.vjp(lambda x: (x, x), a)[1]((a, b))[0], [first, second], result)

    def reshaped(self, value: Var, shape: Sequence[int]) -> JaxprAtom:
        """Appends a value in another shape."""
        return self._made(lambda x: lax.reshape(x, shape), [value], None)

    def found(self, value: JaxprAtom, number: int) -> None:
        """Notes that a value is one that the program has, by its number."""
        if isinstance(value, Var) and value in self._made_of and self.numbers[value] in self.graph.furthers:
            self.numbers[value] = self.graph.further_result(*self._made_of[value], self.frame, number)
            self._know(value)

    def _made(self, function: ArrayFunction, atoms: Sequence[JaxprAtom], result: Var | None) -> JaxprAtom:
        with array_types.on_mesh_of([a.aval for a in atoms]):
            program = compat.make_jaxpr(function, *(array_types.typed_like(a.aval) for a in atoms))
        (equation,) = jaxprs.open_jaxpr(program)[0].eqns
        variable = result if result is not None else Var(equation.outvars[0].aval)
        equation = equation.replace(invars=list(atoms), outvars=[variable])
        self.equations.append(equation)
        read = [self.graph.find_literal(a) if isinstance(a, Literal) else self.numbers[a] for a in atoms]
        operands = [number for number in read if number is not None]
        if len(operands) < len(read):  # a literal that the program lacks
            self.numbers.setdefault(variable, self.graph.further(variable.aval))
        else:
            own = self.numbers.get(variable) if result is not None else None
            self.numbers[variable] = self.graph.further_result(equation, operands, self.frame, own)
            self._made_of[variable] = equation, operands
            self._know(variable)
        return variable

    def _know(self, variable: Var) -> None:
        """Notes the number of what was made of values that have numbers."""
        key = self.graph.key_here(*self._made_of[variable], self.frame)
        if key is not None:
            self.known[key] = self.numbers[variable]
