"""How long it takes to compute values again, beside what it takes to write a stack and to read it.

What was measured, of chains of one operation, is in docs/rematerialisation.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from autopallas.compat import JaxprEqn, Var
from autopallas.graph.custom_rules import ELEMENTWISE
from autopallas.rewrite.rematerialisation.recomputation import LONG, SAME, variables

__all__ = ["MOST", "MOST_FOR_A_LARGE_STACK", "cost", "repeated"]

MOST = 12
"""Largest cost, for each element of a stack, that is less than that of the stack."""
MOST_FOR_A_LARGE_STACK = 28
"""The same for a stack that no cache close to a processor holds."""
_COSTS = {
    **dict.fromkeys(SAME | {"broadcast_in_dim", "transpose"}, 0),
    **dict.fromkeys(("div", "sqrt"), 8),
    **dict.fromkeys(("cbrt", "rsqrt"), 14),
    **dict.fromkeys((*LONG, "custom_jvp_call"), 16),
}
"""Costs of primitives for each element of their results, where that of a product is 1."""
_WITH_THEIR_OPERANDS = ELEMENTWISE | SAME | {"concatenate", "pad", "rev", "slice", "transpose"}
"""Primitives that a compiler computes together with what computes their operands, wherever their results are read."""


def cost(equation: JaxprEqn) -> int:
    """Returns how long an elementwise equation takes, in products of two numbers."""
    (result,) = equation.outvars
    return _COSTS.get(equation.primitive.name, 1) * result.aval.size


def repeated(equations: Sequence[JaxprEqn]) -> set[Var]:
    """Returns the values that a compiler may compute once for each of the many elements that follow from one of theirs:
    what becomes a column or a row of an outer product, or is broadcast, and all it follows from element by element.
    """
    found: set[Var] = set()
    for equation in reversed(equations):
        operands = variables(equation.invars)
        if equation.primitive.name in _WITH_THEIR_OPERANDS:
            if not found.isdisjoint(equation.outvars):
                found.update(operands)
        elif _repeats(equation):
            found.update(operands)
    return found


def _repeats(equation: JaxprEqn) -> bool:
    """Returns whether each element of an operand is read for several elements of a product of two, or of a copy."""
    if equation.primitive.name == "broadcast_in_dim":
        return _is_larger(equation.outvars[0], variables(equation.invars))
    if equation.primitive.name != "dot_general":
        return False
    ((axes, _), _) = equation.params["dimension_numbers"]
    summed = math.prod(equation.invars[0].aval.shape[axis] for axis in axes)
    return summed == 1 and _is_larger(equation.outvars[0], variables(equation.invars))


def _is_larger(result: Var, operands: Iterable[Var]) -> bool:
    return any(1 < operand.aval.size < result.aval.size for operand in operands)
