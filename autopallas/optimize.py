"""Defines the decorator, which makes an optimized function, and ``explain``, which tells what that would do."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import ParamSpec, TypeVar, Unpack, cast, overload

from autopallas import compat, own_frames
from autopallas.compat import ArrayFunction, Jitted, PyTree
from autopallas.optimized import Optimized
from autopallas.options import OptionArguments, callable_given, validated
from autopallas.plain_calls import Args
from autopallas.report import Report
from autopallas.verification import first_call

__all__ = ["Optimized", "explain", "optimize"]

P = ParamSpec("P")
R = TypeVar("R")


@overload
def optimize(fn: None = None, **options: Unpack[OptionArguments]) -> Callable[[Callable[P, R]], Optimized[P, R]]: ...
@overload
def optimize(fn: Callable[P, R], **options: Unpack[OptionArguments]) -> Optimized[P, R]: ...
def optimize(
    fn: Callable[P, R] | None = None, **options: Unpack[OptionArguments]
) -> Optimized[P, R] | Callable[[Callable[P, R]], Optimized[P, R]]:
    """Makes a function run its reference computations as tuned kernels, without changing what it computes.

    Works as a decorator, bare or with options, and as a function.  A plain function is compiled with ``jax.jit``; an
    existing jit function keeps its static, donated and sharded arguments.  The result can be called inside jit, grad,
    vmap, scan and checkpoint.  The outermost optimized function owns the rewrite of everything that it calls.

    Args:
      fn: the function.
      **options: any field of :class:`autopallas.options.Options`, such as ``objective="memory"`` or
        ``require={"attention": 2}``.

    Returns:
      The optimized function; its ``report()`` says what was replaced and why.

    Raises:
      OptionError: an option does not exist, or does not accept its value; or ``fn`` cannot be called.
      RequirementError: when the function is traced, and fewer sites were replaced than ``require`` asks for, or the
        lockfile does not certify the program.
      UnsupportedError: when the function is traced, and a single named implementation does not support a site.

    Example:
      >>> import jax, jax.numpy as jnp, autopallas
      >>> @autopallas.optimize(objective="always")
      ... def attend(q, k, v):
      ...     return jax.nn.softmax(q @ k.T / 8.0) @ v
      >>> x = jnp.ones((16, 64))
      >>> attend(x, x, x).shape
      (16, 64)
      >>> attend.report().counts()
      Counter({'attention': 1})
    """
    explicit = dict(validated(options))
    if fn is None:
        return lambda fn: _optimized(explicit, fn)
    return _optimized(explicit, fn)


def _optimized(explicit: dict[str, object], fn: Callable[P, R]) -> Optimized[P, R]:
    function, instance = _unbound(callable_given("optimize", fn))
    if instance:
        return cast("Optimized[P, R]", types.MethodType(Optimized(function, explicit), *instance))
    return Optimized(fn, explicit)


def _unbound(fn: ArrayFunction) -> tuple[ArrayFunction, Args]:
    """Returns the function and the object of a method that ``jax.jit`` or :func:`optimize` made; what it is given, of
    anything else.

    Such a method has the attributes of the function, whose static and donated arguments count the object.
    """
    if isinstance(fn, types.MethodType):
        function: ArrayFunction = fn.__func__
        if isinstance(function, Optimized) or compat.jit_settings(function) is not None:
            return function, (fn.__self__,)
    return fn, ()


@own_frames.left_out
def explain(fn: ArrayFunction, /, *args: PyTree, **kwargs: PyTree) -> Report:
    """Reports what :func:`optimize` would do with a call, without compiling or running anything.

    Args:
      fn: a function; if it is optimized, its own options apply.
      *args, **kwargs: the call's arguments; a ``jax.ShapeDtypeStruct`` may stand for an array.

    Returns:
      The report.

    Raises:
      OptionError, RequirementError, UnsupportedError: as :func:`optimize`.

    Example:
      >>> import jax, jax.numpy as jnp, autopallas
      >>> x = jax.ShapeDtypeStruct((16, 64), jnp.float32)
      >>> report = autopallas.explain(lambda q, k, v: jax.nn.softmax(q @ k.T) @ v, x, x, x)
      >>> [site.op for site in report.sites]
      ['attention']
    """
    fn, instance = _unbound(callable_given("explain", fn))
    args = (*instance, *args)
    function, explicit = (fn._function, fn._explicit) if isinstance(fn, Optimized) else (fn, {})
    fresh = Optimized(function, explicit | {"autotune": False})  # a search runs kernels
    fresh._dry = True
    if fresh._plain is not None:
        fresh._placed(functools.partial(fresh._plain.call, _only_trace), args, kwargs)
    else:
        fresh.eval_shape(*args, **kwargs)
    return fresh.report()


def _only_trace(jitted: Jitted, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
    with first_call.unchecked():
        return jitted.eval_shape(*args, **kwargs)
