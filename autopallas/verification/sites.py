"""Finds the replaced site at fault: compares each kernel with the equations it replaced, on the operands it met."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.typing import ArrayLike

from autopallas import compat, jaxprs
from autopallas.compat import ClosedJaxpr, JaxprEqn, JaxprLike, Shaped
from autopallas.numerics.compare import Comparison, compare, tolerance_of
from autopallas.numerics.oracle import Oracle
from autopallas.numerics.promote import quiet
from autopallas.rewrite import primitive
from autopallas.verification.influence import SITES, replaced, site_sources

__all__ = ["SiteCheck", "applied_sites", "check_sites"]

_CALLS_LOOKED_AT = 16
"""Largest number of calls to compare for a site in a loop."""


@dataclass(frozen=True, slots=True)
class SiteCheck:
    """Comparison of one replaced site with its original, on the operands that the site had in the program."""

    op: str
    """The operation, such as "attention"."""
    location: str
    """"file:line (function)" of the user's code."""
    direction: str
    """"forward" or "backward": the kernel that was checked."""
    implementation: str
    calls: int
    """How often the site ran during the check."""
    outputs: tuple[Comparison, ...]
    """Comparison of each result of the site, from the worst of the calls."""
    ok: bool


def _edited(body: JaxprLike, edit: Callable[[JaxprEqn], JaxprEqn | None]) -> JaxprLike:
    """Replaces every equation of a jaxpr, also in nested bodies, by what ``edit`` returns; drops it for None."""
    jaxpr, consts = jaxprs.open_jaxpr(body)
    equations = []
    for equation in jaxpr.eqns:
        params = dict(equation.params)
        if equation.primitive not in SITES:
            for name, position, inner in jaxprs.bodies(equation):
                new = _edited(inner, edit)
                if position is None:
                    params[name] = new
                else:
                    held = list(params[name])
                    held[position] = new
                    params[name] = tuple(held)
            equation = equation.replace(params=params)
        edited = edit(equation)
        if edited is not None:
            equations.append(edited)
    return jaxprs.rebuild(body, jaxpr.constvars, consts, jaxpr.invars, jaxpr.outvars, equations)


def applied_sites(program: JaxprLike) -> list[JaxprEqn]:
    """Returns the equations of a rewritten program at which a kernel runs, also in nested bodies."""
    found: list[JaxprEqn] = []
    for equation in jaxprs.open_jaxpr(program)[0].eqns:
        if equation.primitive in SITES:
            if equation.params["decision"].verdict == "applied" and equation.primitive is not primitive.tangent_p:
                found.append(equation)
        else:
            for _, _, body in jaxprs.bodies(equation):
                found += applied_sites(body)
    return found


def check_sites(program: ClosedJaxpr, arguments: Sequence[ArrayLike]) -> tuple[list[SiteCheck], tuple[str, ...]]:
    """Runs a rewritten program once more and checks each kernel in it.

    Args:
      program: the rewritten closed jaxpr.
      arguments: its arguments.

    Returns:
      A check per site and direction, in program order, and notes on equations that could not be evaluated in float64.
    """
    sites = applied_sites(program)
    positions = {id(site): i for i, site in enumerate(sites)}
    calls: list[list[list[np.ndarray]]] = [[] for _ in sites]
    counts = [0] * len(sites)

    def recorder(i: int) -> Callable[..., list[np.ndarray]]:
        def record(*values: jax.Array) -> list[np.ndarray]:
            counts[i] += 1
            taken = [np.array(x) for x in values]
            if len(calls[i]) < _CALLS_LOOKED_AT:
                calls[i].append(taken)
            return taken[len(sites[i].invars) :]

        return record

    def watched(equation: JaxprEqn) -> JaxprEqn:
        i = positions.get(id(equation))
        return equation if i is None else _watched(equation, recorder(i))

    with quiet():
        jax.block_until_ready(jax.jit(compat.jaxpr_as_fun(_edited(program, watched)))(*arguments))
    checks: list[SiteCheck] = []
    notes: set[str] = set()
    known: dict[Hashable, tuple[ClosedJaxpr, Oracle]] = {}
    for site, seen, count in zip(sites, calls, counts, strict=True):
        key = (id(site.params["original"]), site.primitive, site.params.get("active"))
        if key not in known:
            closed = compat.make_jaxpr(replaced(site), *(_type(v.aval) for v in site.invars))
            known[key] = closed, Oracle(closed)
        closed, oracle = known[key]
        checks.append(_check(site, seen, count, closed, oracle))
        notes.update(oracle.notes)
    return checks, tuple(sorted(notes))


def _type(aval: Shaped) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _watched(equation: JaxprEqn, record: Callable[..., list[np.ndarray]]) -> JaxprEqn:
    """Returns an equation that runs the site and also passes its operands and results to ``record``."""

    def run(*operands: jax.Array) -> Sequence[jax.Array]:
        results = equation.primitive.bind(*operands, **equation.params)
        # The results pass through the callback, so that no compiler removes it as unused.
        types = [_type(jax.typeof(x)) for x in results]
        passed: Sequence[jax.Array] = jax.pure_callback(record, types, *operands, *results)
        return passed

    call = compat.make_jaxpr(jax.jit(run), *(_type(v.aval) for v in equation.invars)).eqns[0]
    return call.replace(invars=equation.invars, outvars=equation.outvars, ctx=equation.ctx)


def _check(
    site: JaxprEqn, calls: Sequence[Sequence[np.ndarray]], count: int, closed: ClosedJaxpr, oracle: Oracle
) -> SiteCheck:
    params = site.params
    gradient = site.primitive is not primitive.site_p
    allowed = [tolerance_of(v.aval.dtype, source) for v, source in zip(site.outvars, site_sources(site), strict=True)]
    run = jax.jit(compat.jaxpr_as_fun(closed))
    worst: list[Comparison] = []
    for call in calls:
        operands, results = call[: len(site.invars)], call[len(site.invars) :]
        with quiet():
            originals = run(*operands)
        compared = [
            compare(f"[{i}]", x, y, z, bound)
            for i, (x, y, z, bound) in enumerate(zip(originals, results, oracle(*operands), allowed, strict=False))
        ]
        worst = [max(pair, key=_badness) for pair in zip(worst or compared, compared, strict=True)]
    return SiteCheck(
        op=params["site"].operation.name,
        location=jaxprs.location(site),
        direction="backward" if gradient else "forward",
        implementation=params["decision"].implementation,
        calls=count,
        outputs=tuple(worst),
        ok=all(c.ok for c in worst),
    )


def _badness(c: Comparison) -> tuple[bool, int, float]:
    return not c.ok, c.non_finite, c.rewritten.max_relative / c.allowed if c.allowed else c.rewritten.max_relative
