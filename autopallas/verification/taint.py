"""What the replaced sites can do to each result of a program: through which dtype, and whether by a backward kernel."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from autopallas import compat
from autopallas.compat import JaxprEqn, Literal
from autopallas.rewrite import primitive
from autopallas.verification.sites import coarsest, wider_step

__all__ = ["Source", "sources"]


@dataclass(frozen=True, slots=True)
class Source:
    """``dtype``: the narrowest floating-point dtype at or after a site on the way to a value; None without a site.
    ``gradient``: whether a backward kernel is among the sites."""

    dtype: Any = None
    gradient: bool = False


def sources(program: Any) -> list[Source]:
    """A :class:`Source` for each result of a closed jaxpr.  A value without a site has the narrowest dtype of the whole
    program: nothing was replaced on its way, but XLA may compile it otherwise in a program that is otherwise different.
    """
    jaxpr, _ = compat.opened(program)
    known: dict[Any, Source] = {}
    for equation in jaxpr.eqns:
        before = [known.get(atom, Source()) for atom in equation.invars if not isinstance(atom, Literal)]
        within = list(_sites(equation))
        reached = [s for s in before if s.dtype is not None] + within
        if not reached:
            continue
        for variable in equation.outvars:
            known[variable] = _joined([*reached, *_passed(equation, variable)])
    anything = Source(coarsest(program))
    reaching = [Source() if isinstance(atom, Literal) else known.get(atom, Source()) for atom in jaxpr.outvars]
    return [anything if source.dtype is None else source for source in reaching]


def _joined(found: Iterable[Source]) -> Source:
    result = Source()
    for source in found:
        result = Source(wider_step(result.dtype, source.dtype), result.gradient or source.gradient)
    return result


def _passed(equation: JaxprEqn, variable: Any) -> list[Source]:
    """What an equation that a site reaches adds: its result's dtype, and those in its bodies."""
    dtype = getattr(variable.aval, "dtype", None)
    own = [Source(dtype)] if dtype is not None and jnp.issubdtype(dtype, np.inexact) else []
    return own + [Source(coarsest(body)) for _, _, body in compat.bodies(equation)]


def _sites(equation: JaxprEqn) -> Iterable[Source]:
    """The sites that an equation is or holds."""
    if equation.primitive in (primitive.site_p, primitive.tangent_p, primitive.backward_p):
        gradient = equation.primitive is primitive.backward_p
        yield Source(coarsest(equation.params["original"]), gradient)
        return
    for _, _, body in compat.bodies(equation):
        for inner in compat.opened(body)[0].eqns:
            yield from _sites(inner)
