"""Defines the steps that compute each row of a mixture of experts, and the program before them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import jax

from autopallas import compat
from autopallas.compat import ArrayFunction, ClosedJaxpr, Dtype
from autopallas.sites.elementwise import Constant, ElementwiseProgram
from autopallas.sites.index_notation import Labels, Operand, Reader

__all__ = ["Gathered", "Pointwise", "Prelude", "Product", "Reads", "Step"]


@dataclass(frozen=True, slots=True)
class Gathered(Reader):
    """An array at the row's token, at its expert, or at both: [R, ...] over its other ``labels``."""

    source: Operand
    labels: Labels


@dataclass(frozen=True, slots=True)
class Pointwise:
    """An elementwise program over the results of earlier steps, which are its side inputs."""

    program: ElementwiseProgram
    arguments: tuple[int, ...]
    labels: Labels

    @property
    def dtype(self) -> Dtype:
        return self.program.dtype

    @property
    def is_scaling(self) -> bool:
        """Whether the step multiplies each argument by a factor, as long as the others stay the same."""
        instructions = self.program.instructions
        return len(instructions) == 1 and instructions[0].primitive.name in ("mul", "neg", "convert_element_type")


@dataclass(frozen=True, slots=True)
class Product(Reader):
    """The result of an earlier step times the matrix of the row's expert, summed over ``inner``."""

    rows: int
    weights: Operand
    inner: Labels
    labels: Labels
    dtype: Dtype
    precision: str | None


Step: TypeAlias = Gathered | Pointwise | Product | Constant
Reads = (Gathered, Product)
"""Steps that read an array."""


@dataclass(frozen=True, slots=True)
class Prelude:
    """Computes the arrays that a site's steps read from its operands: the routing, unchanged from the program.

    Attributes:
      key: equal for equal programs, which jaxprs are not.
      jaxpr: the program.
      reads: per result, the operands that it depends on.
      mapped: the axes of each ``vmap`` around it, the innermost first: per operand, 0 or None.
      witness: the original with more results, where its products can be told: (its result, the arrays that the steps
        read, the products).
    """

    key: Hashable
    jaxpr: ClosedJaxpr | None = field(compare=False)
    reads: tuple[frozenset[int], ...]
    mapped: tuple[tuple[int | None, ...], ...] = ()
    witness: ClosedJaxpr | None = field(default=None, compare=False)

    @classmethod
    def nothing(cls, count: int) -> Prelude:
        """Returns the prelude of a site whose operands are the arrays themselves."""
        return cls(("nothing", count), None, tuple(frozenset((i,)) for i in range(count)))

    def __call__(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        if self.jaxpr is None:
            return list(operands)
        function: ArrayFunction = compat.jaxpr_as_fun(self.jaxpr)
        for axes in self.mapped:
            function = jax.vmap(function, in_axes=axes, out_axes=list(self.axes(axes)))
        return list(function(*operands))

    def axes(self, axes: Sequence[int | None]) -> tuple[int | None, ...]:
        """Returns, per result, 0 if it has the axis of a vmap in front, else None."""
        return tuple(0 if any(axes[i] is not None for i in reads) else None for reads in self.reads)
