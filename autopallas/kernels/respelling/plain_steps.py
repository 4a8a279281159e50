"""Steps of loops: those that gain nothing by themselves, so that the loop may be respelt as a whole, how many of them a
respelt loop compiles as one, and steps without checkpoints."""

from __future__ import annotations

from autopallas import jaxprs
from autopallas.compat import ClosedJaxpr, Jaxpr, JaxprAtom, JaxprEqn, JaxprLike, Var
from autopallas.graph.custom_rules import CUSTOM_RULES
from autopallas.sites.device import Device

__all__ = ["at_a_time", "is_plain", "without_checkpoints"]

_APART = frozenset(
    """conv_general_dilated cummax cummin cumprod cumsum cumlogsumexp random_bits reduce_window reduce_window_max
    reduce_window_min reduce_window_sum select_and_gather_add select_and_scatter_add
    sort threefry2x32 top_k triangular_solve""".split()
)
"""Equations that may gain more by a respelling of their own, which is none where the loop around them is respelt."""
_CALLS = CUSTOM_RULES | jaxprs.CHECKPOINTS | {"jit", "pjit"}


def is_plain(program: JaxprLike) -> bool:
    """Returns whether a step holds no loops and branches, and nothing that may gain more by itself."""
    return not any(
        e.primitive.name in _APART or e.effects or (e.primitive.name not in _CALLS and jaxprs.bodies(e))
        for e in jaxprs.every_equation(program)
    )


def at_a_time(unroll: int, length: int) -> int:
    """Returns how many steps a respelt loop compiles as one, where the program compiles ``unroll``.

    On CPUs it is one, which takes less time there (:mod:`autopallas.kernels.respelling.kinds.unrolled_scan`).
    """
    return 1 if Device.current().platform == "cpu" else min(unroll, length)


def without_checkpoints(step: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a loop's step with the equations of its checkpoints in their places.

    What a checkpoint computes again in the step of a backward loop is not at hand there in any other way, so that no
    compiler can share it with the forward.
    """
    jaxpr, consts = jaxprs.open_jaxpr(step)
    if not any(e.primitive.name in jaxprs.CHECKPOINTS for e in jaxpr.eqns):
        return step
    equations: list[JaxprEqn] = []
    results = _dissolved(jaxpr, {}, equations, whole=True)
    found = jaxprs.rebuild(step, jaxpr.constvars, consts, jaxpr.invars, results, equations)
    assert isinstance(found, ClosedJaxpr)
    return found


def _dissolved(
    jaxpr: Jaxpr, known: dict[Var, JaxprAtom], equations: list[JaxprEqn], whole: bool = False
) -> list[JaxprAtom]:
    """Appends a body's equations, those of its checkpoints in their places, and returns the body's results.

    Args:
      jaxpr: the body.
      known: what its variables are; added to.
      equations: appended to.
      whole: whether the variables stay what they are: those of a checkpoint's body may stand in two places.
    """

    for equation in jaxpr.eqns:
        inputs = jaxprs.renamed(equation.invars, known)
        if equation.primitive.name in jaxprs.CHECKPOINTS:
            inner, _ = jaxprs.open_jaxpr(equation.params["jaxpr"])
            found = _dissolved(inner, dict(zip(inner.invars, inputs, strict=True)), equations)
            known.update(zip(equation.outvars, found, strict=True))
            continue
        outputs = list(equation.outvars) if whole else [Var(v.aval) for v in equation.outvars]
        known.update(zip(equation.outvars, outputs, strict=True))
        equations.append(jaxprs.with_operands(equation, inputs, outvars=outputs))
    return jaxprs.renamed(jaxpr.outvars, known)
