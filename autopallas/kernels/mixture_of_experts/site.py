"""Describes mixtures in which every expert computes every token, to compute only the experts that a token is given to.

The program computes ``out[t] = sum over e of y[t, e]``, where ``y[t, e]`` is zero except for the few experts that token
t chooses. :mod:`autopallas.kernels.mixture_of_experts.sorted_rows` leaves out the others.

Letters: T tokens, G experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import jax

from autopallas.compat import Dtype
from autopallas.kernels.mixture_of_experts.operation import OPERATION
from autopallas.kernels.mixture_of_experts.spec import ExpertsSpec
from autopallas.kernels.mixture_of_experts.steps import Pointwise, Prelude, Product, Reads, Step
from autopallas.sites.division import Division, PositionOperands, ShardableAxes
from autopallas.sites.index_notation import Label, Labels, Operand, View
from autopallas.sites.indexed_site import IndexedSite
from autopallas.sites.operation import Kernel, Operation
from autopallas.sites.spec import BlockSizes

__all__ = ["ExpertsSite"]

Array: TypeAlias = jax.Array


@dataclass(frozen=True)
class ExpertsSite(IndexedSite):
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

    @cached_property
    def spec(self) -> ExpertsSpec:
        """Canonical description, which implementations and tables know."""
        products = [step for step in self.steps if isinstance(step, Product)]
        largest = max(products, key=lambda p: self.extent(p.inner) * self.extent(p.labels))
        return ExpertsSpec(
            tokens=self.extent(self.token_labels),
            choices=sum(self.extent(several) for _, several in self.choices),
            groups=self.extent((*self.batch_labels, *self.expert_labels)),
            contracting=self.extent(largest.inner),
            columns=self.extent(largest.labels),
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
        """Returns (the program's result,) and no residuals: the backward computes the rows again."""
        return (kernel.forward(self, block_sizes, operands),), ()

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

    def shardable_labels(self) -> frozenset[Label]:
        """Returns those of tokens.

        Where it is known how the original divides the products, the experts may be divided too, and the columns, and
        labels over which the last products sum.
        """
        labels = set(self.token_labels) - set(self.summed_labels)
        if self.products:
            labels |= {*self.expert_labels[:1], *self._summed_last()}
            labels |= {label for _, own in self.result for label in own}
        return frozenset(labels)

    def shardable_axes(self) -> ShardableAxes:
        """Returns the labels of each array.  Where tokens have slots, devices would have to exchange them."""
        tokens, whole = frozenset(self.token_labels), "tokens are sent to slots of experts" if self.slots else ""
        return replace(super().shardable_axes(), between=self.products, rows=tokens, whole=whole)

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

    def divided(self, division: Division, extras: PositionOperands) -> ExpertsSite:
        """Returns one device's part, computed from the arrays that the prelude gives.

        It may have rows of other devices' experts among its own.
        """
        return replace(
            super().divided(division, extras),
            prelude=Prelude.nothing(len(self.types)),
            across=tuple(axis for label in self.expert_labels for axis in division.of(label)),
            everywhere=self.extent(self.expert_labels) if division.divides(self.expert_labels) else 0,
        )

    def standalone(self, division: Division) -> ExpertsSite:
        """Returns the same without an exchange with the devices that have other experts."""
        return replace(super().standalone(division), across=self.across)

    # ------------------------------------------------------------------ under vmap

    def batched(self, axes: Sequence[int | None], size: int) -> ExpertsSite:
        """Returns the site under vmap; what the sources read are the prelude's results under it."""
        site = super().batched(self.prelude.axes(axes), size)
        return replace(site, prelude=replace(self.prelude, mapped=(*self.prelude.mapped, tuple(axes))))

    def fields_under_vmap(self, axes: Sequence[int | None], label: Labels) -> Mapping[str, object]:
        """Adds an axis of tokens, and if the experts differ between examples, one of examples' experts."""
        read = (s.weights if isinstance(s, Product) else s.source for s in self.steps if isinstance(s, Reads))
        shared = (source for source in read if set(self.token_labels).isdisjoint(source.labels))
        own = any(axes[source.position] is not None for source in shared)
        return {
            "token_labels": (*label, *self.token_labels),
            "batch_labels": (*label, *self.batch_labels) if own or self.batch_labels else (),
        }
