"""Estimates how long a site's original takes on a CPU, to tell whether a quick search for it can pay."""

from __future__ import annotations

import math

from autopallas import jaxprs
from autopallas.compat import JaxprEqn, JaxprLike
from autopallas.sites.workload import Workload

__all__ = ["LEAST_SECONDS", "estimated_seconds", "takes_long"]

LEAST_SECONDS = 0.005
"""Time below which a site is not worth a search."""
_OPERATIONS = 1e11
"""Multiplications and additions of matrix products per second, on a small machine."""
_ELEMENTS = 1e9
"""Elements of other results per second."""
_WITH_BACKWARD = 3
"""Factor by which a train step has more products than its forward."""


def takes_long(match: Workload) -> bool:
    """Returns whether one call of a site's original takes more than five milliseconds, by the estimate."""
    return estimated_seconds(match) > LEAST_SECONDS


def estimated_seconds(match: Workload) -> float:
    """Estimates one call of a site's original on a small CPU by counting; it is right within a factor of a few.

    Example:
      >>> from types import SimpleNamespace
      >>> import jax, jax.numpy as jnp
      >>> x = jnp.ones((1000, 1000))
      >>> site = SimpleNamespace(original=jax.make_jaxpr(lambda x: x @ x)(x), direction="forward", passes=[])
      >>> site.passes.append(site)
      >>> round(estimated_seconds(site), 3)
      0.02
    """
    forward = sum(_seconds(part.original) for part in match.passes)
    return forward * (1 if match.direction == "forward" else _WITH_BACKWARD)


def _seconds(body: JaxprLike) -> float:
    jaxpr, _ = jaxprs.open_jaxpr(body)
    return sum(map(_seconds_of, jaxpr.eqns))


def _seconds_of(equation: JaxprEqn) -> float:
    elements: int = sum(math.prod(v.aval.shape) for v in equation.outvars)
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        left = equation.invars[0].aval.shape
        contracted: int = math.prod(left[d] for d in params["dimension_numbers"][0][0])
        return 2 * elements * contracted / _OPERATIONS
    if name == "ragged_dot_general":
        return 2 * elements * int(equation.invars[0].aval.shape[-1]) / _OPERATIONS
    bodies = [_seconds(body) for _, _, body in jaxprs.bodies(equation)]
    if bodies:
        times = int(params["length"]) if name == "scan" else 1
        return times * (max(bodies) if name == "cond" else sum(bodies))
    return elements / _ELEMENTS
