"""Describes carried matrices: what a step makes of them, and what it reads of them along their rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import jax.numpy as jnp

from autopallas.compat import JaxprAtom, Var
from autopallas.kernels.recurrence.structure import (
    MOST_SUBSTEPS,
    Axes,
    Correction,
    Factor,
    Labels,
    MatrixState,
    Query,
    Readout,
    Term,
    Update,
)
from autopallas.patterns.advice import READOUT, STATE
from autopallas.patterns.match import Mismatch
from autopallas.patterns.recurrence.carries import Carries
from autopallas.patterns.recurrence.interpret import Interpretation, Opaque
from autopallas.patterns.recurrence.step import Step
from autopallas.patterns.recurrence.sums import Part, Sum, Value
from autopallas.patterns.recurrence.updates import Corrections, corrections, divided

__all__ = ["matrix_states"]

_LEAST = 8
"""Smallest number of rows and columns of a state that matrix products are for."""
_ROUNDS = 8
"""How often readouts are looked for further back."""


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


class _Matrix:
    """One state, as a matrix whose rows are summed over where it is read."""

    def __init__(self, step: Step, found: Interpretation, place: int, number: dict[Var, int]):
        self.found, self.place, self.number = found, place, number
        updates = [value for value in found.updates[place] if isinstance(value, Sum)]
        self.axes = updates[-1].axes
        self.updates = [_renamed(value, self.axes) for value in updates]
        self.own = frozenset(label for label in self.axes if label is not None)
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
        updates = [_Update.of(value, rows) for value in self.updates]
        queries = [
            self._query(p, value, rows).query for _, value in reads for p in value.parts if p.carried is not None
        ]
        corrected = [factors for update in updates for factors in update.correction.by_rows()]
        with_rows = _labels([f for factors in (*queries, *corrected) for f in factors])
        with_rows |= _labels([f for update in updates for product in update.products for f in product.key])
        columns = self.own - rows - with_rows
        columns -= _labels([f for update in updates for part in update.decay for f in part.factors])
        columns -= {label for update in updates for label in update.correction.of_heads()}
        groups = (self.own & with_rows) - rows
        heads = self.own - rows - groups - columns
        self._check(reads, [*queries, *corrected], rows, columns, any(update.correction.terms for update in updates))
        described = [self._described(update) for update in updates]
        first = [0, *accumulate(map(len, described))]
        whole = tuple(update for own in described for update in own)
        count = sum(update.substeps(self.found.labels.sizes) for update in whole)
        if count > len(updates) and not columns:
            raise Mismatch("what is added to the state is no product", advice=STATE)
        if count > MOST_SUBSTEPS:
            raise Mismatch(f"a step adds {count} products to the state", advice=STATE)
        order = [label for label in self.axes if label is not None]

        def sorted_labels(labels: frozenset[int]) -> Labels:
            return tuple(label for label in order if label in labels)

        return MatrixState(
            carry=self.place,
            axes=self.axes,
            groups=sorted_labels(groups),
            heads=sorted_labels(heads),
            rows=sorted_labels(rows),
            columns=sorted_labels(columns),
            updates=whole,
            readouts=tuple(self._readout(variable, value, rows, first) for variable, value in reads),
        )

    def _in_own_labels(self, value: Sum) -> Sum:
        """Returns a readout in which the state has the labels that it has in its last update."""
        names: dict[int, int] = {}
        for part in value.parts:
            if part.carried is None:
                continue
            for label, own in zip(part.carried.axes, self.axes, strict=True):
                if label is not None and own is not None and names.setdefault(label, own) != own:
                    raise Mismatch("a sum reads the state twice, with axes in another order", advice=READOUT)
        if len(set(names.values())) != len(names):
            raise Mismatch("terms of a sum read the state along different axes", advice=READOUT)
        return value.renamed(names)

    def _rows(self, reads: Sequence[Sum]) -> frozenset[int]:
        """Returns the labels that all readouts sum over."""
        found = [part.summed & self.own for value in reads for part in value.parts if part.carried is not None]
        if not found or any(own != found[0] for own in found) or not found[0]:
            raise Mismatch("the state is not summed over where it is read", advice=READOUT)
        return found[0]

    def _query(self, part: Part, value: Sum, rows: frozenset[int]) -> _Query:
        """Returns the factors that the state is summed with, those of the sum, and labels of further rows that it reads
        the state along."""
        if (part.summed & self.own) - rows:
            raise Mismatch("a readout sums over more than the state's rows", advice=READOUT)
        query, further = divided(part.factors, rows)
        inner = part.summed - self.own
        while joined := [f for f in further if not inner.isdisjoint(_labels(query)) and _labels([f]) & inner]:
            query += tuple(joined)
            further = tuple(f for f in further if f not in joined)
        over = _labels(query) - self.own - part.summed
        sizes = self.found.labels.sizes
        if not over <= set(value.axes) or math.prod(sizes[label] for label in over) > MOST_SUBSTEPS:
            raise Mismatch("a query has an axis that the state lacks", advice=READOUT)
        return _Query(query, further, tuple(a for a in value.axes if a in over and a is not None))

    def _check(
        self,
        reads: Sequence[tuple[Var, Sum]],
        by_rows: Sequence[Sequence[Value]],
        rows: frozenset[int],
        columns: frozenset[int],
        corrected: bool,
    ) -> None:
        extent = math.prod(self.found.labels.sizes[label] for label in rows)
        if extent < _LEAST and not corrected:  # a smaller one is no other recurrence, as it is where it is elementwise
            raise Mismatch("the state has few rows", advice=STATE)
        if any(_labels(factors) & columns for factors in by_rows):
            raise Mismatch("a query has an axis that the state lacks", advice=READOUT)
        left = self.own - rows
        for _, value in reads:
            if not left <= set(value.axes):
                raise Mismatch("a readout sums over columns", advice=READOUT)

    def _described(self, update: _Update) -> list[Update]:
        """Returns an update as one or more, each of which adds one product."""
        decay = tuple(self._term(part.coefficient, part.factors) for part in update.decay)
        found = update.correction
        products = update.products
        if not products:
            products = [_Product(found.write)]
        first = next(
            (p for p in products if found.terms and not p.over and Counter(p.key) == Counter(found.write)), None
        )
        if first is None:
            first = next((p for p in products if not p.over), products[0])
        correction = None
        if found.terms:
            write = None if Counter(first.key) == Counter(found.write) else self._term(1.0, found.write)
            terms = tuple(self._term(c, own) for c, own in found.terms)
            correction = Correction(self._term(1.0, found.probe), write, terms)
        described = [self._added(decay, first, correction)]
        return described + [self._added((Term(1.0),), own, None) for own in products if own is not first]

    def _added(self, decay: tuple[Term, ...], product: _Product, correction: Correction | None) -> Update:
        values = tuple(self._term(c, own) for c, own in product.values)
        return Update(decay, self._term(1.0, product.key), values, tuple(sorted(product.over)), correction)

    def _term(self, coefficient: float, factors: Sequence[Value]) -> Term:
        own = (Factor(self.number[f.variable], f.axes, f.inverse, f.case) for f in factors)
        return Term(float(coefficient), tuple(own))

    def _readout(self, variable: Var, value: Sum, rows: frozenset[int], first: Sequence[int]) -> Readout:
        queries = []
        for part in value.parts:
            if part.carried is not None:
                own = self._query(part, value, rows)
                terms = self._term(1.0, own.query), self._term(part.coefficient, own.factor)
                queries.append(Query(first[part.carried.updates], *terms, own.over))
        others = tuple(self._term(p.coefficient, p.factors) for p in value.parts if p.carried is None)
        return Readout(self.number[variable], value.axes, tuple(queries), others)


class _Query(NamedTuple):
    """What a readout sums a state with, what that is multiplied by, and labels of further rows that it reads."""

    query: tuple[Value, ...]
    factor: tuple[Value, ...]
    over: Labels


@dataclass(slots=True)
class _Product:
    """An outer product that is added to a state: the factors of keys, coefficient and factors of each term of the
    values, and the labels over which such products are summed."""

    key: tuple[Value, ...]
    values: list[tuple[float, tuple[Value, ...]]] = field(default_factory=list)
    over: frozenset[int] = frozenset()


@dataclass(slots=True)
class _Update:
    """An update in parts: what the state is multiplied by, what is added to it, and what it is corrected by."""

    decay: list[Part]
    products: list[_Product]
    correction: Corrections

    @staticmethod
    def of(value: Sum, rows: frozenset[int]) -> _Update:
        """Returns the parts of an update.

        Raises:
          Mismatch: the state is corrected along other axes than its rows.
        """
        found = corrections(value)
        if found.terms and found.rows != rows:
            raise Mismatch("the state is corrected along other axes than it is read along", advice=STATE)
        products: list[_Product] = []
        for part in value.parts:
            if part.carried is None and part.coefficient:
                key, other = divided(part.factors, rows)
                over = part.summed & _labels(key) & _labels(other)
                same = (p for p in products if not p.over and Counter(p.key) == Counter(key))
                own = None if over else next(same, None)
                if own is None:
                    own = _Product(key, over=over)
                    products.append(own)
                own.values.append((part.coefficient, other))
        decay = [part for part in value.parts if part.carried is not None and not part.summed]
        return _Update(decay, products, found)


def _renamed(value: Sum, axes: Axes) -> Sum:
    """Returns an update under the labels that the state has after the last one."""
    return value.renamed({a: b for a, b in zip(value.axes, axes, strict=True) if a is not None and b is not None})


def _labels(factors: Sequence[Value]) -> frozenset[int]:
    return frozenset(label for factor in factors for label in factor.axes if label is not None)
