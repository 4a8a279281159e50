"""Reads products of two arrays: their precision, as convolutions have it too, and the axes of a ``dot_general``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias, cast

from jax import lax

from autopallas.compat import JaxprEqn
from autopallas.kernels.respelling.spec import RespellingSpec

__all__ = ["Axes", "Contraction", "Pair", "has_usual_precision", "numbers_in"]

Axes: TypeAlias = tuple[int, ...]
Pair: TypeAlias = tuple[Axes, Axes]
"""Axes of both operands."""


def has_usual_precision(equation: JaxprEqn) -> bool:
    """Returns whether a product or a convolution asks for no precision or algorithm."""
    return equation.params["precision"] in (None, (lax.Precision.DEFAULT,) * 2)


def numbers_in(spec: RespellingSpec) -> tuple[Pair, Pair]:
    """Returns the dimension numbers of a ``dot_general`` from the parameters "summed" and "batch" of a spec."""
    return cast("tuple[Pair, Pair]", (spec["summed"], spec["batch"]))


@dataclass(frozen=True, slots=True)
class Contraction:
    """A product of two arrays, summed along axes: one of matrices, or many of them.

    Attributes:
      shapes: of both operands.
      summed, batch, free: for each operand its axes that are contracted, shared, and its own.

    Example:
      >>> found = Contraction.of([(8, 2, 3), (8, 3, 5)], (((2,), (1,)), ((0,), (0,))))
      >>> found.count, found.rows, found.terms, found.columns
      (8, 2, 3, 5)
    """

    shapes: Pair
    summed: Pair
    batch: Pair
    free: Pair

    @classmethod
    def of(cls, shapes: Sequence[Sequence[int]], numbers: Sequence[Sequence[Sequence[int]]]) -> Self:
        """Returns the product of operands of these shapes with a ``dot_general``'s dimension numbers."""
        summed, batch = (_pair(pair) for pair in numbers)
        free = [
            [axis for axis in range(len(shape)) if axis not in (*s, *b)]
            for shape, s, b in zip(shapes, summed, batch, strict=True)
        ]
        return cls(_pair(shapes), summed, batch, _pair(free))

    @classmethod
    def in_spec(cls, spec: RespellingSpec) -> Self:
        """Returns the product of a spec's operands."""
        return cls.of([shape for shape, _ in spec.operands], numbers_in(spec))

    def sizes(self, axes: Pair, which: int = 0) -> Axes:
        """Returns the sizes of axes of one operand."""
        return tuple(self.shapes[which][axis] for axis in axes[which])

    @property
    def count(self) -> int:
        """Number of products, all shared axes together."""
        return math.prod(self.sizes(self.batch))

    @property
    def rows(self) -> int:
        """Number of rows of one product."""
        return math.prod(self.sizes(self.free))

    @property
    def terms(self) -> int:
        """Number of terms of each sum."""
        return math.prod(self.sizes(self.summed))

    @property
    def columns(self) -> int:
        """Number of columns of one product."""
        return math.prod(self.sizes(self.free, 1))

    @property
    def work(self) -> int:
        """Number of multiplications of one product."""
        return self.rows * self.terms * self.columns


def _pair(both: Sequence[Sequence[int]]) -> Pair:
    first, second = both
    return tuple(map(int, first)), tuple(map(int, second))
