"""Attention as libraries and models spell it: whole blocks, each in its own tongue."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.nn import softmax
from support.catalogue import array

__all__ = ["PROGRAMS", "Program"]

B, T, S, H, D = 2, 6, 9, 3, 4
E = H * D
LARGE = -2.3819763e38


@dataclass(frozen=True)
class Program:
    function: Callable[..., Any]
    arguments: Callable[[], Sequence[Any]]
    gradients: bool


PROGRAMS: dict[str, Program] = {}


def program(arguments: Callable[[], Sequence[Any]], gradients: bool = True) -> Callable[..., Any]:
    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS[function.__name__] = Program(function, arguments, gradients)
        return function

    return enter


def bthd(queries: int = T, keys: int = T, groups: int = 1) -> list[Any]:
    return [array(B, queries, H * groups, D, seed=1), *(array(B, keys, H, D, seed=i) for i in (2, 3))]


def bhtd(queries: int = T, keys: int = T) -> list[Any]:
    return [jnp.swapaxes(x, 1, 2) for x in bthd(queries, keys)]


def features() -> list[Any]:
    return [array(B, T, E, seed=1), array(E, 3 * E, seed=2, scale=0.4), array(E, E, seed=3, scale=0.4)]


def attended(scores: Any, v: Any) -> Any:
    return jnp.einsum("bhqk,bkhd->bqhd", softmax(scores), v)


# --- Libraries -------------------------------------------------------------------------------------------------------


@program(features)
def a_small_gpt(x, w, o):
    b, t, c = x.shape
    q, k, v = (y.reshape(b, t, H, c // H).transpose(0, 2, 1, 3) for y in jnp.split(x @ w, 3, axis=2))
    scores = (q @ k.transpose(0, 1, 3, 2)) * (1.0 / math.sqrt(k.shape[-1]))
    triangle = jnp.tril(jnp.ones((t, t))).reshape(1, 1, t, t)
    scores = jnp.where(triangle[:, :, :t, :t] == 0, float("-inf"), scores)
    return (softmax(scores, axis=-1) @ v).transpose(0, 2, 1, 3).reshape(b, t, c) @ o


@program(features)
def keys_in_capitals(x, w, o):
    q, k, v = ((x @ part).reshape(*x.shape[:-1], H, D) for part in jnp.split(w, 3, 1))
    logits = jnp.einsum("...thd,...Thd->...htT", q, k) / np.sqrt(D)
    logits = jnp.where(jnp.tril(jnp.ones((1, 1, T, T))), logits, -1e30)
    return jnp.einsum("...htT,...Thd->...thd", softmax(logits), v).reshape(*x.shape[:-1], -1) @ o


@program(lambda: [array(T, E, seed=1), array(S, E, seed=2), *(array(E, H, D, seed=i, scale=0.4) for i in (3, 4, 5))])
def single_examples_with_mapped_heads(queries, keys, *weights):
    q, k, v = (
        jax.vmap(lambda t, w=w: jnp.einsum("e,ehd->hd", t, w))(x)
        for x, w in zip((queries, keys, keys), weights, strict=True)
    )

    def one(q, k, v):
        logits = jnp.einsum("sd,Sd->sS", q / math.sqrt(q.shape[-1]), k)
        logits = jnp.where(jnp.ones(logits.shape, bool), logits, jnp.finfo(logits.dtype).min)
        return jnp.einsum("sS,Sd->sd", softmax(logits.astype(jnp.float32)).astype(logits.dtype), v)

    return jax.vmap(one, in_axes=1, out_axes=1)(q, k, v).reshape(T, -1)


@program(lambda: [*bthd(T, S), jnp.asarray(np.arange(S) < np.array([[4], [7]]))])
def bias_by_lax_select(q, k, v, valid):
    weights = jnp.einsum("...qhd,...khd->...hqk", q / jnp.sqrt(D).astype(q.dtype), k)
    mask = jnp.broadcast_to(valid[:, None, None], weights.shape)
    weights = weights + lax.select(mask, jnp.zeros_like(weights), jnp.full_like(weights, -1e10))
    return jnp.einsum("...hqk,...khd->...qhd", softmax(weights).astype(q.dtype), v)


@program(lambda: bthd(groups=2))
def groups_with_a_soft_cap_and_a_window(q, k, v):
    q = (q * D**-0.5).reshape(B, T, H, 2, D)
    logits = jnp.einsum("BTKGH,BSKH->BTKGS", q, k).reshape(B, T, 2 * H, T)
    logits = jnp.tanh(logits / 50.0) * 50.0
    position = jnp.arange(T)
    ones = jnp.ones((1, T, T), bool)
    mask = (position[None] <= position[:, None])[None] * jnp.triu(ones, -2) * jnp.tril(ones, 2)
    p = softmax(jnp.where(mask[:, :, None], logits, LARGE)).astype(k.dtype).reshape(B, T, H, 2, T)
    return jnp.einsum("BTKGS,BSKH->BTKGH", p, v).reshape(B, T, 2 * H, D)


@program(lambda: bthd(groups=2))
def unnormalised_product_and_a_threshold(q, k, v):
    scores = jnp.einsum("btkgd,bskd->bkgts", q.reshape(B, T, H, 2, D), k).astype(jnp.float32)
    mask = jnp.where(jnp.tril(jnp.ones((T, T), bool)), 0.0, 0.5 * LARGE * 2)
    scores = jnp.where(mask >= LARGE * 0.5, scores, LARGE)
    scores = scores + mask
    e = jnp.exp(scores - jnp.max(scores, -1, keepdims=True))
    total = jnp.moveaxis(jnp.sum(e, -1), -1, 1)[..., None]
    return (jnp.einsum("bkgts,bskd->btkgd", e, v) / total).reshape(B, T, 2 * H, D)


@program(lambda: [*bthd(), array(H, seed=4)])
def log_softmax_with_an_extra_logit(q, k, v, extra):
    logits = 5.0 * jnp.tanh(jnp.einsum("BTNH,BSNH->BNTS", q, k) / 5.0)
    logits = jnp.where(jnp.tri(T, dtype=bool), logits.astype(jnp.float32), 0.7 * LARGE)
    extra = jnp.broadcast_to(extra[:, None, None], (B, H, T, 1))
    p = jnp.exp(jax.nn.log_softmax(jnp.concatenate([logits, extra], -1)))[..., :T]
    return jnp.einsum("BNTS,BSNH->BTNH", p, v)


@program(lambda: bthd(groups=2))
def groups_before_queries(q, k, v):
    scores = jnp.einsum("bskhd,bmkd->bkhsm", q.reshape(B, T, H, 2, D), k) * 0.5
    return jnp.einsum("bkhsm,bmkd->bskhd", softmax(scores), v)


@program(lambda: bthd(groups=2))
def repeated_keys_by_broadcast(q, k, v):
    k, v = (jnp.broadcast_to(y[:, :, :, None], (B, T, H, 2, D)).reshape(B, T, 2 * H, D) for y in (k, v))
    q, k, v = (y.transpose(0, 2, 1, 3) for y in (q, k, v))
    scores = jnp.matmul(q, k.transpose(0, 1, 3, 2)) / math.sqrt(D) + jnp.triu(jnp.full((T, T), -jnp.inf), 1)
    return jnp.matmul(softmax(scores.astype(jnp.float32)).astype(q.dtype), v).transpose(0, 2, 1, 3)


# --- Positions -------------------------------------------------------------------------------------------------------


@program(bthd)
def slopes(q, k, v):
    rates = jnp.asarray([2 ** (-8 * (i + 1) / H) for i in range(H)])
    distance = jnp.arange(T)[None] - jnp.arange(T)[:, None]
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * D**-0.5 + rates[:, None, None] * distance[None]
    return attended(scores + jnp.where(distance <= 0, 0.0, -jnp.inf), v)


@program(lambda: [*bthd(), array(8, H, seed=7)])
def buckets_of_distances(q, k, v, table):
    distance = jnp.arange(T)[None] - jnp.arange(T)[:, None]
    back = jnp.maximum(-distance, 0)
    far = 4 + (jnp.log(back.astype(jnp.float32) / 4 + 1e-6) / math.log(4) * 4).astype(jnp.int32)
    bucket = jnp.where(back < 4, back, jnp.minimum(far, 7))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) + jnp.transpose(table[bucket], (2, 0, 1))[None]
    return attended(jnp.where(distance <= 0, scores, -1e9), v)


@program(lambda: [*bthd(), array(8, H, seed=7)])
def buckets_by_one_hot(q, k, v, table):
    distance = jnp.arange(T)[None] - jnp.arange(T)[:, None]
    bias = jnp.einsum("qkn,nh->hqk", jax.nn.one_hot(jnp.clip(distance + 4, 0, 7), 8), table)
    return attended(jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias, v)


@program(lambda: [*bthd(), array(2 * T - 1, H, D, seed=4), array(H, D, seed=5), array(H, D, seed=6)])
def relative_shift(q, k, v, r, content, position):
    by_content = jnp.einsum("bqhd,bkhd->bhqk", q + content, k)
    shifted = jnp.pad(jnp.einsum("bqhd,khd->bhqk", q + position, r), ((0, 0), (0, 0), (0, 0), (1, 0)))
    shifted = shifted.reshape(B, H, 2 * T, T)[:, :, 1:].reshape(B, H, T, 2 * T - 1)[..., :T]
    return attended((by_content + shifted) * 0.5, v)


@program(lambda: [*bthd(), array(T, T, D, seed=4)])
def relative_keys(q, k, v, relative):
    return attended(jnp.einsum("bqhd,bkhd->bhqk", q, k) + jnp.einsum("bqhd,qkd->bhqk", q, relative), v)


@program(lambda: [*bthd(), array(B, T, T, E, seed=4), array(E, H, seed=5)])
def bias_from_pairs(q, k, v, pairs, weights):
    return attended(jnp.einsum("bqhd,bkhd->bhqk", q, k) * 0.5 + jnp.einsum("bijc,ch->bhij", pairs, weights), v)


@program(lambda: [*bthd(), array(B, T, H, 3, seed=4), array(B, T, 3, seed=5)])
def latent_and_rotary_parts(q, k, v, q_rotary, k_rotary):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) + jnp.einsum("bqhr,bkr->bhqk", q_rotary, k_rotary)
    return attended(scores / 3, v)


# --- Masks and scores ------------------------------------------------------------------------------------------------


@program(lambda: [*bthd(), jnp.asarray([[1.0] * 4 + [0.0] * 2, [1.0] * 6])])
def mask_of_pairs_multiplied_and_added(q, k, v, valid):
    mask = (valid[:, :, None] * valid[:, None, :])[:, None]
    return attended(mask * jnp.einsum("bqhd,bkhd->bhqk", q, k) + (1 - mask) * -10000.0, v)


@program(lambda: [*bhtd(), array(H, 1, 1, seed=5)])
def cosines_with_a_learned_scale(q, k, v, scale):
    q, k = (x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12) for x in (q, k))
    return softmax((q @ k.mT) * jnp.exp(jnp.minimum(scale, math.log(100.0)))) @ v


@program(lambda: [*bhtd(), array(T, T, seed=5) + 3 * jnp.eye(T)])
def neighbours_in_a_graph(q, k, v, weights):
    return softmax(jnp.where(weights > 0, q @ k.mT / 2, -9e15), axis=-1) @ v


@program(bhtd)
def squared_distances(q, k, v):
    distance = jnp.sum(q**2, -1)[..., None] - 2 * q @ k.mT + jnp.sum(k**2, -1)[..., None, :]
    return softmax(-distance / 2) @ v


@program(bhtd)
def exponentials_with_room_for_nothing(q, k, v):
    s = q @ k.mT
    m = lax.stop_gradient(jnp.maximum(s.max(-1, keepdims=True), 0.0))
    e = jnp.exp(s - m)
    return (e / (jnp.exp(-m) + e.sum(-1, keepdims=True))) @ v


@program(lambda: [*bhtd(), *(array(H, 1, D, seed=i) for i in (5, 6))])
def learned_and_empty_keys_appended(q, k, v, key, value):
    k, v = (
        jnp.concatenate([x, jnp.broadcast_to(y, (B, H, 1, D)), jnp.zeros((B, H, 1, D))], 2)
        for x, y in ((k, key), (v, value))
    )
    return softmax(q @ k.mT) @ v


@program(lambda: [*bhtd(), *(array(B, H, 3, D, seed=i) for i in (5, 6))])
def new_keys_after_those_of_a_cache(q, k, v, old_k, old_v):
    k, v = jnp.concatenate([old_k, k], 2), jnp.concatenate([old_v, v], 2)
    return softmax(jnp.where(jnp.tril(jnp.ones((T, T + 3), bool), 3), q @ k.mT, -1e9)) @ v


@program(lambda: [array(B, 8, H, D, seed=i) for i in range(3)])
def chunks_that_see_the_one_before(q, k, v):
    q, k, v = (y.reshape(B, 4, 2, H, D) for y in (q, k, v))
    before = ((0, 0), (1, 0), (0, 0), (0, 0), (0, 0))
    k, v = (jnp.concatenate([jnp.pad(y, before)[:, :-1], y], 2) for y in (k, v))
    scores = jnp.einsum("bnqhd,bnkhd->bnhqk", q, k)
    row, column = jnp.arange(2)[:, None] + 2, jnp.arange(4)[None]
    mask = (column <= row)[None] & ((jnp.arange(4)[:, None, None] > 0) | (column >= 2)[None])
    scores = jnp.where(mask[None, :, None], scores, -1e9)
    return jnp.einsum("bnhqk,bnkhd->bnqhd", softmax(scores), v).reshape(B, 8, H, D)


# --- Decoding --------------------------------------------------------------------------------------------------------


@program(lambda: [*bthd(1, S), *(array(B, 1, H, D, seed=i) for i in (4, 5)), jnp.int32(4)], gradients=False)
def one_step_with_a_cache(q, keys, values, k, v, position):
    keys = lax.dynamic_update_slice(keys, k, (0, position, 0, 0))
    values = lax.dynamic_update_slice(values, v, (0, position, 0, 0))
    seen = jnp.broadcast_to(jnp.arange(S) <= position, (B, 1, 1, S))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, keys) / math.sqrt(D)
    return attended(jnp.where(seen, scores, -1e9), values), keys, values, position + 1


@program(lambda: [array(B, 1, E, seed=1), array(3, E, E, seed=2, scale=0.4)], gradients=False)
def steps_in_a_scan(x, weights):
    def step(carry, _):
        x, keys, values, i = carry
        q, k, v = ((x @ w).reshape(B, 1, H, D) for w in weights)
        keys, values = keys.at[:, i].set(k[:, 0]), values.at[:, i].set(v[:, 0])
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, keys) * 0.5
        scores = jnp.where(jnp.arange(S)[None, None, None] <= i, scores, -jnp.inf)
        out = attended(scores, values).reshape(B, 1, E)
        return (out, keys, values, i + 1), out

    return lax.scan(step, (x, jnp.zeros((B, S, H, D)), jnp.zeros((B, S, H, D)), 0), None, length=4)[1]


@program(lambda: [array(B, E, seed=1), array(E, E, seed=2, scale=0.4), *bthd(1, S)[1:]], gradients=False)
def steps_in_a_while_loop(x, w, keys, values):
    def body(carry):
        i, x = carry
        scores = jnp.einsum("bhd,bkhd->bhk", (x @ w).reshape(B, H, D), keys)
        scores = jnp.where(jnp.arange(S) <= i, scores, -1e9)
        return i + 1, jnp.einsum("bhk,bkhd->bhd", softmax(scores), values).reshape(B, E)

    return lax.while_loop(lambda carry: carry[0] < 4, body, (0, x))


@program(lambda: bhtd(T, T))
def blocks_of_queries_from_a_counter(q, k, v):
    def block(i):
        row = i * 2 + jnp.arange(2)[:, None]
        scores = lax.dynamic_slice_in_dim(q, i * 2, 2, 2) @ k.mT
        return softmax(jnp.where(jnp.arange(T)[None] <= row, scores, -1e9)) @ v

    return lax.map(block, jnp.arange(3))
