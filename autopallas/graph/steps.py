"""Counts the steps of recognition, and stops a try that takes too many.

A step is one look at a use of a value.  The limit of a try depends only on the program's equations, so that a program
has the same sites on every machine and in every process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["OutOfSteps", "Steps"]

_EACH = 20_000
_EACH_PER_EQUATION = 20
_ALL = 200_000
_ALL_PER_EQUATION = 200
_LEAST = 2_000


class OutOfSteps(Exception):
    """Raised when a try has used up its steps; ``limit`` is how many it had."""

    def __init__(self, limit: int):
        super().__init__(f"not decided within {limit} steps")
        self.limit = limit


class Steps:
    """The steps taken in one program.

    A pattern has a number of steps for all its tries, in proportion to the equations, and each try may take a part of
    them.  When the pattern has none left, each further try still has a few; ordinary sites need no more.

    Attributes:
      spent: the steps taken so far.
    """

    __slots__ = ("_all", "_each", "_given", "_limit", "_pattern_end", "spent")

    def __init__(self, equations: int):
        self.spent = 0
        self._each = _EACH + _EACH_PER_EQUATION * equations
        self._all = _ALL + _ALL_PER_EQUATION * equations
        self._pattern_end = self._all
        self._limit: int | None = None
        self._given = 0

    def begin(self) -> None:
        """Begins a pattern, which has its own steps."""
        self._pattern_end = self.spent + self._all

    def spend(self, count: int = 1) -> None:
        """Takes steps.

        Raises:
          OutOfSteps: the try that is under way has no more.
        """
        self.spent += count
        if self._limit is not None and self.spent > self._limit:
            raise OutOfSteps(self._given)

    @contextmanager
    def one_try(self) -> Iterator[None]:
        """Enters a try, whose work has a limited number of steps.  A nested try gets no more than the outer one has."""
        before, given = self._limit, self._given
        own = max(_LEAST, min(self._each, self._pattern_end - self.spent))
        if before is None or self.spent + own < before:
            self._limit, self._given = self.spent + own, own
        try:
            yield
        finally:
            self._limit, self._given = before, given
