"""A mixture in which every expert computes every token, done only for the experts that a token is given to.

The program says ``out[t] = sum over e of y[t, e]``, where ``y[t, e]`` is zero but for the few experts that token t
chooses.  Here each pair of a token and one of its choices is a row.  Rows are sorted by expert; what the program
computes for all pairs is computed for these rows, its products with the experts' matrices by a grouped matmul.

Letters: T tokens, k choices of each token, R = T k rows, G experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import ModuleType
from typing import NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopallas.compat import Dtype
from autopallas.kernels.grouped_matmul.api import apply
from autopallas.kernels.grouped_matmul.experts_steps import Gathered, Labels, Pointwise, Prelude, Product, Reads, Step
from autopallas.kernels.grouped_matmul.operation import OPERATION
from autopallas.kernels.grouped_matmul.spec import ExpertsSpec, GroupedMatmulSpec
from autopallas.sites.division import Division, PositionOperand, ShardableAxes
from autopallas.sites.elementwise import Constant
from autopallas.sites.index_notation import Label, Operand, View, read, write
from autopallas.sites.operation import Kernel, Operation
from autopallas.sites.spec import BlockSizes

__all__ = ["ExpertsSite", "Gathered", "Pointwise", "Prelude", "Product", "Step"]

Array: TypeAlias = jax.Array


@dataclass(frozen=True)
class ExpertsSite:
    """One such mixture of a program.

    Attributes:
      sizes: size of each label.
      token_labels, expert_labels: those of T and G.
      prelude: gives the arrays that ``choices`` and ``steps`` read.
      choices: arrays of the experts that a token chooses, each with further labels where it holds several; a number
        that is no expert's counts for nothing, and an expert that is named twice counts once.
      steps: what is computed for each row; the last one is its term of the token's sum.
      result: the view of the result.
      types: dtypes of the arrays.
      batch_labels: of the token labels, those of examples that have experts of their own.
      summed_labels: of the token labels, the last ones, those of a token's rows: results are added up over them.
      slots: how many each expert has in the original; 0 where every expert computes every token.
      scattered: whether tokens are brought to these and back by scatters and gathers, not by products.
      products: where it can be told, the view of each product in the original, which the prelude's witness gives.
      across: of one device's part, the mesh axes over which the experts are divided.
      everywhere: how many experts all devices have; 0: those here.
    """

    sizes: tuple[int, ...]
    token_labels: Labels
    expert_labels: Labels
    prelude: Prelude
    choices: tuple[tuple[Operand, Labels], ...]
    steps: tuple[Step, ...]
    result: View
    result_dtype: Dtype
    types: tuple[Dtype, ...]
    batch_labels: Labels = ()
    summed_labels: Labels = ()
    slots: int = 0
    scattered: bool = False
    assume_finite: bool = True
    products: tuple[View, ...] = ()
    across: tuple[str, ...] = ()
    everywhere: int = 0

    @property
    def operation(self) -> Operation:
        return OPERATION

    @property
    def has_backward(self) -> bool:
        return True

    def _extent(self, labels: Labels) -> int:
        return math.prod(self.sizes[a] for a in labels)

    @cached_property
    def spec(self) -> ExpertsSpec:
        """The canonical description, which implementations and tables know."""
        products = [step for step in self.steps if isinstance(step, Product)]
        largest = max(products, key=lambda p: self._extent(p.inner) * self._extent(p.labels))
        return ExpertsSpec(
            tokens=self._extent(self.token_labels),
            choices=sum(self._extent(several) for _, several in self.choices),
            groups=self._extent((*self.batch_labels, *self.expert_labels)),
            contracting=self._extent(largest.inner),
            columns=self._extent(largest.labels),
            widest_dtype=max((self.types[p.weights.position] for p in products), key=lambda d: d.itemsize),
            products=len(products),
            assume_finite=self.assume_finite,
            slots=self.slots,
            scattered=self.scattered,
        )

    # ------------------------------------------------------------------ what the site primitive runs

    def forward(
        self, kernel: Kernel, block_sizes: BlockSizes | None, operands: Sequence[Array]
    ) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        """(the program's result, no residuals)."""
        return (_Rows(self, kernel, block_sizes, self.prelude(operands)).result(),), ()

    def residual_types(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """None: the backward computes the rows again."""
        return ()

    def backward(
        self,
        kernel: Kernel,
        block_sizes: BlockSizes | None,
        operands: Sequence[Array],
        results: Sequence[Array],
        residuals: Sequence[Array],
        cotangents: Sequence[Array],
        active: Sequence[int],
    ) -> tuple[Array, ...]:
        """Cotangents of the operands at the positions ``active``."""

        def function(*chosen: Array) -> Array:
            filled = list(operands)
            for position, array in zip(active, chosen, strict=True):
                filled[position] = array
            return self.forward(kernel, block_sizes, filled)[0][0]

        _, pull = jax.vjp(function, *(operands[i] for i in active))
        return tuple(pull(cotangents[0]))

    # ------------------------------------------------------------------ on several devices

    def shardable_axes(self) -> ShardableAxes:
        """Tokens may be divided; where it is known how the original divides the products, so may the experts, columns,
        and what is summed over last of all.  Where tokens have slots, devices would have to exchange them."""
        labels = set(self.token_labels) - set(self.summed_labels)
        if self.products:
            labels |= {*self.expert_labels[:1], *self._summed_last()}
            labels |= {label for _, own in self.result for label in own}
        uses = [source for source, _ in self.choices]
        uses += [s.source if isinstance(s, Gathered) else s.weights for s in self.steps if isinstance(s, Reads)]
        tokens, whole = frozenset(self.token_labels), "tokens are sent to slots of experts" if self.slots else ""
        combined = (frozenset[Label](),)
        return ShardableAxes(tuple(uses), (self.result,), (), frozenset(labels), combined, self.products, tokens, whole)

    def _summed_last(self) -> set[Label]:
        """Labels over which products sum that are then only scaled: parts of such a sum add up to the result."""
        found: dict[Label, bool] = {}
        for position, step in enumerate(self.steps):
            if isinstance(step, Product):
                found |= {label: self._scaled(position) and found.get(label, True) for label in step.inner}
        return {label for label, linear in found.items() if linear}

    def _scaled(self, product: int) -> bool:
        scaled = {product}
        for position, step in enumerate(self.steps):
            read = (step.rows,) if isinstance(step, Product) else step.arguments if isinstance(step, Pointwise) else ()
            own = [argument for argument in read if argument in scaled]
            if own:
                if not isinstance(step, Pointwise) or len(own) > 1 or not step.is_scaling:
                    return False
                scaled.add(position)
        return len(self.steps) - 1 in scaled

    def per_device(self, division: Division) -> tuple[ExpertsSite, tuple[PositionOperand, ...]]:
        """What each device computes, of the arrays that the prelude gives."""
        across = tuple(axis for label in self.expert_labels for axis in division.of(label))
        return replace(self.standalone(division), across=across), ()

    def standalone(self, division: Division) -> ExpertsSite:
        """The same with rows of other devices' experts among its own."""
        return replace(
            self,
            sizes=division.local(self.sizes),
            prelude=Prelude.nothing(len(self.types)),
            everywhere=self._extent(self.expert_labels) if division.divides(self.expert_labels) else 0,
        )

    # ------------------------------------------------------------------ transformations

    def batched(self, axes: Sequence[int | None], size: int) -> ExpertsSite:
        """The site under vmap: more tokens, and where the experts differ between examples, more experts too."""
        label: Labels = (len(self.sizes),)
        inner = self.prelude.axes(axes)
        sources = [s.weights for s in self.steps if isinstance(s, Product)]
        sources += [s.source for s in self.steps if isinstance(s, Gathered)]
        own = any(inner[s.position] is not None for s in sources if not set(self.token_labels) & set(s.labels))

        def moved(step: Step) -> Step:
            if isinstance(step, Gathered):
                return replace(step, source=step.source.batched(inner, label))
            if isinstance(step, Product):
                return replace(step, weights=step.weights.batched(inner, label))
            return step

        return replace(
            self,
            sizes=(*self.sizes, size),
            token_labels=(*label, *self.token_labels),
            batch_labels=(*label, *self.batch_labels) if own or self.batch_labels else (),
            prelude=replace(self.prelude, mapped=(*self.prelude.mapped, tuple(axes))),
            choices=tuple((source.batched(inner, label), several) for source, several in self.choices),
            steps=tuple(map(moved, self.steps)),
            result=((0, label), *self.result),
        )


class _Routing(NamedTuple):
    """Where each token goes, rows in the order of tokens: [T, k]; and the order of the rows by expert: [R].

    Attributes:
      expert: the expert of each row; any where it has none.
      counts: whether the row is a term of the token's sum.
      order: the rows by expert.
      place: where each row is in that order.
      group_sizes: [G].
      here: [R], of the rows in that order, those whose experts this device has; None where it has all.
    """

    expert: Array
    counts: Array
    order: Array
    place: Array
    group_sizes: Array
    here: Array | None


class _Rows:
    """One evaluation of a site: values of steps are [R, ...], or [1, ...] where all rows have the same."""

    def __init__(self, site: ExpertsSite, kernel: Kernel, block_sizes: BlockSizes | None, arrays: Sequence[Array]):
        self.site, self.spec, self.arrays = site, site.spec, arrays
        self.implementation = cast(ModuleType, kernel).__name__.rpartition(".")[2]
        self.block_sizes = block_sizes
        self.groups = (*site.batch_labels, *site.expert_labels)
        self.experts = math.prod(site.sizes[a] for a in site.expert_labels)
        self.routing = self._routing()

    def _read(self, source: Operand, *groups: Labels) -> Array:
        return read(source, self.arrays, self.site.sizes, groups)

    def _routing(self) -> _Routing:
        site, spec = self.site, self.spec
        parts = []
        for source, several in site.choices:
            part = self._read(source, site.token_labels, several).astype(jnp.int32)
            parts.append(jnp.broadcast_to(part, (spec.tokens, math.prod(site.sizes[a] for a in several))))
        chosen = jnp.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]
        same = chosen[:, :, None] == chosen[:, None, :]
        again = jnp.any(same & jnp.tri(spec.choices, k=-1, dtype=bool), axis=2)
        if site.across:
            chosen = chosen - lax.axis_index(site.across) * self.experts
        valid = (chosen >= 0) & (chosen < self.experts)
        # Rows that count for nothing are computed too, as finite as any other, so that their gradients are zero.
        expert = jnp.where(valid, chosen, 0)
        examples = math.prod(site.sizes[a] for a in site.batch_labels)
        if examples > 1:
            example = jnp.arange(spec.tokens, dtype=jnp.int32) // (spec.tokens // examples)
            expert = expert + self.experts * example[:, None]
        # But for those of other devices, which are behind all groups.
        group = jnp.where(valid, expert, spec.groups) if site.everywhere else expert
        order = jnp.argsort(group.reshape(-1), stable=True).astype(jnp.int32)
        place = jnp.zeros_like(order).at[order].set(jnp.arange(spec.rows, dtype=jnp.int32), unique_indices=True)
        group_sizes = jnp.bincount(group.reshape(-1), length=spec.groups + 1)[:-1].astype(jnp.int32)
        here = jnp.arange(spec.rows, dtype=jnp.int32) < jnp.sum(group_sizes) if site.everywhere else None
        return _Routing(expert, valid & ~again, order, place, group_sizes, here)

    def result(self) -> Array:
        """What the program computes."""
        site, spec = self.site, self.spec
        values: list[Array] = []
        for step in site.steps:
            values.append(self._value(step, values))
        last = site.steps[-1]
        assert not isinstance(last, Constant)
        terms = jnp.broadcast_to(values[-1], (spec.rows, *values[-1].shape[1:])).reshape(spec.rows, -1)
        terms = _permuted(terms, self.routing.place, self.routing.order).reshape(spec.tokens, spec.choices, -1)
        wide = terms.astype(jnp.promote_types(terms.dtype, jnp.float32))
        total = jnp.sum(jnp.where(self.routing.counts[..., None], wide, 0), axis=1)
        if site.summed_labels:
            total = jnp.sum(total.reshape(-1, math.prod(site.sizes[a] for a in site.summed_labels), total.shape[1]), 1)
        kept = tuple(label for label in site.token_labels if label not in site.summed_labels)
        return write(total.astype(site.result_dtype), site.result, site.sizes, (kept, last.labels))

    def _value(self, step: Step, values: Sequence[Array]) -> Array:
        match step:
            case Constant():
                return jnp.asarray(step.value, step.dtype)
            case Gathered():
                value = self._gathered(step)
                return self._here(value, lax.stop_gradient(value))
            case Pointwise():
                arguments = [self._spread(a, values[a], step.labels) for a in step.arguments]
                return step.program.evaluate(None, None, None, arguments)
            case Product():
                return self._product(step, values[step.rows])

    def _here(self, rows: Array, other: Array | int) -> Array:
        """``other`` in the rows of other devices' experts: what is computed for them may have no finite derivative."""
        here = self.routing.here
        if here is None:
            return rows
        return jnp.where(here.reshape(-1, *(1 for _ in rows.shape[1:])), rows, other)

    def _gathered(self, step: Gathered) -> Array:
        tokens, groups = self.site.token_labels, self.groups
        rest = [(label,) for label in step.labels]
        present = set(step.source.labels)
        experts = present & set(self.site.expert_labels)
        if not present & {*tokens, *self.site.expert_labels}:
            return self._read(step.source, (), *rest)
        if not experts:
            whole = self._read(step.source, tokens, *rest)
            return self._sorted(whole[:, None])
        if not present & (set(tokens) - set(self.site.batch_labels)):
            whole = self._read(step.source, groups, *rest)
            return whole[self.routing.expert.reshape(-1)[self.routing.order]]
        whole = self._read(step.source, tokens, self.site.expert_labels, *rest)
        whole = jnp.broadcast_to(whole, (self.spec.tokens, *whole.shape[1:]))
        token = jnp.arange(self.spec.tokens, dtype=jnp.int32)[:, None]
        return self._sorted(whole[token, self.routing.expert % self.experts])

    def _sorted(self, whole: Array) -> Array:
        """From [T, k | 1, ...] to rows in the order of experts."""
        shape = (self.spec.tokens, self.spec.choices, *whole.shape[2:])
        rows = jnp.broadcast_to(whole, shape).reshape(self.spec.rows, *whole.shape[2:])
        return _permuted(rows, self.routing.order, self.routing.place)

    def _spread(self, step: int, value: Array, labels: Labels) -> Array:
        """With an axis for each of ``labels`` after that of the rows; of size 1 where the value does not have it."""
        given = self.site.steps[step]
        if isinstance(given, Constant):
            return value
        order = [given.labels.index(a) for a in labels if a in given.labels]
        value = value.transpose([0, *(1 + i for i in order)])
        return value.reshape(value.shape[:1] + tuple(self.site.sizes[a] if a in given.labels else 1 for a in labels))

    def _product(self, step: Product, rows: Array) -> Array:
        site, spec = self.site, self.spec
        rows = self._here(self._spread(step.rows, rows, step.inner), 0)
        lhs = jnp.broadcast_to(rows, (spec.rows, *rows.shape[1:])).reshape(1, spec.rows, -1)
        order = step.weights.labels
        transposed = order.index(step.inner[0]) > order.index(step.labels[0])
        sides = (step.labels, step.inner) if transposed else (step.inner, step.labels)
        rhs = jnp.broadcast_to(
            self._read(step.weights, (), self.groups, *sides),
            (1, spec.groups, *(math.prod(site.sizes[a] for a in side) for side in sides)),
        )
        product = GroupedMatmulSpec(
            use="dlhs" if transposed else "forward",
            batch=1,
            rows=spec.rows,
            groups=spec.groups,
            contracting=rhs.shape[2],
            columns=rhs.shape[3],
            first_dtype=np.dtype(lhs.dtype),
            second_dtype=np.dtype(rhs.dtype),
            result_dtype=step.dtype,
            precision=step.precision,
        )
        sizes = None if self.block_sizes is None else self.block_sizes.fitted(product)  # the reference has none
        out = apply(self.implementation, product, (sizes, sizes), lhs, rhs, self.routing.group_sizes[None])
        return self._here(out.reshape(spec.rows, *(site.sizes[a] for a in step.labels)), 0)


@jax.custom_vjp
def _permuted(rows: Array, order: Array, place: Array) -> Array:
    """``rows[order]``; ``place`` is the inverse of ``order``, so that the derivative is a gather too."""
    return jnp.take(rows, order, axis=0, unique_indices=True, mode="clip")


_permuted.defvjp(
    lambda rows, order, place: (_permuted(rows, order, place), (order, place)),
    lambda saved, cotangent: (_permuted(cotangent, saved[1], saved[0]), None, None),
)
