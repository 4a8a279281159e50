"""Tells what makes the integers that loops and checkpoints are given.

JAX computes once, before a loop, what each of its steps would compute alike, such as the indices of a diagonal.
"""

from __future__ import annotations

import jax

from autopallas import compat, jaxprs
from autopallas.compat import JaxprAtom, JaxprEqn, Var
from autopallas.graph.flatten import Body
from autopallas.numerics.casts import kind_of

__all__ = ["GivenIntegers"]

_MOST = 256
"""Most equations that are looked at for what one body is given."""


class GivenIntegers:
    """What makes integers that bodies are given, in a program whose variables belong to one body each."""

    def __init__(self, root: Body):
        self._given: dict[Var, JaxprAtom] = {}
        """For inputs of bodies, what is given there."""
        self._made: dict[Var, JaxprEqn] = {}
        self._held: dict[Var, jax.Array] = {}
        for body in root.walk():
            self._held |= {v: x for v, x in zip(body.constvars, body.consts, strict=True) if _is_integer(v)}
            for position, equation in enumerate(body.equations):
                if len(equation.outvars) == 1 and _is_integer(equation.outvars[0]):
                    self._made[equation.outvars[0]] = equation
                for child in body.children.get(position, ()):
                    self._given |= _given(equation, child.body)

    def of(self, body: Body) -> tuple[dict[Var, JaxprEqn], dict[Var, jax.Array]]:
        """Returns the equations that make integers which a body is given, and the arrays that the program holds, by the
        body's own variables and by those that the equations read."""
        equations: dict[Var, JaxprEqn] = {}
        arrays: dict[Var, jax.Array] = {}
        todo = [variable for variable in body.invars if variable in self._given]
        while todo and len(equations) < _MOST:
            variable = todo.pop()
            atom: JaxprAtom = variable
            while isinstance(atom, Var) and atom in self._given:
                atom = self._given[atom]
            if variable in equations or not isinstance(atom, Var):
                continue
            if atom in self._held:
                arrays[variable] = self._held[atom]
            elif (equation := self._made.get(atom)) is not None and not jaxprs.bodies(equation):
                equations[variable] = equation
                todo += [read for read in equation.invars if isinstance(read, Var)]
        return equations, arrays


def _is_integer(variable: Var) -> bool:
    return kind_of(getattr(variable.aval, "dtype", None)) in "iub"


def _given(equation: JaxprEqn, body: Body) -> dict[Var, JaxprAtom]:
    """Returns what an equation gives a body that it holds: integers that all steps of a loop are given alike."""
    name = equation.primitive.name
    if name == "scan":
        constants, _ = compat.scan_parts(equation)
        pairs = zip(body.invars[:constants], equation.invars[:constants], strict=True)
    elif name in ("checkpoint", "remat", "remat2") and len(body.invars) == len(equation.invars):
        pairs = zip(body.invars, equation.invars, strict=True)
    else:
        return {}
    return {inner: outer for inner, outer in pairs if _is_integer(inner)}
