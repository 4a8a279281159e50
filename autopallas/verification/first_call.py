"""Option ``verify``: the first call of each signature is checked before it runs.

A function under ``jit`` sees its arguments' values only before the trace, and whether a call needs a trace only within
it.  So the trace of an optimized function under option ``verify`` is broken off by :class:`FirstCall`, the call is
checked, and then traced and run as usual.  Later calls of the signature do not get here.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator, Sequence

import jax

from autopallas import compat
from autopallas.compat import ArrayFunction, PyTree
from autopallas.errors import AutopallasWarning, OptionError, RequirementError, UnsupportedError, VerificationError

__all__ = ["FirstCall", "checked", "demand", "unchecked"]


class FirstCall(Exception):
    """Breaks off the trace of a signature that has to be checked first."""


class _Pass(threading.local):
    """Whether traces of this thread may go through.  Not a part of jit's keys, or nobody would find what was traced."""

    given = False


_PASS = _Pass()


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Traces inside are not broken off: the call was checked, or nothing will run (``lower``, ``eval_shape``)."""
    before, _PASS.given = _PASS.given, True
    try:
        yield
    finally:
        _PASS.given = before


def demand() -> None:
    """Raises FirstCall, unless inside :func:`unchecked`."""
    if not _PASS.given:
        raise FirstCall


def checked(fn: ArrayFunction, args: Sequence[PyTree], kwargs: dict[str, PyTree], strict: bool) -> None:
    """Checks a call that :func:`demand` broke off.  Under an outer trace there are no values, and nothing is checked.

    Args:
      fn: the optimized function.
      args, kwargs: the call's arguments.
      strict: whether a failure of the check itself is raised, instead of a warning.

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
        reason = f"{type(error).__name__}: {error}".split("\n")[0]
        warnings.warn(f"autopallas could not verify {fn!r}: {reason}", AutopallasWarning, stacklevel=4)
