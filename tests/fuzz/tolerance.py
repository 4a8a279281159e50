"""What a program's own roundings allow: the narrowest dtype in which it rounds on the way to each of its results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from autopallas import jaxprs

__all__ = ["ALLOWED", "roundings"]

ALLOWED = {"float64": (1e-11, 1e-10), "float32": (1e-5, 5e-5), "float16": (4e-3, 1e-2), "bfloat16": (2e-2, 4e-2)}
"""Per dtype (of values, of gradients), as design.md has them.  Those of float64 leave room for the oracle, which is no
more precise."""

_EXACT = frozenset(
    {
        "broadcast_in_dim", "bitcast_convert_type", "concatenate", "copy", "cumand", "cummax", "cummin",
        "dynamic_slice", "dynamic_update_slice", "expand_dims", "gather", "iota", "max", "min", "neg",
        "optimization_barrier", "pad", "reduce_max", "reduce_min", "reshape", "rev", "scatter", "select_n", "slice",
        "sort", "split", "squeeze", "stop_gradient", "top_k", "transpose",
    }
)  # fmt: skip
"""Primitives that give values that they were given: no rounding."""
_CALLS = frozenset({"jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "remat2", "checkpoint"})
"""Equations with one body, which takes their operands."""


def roundings(program: Any) -> list[Any]:
    """For each result of a closed jaxpr the coarsest dtype in which an equation before it rounds, or None."""
    jaxpr, _ = jaxprs.open_jaxpr(program)
    return _through(jaxpr, [None] * len(jaxpr.invars))


def _through(jaxpr: Any, given: Sequence[Any]) -> list[Any]:
    known: dict[Any, Any] = dict(zip(jaxpr.invars, given, strict=True))
    for equation in jaxpr.eqns:
        before = [None if isinstance(a, Literal) else known.get(a) for a in equation.invars]
        bodies = [body for _, _, body in jaxprs.bodies(equation)]
        if (
            len(bodies) == 1
            and len(jaxprs.open_jaxpr(bodies[0])[0].invars) == len(before)
            and equation.primitive.name in _CALLS
        ):
            results = _through(jaxprs.open_jaxpr(bodies[0])[0], before)
        else:
            worst = _coarsest(before)
            for body in bodies:
                inner = jaxprs.open_jaxpr(body)[0]
                worst = _coarsest([worst, *_through(inner, [worst] * len(inner.invars))])
            results = [_coarsest([worst, _own(equation, v)]) for v in equation.outvars]
        known.update(zip(equation.outvars, results, strict=True))
    return [None if isinstance(a, Literal) else known.get(a) for a in jaxpr.outvars]


def _own(equation: Any, variable: Any) -> Any:
    """The dtype in which an equation itself rounds."""
    name, dtype = equation.primitive.name, getattr(variable.aval, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, np.inexact) or name in _EXACT or jaxprs.bodies(equation):
        return None
    if name == "convert_element_type":
        source = equation.invars[0].aval.dtype
        if jnp.issubdtype(source, np.inexact) and jnp.finfo(source).eps >= jnp.finfo(dtype).eps:
            return None  # it widens
        if not jnp.issubdtype(source, np.inexact) and (source.kind == "b" or jnp.iinfo(source).bits <= 8):
            return None
    return jnp.finfo(dtype).dtype  # of complex numbers, that of their parts


def _coarsest(dtypes: Sequence[Any]) -> Any:
    found = [d for d in dtypes if d is not None]
    return max(found, key=lambda d: float(jnp.finfo(d).eps)) if found else None
