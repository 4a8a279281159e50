"""Runs JAX from within a trace, as if there were none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import jax

from autopallas import compat
from autopallas.numerics.promote import usual_promotion

__all__ = ["isolated"]

T = TypeVar("T")


def isolated(work: Callable[[], T], seconds: float | None = None) -> T:
    """Calls ``work()`` in a thread of its own, and returns its result.

    JAX's current trace, mesh and options belong to a thread, so the new thread is free of them.  The settings that
    numbers depend on are passed on.

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
    results: list[T] = []
    errors: list[BaseException] = []

    def body() -> None:
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
