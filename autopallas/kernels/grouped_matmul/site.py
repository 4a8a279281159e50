"""A grouped matmul as it stands in a program: index notation for its operands, around the canonical kernel.

This is the thin boundary at which the program's layouts become the kernels' canonical shapes and back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from autopallas.compat import Dtype
from autopallas.kernels.grouped_matmul.operands import Operands
from autopallas.kernels.grouped_matmul.operation import OPERATION
from autopallas.kernels.grouped_matmul.spec import GroupedMatmulSpec, Use
from autopallas.numerics.casts import is_quantised
from autopallas.sites.calls import vjp_at
from autopallas.sites.elementwise import ElementwiseProgram
from autopallas.sites.index_notation import Label, Labels, Operand, View, read, write
from autopallas.sites.indexed_site import IndexedSite
from autopallas.sites.operation import Kernel, Operation
from autopallas.sites.spec import BlockSizes

__all__ = ["GroupedMatmulSite"]


def _multiplied(dtype: Dtype, other: Dtype) -> Dtype:
    """In which dtype an operand is multiplied: that of the other one, or bfloat16, if it has floats of 8 bits, all of
    which these hold."""
    if not is_quantised(dtype):
        return dtype
    return np.dtype(jnp.bfloat16) if is_quantised(other) else other


def _widened(spec: GroupedMatmulSpec, operands: Operands) -> Operands:
    """The operands with weights as they are multiplied, as the program makes them."""
    return operands._replace(second=spec.widen(operands.second, operands.scales), scales=())


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
      widening: what becomes of each weight before it is multiplied, of weights that the program stores in 8 bits: a
        program over the weight, its score, and scales, its side inputs.
      scales: how those are read.
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
    widening: ElementwiseProgram | None = None
    scales: tuple[Operand, ...] = ()

    @property
    def operation(self) -> Operation:
        return OPERATION

    @cached_property
    def spec(self) -> GroupedMatmulSpec:
        """The canonical description, which kernels and tables know."""
        first, second = self.types[self.first.position], self.types[self.second.position]
        if self.widening is not None:
            second = self.widening.dtype
        return GroupedMatmulSpec(
            use=self.use,
            batch=self.extent(self.batch_labels),
            rows=self.extent(self.row_labels),
            groups=self.extent(self.group_labels),
            contracting=self.extent(self.contracting_labels),
            columns=self.extent(self.column_labels),
            first_dtype=_multiplied(first, second),
            second_dtype=_multiplied(second, first),
            result_dtype=self.result_dtype,
            precision=self.precision,
            assume_finite=self.assume_finite,
            epilogue=self.epilogue,
            widening=self.widening,
            scales=tuple(self._numbers(scale) for scale in self.scales),
        )

    def _numbers(self, scale: Operand) -> tuple[int, int, int]:
        """How many numbers a scale has along G, K and N."""
        _, *sides = self._sides(scale)
        own = set(scale.labels)
        g, k, n = (1 if own.isdisjoint(labels) else self.extent(labels) for labels in sides)
        return g, k, n

    def _sides(self, scale: Operand) -> tuple[Labels, Labels, Labels, Labels]:
        """The labels of B, G, K and N along which a scale is read: of K and N the first ones, if it has these alone."""

        def along(labels: Labels) -> Labels:
            present = tuple(label for label in labels if label in scale.labels)
            return present if present and present == labels[: len(present)] else labels

        return self.batch_labels, self.group_labels, along(self.contracting_labels), along(self.column_labels)

    # ------------------------------------------------------------------ to canonical arrays and back

    @property
    def axes(self) -> tuple[tuple[Labels, ...], tuple[Labels, ...], tuple[Labels, ...]]:
        """The labels that make up each axis of first, second and the result."""
        b, m, k, n = self.batch_labels, self.row_labels, self.contracting_labels, self.column_labels
        lhs, rhs, out = (b, m, k), (b, self.group_labels, k, n), (b, m, n)
        return {"forward": (lhs, rhs, out), "dlhs": (out, rhs, lhs), "drhs": (lhs, out, rhs)}[self.use]

    def _canonical(self, operands: Sequence[jax.Array]) -> Operands:
        """The operands of kernels: in the dtypes in which they are multiplied, or weights as they are stored."""
        spec, (first, second, _) = self.spec, self.axes
        weights = read(self.second, operands, self.sizes, second)
        return Operands(
            read(self.first, operands, self.sizes, first).astype(spec.first_dtype),
            weights if spec.widening is not None else weights.astype(spec.second_dtype),
            read(self.group_sizes, operands, self.sizes, (self.batch_labels, self._size_labels)),
            tuple(read(scale, operands, self.sizes, self._sides(scale)) for scale in self.scales),
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
        spec, canonical = self.spec if fused else self.spec.product, self._canonical(operands)
        if spec.widening is not None and not getattr(kernel, "WIDENS", False):
            spec, canonical = spec.widened, _widened(spec, canonical)
        out = self._written(kernel.forward(spec, block_sizes, canonical))
        return ((out if fused else self.spec.finished(out),), (out,) if self.saves_product else ())

    def _written(self, out: jax.Array) -> jax.Array:
        return write(out, self.result, self.sizes, self.axes[2])

    @property
    def residuals(self) -> tuple[tuple[View, Dtype], ...]:
        """The product, for the derivative of the epilogue; the gradients themselves are products of the operands."""
        return ((self.result, self.result_dtype),) if self.saves_product else ()

    def with_residuals(self) -> GroupedMatmulSite:
        """Returns the site where a backward follows: what a kernel applies its epilogue to is lost otherwise."""
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
        weights = {self.second.position, *(scale.position for scale in self.scales)}
        if not getattr(kernel, "WIDENS", False) or not weights.isdisjoint(active):
            spec = spec.widened  # gradients are those of what is multiplied, for what the program makes it of

        def prepare(operands: Sequence[jax.Array]) -> tuple[tuple[jax.Array, jax.Array], Operands]:
            canonical = self._canonical(operands)
            if spec.widening is None:
                canonical = _widened(self.spec, canonical)
            # An operand that all examples share has the sum of their gradients: the derivative of a broadcast.
            first, second = (jnp.broadcast_to(x, (spec.batch, *x.shape[1:])) for x in canonical[:2])
            return (first, second), canonical

        (first, second), pull, canonical = vjp_at(prepare, operands, active, has_aux=True)
        canonical, given = canonical._replace(first=first, second=second), cotangents[0]
        if self.epilogue is not None:
            found = residuals or (self._written(kernel.forward(spec.product, block_sizes, canonical)),)
            (given,) = jax.vjp(spec.finished, found[0])[1](given)
        cotangent = read(Operand(0, self.result), (given,), self.sizes, self.axes[2])
        wanted = [self.first.position in active, not weights.isdisjoint(active)]
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
