"""Spellings that differ in what happens to the scores: masks, biases, caps, the softmax itself, weights and sinks."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.nn import softmax

from support.catalogue import array, bhtd, bthd, spelling


def triangle(sizes):
    return jnp.tril(jnp.ones((sizes.queries, sizes.keys), bool), sizes.ahead)


def padding(sizes, dtype):
    """A mask [B, S] with at least one key in each row."""
    return [jnp.asarray(np.arange(sizes.keys) < np.arange(2, 2 + sizes.batch)[:, None])]


def positions(sizes):
    return jnp.arange(sizes.queries)[:, None] + sizes.ahead, jnp.arange(sizes.keys)[None]


# --- Masks -----------------------------------------------------------------------------------------------------------


@spelling()
def triangle_with_infinite_fill(sizes, q, k, v):
    return softmax(jnp.where(triangle(sizes), q @ k.mT, -jnp.inf)) @ v


@spelling()
def triangle_with_the_least_number(sizes, q, k, v):
    return softmax(jnp.where(triangle(sizes), q @ k.mT, jnp.finfo(q.dtype).min)) @ v


@spelling()
def triangle_by_comparison_of_positions(sizes, q, k, v):
    row, column = positions(sizes)
    return softmax(jnp.where(column > row, -1e9, q @ k.mT)) @ v


@spelling()
def triangle_by_iota(sizes, q, k, v):
    shape = (sizes.queries, sizes.keys)
    rows, columns = lax.broadcasted_iota(jnp.int32, shape, 0), lax.broadcasted_iota(jnp.int32, shape, 1)
    return softmax(jnp.where(rows + sizes.ahead - columns >= 0, q @ k.mT, -1e30)) @ v


@spelling()
def triangle_added(sizes, q, k, v):
    return softmax(q @ k.mT + jnp.triu(jnp.full((sizes.queries, sizes.keys), -1e9, q.dtype), sizes.ahead + 1)) @ v


@spelling()
def triangle_added_as_one_minus_mask(sizes, q, k, v):
    mask = jnp.tril(jnp.ones((sizes.queries, sizes.keys), q.dtype), sizes.ahead)
    return softmax(q @ k.mT + (1.0 - mask) * -1e10) @ v


@spelling()
def triangle_multiplied_and_added(sizes, q, k, v):
    mask = jnp.tril(jnp.ones((sizes.queries, sizes.keys), q.dtype), sizes.ahead)
    return softmax(q @ k.mT * mask - 1e9 * (1 - mask)) @ v


@spelling()
def triangle_as_a_numpy_constant(sizes, q, k, v):
    mask = np.tri(sizes.queries, sizes.keys, sizes.ahead, dtype=bool)
    return softmax(jnp.where(mask, q @ k.mT, -1e9)) @ v


@spelling()
def triangle_by_concatenation(sizes, q, k, v):
    parts = [jnp.ones((sizes.queries, sizes.ahead), bool)] if sizes.ahead else []
    parts.append(jnp.tril(jnp.ones((sizes.queries, sizes.queries), bool)))
    return softmax(jnp.where(jnp.concatenate(parts, 1), q @ k.mT, -1e9)) @ v


@spelling()
def triangle_by_running_sum(sizes, q, k, v):
    row, _ = positions(sizes)
    column = jnp.cumsum(jnp.ones((1, sizes.keys), jnp.int32), 1) - 1
    return softmax(jnp.where(column <= row, q @ k.mT, -1e9)) @ v


@spelling(extra=lambda sizes, dtype: [jnp.asarray(np.tri(sizes.queries, sizes.keys, 1, dtype=bool))])
def mask_as_an_input(sizes, q, k, v, mask):
    return softmax(jnp.where(mask, q @ k.mT, -1e9)) @ v


@spelling(extra=lambda sizes, dtype: [jnp.asarray(np.tri(sizes.queries, sizes.keys, 1, dtype=np.int32))])
def integer_mask_as_an_input(sizes, q, k, v, mask):
    return softmax(jnp.where(mask == 0, -jnp.inf, q @ k.mT)) @ v


@spelling(extra=padding)
def padding_under_a_triangle(sizes, q, k, v, valid):
    return softmax(jnp.where(valid[:, None, None] & triangle(sizes), q @ k.mT, -1e9)) @ v


@spelling(extra=lambda sizes, dtype: [jnp.arange(2, 2 + sizes.batch)])
def padding_from_lengths(sizes, q, k, v, lengths):
    valid = jnp.arange(sizes.keys) < lengths[:, None, None, None]
    return softmax(jnp.where(valid, q @ k.mT, -jnp.inf)) @ v


@spelling(extra=padding)
def padding_added(sizes, q, k, v, valid):
    bias = (1.0 - valid.astype(q.dtype))[:, None, None] * jnp.finfo(q.dtype).min
    return softmax(q @ k.mT + bias) @ v


@spelling(extra=padding)
def padding_selected_into_a_bias(sizes, q, k, v, valid):
    bias = lax.select(valid, jnp.zeros(valid.shape, q.dtype), jnp.full(valid.shape, -1e10, q.dtype))
    return softmax(q @ k.mT + bias[:, None, None, :]) @ v


@spelling(
    extra=lambda sizes, dtype: [
        jnp.asarray(np.arange(n) // 3 * np.ones((sizes.batch, 1)), jnp.int32) for n in (sizes.queries, sizes.keys)
    ]
)
def segments(sizes, q, k, v, query_segments, key_segments):
    same = query_segments[:, None, :, None] == key_segments[:, None, None, :]
    return softmax(jnp.where(same, q @ k.mT, -0.7 * float(np.finfo(np.float32).max))) @ v


@spelling()
def sliding_window(sizes, q, k, v):
    row, column = positions(sizes)
    return softmax(jnp.where((column <= row) & (column > row - 3), q @ k.mT, -jnp.inf)) @ v


@spelling()
def band_by_two_triangles(sizes, q, k, v):
    ones = jnp.ones((sizes.queries, sizes.keys), bool)
    band = jnp.logical_and(jnp.tril(ones, sizes.ahead + 1), jnp.triu(ones, sizes.ahead - 2))
    return softmax(jnp.where(band, q @ k.mT, -1e9)) @ v


@spelling(extra=lambda sizes, dtype: [jnp.int32(3)])
def prefix(sizes, q, k, v, length):
    row, column = positions(sizes)
    return softmax(jnp.where((column <= row) | (column < length), q @ k.mT, -1e9)) @ v


@spelling()
def blocks_on_the_diagonal(sizes, q, k, v):
    row, column = jnp.arange(sizes.queries)[:, None], jnp.arange(sizes.keys)
    return softmax(jnp.where(row // 3 == column // 3, q @ k.mT, -1e4)) @ v


@spelling()
def dilated(sizes, q, k, v):
    row, column = positions(sizes)
    return softmax(jnp.where(((row - column) % 2 == 0) & (row >= column), q @ k.mT, -1e9)) @ v


@spelling()
def two_selections_one_after_the_other(sizes, q, k, v):
    row, column = positions(sizes)
    scores = jnp.where(column <= row, q @ k.mT, -1e9)
    return softmax(jnp.where(column > row - 4, scores, -1e9)) @ v


@spelling(extra=padding)
def mask_given_to_softmax(sizes, q, k, v, valid):
    return softmax(q @ k.mT, where=valid[:, None, None]) @ v


@spelling(bthd, extra=padding)
def library_function_with_a_mask_and_causal(sizes, q, k, v, valid):
    return jax.nn.dot_product_attention(q, k, v, mask=valid[:, None, None], is_causal=True)


@spelling(bthd)
def library_function_with_a_local_window(sizes, q, k, v):
    return jax.nn.dot_product_attention(q, k, v, local_window_size=(2, 1))


@spelling(extra=lambda sizes, dtype: [jnp.asarray(np.tri(sizes.queries, sizes.keys, 1, dtype=bool))])
def mask_rethresholded_from_its_fill(sizes, q, k, v, mask):
    large = -2.38e38
    bias = jnp.where(mask, 0.0, large)
    scores = (q @ k.mT).astype(jnp.float32)
    scores = jnp.where(bias >= large * 0.5, scores, large)
    return softmax(scores).astype(v.dtype) @ v


# --- Fully masked rows and large numbers -----------------------------------------------------------------------------


def with_an_empty_row(sizes, dtype):
    return [jnp.asarray(np.tri(sizes.queries, sizes.keys, -1, dtype=bool))]


@spelling(extra=with_an_empty_row)
def empty_row_with_finite_fill(sizes, q, k, v, mask):
    return softmax(jnp.where(mask, q @ k.mT, -1e9)) @ v


@spelling(extra=with_an_empty_row)
def empty_row_with_the_least_number(sizes, q, k, v, mask):
    return softmax(jnp.where(mask, q @ k.mT, jnp.finfo(jnp.float32).min)) @ v


@spelling(extra=with_an_empty_row)
def empty_row_with_infinite_fill_is_nan(sizes, q, k, v, mask):
    return softmax(jnp.where(mask, q @ k.mT, -jnp.inf)) @ v


@spelling(extra=with_an_empty_row)
def empty_row_set_to_zero_afterwards(sizes, q, k, v, mask):
    p = softmax(jnp.where(mask, q @ k.mT, -1e9))
    return jnp.where(mask, p, 0) @ v


@spelling(extra=with_an_empty_row)
def small_fill_beside_lower_scores(sizes, q, k, v, mask):
    return softmax(jnp.where(mask, q @ k.mT - 2e4, -1e4)) @ v


@spelling(lambda sizes, dtype: [x * 12 if i < 2 else x for i, x in enumerate(bhtd(sizes, dtype))])
def large_scores(sizes, q, k, v):
    return softmax((q @ k.mT).astype(jnp.float32)).astype(q.dtype) @ v


# --- Biases ----------------------------------------------------------------------------------------------------------


@spelling(extra=lambda sizes, dtype: [array(1, sizes.heads, sizes.queries, sizes.keys, dtype=dtype)])
def learned_bias(sizes, q, k, v, bias):
    return softmax(q @ k.mT * 0.4 + bias) @ v


@spelling(extra=lambda sizes, dtype: [array(sizes.heads, dtype=dtype), array(sizes.keys, dtype=dtype)])
def two_small_learned_biases(sizes, q, k, v, per_head, per_key):
    return softmax(q @ k.mT + per_head[:, None, None] * jnp.sin(jnp.arange(sizes.keys)).astype(q.dtype) + per_key) @ v


@spelling()
def slope_per_head(sizes, q, k, v):
    row, column = positions(sizes)
    slopes = 2.0 ** -jnp.arange(1, sizes.heads + 1)
    bias = -jnp.abs(row - column) * slopes[:, None, None]
    return softmax((q @ k.mT + bias.astype(q.dtype)) * 0.5) @ v


@spelling(extra=lambda sizes, dtype: [array(16, sizes.heads, dtype=dtype)])
def table_of_relative_positions(sizes, q, k, v, table):
    distance = jnp.arange(sizes.keys)[None] - jnp.arange(sizes.queries)[:, None]
    bias = table[jnp.clip(distance + 8, 0, 15)].transpose(2, 0, 1)[None]
    return softmax(q @ k.mT + bias) @ v


@spelling()
def soft_cap(sizes, q, k, v):
    return softmax(2.0 * jnp.tanh(q @ k.mT / 2.0)) @ v


@spelling()
def soft_cap_under_a_mask(sizes, q, k, v):
    return softmax(jnp.where(triangle(sizes), jnp.tanh(q @ k.mT * 0.1) * 20, -2.3819763e38)) @ v


@spelling()
def bounded_scores(sizes, q, k, v):
    return softmax(jnp.clip(q @ k.mT, -3, 1.5)) @ v


@spelling()
def squared_scores(sizes, q, k, v):
    return softmax(jax.nn.relu(q @ k.mT) ** 2 * 0.1) @ v


# --- The softmax -----------------------------------------------------------------------------------------------------


@spelling()
def exponentials_without_a_maximum(sizes, q, k, v):
    e = jnp.exp(q @ k.mT * 0.3)
    return (e / e.sum(-1, keepdims=True)) @ v


@spelling()
def maximum_with_stopped_gradient(sizes, q, k, v):
    s = q @ k.mT
    e = jnp.exp(s - lax.stop_gradient(s.max(-1, keepdims=True)))
    return e / jnp.sum(e, -1, keepdims=True) @ v


@spelling()
def maximum_with_a_gradient(sizes, q, k, v):
    s = q @ k.mT
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return e / jnp.sum(e, -1, keepdims=True) @ v


@spelling()
def maximum_subtracted_twice(sizes, q, k, v):
    s = q @ k.mT
    return softmax(s - s.max(-1, keepdims=True)) @ v


@spelling()
def mean_subtracted(sizes, q, k, v):
    s = q @ k.mT
    return softmax(s - s.mean(-1, keepdims=True)) @ v


@spelling()
def division_after_the_second_dot(sizes, q, k, v):
    s = q @ k.mT
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return (e @ v) / e.sum(-1, keepdims=True)


@spelling(bthd)
def division_after_a_transposing_einsum(sizes, q, k, v):
    s = jnp.einsum("bthd,bshd->bhts", q, k)
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return jnp.einsum("bhts,bshd->bthd", e, v) / jnp.einsum("bhts->bth", e)[..., None]


@spelling()
def multiplied_by_the_reciprocal(sizes, q, k, v):
    s = q @ k.mT
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return (e * (1 / e.sum(-1, keepdims=True))) @ v


@spelling()
def reciprocal_after_the_second_dot(sizes, q, k, v):
    e = jnp.exp(q @ k.mT * 0.2)
    return (e @ v) * jnp.reciprocal(e.sum(-1))[..., None]


@spelling()
def logsumexp_subtracted(sizes, q, k, v):
    s = q @ k.mT
    return jnp.exp(s - jax.nn.logsumexp(s, -1, keepdims=True)) @ v


@spelling()
def logsumexp_by_hand(sizes, q, k, v):
    s = q @ k.mT
    m = s.max(-1)
    lse = jnp.log(jnp.exp(s - m[..., None]).sum(-1)) + m
    return jnp.exp(s - lse[..., None]) @ v


@spelling()
def exponential_of_log_softmax(sizes, q, k, v):
    return jnp.exp(jax.nn.log_softmax(jnp.where(triangle(sizes), q @ k.mT, -1e9))) @ v


@spelling()
def powers_of_two(sizes, q, k, v):
    s = q @ k.mT * (0.3 * math.log2(math.e))
    e = jnp.exp2(s - s.max(-1, keepdims=True))
    return e @ v / e.sum(-1, keepdims=True)


@spelling()
def powers_of_a_number(sizes, q, k, v):
    e = jnp.e ** (q @ k.mT * 0.3)
    return e @ v / e.sum(-1, keepdims=True)


@spelling()
def softmax_in_float32(sizes, q, k, v):
    return softmax((q @ k.mT).astype(jnp.float32)).astype(q.dtype) @ v


@spelling(bthd)
def float32_from_the_first_dot_on(sizes, q, k, v):
    s = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32)
    p = softmax(jnp.where(triangle(sizes), s, -1e30)).astype(v.dtype)
    return jnp.einsum("bhts,bshd->bthd", p, v, preferred_element_type=jnp.float32).astype(q.dtype)


@spelling()
def normaliser_as_a_dot_with_ones(sizes, q, k, v):
    e = jnp.exp(q @ k.mT * 0.3)
    return (e @ v) / (e @ jnp.ones((sizes.keys, 1), e.dtype))


@spelling()
def probabilities_divided_by_a_constant_and_multiplied_back(sizes, q, k, v):
    return (softmax(q @ k.mT) / 4.0) @ (v * 4.0)


@spelling()
def softmax_of_negated_distances(sizes, q, k, v):
    return softmax(-(1.0 - q @ k.mT)) @ v


# --- Weights and sinks -----------------------------------------------------------------------------------------------


@spelling(extra=padding)
def mask_again_after_the_softmax(sizes, q, k, v, valid):
    valid = valid[:, None, None]
    return jnp.where(valid, softmax(jnp.where(valid, q @ k.mT, -1e9)), 0) @ v


@spelling(extra=with_an_empty_row)
def guard_of_rows_without_a_key(sizes, q, k, v, mask):
    p = softmax(jnp.where(mask, q @ k.mT, -jnp.inf))
    return jnp.where(mask.any(-1, keepdims=True), p, 0.0) @ v


@spelling(extra=lambda sizes, dtype: [jnp.arange(sizes.heads).astype(dtype)])
def weights_per_head(sizes, q, k, v, heads):
    return (softmax(q @ k.mT) * heads[:, None, None]) @ v


@spelling(extra=lambda sizes, dtype: [array(sizes.queries, sizes.keys, dtype=dtype)])
def weights_per_pair(sizes, q, k, v, weights):
    return (softmax(q @ k.mT) * weights) @ v


@spelling()
def triangle_multiplied_after_the_softmax(sizes, q, k, v):
    return (softmax(q @ k.mT) * triangle(sizes)) @ v


@spelling(extra=padding)
def masked_exponentials_renormalised(sizes, q, k, v, valid):
    e = jnp.where(valid[:, None, None], jnp.exp(q @ k.mT * 0.2), 0)
    return (e / e.sum(-1, keepdims=True)) @ v


@spelling(extra=lambda sizes, dtype: [array(sizes.heads, dtype=dtype)])
def sink_column_last(sizes, q, k, v, sink):
    column = jnp.broadcast_to(sink[:, None, None], (*q.shape[:-1], 1))
    return softmax(jnp.concatenate([jnp.where(triangle(sizes), q @ k.mT, -1e9), column], -1))[..., :-1] @ v


@spelling(extra=lambda sizes, dtype: [array(sizes.heads, dtype=dtype)])
def sink_column_first(sizes, q, k, v, sink):
    column = jnp.broadcast_to(sink[:, None, None], (*q.shape[:-1], 1))
    return softmax(jnp.concatenate([column, q @ k.mT], -1))[..., 1:] @ v


@spelling(extra=lambda sizes, dtype: [array(sizes.heads, dtype=dtype)])
def sink_in_the_denominator(sizes, q, k, v, sink):
    s = q @ k.mT
    m = lax.stop_gradient(s.max(-1, keepdims=True))
    e = jnp.exp(s - m)
    return (e / (e.sum(-1, keepdims=True) + jnp.exp(sink[:, None, None] - m))) @ v


@spelling()
def one_added_to_the_denominator(sizes, q, k, v):
    e = jnp.exp(q @ k.mT * 0.3)
    return (e / (1 + e.sum(-1, keepdims=True))) @ v


@spelling()
def one_added_to_the_denominator_beside_a_maximum(sizes, q, k, v):
    s = q @ k.mT
    m = s.max(-1, keepdims=True)
    e = jnp.exp(s - m)
    return (e / (jnp.exp(-m) + e.sum(-1, keepdims=True))) @ v


# --- A factor of the row besides one over its sum --------------------------------------------------------------------


def shifted(s):
    return jnp.exp(s - lax.stop_gradient(s.max(-1, keepdims=True)))


@spelling()
def epsilon_in_the_denominator(sizes, q, k, v):
    e = shifted(q @ k.mT)
    return (e / (e.sum(-1, keepdims=True) + 1e-6)) @ v


@spelling()
def large_epsilon_after_the_second_dot(sizes, q, k, v):
    e = shifted(q @ k.mT)
    return (e @ v) / (0.3 + e.sum(-1, keepdims=True))


@spelling()
def epsilon_that_makes_no_difference(sizes, q, k, v):
    s = q @ k.mT
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return (e / (e.sum(-1, keepdims=True) + 1e-9)) @ v


@spelling()
def floor_under_the_denominator(sizes, q, k, v):
    e = shifted(q @ k.mT)
    return (e / jnp.maximum(e.sum(-1, keepdims=True), 3.0)) @ v


@spelling()
def floor_under_a_denominator_without_a_maximum(sizes, q, k, v):
    e = jnp.exp(q @ k.mT * 0.3)
    return (e / jnp.clip(e.sum(-1, keepdims=True), 30.0)) @ v


@spelling()
def one_added_beside_a_stopped_maximum(sizes, q, k, v):
    e = shifted(q @ k.mT)
    return (e / (1 + e.sum(-1, keepdims=True))) @ v


@spelling()
def one_added_beside_a_maximum_with_a_gradient(sizes, q, k, v):
    s = q @ k.mT
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return (e / (1 + e.sum(-1, keepdims=True))) @ v


@spelling(extra=lambda sizes, dtype: [array(sizes.heads, dtype=dtype)])
def learned_epsilon(sizes, q, k, v, epsilon):
    e = shifted(q @ k.mT)
    return (e / (e.sum(-1, keepdims=True) + jnp.exp(epsilon)[:, None, None])) @ v


@spelling(extra=with_an_empty_row)
def masked_exponentials_and_an_epsilon(sizes, q, k, v, mask):
    e = jnp.where(mask, shifted(q @ k.mT), 0)
    return (e / (e.sum(-1, keepdims=True) + 1e-3)) @ v


@spelling(extra=with_an_empty_row)
def mask_that_multiplies_exponentials_and_an_epsilon(sizes, q, k, v, mask):
    e = shifted(q @ k.mT) * mask
    return (e / (e.sum(-1, keepdims=True) + 1e-3)) @ v


@spelling(extra=with_an_empty_row)
def guarded_maximum_and_sum(sizes, q, k, v, mask):
    s = jnp.where(mask, q @ k.mT, -jnp.inf)
    m = lax.stop_gradient(s.max(-1, keepdims=True))
    e = jnp.exp(s - jnp.where(jnp.isfinite(m), m, 0))
    total = e.sum(-1, keepdims=True)
    return (e @ v) / jnp.where(total == 0, 1.0, total)


@spelling(extra=with_an_empty_row)
def mask_again_after_an_epsilon(sizes, q, k, v, mask):
    e = shifted(jnp.where(mask, q @ k.mT, -jnp.inf))
    return jnp.where(mask, e / (e.sum(-1, keepdims=True) + 0.1), 0) @ v


@spelling()
def probabilities_renormalised_with_an_epsilon(sizes, q, k, v):
    p = softmax(q @ k.mT)
    return (p / (p.sum(-1, keepdims=True) + 0.1)) @ v


@spelling()
def logsumexp_by_hand_with_an_epsilon(sizes, q, k, v):
    s = q @ k.mT
    m = lax.stop_gradient(s.max(-1, keepdims=True))
    return jnp.exp(s - m - jnp.log(jnp.exp(s - m).sum(-1, keepdims=True) + 0.5)) @ v


@spelling()
def normaliser_squared(sizes, q, k, v):
    e = jnp.exp(q @ k.mT * 0.3)
    return (e / e.sum(-1, keepdims=True) ** 2) @ v


@spelling()
def gradient_stopped_at_the_normaliser(sizes, q, k, v):
    e = jnp.exp(q @ k.mT * 0.3)
    return (e / lax.stop_gradient(e.sum(-1, keepdims=True))) @ v


@spelling(extra=lambda sizes, dtype: [array(sizes.heads, dtype=dtype)])
def sink_and_an_epsilon(sizes, q, k, v, sink):
    column = jnp.broadcast_to(sink[:, None, None], (*q.shape[:-1], 1))
    e = jnp.exp(jnp.concatenate([q @ k.mT * 0.3, column], -1))
    m = lax.stop_gradient((q @ k.mT * 0.3).max(-1, keepdims=True))
    return (e / jnp.exp(m) / (e.sum(-1, keepdims=True) / jnp.exp(m) + 0.1))[..., :-1] @ v


@spelling(extra=lambda sizes, dtype: [jnp.asarray(np.tri(sizes.queries, sizes.keys, 1, dtype=bool))])
def guard_of_probabilities_that_are_no_numbers(sizes, q, k, v, mask):
    p = softmax(jnp.where(mask, q @ k.mT, -jnp.inf))
    return jnp.where(jnp.isnan(p), 0.0, p) @ v


@spelling(extra=with_an_empty_row, gradients=False)
def guard_of_rows_that_are_no_numbers(sizes, q, k, v, mask):
    return jnp.nan_to_num(softmax(jnp.where(mask, q @ k.mT, -jnp.inf))) @ v


@spelling(extra=with_an_empty_row)
def masked_probabilities_renormalised_with_an_epsilon(sizes, q, k, v, mask):
    p = softmax(q @ k.mT) * mask
    return (p / (p.sum(-1, keepdims=True) + 1e-3)) @ v


@spelling(extra=lambda sizes, dtype: [array(sizes.queries, sizes.keys, dtype=dtype)])
def weighted_probabilities_renormalised_with_an_epsilon(sizes, q, k, v, weights):
    p = jnp.where(triangle(sizes), softmax(q @ k.mT), 0) * jnp.exp(weights)
    return (p / (p.sum(-1, keepdims=True) + 0.1)) @ v


@spelling(extra=with_an_empty_row)
def finite_fill_and_masked_exponentials_with_an_epsilon(sizes, q, k, v, mask):
    e = jnp.where(mask, shifted(jnp.where(mask, q @ k.mT, -1e9)), 0)
    return (e / (e.sum(-1, keepdims=True) + 1e-9)) @ v


@spelling(extra=with_an_empty_row, gradients=False)
def infinite_fill_and_masked_exponentials_with_an_epsilon(sizes, q, k, v, mask):
    e = jnp.where(mask, shifted(jnp.where(mask, q @ k.mT, -jnp.inf)), 0)
    return (e / (e.sum(-1, keepdims=True) + 1e-3)) @ v


@spelling(extra=with_an_empty_row, gradients=False)
def infinite_fill_without_a_guard_and_an_epsilon_is_nan(sizes, q, k, v, mask):
    e = shifted(jnp.where(mask, q @ k.mT, -jnp.inf))
    return (e / (e.sum(-1, keepdims=True) + 1e-3)) @ v
