"""Spellings that differ in layout: order of axes, merged and mapped heads, shared heads, where the scale is."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.nn import softmax

from support.catalogue import array, bhtd, bthd, spelling

grouped = functools.partial(bhtd, grouped=True)
grouped_bthd = functools.partial(bthd, grouped=True)


def merged(sizes, dtype):
    """q [B, T, H * D], k and v [B, S, H * D]."""
    return [x.reshape(*x.shape[:2], -1) for x in bthd(sizes, dtype)]


def flat(sizes, dtype):
    """q [T, D], k and v [S, D]."""
    return [x[0, 0] for x in bhtd(sizes, dtype)]


# --- Scale -----------------------------------------------------------------------------------------------------------


@spelling()
def matmul_divided_by_root(sizes, q, k, v):
    return softmax(q @ k.mT / math.sqrt(sizes.size)) @ v


@spelling()
def without_scale(sizes, q, k, v):
    return softmax(q @ k.mT) @ v


@spelling()
def scale_on_queries(sizes, q, k, v):
    return softmax((q * sizes.size**-0.5) @ k.mT) @ v


@spelling()
def scale_on_keys(sizes, q, k, v):
    return softmax(q @ (k / sizes.size**0.5).mT) @ v


@spelling()
def scale_split_between_queries_and_keys(sizes, q, k, v):
    return softmax((q * sizes.size**-0.25) @ (k * sizes.size**-0.25).mT) @ v


@spelling()
def scale_by_a_traced_root(sizes, q, k, v):
    return softmax(q @ k.mT / jnp.sqrt(jnp.asarray(k.shape[-1], q.dtype))) @ v


@spelling(extra=lambda sizes, dtype: (jnp.asarray(0.6, dtype),))
def learned_temperature(sizes, q, k, v, temperature):
    return softmax(q @ k.mT * temperature) @ v


@spelling(extra=lambda sizes, dtype: (array(sizes.heads, dtype=dtype),))
def learned_temperature_per_head(sizes, q, k, v, temperature):
    return softmax(q @ k.mT / jnp.exp(temperature)[:, None, None]) @ v


# --- Order of axes ---------------------------------------------------------------------------------------------------


@spelling(bthd)
def einsum_over_bthd(sizes, q, k, v):
    return jnp.einsum("bhts,bshd->bthd", softmax(jnp.einsum("bthd,bshd->bhts", q, k)), v)


@spelling(bthd)
def keys_before_queries_in_the_scores(sizes, q, k, v):
    return jnp.einsum("bhst,bshd->bthd", softmax(jnp.einsum("bshd,bthd->bhst", k, q), axis=-2), v)


@spelling()
def softmax_over_the_rows_of_transposed_scores(sizes, q, k, v):
    return softmax(k @ q.mT / 2.0, axis=-2).mT @ v


@spelling(bthd)
def heads_last_in_the_scores(sizes, q, k, v):
    return jnp.einsum("btsh,bshd->bthd", softmax(jnp.einsum("bthd,bshd->btsh", q, k) * 0.4, axis=2), v)


@spelling(bthd)
def batch_last_in_the_scores(sizes, q, k, v):
    return jnp.einsum("stbh,bshd->bhtd", softmax(jnp.einsum("bthd,bshd->stbh", q, k) * 0.4, axis=0), v)


@spelling()
def values_before_probabilities(sizes, q, k, v):
    return jnp.einsum("bhsd,bhts->bhdt", v, softmax(jnp.einsum("bhtd,bhsd->bhts", q, k)))


@spelling()
def dot_general_without_einsum(sizes, q, k, v):
    scores = lax.dot_general(q, k, (((3,), (3,)), ((0, 1), (0, 1))))
    return lax.dot_general(softmax(scores), v, (((3,), (2,)), ((0, 1), (0, 1))))


@spelling(bthd)
def a_literal_axis_of_size_one_for_the_keys(sizes, q, k, v):
    k, v = k[:, :, None], v[:, :, None]
    return jnp.einsum("bhts,bs1hd->bthd", softmax(jnp.einsum("bthd,bs1hd->bhts", q, k)), v)


@spelling(flat)
def one_head_without_a_batch(sizes, q, k, v):
    return softmax(q @ k.T * 0.3) @ v


@spelling(lambda sizes, dtype: [array(sizes.queries, sizes.size, dtype=dtype)])
def everything_from_one_array(sizes, x):
    return softmax(x @ x.T / 3.0) @ x


@spelling()
def sums_of_products_instead_of_dots(sizes, q, k, v):
    scores = jnp.sum(q[..., :, None, :] * k[..., None, :, :], -1)
    return jnp.sum(softmax(scores)[..., None] * v[..., None, :, :], -2)


@spelling(bthd)
def batch_and_heads_merged(sizes, q, k, v):
    b, h, _, t, _, d = sizes
    q, k, v = (x.swapaxes(1, 2).reshape(b * h, -1, d) for x in (q, k, v))
    out = jnp.einsum("nts,nsd->ntd", softmax(jnp.einsum("ntd,nsd->nts", q, k)), v)
    return out.reshape(b, h, t, d).swapaxes(1, 2).reshape(b, t, h * d)


@spelling(merged)
def heads_split_from_features(sizes, q, k, v):
    b, h, _, t, _, d = sizes
    q, k, v = (x.reshape(b, -1, h, d).transpose(0, 2, 1, 3) for x in (q, k, v))
    return (softmax(q @ k.transpose(0, 1, 3, 2) * d**-0.5) @ v).transpose(0, 2, 1, 3).reshape(b, t, h * d)


@spelling(lambda sizes, dtype: [array(sizes.batch, sizes.queries, sizes.heads * sizes.size * 3, dtype=dtype)])
def one_projection_split_into_three(sizes, x):
    b, h, _, t, _, d = sizes
    q, k, v = (part.reshape(b, t, h, d) for part in jnp.split(x, 3, -1))
    return jnp.einsum("bhts,bshd->bthd", softmax(jnp.einsum("bthd,bshd->bhts", q, k)), v)


@spelling(lambda sizes, dtype: [array(sizes.batch, sizes.queries, 3, sizes.heads, sizes.size, dtype=dtype)])
def three_indices_into_one_projection(sizes, x):
    q, k, v = x[:, :, 0], x[:, :, 1], x[:, :, 2]
    return jnp.einsum("bhts,bshd->bthd", softmax(jnp.einsum("bthd,bshd->bhts", q, k) / 2), v)


@spelling(
    lambda sizes, dtype: [
        array(sizes.batch, 2, sizes.queries, sizes.size, dtype=dtype),
        *(array(sizes.batch, 2, sizes.keys, sizes.size, dtype=dtype, seed=i) for i in (1, 2)),
    ]
)
def an_image_with_two_query_axes(sizes, q, k, v):
    scores = jnp.einsum("bhwd,bhsd->bhws", q, k)
    scores = scores.reshape(sizes.batch, 1, 2, sizes.queries, sizes.keys)[:, 0]
    return jnp.einsum("bhws,bhsd->bwhd", softmax(scores), v)


@spelling(
    lambda sizes, dtype: [array(sizes.batch, 3, 2, sizes.heads, sizes.size, dtype=dtype, seed=i) for i in range(3)]
)
def pixels_as_queries_and_keys(sizes, q, k, v):
    b, h = sizes.batch, sizes.heads
    scores = jnp.einsum("bxyhd,bzwhd->bhxyzw", q, k).reshape(b, h, 6, 6)
    p = softmax(scores * 0.2).reshape(b, h, 3, 2, 3, 2)
    return jnp.einsum("bhxyzw,bzwhd->bxyhd", p, v)


# --- Mapped axes -----------------------------------------------------------------------------------------------------


@spelling()
def heads_mapped(sizes, q, k, v):
    return jax.vmap(lambda q, k, v: softmax(q @ k.mT) @ v, 1, 1)(q, k, v)


@spelling(bthd)
def batch_and_heads_mapped_with_other_output_axes(sizes, q, k, v):
    one = lambda q, k, v: softmax(q @ k.T) @ v  # noqa: E731
    return jax.vmap(jax.vmap(one, 1, -1))(q, k, v)


@spelling()
def queries_mapped_one_by_one(sizes, q, k, v):
    row = lambda q, k, v: softmax(k @ q / 2) @ v  # noqa: E731
    return jax.vmap(jax.vmap(jax.vmap(row, (0, None, None))))(q, k, v)


@spelling(sites=lambda sizes: sizes.heads)
def heads_in_a_python_loop(sizes, q, k, v):
    return jnp.stack([softmax(q[:, h] @ k[:, h].mT) @ v[:, h] for h in range(sizes.heads)], 1)


# --- Heads that share keys -------------------------------------------------------------------------------------------


@spelling(grouped)
def shared_heads_by_repeat(sizes, q, k, v):
    k, v = (jnp.repeat(x, sizes.groups, axis=1) for x in (k, v))
    return softmax(q @ k.mT) @ v


@spelling(grouped_bthd)
def shared_heads_by_reshaped_queries(sizes, q, k, v):
    b, h, g, t, _, d = sizes
    scores = jnp.einsum("btkgd,bskd->bkgts", q.reshape(b, t, h, g, d), k)
    return jnp.einsum("bkgts,bskd->btkgd", softmax(scores), v).reshape(b, t, h * g, d)


@spelling(grouped_bthd)
def shared_heads_between_queries_and_keys(sizes, q, k, v):
    b, h, g, t, _, d = sizes
    scores = jnp.einsum("btkgh,bskh->btkgs", q.reshape(b, t, h, g, d), k)
    return jnp.einsum("btkgs,bskh->btkgh", softmax(scores * 0.5), v).reshape(b, t, h * g, d)


@spelling(grouped)
def shared_heads_by_broadcast_and_reshape(sizes, q, k, v):
    b, h, g, _, s, d = sizes
    k, v = (jnp.broadcast_to(x[:, :, None], (b, h, g, s, d)).reshape(b, h * g, s, d) for x in (k, v))
    return softmax(q @ k.mT) @ v


@spelling(grouped)
def shared_heads_by_tiling(sizes, q, k, v):
    k, v = (jnp.tile(x, (1, sizes.groups, 1, 1)) for x in (k, v))
    return softmax(q @ k.mT) @ v


@spelling(grouped)
def shared_heads_by_nested_maps(sizes, q, k, v):
    b, h, g, t, _, d = sizes
    one = lambda q, k, v: softmax(q @ k.T) @ v  # noqa: E731
    group = jax.vmap(one, (0, None, None))
    return jax.vmap(jax.vmap(group))(q.reshape(b, h, g, t, d), k, v).reshape(b, h * g, t, d)


@spelling(lambda sizes, dtype: [x if i == 0 else x[:, 0] for i, x in enumerate(bhtd(sizes, dtype))])
def one_key_head_by_einsum(sizes, q, k, v):
    return jnp.einsum("bhts,bsd->bhtd", softmax(jnp.einsum("bhtd,bsd->bhts", q, k)), v)


@spelling(lambda sizes, dtype: [x if i == 0 else x[:, 0] for i, x in enumerate(bhtd(sizes, dtype))])
def one_key_head_by_map(sizes, q, k, v):
    one = lambda q, k, v: softmax(q @ k.T) @ v  # noqa: E731
    return jax.vmap(jax.vmap(one, (0, None, None)))(q, k, v)


@spelling(lambda sizes, dtype: [x if i == 0 else x[:, :1] for i, x in enumerate(bhtd(sizes, dtype))])
def one_key_head_by_broadcasting_matmul(sizes, q, k, v):
    return softmax(q @ k.mT) @ v


@spelling(grouped_bthd)
def library_function_with_shared_heads(sizes, q, k, v):
    return jax.nn.dot_product_attention(q, k, v)


# --- Other lengths ---------------------------------------------------------------------------------------------------


@spelling(
    lambda sizes, dtype: [x[:, :, :1] if i == 0 else x for i, x in enumerate(bhtd(sizes, dtype))],
    extra=lambda sizes, dtype: (jnp.int32(2),),
)
def one_query_at_a_dynamic_position(sizes, q, k, v, position):
    seen = jnp.arange(sizes.keys) <= position
    return softmax(jnp.where(seen, q @ k.mT, -1e30)) @ v


@spelling(
    lambda sizes, dtype: [x[:, :, 0] if i == 0 else x for i, x in enumerate(bhtd(sizes, dtype))],
    extra=lambda sizes, dtype: (jnp.int32(2),),
)
def one_query_without_an_axis(sizes, q, k, v, position):
    scores = jnp.einsum("bhd,bhsd->bhs", q, k)
    scores = jnp.where(jnp.arange(sizes.keys) <= position, scores, -jnp.inf)
    return jnp.einsum("bhs,bhsd->bhd", softmax(scores), v)


@spelling(
    lambda sizes, dtype: [x[:, :, :1] for x in bhtd(sizes, dtype)],
    extra=lambda sizes, dtype: (*bhtd(sizes, dtype)[1:], jnp.int32(3)),
)
def a_cache_written_at_a_dynamic_position(sizes, q, k, v, keys, values, position):
    keys = lax.dynamic_update_slice_in_dim(keys, k, position, 2)
    values = lax.dynamic_update_slice_in_dim(values, v, position, 2)
    scores = jnp.where(jnp.arange(sizes.keys) <= position, q @ keys.mT, jnp.finfo(q.dtype).min)
    return softmax(scores) @ values, keys, values


def pages(sizes, dtype):
    """q [B, T, H, D]; pages of keys and values, [P, S, H, D], and the three pages of each sequence, [B, 3]."""
    q = bthd(sizes, dtype)[0]
    keys, values = (array(6, 5, sizes.heads, sizes.size, dtype=dtype, seed=seed) for seed in (2, 3))
    return q, keys, values, jnp.arange(3 * sizes.batch).reshape(-1, 3) % 6


@spelling(pages)
def keys_and_values_in_pages(sizes, q, keys, values, table):
    """The reshape behind the gather is all that shows that the axis of the keys is two."""
    k, v = (x[table].reshape(sizes.batch, -1, sizes.heads, sizes.size) for x in (keys, values))
    return jnp.einsum("bhts,bshd->bthd", softmax(jnp.einsum("bthd,bshd->bhts", q, k)), v)


@spelling(
    lambda sizes, dtype: [
        *bhtd(sizes, dtype)[:2],
        array(sizes.batch, sizes.heads, sizes.keys, sizes.size + 4, dtype=dtype),
    ]
)
def values_wider_than_keys(sizes, q, k, v):
    return softmax(q @ k.mT) @ v


@spelling(
    extra=lambda sizes, dtype: [array(sizes.batch, n, 2, dtype=dtype, seed=n) for n in (sizes.queries, sizes.keys)]
)
def scores_from_two_contractions(sizes, q, k, v, q_position, k_position):
    rotary = jnp.einsum("btr,bsr->bts", q_position, k_position)[:, None]
    return softmax((q @ k.mT + rotary) / 3) @ v


@spelling(
    extra=lambda sizes, dtype: [array(sizes.batch, 1, n, 2, dtype=dtype, seed=n) for n in (sizes.queries, sizes.keys)]
)
def heads_made_of_two_concatenated_parts(sizes, q, k, v, q_position, k_position):
    q = jnp.concatenate([q, jnp.broadcast_to(q_position, (*q.shape[:-1], 2))], -1)
    k = jnp.concatenate([k, jnp.broadcast_to(k_position, (*k.shape[:-1], 2))], -1)
    return softmax(q @ k.mT / 3) @ v
