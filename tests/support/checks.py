"""Runs a program with a derivative inside, optimized and in float64, and looks at what was replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopallas import compat, jaxprs
from autopallas.report import Report
from autopallas.rewrite import primitive
from support.compare import compiled, floats, optimized_like_a_user
from support.oracle import evaluate, promoted

__all__ = ["absolute_errors", "arrays", "check", "compiled", "exact", "quadratic", "replaced", "right"]

TOLERANCE = {"float32": 5e-5, "float16": 1e-2, "bfloat16": 4e-2}
"""Largest error of results and gradients, relative to the largest true value of all."""

_SITES = (primitive.site_p, primitive.tangent_p, primitive.backward_p)


def arrays(program: Any) -> Iterator[tuple[str, Any]]:
    """(name of the primitive, abstract value) of all that a jaxpr computes, outside the kernels."""
    for equation in jaxprs.open_jaxpr(program)[0].eqns:
        yield from ((equation.primitive.name, v.aval) for v in equation.outvars)
        if equation.primitive not in _SITES:
            for _, _, inner in jaxprs.bodies(equation):
                yield from arrays(inner)


def quadratic(program: Any, sizes: tuple[int, int]) -> list[str]:
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
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
        a, b = a[~np.isnan(b)], b[~np.isnan(b)]
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
    directions: Sequence[str] = ("forward+backward",),
    sizes: tuple[int, int] | None = None,
    dtype: str | None = None,
    oracle: Callable[..., Any] | None = None,
    op: str = "attention",
    whole: bool = True,
    **options: Any,
) -> Report:
    """The program is exact, its sites are replaced in these ``directions``, and no value of these ``sizes`` is left.

    It is compiled as a ``whole``; or else only its kernels are, which many programs share, and around them it is
    interpreted in float64.
    """
    optimized = optimized_like_a_user(function, **options)
    traced = compiled(lambda *args: optimized(*args)).trace(*args)
    lowered = traced.lower()
    given = lowered.compile()(*args) if whole else evaluate(traced.jaxpr, *jax.tree.leaves(args), rules=_KERNELS)
    dtype = dtype or min((x.dtype.name for x in floats(args)), key=lambda name: jnp.dtype(name).itemsize)
    right(given, function, args, dtype, oracle)
    report = optimized.report()
    assert not report.failures
    assert replaced(report, op) == list(directions), _told(report)
    if sizes is not None:
        assert quadratic(traced.jaxpr, sizes) == []
    return report


def replaced(report: Report, op: str = "attention") -> list[str]:
    """The directions of the sites that were replaced."""
    return [site.direction for site in report.sites if site.op == op and site.verdict == "applied"]


def _told(report: Report) -> list[str]:
    return [f"{s.direction} {s.verdict}: {s.reason}" for s in report.sites] + [m.reason for m in report.near_misses]


def exact(function: Callable[..., Any], args: Sequence[Any], dtype: str = "float32") -> Report:
    """The rewritten program is the original one, kernels aside: in their place the equations that they replaced run.

    Both run in float64, so that not even a small term may be missing or doubled; nothing is compiled.
    """
    optimized = optimized_like_a_user(function)
    program = jax.make_jaxpr(lambda *args: optimized(*args))(*args)
    leaves = jax.tree.leaves(args)
    given = evaluate(program, *leaves, rules={"autopallas_site": _site, "autopallas_site_backward": _site_backward})
    true = evaluate(jax.make_jaxpr(function)(*args), *leaves)
    error, mean, largest = absolute_errors(given, true)
    limit = 1e-9 if dtype == "float32" else TOLERANCE[dtype]
    assert error <= limit * largest, f"max absolute error {error:.2e}, mean {mean:.2e} of values up to {largest:.2e}"
    report = optimized.report()
    assert not report.failures
    return report


def _kernel(equation: Any, *operands: Any) -> list[Any]:
    given = [jnp.asarray(x, atom.aval.dtype) for x, atom in zip(operands, equation.invars, strict=True)]
    return [promoted(x) for x in equation.primitive.bind(*given, **equation.params)]


_KERNELS = {"autopallas_site": _kernel, "autopallas_site_backward": _kernel}


def _site(equation: Any, *operands: Any) -> list[Any]:
    params = equation.params
    results = evaluate(params["original"], *operands)
    residuals = params["site"].residual_types() if params["residuals"] else ()
    return [*results, *(np.full(t.shape, np.nan) for t in residuals)]


def _site_backward(equation: Any, *arguments: Any) -> list[Any]:
    params = equation.params
    original, active = params["original"], params["active"]
    count, results = len(original.in_avals), len(original.out_avals)

    def pulled(cotangents: Any, *operands: Any) -> Any:
        function = lambda *chosen: compat.jaxpr_as_fun(original)(  # noqa: E731
            *[chosen[active.index(i)] if i in active else x for i, x in enumerate(operands)]
        )
        return jax.vjp(function, *(operands[i] for i in active))[1](cotangents)

    types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (*original.out_avals, *original.in_avals)]
    program = jax.make_jaxpr(pulled)(types[:results], *types[results:])
    return evaluate(program, *arguments[-results:], *arguments[:count])
