"""A grouped matmul as it stands in a program: index notation for its operands, around the canonical kernel.

This is the thin boundary at which the program's layouts become the kernels' canonical shapes and back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import jax
import jax.numpy as jnp

from autopallas.compat import Dtype
from autopallas.kernels.grouped_matmul.operands import Operands
from autopallas.kernels.grouped_matmul.operation import OPERATION
from autopallas.kernels.grouped_matmul.spec import GroupedMatmulSpec, Use
from autopallas.sites.calls import vjp_at
from autopallas.sites.elementwise import ElementwiseProgram
from autopallas.sites.index_notation import Label, Labels, Operand, View, read, write
from autopallas.sites.indexed_site import IndexedSite
from autopallas.sites.operation import Kernel, Operation
from autopallas.sites.spec import BlockSizes

__all__ = ["GroupedMatmulSite"]


@dataclass(frozen=True)
class GroupedMatmulSite(IndexedSite):
    """One grouped matmul of a program.

    Attributes:
      use: what is computed from what: see :class:`GroupedMatmulSpec`.
      sizes: size of each label.
      first, second, group_sizes: how the operands are read.
      row_labels, contracting_labels, column_labels, group_labels: those of M, K, N and G.
      batch_labels: all others.
      result: the view of the result.
      types: dtypes of the operands.
      result_dtype: of the product.
      epilogue: what becomes of each of its elements.
      saves_product: whether the product is handed to the backward, which asks for it only where there is an epilogue.
    """

    use: Use
    sizes: tuple[int, ...]
    first: Operand
    second: Operand
    group_sizes: Operand
    row_labels: Labels
    contracting_labels: Labels
    column_labels: Labels
    group_labels: Labels
    batch_labels: Labels
    result: View
    types: tuple[Dtype, ...]
    result_dtype: Dtype
    precision: str | None = None
    assume_finite: bool = True
    epilogue: ElementwiseProgram | None = None
    saves_product: bool = False

    @property
    def operation(self) -> Operation:
        return OPERATION

    @cached_property
    def spec(self) -> GroupedMatmulSpec:
        """The canonical description, which kernels and tables know."""
        return GroupedMatmulSpec(
            use=self.use,
            batch=self.extent(self.batch_labels),
            rows=self.extent(self.row_labels),
            groups=self.extent(self.group_labels),
            contracting=self.extent(self.contracting_labels),
            columns=self.extent(self.column_labels),
            first_dtype=self.types[self.first.position],
            second_dtype=self.types[self.second.position],
            result_dtype=self.result_dtype,
            precision=self.precision,
            assume_finite=self.assume_finite,
            epilogue=self.epilogue,
        )

    # ------------------------------------------------------------------ to canonical arrays and back

    @property
    def axes(self) -> tuple[tuple[Labels, ...], tuple[Labels, ...], tuple[Labels, ...]]:
        """The labels that make up each axis of first, second and the result."""
        b, m, k, n = self.batch_labels, self.row_labels, self.contracting_labels, self.column_labels
        lhs, rhs, out = (b, m, k), (b, self.group_labels, k, n), (b, m, n)
        return {"forward": (lhs, rhs, out), "dlhs": (out, rhs, lhs), "drhs": (lhs, out, rhs)}[self.use]

    def _canonical(self, operands: Sequence[jax.Array]) -> Operands:
        first, second, _ = self.axes
        return Operands(
            read(self.first, operands, self.sizes, first),
            read(self.second, operands, self.sizes, second),
            read(self.group_sizes, operands, self.sizes, (self.batch_labels, self._size_labels)),
        )

    @property
    def _size_labels(self) -> Labels:
        """Of the groups whose sizes are given."""
        return self.group_labels

    # ------------------------------------------------------------------ what the site primitive runs

    def forward(
        self, kernel: Kernel, block_sizes: BlockSizes | None, operands: Sequence[jax.Array]
    ) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        """(the program's result, and the product if it is saved)."""
        kernel = self.running(kernel)
        # A kernel without epilogues is given none.  Where the product is saved, it is computed, epilogue or not.
        fused = not self.saves_product and getattr(kernel, "EPILOGUES", False)
        spec = self.spec if fused else self.spec.product
        out = self._written(kernel.forward(spec, block_sizes, self._canonical(operands)))
        return ((out if fused else self.spec.finished(out),), (out,) if self.saves_product else ())

    def _written(self, out: jax.Array) -> jax.Array:
        return write(out, self.result, self.sizes, self.axes[2])

    @property
    def residuals(self) -> tuple[tuple[View, Dtype], ...]:
        """The product, for the derivative of the epilogue; the gradients themselves are products of the operands."""
        return ((self.result, self.result_dtype),) if self.saves_product else ()

    def with_residuals(self) -> GroupedMatmulSite:
        """The site where a backward follows: what a kernel applies its epilogue to is lost otherwise."""
        return self if self.epilogue is None else replace(self, saves_product=True)

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
        """Cotangents of the operands at the positions ``active``."""
        kernel, spec = self.running(kernel), self.spec

        def prepare(operands: Sequence[jax.Array]) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            first, second, sizes = self._canonical(operands)
            # An operand that all examples share has the sum of their gradients: the derivative of a broadcast.
            first, second = (jnp.broadcast_to(x, (spec.batch, *x.shape[1:])) for x in (first, second))
            return (first, second), sizes

        (first, second), pull, sizes = vjp_at(prepare, operands, active, has_aux=True)
        canonical, given = Operands(first, second, sizes), cotangents[0]
        if self.epilogue is not None:
            found = residuals or (self._written(kernel.forward(spec.product, block_sizes, canonical)),)
            (given,) = jax.vjp(spec.finished, found[0])[1](given)
        cotangent = read(Operand(0, self.result), (given,), self.sizes, self.axes[2])
        wanted = [self.first.position in active, self.second.position in active]
        gradients = kernel.backward(spec.product, block_sizes, canonical, cotangent, wanted)
        filled = tuple(
            jnp.zeros_like(x) if gradient is None else gradient
            for x, gradient in zip((first, second), gradients, strict=True)
        )
        return tuple(pull(filled))

    # ------------------------------------------------------------------ on several devices, and under vmap

    def shardable_labels(self) -> frozenset[Label]:
        """All but the rows, which belong to groups in their order, and the groups."""
        labels = frozenset((*self.batch_labels, *self.contracting_labels, *self.column_labels))
        if self.epilogue is not None:  # is not a sum of what it makes of parts of a sum
            labels &= {label for _, own in self.result for label in own}
        return labels

    def fields_under_vmap(self, axes: Sequence[int | None], label: Labels) -> Mapping[str, object]:
        """One more axis of the batch."""
        return {"batch_labels": (*label, *self.batch_labels)}
