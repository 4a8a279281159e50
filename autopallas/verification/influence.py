"""For each output: the narrowest dtype on its way from a replaced site, and whether a backward kernel contributes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import jax

from autopallas import compat, jaxprs
from autopallas.compat import ClosedJaxpr, JaxprEqn, Shaped
from autopallas.numerics.rounding import (
    NOTHING,
    Source,
    coarsest,
    flow,
    gradient_function,
    joined,
    sources_of,
)
from autopallas.rewrite import primitive

__all__ = ["SITES", "Source", "replaced", "site_sources", "sources"]

SITES = (primitive.site_p, primitive.tangent_p, primitive.backward_p)


def sources(program: ClosedJaxpr) -> list[Source]:
    """Returns a :class:`Source` for each result of a closed jaxpr.

    A result that depends on no site gets the narrowest dtype of the whole program.  Nothing was replaced on its way,
    but XLA may compile it differently because other parts of the program differ.
    """
    jaxpr, _ = jaxprs.open_jaxpr(program)
    known: dict[Hashable, list[Source]] = {}

    def site(equation: JaxprEqn, before: Sequence[Source]) -> list[Source] | None:
        if equation.primitive not in SITES:
            return None
        key = (id(equation.params["original"]), equation.primitive, equation.params.get("active"))
        if key not in known:
            known[key] = site_sources(equation)
        return [joined([*before, own]) for own in known[key]]

    anything = Source(coarsest(program))
    found = flow(program, [NOTHING] * len(jaxpr.invars), site)
    return [source if source.followed else anything for source in found]


def site_sources(site: JaxprEqn) -> list[Source]:
    """Returns a source for each result of a site as the original computes it, if the site's operands are exact."""
    gradient = site.primitive is not primitive.site_p
    if site.primitive is primitive.tangent_p:
        own = [Source(coarsest(site.params["original"]), followed=True)] * len(site.outvars)
    else:
        own = sources_of(compat.make_jaxpr(replaced(site), *(_type(v.aval) for v in site.invars)))
        # The original has no residuals; they depend on everything that it computes.
        own += [joined(own)] * (len(site.outvars) - len(own))
    return [Source(source.dtype, gradient, True) for source in own]


def replaced(site: JaxprEqn) -> Callable[..., list[jax.Array]]:
    """Returns the function that a site's equation, or its backward's, replaces: the original's equations."""
    original = site.params["original"]
    if site.primitive is primitive.site_p:
        return compat.jaxpr_as_fun(original)
    return gradient_function(original, site.params["active"])


def _type(aval: Shaped) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
