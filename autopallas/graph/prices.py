"""How long elementwise equations take, beside each other."""

from __future__ import annotations

from autopallas.compat import JaxprEqn

__all__ = ["LONG", "SAME", "price"]

SAME = frozenset({"copy", "expand_dims", "reshape", "squeeze"})
"""Primitives whose results are their operands, as they are stored."""
LONG = frozenset(
    """acos acosh asin asinh atan atan2 atanh cos cosh erf erf_inv erfc exp exp2 expm1 log log1p log2 logistic pow sin
    sinh tan tanh""".split()
)
"""Primitives that take long: no value is computed again through two of them, one of the other's result."""
_PRICES = {
    **dict.fromkeys(SAME | {"broadcast_in_dim", "transpose"}, 0),
    **dict.fromkeys(("div", "sqrt"), 8),
    **dict.fromkeys(("cbrt", "rsqrt"), 14),
    **dict.fromkeys((*LONG, "custom_jvp_call"), 16),
}


def price(equation: JaxprEqn) -> int:
    """Returns how long an equation takes for each element of its result, where a product of two numbers takes 1."""
    return _PRICES.get(equation.primitive.name, 1)
