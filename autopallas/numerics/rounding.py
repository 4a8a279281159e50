"""Finds how precisely a program computes each result: through which dtypes values are rounded on the way to it.

An operand of 16 bits is exact as it is given.  Only rounding, by arithmetic or by a narrowing cast, loses what a
tolerance has to allow for; layout, selection and widening lose nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from autopallas import compat, jaxprs
from autopallas.compat import ClosedJaxpr, Dtype, JaxprAtom, JaxprEqn, JaxprLike, Literal, Var

__all__ = [
    "EXACT_PRIMITIVES",
    "NOTHING",
    "Source",
    "coarsest",
    "flow",
    "gradient_function",
    "joined",
    "less_precise",
    "sources_of",
]


@dataclass(frozen=True, slots=True)
class Source:
    """Precision of one value.

    Attributes:
      dtype: the least precise floating-point dtype that it was rounded to since it was followed; None if it was not.
      gradient: whether a backward kernel contributed to it.
      followed: whether it depends on anything that is followed.
    """

    dtype: DTypeLike | None = None
    gradient: bool = False
    followed: bool = False


NOTHING, EXACT = Source(), Source(followed=True)

Site = Callable[[JaxprEqn, Sequence[Source]], "list[Source] | None"]
"""Returns the sources of a replaced site's results from those of its operands; None for any other equation."""

EXACT_PRIMITIVES = frozenset(
    """
    abs all_gather all_to_all broadcast_in_dim clamp concatenate copy copy_p cummax cummin dynamic_slice
    dynamic_update_slice expand_dims gather imag max min name neg optimization_barrier pad ppermute pvary real
    reduce_max reduce_min reshape rev scatter select_and_gather_add select_n sharding_constraint sign slice sort split
    squeeze stop_gradient tile top_k transpose
    """.split()
)
"""Primitives that move, choose or negate numbers, and never round."""


def sources_of(program: ClosedJaxpr, site: Site | None = None) -> list[Source]:
    """Returns a source for each result of a closed jaxpr whose arguments are all exact and followed."""
    jaxpr, _ = jaxprs.open_jaxpr(program)
    return flow(program, [EXACT] * len(jaxpr.invars), site)


def flow(program: JaxprLike, given: Sequence[Source], site: Site | None = None) -> list[Source]:
    """Returns a source for each result of a jaxpr, from those of its arguments; constants are not followed."""
    jaxpr, _ = jaxprs.open_jaxpr(program)
    known: dict[Var, Source] = dict(zip(jaxpr.invars, given, strict=True))

    def of(atom: JaxprAtom) -> Source:
        return NOTHING if isinstance(atom, Literal) else known.get(atom, NOTHING)

    for equation in jaxpr.eqns:
        before = [of(atom) for atom in equation.invars]
        found = None if site is None else site(equation, before)
        if found is None:
            found = _through(equation, before, site)
        known.update(zip(equation.outvars, found, strict=True))
    return [of(atom) for atom in jaxpr.outvars]


def joined(sources: Iterable[Source]) -> Source:
    """Returns the source of a value that depends on all of these."""
    result = NOTHING
    for source in sources:
        if source.followed:
            result = Source(less_precise(result.dtype, source.dtype), result.gradient or source.gradient, True)
    return result


def less_precise(a: DTypeLike | None, b: DTypeLike | None) -> DTypeLike | None:
    """Returns the less precise of two dtypes."""
    if a is None or b is None:
        return a if b is None else b
    return a if jnp.finfo(a).eps >= jnp.finfo(b).eps else b


def coarsest(program: JaxprLike) -> DTypeLike | None:
    """Returns the least precise floating-point dtype in a program, including its arguments, or None."""
    found = None
    jaxpr, _ = jaxprs.open_jaxpr(program)
    for variable in [*jaxpr.invars, *(v for equation in jaxpr.eqns for v in equation.outvars)]:
        dtype = getattr(variable.aval, "dtype", None)
        if dtype is not None and jnp.issubdtype(dtype, np.inexact):
            found = less_precise(found, dtype)
    for equation in jaxpr.eqns:
        for _, _, body in jaxprs.bodies(equation):
            found = less_precise(found, coarsest(body))
    return found


def gradient_function(original: ClosedJaxpr, active: Sequence[int]) -> Callable[..., list[jax.Array]]:
    """Returns the vector-Jacobian product of a closed jaxpr as a function.

    It takes the jaxpr's arguments, then the cotangents of its results; it returns the cotangents of the arguments at
    the positions ``active``.
    """
    function = compat.jaxpr_as_fun(original)
    count, results = len(original.in_avals), len(original.out_avals)

    def backward(*arguments: jax.Array) -> list[jax.Array]:
        def varied(*chosen: jax.Array) -> list[jax.Array]:
            filled = list(arguments[:count])
            for position, x in zip(active, chosen, strict=True):
                filled[position] = x
            return function(*filled)

        _, pull = jax.vjp(varied, *(arguments[i] for i in active))
        return list(pull(list(arguments[-results:])))

    return backward


# ---------------------------------------------------------------------- one equation


def _through(equation: JaxprEqn, before: Sequence[Source], site: Site | None) -> list[Source]:
    bodies = [body for _, _, body in jaxprs.bodies(equation)]
    if bodies:
        return _through_bodies(equation, bodies, before, site)
    everything = joined(before)
    if not everything.followed:
        return [NOTHING] * len(equation.outvars)
    return [joined([everything, Source(_own(equation, v), followed=True)]) for v in equation.outvars]


def _own(equation: JaxprEqn, variable: Var) -> DTypeLike | None:
    """Returns the dtype to which an equation without bodies rounds one of its results, or None."""
    dtype: Dtype | None = getattr(variable.aval, "dtype", None)
    name = equation.primitive.name
    if dtype is None or not jnp.issubdtype(dtype, np.inexact) or name in EXACT_PRIMITIVES:
        return None
    if name == "convert_element_type":
        given = equation.invars[0].aval.dtype
        widens = jnp.issubdtype(given, np.inexact) and jnp.finfo(given).eps >= jnp.finfo(dtype).eps
        return None if widens else dtype
    if name == "reduce_precision":
        bits = equation.params["mantissa_bits"]
        return less_precise(dtype, jnp.bfloat16 if bits <= 7 else jnp.float16 if bits <= 10 else None)
    return dtype


def _through_bodies(
    equation: JaxprEqn, bodies: Sequence[JaxprLike], before: Sequence[Source], site: Site | None
) -> list[Source]:
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        return _loop(bodies[0], before, *compat.scan_parts(equation), site)
    if name == "while":
        fixed = params["cond_nconsts"], params["body_nconsts"]
        carry = len(before) - sum(fixed)
        return _loop(params["body_jaxpr"], before[fixed[0] :], fixed[1], carry, site)
    given = before[1:] if name == "cond" else before
    types = [jaxprs.open_jaxpr(body)[0] for body in bodies]
    if all(len(t.invars) == len(given) and len(t.outvars) == len(equation.outvars) for t in types):
        branches = [flow(body, given, site) for body in bodies]
        chosen = before[:1] if name == "cond" else ()
        return [joined([*each, *chosen]) for each in zip(*branches, strict=True)]
    # If a body's arguments are not those of the equation, everything in the body counts.
    within = [found for body in bodies for found in _every_site(body, site)]
    everything = joined([*before, *within])
    if not everything.followed:
        return [NOTHING] * len(equation.outvars)
    narrow = [Source(coarsest(body), followed=True) for body in bodies]
    return [joined([everything, *narrow, Source(_own(equation, v), followed=True)]) for v in equation.outvars]


def _loop(body: JaxprLike, before: Sequence[Source], fixed: int, carry: int, site: Site | None) -> list[Source]:
    """Returns the sources of a loop's results, from those of its arguments.

    Arguments are the constants, the carry, and slices; results are the carry, and slices.

    Repeats until the carry's sources stay the same.  Each round only adds to them, and there are few dtypes to add.
    """
    given = list(before)
    while True:
        found = flow(body, given, site)
        after = [joined(pair) for pair in zip(given[fixed : fixed + carry], found, strict=False)]
        if after == given[fixed : fixed + carry]:
            return [*after, *found[carry:]]
        given[fixed : fixed + carry] = after


def _every_site(program: JaxprLike, site: Site | None) -> Iterable[Source]:
    """Yields the sources of the sites in a jaxpr, as if their operands were exact."""
    for equation in jaxprs.open_jaxpr(program)[0].eqns:
        found = None if site is None else site(equation, [NOTHING] * len(equation.invars))
        yield from found or ()
        for _, _, body in jaxprs.bodies(equation):
            yield from _every_site(body, site)
