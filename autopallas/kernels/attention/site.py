"""Describes an attention at its place in a program, by index notation, around the canonical kernel.

Here the program's layouts become the kernels' canonical shapes, and canonical results the program's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from autopallas.compat import Dtype
from autopallas.kernels.attention.canonical import factor_of_rows, kernel_operands
from autopallas.kernels.attention.operands import Cotangents, Operands, Results
from autopallas.kernels.attention.operation import OPERATION
from autopallas.kernels.attention.site_parts import (
    Joined,
    KeyBlock,
    RowProgram,
    RowStatistic,
    RowTerm,
    ScoreTerm,
    SideSource,
)
from autopallas.kernels.attention.spec import AttentionSpec, Layouts, SideSpec, Weight
from autopallas.sites.calls import replaced_at, vjp_at
from autopallas.sites.division import Division, PositionOperand, PositionOperands
from autopallas.sites.elementwise import ElementwiseProgram, Index, Input, Side
from autopallas.sites.index_notation import Label, Labels, Operand, Positions, View, layout, read, sources_in, write
from autopallas.sites.indexed_site import IndexedSite
from autopallas.sites.operation import Kernel, Operation
from autopallas.sites.spec import BlockSizes

__all__ = ["AttentionSite"]

T = TypeVar("T")


@dataclass(frozen=True)
class AttentionSite(IndexedSite):
    """One attention of a program.

    Attributes:
      sizes: size of each label.
      query, key, value: how q, k and v are read from the operands.
      query_labels: the labels of the query axis T, whose positions ``Index("query")`` counts.
      key_labels, head_labels, value_labels: those of S, D and Dv.  Every other label is a batch label (if k or v has
        it, or neither q nor k nor v) or a group label (if of the three only q has it).
      terms: further products that are added to the scores.
      blocks: further keys and values; ``key`` and ``value`` are the first block.
      sides: the side inputs of the programs, in order.
      sinks: further terms of the normaliser; each is given by its logarithm, a sum of row terms.
      factors: row terms; the result is multiplied by ``exp`` of their sum.
      row_program: a factor of the result that depends on the scores of the row, or None.
      result: the view of the result.
      rows: the view of an array with one number for each row, such as a residual.
      types: dtypes of all operands.
      weights_dtype: dtype of the probabilities in the product with the values; None for that of the exponentials.
    """

    VIEWS: ClassVar[tuple[str, ...]] = ("result", "rows")

    sizes: tuple[int, ...]
    query: Operand
    key: Operand
    value: Operand
    query_labels: Labels
    key_labels: Labels
    head_labels: Labels
    value_labels: Labels
    result: View
    rows: View
    types: tuple[Dtype, ...]
    score_dtype: Dtype
    result_dtype: Dtype
    score: ElementwiseProgram
    terms: tuple[ScoreTerm, ...] = ()
    blocks: tuple[KeyBlock, ...] = ()
    sides: tuple[SideSource, ...] = ()
    inner_weights: tuple[Weight, ...] = ()
    weights: tuple[Weight, ...] = ()
    sinks: tuple[tuple[RowTerm, ...], ...] = ()
    factors: tuple[RowTerm, ...] = ()
    row_program: RowProgram | None = None
    live: ElementwiseProgram | None = None
    score_precision: str | None = None
    value_precision: str | None = None
    weights_dtype: Dtype | None = None
    assume_finite: bool = True

    @property
    def operation(self) -> Operation:
        return OPERATION

    @property
    def has_backward(self) -> bool:
        return self.row_program is None or not self.row_program.follows_maximum

    @property
    def finishes(self) -> bool:
        """Whether the program's result is the kernel's times further factors."""
        return bool(self.factors) or self.row_program is not None

    @property
    def products(self) -> tuple[ScoreTerm, ...]:
        """The products whose sum are the scores."""
        return (ScoreTerm(self.query, self.key, self.head_labels), *self.terms)

    @property
    def key_blocks(self) -> tuple[KeyBlock, ...]:
        """All blocks of keys and values, in order."""
        return (KeyBlock(self.key, self.value, self.key_labels), *self.blocks)

    @property
    def strides_over_keys(self) -> bool:
        """Whether a side input of queries and keys has another axis after those of the keys in the program's memory."""
        queries = set(self.query_labels)
        keys = {label for block in self.key_blocks for label in block.key_labels}
        read = [source for source in sources_in(self.sides) if isinstance(source, Operand)]
        orders = ([a for _, labels in s.view for a in labels if self.sizes[a] > 1] for s in read)
        return any(queries & set(order) and keys & set(order) and order[-1] not in keys for order in orders)

    # ------------------------------------------------------------------ canonical axes

    @cached_property
    def axes(self) -> tuple[Labels, ...]:
        """The labels that make up each of the canonical axes (B, K, G, T, S)."""
        special = {*self.query_labels, *self.value_labels}
        special.update(label for product in self.products for label in product.head_labels)
        special.update(label for block in self.key_blocks for label in block.key_labels)
        shared = {label for product in self.products for label in product.key.labels}
        shared.update(label for block in self.key_blocks for label in (*block.key.labels, *block.value.labels))
        outer = [a for _, labels in self.result for a in labels if a not in special]
        queries = {label for product in self.products for label in product.query.labels}
        group = tuple(a for a in outer if a in queries and a not in shared)
        batch = [a for a in outer if a not in group]
        # The batch labels make up two axes, such that side inputs vary along whole axes if possible: labels of the same
        # side inputs belong together.  If that does not decide, the last label is the axis of heads.
        readers = [*self.sides, *(t.source for s in (*self.sinks, self.factors) for t in s if t.source is not None)]
        readers += [] if self.row_program is None else self.row_program.sources
        kinds: dict[tuple[bool, ...], list[Label]] = {}
        for label in batch:
            kinds.setdefault(tuple(label in r.labels for r in readers), []).append(label)
        if len(kinds) == 2:
            first, second = kinds.values()
        else:
            first, second = batch[:-1], batch[-1:]
            # Groups of heads that keys or values lack stay with their heads.
            both = set(self.key.labels) & set(self.value.labels)
            for _, labels in self.result:
                while first and second[0] not in both and {first[-1], second[0]} <= set(labels):
                    first, second = first[:-1], [first[-1], *second]
        return tuple(first), tuple(second), group, self.query_labels, self.key_labels

    def _varies(self, source: SideSource) -> tuple[bool, bool, bool, bool, bool]:
        b, k, g, t, s = (any(a in source.labels for a in group) for group in self.axes)
        return b, k, g, t, s or isinstance(source, Joined)

    @cached_property
    def spec(self) -> AttentionSpec:
        """Canonical description, which kernels and tables know."""
        batch, heads, groups, query, _ = map(self.extent, self.axes)
        key = sum(self.extent(block.key_labels) for block in self.key_blocks)

        def dtype(source: SideSource) -> Dtype:
            if isinstance(source, Joined):
                return dtype(source.first)
            return source.dtype if isinstance(source, Positions) else self.types[source.position]

        sides = tuple(SideSpec(dtype(s), self._varies(s)) for s in self.sides)
        sink = None
        if self.sinks:
            rows = [self._varies(t.source) for terms in self.sinks for t in terms if t.source is not None]
            b, k, g, t, s = (any(varies) for varies in zip((False,) * 5, *rows, strict=True))
            sink = (b, k, g, t, s)
        wide = np.dtype(np.float64 if self.score_dtype == np.float64 else np.float32)
        return AttentionSpec(
            batch=batch,
            key_heads=heads,
            groups=groups,
            query_length=query,
            key_length=key,
            head_size=sum(self.extent(product.head_labels) for product in self.products),
            value_head_size=self.extent(self.value_labels),
            query_dtype=self.types[self.query.position],
            key_dtype=self.types[self.key.position],
            value_dtype=self.types[self.value.position],
            score_dtype=self.score_dtype,
            result_dtype=wide if self.finishes else self.result_dtype,
            score=self.score,
            sides=sides,
            inner_weights=self.inner_weights,
            weights=self.weights,
            sink=sink,
            live=self.live,
            statistics=None if self.row_program is None else self.row_program.statistics,
            score_precision=self.score_precision,
            value_precision=self.value_precision,
            weights_dtype=self.weights_dtype,
            assume_finite=self.assume_finite,
            layouts=self._layouts,
        ).unrounded()

    @property
    def _layouts(self) -> Layouts:
        batch, heads, groups, query, key = self.axes

        def of(labels: Labels, *axes: Labels) -> tuple[int, ...]:
            return layout(labels, self.sizes, (batch, heads, *axes))

        return Layouts(
            of(self.query.labels, groups, query, self.head_labels),
            of(self.key.labels, key, self.head_labels),
            of(self.value.labels, key, self.value_labels),
        )

    def _row_factor(self, statistics: Sequence[jax.Array], operands: Sequence[jax.Array]) -> jax.Array:
        """Evaluates the row program, [B|1, K|1, G|1, T|1, 1]."""
        assert self.row_program is not None
        inputs = [
            statistics[source.place][..., None]
            if isinstance(source, RowStatistic)
            else read(source, operands, self.sizes, self.axes)
            for source in self.row_program.inputs
        ]
        factor = self.row_program.program.evaluate(None, None, None, inputs)
        if self.spec.keeps:  # a row that keeps no key is 0, whatever the factor
            factor = jnp.where(statistics[-1][..., None] != 0, factor, 0)
        return factor.astype(self.spec.accumulation_dtype)

    def _finish(self, out: jax.Array, statistics: Sequence[jax.Array], operands: Sequence[jax.Array]) -> jax.Array:
        """Computes the program's result from the kernel's, [B, K, G, T, Dv]."""
        if self.factors:
            out = out * factor_of_rows(self, operands)
        if self.row_program is not None:
            factor = self._row_factor(statistics, operands)
            out = jnp.where(factor == 0, 0, out * factor)  # what 0 replaces may be NaN
        b, k, g, t, _ = self.axes
        return write(out.astype(self.result_dtype), self.result, self.sizes, (b, k, g, t, self.value_labels))

    # ------------------------------------------------------------------ functions that the site primitive runs

    def forward(
        self, kernel: Kernel, block_sizes: BlockSizes | None, operands: Sequence[jax.Array]
    ) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        """Returns (results, residuals).

        The result is the program's.  The residuals are the kernel's numbers for each row, and the kernel's own result,
        if it cannot be computed from the program's.
        """
        out, rows, factor = kernel.forward(self.spec, block_sizes, kernel_operands(self, operands))
        saved = rows
        if self.spec.has_factor:
            saved += (jnp.ones_like(rows[0]) if factor is None else factor,)
        residuals = tuple(write(x, self.rows, self.sizes, self.axes[:4]) for x in saved)
        if self.finishes:
            residuals += (write(out, self._inner_result, self.sizes, (*self.axes[:4], self.value_labels)),)
        return (self._finish(out, rows, operands),), residuals

    @property
    def _programs(self) -> Iterator[ElementwiseProgram]:
        """The programs that a kernel computes for each score."""
        yield self.score
        if self.live is not None:
            yield self.live
        statistics = () if self.row_program is None else self.row_program.statistics
        yield from (own for own in statistics if isinstance(own, ElementwiseProgram))
        sums = [own for own in statistics if isinstance(own, tuple)]
        for weight in (*self.inner_weights, *self.weights, *(own for weights in sums for own in weights)):
            yield weight.program

    @property
    def _inner_result(self) -> View:
        """View under which the kernel's own result is saved if factors follow it."""
        return (*self.rows, (0, self.value_labels))

    @property
    def _row_residuals(self) -> int:
        """Number of residuals with one number for each row."""
        return self.spec.row_results + self.spec.has_factor

    @property
    def residuals(self) -> tuple[tuple[View, Dtype], ...]:
        """View and dtype of each residual."""
        rows = ((self.rows, self.spec.accumulation_dtype),) * self._row_residuals
        return (*rows, (self._inner_result, self.spec.result_dtype)) if self.finishes else rows

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
        """Returns the cotangents of the operands at the positions ``active``."""

        def prepare(operands: Sequence[jax.Array]) -> tuple[Operands, Operands]:
            """Returns the kernel's operands without side inputs that are not differentiable, and all of them."""
            given = kernel_operands(self, operands)
            return given._replace(sides=self._differentiable(given.sides)), given

        _, pull, given = vjp_at(prepare, operands, active, has_aux=True)
        axes = (*self.axes[:4], self.value_labels)
        count = self._row_residuals
        saved = [read(Operand(0, self.rows), (x,), self.sizes, axes[:4]) for x in residuals[:count]]
        rows, factors = saved[: self.spec.row_results], saved[self.spec.row_results :]
        outside: list[jax.Array] = []
        dsums: list[jax.Array] = []
        if self.finishes:
            out = read(Operand(0, self._inner_result), (residuals[count],), self.sizes, axes)
            sums = [] if self.row_program is None else [0, *self.row_program.sums]

            def finish(out: jax.Array, moved: Sequence[jax.Array], *chosen: jax.Array) -> jax.Array:
                return self._finish(out, replaced_at(rows, sums, moved), replaced_at(operands, active, chosen))

            _, pull_finish = jax.vjp(finish, out, [rows[i] for i in sums], *(operands[i] for i in active))
            dout, dsums, *outside = pull_finish(cotangents[0])
        else:
            out, dout = (read(Operand(0, self.result), (x,), self.sizes, axes) for x in (results[0], cotangents[0]))
        known = Results(out, tuple(rows), *factors).residuals
        dq, dk, dv, dsides, dsink = kernel.backward(
            self.spec, block_sizes, given, known, Cotangents(dout, tuple(dsums))
        )
        inside = pull(Operands(dq, dk, dv, self._differentiable(dsides), dsink))
        return tuple(a + b for a, b in zip(inside, outside, strict=True)) if outside else tuple(inside)

    def _differentiable(self, sides: Sequence[T]) -> tuple[T, ...]:
        """Selects what belongs to differentiable side inputs."""
        return tuple(x for x, spec in zip(sides, self.spec.sides, strict=True) if spec.differentiable)

    # ------------------------------------------------------------------ on several devices, and under vmap

    def shardable_labels(self) -> frozenset[Label]:
        """Returns those of batches, heads and queries; each device then needs all keys of its rows."""
        return frozenset(label for group in self.axes[:4] for label in group)

    def divided(self, division: Division, extras: PositionOperands) -> AttentionSite:
        """Returns one device's part; where rows are divided, the programs read their positions from side inputs."""
        site = super().divided(division, extras)
        if not division.divides(self.query_labels):
            return site
        sides = list(site.sides)

        def placed(i: Input) -> Input:
            if not (isinstance(i, Index) and i.axis == "query"):
                return i
            operand = extras.operand(PositionOperand(self.query_labels, i.dtype, i.offset, i.stride, i.extent))
            if operand not in sides:
                sides.append(operand)
            return Side(sides.index(operand), i.dtype)

        def program(given: ElementwiseProgram) -> ElementwiseProgram:
            return replace(given, inputs=tuple(map(placed, given.inputs)))

        def weights(given: tuple[Weight, ...]) -> tuple[Weight, ...]:
            return tuple(replace(weight, program=program(weight.program)) for weight in given)

        row_program = site.row_program
        if row_program is not None:
            statistics = row_program.statistics
            moved = (program(s) if isinstance(s, ElementwiseProgram) else weights(s) for s in statistics)
            row_program = replace(row_program, statistics=tuple(moved))
        site = replace(
            site,
            score=program(site.score),
            inner_weights=weights(site.inner_weights),
            weights=weights(site.weights),
            live=site.live if site.live is None else program(site.live),
            row_program=row_program,
        )
        return replace(site, sides=tuple(sides))

    def spread(self, axes: Mapping[int, int], of_one: Set[int], labels: Labels) -> AttentionSite | None:
        """Returns the site that reads some operands with the labels; where keys or values have those of the queries'
        axis then, that is the longest of the other axes that only queries have, unless its positions are read."""
        site = super().spread(axes, of_one, labels)
        if site is None or set(labels).isdisjoint(self.query_labels):
            return site
        others = {source for block in site.key_blocks for source in (block.key, block.value)}
        others |= {product.key for product in site.products}
        if not any(label in source.labels for source in others for label in self.query_labels):
            return site
        if any(isinstance(own, Index) and own.axis == "query" for program in self._programs for own in program.inputs):
            return None
        group = replace(site, query_labels=()).axes[2]
        return replace(site, query_labels=(max(group, key=site.sizes.__getitem__),) if group else ())

    def fields_under_vmap(self, axes: Sequence[int | None], label: Labels) -> Mapping[str, object]:
        """Makes the new axis that of the query, where it is one query under vmap; it is a batch's or a group's else."""
        queries = {product.query.position for product in self.products}
        others = {product.key.position for product in self.products}
        others |= {source.position for block in self.key_blocks for source in (block.key, block.value)}
        only_query = not self.query_labels and _any(axes, queries) and not _any(axes, others)
        return {"query_labels": label} if only_query else {}


def _any(axes: Sequence[int | None], positions: Iterable[int]) -> bool:
    """Whether any of these operands has an axis."""
    return any(axes[position] is not None for position in positions)
