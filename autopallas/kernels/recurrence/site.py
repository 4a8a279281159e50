"""Describes a recurrence as it stands in a program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import jax

from autopallas.kernels.recurrence.loop import Loop
from autopallas.kernels.recurrence.operation import OPERATION
from autopallas.kernels.recurrence.spec import RecurrenceSpec
from autopallas.kernels.recurrence.structure import Known, MatrixState
from autopallas.sites.calls import Vmaps, under_vmaps
from autopallas.sites.operation import Kernel, Operation
from autopallas.sites.spec import BlockSizes

__all__ = ["RecurrenceSite"]

_Pull: TypeAlias = Callable[[Sequence[jax.Array], Sequence[jax.Array]], tuple[jax.Array, ...]]


@dataclass(frozen=True)
class RecurrenceSite:
    """A loop whose carried values are affine in themselves.

    Attributes:
      loop: the loop.
      form: the description for implementations and tables; under ``vmap``, of one example.
      states: the carried matrices.
      known: the other carried values, in the order in which they can be computed.
      sizes: (label, size) of each label.
      results: which of the last carried values and stacked results the program needs, or makes its results of.
      mapped: the axes of each ``vmap`` around it, the innermost first: per operand, 0 or None, and the size.
    """

    loop: Loop
    form: RecurrenceSpec
    states: tuple[MatrixState, ...]
    known: tuple[Known, ...]
    sizes: tuple[tuple[int, int], ...]
    results: tuple[int, ...]
    mapped: Vmaps = ()

    @property
    def operation(self) -> Operation:
        return OPERATION

    @property
    def has_backward(self) -> bool:
        return True

    @property
    def spec(self) -> RecurrenceSpec:
        """Canonical description, which implementations and tables know."""
        groups = self.form.groups
        for _, size in self.mapped:
            groups *= size
        return replace(self.form, groups=groups)

    def chosen(self, operands: Sequence[jax.Array], found: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the site's results of all that the loop gives."""
        return self.loop.finished(operands, [found[place] for place in self.results])

    def forward(
        self, kernel: Kernel, block_sizes: BlockSizes | None, operands: Sequence[jax.Array]
    ) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        """Returns (the program's results, no residuals)."""

        def one(*given: jax.Array) -> tuple[jax.Array, ...]:
            return tuple(self.chosen(given, kernel.forward(self, block_sizes, given)))

        found: tuple[jax.Array, ...] = under_vmaps(one, self.mapped)(*operands)
        return found, ()

    def residual_types(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns no types: the backward computes the states of chunks again."""
        return ()

    def backward(
        self,
        kernel: Kernel,
        block_sizes: BlockSizes | None,
        operands: Sequence[jax.Array],
        results: Sequence[jax.Array],
        residuals: Sequence[jax.Array],
        cotangents: Sequence[jax.Array],
        active: Sequence[int],
    ) -> tuple[jax.Array, ...]:
        """Returns the cotangents of the operands at the positions ``active``, summed over the axes of ``vmap`` that an
        operand lacks."""

        def one(given: Sequence[jax.Array], cotangents: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
            found: tuple[jax.Array, ...] = kernel.backward(self, block_sizes, given, cotangents, active)
            return found

        pull: _Pull = one
        for axes, size in self.mapped:
            pull = _mapped(pull, axes, size, active)
        return pull(list(operands), list(cotangents))

    def batched(self, axes: Sequence[int | None], size: int) -> RecurrenceSite:
        """Returns the site under vmap: operands with an axis have it in front, and so has each result."""
        return replace(self, mapped=(*self.mapped, (tuple(axes), size)))


def _mapped(one: _Pull, axes: Sequence[int | None], size: int, active: Sequence[int]) -> _Pull:
    """Returns a backward under vmap."""

    def pull(given: Sequence[jax.Array], cotangents: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        found = jax.vmap(one, in_axes=(list(axes), 0), axis_size=size)(given, cotangents)
        return tuple(x if axes[i] is not None else x.sum(0) for i, x in zip(active, found, strict=True))

    return pull
