"""Tells loops whose steps gain nothing by themselves, so that the loop may be respelt as a whole."""

from __future__ import annotations

from autopallas import jaxprs
from autopallas.compat import JaxprLike
from autopallas.graph.numbering import CUSTOM_RULES

__all__ = ["is_plain"]

_APART = frozenset(
    """conv_general_dilated cummax cummin cumprod cumsum cumlogsumexp random_bits reduce_window reduce_window_max
    reduce_window_min reduce_window_sum select_and_gather_add select_and_scatter_add
    sort threefry2x32 top_k triangular_solve""".split()
)
"""Equations that may gain more by a respelling of their own, which is none where the loop around them is respelt."""
_CALLS = CUSTOM_RULES | jaxprs.CHECKPOINTS | {"jit", "pjit"}


def is_plain(program: JaxprLike) -> bool:
    """Returns whether a step holds no loops and branches, and nothing that may gain more by itself."""
    jaxpr, _ = jaxprs.open_jaxpr(program)
    return not any(e.primitive.name in _APART or e.effects for e in jaxpr.eqns) and all(
        e.primitive.name in _CALLS and is_plain(inner) for e in jaxpr.eqns for _, _, inner in jaxprs.bodies(e)
    )
