"""Describes a respelling as it stands in a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax

from autopallas.kernels.respelling.kinds import kind_named
from autopallas.kernels.respelling.operation import OPERATION
from autopallas.kernels.respelling.spec import RespellingSpec
from autopallas.sites.calls import Vmaps, under_vmaps, vjp_at
from autopallas.sites.operation import Kernel, Operation
from autopallas.sites.spec import BlockSizes

__all__ = ["RespellingSite"]


@dataclass(frozen=True)
class RespellingSite:
    """Equations that are written otherwise.

    Attributes:
      form: what they compute; under ``vmap``, of one example.
      axes: for each ``vmap`` around it, the innermost first: per operand 0 or None, and the size.
    """

    form: RespellingSpec
    axes: Vmaps = ()

    @property
    def operation(self) -> Operation:
        return OPERATION

    @property
    def spec(self) -> RespellingSpec:
        """Canonical description, which implementations and tables know."""
        examples = self.form.mapped
        for _, size in self.axes:
            examples *= size
        return replace(self.form, mapped=examples)

    @property
    def maps_alike(self) -> bool:
        """Whether what was measured of one example holds for many, so that ``vmap`` leaves the decision as it is."""
        return kind_named(self.form.kind).maps_alike

    @property
    def keeps_steps(self) -> bool:
        """Whether the same steps are computed in a loop of another form, so that sites within them may gain more."""
        return kind_named(self.form.kind).keeps_steps

    @property
    def has_backward(self) -> bool:
        """Whether the derivative is computed otherwise too.  Within a program the equations of a gradient are sites of
        their own; a gradient that is taken outside is the original's."""
        return False

    def residual_types(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return ()

    def forward(
        self, kernel: Kernel, block_sizes: BlockSizes | None, operands: Sequence[jax.Array]
    ) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        """Returns (the program's results, no residuals)."""

        def one(*given: jax.Array) -> tuple[jax.Array, ...]:
            return tuple(kernel.forward(self.form, block_sizes, given))

        found: tuple[jax.Array, ...] = under_vmaps(one, self.axes)(*operands)
        return found, ()

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
        """Returns the cotangents of the operands at the positions ``active``, by JAX's derivative."""
        _, pull = vjp_at(lambda operands: self.forward(kernel, block_sizes, operands)[0], operands, active)
        return tuple(pull(tuple(cotangents)))

    def batched(self, axes: Sequence[int | None], size: int) -> RespellingSite:
        """Returns the site under vmap: operands with an axis have it in front, and so has each result."""
        return replace(self, axes=(*self.axes, (tuple(axes), size)))
