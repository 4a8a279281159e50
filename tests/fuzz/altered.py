"""Programs with a derivative that is not quite JAX's: one of its equations gives something else.

What recognises a backward takes it for that of a forward.  A backward that differs in one place is another function of
the program, and has to stay one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopallas import compat
from autopallas.compat import Var
from autopallas.graph.extract import closed

__all__ = ["altered"]


def altered(function: Callable[..., Any], seed: int) -> Callable[..., Any]:
    """The function with one array of its derivative replaced: by zeros, or by an earlier value of the same type.

    Without an equation of a derivative that gives a floating array it is what it was.
    """

    def run(*arguments: Any) -> Any:
        leaves, structure = jax.tree.flatten(arguments)
        program, results = jax.make_jaxpr(
            lambda *given: function(*jax.tree.unflatten(structure, given)), return_shape=True
        )(*leaves)
        found = _run(program, leaves, np.random.default_rng([seed, 7]))
        return jax.tree.unflatten(jax.tree.structure(results), found)

    return run


def _run(program: Any, leaves: list[Any], draw: np.random.Generator) -> list[Any]:
    jaxpr = program.jaxpr
    inputs, equations = [*jaxpr.constvars, *jaxpr.invars], list(jaxpr.eqns)
    places = [(i, v) for i, e in enumerate(equations) if compat.is_transposed(e) for v in e.outvars if _is_array(v)]
    if not places:
        return list(compat.jaxpr_as_fun(program)(*leaves))
    place, variable = places[draw.integers(len(places))]
    earlier = [*inputs, *(v for e in equations[:place] for v in e.outvars)]
    alike = [v for v in earlier if v.aval.shape == variable.aval.shape and v.aval.dtype == variable.aval.dtype]
    known = dict.fromkeys([*earlier, *equations[place].outvars])
    rest = equations[place + 1 :]
    read = [v for e in rest for v in e.invars] + jaxpr.outvars
    needed = list(dict.fromkeys([*(v for v in read if isinstance(v, Var) and v in known), *alike]))
    given = compat.jaxpr_as_fun(closed(inputs, needed, equations[: place + 1]))(*program.consts, *leaves)
    values = dict(zip(needed, given, strict=True))
    if variable in values:
        other = alike[draw.integers(len(alike))] if alike and draw.random() < 0.7 else None
        values[variable] = jnp.zeros_like(values[variable]) if other is None else values[other]
    return list(compat.jaxpr_as_fun(closed(needed, jaxpr.outvars, rest))(*values.values()))


def _is_array(variable: Any) -> bool:
    return bool(variable.aval.shape) and jnp.issubdtype(variable.aval.dtype, jnp.floating)
