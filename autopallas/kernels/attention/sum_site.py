"""Describes a sum of attentions at its place in a program, as of differential attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import jax

from autopallas.compat import Dtype
from autopallas.kernels.attention.operation import OPERATION
from autopallas.kernels.attention.site import AttentionSite
from autopallas.kernels.attention.site_parts import SideSource
from autopallas.kernels.attention.spec import AttentionSumSpec
from autopallas.sites.division import Division, PositionOperands
from autopallas.sites.index_notation import Label, Labels, View
from autopallas.sites.indexed_site import IndexedSite
from autopallas.sites.operation import Kernel, Operation
from autopallas.sites.spec import BlockSizes

__all__ = ["AttentionSum"]


@dataclass(frozen=True)
class AttentionSum(IndexedSite):
    """Attentions that are added up, such as ``(softmax(x) - c * softmax(y)) v``: the kernel runs once for each.

    Attributes:
      sizes: size of each label.
      parts: the attentions, which read from the same operands, with the same labels.  Their own ``sizes`` and ``types``
        do not count.
      signs: 1, or -1 where one is subtracted.
      types: dtypes of all operands.
      result: the view of the result.
      result_dtype: its dtype; the parts' results are added up in theirs.
    """

    sizes: tuple[int, ...]
    parts: tuple[AttentionSite, ...]
    signs: tuple[int, ...]
    types: tuple[Dtype, ...]
    result: View
    result_dtype: Dtype

    @cached_property
    def sites(self) -> tuple[AttentionSite, ...]:
        """The attentions as sites of their own."""
        return tuple(replace(part, sizes=self.sizes, types=self.types) for part in self.parts)

    @property
    def operation(self) -> Operation:
        return OPERATION

    @property
    def has_backward(self) -> bool:
        return all(site.has_backward for site in self.sites)

    @cached_property
    def spec(self) -> AttentionSumSpec:
        """Canonical description, which kernels and tables know: that of each part, and their number."""
        return AttentionSumSpec.of(self.sites[0].spec, len(self.sites))

    @property
    def sides(self) -> tuple[SideSource, ...]:
        """The side inputs of all parts."""
        return tuple(side for part in self.parts for side in part.sides)

    @property
    def strides_over_keys(self) -> bool:
        """Whether a part's side input of queries and keys has another axis after those of the keys in memory."""
        return any(site.strides_over_keys for site in self.sites)

    # ------------------------------------------------------------------ functions that the site primitive runs

    def forward(
        self, kernel: Kernel, block_sizes: BlockSizes | None, operands: Sequence[jax.Array]
    ) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        """Returns (results, residuals); the residuals are those of each part, and its result."""
        residuals: list[jax.Array] = []
        signed: list[jax.Array] = []
        for site, sign in zip(self.sites, self.signs, strict=True):
            (result,), own = site.forward(kernel, block_sizes, operands)
            residuals += [*own, result]
            signed.append(result if sign > 0 else -result)
        total = signed[0]
        for further in signed[1:]:
            total = total + further
        return (total.astype(self.result_dtype),), tuple(residuals)

    @property
    def residuals(self) -> tuple[tuple[View, Dtype], ...]:
        """View and dtype of each residual."""
        return tuple(kind for site in self.sites for kind in (*site.residuals, (site.result, site.result_dtype)))

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
        sums: list[jax.Array] | None = None
        start = 0
        for site, sign in zip(self.sites, self.signs, strict=True):
            end = start + len(site.residuals)
            given = cotangents[0].astype(site.result_dtype)
            found = site.backward(
                kernel,
                block_sizes,
                operands,
                (residuals[end],),
                residuals[start:end],
                (given if sign > 0 else -given,),
                active,
            )
            sums = list(found) if sums is None else [a + b for a, b in zip(sums, found, strict=True)]
            start = end + 1
        return tuple(sums or ())

    # ------------------------------------------------------------------ on several devices, and under vmap

    def shardable_labels(self) -> frozenset[Label]:
        """Returns the labels that every part may have sharded."""
        return frozenset.intersection(*(site.shardable_labels() for site in self.sites))

    def divided(self, division: Division, extras: PositionOperands) -> Self:
        """Returns one device's part, of each attention."""
        parts = tuple(site.divided(division, extras) for site in self.sites)
        return replace(self, parts=parts, sizes=division.local(self.sizes))

    def batched(self, axes: Sequence[int | None], size: int) -> Self:
        """Returns the sum under vmap: operands with an axis have it in front, and so has the result."""
        label: Labels = (len(self.sizes),) if size != 1 else ()
        parts = tuple(site.batched(axes, size) for site in self.sites)
        return replace(
            self, parts=parts, sizes=(*self.sizes, *(size for _ in label)), result=((0, label), *self.result)
        )
