"""Whether a step of a loop tells exponentials that are nearly 0 from 0, which products of matrices do not.

``exp(a + b)`` may be far from 0 where ``exp(a - max(a))`` is 0, and is lost in a product with ``exp(b - max(b))``.  In
a sum that is no small number this is no more than a rounding.  The logarithm of such an exponential, or a quotient by
it, is another number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from autopallas.compat import Literal
from autopallas.graph import Node

if TYPE_CHECKING:
    from autopallas.kernels.respelling.exponential_plan import Plan

__all__ = ["are_told"]

_ROUNDS = 8
_SMOOTH = frozenset(
    """abs add add_any broadcast_in_dim clamp concatenate conv_general_dilated convert_element_type copy cos cumsum div
    dot_general dynamic_slice dynamic_update_slice exp expand_dims is_finite logistic max min mul neg pad reduce_max
    reduce_min reduce_sum reshape rev select_n sin slice square squeeze stop_gradient sub tanh transpose""".split()
)
"""Of numbers that differ little these give numbers that differ little; but for a quotient by them."""


def are_told(plan: Plan, carried: Mapping[int, int]) -> bool:
    """Returns whether a step tells small exponentials from 0.

    Args:
      plan: of the step, with its products and their sums.
      carried: the positions of carried values among the step's results, with those among its inputs.
    """
    first: frozenset[int] = frozenset()
    for _ in range(_ROUNDS):
        rounded = _rounded(plan, first)
        if rounded is None:
            return True
        after = {i: plan.results[result] for result, i in carried.items()}
        again = first | {plan.inputs[i] for i, n in after.items() if not isinstance(n, Literal) and n in rounded}
        if again == first:
            return False
        first = again
    return True


def _rounded(plan: Plan, first: frozenset[int]) -> set[int] | None:
    """Returns the numbers of values in which small exponentials are lost, or None if one of them is told from others.

    Args:
      plan: of the step.
      first: those of its inputs that are such values.
    """
    found = set(first)
    for node in plan.schedule:
        if _is_whole(plan, node):
            continue
        if node.outputs[0] in plan.products or node.outputs[0] in plan.reductions:
            found.update(node.outputs)
        elif not found.isdisjoint(node.inputs):
            if not _is_smooth(node, found):
                return None
            found.update(node.outputs)
    plan.graph.steps.spend(len(plan.schedule))
    return found


def _is_whole(plan: Plan, node: Node) -> bool:
    """Returns whether a value is the sum of all exponentials, by which these are divided."""
    reduction = plan.reductions.get(node.outputs[0])
    if reduction is None:
        return False
    product = plan.products[reduction.product]
    return not product.factors and reduction.reduced == plan.sums[product.place].summed


def _is_smooth(node: Node, found: set[int]) -> bool:
    if node.name == "integer_pow":
        return bool(node.params["y"] >= 0)
    return node.name in _SMOOTH and (node.name != "div" or node.inputs[1] not in found)
