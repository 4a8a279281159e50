"""Rewrites the equations of one body: new ones among them, and others to be read in place of some results."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence

import jax

from autopallas import array_types, compat, jaxprs
from autopallas.compat import ArrayFunction, JaxprEqn, Literal, Var
from autopallas.graph.flatten import Body, Child, is_contraction
from autopallas.graph.keys import hashable, literal_key

__all__ = ["Atom", "RewrittenBody"]

Atom = Var | Literal


class RewrittenBody:
    """Equations of a body while it is rewritten.

    The original equations stay, for their other readers, with new ones among them; equations that nobody reads any more
    are left out at the end.
    """

    def __init__(self, body: Body):
        self.body = body
        self.equations: list[JaxprEqn] = []
        self.definitions: dict[Var, JaxprEqn] = {}
        self.names: dict[Var, Atom] = {}
        """Atoms to read in place of variables."""
        self._traced: dict[Hashable, compat.ClosedJaxpr] = {}
        self._children: dict[int, list[Child]] = {}

    def _named(self, atom: Atom) -> Atom:
        while isinstance(atom, Var) and atom in self.names:
            atom = self.names[atom]
        return atom

    def _renamed(self, equation: JaxprEqn) -> JaxprEqn:
        """Returns an equation that reads what is to be read in place of its operands."""
        inputs = [self._named(a) for a in equation.invars]
        return (
            jaxprs.with_operands(equation, inputs) if any(map(operator.is_not, inputs, equation.invars)) else equation
        )

    def _add(self, equation: JaxprEqn) -> None:
        self.equations.append(equation)
        self.definitions.update(dict.fromkeys(equation.outvars, equation))

    def _add_original(self, position: int, equation: JaxprEqn) -> None:
        """Adds the equation at a position of the body, renamed, with the bodies that it holds."""
        self._add(equation)
        if position in self.body.children:
            self._children[id(equation)] = self.body.children[position]

    def _over(self, equation: JaxprEqn) -> Atom | None:
        """Returns what to read in place of the result of a new equation, if something else is."""
        return None

    def _emit(self, like: JaxprEqn, function: ArrayFunction, *atoms: Atom, known_by: Hashable = None) -> Var:
        """Emits equations for a function of some atoms; returns its result.

        Functions with equal ``known_by``, which tells one from others, are traced once for operands of some types.
        """
        key = None if known_by is None else (known_by, *(a.aval for a in atoms))
        made = self._traced.get(key)
        if made is None:
            with like.ctx.manager:  # in a body of a shard_map the mesh is another than around it
                made = compat.make_jaxpr(function, *(array_types.shape_of(a.aval) for a in atoms))
            if key is not None:
                self._traced[key] = made
        inner, consts = jaxprs.open_jaxpr(made)
        assert not consts
        names: dict[Var, Atom] = dict(zip(inner.invars, atoms, strict=True))
        for equation in inner.eqns:
            inner_outvars = equation.outvars
            inputs = [a if isinstance(a, Literal) else names[a] for a in equation.invars]
            avals = [a.aval for a in inputs]
            outputs = [Var(array_types.array_type(v.aval.shape, v.aval.dtype, avals, v.aval)) for v in equation.outvars]
            equation = equation.replace(invars=inputs, outvars=outputs, source_info=like.source_info, ctx=like.ctx)
            names.update(zip(inner_outvars, outputs, strict=True))
            moved = self._over(equation)
            if moved is not None:
                names[inner_outvars[0]] = moved
            self._add(equation)
        (result,) = inner.outvars
        assert isinstance(result, Var)
        found = names[result]
        assert isinstance(found, Var)
        return found

    def _bind(self, like: JaxprEqn, atoms: Sequence[Atom], **params: object) -> Var:
        """Emits the equation ``like`` with other operands and parameters."""
        full = {**like.params, **params}
        varying = [a for a in atoms if not isinstance(a, Literal)]

        def function(*given: jax.Array) -> jax.Array:
            left = iter(given)
            result: jax.Array = like.primitive.bind(
                *(a.val if isinstance(a, Literal) else next(left) for a in atoms), **full
            )
            return result

        literals = tuple(literal_key(a) if isinstance(a, Literal) else None for a in atoms)
        return self._emit(like, function, *varying, known_by=(like.primitive, hashable(full), literals))

    def _live(self) -> tuple[list[JaxprEqn], list[Atom]]:
        """Returns the equations that are still needed, and the body's results."""
        outvars = [self._named(a) for a in self.body.outvars]
        return jaxprs.live_equations(self.equations, outvars), outvars

    def _replace(self, live: list[JaxprEqn], outvars: list[Atom]) -> bool:
        """Replaces the equations of the body, if there are no more products then; returns whether that was done."""
        before = jaxprs.live_equations(self.body.equations, self.body.outvars)
        if sum(map(is_contraction, live)) > sum(map(is_contraction, before)):
            return False
        children = {i: self._children[id(e)] for i, e in enumerate(live) if id(e) in self._children}
        self.body.replace(live, outvars, children)
        return True
