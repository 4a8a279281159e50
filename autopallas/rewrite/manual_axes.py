"""Makes values vary alike over the manual mesh axes of a ``shard_map``.

JAX requires that the operands of an equation vary over the same axes, and casts them.  Recognition reads values as they
are before such casts.  So the operands of a site may vary over different axes, and programs that are extracted or
rewritten lack casts, which are added here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, cast

import jax

from autopallas import compat, jaxprs
from autopallas.compat import ClosedJaxpr, JaxprAtom, JaxprEqn, JaxprLike, Literal, Var

__all__ = ["evaluate", "varied_alike", "with_casts"]

T = TypeVar("T")


def varied_alike(arrays: Sequence[T], operands: Sequence[object]) -> list[T]:
    """Returns arrays that vary over every manual axis over which any of ``operands`` varies.

    The transpose of that sums cotangents over the axes which are new.
    """
    axes = compat.varying_axes(list(map(jax.typeof, operands)))

    def varied(x: T) -> T:
        missing = tuple(sorted(axes - compat.varying_axes([jax.typeof(x)])))
        return cast("T", jax.lax.pcast(cast("jax.Array", x), missing, to="varying")) if missing else x

    return list(map(varied, arrays)) if axes else list(arrays)


def evaluate(original: ClosedJaxpr, operands: Sequence[object]) -> list[jax.Array]:
    """Evaluates a site's original on operands that may vary over different manual axes."""
    if not compat.varying_axes(list(map(jax.typeof, operands))):
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

    An equation with one result and no body has operands that vary alike; of others JAX may not require that.
    """
    jaxpr, consts = jaxprs.open_jaxpr(program)
    equations: list[JaxprEqn] = []
    for equation in jaxpr.eqns:
        if jaxprs.bodies(equation):
            own = equation.primitive.name.startswith(_SITES)
            equations.append(equation if own else jaxprs.with_bodies(equation, with_casts))
            continue
        if len(equation.outvars) == 1 and len(equation.invars) > 1:
            axes = compat.varying_axes([equation.outvars[0].aval])
            operands = list(equation.invars)
            for position, atom in enumerate(operands):
                if not axes <= compat.varying_axes([atom.aval]):
                    equations.append(compat.varying_equation(atom, equation))
                    operands[position] = equations[-1].outvars[0]
            equation = equation if operands == equation.invars else equation.replace(invars=operands)
        equations.append(equation)
    if all(new is old for new, old in zip(equations, jaxpr.eqns, strict=False)) and len(equations) == len(jaxpr.eqns):
        return program
    return jaxprs.rebuild(program, jaxpr.constvars, consts, jaxpr.invars, jaxpr.outvars, equations)


_SITES = "autopallas_site"
"""How the names of the site primitives begin: their operands need not vary alike, nor those of their originals."""
