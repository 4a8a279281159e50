"""Computes a mixture of experts by rows that are sorted by expert, as all of its implementations do.

Each pair of a token and one of its choices is a row here. What the program computes for all pairs of tokens and experts
is computed for these rows only, with a grouped matmul for the products with the experts' matrices.

Letters: T tokens, k choices of each token, R = T k rows, G experts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopallas.kernels.grouped_matmul.api import apply
from autopallas.kernels.grouped_matmul.operation import OPERATION as GROUPED_MATMUL
from autopallas.kernels.grouped_matmul.spec import GroupedMatmulSpec
from autopallas.kernels.mixture_of_experts.spec import ExpertsSpec
from autopallas.kernels.mixture_of_experts.steps import Gathered, Pointwise, Product, Step
from autopallas.numerics.classes import Numerics
from autopallas.sites.calls import vjp_at
from autopallas.sites.device import Device
from autopallas.sites.elementwise import Constant
from autopallas.sites.index_notation import Labels, Operand, read, write
from autopallas.sites.operation import Implementation, Supported, Unsupported
from autopallas.sites.spec import BlockSizes, Sizes

if TYPE_CHECKING:
    from autopallas.kernels.mixture_of_experts.site import ExpertsSite

__all__ = ["SortedRows"]

Array: TypeAlias = jax.Array


@dataclass(frozen=True, slots=True)
class SortedRows:
    """An implementation of mixtures: rows sorted by expert, with an implementation of the grouped matmul for products.

    Attributes:
      product: the name of the grouped matmul's implementation, which is this one's name too.
    """

    product: str
    NUMERICS: ClassVar[Numerics] = "tolerance"

    @property
    def _of_products(self) -> Implementation:
        found = GROUPED_MATMUL.implementation(self.product)
        assert found is not None
        return found

    def supports(self, spec: ExpertsSpec, device: Device) -> Supported | Unsupported:
        """Tells whether the largest product is supported: what computes it computes the others too."""
        return self._of_products.supports(spec.largest_product, device)

    def candidates(self, spec: ExpertsSpec, device: Device) -> Sequence[BlockSizes]:
        """Returns what a search should try, best guess first: the candidates for the largest product."""
        own: Callable[..., Sequence[BlockSizes]] | None = GROUPED_MATMUL.hook(self.product, "candidates")
        if own is None:
            return GROUPED_MATMUL.part("block_sizes").BlockSizes.candidates(spec.largest_product)
        return own(spec.largest_product, device)

    def running_sizes(self, spec: ExpertsSpec, block_sizes: BlockSizes, device: Device) -> Sizes:
        """Returns the sizes with which the largest product is computed."""
        return GROUPED_MATMUL.running_sizes(self.product, spec.largest_product, block_sizes, device)

    def forward(self, site: ExpertsSite, block_sizes: BlockSizes | None, operands: Sequence[Array]) -> Array:
        """Computes what the program does, from the operands of the site."""
        return _Rows(site, self.product, block_sizes, site.prelude(operands)).result()

    def backward(
        self,
        site: ExpertsSite,
        block_sizes: BlockSizes | None,
        operands: Sequence[Array],
        cotangent: Array,
        active: Sequence[int],
    ) -> tuple[Array, ...]:
        """Returns the cotangents of the operands at the positions ``active``."""
        _, pull = vjp_at(functools.partial(self.forward, site, block_sizes), operands, active)
        return tuple(pull(cotangent))


class _Routing(NamedTuple):
    """Destinations of tokens, with rows in the order of tokens, [T, k], and the order of the rows by expert, [R].

    Attributes:
      expert: the expert of each row; any expert where it has none.
      counts: whether the row is a term of the token's sum.
      order: the rows by expert.
      place: where each row is in that order.
      group_sizes: [G].
      here: [R], whether this device has the expert of each row in that order; None where it has all experts.
    """

    expert: Array
    counts: Array
    order: Array
    place: Array
    group_sizes: Array
    here: Array | None


class _Rows:
    """One evaluation of a site: values of steps are [R, ...], or [1, ...] where all rows have the same value."""

    def __init__(self, site: ExpertsSite, product: str, block_sizes: BlockSizes | None, arrays: Sequence[Array]):
        self.site, self.spec, self.arrays = site, site.spec, arrays
        self.implementation, self.block_sizes = product, block_sizes
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
        # Rows of other devices are the exception: they come after all groups.
        group = jnp.where(valid, expert, spec.groups) if site.everywhere else expert
        order = jnp.argsort(group.reshape(-1), stable=True).astype(jnp.int32)
        place = jnp.zeros_like(order).at[order].set(jnp.arange(spec.rows, dtype=jnp.int32), unique_indices=True)
        group_sizes = jnp.bincount(group.reshape(-1), length=spec.groups + 1)[:-1].astype(jnp.int32)
        here = jnp.arange(spec.rows, dtype=jnp.int32) < jnp.sum(group_sizes) if site.everywhere else None
        return _Routing(expert, valid & ~again, order, place, group_sizes, here)

    def result(self) -> Array:
        """Computes what the program does."""
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
        """Puts ``other`` in the rows of other devices' experts, since what is computed for them may lack a finite
        derivative."""
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
        """Turns [T, k | 1, ...] into rows in the order of experts."""
        shape = (self.spec.tokens, self.spec.choices, *whole.shape[2:])
        rows = jnp.broadcast_to(whole, shape).reshape(self.spec.rows, *whole.shape[2:])
        return _permuted(rows, self.routing.order, self.routing.place)

    def _spread(self, step: int, value: Array, labels: Labels) -> Array:
        """Gives a value an axis for each of ``labels`` after that of the rows, of size 1 where the value lacks the
        label."""
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
    """Returns ``rows[order]``; ``place`` is the inverse of ``order``, so that the derivative is a gather too."""
    return jnp.take(rows, order, axis=0, unique_indices=True, mode="clip")


_permuted.defvjp(
    lambda rows, order, place: (_permuted(rows, order, place), (order, place)),
    lambda saved, cotangent: (_permuted(cotangent, saved[1], saved[0]), None, None),
)
