"""Tells whether a step may be computed for all steps at once, as under ``jax.vmap``.

Not every equation computes the same then: generators of random bits draw others, branches of conditionals all run, so
that a gradient of one that is not taken may be a NaN, and callbacks may have no such form.
"""

from __future__ import annotations

from collections.abc import Iterable

from autopallas import jaxprs
from autopallas.compat import JaxprEqn
from autopallas.graph.custom_rules import ELEMENTWISE
from autopallas.patterns.advice import STEP_ALONE
from autopallas.patterns.match import Mismatch

__all__ = ["check_all_steps"]

_ARRAYS = frozenset(
    """argmax argmin bitcast_convert_type broadcast_in_dim complex concatenate conj conv_general_dilated copy copy_p
    cumlogsumexp cummax cummin cumprod cumsum digamma dot_general dynamic_slice dynamic_update_slice expand_dims gather
    imag iota lgamma name optimization_barrier pad real reduce_and reduce_max reduce_min reduce_or reduce_prod
    reduce_sum reshape rev scatter scatter-add scatter_add select_n slice sort split squeeze stack tile top_k transpose
    unstack""".split()
)
_HOLDERS = jaxprs.CHECKPOINTS | frozenset(
    "jit pjit closed_call core_call scan custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr".split()
)
"""Equations that compute what their bodies do."""


def check_all_steps(equations: Iterable[JaxprEqn]) -> None:
    """Checks that equations compute the same where they are mapped over steps.

    Raises:
      Mismatch: one may not.
    """
    todo = [iter(equations)]
    while todo:
        for equation in todo.pop():
            name = equation.primitive.name
            if name not in ELEMENTWISE and name not in _ARRAYS and name not in _HOLDERS:
                operation, where = jaxprs.operation_name(equation), jaxprs.location(equation)
                raise Mismatch(
                    f"{operation} at {where} is not known to compute the same for all steps at once", advice=STEP_ALONE
                )
            todo += [iter(jaxprs.open_jaxpr(body)[0].eqns) for _, _, body in jaxprs.bodies(equation)]
