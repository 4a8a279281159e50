"""Tells which values are the same to the last bit wherever they are computed, and which equations need them so.

A compiler rounds what it fuses otherwise: a product and a sum become one operation, a quotient of a quotient one of a
product, and a cast to 16 bits and back may be left out.  So only what is rounded once surely has the same bits.  What
is computed again differs in its last bits from what the forward computed, which is harmless, but for what jumps: of
``x == max(x)``, with the maximum kept and ``x`` computed again, nothing may be left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum

import jax.numpy as jnp

from autopallas import jaxprs
from autopallas.compat import Dtype, Jaxpr, JaxprAtom, JaxprEqn, Var
from autopallas.graph.custom_rules import ELEMENTWISE
from autopallas.numerics.casts import is_quantised, widens

__all__ = ["Rounding", "compared", "roundings"]

_UNROUNDED = frozenset(
    """abs broadcast_in_dim clamp copy expand_dims max min neg reshape select_n squeeze stop_gradient
    transpose""".split()
)
"""Primitives on floats that round nothing."""
_ONCE = frozenset({"add", "add_any", "div", "mul", "square", "sub"})
"""Primitives that round once."""
_STEPS = frozenset(
    """approx_top_k argmax argmin atan2 bitcast_convert_type ceil floor nextafter pow reduce_precision rem round sign
    sort top_k""".split()
)
"""Primitives on floats whose results jump, or end, where their operands change by little."""
_CUT = frozenset("acos acosh asin asinh atan atanh cbrt log log1p rsqrt sqrt".split())
"""Primitives whose results jump where their operands are complex."""
_CALL = "custom_jvp_call"
_MIXING = frozenset(
    """cholesky conv_general_dilated cumlogsumexp cumprod cumsum dot_general eigh fft ragged_dot_general reduce_prod
    reduce_sum reduce_window_sum scatter-add scatter_add triangular_solve""".split()
)
"""Primitives whose results are no element of an operand, so that nothing of these is found again in them."""
_SITES = "autopallas"
"""How the names of primitives of kernels begin, which sum over products too."""
_MOVING = frozenset(
    """concatenate dynamic_slice dynamic_update_slice gather pad reduce_max reduce_min rev slice split""".split()
)
"""Primitives whose results are elements of their operands, as they are."""


class Rounding(IntEnum):
    """How surely a value has the same bits wherever it is computed, from what is kept."""

    SURE = 0
    ONCE = 1
    """Surely by itself, but what is computed of it may be rounded once instead of twice."""
    OPEN = 2


def roundings(equations: Sequence[JaxprEqn]) -> tuple[dict[Var, Rounding], set[int]]:
    """Returns how surely values have the same bits, and the positions of equations that cannot be computed again.

    Every elementwise value counts as one that is computed again, and every other as kept.
    """
    found: dict[Var, Rounding] = {}
    unsure = {position for position, equation in enumerate(equations) if not _read(equation, found)}
    return found, unsure


def compared(equations: Sequence[JaxprEqn], found: Mapping[Var, Rounding]) -> set[Var]:
    """Returns what some equations need with the bits that it had before, because it comes to one that jumps.

    Args:
      equations: those of a backward.
      found: the roundings of what the forward computed.
    """
    needed: dict[Var, Rounding] = {}  # from which rounding on a value is needed as it was
    within: dict[int, bool] = {}
    for equation in reversed(equations):
        name = equation.primitive.name
        if name in _MIXING or name.startswith(_SITES):
            continue
        least = min((needed[v] for v in equation.outvars if v in needed), default=None)
        if least is not None and name not in _UNROUNDED | _MOVING:
            least = Rounding.ONCE
        if _jumps(equation) or _jumps_within(equation, within):
            least = Rounding.OPEN if least is None and jaxprs.is_leaf(equation) else Rounding.ONCE
        if least is not None:
            for atom in equation.invars:
                if isinstance(atom, Var):
                    needed[atom] = min(least, needed.get(atom, least))
    return {value for value, least in needed.items() if found.get(value, Rounding.SURE) >= least}


def _jumps_within(equation: JaxprEqn, known: dict[int, bool]) -> bool:
    """Returns whether an equation of the bodies of another one jumps; remembered by body."""
    for _, _, body in jaxprs.bodies(equation):
        jaxpr, _ = jaxprs.open_jaxpr(body)
        if id(jaxpr) not in known:
            known[id(jaxpr)] = any(_jumps(e) or _jumps_within(e, known) for e in jaxpr.eqns)
        if known[id(jaxpr)]:
            return True
    return False


def _read(equation: JaxprEqn, found: dict[Var, Rounding]) -> bool:
    """Adds the roundings of an equation's results; returns whether these do not jump for unsure operands."""
    worst = max((_of(atom, found) for atom in equation.invars), default=Rounding.SURE)
    if equation.primitive.name == _CALL:
        jaxpr, _ = jaxprs.open_jaxpr(equation.params["call_jaxpr"])
        return _read_call(jaxpr, equation, found)
    if _jumps(equation):
        found.update(dict.fromkeys(equation.outvars, Rounding.SURE))
        return worst < Rounding.OPEN
    if len(equation.outvars) == 1:
        found[equation.outvars[0]] = _result(equation, worst)
    return True


def _read_call(jaxpr: Jaxpr, equation: JaxprEqn, found: dict[Var, Rounding]) -> bool:
    own = {v: _of(atom, found) for v, atom in zip(jaxpr.invars, equation.invars, strict=False)}
    unsteady = [inner for inner in jaxpr.eqns if not _read(inner, own)]
    for outer, atom in zip(equation.outvars, jaxpr.outvars, strict=True):
        found[outer] = _of(atom, own)
    return not unsteady


def _of(atom: JaxprAtom, found: dict[Var, Rounding]) -> Rounding:
    return found.get(atom, Rounding.SURE) if isinstance(atom, Var) else Rounding.SURE


def _result(equation: JaxprEqn, worst: Rounding) -> Rounding:
    name, dtype = equation.primitive.name, equation.outvars[0].aval.dtype
    if not _is_float(equation.outvars[0]):
        return Rounding.SURE
    if name in _UNROUNDED:
        return worst
    if name not in ELEMENTWISE:
        return Rounding.SURE
    single = dtype in (jnp.float32, jnp.float64)
    if name == "convert_element_type":
        (given,) = equation.invars
        return worst if (_keeps(given.aval.dtype, dtype) if _is_float(given) else single) else Rounding.OPEN
    return Rounding.ONCE if single and name in _ONCE and worst == Rounding.SURE else Rounding.OPEN


def _jumps(equation: JaxprEqn) -> bool:
    """Returns whether a small change of a float among an equation's operands may change its results by much."""
    floats = [atom for atom in equation.invars if _is_float(atom)]
    if not floats:
        return False
    name = equation.primitive.name
    if name == "ne" and equation.invars[0] is equation.invars[1]:  # whether it is NaN
        return False
    if name in _STEPS or name in ELEMENTWISE and not all(map(_is_float, equation.outvars)):
        return True
    if any(is_quantised(variable.aval.dtype) for variable in equation.outvars):  # rounded by as much as an eighth
        return name in ELEMENTWISE - _UNROUNDED
    return name in _CUT and any(jnp.issubdtype(atom.aval.dtype, jnp.complexfloating) for atom in floats)


def _keeps(source: Dtype, target: Dtype) -> bool:
    """Returns whether a cast of floats keeps every value as it is."""
    if is_quantised(source) or is_quantised(target):  # which JAX promotes to no other type
        return source == target or widens(jnp.dtype(jnp.bfloat16), target)
    return bool(jnp.promote_types(source, target) == target)


def _is_float(atom: JaxprAtom) -> bool:
    dtype = getattr(atom.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)
