"""Sums of terms, each a number times factors and perhaps a carried value: what a variable of a step is.

Dimensions have labels.  A factor is a variable that does not depend on a carried value, with a label for each of its
dimensions or None where it does not vary.  So a sum is a contraction in normal form, whatever its spelling.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from autopallas.compat import Var
from autopallas.graph.identities import Identity

__all__ = ["MOST_FACTORS", "MOST_TERMS", "Axes", "Carried", "Labels", "Part", "Sum", "Value", "identity_of", "sum_of"]

MOST_TERMS = 12
MOST_FACTORS = 16

Axes = tuple[int | None, ...]


class Labels:
    """Makes labels, and knows their sizes."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self._next = itertools.count()

    def new(self, size: int) -> int:
        label = next(self._next)
        self.sizes[label] = size
        return label

    def of_shape(self, shape: Iterable[int]) -> Axes:
        """Returns a label for each dimension; None for one of size 1."""
        return tuple(self.new(size) if size > 1 else None for size in shape)

    def fresh(self, value: Sum) -> Sum:
        """Returns a sum under other labels."""
        return value.renamed({label: self.new(self.sizes[label]) for label in value.labels()})


@dataclass(frozen=True, slots=True)
class Value:
    """A factor: a variable under labels, the inverse of one, or whether a selection's predicate has some value.

    One with a number as ``diagonal`` has two labels, and is that number where their indices are equal, and else 0.
    """

    variable: Var
    axes: Axes
    inverse: bool = False
    case: int | None = None
    diagonal: float | None = None


@dataclass(frozen=True, slots=True)
class Carried:
    """A carried value after some of the step's updates of it, or before all, under labels; ``rounded`` where it is cast
    to a narrower type."""

    place: int
    updates: int
    axes: Axes
    rounded: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """One term of a sum."""

    coefficient: float = 1.0
    factors: tuple[Value, ...] = ()
    carried: Carried | None = None
    summed: frozenset[int] = frozenset()

    def times(self, other: Part) -> Part:
        """Returns the product; at most one of the two has a carried value."""
        return Part(
            self.coefficient * other.coefficient,
            self.factors + other.factors,
            self.carried or other.carried,
            self.summed | other.summed,
        )

    def labels(self) -> set[int]:
        found = {label for factor in self.factors for label in factor.axes if label is not None} | self.summed
        if self.carried is not None:
            found.update(label for label in self.carried.axes if label is not None)
        return found

    def without_identities(self, sizes: Mapping[int, int]) -> Part:
        """Returns the term without the identity matrices of which it sums an axis: the other one stands for both."""
        part = self
        while True:
            found = next((f for f in part.factors if f.diagonal is not None and not _stays(f, part.summed)), None)
            if found is None:
                return part
            one, other = (label for label in found.axes if label is not None)
            gone, kept = (one, other) if one in part.summed else (other, one)
            factors = tuple(factor for factor in part.factors if factor is not found)
            assert found.diagonal is not None
            part = replace(part, coefficient=part.coefficient * found.diagonal, factors=factors)
            if gone != kept:
                part = replace(part, summed=part.summed - {gone}).renamed({gone: kept})
                continue
            if gone in part.summed and gone not in replace(part, summed=frozenset()).labels():
                part = replace(part, coefficient=part.coefficient * sizes[gone], summed=part.summed - {gone})

    def renamed(self, names: Mapping[int, int]) -> Part:
        def named(axes: Axes) -> Axes:
            return tuple(None if label is None else names.get(label, label) for label in axes)

        return Part(
            self.coefficient,
            tuple(replace(factor, axes=named(factor.axes)) for factor in self.factors),
            None if self.carried is None else replace(self.carried, axes=named(self.carried.axes)),
            frozenset(names.get(label, label) for label in self.summed),
        )


@dataclass(frozen=True, slots=True)
class Sum:
    """What a variable is: a sum of terms, with a label for each dimension, or None where it does not vary.

    A dimension may have a label that no term has: it repeats its values.
    """

    axes: Axes
    parts: tuple[Part, ...]

    @property
    def is_free(self) -> bool:
        """Whether no term has a carried value."""
        return all(part.carried is None for part in self.parts)

    @property
    def has_identity(self) -> bool:
        """Whether a factor of a term is an identity matrix."""
        return any(factor.diagonal is not None for part in self.parts for factor in part.factors)

    def labels(self) -> set[int]:
        found = {label for label in self.axes if label is not None}
        return found | self.labels_of_parts()

    def renamed(self, names: Mapping[int, int]) -> Sum:
        axes = tuple(None if label is None else names.get(label, label) for label in self.axes)
        return Sum(axes, tuple(part.renamed(names) for part in self.parts))

    def scaled(self, number: float) -> Sum:
        return Sum(self.axes, tuple(replace(part, coefficient=part.coefficient * number) for part in self.parts))

    @property
    def is_outer(self) -> bool:
        """Whether each term is a product of factors of which none varies along all dimensions."""
        whole = {label for label in self.axes if label is not None} & self.labels_of_parts()
        return all(
            part.carried is None
            and whole <= part.labels()
            and len(part.factors) > 1
            and not any(whole <= set(factor.axes) for factor in part.factors)
            for part in self.parts
        )

    def labels_of_parts(self) -> set[int]:
        return {label for part in self.parts for label in part.labels()}

    def varies(self) -> tuple[bool, ...]:
        """Whether it varies along each dimension."""
        used = self.labels_of_parts()
        return tuple(label is not None and label in used for label in self.axes)

    @staticmethod
    def aligned(first: Sum, second: Sum) -> tuple[Sum, Sum, Axes]:
        """Returns two sums of one shape under the same labels, and these."""
        names: dict[int, int] = {}
        count = max(len(first.axes), len(second.axes))
        a = first if first.axes else Sum((None,) * count, first.parts)
        b = second if second.axes else Sum((None,) * count, second.parts)
        axes: list[int | None] = []
        for one, other in zip(a.axes, b.axes, strict=True):
            if one is not None and other is not None:
                names[other] = one
            axes.append(other if one is None else one)
        return a, b.renamed(names), tuple(axes)


def _stays(factor: Value, summed: frozenset[int]) -> bool:
    """Returns whether neither axis of an identity matrix is summed over, and they are two."""
    one, other = (label for label in factor.axes if label is not None)
    return one != other and one not in summed and other not in summed


def sum_of(labels: Labels, variable: Var, varies: tuple[bool, ...] | None = None) -> Sum:
    """Returns a variable as its own factor."""
    axes = labels.of_shape(variable.aval.shape)
    own = axes if varies is None else tuple(a if v else None for a, v in zip(axes, varies, strict=True))
    return Sum(axes, (Part(factors=(Value(variable, own),)),))


def identity_of(labels: Labels, variable: Var, found: Identity) -> Sum:
    """Returns a variable that is an identity matrix as its own factor."""
    axes = labels.of_shape(variable.aval.shape)
    own = tuple(a if d in found.axes else None for d, a in enumerate(axes))
    return Sum(axes, (Part(factors=(Value(variable, own, diagonal=found.scale),)),))
