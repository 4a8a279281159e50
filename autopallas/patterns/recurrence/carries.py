"""Tells what a loop carries: states that are affine in themselves, and values that can be known before them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax.numpy as jnp

from autopallas.compat import JaxprAtom, Var
from autopallas.graph.indexed_arrays import WRITES
from autopallas.kernels.recurrence.structure import Correction, Factor, Known, Labels, MatrixState, Readout, Term
from autopallas.patterns.advice import OWN_ROWS, READOUT, STATE
from autopallas.patterns.match import Mismatch
from autopallas.patterns.recurrence.interpret import Interpretation, Opaque
from autopallas.patterns.recurrence.step import Step
from autopallas.patterns.recurrence.sums import Part, Sum, Value

__all__ = ["Carries", "carries_of", "check_delta_rules", "matrix_states"]

_LEAST = 8
"""Smallest number of rows and columns of a state that matrix products are for."""
_ROUNDS = 8
"""How often readouts are looked for further back."""


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
    last = _unread(step)
    reasons: dict[int, str] = {}
    left = [place for place in range(len(step.carries)) if place not in last]
    nonlinear: set[int] = set()
    while True:
        for value in _solvable(step, left, depends, solved, nonlinear):
            known.append(value)
            solved |= 1 << value.carry
            left.remove(value.carry)
        states = [p for p in left if not depends[p] & ~solved & ~(1 << p)]
        if not states and any(_is_written(step, place) for place in nonlinear):
            raise Mismatch(_INDEXED, advice=OWN_ROWS)
        if not states:
            raise Mismatch(
                "; ".join(dict.fromkeys(reasons.values())) or "what it carries depends on each other", advice=STATE
            )
        found = Interpretation(step, states, [value.carry for value in known])
        opaque = {p: update.reason for p in states if isinstance(update := found.updates[p], Opaque)}
        if not opaque:
            break
        reasons |= opaque
        nonlinear.update(opaque)
    waiting = [place for place in left if place not in states]
    if any(_is_written(step, place) for place in waiting):
        raise Mismatch(_INDEXED, advice=OWN_ROWS)
    if waiting:
        raise Mismatch("a carried value is computed from another one that depends on itself", advice=STATE)
    for place in states:
        _check_update(found, place)
    return Carries(states, known, last, found, reasons)


_INDEXED = (
    "an array that it carries is not written by whole rows, in each step its own, which others read a fixed number of "
    "steps later or not at all"
)


def _is_written(step: Step, place: int) -> bool:
    """Returns whether a carried array is written by an index."""
    carry = step.carries[place]
    return any(e.primitive.name in WRITES and e.invars[0] is carry for e in step.equations)


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
        elif others == 1 << place and (place in nonlinear or not _is_floating(step.carries[place])):
            found.append(Known(place, "scanned"))
    return found


def _is_floating(variable: Var) -> bool:
    return bool(jnp.issubdtype(variable.aval.dtype, jnp.inexact))


def _check_update(found: Interpretation, place: int) -> None:
    """Checks that each element of a state is multiplied by a factor of its own, beside what a delta rule adds.

    Raises:
      Mismatch: it is not.
    """
    value = found.updates[place]
    assert isinstance(value, Sum)
    for part in value.parts:
        if part.carried is None:
            continue
        if part.carried.after or part.carried.place != place:
            raise Mismatch("a carried value is added to another one", advice=STATE)
        if part.carried.rounded:
            raise Mismatch("the state is rounded to a narrower type from step to step", advice=STATE)
        if part.summed and _is_correction(value, part):
            continue
        if {label for label in part.carried.axes if label is not None} & part.summed:
            raise Mismatch(_BY_A_MATRIX, advice=STATE)
        if part.carried.axes != value.axes:
            raise Mismatch("the axes of the state change places from step to step", advice=STATE)


_BY_A_MATRIX = "the state is multiplied by a matrix from step to step"


def _is_correction(value: Sum, part: Part) -> bool:
    """Returns whether a term of an update is an outer product of what it reads of the state along some axes, with
    factors along the same axes."""
    assert part.carried is not None
    changed = [(a, b) for a, b in zip(part.carried.axes, value.axes, strict=True) if a != b]
    read, written = {a for a, _ in changed}, {b for _, b in changed}
    if not changed or None in read | written or read != part.summed or read & set(value.axes):
        return False
    return all(read.isdisjoint(factor.axes) or written.isdisjoint(factor.axes) for factor in part.factors)


def check_delta_rules(carries: Carries, others: Mapping[int, Mismatch]) -> None:
    """Checks that states without a form for it are not corrected along rows.

    Args:
      carries: what the loop carries.
      others: why states are no matrices, by their places.

    Raises:
      Mismatch: one is, and why it has no form.
    """
    for place, mismatch in others.items():
        value = carries.interpretation.updates[place]
        if isinstance(value, Sum) and any(part.summed for part in value.parts if part.carried is not None):
            raise Mismatch(f"{_CORRECTED}, and {mismatch.reason}", advice=mismatch.advice)


_CORRECTED = "a step adds to the state what it reads of it"


# ---------------------------------------------------------------------- states that are matrices


def matrix_states(step: Step, carries: Carries) -> tuple[list[MatrixState], dict[int, Mismatch]]:
    """Returns the states that are matrices, and why the others are none, by their places."""
    number = {v: i for i, v in enumerate([*step.inputs, *(v for e in step.equations for v in e.outvars)])}
    wanted = _readouts(step, carries)
    states: list[MatrixState] = []
    others: dict[int, Mismatch] = {}
    for place in carries.states:
        try:
            states.append(_Matrix(step, carries.interpretation, place, number).state(wanted))
        except Mismatch as mismatch:
            others[place] = mismatch
    return states, others


def _readouts(step: Step, carries: Carries) -> list[Var]:
    """Returns the affine variables from which everything else of the results is computed.

    Where some sum a state over more axes than others do, as ``y - y.mean()`` does for ``y = q @ state``, what these are
    computed from is looked at instead.
    """
    passed: set[Var] = set()
    found = _frontier(step, carries, passed)
    for _ in range(_ROUNDS):
        over = {variable: _summed_axes(carries, variable) for variable in found}
        least = _least_of_each(over.values())
        further = {v for v, own in over.items() if any(axes != least[place] for place, axes in own)}
        if not further:
            break
        passed |= further
        found = _frontier(step, carries, passed)
    return found


def _frontier(step: Step, carries: Carries, passed: Container[Var]) -> list[Var]:
    """Returns the affine variables from which the results are computed, apart from those that are passed by."""
    values = carries.interpretation.values
    made = {v: e for e in step.equations for v in e.outvars}
    after = [step.after[place] for place in carries.last]
    todo: list[JaxprAtom] = [*step.results, *after]
    seen: set[Var] = set()
    found: dict[Var, None] = {}
    while todo:
        atom = todo.pop()
        if not isinstance(atom, Var) or atom in seen:
            continue
        seen.add(atom)
        value = values[atom]
        is_affine = isinstance(value, Sum) and not value.is_free
        if is_affine and (atom not in passed or atom not in made):
            found[atom] = None
        elif (is_affine or isinstance(value, Opaque)) and atom in made:
            todo += made[atom].invars
    return list(found)


def _summed_axes(carries: Carries, variable: Var) -> list[tuple[int, frozenset[int]]]:
    """Returns the axes along which each term of an affine variable sums a state, with the place of the state."""
    value = carries.interpretation.values[variable]
    assert isinstance(value, Sum)
    found: list[tuple[int, frozenset[int]]] = []
    for part in value.parts:
        if part.carried is not None:
            summed = (d for d, label in enumerate(part.carried.axes) if label is not None and label in part.summed)
            found.append((part.carried.place, frozenset(summed)))
    return found


def _least_of_each(found: Iterable[Sequence[tuple[int, frozenset[int]]]]) -> dict[int, frozenset[int]]:
    """Returns the fewest axes along which each state is summed."""
    least: dict[int, frozenset[int]] = {}
    for place, axes in (each for own in found for each in own):
        if place not in least or len(axes) < len(least[place]):
            least[place] = axes
    return least


@dataclass(slots=True)
class _Corrections:
    """What an update adds of the state itself, in terms of the state's labels.

    Attributes:
      probe, write: the factors by which the state is read and written; of each term the same.
      terms: coefficient and further factors of each term.
    """

    probe: tuple[Value, ...] = ()
    write: tuple[Value, ...] = ()
    terms: list[tuple[float, tuple[Value, ...]]] = field(default_factory=list)

    def by_rows(self) -> list[tuple[Value, ...]]:
        return [self.probe, self.write]

    def of_heads(self) -> set[int]:
        """Returns the labels of the further factors."""
        return {a for _, factors in self.terms for factor in factors for a in factor.axes if a is not None}


class _Matrix:
    """One state, as a matrix whose rows are summed over where it is read."""

    def __init__(self, step: Step, found: Interpretation, place: int, number: dict[Var, int]):
        self.found, self.place, self.number = found, place, number
        value = found.updates[place]
        assert isinstance(value, Sum)
        self.value = value
        self.own = {label for label in value.axes if label is not None}
        self.is_real = bool(jnp.issubdtype(step.carries[place].aval.dtype, jnp.floating))

    def state(self, readouts: Sequence[Var]) -> MatrixState:
        """Returns the state.

        Raises:
          Mismatch: it is no such matrix, or too small.
        """
        if not self.is_real:
            raise Mismatch("the state is complex", advice=STATE)
        reads: list[tuple[Var, Sum]] = []
        for variable in readouts:
            value = self.found.values[variable]
            assert isinstance(value, Sum)
            places = {part.carried.place for part in value.parts if part.carried is not None}
            if self.place in places:
                if places != {self.place}:
                    raise Mismatch("a sum reads two states", advice=READOUT)
                reads.append((variable, self._in_own_labels(value)))
        rows = self._rows([value for _, value in reads])
        decay = [part for part in self.value.parts if part.carried is not None and not part.summed]
        added = [part for part in self.value.parts if part.carried is None]
        split = [self._query(part, rows) for _, value in reads for part in value.parts if part.carried is not None]
        of_decay = {label for part in decay for label in part.labels() for f in part.factors if label in f.axes}
        key, other = self._outer(added, rows)
        correction = self._correction(rows)
        by_rows = [key, *(q for q, _ in split), *correction.by_rows()]
        with_rows = {a for factors in by_rows for f in factors for a in f.axes if a is not None}
        columns = self.own - rows - with_rows - of_decay - correction.of_heads()
        groups = (self.own & with_rows) - rows
        heads = self.own - rows - groups - columns
        self._check(reads, [*(q for q, _ in split), *correction.by_rows()], rows, columns, bool(correction.terms))
        order = [label for label in self.value.axes if label is not None]

        def sorted_labels(labels: set[int]) -> Labels:
            return tuple(label for label in order if label in labels)

        return MatrixState(
            carry=self.place,
            axes=self.value.axes,
            groups=sorted_labels(groups),
            heads=sorted_labels(heads),
            rows=sorted_labels(rows),
            columns=sorted_labels(columns),
            decay=tuple(self._term(part.coefficient, part.factors) for part in decay),
            key=self._term(1.0, key),
            value=self._term(added[0].coefficient if added else 0.0, other),
            readouts=tuple(self._readout(variable, value, rows) for variable, value in reads),
            correction=self._described(correction, key),
        )

    def _correction(self, rows: set[int]) -> _Corrections:
        """Returns what the update adds of the state itself.

        Raises:
          Mismatch: its terms read or write the state by different rows, or other axes than readouts.
        """
        found = _Corrections()
        for part in self.value.parts:
            if part.carried is None or not part.summed:
                continue
            names = {a: b for a, b in zip(part.carried.axes, self.value.axes, strict=True) if a != b and a is not None}
            if set(names.values()) != rows:
                raise Mismatch("the state is corrected along other axes than it is read along", advice=STATE)
            write, others = _divided(part.factors, rows)
            probe, others = _divided(others, set(names))
            probe = tuple(
                replace(f, axes=tuple(names.get(a, a) if a is not None else a for a in f.axes)) for f in probe
            )
            if found.terms and (probe, write) != (found.probe, found.write):
                raise Mismatch("the state is corrected along more than one row", advice=STATE)
            found.probe, found.write = probe, write
            found.terms.append((part.coefficient, others))
        return found

    def _described(self, found: _Corrections, key: Sequence[Value]) -> Correction | None:
        if not found.terms:
            return None
        write = None if Counter(found.write) == Counter(key) else self._term(1.0, found.write)
        return Correction(self._term(1.0, found.probe), write, tuple(self._term(c, own) for c, own in found.terms))

    def _in_own_labels(self, value: Sum) -> Sum:
        """Returns a readout in which the state has the labels that it has in its update."""
        names: dict[int, int] = {}
        for part in value.parts:
            if part.carried is None:
                continue
            for label, own in zip(part.carried.axes, self.value.axes, strict=True):
                if label is not None and own is not None and names.setdefault(label, own) != own:
                    raise Mismatch("a sum reads the state twice, with axes in another order", advice=READOUT)
        if len(set(names.values())) != len(names):
            raise Mismatch("terms of a sum read the state along different axes", advice=READOUT)
        return value.renamed(names)

    def _rows(self, reads: Sequence[Sum]) -> set[int]:
        """Returns the labels that all readouts sum over."""
        found = [self.own & part.summed for value in reads for part in value.parts if part.carried is not None]
        if not found or any(own != found[0] for own in found) or not found[0]:
            raise Mismatch("the state is not summed over where it is read", advice=READOUT)
        return set(found[0])

    def _outer(self, added: Sequence[Part], rows: set[int]) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
        """Returns the factors of keys and of values in what is added to the state."""
        if len(added) > 1 or (added and added[0].summed):
            raise Mismatch("what is added to the state is no product", advice=STATE)
        factors = added[0].factors if added else ()
        return _divided(factors, rows)

    def _query(self, part: Part, rows: set[int]) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
        """Returns the factors that the state is summed with, and those of the sum."""
        if part.summed - rows:
            raise Mismatch("a readout sums over more than the state's rows", advice=READOUT)
        return _divided(part.factors, rows)

    def _check(
        self,
        reads: Sequence[tuple[Var, Sum]],
        by_rows: Sequence[Sequence[Value]],
        rows: set[int],
        columns: set[int],
        corrected: bool,
    ) -> None:
        extent = math.prod(self.found.labels.sizes[label] for label in rows)
        if extent < _LEAST and not corrected:  # a smaller one is no other recurrence, as it is where it is elementwise
            raise Mismatch("the state has few rows", advice=STATE)
        allowed = self.own - columns
        if any(set(factor.axes) - {None} - allowed for factors in by_rows for factor in factors):
            raise Mismatch("a query has an axis that the state lacks", advice=READOUT)
        left = self.own - rows
        for _, value in reads:
            if not left <= {label for label in value.axes if label is not None}:
                raise Mismatch("a readout sums over columns", advice=READOUT)

    def _term(self, coefficient: float, factors: Sequence[Value]) -> Term:
        own = (Factor(self.number[f.variable], f.axes, f.inverse, f.case) for f in factors)
        return Term(float(coefficient), tuple(own))

    def _readout(self, variable: Var, value: Sum, rows: set[int]) -> Readout:
        queries = []
        for part in value.parts:
            if part.carried is not None:
                query, further = self._query(part, rows)
                terms = self._term(1.0, query), self._term(part.coefficient, further)
                queries.append((not part.carried.after, *terms))
        others = tuple(self._term(p.coefficient, p.factors) for p in value.parts if p.carried is None)
        return Readout(self.number[variable], value.axes, tuple(queries), others)


def _divided(factors: Sequence[Value], rows: set[int]) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
    """Returns the factors with labels of rows, and the others."""
    first = tuple(factor for factor in factors if not rows.isdisjoint(factor.axes))
    return first, tuple(factor for factor in factors if factor not in first)
