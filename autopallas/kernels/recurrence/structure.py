"""Describes what the step of a loop does with the values that it carries.

Variables of the step are numbered: its inputs first, in order, then the results of its equations.  A label stands for
an axis of a state, or for one over which a sum runs; sites hold the size of each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = [
    "MOST_SUBSTEPS", "Axes", "Correction", "Factor", "Known", "Labels", "MatrixState", "Query", "Readout", "Term",
    "Update",
]  # fmt: skip

MOST_SUBSTEPS = 16
"""Most products that a step adds to a state, and most rows that one readout reads it along."""

Labels: TypeAlias = tuple[int, ...]
Axes: TypeAlias = tuple[int | None, ...]
"""A label for each dimension; None for one along which nothing varies, read at its first index."""


@dataclass(frozen=True, slots=True)
class Factor:
    """A variable of the step that does not depend on the state, under labels.

    Attributes:
      variable: its number.
      axes: the label of each of its dimensions.
      inverse: whether it divides.
      case: for the predicate of a selection, the value for which the factor is 1, and else 0.
    """

    variable: int
    axes: Axes
    inverse: bool = False
    case: int | None = None

    @property
    def labels(self) -> frozenset[int]:
        return frozenset(label for label in self.axes if label is not None)


@dataclass(frozen=True, slots=True)
class Term:
    """A number times factors, summed over the labels that the result lacks."""

    coefficient: float
    factors: tuple[Factor, ...] = ()

    @property
    def labels(self) -> frozenset[int]:
        return frozenset(label for factor in self.factors for label in factor.labels)


@dataclass(frozen=True, slots=True)
class Query:
    """A sum over a state's rows of a query times the state.

    Attributes:
      updates: after how many of the step's updates the state is read; 0 before the step.
      query: the query.
      factor: what the sum is multiplied by.
      over: labels of the query that the state lacks: it is read along a row for each of their indices.
    """

    updates: int
    query: Term
    factor: Term
    over: Labels = ()

    def terms(self) -> list[Term]:
        """Returns all of its terms."""
        return [self.query, self.factor]


@dataclass(frozen=True, slots=True)
class Readout:
    """A variable of the step that is a sum over a state's rows, and of what does not depend on the state.

    Attributes:
      variable: its number.
      axes: the label of each of its dimensions; columns and heads of the state have the state's.
      queries: what is read of the state.
      others: the terms without the state.
    """

    variable: int
    axes: Axes
    queries: tuple[Query, ...]
    others: tuple[Term, ...]

    def terms(self) -> list[Term]:
        """Returns all of its terms."""
        return [*(term for query in self.queries for term in query.terms()), *self.others]


@dataclass(frozen=True, slots=True)
class Correction:
    """What a step adds to a state of what it reads of it, by the delta rule: ``write (x) (probe . S)`` times a sum.

    Attributes:
      probe, write: products of factors with the labels of the state's rows; ``write`` is None where it is the key.
      factors: terms, which add up to what this is multiplied by.
    """

    probe: Term
    write: Term | None
    factors: tuple[Term, ...]

    def terms(self) -> list[Term]:
        """Returns all of its terms."""
        return [self.probe, *([] if self.write is None else [self.write]), *self.factors]


@dataclass(frozen=True, slots=True)
class Update:
    """What a step, or a part of it, makes of a state: decay times the state, plus keys times values.

    Attributes:
      decay: terms, which add up to the decay.
      key: what is added is a product of this and the value.
      value: terms, which add up to the value; none where nothing is added.
      over: labels of keys and values that the state lacks, over which their products are summed.
      correction: what is added of the state itself, along one row; None where nothing is.
    """

    decay: tuple[Term, ...]
    key: Term
    value: tuple[Term, ...]
    over: Labels = ()
    correction: Correction | None = None

    def terms(self) -> list[Term]:
        """Returns all of its terms."""
        return [*self.decay, self.key, *self.value, *([] if self.correction is None else self.correction.terms())]

    def substeps(self, sizes: Mapping[int, int]) -> int:
        """Returns how many products it adds one after the other."""
        return math.prod(sizes[label] for label in self.over)


@dataclass(frozen=True, slots=True)
class MatrixState:
    """A carried matrix, and what a step makes of it.

    Attributes:
      carry: its place among what the loop carries.
      axes: the label of each of its dimensions.
      groups, heads, rows, columns: the labels of G, H, N and P.
      updates: what a step makes of it, one update after the other.
      readouts: what the step reads of it.
    """

    carry: int
    axes: Axes
    groups: Labels
    heads: Labels
    rows: Labels
    columns: Labels
    updates: tuple[Update, ...]
    readouts: tuple[Readout, ...]

    @property
    def by_channel(self) -> bool:
        """Whether rows have their own decays."""
        return any(term.labels & set(self.rows) for update in self.updates for term in update.decay)

    @property
    def is_corrected(self) -> bool:
        """Whether an update adds to the state what it reads of it."""
        return any(update.correction is not None for update in self.updates)

    def terms(self) -> list[Term]:
        """Returns all terms of its updates and readouts."""
        return [t for own in self.updates for t in own.terms()] + [t for own in self.readouts for t in own.terms()]

    def substeps(self, sizes: Mapping[int, int]) -> int:
        """Returns how many products a step adds to it."""
        return sum(update.substeps(sizes) for update in self.updates)


@dataclass(frozen=True, slots=True)
class Known:
    """A carried value that is no state: its values in all steps are computed apart.

    Attributes:
      carry: its place among what the loop carries.
      kind: "constant", the same in all steps; "shifted", what the step before gave without reading it; "scanned", the
        result of a loop of its own; "last", read by no step, so that it is computed last.
    """

    carry: int
    kind: Literal["constant", "shifted", "scanned", "last"]
