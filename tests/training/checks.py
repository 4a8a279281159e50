"""Runs a program with a derivative inside, optimized and in float64, and looks at what was replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from recognition.compare import compiled, floats, optimized_like_a_user
from recognition.oracle import evaluate

from autopallas import compat
from autopallas.report import Report
from autopallas.rewrite import primitive

__all__ = ["absolute_errors", "arrays", "check", "compiled", "replaced", "right"]

TOLERANCE = {"float32": 5e-5, "bfloat16": 4e-2}
"""Largest error of results and gradients, relative to the largest true value of all."""

_SITES = (primitive.site_p, primitive.tangent_p, primitive.backward_p)


def arrays(program: Any) -> Iterator[tuple[str, Any]]:
    """(name of the primitive, abstract value) of all that a jaxpr computes, outside the kernels."""
    for equation in compat.opened(program)[0].eqns:
        yield from ((equation.primitive.name, v.aval) for v in equation.outvars)
        if equation.primitive not in _SITES:
            for _, _, inner in compat.bodies(equation):
                yield from arrays(inner)


def _quadratic(program: Any, sizes: tuple[int, int]) -> list[str]:
    """The floats with an axis of T queries and one of S keys, stacked ones too."""

    def has_both(shape: Sequence[int]) -> bool:
        left = list(shape)
        for size in sizes:
            if size not in left:
                return False
            left.remove(size)
        return True

    return [
        f"{name}: {aval.str_short()}"
        for name, aval in arrays(program)
        if hasattr(aval, "shape") and jnp.issubdtype(aval.dtype, jnp.floating) and has_both(aval.shape)
    ]


def absolute_errors(given: Any, true: Any) -> tuple[float, float, float]:
    """(max, mean) absolute error of all floats together, and the largest true value; other results must be equal."""
    apart, largest = [np.zeros(1)], 0.0
    for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(true), strict=True):
        if not jnp.issubdtype(jnp.result_type(a), jnp.floating):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
            continue
        a, b = np.asarray(jnp.asarray(a), np.float64), np.asarray(jnp.asarray(b), np.float64)
        assert a.shape == b.shape
        apart.append(np.abs(a - b).ravel())
        largest = max(largest, float(np.abs(b).max(initial=0.0)))
    everything = np.concatenate(apart)
    return float(everything.max()), float(everything.mean()), largest


def right(given: Any, function: Callable[..., Any], args: Sequence[Any], dtype: str, oracle: Any = None) -> None:
    """Asserts that results are as exact as the original's, against float64; shows the errors where they are not.

    ``oracle``: a program with the same results that the float64 interpreter can run.
    """
    program = jax.make_jaxpr(oracle or function)(*args)
    error, mean, largest = absolute_errors(given, evaluate(program, *jax.tree.leaves(args)))
    if not error <= TOLERANCE[dtype] * largest:
        own = absolute_errors(compiled(function)(*args), evaluate(program, *jax.tree.leaves(args)))
        assert error <= 2 * own[0], (
            f"max absolute error {error:.2e}, mean {mean:.2e} of values up to {largest:.2e} "
            f"(the original's own {own[0]:.2e}, {own[1]:.2e})"
        )


def check(
    function: Callable[..., Any],
    args: Sequence[Any],
    sites: int = 1,
    sizes: tuple[int, int] | None = None,
    dtype: str | None = None,
    oracle: Callable[..., Any] | None = None,
    **options: Any,
) -> Report:
    """The program is exact, all its sites are replaced in both directions, and no T x S value is left."""
    optimized = optimized_like_a_user(function, **options)
    given = compiled(lambda *args: optimized(*args))(*args)
    dtype = dtype or min((x.dtype.name for x in floats(args)), key=lambda name: jnp.dtype(name).itemsize)
    right(given, function, args, dtype, oracle)
    report = optimized.report()
    assert not report.failures
    assert replaced(report) == ["forward+backward"] * sites, _told(report)
    if sizes is not None:
        assert _quadratic(jax.make_jaxpr(optimized)(*args), sizes) == []
    return report


def replaced(report: Report) -> list[str]:
    """The directions of the attentions that were replaced."""
    return [site.direction for site in report.sites if site.op == "attention" and site.verdict == "applied"]


def _told(report: Report) -> list[str]:
    return [f"{s.direction} {s.verdict}: {s.reason}" for s in report.sites] + [m.reason for m in report.near_misses]
