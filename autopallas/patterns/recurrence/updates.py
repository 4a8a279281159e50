"""Splits what a step makes of a state into updates, one after the other, each of a form that is known.

An update multiplies each element of the state by a factor of its own, adds what does not depend on the state, and may
correct the state along one row.  A step that does more than that, such as a delta rule for each of several keys, is
looked at between the variables through which all that it makes of the state passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autopallas.compat import Var
from autopallas.patterns.advice import STATE, TRANSITIONS
from autopallas.patterns.match import Mismatch
from autopallas.patterns.recurrence.interpret import Interpretation, Opaque
from autopallas.patterns.recurrence.step import Step
from autopallas.patterns.recurrence.sums import Part, Sum, Value

__all__ = ["Corrections", "check_updates", "corrections", "divided", "interpreted"]

_MOST_UPDATES = 8
"""Most updates of one state in a step."""


@dataclass(slots=True)
class Corrections:
    """What an update adds of the state itself, in terms of the labels that the state has after it.

    Attributes:
      rows: the labels along which the state is read and written.
      probe, write: the factors by which it is; of each term the same.
      terms: coefficient and further factors of each term.
    """

    rows: frozenset[int] = frozenset()
    probe: tuple[Value, ...] = ()
    write: tuple[Value, ...] = ()
    terms: list[tuple[float, tuple[Value, ...]]] = field(default_factory=list)

    def by_rows(self) -> list[tuple[Value, ...]]:
        return [self.probe, self.write]

    def of_heads(self) -> set[int]:
        """Returns the labels of the further factors."""
        return {a for _, factors in self.terms for factor in factors for a in factor.axes if a is not None}


def interpreted(step: Step, states: Sequence[int], known: Sequence[int]) -> Interpretation:
    """Returns the interpretation of a step, with several updates of the states that need them.

    Args:
      step: the step.
      states: the places of the carried values that are taken for states.
      known: the places of those that are known.
    """
    whole = Interpretation(step, states, known)
    parts: dict[Var, int] = {}
    for place in states:
        if not _is_update(whole.updates[place][0], place, 0):
            parts |= dict.fromkeys(_parts(step, states, known, place, whole), place)
    return Interpretation(step, states, known, parts) if parts else whole


def _parts(step: Step, states: Sequence[int], known: Sequence[int], place: int, found: Interpretation) -> list[Var]:
    """Returns the variables between the updates of a state, as few as possible; none where it has no such form."""
    step = step.until([place])
    passed = _passed(step, place)
    parts: list[Var] = []
    while len(parts) < _MOST_UPDATES - 1:
        updates = [v for v in passed if _is_update(found.values[v], place, len(parts))]
        if not updates:
            return []
        parts.append(updates[-1])
        passed = passed[passed.index(updates[-1]) + 1 :]
        found = Interpretation(step, states, known, dict.fromkeys(parts, place))
        if _is_update(found.updates[place][-1], place, len(parts)):
            return parts
    return []


def _passed(step: Step, place: int) -> list[Var]:
    """Returns the variables of a state's shape through which every path leads from it to what it is after the step."""
    carry, after = step.carries[place], step.after[place]
    depends = {carry}
    for equation in step.equations:
        if not depends.isdisjoint([a for a in equation.invars if isinstance(a, Var)]):
            depends.update(equation.outvars)
    leading = {after}
    last: dict[Var, int] = {}
    for position, equation in reversed([*enumerate(step.equations)]):
        if not leading.isdisjoint(equation.outvars):
            read = {a for a in equation.invars if isinstance(a, Var) and a in depends}
            leading |= read
            for variable in read:
                last.setdefault(variable, position)
    open_paths, found = {carry}, list[Var]()
    for position, equation in enumerate(step.equations):
        open_paths.update(v for v in equation.outvars if v in leading and v in depends)
        open_paths -= {a for a in equation.invars if isinstance(a, Var) and last.get(a) == position}
        if len(open_paths) == 1:
            (only,) = open_paths
            if only not in (carry, after, *found[-1:]) and only.aval.shape == carry.aval.shape:
                found.append(only)
    return found


def _is_update(value: Sum | Opaque, place: int, updates: int) -> bool:
    """Returns whether a value is an update of a state after some updates."""
    try:
        if isinstance(value, Opaque):
            return False
        _check(value, place, updates)
        corrections(value)
    except Mismatch:
        return False
    return any(part.carried is not None for part in value.parts)


def check_updates(step: Step, found: Interpretation, place: int) -> None:
    """Checks that each element of a state is multiplied by a factor of its own, beside what a delta rule adds.

    Raises:
      Mismatch: it is not.
    """
    for updates, value in enumerate(found.updates[place]):
        assert isinstance(value, Sum)
        try:
            _check(value, place, updates)
        except _ByAMatrix as mismatch:
            matrices = [f.variable for f in mismatch.part.factors if not mismatch.part.summed.isdisjoint(f.axes)]
            if not {*step.slices}.isdisjoint(matrices):
                raise Mismatch(f"{_BY_A_MATRIX}, which is computed before the loop", advice=TRANSITIONS) from None
            raise


def _check(value: Sum, place: int, updates: int) -> None:
    for part in value.parts:
        if part.carried is None:
            continue
        if part.carried.updates != updates or part.carried.place != place:
            raise Mismatch("a carried value is added to another one", advice=STATE)
        if part.carried.rounded:
            raise Mismatch("the state is rounded to a narrower type from step to step", advice=STATE)
        if part.summed and _is_correction(value, part):
            continue
        if {label for label in part.carried.axes if label is not None} & part.summed:
            raise _ByAMatrix(part)
        if part.carried.axes != value.axes:
            raise Mismatch("the axes of the state change places from step to step", advice=STATE)


_BY_A_MATRIX = "the state is multiplied by a matrix from step to step"


class _ByAMatrix(Mismatch):
    """A term of an update that multiplies the state by a matrix."""

    def __init__(self, part: Part):
        super().__init__(_BY_A_MATRIX, advice=STATE)
        self.part = part


def _is_correction(value: Sum, part: Part) -> bool:
    """Returns whether a term of an update is an outer product of what it reads of the state along some axes, with
    factors along the same axes."""
    assert part.carried is not None
    changed = [(a, b) for a, b in zip(part.carried.axes, value.axes, strict=True) if a != b]
    read, written = {a for a, _ in changed}, {b for _, b in changed}
    if not changed or None in read | written or read != part.summed or read & set(value.axes):
        return False
    return all(read.isdisjoint(factor.axes) or written.isdisjoint(factor.axes) for factor in part.factors)


def corrections(value: Sum) -> Corrections:
    """Returns what an update adds of the state itself.

    Raises:
      Mismatch: its terms read or write the state by different rows.
    """
    found = Corrections()
    for part in value.parts:
        if part.carried is None or not part.summed:
            continue
        names = {a: b for a, b in zip(part.carried.axes, value.axes, strict=True) if a != b and a is not None}
        rows = frozenset(label for label in names.values() if label is not None)
        write, others = divided(part.factors, rows)
        probe, others = divided(others, set(names))
        probe = tuple(replace(f, axes=tuple(names.get(a, a) if a is not None else a for a in f.axes)) for f in probe)
        if found.terms and (rows, probe, write) != (found.rows, found.probe, found.write):
            raise Mismatch("the state is corrected along more than one row at once", advice=STATE)
        found.rows, found.probe, found.write = rows, probe, write
        found.terms.append((part.coefficient, others))
    return found


def divided(factors: Sequence[Value], rows: set[int] | frozenset[int]) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
    """Returns the factors with labels of rows, and the others."""
    first = tuple(factor for factor in factors if not rows.isdisjoint(factor.axes))
    return first, tuple(factor for factor in factors if factor not in first)
