"""Train steps in bfloat16 as people write them in plain JAX, of sizes for a GPU.

Letters: B sequences, T steps, H heads, D channels of a head.  Weights are float32 and cast where they are used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.programs.program import Built, Program, tokens, train_step

__all__ = ["PROGRAMS"]

Weights: TypeAlias = dict[str, Any]


def _drawn(**shapes: tuple[int, ...]) -> Weights:
    """Weights of about the scale that keeps activations as they are; scales of norms, of one axis, are ones."""
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {
        name: jax.random.normal(key, shape) * shape[-2] ** -0.5 if len(shape) > 1 else jnp.ones(shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def _cast(weights: Any) -> Any:
    return jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights)


def _layer_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean, variance = wide.mean(-1, keepdims=True), wide.var(-1, keepdims=True)
    return ((wide - mean) * lax.rsqrt(variance + 1e-5) * scale).astype(x.dtype)


def _rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


def _rotated(x: jax.Array) -> jax.Array:
    """Rotary positions of [B, T, H, D]."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 500_000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


def _attended(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Causal attention of [B, T, H, D]; keys and values are repeated where they have fewer heads."""
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    scores = jnp.einsum("bthd,bshd->bhts", query, key) * query.shape[-1] ** -0.5
    seen = jnp.tril(jnp.ones((query.shape[1],) * 2, bool))
    weights = jax.nn.softmax(jnp.where(seen, scores.astype(jnp.float32), -1e9), axis=-1)
    return jnp.einsum("bhts,bshd->bthd", weights.astype(query.dtype), value)


def _cross_entropy(logits: jax.Array, wanted: jax.Array) -> jax.Array:
    log_probabilities = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(log_probabilities, wanted[..., None], axis=-1))


def _language_model(
    layer: Callable[[Weights, jax.Array], jax.Array], weights: Weights, batch: int, length: int, vocabulary: int
) -> Built:
    """A train step of embeddings, a scan over layers that are computed again backward, and a loss of the next token."""
    width = weights["norm"].shape[-1]
    ends = {"embedding": (vocabulary, width), "last": (width,), "head": (width, vocabulary)}

    def loss(w: Weights, ids: jax.Array) -> jax.Array:
        x = w["embedding"].astype(jnp.bfloat16)[ids[:, :-1]]
        x, _ = lax.scan(jax.checkpoint(lambda x, of_layer: (layer(of_layer, x), None)), x, w["layers"])
        return _cross_entropy(_rms_norm(x, w["last"]) @ w["head"].astype(jnp.bfloat16), ids[:, 1:])

    return train_step(loss), ({"layers": weights, **_drawn(**ends)}, tokens(batch, length + 1, vocabulary))


def _gpt2(layers: int, batch: int, length: int, width: int, heads: int, vocabulary: int) -> Built:
    """GPT-2 without dropout, its layers one after the other, its head the embedding."""
    shapes = {
        "first": (width,), "qkv": (width, 3 * width), "out": (width, width), "second": (width,),
        "up": (width, 4 * width), "down": (4 * width, width),
    }  # fmt: skip
    ends = {"position": (length, width), "last": (width,)}
    weights = {
        "embedding": 0.02 * jax.random.normal(jax.random.key(5), (vocabulary, width)),
        "layers": [_drawn(**shapes) for _ in range(layers)], **_drawn(**ends),
    }  # fmt: skip

    def loss(w: Weights, ids: jax.Array) -> jax.Array:
        w, given = _cast(w), ids[:, :-1]
        x = w["embedding"][given] + w["position"]
        for of_layer in w["layers"]:
            qkv = (_layer_norm(x, of_layer["first"]) @ of_layer["qkv"]).reshape(batch, length, 3, heads, -1)
            attended = _attended(*(qkv[:, :, i] for i in range(3)))
            x = x + attended.reshape(x.shape) @ of_layer["out"]
            x = x + jax.nn.gelu(_layer_norm(x, of_layer["second"]) @ of_layer["up"]) @ of_layer["down"]
        return _cross_entropy(_layer_norm(x, w["last"]) @ w["embedding"].T, ids[:, 1:])

    return train_step(loss), (weights, tokens(batch, length + 1, vocabulary))


def _attention_of_llama(w: Weights, x: jax.Array, heads: int, kv_heads: int) -> jax.Array:
    y = _rms_norm(x, w["norm"])
    query, key, value = (
        (y @ w[name]).reshape(*x.shape[:2], count, -1)
        for name, count in (("query", heads), ("key", kv_heads), ("value", kv_heads))
    )
    return x + _attended(_rotated(query), _rotated(key), value).reshape(*x.shape[:2], -1) @ w["out"]


def _attention_shapes(layers: int, width: int, heads: int, kv_heads: int, size: int) -> dict[str, tuple[int, ...]]:
    return {
        "norm": (layers, width), "query": (layers, width, heads * size), "key": (layers, width, kv_heads * size),
        "value": (layers, width, kv_heads * size), "out": (layers, heads * size, width), "second": (layers, width),
    }  # fmt: skip


def _llama(
    layers: int, batch: int, length: int, heads: int, kv_heads: int, size: int, inner: int, vocabulary: int
) -> Built:
    """Llama 3: grouped queries, rotary positions, RMSNorm, SwiGLU."""
    width = heads * size
    weights = _drawn(
        **_attention_shapes(layers, width, heads, kv_heads, size),
        gate=(layers, width, inner), up=(layers, width, inner), down=(layers, inner, width),
    )  # fmt: skip

    def layer(w: Weights, x: jax.Array) -> jax.Array:
        w = _cast(w)
        x = _attention_of_llama(w, x, heads, kv_heads)
        y = _rms_norm(x, w["second"])
        return x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"]

    return _language_model(layer, weights, batch, length, vocabulary)


def _mixture(
    layers: int, batch: int, length: int, heads: int, kv_heads: int, size: int, inner: int, experts: int, top: int,
    vocabulary: int,
) -> Built:  # fmt: skip
    """A Llama whose MLPs are mixtures, as Qwen 3's: rows sorted by expert, three grouped products."""
    width = heads * size
    weights = _drawn(
        **_attention_shapes(layers, width, heads, kv_heads, size), router=(layers, width, experts),
        gate=(layers, experts, width, inner), up=(layers, experts, width, inner), down=(layers, experts, inner, width),
    )  # fmt: skip

    def layer(w: Weights, x: jax.Array) -> jax.Array:
        w = _cast(w)
        x = _attention_of_llama(w, x, heads, kv_heads)
        rows = _rms_norm(x, w["second"]).reshape(-1, width)
        shares, chosen = lax.top_k(jax.nn.softmax((rows @ w["router"]).astype(jnp.float32)), top)
        shares = (shares / shares.sum(-1, keepdims=True)).astype(x.dtype)
        order = jnp.argsort(chosen.reshape(-1))
        sizes = jnp.bincount(chosen.reshape(-1), length=experts)
        given = rows[order // top]
        hidden = jax.nn.silu(lax.ragged_dot(given, w["gate"], sizes)) * lax.ragged_dot(given, w["up"], sizes)
        of_experts = lax.ragged_dot(hidden, w["down"], sizes)[jnp.argsort(order)].reshape(-1, top, width)
        return x + jnp.sum(of_experts * shares[..., None], axis=1).reshape(x.shape)

    return _language_model(layer, weights, batch, length, vocabulary)


def _mamba2(layers: int, batch: int, length: int, heads: int, size: int, state: int, vocabulary: int) -> Built:
    """Mamba-2 without its convolution: heads share keys and queries, and decay by one number each."""
    width = heads * size
    shapes = {
        "norm": (layers, width), "in": (layers, width, 2 * width + 2 * state + heads), "a": (layers, 1, heads),
        "inner": (layers, width), "out": (layers, width, width),
    }  # fmt: skip

    def step(h: jax.Array, given: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        decay, x, key, query = given  # [B, H], [B, H, D], [B, N], [B, N]
        h = decay[..., None, None] * h + x[..., None] * key[:, None, None]
        return h, jnp.einsum("bhpn,bn->bhp", h, query)

    def layer(w: Weights, x: jax.Array) -> jax.Array:
        split = (width, 2 * width, 2 * width + state, 2 * (width + state))
        mixed = (_rms_norm(x, w["norm"]) @ _cast(w["in"])).astype(jnp.float32)
        gate, u, key, query, time = jnp.split(mixed, split, -1)
        time = jax.nn.softplus(time - 4)
        given = jnp.exp(-time * jnp.exp(w["a"])), time[..., None] * u.reshape(batch, length, heads, size), key, query
        start = jnp.zeros((batch, heads, size, state))
        _, y = lax.scan(step, start, jax.tree.map(lambda a: a.swapaxes(0, 1), given))
        y = y.swapaxes(0, 1).reshape(batch, length, width) * jax.nn.silu(gate)
        return x + _rms_norm(y, w["inner"]).astype(x.dtype) @ _cast(w["out"])

    return _language_model(layer, _drawn(**shapes), batch, length, vocabulary)


def _program(name: str, build: Callable[..., Built], sizes: tuple[int, ...], small: tuple[int, ...]) -> Program:
    return Program(name, (), functools.partial(build, *sizes), "gpu", functools.partial(build, *small))


PROGRAMS = (
    _program("plain GPT-2 train B8 T1024 bf16", _gpt2, (4, 8, 1024, 768, 12, 50257), (1, 2, 32, 64, 2, 97)),
    _program(
        "plain Llama train B2 T4096 bf16", _llama, (2, 2, 4096, 16, 4, 128, 5632, 32000), (2, 1, 32, 4, 2, 16, 64, 97)
    ),
    _program(
        "plain mixture train B4 T2048 bf16", _mixture,
        (2, 4, 2048, 16, 4, 64, 768, 32, 4, 32000), (2, 1, 32, 4, 2, 16, 32, 4, 2, 97),
    ),
    _program("plain Mamba-2 train B4 T2048 bf16", _mamba2, (2, 4, 2048, 16, 64, 128, 32000), (2, 1, 32, 2, 16, 32, 97)),
)  # fmt: skip
