"""Draws realistic inputs to measure an attention: no row without a key, segments in order, plausible lengths."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from autopallas.compat import Shaped
from autopallas.kernels.attention.site import AttentionSite
from autopallas.kernels.attention.site_parts import Joined
from autopallas.kernels.attention.spec import AttentionSpec, SideSpec
from autopallas.kernels.attention.sum_site import AttentionSum
from autopallas.kernels.example import harmless, normal
from autopallas.numerics.casts import is_floating
from autopallas.sites.index_notation import Operand, fill

__all__ = ["example", "operands", "program"]

Array: TypeAlias = np.ndarray

_SEGMENTS = 4


def example(spec: AttentionSpec, key: int = 0) -> tuple[Array, Array, Array, tuple[Array, ...], Array | None]:
    """Returns (query, key, value, sides, sink) as of ``operands.Operands``; another ``key`` gives other numbers."""
    random = np.random.default_rng(key)
    heads = (spec.batch, spec.key_heads)
    query = normal(random, (*heads, spec.groups, spec.query_length, spec.head_size), spec.query_dtype)
    keys = normal(random, (*heads, spec.key_length, spec.head_size), spec.key_dtype)
    value = normal(random, (*heads, spec.key_length, spec.value_head_size), spec.value_dtype)
    extents = (*heads, spec.groups, spec.query_length, spec.key_length)
    sides = tuple(_side(random, side, extents) for side in spec.sides)
    sink = None
    if spec.sink is not None:
        sink = normal(random, [n if v else 1 for n, v in zip(extents, spec.sink, strict=True)], spec.accumulation_dtype)
    return query, keys, value, sides, sink


def _side(random: np.random.Generator, side: SideSpec, extents: tuple[int, ...]) -> Array:
    shape = tuple(n if varies else 1 for n, varies in zip(extents, side.varies, strict=True))
    length = extents[4]
    query, key = (np.arange(n).reshape(n, 1) if axis == 3 else np.arange(n) for axis, n in ((3, shape[3]), (4, length)))
    over_queries, over_keys = side.varies[3:]
    if is_floating(side.dtype):
        return normal(random, shape, side.dtype)
    if side.dtype == np.bool_:
        if over_queries and over_keys:  # some keys of each row, including the first
            return np.asarray((random.random(shape, np.float32) < 0.9) | (key == 0))
        shown = key < _most(length) if over_keys else np.ones((1, 1), bool)
        return np.broadcast_to(shown, shape).astype(side.dtype)
    if over_keys:
        found = key * _SEGMENTS // length
    elif over_queries:
        found = query * _SEGMENTS // shape[3]
    else:  # number of keys
        found = np.full((1, 1), _most(length))
    return np.broadcast_to(found, shape).astype(side.dtype)


def _most(length: int) -> int:
    return max(1, 3 * length // 4)


def operands(site: AttentionSite | AttentionSum, types: Sequence[Shaped], key: int = 0) -> list[Array]:
    """Returns inputs for a site: one array per operand, of the given shapes and dtypes."""
    filled = harmless(np.random.default_rng(key), types)
    for number, part in enumerate((site,) if isinstance(site, AttentionSite) else site.sites):
        filled = _filled(part, filled, key + number)
    return filled


def _filled(site: AttentionSite, filled: list[Array], key: int) -> list[Array]:
    """Fills in what one attention reads."""
    query, keys, value, sides, _ = example(site.spec, key)
    b, k, g, t, s = site.axes
    start = 0
    for product in site.products:
        d = product.head_labels
        end = start + math.prod(site.sizes[label] for label in d)
        fill(product.query, query[..., start:end], filled, site.sizes, (b, k, g, t, d))
        first = keys[:, :, : math.prod(site.sizes[label] for label in s), start:end]
        fill(product.key, first, filled, site.sizes, (b, k, s, d))
        start = end
    start = 0
    for i, block in enumerate(site.key_blocks):
        labels = block.key_labels
        own = slice(start, start + math.prod(site.sizes[label] for label in labels))
        if i:
            fill(block.key, keys[:, :, own], filled, site.sizes, (b, k, labels, site.head_labels))
        fill(block.value, value[:, :, own], filled, site.sizes, (b, k, labels, site.value_labels))
        for source, side in zip(site.sides, sides, strict=True):
            part = source.parts[i] if isinstance(source, Joined) else None
            if isinstance(part, Operand):
                fill(part, side[..., own], filled, site.sizes, (*site.axes[:4], labels))
        start = own.stop
    for source, side in zip(site.sides, sides, strict=True):
        if isinstance(source, Operand):
            fill(source, side, filled, site.sizes, site.axes)
    return filled


def program() -> tuple[Callable[..., jax.Array], tuple[jax.ShapeDtypeStruct, ...]]:
    """Returns causal attention in its usual spelling, and the types of q, k and v."""

    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scores = jnp.einsum("btnd,bsnd->bnts", q, k) / q.shape[-1] ** 0.5
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
        return jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(scores), v)

    return attention, (jax.ShapeDtypeStruct((2, 1024, 8, 128), jnp.bfloat16),) * 3
