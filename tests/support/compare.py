"""Runs a program as it is, optimized, and in float64, with all its gradients, and compares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopallas
from autopallas.report import Report
from support.oracle import evaluate

__all__ = [
    "Compared",
    "compare",
    "compiled",
    "differs",
    "floats",
    "in_float64",
    "measured",
    "optimized_like_a_user",
    "optimized_step",
    "with_gradients",
]

TOLERANCE = {"float32": (1e-5, 5e-5), "float16": (4e-3, 1e-2), "bfloat16": (2e-2, 4e-2), "float64": (1e-12, 1e-11)}
"""Largest error of values and of gradients relative to the largest true value, by the program's narrowest dtype."""


_FAST = {"xla_llvm_disable_expensive_passes": True}
"""Compiling takes nearly all of the time, and the programs are small."""


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """As ``jax.jit``, but quicker to compile."""
    return jax.jit(function, compiler_options=_FAST)


def floats(tree: Any) -> list[Any]:
    """The floating leaves of a tree."""
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(x), jnp.floating)]


def loss_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """A generic scalar function of the results, with the results: each element gets a cotangent of its own."""

    def loss(*args: Any) -> Any:
        results = function(*args)
        total = jnp.float32(0)
        for x in floats(results):
            wave = jnp.sin(jnp.arange(x.size, dtype=jnp.float32) * 0.7 + 0.3).reshape(x.shape)
            total += jnp.sum(jnp.sin(x.astype(jnp.float32) + wave))
        return total, results

    return loss


def with_gradients(function: Callable[..., Any], args: Sequence[Any]) -> Callable[..., Any]:
    """``(results, gradients of every argument with floats only)`` as a function of the arguments."""
    active = tuple(i for i, a in enumerate(args) if len(floats(a)) == len(jax.tree.leaves(a)))
    gradient = jax.grad(loss_of(function), argnums=active, has_aux=True)

    def both(*args: Any) -> Any:
        gradients, results = gradient(*args)
        return results, gradients

    return both


def _error(given: Any, true: Any, least: float) -> tuple[float, float]:
    """(max, mean) absolute error relative to the largest true value; infinite where NaNs are in other places."""
    given, true = np.asarray(given, np.float64), np.asarray(true, np.float64)
    assert given.shape == true.shape
    finite = np.isfinite(true)
    if not np.array_equal(np.isnan(given), np.isnan(true)) or not np.array_equal(given[~finite], true[~finite], True):
        return np.inf, np.inf
    if not finite.any():
        return 0.0, 0.0
    apart = np.abs(given - true)[finite]
    scale = max(np.abs(true[finite]).max(), least)
    return float(apart.max() / scale), float(apart.mean() / scale)


def measured(given: Any, true: Any, least: float = 1e-3) -> list[tuple[float, float]]:
    """Per floating leaf the (max, mean) error relative to its largest value, or ``least``; others must be equal."""
    errors = []
    for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(true), strict=True):
        if jnp.issubdtype(jnp.result_type(a), jnp.floating):
            errors.append(_error(np.asarray(jnp.asarray(a), np.float64), b, least))
        elif not jnp.issubdtype(jnp.result_type(a), jax.dtypes.extended):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    return errors


@dataclass
class Compared:
    """What came out: the report, and what is wrong with the numbers (nothing, if empty)."""

    report: Report
    complaints: list[str]
    errors: dict[str, list[tuple[float, float]]]
    jaxpr: Any = None

    def counts(self, op: str = "attention") -> int:
        return self.report.counts()[op]

    def reasons(self) -> list[str]:
        return [miss.reason for miss in self.report.near_misses]


def optimized_like_a_user(function: Callable[..., Any], **options: Any) -> Any:
    return autopallas.optimize(function, **{"objective": "always", "strict": True} | options)


def in_float64(function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """What a program gives in float64, in the structure of its result."""
    program, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    return jax.tree.unflatten(jax.tree.structure(shapes), evaluate(program, *jax.tree.leaves(args)))


def optimized_step(function: Callable[..., Any], args: Sequence[Any]) -> tuple[Callable[..., Any], Any, Report]:
    """A program with its backward in it, what that gives when it is optimized as a whole, and the report."""
    step = with_gradients(function, args)
    optimized = optimized_like_a_user(step)
    given = compiled(lambda *arrays: optimized(*arrays))(*args)
    return step, given, optimized.report()


def compare(
    function: Callable[..., Any], args: Sequence[Any], gradients: bool = True, dtype: str | None = None, **options: Any
) -> Compared:
    """Runs a program optimized, and measures it and its gradients against float64.

    An error is one above the tolerance of the dtype and above twice the original's own.
    """
    optimized = optimized_like_a_user(function, **options)
    dtype = dtype or min((x.dtype.name for x in floats(args)), key=lambda name: jnp.dtype(name).itemsize)
    run = (lambda f: with_gradients(f, args)) if gradients else (lambda f: lambda *a: (f(*a), ()))
    given = compiled(run(optimized))(*args)
    true = in_float64(run(function), args)
    result = Compared(optimized.report(), [], {})
    own = None
    for i, kind in enumerate(("value", "gradient")):
        errors = result.errors[kind] = measured(given[i], true[i])
        limit = TOLERANCE[dtype][i]
        if any(error[0] > limit for error in errors):
            own = own if own is not None else compiled(run(function))(*args)
            for n, (error, reference) in enumerate(zip(errors, measured(own[i], true[i]), strict=True)):
                if error[0] > max(limit, 2 * reference[0]):
                    result.complaints.append(
                        f"{kind} {n}: max error {error[0]:.2e}, mean {error[1]:.2e} "
                        f"(the original's own {reference[0]:.2e}, {reference[1]:.2e}; tolerance {limit:.0e})"
                    )
    return result


def differs(function: Callable[..., Any], args: Sequence[Any], **options: Any) -> list[str]:
    """What is wrong with an optimized program's numbers; nothing, if empty."""
    return compare(function, args, **options).complaints
