"""Tells which equations belong to a derivative that no site stands in for: a second one, or one in forward mode."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakKeyDictionary

from autopallas import compat, jaxprs
from autopallas.graph import Graph, Node
from autopallas.patterns.forward import in_backward

__all__ = ["DERIVATIVES", "further_derivative"]

DERIVATIVES = (
    "Nothing has to be changed: derivatives in forward mode (jax.jvp, jax.jacfwd) and second ones (jax.hessian, a "
    "gradient of a gradient) read what kernels do not keep, and are those of the original."
)

_HAVE_BACKWARD: WeakKeyDictionary[Graph, bool] = WeakKeyDictionary()
"""Whether reverse-mode differentiation made any equation of a program."""


def further_derivative(graph: Graph, reader: Node, own: Iterable[Node]) -> str | None:
    """Returns which derivative of the equations ``own`` a reader of their values belongs to, beside the gradient that
    sites take: JAX's differentiation writes each at the place of the equation that it differentiates.

    Returns None for other readers, such as what the function itself computes from these values.
    """
    times = compat.times_differentiated(reader.equation)
    if not times or jaxprs.location(reader.equation) not in {jaxprs.location(node.equation) for node in own}:
        return None
    if times > 1:
        return "a second derivative"
    if graph not in _HAVE_BACKWARD:
        _HAVE_BACKWARD[graph] = any(map(in_backward, graph.nodes))
    return None if _HAVE_BACKWARD[graph] else "a derivative in forward mode"
