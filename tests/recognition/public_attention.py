"""Attention as public code writes it: in loops over layers with what the layers share, with keys that are repeated
before they are turned, with sinks, wrappers that cast, and scores in parts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.nn import softmax
from support.catalogue import array

__all__ = ["LOOK_ALIKES", "PROGRAMS", "Written"]

B, T, N, D, LAYERS = 2, 7, 2, 4, 3
E = N * D


@dataclass(frozen=True)
class Written:
    function: Callable[..., Any]
    arguments: Callable[[], Sequence[Any]]
    sites: int = 1
    kept: str = ""
    """Of a look-alike, what the report says in part."""


PROGRAMS: dict[str, Written] = {}
LOOK_ALIKES: dict[str, Written] = {}


def entered(arguments: Callable[[], Sequence[Any]], sites: int = 1) -> Callable[..., Any]:
    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS[function.__name__] = Written(function, arguments, sites)
        return function

    return enter


def look_alike(arguments: Callable[[], Sequence[Any]], kept: str, sites: int = 0) -> Callable[..., Any]:
    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        LOOK_ALIKES[function.__name__] = Written(function, arguments, sites, kept)
        return function

    return enter


def scores(q, k):
    return jnp.einsum("btnd,bsnd->bnts", q, k)


def mixed(p, v):
    return jnp.einsum("bnts,bsnd->btnd", p, v)


def attend(q, k, v):
    return mixed(softmax(scores(q, k)), v)


# --- Loops over layers, with masks and biases that the layers share --------------------------------------------------


def layer(x, w, mask=None, fill=None, bias=0.0):
    q, k, v = ((x @ w[i]).reshape(*x.shape[:-1], N, D) for i in range(3))
    s = scores(q, k) / 2 + bias
    if mask is not None:
        s = jnp.where(mask, s, jnp.finfo(s.dtype).min if fill is None else fill)
    return x + jnp.tanh(mixed(softmax(s), v).reshape(x.shape) @ w[3])


def layers(x, weights, **shared):
    return lax.scan(lambda h, w: (layer(h, w, **shared), None), x, weights)[0]


def stack() -> list[Any]:
    return [array(B, T, E), array(LAYERS, 4, E, E, scale=0.4)]


def masked() -> list[Any]:
    return [*stack(), jnp.asarray(np.tril(np.random.default_rng(3).random((B, 1, T, T)) < 0.9) | np.eye(T, dtype=bool))]


def padded() -> list[Any]:
    return [*stack(), jnp.array([4, T])]


def padding(lengths):
    return (jnp.arange(T) < lengths[:, None])[:, None, None, :]


@entered(masked)
def mask_as_an_argument(x, w, mask):
    return layers(x, w, mask=mask)


@entered(masked)
def mask_as_an_argument_with_infinite_fill(x, w, mask):
    return layers(x, w, mask=mask, fill=-jnp.inf)


@entered(masked)
def mask_as_an_argument_of_checkpointed_layers(x, w, mask):
    return lax.scan(jax.checkpoint(lambda h, w: (layer(h, w, mask), None)), x, w)[0]


@entered(masked)
def mask_that_is_carried_along(x, w, mask):
    return lax.scan(lambda c, w: ((layer(c[0], w, c[1]), c[1]), None), (x, mask), w)[0][0]


@entered(lambda: [array(B, T, N, D), array(B, T + 3, N, D), array(B, T + 3, N, D), array(T + 3, N, D)])
def positions_shifted_by_a_reshape(q, k, v, positions):
    """Each row of scores of positions moves one place further, by a reshape of one column more."""
    s = jnp.einsum("btnd,snd->bnts", q, positions)
    shifted = jnp.pad(s, ((0, 0), (0, 0), (0, 0), (1, 0))).reshape(B, N, T + 4, T)[:, :, 1:].reshape(s.shape)
    return mixed(softmax((scores(q, k) + shifted) / 2), v)


@entered(masked)
def mask_in_a_counted_loop(x, w, mask):
    return lax.fori_loop(0, LAYERS, lambda i, h: layer(h, w[i], mask), x)


@entered(masked)
def mask_in_nested_loops(x, w, mask):
    return lax.scan(lambda h, _: (layers(h, w, mask=mask), None), x, None, length=2)[0]


@entered(masked)
def mask_of_each_microbatch(x, w, mask):
    return lax.map(lambda given: layers(given[0][None], w, mask=given[1][None])[0], (x, mask))


@entered(lambda: [*stack(), jnp.asarray(np.tril(np.ones((B, 1, T, T), np.int32)))])
def mask_of_whole_numbers(x, w, mask):
    return layers(x, w, mask=mask > 0)


@entered(lambda: [*masked(), array(N, T, T, seed=5)])
def mask_and_a_bias_that_is_learnt(x, w, mask, bias):
    return layers(x, w, mask=mask, bias=bias)


@entered(padded)
def padding_before_the_loop(x, w, lengths):
    return layers(x, w, mask=padding(lengths))


@entered(padded)
def padding_and_triangle_before_the_loop(x, w, lengths):
    return layers(x, w, mask=padding(lengths) & (jnp.arange(T)[:, None] >= jnp.arange(T)), fill=-jnp.inf)


@entered(padded)
def padding_before_unrolled_and_checkpointed_layers(x, w, lengths):
    mask = padding(lengths)
    for i in range(2):
        x = jax.checkpoint(layer)(x, w[i], mask)
    return x


PROGRAMS["padding_before_unrolled_and_checkpointed_layers"] = Written(
    padding_before_unrolled_and_checkpointed_layers, padded, 2
)


def drawn() -> list[Any]:
    return [*stack(), jax.random.key(0)]


@entered(drawn)
def random_mask_of_the_keys(x, w, key):
    return layers(x, w, mask=jax.random.bernoulli(key, 0.7, (B, 1, 1, T)) | (jnp.arange(T) == 0))


@entered(drawn)
def random_mask_of_all_scores(x, w, key):
    return layers(x, w, mask=jax.random.bernoulli(key, 0.7, (B, 1, T, T)) | jnp.eye(T, dtype=bool), fill=-jnp.inf)


@entered(drawn)
def noise_on_the_scores(x, w, key):
    return layers(x, w, bias=jax.random.gumbel(key, (B, N, T, T)))


@entered(drawn)
def random_mask_of_one_layer(x, w, key):
    return layer(x, w[0], jax.random.bernoulli(key, 0.7, (B, 1, 1, T)) | (jnp.arange(T) == 0))


@look_alike(drawn, "dropout is active")
def dropout_drawn_in_the_loop(x, w, key):
    def step(carry, w):
        h, key = carry
        key, own = jax.random.split(key)
        q, k, v = ((h @ w[i]).reshape(B, T, N, D) for i in range(3))
        p = softmax(scores(q, k))
        kept = jax.random.bernoulli(own, 0.8, p.shape)
        return (h + mixed(jnp.where(kept, p / 0.8, 0), v).reshape(h.shape), key), None

    return lax.scan(step, (x, key), w)[0][0]


@look_alike(masked, "", sites=1)
def mask_that_depends_on_the_carry(x, w, mask):
    def step(h, w):
        return layer(h, w, mask & (h.mean(-1) > -0.2)[:, None, None, :] | jnp.eye(T, dtype=bool)), None

    return lax.scan(step, x, w)[0]


@look_alike(masked, "enclosing body")
def scores_before_the_loop(x, w, mask):
    q, k, v = ((x @ w[0, i]).reshape(B, T, N, D) for i in range(3))
    s = jnp.where(mask, scores(q, k), -1e9)
    return lax.scan(lambda h, c: (h + mixed(softmax(s * c), v), None), jnp.zeros_like(q), jnp.arange(1.0, 3.0))[0]


# --- Keys that are repeated for groups of queries, and then changed --------------------------------------------------


def grouped(dtype=jnp.float32) -> list[Any]:
    return [array(B, T, n, D, dtype=dtype, seed=seed) for seed, n in enumerate((4, 2, 2))]


def turned(x):
    """Rotary positions."""
    angles = jnp.arange(x.shape[1])[:, None, None] / 10 ** jnp.arange(D // 2)
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * jnp.cos(angles) - b * jnp.sin(angles), b * jnp.cos(angles) + a * jnp.sin(angles)], -1)


def repeat(x):
    return jnp.repeat(x, 2, 2)


@entered(lambda: grouped(jnp.bfloat16))
def repeated_and_cast(q, k, v):
    q, k, v = (x.astype(jnp.float32) for x in (q, repeat(k), repeat(v)))
    return attend(q, k, v)


@entered(lambda: grouped(jnp.bfloat16))
def repeated_and_only_the_keys_cast(q, k, v):
    s = scores(q.astype(jnp.float32), repeat(k).astype(jnp.float32))
    return mixed(softmax(s).astype(q.dtype), repeat(v))


@entered(grouped)
def repeated_and_turned(q, k, v):
    return attend(turned(q), turned(repeat(k)), repeat(v))


@entered(grouped)
def repeated_and_normalised(q, k, v):
    k = repeat(k)
    return attend(q, k * lax.rsqrt((k * k).mean(-1, keepdims=True) + 1e-6), repeat(v))


@entered(lambda: [*grouped(), array(4, D, seed=7)])
def repeated_and_scaled_for_each_head(q, k, v, scale):
    return attend(q, repeat(k) * scale, repeat(v))


@entered(grouped)
def values_repeated_and_changed(q, k, v):
    return attend(turned(q), repeat(turned(k)), jnp.tanh(repeat(v)))


@entered(grouped)
def tiled_and_turned(q, k, v):
    return attend(turned(q), turned(jnp.tile(k, (1, 1, 2, 1))), jnp.tile(v, (1, 1, 2, 1)))


@entered(grouped)
def repeated_and_turned_in_a_loop(q, k, v):
    return lax.scan(lambda q, _: (attend(turned(q), turned(repeat(k)), repeat(v) * 2), None), q, None, length=2)[0]


# --- Sinks that take part in the maximum -----------------------------------------------------------------------------


def heads() -> list[Any]:
    return [array(B, T, N, D, seed=seed) for seed in range(3)]


def with_sink() -> list[Any]:
    return [*heads(), array(N, seed=5)]


def sunk(s, sink, stop=lambda x: x):
    m = stop(jnp.maximum(s.max(-1, keepdims=True), sink))
    e = jnp.exp(s - m)
    return e, e.sum(-1, keepdims=True) + jnp.exp(sink - m)


@entered(with_sink)
def sink_in_the_maximum(q, k, v, sink):
    e, total = sunk(scores(q, k), sink[None, :, None, None])
    return mixed(e / total, v)


@entered(with_sink)
def sink_in_a_maximum_without_gradient(q, k, v, sink):
    e, total = sunk(scores(q, k), sink[None, :, None, None], lax.stop_gradient)
    return mixed(e / total, v)


@entered(with_sink)
def sink_in_the_maximum_of_masked_scores(q, k, v, sink):
    s = jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores(q, k), -jnp.inf)
    e, total = sunk(s, sink.reshape(1, N, 1, 1))
    return mixed(e / total, v)


@entered(with_sink)
def sink_with_the_division_at_the_end(q, k, v, sink):
    e, total = sunk(scores(q, k), sink.reshape(1, N, 1, 1))
    return jnp.einsum("bnts,bsnd->bntd", e, v) / total


@entered(lambda: [*heads(), array(N, T, T, seed=5)])
def bias_that_is_read_twice(q, k, v, bias):
    return mixed(softmax((scores(q, k) + bias) * bias), v)


# --- Functions with a rule of their own, which says what JAX does anyway ---------------------------------------------


def ruled(value, cotangent):
    function = jax.custom_vjp(value)
    function.defvjp(lambda x: (value(x), None), lambda _, g: (cotangent(g),))
    return function


def narrow() -> list[Any]:
    return [x.astype(jnp.bfloat16) for x in heads()]


def widened():
    return ruled(lambda x: x.astype(jnp.float32), lambda g: g.astype(jnp.bfloat16))


@entered(heads)
def identity_with_a_rule(q, k, v):
    return mixed(softmax(ruled(lambda x: x, lambda g: g)(scores(q, k))), v)


@entered(heads)
def identity_with_a_rule_on_the_probabilities(q, k, v):
    return mixed(ruled(lambda x: x, lambda g: g)(softmax(scores(q, k))), v)


@entered(narrow)
def cast_with_a_rule(q, k, v):
    return mixed(softmax(widened()(scores(q, k))).astype(jnp.bfloat16), v)


@entered(narrow)
def casts_with_rules_around_the_softmax(q, k, v):
    down = ruled(lambda x: x.astype(jnp.bfloat16), lambda g: g.astype(jnp.float32))
    return mixed(down(softmax(widened()(scores(q, k)))), v)


@entered(narrow)
def cast_with_a_rule_in_a_loop(q, k, v):
    wide = widened()
    step = lambda q, _: (mixed(softmax(wide(scores(q, k))).astype(jnp.bfloat16), v), None)  # noqa: E731
    return lax.scan(step, q, None, length=2)[0]


@entered(narrow)
def rounding_with_a_rule_that_rounds(q, k, v):
    @functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
    def rounded(x, exponent, mantissa):
        return jax.tree.map(lambda y: lax.reduce_precision(y, exponent, mantissa), x)

    rounded.defvjp(lambda x, e, m: (rounded(x, e, m), None), lambda e, m, _, g: (rounded(g, e, m),))
    s = jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores(q, k), -1e30)
    return mixed(softmax(rounded(s.astype(jnp.float32), 8, 7)).astype(q.dtype), v)


def _with_rule(cotangent):
    def function(q, k, v):
        return mixed(softmax(ruled(lambda x: x, cotangent)(scores(q, k))), v)

    return function


for _name, _cotangent in {
    "clipped": lambda g: jnp.clip(g, -1e-3, 1e-3),
    "rounded": lambda g: g.astype(jnp.bfloat16).astype(jnp.float32),
    "doubled": lambda g: 2 * g,
    "dropped": jnp.zeros_like,
}.items():
    LOOK_ALIKES[f"identity_whose_gradient_is_{_name}"] = Written(
        _with_rule(_cotangent), heads, 0, "derivative of its own"
    )


# --- Scores that are a sum of products -------------------------------------------------------------------------------


def latent() -> list[Any]:
    """Queries and keys of contents, then of positions (these keys are shared by all heads), and values."""
    shapes = (B, T, N, D), (B, T, N, D), (B, T, N, 2), (B, T, 2), (B, T, N, D)
    return [array(*shape, seed=seed) for seed, shape in enumerate(shapes)]


def shared_keys(q, k):
    return jnp.einsum("btnr,bsr->bnts", q, k)


@entered(latent)
def contents_and_positions(q, k, q_turned, k_turned, v):
    return mixed(softmax((scores(q, k) + shared_keys(q_turned, k_turned)) * 0.4), v)


@entered(latent)
def contents_and_positions_before_now(q, k, q_turned, k_turned, v):
    s = scores(q, k) * 0.4 + shared_keys(q_turned, k_turned) * 0.4
    return mixed(softmax(jnp.where(jnp.tril(jnp.ones((T, T), bool)), s, -jnp.inf)), v)


@entered(lambda: [x.astype(jnp.bfloat16) for x in latent()])
def contents_and_positions_cast_before_they_are_added(q, k, q_turned, k_turned, v):
    s = scores(q, k).astype(jnp.float32) + shared_keys(q_turned, k_turned).astype(jnp.float32)
    return mixed(softmax(s).astype(v.dtype), v)


@entered(lambda: [*latent(), array(N, T, T, seed=6)])
def bias_between_contents_and_positions(q, k, q_turned, k_turned, v, bias):
    return mixed(softmax(scores(q, k) + bias + shared_keys(q_turned, k_turned)), v)


@entered(latent)
def difference_of_products_under_a_cap(q, k, q_turned, k_turned, v):
    return mixed(softmax(5 * jnp.tanh((shared_keys(q_turned, k_turned) * 0.5 - scores(q, k)) / 5)), v)


@entered(lambda: [*latent(), array(B, T, N, 3, seed=6), array(B, T, N, 3, seed=7)])
def sum_of_three_products(q, k, q_turned, k_turned, v, q_third, k_third):
    return mixed(softmax(scores(q, k) + (shared_keys(q_turned, k_turned) + scores(q_third, k_third))), v)


@entered(lambda: [array(B, T, 4, 6), array(B, T, 4, 2, seed=1), array(B, T, 6, seed=2), array(B, T, 2, seed=3)])
def latent_contents_that_all_heads_share(q, q_turned, contents, k_turned):
    s = jnp.einsum("btnc,bsc->bnts", q, contents) + shared_keys(q_turned, k_turned)
    return jnp.einsum("bnts,bsc->btnc", softmax(s * 0.3), contents)


@entered(lambda: [array(B, T, E), array(LAYERS, 3, E, E, scale=0.4), array(LAYERS, E, 2 * N + 2, seed=1)])
def contents_and_positions_in_checkpointed_layers(x, w, w_turned):
    def step(x, given):
        w, w_turned = given
        q, k, v = ((x @ w[i]).reshape(B, T, N, D) for i in range(3))
        r = jnp.sin(x @ w_turned)
        s = (scores(q, k) + shared_keys(r[..., :-2].reshape(B, T, N, 2), r[..., -2:])) * 0.4
        s = jnp.where(jnp.tril(jnp.ones((T, T), bool)), s, -jnp.inf)
        return x + jnp.tanh(mixed(softmax(s), v).reshape(x.shape)), None

    return lax.scan(jax.checkpoint(step), x, (w, w_turned))[0]


JOINED = (
    "contents_and_positions", "contents_and_positions_before_now", "contents_and_positions_cast_before_they_are_added",
    "difference_of_products_under_a_cap", "sum_of_three_products", "latent_contents_that_all_heads_share",
    "contents_and_positions_in_checkpointed_layers",
)  # fmt: skip
"""Programs whose site has no side input: all products are one."""


def _joined_look_alike(function):
    LOOK_ALIKES[function.__name__] = Written(function, latent, 1, "side")
    return function


@_joined_look_alike
def second_product_under_a_function(q, k, q_turned, k_turned, v):
    return mixed(softmax(scores(q, k) + jnp.tanh(shared_keys(q_turned, k_turned))), v)


@_joined_look_alike
def second_product_three_times_as_much(q, k, q_turned, k_turned, v):
    return mixed(softmax(scores(q, k) + 3 * shared_keys(q_turned, k_turned)), v)


@_joined_look_alike
def second_product_squared_too(q, k, q_turned, k_turned, v):
    s = shared_keys(q_turned, k_turned)
    return mixed(softmax(scores(q, k) + s + s * s), v)


@_joined_look_alike
def second_product_in_the_weights_too(q, k, q_turned, k_turned, v):
    s = shared_keys(q_turned, k_turned)
    return mixed(softmax(scores(q, k) + s) * jnp.tanh(s), v)


@_joined_look_alike
def second_product_in_the_mask_too(q, k, q_turned, k_turned, v):
    s = shared_keys(q_turned, k_turned)
    return mixed(softmax(jnp.where(s > -1, scores(q, k) + s, -1e9)), v)


@_joined_look_alike
def second_product_after_the_mask(q, k, q_turned, k_turned, v):
    s = jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores(q, k), -1e9)
    return mixed(softmax(s + shared_keys(q_turned, k_turned)), v)


@_joined_look_alike
def second_product_times_the_first(q, k, q_turned, k_turned, v):
    return mixed(softmax(scores(q, k) * shared_keys(q_turned, k_turned)), v)


@_joined_look_alike
def second_product_with_keys_for_each_query(q, k, q_turned, k_turned, v):
    keys = jnp.sin(jnp.arange(T)[:, None, None] + k_turned[0])
    return mixed(softmax(scores(q, k) + jnp.einsum("btnr,tsr->bnts", q_turned, keys)), v)
