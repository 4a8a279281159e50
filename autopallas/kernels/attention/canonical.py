"""Reads the canonical arrays of an attention from the arrays of a program.

Letters: B batch, K key heads, G query heads per key head, T query length, S key length, D head size of queries and
keys, Dv head size of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from autopallas.kernels.attention.operands import Operands
from autopallas.kernels.attention.site_parts import Joined, RowTerm, SideSource
from autopallas.sites.index_notation import Labels, Operand, read

if TYPE_CHECKING:
    from autopallas.kernels.attention.site import AttentionSite

__all__ = ["factor_of_rows", "kernel_operands", "sum_of_terms"]

Arrays = Sequence[jax.Array]


def kernel_operands(site: AttentionSite, arrays: Arrays) -> Operands:
    """Returns the operands of the kernel of a site, from those of the program."""
    batch, heads, groups, query, key = site.axes
    spec = site.spec

    def whole(source: Operand, *axes: Labels) -> jax.Array:
        """An array that varies along all of its axes after those of batch and heads."""
        shape = (spec.batch, spec.key_heads, *map(site.extent, axes))
        return jnp.broadcast_to(read(source, arrays, site.sizes, (batch, heads, *axes)), shape)

    queries, keys = [], []
    for product in site.products:
        part = whole(product.query, groups, query, product.head_labels)
        queries.append(part if product.scale == 1 else part * jnp.asarray(product.scale, part.dtype))
        keys.append(whole(product.key, key, product.head_labels))
    q, first = (jnp.concatenate(x, -1) if len(x) > 1 else x[0] for x in (queries, keys))
    values = [whole(block.value, block.key_labels, site.value_labels) for block in site.key_blocks]
    v = jnp.concatenate(values, 2) if len(values) > 1 else values[0]
    further = [whole(block.key, block.key_labels, site.head_labels) for block in site.blocks]
    k = jnp.concatenate([first, *further], 2) if further else first
    sides = tuple(_side(site, side, arrays) for side in site.sides)
    sink = None
    if site.sinks:
        sink = sum_of_terms(site, site.sinks[0], arrays)
        for terms in site.sinks[1:]:
            sink = jnp.logaddexp(sink, sum_of_terms(site, terms, arrays))
    return Operands(q, k, v, sides, sink)


def _side(site: AttentionSite, side: SideSource, arrays: Arrays) -> jax.Array:
    """Returns a side input, [B|1, K|1, G|1, T|1, S|1]."""
    if not isinstance(side, Joined):
        return read(side, arrays, site.sizes, site.axes)
    lengths = [site.extent(block.key_labels) for block in site.key_blocks]
    parts = [
        None if part is None else read(part, arrays, site.sizes, (*site.axes[:4], block.key_labels))
        for block, part in zip(site.key_blocks, side.parts, strict=True)
    ]
    known = [part for part in parts if part is not None]
    outer = jnp.broadcast_shapes(*(part.shape[:4] for part in known))
    full = [
        jnp.zeros((*outer, n), known[0].dtype) if part is None else jnp.broadcast_to(part, (*outer, n))
        for part, n in zip(parts, lengths, strict=True)
    ]
    return jnp.concatenate(full, -1)


def sum_of_terms(site: AttentionSite, terms: Sequence[RowTerm], arrays: Arrays) -> jax.Array:
    """Returns a sum of row terms, [B|1, K|1, G|1, T|1, 1]."""
    dtype = site.spec.accumulation_dtype
    total = jnp.zeros((1,) * 5, dtype)
    for term in terms:
        if term.source is None:
            total = total + jnp.asarray(term.coefficient, dtype)
            continue
        row = read(term.source, arrays, site.sizes, site.axes).astype(dtype)
        total = total + term.coefficient * (jnp.log(row) if term.kind == "log" else row)
    return total


def factor_of_rows(site: AttentionSite, arrays: Arrays) -> jax.Array:
    """Returns the product of a site's factors, [B|1, K|1, G|1, T|1, 1]; it is exact for negative factors too."""
    dtype = site.spec.accumulation_dtype
    product = jnp.exp(sum_of_terms(site, [t for t in site.factors if t.kind != "log"], arrays))
    for term in site.factors:
        if term.kind == "log":
            assert term.source is not None
            row = read(term.source, arrays, site.sizes, site.axes).astype(dtype)
            product = product * row if term.coefficient == 1 else product * row ** int(term.coefficient)
    return product
