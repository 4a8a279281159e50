"""Makes values vary alike over the manual mesh axes of a ``shard_map``.

JAX requires that the operands of an equation vary over the same axes, and casts them.  Recognition reads values as they
are before such casts.  So the operands of a site may vary over different axes, and programs that are extracted or
rewritten lack casts, which are added here.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import cast

import jax

from autopallas import compat, jaxprs
from autopallas.array_types import array_type, varied_alike, varying_axes
from autopallas.compat import ClosedJaxpr, JaxprAtom, JaxprEqn, JaxprLike, Literal, ShapedArray, Var

__all__ = ["casts_to", "evaluate", "with_casts"]


def evaluate(original: ClosedJaxpr, operands: Sequence[object]) -> list[jax.Array]:
    """Evaluates a site's original on operands that may vary over different manual axes."""
    if not varying_axes(list(map(jax.typeof, operands))):
        return compat.jaxpr_as_fun(original)(*operands)
    jaxpr = original.jaxpr
    known: dict[Var, object] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*original.consts, *operands], strict=True))

    def read(atom: JaxprAtom) -> object:
        return atom.val if isinstance(atom, Literal) else known[atom]

    for equation in jaxpr.eqns:
        given = [read(atom) for atom in equation.invars]
        known.update(zip(equation.outvars, _run(equation, varied_alike(given, given)), strict=True))
    return cast("list[jax.Array]", varied_alike([read(atom) for atom in jaxpr.outvars], operands))


def _run(equation: JaxprEqn, given: Sequence[object]) -> list[jax.Array]:
    variables = [Var(atom.aval) for atom in equation.invars]
    own, info = equation.replace(invars=variables), jaxprs.debug_info("autopallas", len(given), len(equation.outvars))
    program = compat.new_jaxpr([], variables, own.outvars, [own], equation.effects, info)
    return compat.jaxpr_as_fun(ClosedJaxpr(program, []))(*given)


def with_casts(program: JaxprLike) -> JaxprLike:
    """Returns a rewritten program with the casts that its equations lack.

    An equation with one result and no body has operands that vary alike; of others JAX may not require that.  The
    results of a site vary over the axes of its operands, of which one is cast where the program's results vary further.
    """
    jaxpr, consts = jaxprs.open_jaxpr(program)
    equations: list[JaxprEqn] = []
    for equation in jaxpr.eqns:
        operands = list(equation.invars)
        results = [v.aval for v in equation.outvars]
        axes = varying_axes(results)
        lacking: list[int] = []
        if equation.primitive.name.startswith(_SITES):
            if axes and operands and axes - varying_axes([atom.aval for atom in operands]):
                lacking = [0]
        elif jaxprs.bodies(equation):
            equation = jaxprs.with_bodies(equation, with_casts)
        elif axes and len(results) == 1 and len(operands) > 1:
            lacking = [i for i, atom in enumerate(operands) if not axes <= varying_axes([atom.aval])]
        for position in lacking:
            widest = max(results, key=lambda aval: len(varying_axes([aval])))
            equations.append(_varying(operands[position], widest, equation))
            operands[position] = equations[-1].outvars[0]
        equations.append(equation.replace(invars=operands) if lacking else equation)
    if len(equations) == len(jaxpr.eqns) and all(map(operator.is_, equations, jaxpr.eqns)):
        return program
    return jaxprs.rebuild(program, jaxpr.constvars, consts, jaxpr.invars, jaxpr.outvars, equations)


def _varying(atom: JaxprAtom, like: ShapedArray, beside: JaxprEqn) -> JaxprEqn:
    """Returns the equation, beside another one, after which a value also varies over the manual mesh axes over which
    ``like`` varies."""
    axes = tuple(sorted(varying_axes([like]) - varying_axes([atom.aval])))
    result = Var(array_type(atom.aval.shape, atom.aval.dtype, [like, atom.aval]))
    return compat.new_jaxpr_eqn([atom], [result], compat.pvary_p, {"axes": axes}, set(), beside.source_info, beside.ctx)


def casts_to(wanted: Var, given: Var, beside: JaxprEqn) -> list[JaxprEqn]:
    """Returns the cast that makes a variable of another one of the same value, if that varies over fewer axes."""
    if varying_axes([wanted.aval]) <= varying_axes([given.aval]):
        return []
    return [_varying(given, wanted.aval, beside).replace(outvars=[wanted])]


_SITES = "autopallas_site"
"""How the names of the site primitives begin: their operands need not vary alike, nor those of their originals."""
