"""Contains exceptions: an exception costs the candidate in which it was raised, and nothing else.

Code that loops over candidates (nodes that may be sites, sites to plan, sites to describe) works on each of them in
``with contained(place):``.  An exception inside becomes a :class:`~autopallas.report.Failure` of that candidate, and
the loop goes on with the next one.  Blocks nest: one around a whole pattern tells which operation the pattern looks
for, and catches exceptions in the pattern's own preparation.

The enclosing :func:`collecting` collects the failures; without one, and under the option ``strict``, every exception is
raised.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from types import TracebackType
from typing import Protocol, Self

from autopallas import jaxprs
from autopallas.compat import JaxprEqn
from autopallas.errors import OptionError, RequirementError, UnsupportedError, VerificationError, one_line
from autopallas.report.records import Failure

__all__ = ["MEANT", "collecting", "contained", "in_words"]

MEANT = (OptionError, RequirementError, UnsupportedError, VerificationError)
"""Errors that are answers to the user, not internal failures: they are always raised."""


class Failures:
    """The failures so far, each only once."""

    def __init__(self, strict: bool):
        self.strict = strict
        self.found: list[Failure] = []

    def add(self, failure: Failure) -> None:
        if failure not in self.found:
            self.found.append(failure)


_failures: contextvars.ContextVar[Failures | None] = contextvars.ContextVar("failures", default=None)
_around: contextvars.ContextVar[contained | None] = contextvars.ContextVar("around", default=None)


@contextlib.contextmanager
def collecting(strict: bool = False) -> Iterator[list[Failure]]:
    """Enters a context in which exceptions in candidates are collected; with ``strict`` they are raised.

    Example:
      >>> with collecting() as failures:
      ...     for divisor in (0, 1):
      ...         with contained(f"candidate {divisor}", op="attention", stage="recognition"):
      ...             print(1 // divisor)
      1
      >>> failures[0].location, failures[0].error
      ('candidate 0', 'ZeroDivisionError: integer division or modulo by zero')
    """
    failures = Failures(strict)
    token = _failures.set(failures)
    try:
        yield failures.found
    finally:
        _failures.reset(token)


class _Placed(Protocol):
    """Anything located at an equation: a node of a graph."""

    @property
    def equation(self) -> JaxprEqn | None: ...


class contained(contextlib.AbstractContextManager["contained", bool]):
    """Context for the work on one candidate: records an exception as its failure, and suppresses it.

    Attributes:
      error: the exception in one line, once one was caught; otherwise empty.

    Args:
      place: the candidate: a node or equation of a program, or its place as text.
      op: the operation; by default that of the enclosing context.
      stage: the stage of the pipeline; by default that of the enclosing context.
    """

    __slots__ = ("_outer", "_token", "error", "op", "place", "stage")

    def __init__(self, place: str | JaxprEqn | _Placed | None = "", op: str = "", stage: str = ""):
        self.place, self.op, self.stage = place, op, stage
        self.error = ""

    def __enter__(self) -> Self:
        outer = _around.get()
        if outer is not None:
            self.op, self.stage = self.op or outer.op, self.stage or outer.stage
        self._token = _around.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        _around.reset(self._token)
        if error is None:
            return False
        failures = _failures.get()
        if not isinstance(error, Exception) or isinstance(error, MEANT) or failures is None or failures.strict:
            return False
        self.error = one_line(error)
        failures.add(Failure(self.stage, self.error, self.op, _location(self.place)))
        return True


def _location(place: str | JaxprEqn | _Placed | None) -> str:
    """Returns where in the user's code a candidate is; "" where that is not known."""
    if isinstance(place, str):
        return place
    return jaxprs.location(place if place is None or isinstance(place, JaxprEqn) else place.equation)


def in_words(failures: list[Failure]) -> str:
    """Returns the text of a warning: names the first failures, and counts the others."""
    shown = [f"{f.op}{f' at {f.location}' * bool(f.location)} ({f.stage}: {f.error})" for f in failures[:3]]
    more = f" and {len(failures) - len(shown)} more, which the report names" if len(failures) > len(shown) else ""
    return f"autopallas left out what an exception was raised in: {'; '.join(shown)}{more}"
