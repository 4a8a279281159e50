"""Implements option ``verify``, which checks the first call of each signature before it runs.

A function under ``jit`` sees its arguments' values only before the trace, and learns only during the trace that the
call needs one.  So under option ``verify`` the trace of an optimized function is aborted by :class:`FirstCall`; the
call is checked, and then traced and run as usual.  Later calls of the signature do not get here.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import jax

from autopallas import compat
from autopallas.compat import ArrayFunction, PyTree
from autopallas.errors import OptionError, RequirementError, UnsupportedError, VerificationError, one_line, warn

__all__ = ["FirstCall", "checked", "demand", "unchecked"]


class FirstCall(Exception):
    """Aborts the trace of a signature that has to be checked first."""


class _Pass(threading.local):
    """Whether traces of this thread may proceed.  Not part of jit's keys, or nobody would find what was traced."""

    given = False


_PASS = _Pass()


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Lets traces inside proceed: the call was checked, or nothing will run (``lower``, ``eval_shape``)."""
    before, _PASS.given = _PASS.given, True
    try:
        yield
    finally:
        _PASS.given = before


def demand() -> None:
    """Raises FirstCall, unless :func:`unchecked` is in force."""
    if not _PASS.given:
        raise FirstCall


def checked(fn: ArrayFunction, args: Sequence[PyTree], kwargs: dict[str, PyTree], strict: bool) -> None:
    """Checks a call that :func:`demand` aborted.  Under an outer trace there are no values, so nothing is checked.

    Args:
      fn: the optimized function.
      args, kwargs: the call's arguments.
      strict: whether to raise a failure of the check itself, instead of a warning.

    Raises:
      VerificationError: an output is in breach.
    """
    if any(map(compat.is_tracer, jax.tree.leaves((args, kwargs)))):
        return
    from autopallas.verification.verify import verify

    try:
        with unchecked():
            verify(fn, *args, **kwargs)
    except (VerificationError, OptionError, RequirementError, UnsupportedError):
        raise
    except Exception as error:
        if strict:
            raise
        reason = one_line(error)
        warn(f"autopallas could not verify {fn!r}: {reason}")
