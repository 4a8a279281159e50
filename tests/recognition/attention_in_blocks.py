"""Attention as public code writes it: one softmax over several blocks of keys, and biases that are products."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.nn import softmax
from support.catalogue import array

from recognition.public_attention import (
    LAYERS,
    LOOK_ALIKES,
    PROGRAMS,
    B,
    D,
    N,
    T,
    Written,
    entered,
    look_alike,
    mixed,
    scores,
)

__all__ = ["LOOK_ALIKES", "PROGRAMS"]


# --- One softmax over several blocks of keys -------------------------------------------------------------------------


def in_blocks(second=5) -> list[Any]:
    """Queries, keys and values, and further keys and values."""
    shapes = (B, T, N, D), (B, T, N, D), (B, T, N, 3), (B, second, N, D), (B, second, N, 3)
    return [array(*shape, seed=seed) for seed, shape in enumerate(shapes)]


def triangle(s, fill=-1e30):
    return jnp.where(jnp.arange(s.shape[-2])[:, None] >= jnp.arange(s.shape[-1]), s, fill)


def shared_statistics(parts):
    m = lax.stop_gradient(functools.reduce(jnp.maximum, [s.max(-1, keepdims=True) for s in parts]))
    exponentials = [jnp.exp(s - m) for s in parts]
    return exponentials, sum(e.sum(-1, keepdims=True) for e in exponentials)


@entered(in_blocks)
def blocks_side_by_side(q, k, v, k_further, v_further):
    p = softmax(jnp.concatenate([scores(q, k), scores(q, k_further)], -1))
    return mixed(p, jnp.concatenate([v, v_further], 1))


@entered(in_blocks)
def blocks_side_by_side_and_apart_again(q, k, v, k_further, v_further):
    p = softmax(jnp.concatenate([scores(q, k_further), triangle(scores(q, k), -jnp.inf)], -1))
    return mixed(p[..., :5], v_further) + mixed(p[..., 5:], v)


@entered(in_blocks)
def blocks_with_shared_statistics(q, k, v, k_further, v_further):
    (e, e_further), total = shared_statistics([triangle(scores(q, k)) / 2, scores(q, k_further) / 2])
    return mixed(e / total, v) + mixed(e_further / total, v_further)


@entered(lambda: in_blocks(T))
def blocks_of_one_size_with_the_division_at_the_end(q, k, v, k_further, v_further):
    (e, e_further), total = shared_statistics([scores(q, k), triangle(scores(q, k_further))])
    return (mixed(e, v) + mixed(e_further, v_further)) / jnp.moveaxis(total, 1, 2)


@entered(lambda: [x.astype(jnp.bfloat16) for x in in_blocks()])
def blocks_in_narrow_numbers(q, k, v, k_further, v_further):
    s = jnp.concatenate([triangle(scores(q, k)), scores(q, k_further)], -1)
    p = softmax(s.astype(jnp.float32)).astype(q.dtype)
    return mixed(p, jnp.concatenate([v, v_further], 1))


@entered(lambda: [*in_blocks(), jnp.asarray(np.arange(T * (T + 5)).reshape(T, -1) % 3 < 2)])
def blocks_with_one_mask_and_scale_for_all(q, k, v, k_further, v_further, mask):
    s = jnp.concatenate([scores(q, k), scores(q, k_further)], -1)
    p = softmax(jnp.where(mask, s / 2, jnp.finfo(s.dtype).min))
    return mixed(p[..., :T], v) + mixed(p[..., T:], v_further)


@entered(lambda: [*in_blocks(), *(array(N, T, n, seed=n) for n in (T, 5)), array(N, seed=9)])
def blocks_with_biases_and_a_sink(q, k, v, k_further, v_further, bias, bias_further, sink):
    columns = jnp.broadcast_to(sink[:, None, None], (B, N, T, 1))
    p = softmax(jnp.concatenate([scores(q, k) + bias, scores(q, k_further) + bias_further, columns], -1))
    return mixed(p[..., :T], v) + mixed(p[..., T:-1], v_further)


@entered(lambda: [*in_blocks(), *(jnp.asarray(np.arange(T * n).reshape(T, n) % 3 < 2) for n in (T, 5))])
def blocks_with_masks_in_a_checkpointed_loop(q, k, v, k_further, v_further, mask, mask_further):
    def step(x, w):
        turned = q * w
        parts = jnp.where(mask, scores(turned, k), -1e9), jnp.where(mask_further, scores(turned, k_further), -1e9)
        p = softmax(jnp.concatenate(parts, -1))
        return x + (mixed(p[..., :T], v) + mixed(p[..., T:], v_further)), None

    return lax.scan(jax.checkpoint(step), jnp.zeros((B, T, N, 3)), jnp.array([1.0, 0.5]))[0]


def part_of_keys(q, k, v, hidden=False):
    """The product of exponentials and values of a block of keys, its maximum and its sum, each [B, T, N, 1 or D]."""
    s = jnp.moveaxis(triangle(scores(q, k)) if hidden else scores(q, k), 2, 1)
    m = s.max(-1, keepdims=True)
    e = jnp.exp(s - m)
    return jnp.einsum("btns,bsnd->btnd", e, v), m, e.sum(-1, keepdims=True)


def joined(parts, factor=lambda m, common: jnp.exp(m - common), weight=None):
    common = functools.reduce(jnp.maximum, [m for _, m, _ in parts])
    total = sum(factor(m, common) * s for _, m, s in parts)
    return sum((weight or factor)(m, common) * y / total for y, m, _ in parts)


@entered(in_blocks)
def parts_of_the_keys_joined(q, k, v, k_further, v_further):
    return joined([part_of_keys(q, k, v, hidden=True), part_of_keys(q, k_further, v_further)])


@entered(lambda: [*in_blocks(), array(B, 3, N, D, seed=7), array(B, 3, N, 3, seed=8)])
def parts_of_the_keys_joined_three_of_them(q, k, v, k_further, v_further, k_last, v_last):
    parts = part_of_keys(q, k, v, hidden=True), part_of_keys(q, k_further, v_further), part_of_keys(q, k_last, v_last)
    return joined(parts)


@entered(lambda: in_blocks(T))
def parts_of_the_keys_joined_in_a_loop(q, k, v, k_further, v_further):
    """The division comes after the sum."""

    def step(x, w):
        turned = q * w
        y, m, s = part_of_keys(turned, k, v)
        y_further, m_further, s_further = part_of_keys(turned, k_further, v_further)
        common = jnp.maximum(m, m_further)
        a, b = jnp.exp(m - common), jnp.exp(m_further - common)
        return x + (y * a + y_further * b) / (s * a + s_further * b), None

    return lax.scan(step, jnp.zeros((B, T, N, 3)), jnp.array([1.0, 0.5]))[0]


# --- Biases that are products, over more elements than queries and keys, of heads that share keys --------------------

BUCKETS = 12


def with_queries(*further) -> list[Any]:
    """Queries of several heads, keys and values of one, and what a bias is computed from."""
    shapes = (B, T, N, D), (B, T, D), (B, T, D), *further
    return [array(*shape, seed=i) for i, shape in enumerate(shapes)]


def attend_with(q, k, v, bias):
    p = softmax(jnp.einsum("btnd,bsd->bnts", q, k) + bias)
    return jnp.einsum("bnts,bsd->btnd", p, v)


def buckets():
    """Relative positions as one-hot vectors, [T, T, BUCKETS]."""
    apart = jnp.clip(jnp.arange(T) - jnp.arange(T)[:, None] + BUCKETS // 2, 0, BUCKETS - 1)
    return jax.nn.one_hot(apart, BUCKETS)


@entered(lambda: with_queries((N, BUCKETS)))
def bias_of_one_hot_buckets(q, k, v, table):
    return attend_with(q, k, v, jnp.einsum("nr,tsr->nts", table, buckets()))


@entered(lambda: with_queries((LAYERS, N, BUCKETS)))
def bias_of_one_hot_buckets_in_layers_that_save_products(q, k, v, tables):
    def step(x, table):
        return x + attend_with(x + q, k, v, jnp.einsum("nr,tsr->nts", table, buckets())), None

    step = jax.checkpoint(step, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
    return lax.scan(step, jnp.zeros_like(q), tables)[0]


@entered(lambda: with_queries((T, T, BUCKETS), (BUCKETS, N)))
def bias_of_pairs(q, k, v, pairs, w):
    return attend_with(q, k, v, jnp.einsum("tsc,cn->nts", pairs, w))


def normalised_part(q, k, v, hidden=False):
    """The attention over a block of keys, and the logarithm of its sum of exponentials, each [B, N, T, 1 or D]."""
    s = triangle(scores(q, k), fill=-1e9) if hidden else scores(q, k)
    total = jax.nn.logsumexp(s, -1, keepdims=True)
    return jnp.einsum("bnts,bsnd->bntd", jnp.exp(s - total), v), total


def merged(first, second, weight=lambda own, whole: jnp.exp(own - whole)):
    """Two attentions with their logarithms joined to one."""
    (y, a), (z, b) = first, second
    whole = jnp.logaddexp(a, b)
    return y * weight(a, whole) + z * weight(b, whole), whole


@entered(in_blocks)
def parts_of_the_keys_merged(q, k, v, k_further, v_further):
    return merged(normalised_part(q, k, v, hidden=True), normalised_part(q, k_further, v_further))[0]


@entered(lambda: [*in_blocks(), array(B, 3, N, D, seed=7), array(B, 3, N, 3, seed=8)])
def parts_of_the_keys_merged_pairwise(q, k, v, k_further, v_further, k_last, v_last):
    both = merged(normalised_part(q, k, v), normalised_part(q, k_further, v_further))
    return merged(both, normalised_part(q, k_last, v_last))[0]


@entered(in_blocks)
def parts_of_the_keys_merged_with_a_logarithm_beside_each_softmax(q, k, v, k_further, v_further):
    def part(k, v):
        s = scores(q, k)
        return jnp.einsum("bnts,bsnd->bntd", softmax(s), v), jax.nn.logsumexp(s, -1, keepdims=True)

    return jax.checkpoint(lambda: merged(part(k, v), part(k_further, v_further))[0])()


@entered(lambda: [array(B, T, N, D, seed=i) for i in range(3)] + [array(N, 1, 1, seed=5)])
def sink_added_by_logarithms(q, k, v, sink):
    s = triangle(scores(q, k))
    total = jnp.logaddexp(jax.nn.logsumexp(s, -1, keepdims=True), sink)
    return jnp.einsum("bnts,bsnd->bntd", jnp.exp(s - total), v)


def bands() -> list[Any]:
    """Queries, keys and values in three blocks of four, and a mask for each with itself, the next and the last."""
    mask = np.random.default_rng(0).random((2, 3, 3, 1, 4, 4)) < 0.7
    return [*(array(2, 3, 4, N, D, seed=seed) for seed in range(3)), jnp.asarray(mask | np.eye(4, dtype=bool))]


@entered(bands)
def three_bands(q, k, v, mask):
    k, v = (jnp.pad(x, ((0, 0), (1, 1), *((0, 0),) * 3)) for x in (k, v))
    neighbours = slice(1, -1), slice(2, None), slice(0, -2)
    parts = [jnp.einsum("bcqnd,bcknd->bcnqk", q, k[:, part]) / 2 for part in neighbours]
    parts = [jnp.where(mask[:, i], s, -1e30) for i, s in enumerate(parts)]
    m = jnp.max(jnp.stack([lax.stop_gradient(s.max(-1, keepdims=True)) for s in parts]), 0)
    exponentials = [jnp.exp(s - m) for s in parts]
    total = sum(e.sum(-1, keepdims=True) for e in exponentials)
    products = [
        jnp.einsum("bcnqk,bcknd->bcqnd", e / total, v[:, part])
        for e, part in zip(exponentials, neighbours, strict=True)
    ]
    return products[0] + products[1] + products[2]


def _blocks_look_alike(function):
    LOOK_ALIKES[function.__name__] = Written(function, lambda: in_blocks(T), 0, "")
    return function


@look_alike(lambda: [array(2, 4, 5, 8, seed=seed) for seed in range(3)], "each query has keys of its own")
def rows_and_columns_of_each_pixel_under_one_softmax(q, k, v):
    columns = jnp.where(jnp.eye(4, dtype=bool)[:, None], -jnp.inf, jnp.einsum("bhwc,bgwc->bhwg", q, k))
    p = softmax(jnp.concatenate([columns, jnp.einsum("bhwc,bhuc->bhwu", q, k)], -1))
    return jnp.einsum("bhwg,bgwc->bhwc", p[..., :4], v) + jnp.einsum("bhwu,bhuc->bhwc", p[..., 4:], v)


@_blocks_look_alike
def blocks_whose_difference_is_taken(q, k, v, k_further, v_further):
    (e, e_further), total = shared_statistics([scores(q, k), scores(q, k_further)])
    return mixed(e / total, v) - mixed(e_further / total, v_further)


@_blocks_look_alike
def blocks_of_which_one_counts_twice_in_the_sum(q, k, v, k_further, v_further):
    (e, e_further), total = shared_statistics([scores(q, k), scores(q, k_further)])
    total = total + e.sum(-1, keepdims=True)
    return mixed(e / total, v) + mixed(e_further / total, v_further)


@_blocks_look_alike
def blocks_of_which_the_sum_lacks_one(q, k, v, k_further, v_further):
    (e, e_further), _ = shared_statistics([scores(q, k), scores(q, k_further)])
    total = e.sum(-1, keepdims=True)
    return mixed(e / total, v) + mixed(e_further / total, v_further)


@look_alike(lambda: in_blocks(T), "", sites=2)
def blocks_with_a_maximum_each(q, k, v, k_further, v_further):
    parts = scores(q, k), scores(q, k_further)
    exponentials = [jnp.exp(s - lax.stop_gradient(s.max(-1, keepdims=True))) for s in parts]
    total = sum(e.sum(-1, keepdims=True) for e in exponentials)
    return mixed(exponentials[0] / total, v) + mixed(exponentials[1] / total, v_further)


@_blocks_look_alike
def blocks_joined_by_the_maxima_of_the_sums(q, k, v, k_further, v_further):
    """Products and sums have other factors."""
    parts = part_of_keys(q, k, v), part_of_keys(q, k_further, v_further)
    return joined(parts, weight=lambda m, common: jnp.exp((m - common) / 2))


@_blocks_look_alike
def blocks_joined_as_if_of_one_maximum(q, k, v, k_further, v_further):
    return joined([part_of_keys(q, k, v), part_of_keys(q, k_further, v_further)], factor=lambda m, common: 1.0)


@_blocks_look_alike
def blocks_merged_with_the_weights_of_others(q, k, v, k_further, v_further):
    (y, a), (z, b) = normalised_part(q, k, v), normalised_part(q, k_further, v_further)
    return merged((y, b), (z, a))[0]


@_blocks_look_alike
def blocks_merged_by_roots(q, k, v, k_further, v_further):
    parts = normalised_part(q, k, v), normalised_part(q, k_further, v_further)
    return merged(*parts, weight=lambda own, whole: jnp.exp((own - whole) / 2))[0]


@look_alike(lambda: in_blocks(T), "", sites=1)
def blocks_merged_of_which_one_hides_keys_from_the_sum(q, k, v, k_further, v_further):
    first, (z, _) = normalised_part(q, k, v, hidden=True), normalised_part(q, k_further, v_further)
    return merged(first, (z, normalised_part(q, k_further[:, :2], v_further[:, :2])[1]))[0]


@_blocks_look_alike
def blocks_of_other_queries(q, k, v, k_further, v_further):
    p = softmax(jnp.concatenate([scores(q, k), scores(jnp.sin(q), k_further)], -1))
    return mixed(p[..., :T], v) + mixed(p[..., T:], v_further)


@_blocks_look_alike
def blocks_that_overlap(q, k, v, k_further, v_further):
    p = softmax(jnp.concatenate([scores(q, k), scores(q, k_further)], -1))
    return mixed(p[..., :T], v) + mixed(p[..., 1 : T + 1], v_further)


@_blocks_look_alike
def blocks_with_weights_behind_the_softmax(q, k, v, k_further, v_further):
    p = softmax(jnp.concatenate([scores(q, k), scores(q, k_further)], -1))
    return mixed(p[..., :T], v) + mixed(p[..., T:] * jnp.arange(T), v_further)
