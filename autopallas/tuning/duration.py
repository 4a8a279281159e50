"""Estimates how long a site's original takes, to tell whether a search that nobody asked for can pay."""

from __future__ import annotations

import math
from typing import NamedTuple

from autopallas import jaxprs
from autopallas.compat import JaxprEqn, JaxprLike
from autopallas.sites.workload import Workload

__all__ = ["LEAST_SECONDS", "LEAST_SECONDS_ON_CPUS", "estimated_seconds", "takes_long"]


class _Machine(NamedTuple):
    """A small machine of a kind.

    Attributes:
      operations: multiplications and additions of matrix products per second.
      elements: elements of other results per second.
    """

    operations: float
    elements: float


_CPU, _ACCELERATOR = _Machine(1e11, 1e9), _Machine(2e14, 2e11)
LEAST_SECONDS, LEAST_SECONDS_ON_CPUS = 1e-4, 5e-3
"""Time below which a site is not worth a search."""
_WITH_BACKWARD = 3
"""Factor by which a train step has more products than its forward."""


def takes_long(match: Workload, platform: str) -> bool:
    """Returns whether one call of a site's original is worth a search, by the estimate."""
    return estimated_seconds(match, platform) > (LEAST_SECONDS_ON_CPUS if platform == "cpu" else LEAST_SECONDS)


def estimated_seconds(match: Workload, platform: str = "cpu") -> float:
    """Estimates one call of a site's original on a small machine by counting; it is right within a factor of a few.

    Example:
      >>> from types import SimpleNamespace
      >>> import jax, jax.numpy as jnp
      >>> x = jnp.ones((1000, 1000))
      >>> site = SimpleNamespace(original=jax.make_jaxpr(lambda x: x @ x)(x), direction="forward", passes=[])
      >>> site.passes.append(site)
      >>> round(estimated_seconds(site), 3)
      0.02
    """
    machine = _CPU if platform == "cpu" else _ACCELERATOR
    forward = sum(_seconds(part.original, machine) for part in match.passes)
    return forward * (1 if match.direction == "forward" else _WITH_BACKWARD)


def _seconds(body: JaxprLike, machine: _Machine) -> float:
    jaxpr, _ = jaxprs.open_jaxpr(body)
    return sum(_seconds_of(equation, machine) for equation in jaxpr.eqns)


def _seconds_of(equation: JaxprEqn, machine: _Machine) -> float:
    elements: int = sum(math.prod(v.aval.shape) for v in equation.outvars)
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        left = equation.invars[0].aval.shape
        contracted: int = math.prod(left[d] for d in params["dimension_numbers"][0][0])
        return 2 * elements * contracted / machine.operations
    if name == "ragged_dot_general":
        return 2 * elements * int(equation.invars[0].aval.shape[-1]) / machine.operations
    bodies = [_seconds(body, machine) for _, _, body in jaxprs.bodies(equation)]
    if bodies:
        times = int(params["length"]) if name == "scan" else 1
        return times * (max(bodies) if name == "cond" else sum(bodies))
    return elements / machine.elements
