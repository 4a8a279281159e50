"""Finds ``jax.nn.softplus`` where JAX left what it computes in the place of its call, as in a loop that is
differentiated."""

from __future__ import annotations

from functools import lru_cache

import jax

from autopallas import compat, jaxprs
from autopallas.compat import Dtype, JaxprEqn, Literal, Var
from autopallas.graph import Graph, Node
from autopallas.graph.custom_rules import is_elementwise_call

__all__ = ["inlined_softplus"]


def inlined_softplus(graph: Graph, node: Node) -> tuple[JaxprEqn, tuple[int, int]] | None:
    """Returns a call whose result a node computes equation by equation, and the numbers of the call's operands, x and
    zero; None where the node computes something else."""
    if node.name != "select_n" or node.equation.effects:
        return None
    shape, dtype = graph.shape(node.outputs[0]), graph.dtype(node.outputs[0])
    call = _call(shape, dtype)
    if call is None:
        return None
    body, _ = jaxprs.open_jaxpr(call.params["call_jaxpr"])
    made_by = {v: equation for equation in body.eqns for v in equation.outvars}
    found: dict[Var, int] = {}
    todo = [(body.outvars[0], node.outputs[0])]
    while todo:
        atom, number = todo.pop()
        if isinstance(atom, Literal):
            return None
        if atom in found:
            if found[atom] != number:
                return None
            continue
        found[atom] = number
        equation = made_by.get(atom)
        if equation is None:
            continue
        own = graph.definitions.get(number)
        if own is None or own.name != equation.primitive.name or len(own.inputs) != len(equation.invars):
            return None
        if graph.dtype(number) != atom.aval.dtype or any(
            own.equation.params.get(name) != value for name, value in equation.params.items()
        ):
            return None
        todo += zip(equation.invars, own.inputs, strict=True)
    x, zero = (found.get(v) for v in body.invars)
    if x is None or zero is None or graph.shape(x) != shape or graph.dtype(x) != dtype:
        return None
    value = graph.literals.get(zero)
    return None if value is None or value.shape or value != 0 else (call, (x, zero))


@lru_cache(maxsize=64)
def _call(shape: tuple[int, ...], dtype: Dtype) -> JaxprEqn | None:
    """Returns the call that ``jax.nn.softplus`` makes of an array; None where it is something else."""
    program, _ = jaxprs.open_jaxpr(compat.make_jaxpr(_softplus, jax.ShapeDtypeStruct(shape, dtype)))
    if len(program.eqns) != 1 or not is_elementwise_call(program.eqns[0]) or len(program.eqns[0].invars) != 2:
        return None
    x, zero = program.eqns[0].invars
    alike = isinstance(x, Var) and isinstance(zero, Literal) and zero.val == 0
    return program.eqns[0] if alike else None


def _softplus(x: jax.Array) -> jax.Array:
    """``jax.nn.softplus`` without the function around it that is compiled once."""
    return jax.numpy.logaddexp(x, 0.0)
