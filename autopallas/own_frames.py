"""Leaves this package's frames out of the tracebacks of a function's own errors, as JAX leaves out its own."""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import jax

__all__ = ["leave_out", "left_out", "without"]

P = ParamSpec("P")
R = TypeVar("R")
_OURS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
_JAX = os.path.join(os.path.dirname(os.path.abspath(jax.__file__)), "")


def without(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Returns a traceback without the frames of this package."""
    rest: types.TracebackType | None = None
    for one in reversed(list(_entries(trace))):
        if not _file(one).startswith(_OURS):
            rest = types.TracebackType(rest, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return rest


def leave_out(error: BaseException) -> None:
    """Leaves this package's frames out of an error's traceback, if code of neither this package nor JAX raised it below
    them, and ``jax_traceback_filtering`` is not off."""
    files = [_file(one) for one in _entries(error.__traceback__)]
    first = next((n for n, file in enumerate(files) if file.startswith(_OURS)), len(files))
    foreign = any(not file.startswith((_OURS, _JAX)) for file in files[first:])
    if foreign and getattr(jax.config, "jax_traceback_filtering", None) != "off":
        error.__traceback__ = without(error.__traceback__)


def left_out(function: Callable[P, R]) -> Callable[P, R]:
    """Returns a function whose errors are raised without them, as :func:`leave_out` says."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            leave_out(error)
            raise

    return called


def _entries(trace: types.TracebackType | None) -> Iterator[types.TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _file(entry: types.TracebackType) -> str:
    return entry.tb_frame.f_code.co_filename
