"""Tells how the steps of a loop come to the slices of an array that they read and write, one after the other.

The slices, or rows, have numbers in the order in which steps come to them: step t comes to row t first, and may read
and write the rows t, t - 1, ..., t - depth, which have the *lags* 0, 1, ..., depth in that step.  The first steps read
of the rows -depth, ..., -1 what was there before the loop.  ``y.at[i].set(a * y[i - 1] + x[i])`` writes with lag 0 and
reads with lag 1.  Its derivative reads, and sets to zero, the row to which the step before it added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal as OneOf
from typing import NamedTuple

import numpy as np

from autopallas.graph.array_slices import Place

__all__ = ["Access", "Table", "table_of"]

_DEEPEST = 8
"""Largest number of steps after which a row is read or written again."""
_MOST_AGAIN = 4 * (_DEEPEST + 1)
"""Most rows that lie where another one lies, which are looked at one by one."""


class Access(NamedTuple):
    """What an equation of a step does with a row.

    Attributes:
      place: where the row lies, for all steps.
      version: how many equations of the step have written to the array before.
      kind: "read" it, "set" it, or "add" to it.
    """

    place: Place
    version: int
    kind: OneOf["read", "set", "add"]


@dataclass(frozen=True)
class Table:
    """How steps come to the rows of an array.

    Attributes:
      axis: the axis along which the rows lie.
      positions: of the rows -depth, ..., length - 1.
      depth: the largest lag.
      summed: the smallest lag at which a row is more than added to: until then, the sum of what is added is enough.
      last: the largest lag at which a row is written, at least ``summed``: after it, a row stays as it is.
      lags: by the places at which steps read and write.
      length, reverse: of the loop.
    """

    axis: int
    positions: tuple[int, ...]
    depth: int
    summed: int
    last: int
    lags: Mapping[Place, int]
    length: int
    reverse: bool

    def place(self, lag: int) -> Place:
        """Returns where the row with a lag lies in each step, in the order of the loop's slices."""
        first = self.depth - lag
        positions = self.positions[first : first + self.length]
        return Place(self.axis, positions[::-1] if self.reverse else positions)

    def before(self, lag: int) -> Place:
        """Returns where the row lies that would have had a lag if the loop had one step more, before the first."""
        return Place(self.axis, (self.positions[self.depth - lag],))

    def after(self, lag: int) -> Place:
        """Returns where the row lies that would have a lag if the loop had one step more, after the last."""
        return Place(self.axis, (self.positions[self.depth + self.length - lag],))


def table_of(accesses: Sequence[Access], length: int, reverse: bool, in_turn: bool, late: bool = True) -> Table | None:
    """Returns how steps come to the rows of an array, or None where an array is no table.

    Args:
      accesses: what each step does.
      length, reverse: of the loop.
      in_turn: whether each equation that writes to the array writes to what the one before it made.
      late: whether what is added to a row is summed on its own until more is done with it; else ``summed`` is 0.
    """
    places = list(dict.fromkeys(access.place for access in accesses))
    if not length or len(places) > _DEEPEST + 1 or len({place.axis for place in places}) != 1:
        return None
    positions = [np.asarray(place.positions)[:: -1 if reverse else 1] for place in places]
    lags = [_lag(positions[0], other) for other in positions]
    known = [lag for lag in lags if lag is not None]
    if len(known) != len(lags):
        return None
    depth = max(known) - min(known)
    if depth > min(_DEEPEST, length - 1):
        return None
    own = [lag - min(known) for lag in known]
    newest, oldest = positions[own.index(0)], positions[own.index(depth)]
    rows = np.concatenate([oldest[:depth], newest])
    for lag, found in zip(own, positions, strict=True):
        if not np.array_equal(rows[depth - lag : depth - lag + length], found):
            return None
    of_place = dict(zip(places, own, strict=True))
    summed = min((of_place[a.place] for a in accesses if a.kind != "add"), default=depth) if late else 0
    last = max([summed, *(of_place[a.place] for a in accesses if a.kind != "read")])
    table = Table(places[0].axis, tuple(rows.tolist()), depth, summed, last, of_place, length, reverse)
    return table if _is_sound(table, rows, accesses, in_turn) else None


def _lag(first: np.ndarray, other: np.ndarray) -> int | None:
    """Returns how many steps after positions come that others have, negative if before; None if they do not."""
    length = len(first)
    for lag in range(min(_DEEPEST, length - 1) + 1):
        if np.array_equal(first[: length - lag], other[lag:]):
            return lag
        if np.array_equal(first[lag:], other[: length - lag]):
            return -lag
    return None


def _is_sound(table: Table, rows: np.ndarray, accesses: Sequence[Access], in_turn: bool) -> bool:
    """Returns whether rows that lie at one position do not meet there.

    Of these, one may be written.  Another one may be read, before that: it is what was there before the loop.  And a
    third one may be added to, after that: what is added is added after the loop.
    """
    values, places = np.unique(rows, return_inverse=True)
    counts = np.bincount(places.reshape(-1), minlength=len(values))
    again = np.flatnonzero(counts > 1)
    if not again.size:
        return True
    if not in_turn or int(counts[again].sum()) > _MOST_AGAIN:
        return False
    for position in values[again]:
        numbers = [int(n) - table.depth for n in np.flatnonzero(rows == position)]
        read = [n for n in numbers if n < -table.last]
        kept = [n for n in numbers if -table.last <= n < table.length - table.summed]
        added = [n for n in numbers if n >= table.length - table.summed]
        if len(kept) > 1:
            return False
        whole = _times(table, accesses, kept)
        written = [*(time for time in whole if time.writes), *_times(table, accesses, added)]
        if not _precede(_times(table, accesses, read), written) or not _precede(whole, _times(table, accesses, added)):
            return False
    return True


class _Time(NamedTuple):
    """When an equation reads or writes a row: in which step, on which version of the array, and whether it writes."""

    step: int
    version: int
    writes: bool


def _times(table: Table, accesses: Sequence[Access], numbers: Sequence[int]) -> list[_Time]:
    """Returns when rows with some numbers are read and written."""
    found = [(n + table.lags[a.place], a) for n in numbers for a in accesses]
    return [_Time(step, a.version, a.kind != "read") for step, a in found if 0 <= step < table.length]


def _precede(some: Sequence[_Time], others: Sequence[_Time]) -> bool:
    return not some or not others or max(some) < min(others)
