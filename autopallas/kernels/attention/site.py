"""Describes an attention at its place in a program, by index notation, around the canonical kernel.

Here the program's layouts become the kernels' canonical shapes, and canonical results the program's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from autopallas.compat import Dtype
from autopallas.kernels.attention.operands import Cotangents, Operands, Results
from autopallas.kernels.attention.operation import OPERATION
from autopallas.kernels.attention.spec import AttentionSpec, SideSpec, Weight
from autopallas.sites.division import Division, PositionOperand, PositionOperands, ShardableAxes
from autopallas.sites.elementwise import ElementwiseProgram, Index, Input, Side
from autopallas.sites.index_notation import Label, Operand, Positions, View, read, write
from autopallas.sites.operation import Kernel, Operation
from autopallas.sites.spec import BlockSizes

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RowTerm:
    """A term ``coefficient * f(source)`` of a sum over logarithms, without the key axis and without the scores.

    ``constant``: the coefficient itself.  ``value``: f is the identity.  ``log``: f is the logarithm.
    """

    coefficient: float
    kind: Literal["constant", "value", "log"]
    source: Operand | Positions | None = None

    def batched(self, axes: Sequence[int | None], label: tuple[Label, ...]) -> RowTerm:
        return self if self.source is None else replace(self, source=self.source.batched(axes, label))


@dataclass(frozen=True, slots=True)
class ScoreTerm:
    """A product of further queries and keys, with its own head axis, that is added to the scores.

    Kernels take the concatenation of all head axes.  The queries are multiplied by ``scale``, a power of two or its
    negative, so that nothing is rounded.
    """

    query: Operand
    key: Operand
    head_labels: tuple[Label, ...]
    scale: float = 1.0

    def batched(self, axes: Sequence[int | None], label: tuple[Label, ...]) -> ScoreTerm:
        return replace(self, query=self.query.batched(axes, label), key=self.key.batched(axes, label))


@dataclass(frozen=True, slots=True)
class KeyBlock:
    """Keys and values of one part of the key axis, with the labels of this part; the parts are concatenated."""

    key: Operand
    value: Operand
    key_labels: tuple[Label, ...]

    def batched(self, axes: Sequence[int | None], label: tuple[Label, ...]) -> KeyBlock:
        return replace(self, key=self.key.batched(axes, label), value=self.value.batched(axes, label))


@dataclass(frozen=True, slots=True)
class Joined:
    """A side input that varies along the keys, one part for each block of keys; None for a part that is not read."""

    parts: tuple[Operand | Positions | None, ...]

    @property
    def labels(self) -> tuple[Label, ...]:
        return tuple(dict.fromkeys(label for part in self.parts if part is not None for label in part.labels))

    @property
    def first(self) -> Operand | Positions:
        """One of the parts, which all have the same dtype."""
        return next(part for part in self.parts if part is not None)

    def batched(self, axes: Sequence[int | None], label: tuple[Label, ...]) -> Joined:
        return Joined(tuple(None if part is None else part.batched(axes, label) for part in self.parts))


@dataclass(frozen=True, slots=True)
class RowStatistic:
    """A number that the kernel computes for each row, as an input of a row program.

    ``sum``: the sum of the exponentials.  ``shift``: the maximum, which is subtracted in them.  ``further``: the spec's
    statistic number ``position``.
    """

    kind: Literal["sum", "shift", "further"]
    position: int = 0

    @property
    def place(self) -> int:
        """Its position among the kernel's numbers for each row."""
        return {"sum": 0, "shift": 1, "further": 2 + self.position}[self.kind]


@dataclass(frozen=True, slots=True)
class RowProgram:
    """A factor of each row, computed outside the kernel; side input n of the program is number n of ``inputs``.

    Attributes:
      program: computes the factor.
      inputs: what the program reads.
      statistics: further statistics that the kernel computes for each row.
      follows_maximum: whether the factor's derivative runs through a maximum, which kernels do not differentiate.
    """

    program: ElementwiseProgram
    inputs: tuple[Operand | Positions | RowStatistic, ...]
    statistics: tuple[ElementwiseProgram | tuple[Weight, ...], ...]
    follows_maximum: bool

    @property
    def sources(self) -> tuple[Operand | Positions, ...]:
        return tuple(x for x in self.inputs if not isinstance(x, RowStatistic))

    @property
    def sums(self) -> list[int]:
        """Positions, among the kernel's numbers for each row, of the statistics that are sums."""
        return [2 + i for i, statistic in enumerate(self.statistics) if isinstance(statistic, tuple)]

    def batched(self, axes: Sequence[int | None], label: tuple[Label, ...]) -> RowProgram:
        return replace(
            self, inputs=tuple(x if isinstance(x, RowStatistic) else x.batched(axes, label) for x in self.inputs)
        )


@dataclass(frozen=True)
class AttentionSite:
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

    sizes: tuple[int, ...]
    query: Operand
    key: Operand
    value: Operand
    query_labels: tuple[Label, ...]
    key_labels: tuple[Label, ...]
    head_labels: tuple[Label, ...]
    value_labels: tuple[Label, ...]
    result: View
    rows: View
    types: tuple[Dtype, ...]
    score_dtype: Dtype
    result_dtype: Dtype
    score: ElementwiseProgram
    terms: tuple[ScoreTerm, ...] = ()
    blocks: tuple[KeyBlock, ...] = ()
    sides: tuple[Operand | Positions | Joined, ...] = ()
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

    # ------------------------------------------------------------------ canonical axes

    @cached_property
    def axes(self) -> tuple[tuple[Label, ...], ...]:
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

    def _varies(self, source: Operand | Positions | Joined) -> tuple[bool, bool, bool, bool, bool]:
        b, k, g, t, s = (any(a in source.labels for a in group) for group in self.axes)
        return b, k, g, t, s or isinstance(source, Joined)

    @cached_property
    def spec(self) -> AttentionSpec:
        """Canonical description, which kernels and tables know."""

        def extent(labels: Iterable[Label]) -> int:
            return math.prod(self.sizes[a] for a in labels)

        batch, heads, groups, query, _ = (extent(group) for group in self.axes)
        key = sum(extent(block.key_labels) for block in self.key_blocks)

        def dtype(source: Operand | Positions | Joined) -> Dtype:
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
            head_size=sum(extent(product.head_labels) for product in self.products),
            value_head_size=extent(self.value_labels),
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
        )

    # ------------------------------------------------------------------ canonical arrays

    def _canonical(self, operands: Sequence[jax.Array]) -> Operands:
        """Reads the kernel's operands from those of the program."""
        b, k_, g, t, s = self.axes
        spec = self.spec

        def whole(source: Operand, groups: Sequence[Sequence[Label]], shape: tuple[int, ...]) -> jax.Array:
            return jnp.broadcast_to(read(source, operands, self.sizes, groups), shape)

        batch = (spec.batch, spec.key_heads)
        queries, keys = [], []
        for product in self.products:
            d = product.head_labels
            size = math.prod(self.sizes[a] for a in d)
            part = whole(product.query, (b, k_, g, t, d), (*batch, spec.groups, spec.query_length, size))
            queries.append(part if product.scale == 1 else part * jnp.asarray(product.scale, part.dtype))
            length = math.prod(self.sizes[a] for a in s)
            keys.append(whole(product.key, (b, k_, s, d), (*batch, length, size)))
        q, k = (x[0] if len(x) == 1 else jnp.concatenate(x, -1) for x in (queries, keys))
        values = []
        for block in self.key_blocks:
            s, length = block.key_labels, math.prod(self.sizes[a] for a in block.key_labels)
            values.append(whole(block.value, (b, k_, s, self.value_labels), (*batch, length, spec.value_head_size)))
        v = values[0] if len(values) == 1 else jnp.concatenate(values, 2)
        if self.blocks:
            d = self.head_labels
            further = [
                whole(
                    x.key,
                    (b, k_, x.key_labels, d),
                    (*batch, math.prod(self.sizes[a] for a in x.key_labels), q.shape[-1]),
                )
                for x in self.blocks
            ]
            k = jnp.concatenate([k, *further], 2)
        sides = tuple(self._side(side, operands) for side in self.sides)
        sink = None
        if self.sinks:
            sink = self._rows(self.sinks[0], operands)
            for terms in self.sinks[1:]:
                sink = jnp.logaddexp(sink, self._rows(terms, operands))
        return Operands(q, k, v, sides, sink)

    def _side(self, side: Operand | Positions | Joined, operands: Sequence[jax.Array]) -> jax.Array:
        """Reads a side input, [B|1, K|1, G|1, T|1, S|1]."""
        if not isinstance(side, Joined):
            return read(side, operands, self.sizes, self.axes)
        parts: list[jax.Array | None] = []
        lengths = []
        for block, part in zip(self.key_blocks, side.parts, strict=True):
            axes = (*self.axes[:4], block.key_labels)
            parts.append(None if part is None else read(part, operands, self.sizes, axes))
            lengths.append(math.prod(self.sizes[a] for a in block.key_labels))
        known = [part for part in parts if part is not None]
        outer = jnp.broadcast_shapes(*(part.shape[:4] for part in known))
        full = [
            jnp.zeros((*outer, n), known[0].dtype) if part is None else jnp.broadcast_to(part, (*outer, n))
            for part, n in zip(parts, lengths, strict=True)
        ]
        return jnp.concatenate(full, -1)

    def _rows(self, terms: Sequence[RowTerm], operands: Sequence[jax.Array]) -> jax.Array:
        """Computes a sum of row terms, [B|1, K|1, G|1, T|1, 1]."""
        dtype = self.spec.accumulation_dtype
        total = jnp.zeros((1,) * 5, dtype)
        for term in terms:
            if term.source is None:
                total = total + jnp.asarray(term.coefficient, dtype)
                continue
            row = read(term.source, operands, self.sizes, self.axes).astype(dtype)
            total = total + term.coefficient * (jnp.log(row) if term.kind == "log" else row)
        return total

    def _factor(self, operands: Sequence[jax.Array]) -> jax.Array:
        """Computes the product of the factors, [B|1, K|1, G|1, T|1, 1]; it is exact for negative factors too."""
        dtype = self.spec.accumulation_dtype
        product = jnp.exp(self._rows([t for t in self.factors if t.kind != "log"], operands))
        for term in self.factors:
            if term.kind == "log":
                assert term.source is not None
                row = read(term.source, operands, self.sizes, self.axes).astype(dtype)
                product = product * row if term.coefficient == 1 else product * row ** int(term.coefficient)
        return product

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
            out = out * self._factor(operands)
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
        out, rows, factor = kernel.forward(self.spec, block_sizes, self._canonical(operands))
        saved = rows
        if self.spec.has_factor:
            saved += (jnp.ones_like(rows[0]) if factor is None else factor,)
        residuals = tuple(write(x, self.rows, self.sizes, self.axes[:4]) for x in saved)
        if self.finishes:
            residuals += (write(out, self._inner_result, self.sizes, (*self.axes[:4], self.value_labels)),)
        return (self._finish(out, rows, operands),), residuals

    @property
    def _inner_result(self) -> View:
        """View under which the kernel's own result is saved if factors follow it."""
        return (*self.rows, (0, self.value_labels))

    @property
    def _row_residuals(self) -> int:
        """Number of residuals with one number for each row."""
        return self.spec.row_results + self.spec.has_factor

    def residual_types(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns shapes and dtypes of the residuals."""
        rows = tuple(math.prod(self.sizes[a] for a in labels) for _, labels in self.rows)
        found = (jax.ShapeDtypeStruct(rows, self.spec.accumulation_dtype),) * self._row_residuals
        if not self.finishes:
            return found
        return *found, jax.ShapeDtypeStruct((*rows, self.spec.value_head_size), self.spec.result_dtype)

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

        def rebuild(chosen: Sequence[jax.Array]) -> list[jax.Array]:
            filled = list(operands)
            for position, array in zip(active, chosen, strict=True):
                filled[position] = array
            return filled

        def prepare(*chosen: jax.Array) -> tuple[Operands, Operands]:
            """Returns the kernel's operands without side inputs that are not differentiable, and all of them."""
            given = self._canonical(rebuild(chosen))
            return given._replace(sides=self._differentiable(given.sides)), given

        _, pull, given = jax.vjp(prepare, *(operands[i] for i in active), has_aux=True)
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
                known = dict(zip(sums, moved, strict=True))
                return self._finish(out, [known.get(i, row) for i, row in enumerate(rows)], rebuild(chosen))

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

    # ------------------------------------------------------------------ on several devices

    def shardable_axes(self) -> ShardableAxes:
        """Returns batches, heads and queries: these may be divided, and each device then needs all keys of its rows."""
        terms = (x for term in self.terms for x in (term.query, term.key))
        sides = (x for side in self.sides for x in (side.parts if isinstance(side, Joined) else (side,)))
        further = (x for block in self.blocks for x in (block.key, block.value))
        sources = [self.query, self.key, self.value, *terms, *further, *sides]
        sources += [t.source for terms in (*self.sinks, self.factors) for t in terms if t.source is not None]
        sources += [] if self.row_program is None else self.row_program.sources
        residuals = (self.rows,) * self._row_residuals + (self._inner_result,) * self.finishes
        labels = frozenset(label for group in self.axes[:4] for label in group)
        uses = tuple(source for source in sources if isinstance(source, Operand))
        return ShardableAxes(uses, (self.result,), residuals, labels, (frozenset(),))

    def per_device(self, division: Division) -> tuple[AttentionSite, tuple[PositionOperand, ...]]:
        """Returns what each device computes, and the positions that it reads from further operands."""
        extras = PositionOperands(len(self.types))

        def placed_side(side: Operand | Positions | Joined) -> Operand | Positions | Joined:
            if not isinstance(side, Joined):
                return extras.source(side, division)
            return Joined(tuple(None if part is None else extras.source(part, division) for part in side.parts))

        sides = [placed_side(side) for side in self.sides]
        rows = division.divides(self.query_labels)

        def placed(i: Input) -> Input:
            """Reads a row's position from an operand if rows are divided."""
            if not (rows and isinstance(i, Index) and i.axis == "query"):
                return i
            operand = extras.operand(PositionOperand(self.query_labels, i.dtype, i.offset, i.stride, i.extent))
            if operand not in sides:
                sides.append(operand)
            return Side(sides.index(operand), i.dtype)

        def program(given: ElementwiseProgram) -> ElementwiseProgram:
            return replace(given, inputs=tuple(map(placed, given.inputs)))

        def weights(given: tuple[Weight, ...]) -> tuple[Weight, ...]:
            return tuple(replace(weight, program=program(weight.program)) for weight in given)

        def term(given: RowTerm) -> RowTerm:
            return given if given.source is None else replace(given, source=extras.source(given.source, division))

        row_program = self.row_program
        if row_program is not None:
            row_program = replace(
                row_program,
                inputs=tuple(
                    x if isinstance(x, RowStatistic) else extras.source(x, division) for x in row_program.inputs
                ),
                statistics=tuple(
                    program(s) if isinstance(s, ElementwiseProgram) else weights(s) for s in row_program.statistics
                ),
            )
        site = replace(
            self,
            sizes=division.local(self.sizes),
            score=program(self.score),
            inner_weights=weights(self.inner_weights),
            weights=weights(self.weights),
            live=self.live if self.live is None else program(self.live),
            sinks=tuple(tuple(map(term, terms)) for terms in self.sinks),
            factors=tuple(map(term, self.factors)),
            row_program=row_program,
        )
        site = replace(site, sides=tuple(sides), types=(*self.types, *extras.types))
        return site, tuple(extras.counted)

    def standalone(self, division: Division) -> AttentionSite:
        """Returns what each device computes; none needs another."""
        return self.per_device(division)[0]

    # ------------------------------------------------------------------ transformations

    def batched(self, axes: Sequence[int | None], size: int) -> AttentionSite:
        """Returns the site under vmap: operands with a mapped axis have it in front, and so has the result."""
        label: tuple[Label, ...] = (len(self.sizes),) if size != 1 else ()
        query = self.query.batched(axes, label)
        key, value = self.key.batched(axes, label), self.value.batched(axes, label)
        terms = tuple(term.batched(axes, label) for term in self.terms)
        queries = (*query.labels, *(a for term in terms for a in term.query.labels))
        blocks = tuple(block.batched(axes, label) for block in self.blocks)
        others = (*key.labels, *value.labels, *(a for term in terms for a in term.key.labels))
        others += tuple(a for block in blocks for a in (*block.key.labels, *block.value.labels))
        only_query = bool(label) and label[0] in queries and label[0] not in others
        return replace(
            self,
            sizes=(*self.sizes, *(size for _ in label)),
            query=query,
            key=key,
            value=value,
            terms=terms,
            blocks=blocks,
            # one query under vmap: the mapped axis is the query axis
            query_labels=label if only_query and not self.query_labels else self.query_labels,
            sides=tuple(s.batched(axes, label) for s in self.sides),
            sinks=tuple(tuple(t.batched(axes, label) for t in terms) for terms in self.sinks),
            factors=tuple(t.batched(axes, label) for t in self.factors),
            row_program=None if self.row_program is None else self.row_program.batched(axes, label),
            result=((0, label), *self.result),
            rows=((0, label), *self.rows),
        )
