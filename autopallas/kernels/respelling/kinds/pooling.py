"""Sums, maxima and minima over windows, as a sum or an extremum of shifted slices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopallas.compat import Dtype, JaxprEqn
from autopallas.graph import Graph, Node
from autopallas.kernels.respelling.kind import Found, Kind, Sample, of_equation
from autopallas.kernels.respelling.library_order import in_a_loop_or_branch
from autopallas.kernels.respelling.recomputed_operands import FOR_OTHERS, is_computed_for_others
from autopallas.kernels.respelling.spec import Plain, RespellingSpec
from autopallas.numerics.classes import Numerics
from autopallas.numerics.extremes import extreme

__all__ = ["KIND"]

_MOST_TAPS = 64
_STEPS: Mapping[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "reduce_window_sum": lax.add,
    "reduce_window_max": lax.max,
    "reduce_window_min": lax.min,
}
_LISTS = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")


def _match(graph: Graph, node: Node) -> Found | None:
    """Returns windows, but those along one axis in a loop or branch, which the compiler fuses with what is around them;
    slices of what a loop reads took up to four times as long there."""
    window = node.equation.params["window_dimensions"]
    if sum(size > 1 for size in window) < 2 and in_a_loop_or_branch(node):
        return None
    found = _of_any(graph, node)
    if found is None or not is_computed_for_others(graph, node, deeply=True):
        return found
    return replace(found, parameters=tuple(sorted((*found.parameters, (FOR_OTHERS, True)))))


def _parameters(equation: JaxprEqn) -> Mapping[str, Plain] | None:
    (operand,), params = equation.invars, equation.params
    dtype = operand.aval.dtype
    real = jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
    empty = 0 in operand.aval.shape or 0 in equation.outvars[0].aval.shape
    if not real or empty or not 1 < math.prod(params["window_dimensions"]) <= _MOST_TAPS:
        return None
    found: dict[str, Plain] = {name: tuple(params[name]) for name in _LISTS}
    return found | {"function": equation.primitive.name, "padding": tuple(map(tuple, params["padding"]))}


_of_any: Callable[[Graph, Node], Found | None] = of_equation(_parameters)


def _original(spec: RespellingSpec, x: jax.Array) -> list[jax.Array]:
    name = cast(str, spec["function"])
    lists = [spec.numbers(name) for name in _LISTS]
    padding = cast("tuple[tuple[int, int], ...]", spec["padding"])
    start = np.asarray(_identity(name, x.dtype), x.dtype)
    return [lax.reduce_window(x, start, _STEPS[name], lists[0], lists[1], padding, lists[2], lists[3])]


def _respelt(spec: RespellingSpec, x: jax.Array) -> list[jax.Array]:
    name, ((given, _),) = cast(str, spec["function"]), spec.results
    window, strides, base, dilation = (spec.numbers(name) for name in _LISTS)
    padding = cast("tuple[tuple[int, int], ...]", spec["padding"])
    around = [(low, high, step - 1) for (low, high), step in zip(padding, base, strict=True)]
    if any(edge != (0, 0, 0) for edge in around):
        x = lax.pad(x, jnp.asarray(_identity(name, x.dtype), x.dtype), around)
    dtype = x.dtype
    sums = name == "reduce_window_sum" and jnp.issubdtype(dtype, jnp.floating)
    wide = jnp.promote_types(dtype, jnp.float32) if sums else dtype
    total: jax.Array | None = None
    for place in itertools.product(*map(range, window)):
        low = [i * step for i, step in zip(place, dilation, strict=True)]
        high = [first + (size - 1) * step + 1 for first, size, step in zip(low, given, strides, strict=True)]
        part = lax.slice(x, low, high, strides).astype(wide)
        total = part if total is None else _STEPS[name](total, part)
    assert total is not None
    return [total.astype(dtype)]


def _numerics(spec: RespellingSpec) -> Numerics:
    """Returns "identical" for integers.  Of floats an extremum of slices keeps a NaN; XLA's windows on CPUs may not."""
    ((_, dtype),) = spec.operands
    return "reordered" if jnp.issubdtype(dtype, jnp.floating) else "identical"


def _assumptions(spec: RespellingSpec) -> tuple[str, ...]:
    ((_, dtype),) = spec.operands
    extremum = spec["function"] != "reduce_window_sum" and jnp.issubdtype(dtype, jnp.floating)
    return ("no window has a NaN, which XLA's windows may drop",) if extremum else ()


def _identity(name: str, dtype: Dtype) -> float | int:
    return 0 if name == "reduce_window_sum" else extreme(dtype, largest=name == "reduce_window_min")


# ---------------------------------------------------------------------- evidence


def _feature(spec: RespellingSpec) -> str:
    """Returns the function, the number of taps, whether windows overlap, and whether the last axis is pooled."""
    window, strides = spec.numbers("window_dimensions"), spec.numbers("window_strides")
    taps = next(limit for limit in (4, 9, 25, _MOST_TAPS) if math.prod(window) <= limit)
    overlap = "overlapping" if any(size > step for size, step in zip(window, strides, strict=True)) else "apart"
    dilated = ", dilated" if max(spec.numbers("base_dilation")) > 1 else ""
    last = "along the last axis" if window[-1] > 1 else "beside the last axis"
    return f"{spec['function']}, {taps} taps, {overlap}{dilated}, {last}"


def _samples() -> Iterator[tuple[str, Sample]]:
    shapes = ((1, 16, 16, 128), (4, 32, 32, 128), (8, 64, 64, 256))
    for shape, (name, step), last in itertools.product(shapes, _STEPS.items(), (False, True)):
        for size, stride in ((2, 2), (3, 1), (3, 2), (7, 7)):
            given = (shape[0], shape[3], *shape[1:3]) if last else shape
            where = (2, 3) if last else (1, 2)

            def pool(
                x: jax.Array,
                name: str = name,
                step: Callable[[jax.Array, jax.Array], jax.Array] = step,
                sizes: tuple[int, int] = (size, stride),
                where: tuple[int, int] = where,
            ) -> jax.Array:
                window, strides = ([n if axis in where else 1 for axis in range(4)] for n in sizes)
                found: jax.Array = lax.reduce_window(x, _identity(name, x.dtype), step, window, strides, "VALID")
                return found

            own = f"{name}-{size}-{stride}-{'last' if last else 'beside'}-{math.prod(shape)}"
            yield own, Sample(pool, (jax.ShapeDtypeStruct(given, jnp.float32),))


KIND = Kind(
    name="pooling",
    primitives=tuple(_STEPS),
    numerics=_numerics,
    assumptions=_assumptions,
    instead="a sum, or an extremum, of shifted slices",
    match=_match,
    original=_original,
    respelt=_respelt,
    feature=_feature,
    samples=_samples,
)
