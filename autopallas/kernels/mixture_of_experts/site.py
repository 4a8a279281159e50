"""Describes mixtures in which every expert computes every token, to compute only the experts that a token is given to.

The program computes ``out[t] = sum over e of y[t, e]``, where ``y[t, e]`` is zero except for the few experts that token
t chooses. :mod:`autopallas.kernels.mixture_of_experts.sorted_rows` leaves out the others.

Letters: T tokens, G experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import jax

from autopallas.compat import Dtype
from autopallas.kernels.mixture_of_experts.operation import OPERATION
from autopallas.kernels.mixture_of_experts.spec import ExpertsSpec
from autopallas.kernels.mixture_of_experts.steps import Gathered, Labels, Pointwise, Prelude, Product, Reads, Step
from autopallas.sites.division import Division, PositionOperand, ShardableAxes
from autopallas.sites.index_notation import Label, Operand, View
from autopallas.sites.operation import Kernel, Operation
from autopallas.sites.spec import BlockSizes

__all__ = ["ExpertsSite"]

Array: TypeAlias = jax.Array


@dataclass(frozen=True)
class ExpertsSite:
    """One such mixture of a program.

    Attributes:
      sizes: size of each label.
      token_labels, expert_labels: labels of T and G.
      prelude: computes the arrays that ``choices`` and ``steps`` read.
      choices: arrays of the experts that a token chooses, each with further labels where it holds several; a number
        that is no expert's counts for nothing, and an expert that is named twice counts once.
      steps: what is computed for each row; the last one is its term of the token's sum.
      result: the view of the result.
      types: dtypes of the arrays.
      batch_labels: of the token labels, those of examples that have experts of their own.
      summed_labels: of the token labels, the last ones, those of a token's rows: results are added up over them.
      slots: number of slots of each expert in the original; 0 where every expert computes every token.
      scattered: whether tokens are brought to the slots and back by scatters and gathers, not by products.
      products: where it can be told, the view of each product in the original, which the prelude's witness gives.
      across: for one device's part, the mesh axes over which the experts are divided.
      everywhere: number of experts on all devices together; 0 if all of them are here.
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
        """Canonical description, which implementations and tables know."""
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
        """Returns (the program's result,) and no residuals."""
        return (kernel.forward(self, block_sizes, operands),), ()

    def residual_types(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns no types: the backward computes the rows again."""
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
        """Returns the cotangents of the operands at the positions ``active``."""
        gradients: tuple[Array, ...] = kernel.backward(self, block_sizes, operands, cotangents[0], active)
        return gradients

    # ------------------------------------------------------------------ on several devices

    def shardable_axes(self) -> ShardableAxes:
        """Returns the labels along which devices may divide the site.

        Tokens may be divided. Where it is known how the original divides the products, so may the experts, the columns,
        and labels over which the last products sum. Where tokens have slots, devices would have to exchange them.
        """
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
        """Returns labels over which products sum whose results are then only scaled: parts of such a sum add up to the
        result."""
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
        """Returns what each device computes from the arrays that the prelude gives."""
        across = tuple(axis for label in self.expert_labels for axis in division.of(label))
        return replace(self.standalone(division), across=across), ()

    def standalone(self, division: Division) -> ExpertsSite:
        """Returns one device's part of the site, which may have rows of other devices' experts among its own."""
        return replace(
            self,
            sizes=division.local(self.sizes),
            prelude=Prelude.nothing(len(self.types)),
            everywhere=self._extent(self.expert_labels) if division.divides(self.expert_labels) else 0,
        )

    # ------------------------------------------------------------------ transformations

    def batched(self, axes: Sequence[int | None], size: int) -> ExpertsSite:
        """Returns the site under vmap: with more tokens, and if the experts differ between examples, more experts
        too."""
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
