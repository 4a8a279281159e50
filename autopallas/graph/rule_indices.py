"""Computes before a call what a function with a derivative of its own makes of its integers for a gather.

A loss in a ``jax.custom_vjp`` that is given logits and labels turns labels into indices inside.  The product that
gives the logits stands outside, and so does the site that takes the place of both: it has to read the indices there.
They are integers, of which no rule gives a derivative, so that they are the same numbers inside and outside.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopallas import compat, jaxprs
from autopallas.compat import JaxprEqn, Literal, Var
from autopallas.faults import contained
from autopallas.graph.custom_rules import CUSTOM_RULES
from autopallas.graph.flatten import Body, Child
from autopallas.graph.rewritten_body import Atom, RewrittenBody
from autopallas.numerics.casts import kind_of

__all__ = ["bring_indices_out", "is_whole"]

_MOST_INDICES = 64
"""Most equations of one function that are computed before its call too."""


def bring_indices_out(root: Body) -> Body:
    """Adds to every body, before each call of a function with a derivative of its own, equations for the indices that
    the function computes from the integers that it is given, in place."""
    for body in [*root.walk()][::-1]:  # a function that calls another one comes after it
        found: dict[int, list[JaxprEqn]] = {}
        for position, children in body.children.items():
            equation = body.equations[position]
            if equation.primitive.name in CUSTOM_RULES and len(children) == 1:
                if indices := _indices(children[0].body, len(equation.invars)):
                    found[position] = indices
        if found:
            with contained("the indices of a function with a derivative of its own", "cross_entropy", "graph"):
                _Indices(body, found).run()
    return root


def is_whole(equation: JaxprEqn) -> bool:
    """Returns whether an equation makes integers or booleans of such, and has no effect."""
    atoms = (*equation.invars, *equation.outvars)
    return all(kind_of(atom.aval.dtype) in "iub" for atom in atoms) and not compat.has_side_effects(equation)


def _indices(body: Body, given: int) -> list[JaxprEqn]:
    """Returns the equations of a function's body that make the indices of its gathers of the integers that the function
    is given."""
    if len(body.invars) != given:
        return []
    known: set[Atom] = {v for v in body.invars if kind_of(v.aval.dtype) in "iub"}
    made: list[JaxprEqn] = []
    for position, equation in enumerate(body.equations):
        if position not in body.children and is_whole(equation):
            if all(isinstance(a, Literal) or a in known for a in equation.invars):
                known.update(equation.outvars)
                made.append(equation)
    read = (e.invars[1] for e in body.equations if e.primitive.name == "gather")
    wanted = {v for v in read if isinstance(v, Var) and v in known}
    live = jaxprs.live_equations(made, [*wanted]) if wanted else []
    return live if len(live) <= _MOST_INDICES else []


class _Indices(RewrittenBody):
    """Adds the indices of functions before their calls."""

    def __init__(self, body: Body, found: dict[int, list[JaxprEqn]]):
        super().__init__(body)
        self.found = found

    def run(self) -> None:
        children: dict[int, list[Child]] = {}
        for position, equation in enumerate(self.body.equations):
            if position in self.found:
                (child,) = self.body.children[position]
                self._add_before(equation, child.body.invars, self.found[position])
            if position in self.body.children:
                children[len(self.equations)] = self.body.children[position]
            self._add(equation)
        self.body.replace(self.equations, self.body.outvars, children)

    def _add_before(self, call: JaxprEqn, inputs: Sequence[Var], indices: Sequence[JaxprEqn]) -> None:
        names: dict[Var, Atom] = dict(zip(inputs, call.invars, strict=True))
        for equation in indices:
            operands = [a if isinstance(a, Literal) else names[a] for a in equation.invars]
            results = [Var(v.aval) for v in equation.outvars]
            names.update(zip(equation.outvars, results, strict=True))
            self._add(equation.replace(invars=operands, outvars=results))
