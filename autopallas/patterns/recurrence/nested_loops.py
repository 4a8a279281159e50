"""Writes out the loops of few steps within a step, through which what it carries may pass."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
from jax import lax

from autopallas import array_types, compat, jaxprs
from autopallas.compat import ArrayFunction, JaxprAtom, JaxprEqn, Var
from autopallas.graph import flatten
from autopallas.patterns.recurrence.step import Step, needed

__all__ = ["written_out"]

_MOST_STEPS = 8
_MOST_EQUATIONS = 512
"""Most equations of a loop that is written out."""


def written_out(step: Step) -> Step:
    """Returns a step in which loops of few steps that read what it carries are written out; itself without such."""
    if not any(map(_is_short, step.equations)):
        return step
    bits = step.dependencies()
    names: dict[Var, JaxprAtom] = {}
    equations: list[JaxprEqn] = []

    for equation in step.equations:
        concerned = any(isinstance(a, Var) and bits[a] for a in equation.invars) and _is_short(equation)
        equation = equation.replace(invars=jaxprs.renamed(equation.invars, names))
        if not concerned:
            equations.append(equation)
            continue
        made = flatten(compat.make_jaxpr(_run(equation), *(array_types.typed_like(a.aval) for a in equation.invars)))
        if made.constvars or any(map(compat.has_side_effects, made.equations)):
            return step
        own: dict[Var, JaxprAtom] = dict(zip(made.invars, equation.invars, strict=True))
        for inner in made.equations:
            equations.append(inner.replace(invars=jaxprs.renamed(inner.invars, own)))
        names.update(zip(equation.outvars, jaxprs.renamed(made.outvars, own), strict=True))
    after, results = (jaxprs.renamed(atoms, names) for atoms in (step.after, step.results))
    return replace(step, equations=needed(equations, [*after, *results]), after=after, results=results)


def _is_short(equation: JaxprEqn) -> bool:
    """Returns whether an equation is a loop that may be written out."""
    if equation.primitive.name != "scan" or not 0 < equation.params["length"] <= _MOST_STEPS:
        return False
    body, _ = jaxprs.open_jaxpr(jaxprs.bodies(equation)[0][2])
    return int(equation.params["length"]) * len(body.eqns) <= _MOST_EQUATIONS


def _run(equation: JaxprEqn) -> ArrayFunction:
    """Returns what a loop computes, step after step."""
    constants, carried = compat.scan_parts(equation)
    length, body = int(equation.params["length"]), compat.jaxpr_as_fun(equation.params["jaxpr"])
    order = range(length)[::-1] if equation.params["reverse"] else range(length)

    def run(*given: jnp.ndarray) -> list[jnp.ndarray]:
        state = list(given[constants : constants + carried])
        stacked: dict[int, list[jnp.ndarray]] = {}
        for i in order:
            slices = [lax.index_in_dim(x, i, keepdims=False) for x in given[constants + carried :]]
            found = body(*given[:constants], *state, *slices)
            state, stacked[i] = list(found[:carried]), list(found[carried:])
        return [*state, *(jnp.stack(own) for own in zip(*(stacked[i] for i in range(length)), strict=True))]

    return run
