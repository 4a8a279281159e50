"""Tells what a loop carries: states that are affine in themselves, and values that can be known before them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopallas.compat import Var
from autopallas.graph.indexed_arrays import WRITES
from autopallas.kernels.recurrence.structure import Known
from autopallas.patterns.advice import CASCADE, OWN_ROWS, STATE
from autopallas.patterns.match import Mismatch
from autopallas.patterns.recurrence.interpret import Interpretation, Opaque
from autopallas.patterns.recurrence.step import Step, is_inexact
from autopallas.patterns.recurrence.sums import Sum
from autopallas.patterns.recurrence.updates import check_updates, interpreted

__all__ = ["Carries", "carries_of", "check_delta_rules"]


@dataclass(slots=True)
class Carries:
    """What a loop carries.

    Attributes:
      states: the places of those that are affine in themselves, coefficients apart.
      known: the others, in the order in which they can be computed; each before the states.
      last: places of carried values that no step reads.
      interpretation: the step, with these as states.
      reasons: why others that depend on themselves are no states.
    """

    states: list[int]
    known: list[Known]
    last: list[int]
    interpretation: Interpretation
    reasons: dict[int, str] = field(default_factory=dict)


def carries_of(step: Step) -> Carries:
    """Returns what a loop carries.

    Raises:
      Mismatch: no carried value is a state, or some depend on each other.
    """
    bits = step.dependencies()
    depends = [bits[atom] if isinstance(atom, Var) else 0 for atom in step.after]
    known: list[Known] = []
    solved = 0
    last, written = _unread(step), _written(step)
    reasons: dict[int, str] = {}
    left = [place for place in range(len(step.carries)) if place not in last]
    nonlinear: set[int] = set()
    while True:
        for value in _solvable(step, left, depends, solved, nonlinear):
            known.append(value)
            solved |= 1 << value.carry
            left.remove(value.carry)
        states = [p for p in left if not depends[p] & ~solved & ~(1 << p)]
        if not states and not written.isdisjoint(nonlinear):
            raise Mismatch(_INDEXED, advice=OWN_ROWS)
        if not states:
            if reasons:
                raise Mismatch("; ".join(dict.fromkeys(reasons.values())), advice=STATE)
            raise _coupled(step, left, [value.carry for value in known])
        waiting = [place for place in left if place not in states]
        # While others wait, a part of the step is looked at: of a long chain of carried values, each is a round.
        part = step.until(states) if waiting else step
        found = interpreted(part, states, [value.carry for value in known])
        opaque = {p: u.reason for p in states for u in found.updates[p] if isinstance(u, Opaque)}
        reasons |= opaque
        if not opaque and not waiting:
            break
        if not opaque and not written.isdisjoint(waiting):
            raise Mismatch(_INDEXED, advice=OWN_ROWS)
        if not opaque and not any(depends[place] >> place & 1 for place in waiting):
            raise Mismatch(_WAITING, advice=STATE)
        read = {p for p in states if any(depends[place] >> p & 1 for place in waiting)}
        if not opaque and not (read and all(_is_small(step, place) for place in read)):
            raise Mismatch(f"{_WAITING}, {_LARGE}", advice=STATE)
        nonlinear.update(opaque or read)
    for place in states:
        check_updates(step, found, place)
    return Carries(states, known, last, found, reasons)


_COUPLED = "what it carries depends on each other"
_WAITING = "a carried value is computed from another one that depends on itself"
_LARGE = "whose values in all steps would take more memory than anything that the loop reads"
_INDEXED = (
    "an array that it carries is not written by whole rows, in each step its own, which others read a fixed number of "
    "steps later or not at all"
)


def _coupled(step: Step, states: Sequence[int], known: Sequence[int]) -> Mismatch:
    """Returns that carried values depend on each other, with the reason why they are not affine in all of them, or that
    they are."""
    updates = Interpretation(step, states, known).updates.values()
    reasons = [own.reason for every in updates for own in every if isinstance(own, Opaque)]
    if reasons:
        return Mismatch(f"{_COUPLED}, and not by sums and products of whole arrays alone: {reasons[0]}", advice=STATE)
    return Mismatch(
        f"{_COUPLED}: all of it together is multiplied by a matrix from step to step, as in a filter of the second "
        "order",
        advice=CASCADE,
    )


def _is_small(step: Step, place: int) -> bool:
    """Returns whether the values of a carried value in all steps take no more memory than something that is sliced."""
    sliced = [math.prod(variable.aval.shape) for variable in step.slices]
    return math.prod(step.carries[place].aval.shape) <= max(sliced, default=0)


def _written(step: Step) -> set[int]:
    """Returns the places of the carried arrays that are written by an index."""
    arrays = {e.invars[0] for e in step.equations if e.primitive.name in WRITES and isinstance(e.invars[0], Var)}
    return {place for place, variable in enumerate(step.carries) if variable in arrays}


def _unread(step: Step) -> list[int]:
    """Returns the places of the carried values that no step reads."""
    read = {atom for equation in step.equations for atom in equation.invars if isinstance(atom, Var)}
    read.update(atom for atom in (*step.after, *step.results) if isinstance(atom, Var))
    return [place for place, variable in enumerate(step.carries) if variable not in read]


def _solvable(step: Step, left: Sequence[int], depends: Sequence[int], solved: int, nonlinear: set[int]) -> list[Known]:
    """Returns the carried values that can be computed next: those that depend on no state."""
    found: list[Known] = []
    for place in left:
        others = depends[place] & ~solved
        if step.after[place] is step.carries[place]:
            found.append(Known(place, "constant"))
        elif not others:
            found.append(Known(place, "shifted"))
        elif others == 1 << place and (place in nonlinear or not is_inexact(step.carries[place])):
            found.append(Known(place, "scanned"))
    return found


def check_delta_rules(carries: Carries, others: Mapping[int, Mismatch]) -> None:
    """Checks that states without a form for it are not corrected along rows.

    Args:
      carries: what the loop carries.
      others: why states are no matrices, by their places.

    Raises:
      Mismatch: one is, and why it has no form.
    """
    for place, mismatch in others.items():
        updates = [value for value in carries.interpretation.updates[place] if isinstance(value, Sum)]
        if any(part.summed for value in updates for part in value.parts if part.carried is not None):
            raise Mismatch(f"{_CORRECTED}, and {mismatch.reason}", advice=mismatch.advice)


_CORRECTED = "a step adds to the state what it reads of it"
