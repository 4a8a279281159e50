"""Tells calls of ``jnp.logaddexp``, the logarithm of a sum of two exponentials, from other functions with a derivative
of their own."""

from __future__ import annotations

from functools import lru_cache

import jax

from autopallas import compat, jaxprs
from autopallas.compat import Dtype, JaxprEqn
from autopallas.graph.custom_rules import called_program, is_elementwise_call
from autopallas.sites.elementwise import ElementwiseProgram

__all__ = ["is_logaddexp"]


def is_logaddexp(equation: JaxprEqn) -> bool:
    """Returns whether an equation computes what ``jnp.logaddexp`` of two floating arrays of one dtype computes."""
    if not is_elementwise_call(equation) or len(equation.invars) != 2:
        return False
    dtypes = {atom.aval.dtype for atom in (*equation.invars, *equation.outvars)}
    return len(dtypes) == 1 and called_program(equation) == _program(dtypes.pop())


@lru_cache(maxsize=16)
def _program(dtype: Dtype) -> ElementwiseProgram | None:
    scalar = jax.ShapeDtypeStruct((), dtype)
    program, _ = jaxprs.open_jaxpr(compat.make_jaxpr(jax.numpy.logaddexp, scalar, scalar))
    calls = [equation for equation in program.eqns if is_elementwise_call(equation)]
    while not calls and len(program.eqns) == 1 and jaxprs.bodies(program.eqns[0]):  # jnp.logaddexp is compiled once
        program, _ = jaxprs.open_jaxpr(jaxprs.bodies(program.eqns[0])[0][2])
        calls = [equation for equation in program.eqns if is_elementwise_call(equation)]
    return called_program(calls[0]) if len(calls) == 1 else None
