"""How long it takes to compute values again, beside what it takes to write a stack and to read it.

What was measured, of chains of one operation, is in docs/rematerialisation.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopallas.compat import JaxprEqn, Var
from autopallas.graph.custom_rules import ELEMENTWISE
from autopallas.graph.prices import SAME, price
from autopallas.rewrite.rematerialisation.recomputation import is_large_beside, size_of, variables

__all__ = ["MOST", "MOST_FOR_A_LARGE_STACK", "beside_padded", "cost", "is_spread", "repeated"]

MOST = 12
"""Largest cost, for each element of a stack, that is less than that of the stack."""
MOST_FOR_A_LARGE_STACK = 28
"""The same for a stack that no cache close to a processor holds."""
_WITH_THEIR_OPERANDS = ELEMENTWISE | SAME | {"concatenate", "pad", "rev", "slice", "split", "transpose"}
"""Primitives that a compiler computes together with what computes their operands, wherever their results are read."""
_REPEATING = ELEMENTWISE | {"broadcast_in_dim"}
"""Those that read an element for several of their results where an axis of an operand has the size 1, and others."""


def cost(equation: JaxprEqn) -> int:
    """Returns how long an elementwise equation takes, in products of two numbers."""
    (result,) = equation.outvars
    return price(equation) * result.aval.size


def is_spread(value: Var, equations: Sequence[JaxprEqn]) -> bool:
    """Returns whether a value is made of much smaller arrays alone, such as all differences of two of some points."""
    made = {variable for equation in equations for variable in equation.outvars}
    read = [variable for equation in equations for variable in variables(equation.invars) if variable not in made]
    return bool(read) and not any(is_large_beside(variable, size_of(value)) for variable in read)


def repeated(equations: Sequence[JaxprEqn]) -> set[Var]:
    """Returns the values that a compiler may compute once for each of the many elements that follow from one of theirs:
    what becomes a column or a row of an outer product, or is broadcast, and all it follows from element by element.
    """
    found: set[Var] = set()
    for equation in reversed(equations):
        operands = variables(equation.invars)
        if equation.primitive.name in _WITH_THEIR_OPERANDS and not found.isdisjoint(equation.outvars):
            found.update(operands)
        elif equation.primitive.name in _REPEATING or _is_outer_product(equation):
            found.update(v for v in operands if 1 < v.aval.size < equation.outvars[0].aval.size)
    return found


def beside_padded(equations: Sequence[JaxprEqn]) -> set[Var]:
    """Returns the values that a compiler may compute one by one, and not by vectors: it asks of each element where it
    lies where something is padded, such as a gradient of neighbours, and of all it computes together with that."""
    together = [equation for equation in equations if equation.primitive.name in _WITH_THEIR_OPERANDS]
    found: set[Var] = set()
    for equation in together:
        if equation.primitive.name == "pad" or not found.isdisjoint(variables(equation.invars)):
            found.update(equation.outvars)
    for equation in reversed(together):
        if not found.isdisjoint(equation.outvars):
            found.update(variables(equation.invars))
    return found


def _is_outer_product(equation: JaxprEqn) -> bool:
    if equation.primitive.name != "dot_general":
        return False
    ((axes, _), _) = equation.params["dimension_numbers"]
    summed: int = math.prod(equation.invars[0].aval.shape[axis] for axis in axes)
    return summed == 1
