"""A cross-entropy as it stands in a program: index notation for its operands, around the canonical kernel.

This is the thin boundary at which the program's layouts become the kernels' canonical shapes and back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from autopallas.compat import Dtype, PyTree
from autopallas.kernels.cross_entropy.operands import Gradients, Operands, Residuals, Results
from autopallas.kernels.cross_entropy.operation import OPERATION
from autopallas.kernels.cross_entropy.site_parts import HeadSource, Result, SideSource
from autopallas.kernels.cross_entropy.spec import CrossEntropySpec, Head, Product, SideArray, SideSpec, Statistic
from autopallas.sites.calls import mapped, vjp_at
from autopallas.sites.division import ShardableAxes
from autopallas.sites.elementwise import ElementwiseProgram, Index
from autopallas.sites.index_notation import Label, Labels, Operand, Positions, View, read, sources_in, write
from autopallas.sites.indexed_site import IndexedSite
from autopallas.sites.operation import Kernel, Operation
from autopallas.sites.spec import BlockSizes

__all__ = ["CrossEntropySite"]

S = TypeVar("S")


@dataclass(frozen=True)
class CrossEntropySite(IndexedSite):
    """One pass over the logits of a program: the forward's, or the backward's.

    Attributes:
      sizes: size of each label.
      rows, weight: how x and w are read from the operands.
      row_labels, vocabulary_labels, hidden_labels: those of N, V and D.
      residual: the dimensions of an array with one number per row, as the residuals are.
      batch_labels: labels under which everything is there anew, the weight or the products included.
      sides: the side inputs of the programs, in order.
      clipped: which of them are labels that are clipped to 0 .. V - 1 when they are read.
      types: dtypes of all operands.
      precision, doubled, rounded: as in the spec.
    """

    VIEWS: ClassVar[tuple[str, ...]] = ("residual",)

    sizes: tuple[int, ...]
    rows: Operand
    weight: Operand
    row_labels: Labels
    vocabulary_labels: Labels
    hidden_labels: Labels
    results: tuple[Result, ...]
    residual: View
    types: tuple[Dtype, ...]
    logit_dtype: Dtype
    statistics: tuple[Statistic, ...] = ()
    finish: tuple[ElementwiseProgram, ...] = ()
    products: tuple[Product, ...] = ()
    sides: tuple[SideSource, ...] = ()
    clipped: tuple[int, ...] = ()
    batch_labels: Labels = ()
    precision: str | None = None
    doubled: bool = False
    rounded: bool = False
    has_custom_rule: bool = False
    """Whether a custom rule of the program's stands inside: then the derivative is left to the original."""

    @property
    def operation(self) -> Operation:
        return OPERATION

    @property
    def has_backward(self) -> bool:
        """Whether kernels give its derivative.  That of a backward pass is left to the original."""
        return not self.products and not self.has_custom_rule

    def _varies(self, source: SideSource) -> tuple[bool, bool]:
        own = set(source.labels)
        return bool(own & set(self.row_labels)), bool(own & set(self.vocabulary_labels))

    @cached_property
    def spec(self) -> CrossEntropySpec:
        """The canonical description, which kernels and tables know."""
        return CrossEntropySpec(
            rows=self.extent(self.row_labels),
            hidden=self.extent(self.hidden_labels),
            vocabulary=self.extent(self.vocabulary_labels),
            row_dtype=self.types[self.rows.position],
            weight_dtype=self.types[self.weight.position],
            logit_dtype=self.logit_dtype,
            vocabulary_major=self._vocabulary_major(self.weight, self.hidden_labels),
            statistics=self.statistics,
            sides=tuple(map(self._side, self.sides)),
            finish=self.finish,
            products=self.products,
            precision=self.precision,
            doubled=self.doubled,
            rounded=self.rounded,
        )

    def _side(self, source: SideSource) -> SideSpec:
        varies = self._varies(source)
        if isinstance(source, HeadSource):
            types = (self.types[source.rows.position], self.types[source.weight.position])
            major = self._vocabulary_major(source.weight, source.hidden_labels)
            return SideSpec(source.dtype, varies, Head(self.extent(source.hidden_labels), *types, major))
        return SideSpec(source.dtype if isinstance(source, Positions) else self.types[source.position], varies)

    def _vocabulary_major(self, weight: Operand, hidden: Labels) -> bool:
        first = next((a for a in weight.labels if a in self.vocabulary_labels or a in hidden), None)
        return first in self.vocabulary_labels

    # ------------------------------------------------------------------ to canonical arrays and back

    @property
    def heads(self) -> tuple[HeadSource, ...]:
        """The logits' head, and further ones."""
        own = HeadSource(self.rows, self.weight, self.hidden_labels, self.logit_dtype)
        return (own, *(side for side in self.sides if isinstance(side, HeadSource)))

    def weight_groups(self, head: HeadSource) -> tuple[Labels, ...]:
        """Returns the labels of the two axes of a head's weight."""
        groups = (self.vocabulary_labels, head.hidden_labels)
        return groups if self._vocabulary_major(head.weight, head.hidden_labels) else groups[::-1]

    def _of_head(self, head: HeadSource, operands: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
        x = read(head.rows, operands, self.sizes, (self.batch_labels, self.row_labels, head.hidden_labels))
        shape = tuple(self.extent(labels) for labels in (self.batch_labels, self.row_labels, head.hidden_labels))
        groups = self.weight_groups(head)
        w = read(head.weight, operands, self.sizes, (self.batch_labels, *groups))
        return jnp.broadcast_to(x, shape), jnp.broadcast_to(w, (len(w), *map(self.extent, groups)))

    def _canonical(self, operands: Sequence[jax.Array]) -> Operands:
        """All arrays have an axis of the batch in front, which but for that of x may be of size 1."""
        x, w = self._of_head(self.heads[0], operands)
        groups = (self.batch_labels, self.row_labels, self.vocabulary_labels)
        sides: list[SideArray] = [
            self._of_head(side, operands) if isinstance(side, HeadSource) else read(side, operands, self.sizes, groups)
            for side in self.sides
        ]
        for position in self.clipped:
            labels = cast(jax.Array, sides[position])
            sides[position] = jnp.clip(labels, 0, min(self._greatest_label, int(jnp.iinfo(labels.dtype).max)))
        return Operands(x, w, tuple(sides))

    def _finish(self, statistics: Sequence[jax.Array], sides: Sequence[SideArray]) -> tuple[jax.Array, ...]:
        """The results that are numbers per row, from statistics [B, N] and sides [B|1, N|1, V|1]."""
        # No program of these reads the logits of a further head.
        environment = [*cast(Sequence[jax.Array], sides), *(s[..., None] for s in statistics)]
        query = jnp.arange(self.spec.rows, dtype=jnp.int32)[None, :, None]
        shape = (self.extent(self.batch_labels), self.spec.rows)
        found = []
        for result in self.results:
            if isinstance(result.source, ElementwiseProgram):
                value = result.source.evaluate(None, query, None, environment)
                value = jnp.broadcast_to(value, (*shape, 1))[..., 0].astype(result.dtype)
                found.append(self._shaped(value, result))
        return tuple(found)

    def _shaped(self, rows: jax.Array, result: Result) -> jax.Array:
        """From [B, N] to the result's dimensions; summed over the labels of rows and of the batch that it lacks."""
        own = {a for _, labels in result.view for a in labels}
        every = (*self.batch_labels, *self.row_labels)
        rows = rows.reshape([self.sizes[a] for a in every])
        gone = [i for i, a in enumerate(every) if a not in own]
        if gone:
            rows = rows.sum(gone, dtype=rows.dtype)
        return write(rows, result.view, self.sizes, ([a for a in every if a in own],))

    def _over_batch(self, product: jax.Array, result: Result) -> tuple[jax.Array, Labels]:
        """A product [B, ...] summed over the labels of the batch that the result lacks, and the labels that it has."""
        own = {a for _, labels in result.view for a in labels}
        gone = [i for i, a in enumerate(self.batch_labels) if a not in own]
        if not gone:
            return product, self.batch_labels
        split = product.reshape([self.sizes[a] for a in self.batch_labels] + list(product.shape[1:]))
        kept = tuple(a for a in self.batch_labels if a in own)
        return split.sum(gone).reshape(self.extent(kept), *product.shape[1:]), kept

    # ------------------------------------------------------------------ what the site primitive runs

    def forward(
        self, kernel: Kernel, block_sizes: BlockSizes | None, operands: Sequence[jax.Array]
    ) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        """(results, residuals): the residuals are the statistics."""
        kernel = self.running(kernel)
        canonical = self._canonical(operands)
        found = Results(())  # [B, N] each
        if self.statistics or self.products:
            found = mapped(lambda one: kernel.forward(self.spec, block_sizes, one), 1)(canonical)
        rows = iter(self._finish(found.statistics, canonical.sides))
        results = []
        for result in self.results:
            if isinstance(result.source, ElementwiseProgram):
                results.append(next(rows))
                continue
            head = self.heads[self.products[result.source].head]
            axes: tuple[Labels, ...] = {
                "rows": (self.row_labels, head.hidden_labels),
                "columns": self.weight_groups(head),
                "column_sum": (self.vocabulary_labels,),
                "values": (self.row_labels, self.vocabulary_labels),
            }[self.products[result.source].kind]
            product, kept = self._over_batch(found.products[result.source], result)
            results.append(write(product.astype(result.dtype), result.view, self.sizes, (kept, *axes)))
        groups = (self.batch_labels, self.row_labels)
        return tuple(results), tuple(write(s, self.residual, self.sizes, groups) for s in found.statistics)

    @property
    def residuals(self) -> tuple[tuple[View, Dtype], ...]:
        """The statistics."""
        wide, index = self.spec.accumulation_dtype, np.dtype(np.int32)
        return tuple((self.residual, index if s.kind == "argmax" else wide) for s in self.statistics)

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
        kernel = self.running(kernel)

        def prepare(operands: Sequence[jax.Array]) -> tuple[PyTree, tuple[SideArray, ...]]:
            """Returns what depends differentiably on the active operands; the rest is handed through beside it."""
            x, w, sides = self._canonical(operands)
            return (x, w, self._floating(sides)), sides

        (x, w, floating), pull, sides = vjp_at(prepare, operands, active, has_aux=True)
        groups = (self.batch_labels, self.row_labels)
        residuals = [read(Operand(0, self.residual), (r,), self.sizes, groups) for r in residuals]
        values = [r for s, r in zip(self.statistics, residuals, strict=True) if s.kind != "argmax"]

        def finish(values: Sequence[jax.Array], floating: Sequence[SideArray]) -> tuple[jax.Array, ...]:
            left, real = iter(values), iter(floating)
            pairs = zip(self.statistics, residuals, strict=True)
            statistics = [r if s.kind == "argmax" else next(left) for s, r in pairs]
            filled = [next(real) if s.differentiable else a for s, a in zip(self.spec.sides, sides, strict=True)]
            found = self._finish(statistics, filled)
            return tuple(f for f in found if jnp.issubdtype(f.dtype, jnp.floating))

        _, pull_finish = jax.vjp(finish, values, floating)
        dvalues, outside = pull_finish(tuple(ct for ct in cotangents if jnp.issubdtype(ct.dtype, jnp.floating)))
        dx, dw, dsides = jax.tree.map(jnp.zeros_like, (x, w, floating))
        if values:
            left = iter(dvalues)
            spread = [None if s.kind == "argmax" else next(left) for s in self.statistics]
            wanted = self._wanted(active)

            def run(one: Operands, residuals: Residuals, spread: Sequence[jax.Array | None]) -> Gradients:
                gradients: Gradients = kernel.backward(self.spec, block_sizes, one, residuals, spread, wanted)
                return gradients

            found: Gradients = mapped(run, 1)(Operands(x, w, sides), Residuals(tuple(residuals)), spread)
            dx = dx if found.x is None else found.x
            dw = dw if found.w is None else _summed(found.w, w)
            dsides = tuple(
                zero if d is None else jax.tree.map(_summed, d, zero)
                for zero, d in zip(dsides, self._floating(found.sides), strict=True)
            )
        return tuple(pull((dx, dw, jax.tree.map(lambda a, b: a + self._once(b), dsides, outside))))

    @property
    def _greatest_label(self) -> int:
        return self.spec.vocabulary - 1

    def _once(self, gradient: jax.Array) -> jax.Array:
        """Of what does not depend on the part of the vocabulary, the gradient."""
        return gradient

    def _floating(self, sides: Sequence[S]) -> tuple[S, ...]:
        return tuple(s for s, spec in zip(sides, self.spec.sides, strict=True) if spec.differentiable)

    def _wanted(self, active: Sequence[int]) -> tuple[bool, ...]:
        """Of (x, w, *sides), those that come from active operands."""
        reads = (sources_in(source) for source in (self.rows, self.weight, *self.sides))
        return tuple(any(isinstance(s, Operand) and s.position in active for s in own) for own in reads)

    @property
    def _counts_rows(self) -> bool:
        """Whether a program reads the number of its row."""
        programs = [*(s.program for s in self.statistics), *(p.program for p in self.products), *self.finish]
        programs += [r.source for r in self.results if isinstance(r.source, ElementwiseProgram)]
        return any(isinstance(i, Index) and i.axis == "query" for p in programs for i in p.inputs)

    # ------------------------------------------------------------------ on several devices, and under vmap

    @property
    def result_views(self) -> tuple[View, ...]:
        return tuple(result.view for result in self.results)

    def shardable_labels(self) -> frozenset[Label]:
        """Those of rows, and that of the vocabulary: the statistics of its parts are combined."""
        rows = () if self._counts_rows else self.row_labels
        vocabulary = self.vocabulary_labels if len(self.vocabulary_labels) == 1 else ()
        return frozenset((*self.batch_labels, *rows, *vocabulary))

    def shardable_axes(self) -> ShardableAxes:
        """A result that is a number per row is of the whole vocabulary."""
        whole = frozenset(self.vocabulary_labels)
        combined = (whole if isinstance(r.source, ElementwiseProgram) else frozenset[Label]() for r in self.results)
        return replace(super().shardable_axes(), combined=tuple(combined))

    def fields_under_vmap(self, axes: Sequence[int | None], label: Labels) -> Mapping[str, object]:
        """One more axis of rows where the examples share the weight, and rows are neither summed nor counted."""
        summed = any(p.kind != "rows" for p in self.products)
        weights = any(axes[head.weight.position] is not None for head in self.heads)
        apart = summed or self._counts_rows or bool(self.batch_labels) or weights
        field = "batch_labels" if apart else "row_labels"
        results = tuple(replace(r, view=((0, label), *r.view)) for r in self.results)
        return {field: (*label, *getattr(self, field)), "results": results}


def _summed(full: jax.Array, like: jax.Array) -> jax.Array:
    """Sums over the batch where ``like`` is shared by it."""
    return full if full.shape == like.shape else full.sum(0, keepdims=True).astype(like.dtype)
