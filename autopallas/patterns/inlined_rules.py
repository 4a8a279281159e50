"""Finds ``jax.nn.softplus`` and ``jax.nn.relu6`` where JAX left what they compute in the place of their calls, as in a
loop that is differentiated."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import jax

from autopallas import jaxprs
from autopallas.compat import Dtype, JaxprAtom, JaxprEqn, Literal, Var, make_jaxpr
from autopallas.graph import Graph, Node, flatten
from autopallas.graph.custom_rules import derivative_of, is_elementwise_call

__all__ = ["inlined_call"]


def inlined_call(graph: Graph, node: Node) -> tuple[JaxprEqn, tuple[int, ...]] | None:
    """Returns a call whose result a node computes equation by equation, and the numbers of the call's operands, of
    which the first is an array and the others are known; None where the node computes something else."""
    if node.name not in _BY_LAST or node.equation.effects:
        return None
    shape, dtype = graph.shape(node.outputs[0]), graph.dtype(node.outputs[0])
    call = _call(_BY_LAST[node.name], shape, dtype)
    if call is None:
        return None
    body = flatten(call.params["call_jaxpr"])
    made_by = {v: equation for equation in body.equations for v in equation.outvars}
    found: dict[Var, int] = {}
    todo: list[tuple[JaxprAtom, int]] = [(body.outvars[0], node.outputs[0])]
    while todo:
        atom, number = todo.pop()
        if isinstance(atom, Literal):
            if not _is_number(graph, number, atom):
                return None
            continue
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
    operands = [found.get(v) for v in body.invars]
    numbers = tuple(number for number in operands if number is not None)
    if len(numbers) != len(operands) or graph.shape(numbers[0]) != shape or graph.dtype(numbers[0]) != dtype:
        return None
    known = all(
        isinstance(atom, Literal) and _is_number(graph, number, atom)
        for atom, number in zip(call.invars[1:], numbers[1:], strict=True)
    )
    return (call, numbers) if known and _is_differentiated(graph, call, numbers[0]) else None


def _is_differentiated(graph: Graph, call: JaxprEqn, number: int) -> bool:
    """Returns whether the program holds what the derivative of a call computes of the call's first operand and of known
    numbers alone: ``min(relu(x), 6)`` has the values of a relu6 and the derivatives of two other functions."""
    derivative, _ = jaxprs.open_jaxpr(derivative_of(call))
    x = derivative.invars[0]
    for equation in derivative.eqns:
        if is_elementwise_call(equation) or x not in equation.invars:
            continue
        others = [atom for atom in equation.invars if atom is not x]
        if all(isinstance(atom, Literal) for atom in others) and not any(
            user.name == equation.primitive.name
            and len(user.inputs) == len(equation.invars)
            and all(
                own == number if isinstance(atom, Var) else _is_number(graph, own, atom)
                for own, atom in zip(user.inputs, equation.invars, strict=True)
            )
            for user in graph.users[number]
        ):
            return False
    return True


def _is_number(graph: Graph, number: int, atom: Literal) -> bool:
    """Returns whether a value is the scalar that a literal is."""
    value = graph.literals.get(number)
    return value is not None and not value.shape and bool(value == atom.val)


@lru_cache(maxsize=64)
def _call(function: Callable[[jax.Array], jax.Array], shape: tuple[int, ...], dtype: Dtype) -> JaxprEqn | None:
    """Returns the call that a function makes of an array; None where it is something else."""
    program, _ = jaxprs.open_jaxpr(make_jaxpr(function, jax.ShapeDtypeStruct(shape, dtype)))
    if len(program.eqns) != 1 or not is_elementwise_call(program.eqns[0]):
        return None
    x, *others = program.eqns[0].invars
    alike = isinstance(x, Var) and all(isinstance(other, Literal) for other in others)
    return program.eqns[0] if alike else None


def _softplus(x: jax.Array) -> jax.Array:
    """``jax.nn.softplus`` without the function around it that is compiled once."""
    return jax.numpy.logaddexp(x, 0.0)


_BY_LAST: dict[str, Callable[[jax.Array], jax.Array]] = {"select_n": _softplus, "min": jax.nn.relu6}
"""Functions with a derivative of their own that compute more than one equation, by the last of these."""
