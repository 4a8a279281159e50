"""Describes what the step of a loop does with the values that it carries.

Variables of the step are numbered: its inputs first, in order, then the results of its equations.  A label stands for
an axis of a state, or for one over which a sum runs; sites hold the size of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["Axes", "Correction", "Factor", "Known", "Labels", "MatrixState", "Readout", "Term"]

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
class Readout:
    """A variable of the step that is a sum over a state's rows, and of what does not depend on the state.

    Attributes:
      variable: its number.
      axes: the label of each of its dimensions; columns and heads of the state have the state's.
      queries: (whether it reads the state before the step, the query, further factors of the sum): what is summed over
        the rows is the query times the state.
      others: the terms without the state.
    """

    variable: int
    axes: Axes
    queries: tuple[tuple[bool, Term, Term], ...]
    others: tuple[Term, ...]


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
class MatrixState:
    """A carried matrix: decay times itself plus keys times values.

    Attributes:
      carry: its place among what the loop carries.
      axes: the label of each of its dimensions.
      groups, heads, rows, columns: the labels of G, H, N and P.
      decay: terms, which add up to the decay.
      key, value: what is added; nothing where both are missing.
      readouts: what the step reads of it.
      correction: what is added of the state itself, along one row; None where nothing is.
    """

    carry: int
    axes: Axes
    groups: Labels
    heads: Labels
    rows: Labels
    columns: Labels
    decay: tuple[Term, ...]
    key: Term
    value: Term
    readouts: tuple[Readout, ...]
    correction: Correction | None = None

    @property
    def by_channel(self) -> bool:
        """Whether rows have their own decays."""
        return any(term.labels & set(self.rows) for term in self.decay)


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
