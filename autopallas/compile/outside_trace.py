"""Runs JAX from within a trace, as if there were none, and knows what kernels are run for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import jax

from autopallas import compat
from autopallas.numerics.promote import usual_promotion

__all__ = ["KERNELS", "is_within", "isolated", "within"]

T = TypeVar("T")

KERNELS = "kernels"
"""Name of searches and probes, for :func:`within`."""

_around: ContextVar[frozenset[Hashable]] = ContextVar("around", default=frozenset())
"""Names of the work that this code is part of."""


@contextmanager
def within(name: Hashable) -> Iterator[None]:
    """Enters work of a name, such as a search: a kernel that it runs may call an optimized function, which asks for
    such work itself, and must neither wait for the work around it nor begin the same again."""
    token = _around.set(_around.get() | {name})
    try:
        yield
    finally:
        _around.reset(token)


def is_within(name: Hashable) -> bool:
    """Returns whether this code is part of the work of that name, also in a thread that :func:`isolated` began.

    Example:
      >>> with within(KERNELS):
      ...     isolated(lambda: is_within(KERNELS)), is_within("another")
      (True, False)
    """
    return name in _around.get()


def isolated(work: Callable[[], T], seconds: float | None = None) -> T:
    """Calls ``work()`` in a thread of its own, and returns its result.

    JAX's current trace, mesh and options belong to a thread, so the new thread is free of them.  The settings that
    numbers depend on are passed on, and so is what the work is part of.

    Args:
      work: the function to call.
      seconds: how long to wait.  A thread cannot be ended: one that takes longer is left to itself.

    Raises:
      TimeoutError: ``work`` took longer than that.
      Exception: what ``work`` raises.

    Example:
      >>> jax.jit(lambda x: x * isolated(lambda: float(jax.numpy.ones(3).sum())))(2.0).item()
      6.0
    """
    x64, precision = compat.numeric_setting()
    around = _around.get()
    results: list[T] = []
    errors: list[BaseException] = []

    def body() -> None:
        _around.set(around)  # of the new thread
        try:
            with jax.enable_x64(x64), jax.default_matmul_precision(precision), usual_promotion():
                results.append(work())
        except BaseException as error:
            errors.append(error)

    # A daemon thread, so that a program that is interrupted here can end.
    thread = threading.Thread(target=body, name="autopallas-tuning", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"no result after {seconds:g} seconds")
    if errors:
        raise errors[0]
    return results[0]
