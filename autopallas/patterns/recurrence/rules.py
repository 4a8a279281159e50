"""Restores calls of functions with a derivative of their own, where JAX has replaced them by what they compute.

In a loop that is differentiated some versions of JAX do so.  The derivative in the program still follows the function's
rule, and so must the derivative of a step that is looked up there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import jax
import numpy as np

from autopallas import compat, jaxprs
from autopallas.compat import Dtype, JaxprAtom, JaxprEqn, Literal, Var
from autopallas.graph import Graph
from autopallas.graph.custom_rules import is_elementwise_call
from autopallas.numerics.casts import kind_of

__all__ = ["restored"]

_FUNCTIONS = (jax.nn.softplus, jax.nn.relu)


def restored(graph: Graph, equations: Sequence[JaxprEqn]) -> list[JaxprEqn] | None:
    """Returns equations with the calls that they may have had, or None if there are none."""
    made = {v: e for e in equations for v in e.outvars}
    found: list[JaxprEqn] = []
    changed = False
    for equation in equations:
        call = next((c for c in map(_call_of(graph, equation, made), _FUNCTIONS) if c is not None), None)
        changed |= call is not None
        found.append(equation if call is None else call)
    return found if changed else None


class _call_of:
    """Looks for the call that ends with an equation."""

    def __init__(self, graph: Graph, equation: JaxprEqn, made: dict[Var, JaxprEqn]):
        self.graph, self.equation, self.made = graph, equation, made

    def __call__(self, function: object) -> JaxprEqn | None:
        """Returns the call of a function, or None."""
        if len(self.equation.outvars) != 1:
            return None
        aval = self.equation.outvars[0].aval
        known = _traced(function, tuple(aval.shape), aval.dtype)
        if known is None:
            return None
        call, equations, result = known
        inner = {v: e for e in equations for v in e.outvars}
        names: dict[Var, JaxprAtom] = {}
        if not self._alike(result, self.equation.outvars[0], inner, names):
            return None
        given = [atom if isinstance(atom, Literal) else names.get(atom) for atom in call.invars]
        if any(atom is None for atom in given):
            return None
        return call.replace(invars=[a for a in given if a is not None], outvars=self.equation.outvars)

    def _alike(
        self, pattern: JaxprAtom, atom: JaxprAtom, inner: dict[Var, JaxprEqn], names: dict[Var, JaxprAtom]
    ) -> bool:
        """Returns whether a value is computed as the function computes its own."""
        if isinstance(pattern, Literal):
            return isinstance(atom, Literal) and bool(np.array_equal(pattern.val, atom.val))
        if pattern in names:
            return names[pattern] is atom
        if pattern in inner:
            theirs, ours = inner[pattern], None if isinstance(atom, Literal) else self.made.get(atom)
            if ours is None or theirs.primitive is not ours.primitive or len(ours.invars) != len(theirs.invars):
                return False
            if self.graph.key(theirs, (), ()) != self.graph.key(ours, (), ()):
                return False
            pairs = zip(theirs.invars, ours.invars, strict=True)
            if not all(self._alike(a, b, inner, names) for a, b in pairs):
                return False
        names[pattern] = atom
        return True


@lru_cache(maxsize=256)
def _traced(
    function: object, shape: tuple[int, ...], dtype: Dtype
) -> tuple[JaxprEqn, list[JaxprEqn], JaxprAtom] | None:
    """Returns the call that a function makes, what it computes from the call's operands, and its result."""
    if kind_of(dtype) not in "fV":
        return None
    assert callable(function)
    program, _ = jaxprs.open_jaxpr(compat.make_jaxpr(function, jax.ShapeDtypeStruct(shape, dtype)))
    while len(program.eqns) == 1 and not is_elementwise_call(program.eqns[0]):
        bodies = jaxprs.bodies(program.eqns[0])
        if len(bodies) != 1:
            return None
        program, _ = jaxprs.open_jaxpr(bodies[0][2])
    if len(program.eqns) != 1:
        return None
    (call,) = program.eqns
    body, _ = jaxprs.open_jaxpr(call.params["call_jaxpr"])
    names: dict[Var, JaxprAtom] = dict(zip(body.invars, call.invars, strict=True))
    equations: list[JaxprEqn] = []
    todo = list(body.eqns)
    while todo:
        equation = todo.pop(0)
        if compat.is_plain_jit(equation):
            inner, _ = jaxprs.open_jaxpr(jaxprs.bodies(equation)[0][2])
            names.update(zip(inner.invars, jaxprs.renamed(equation.invars, names), strict=True))
            todo = [*inner.eqns, *todo]
            names.update(zip(equation.outvars, inner.outvars, strict=True))
            continue
        equations.append(equation.replace(invars=jaxprs.renamed(equation.invars, names)))
    (result,) = jaxprs.renamed(jaxprs.renamed(body.outvars[:1], names), names)
    return call, equations, result
