"""Stacks of layers of every kind, of any depth: what recognition walks through in models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

B, T, D, N, F, E, C, V = 2, 8, 16, 2, 12, 4, 4, 20
"""Sequences, tokens of each, width, heads, hidden width, experts, slots, vocabulary."""
H = D // N

Layer = Callable[[Any, Any], Any]


def weights(*shape: int) -> jax.Array:
    return jnp.full(shape, 0.1, jnp.float32)


def _normalised(x):
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


# ---------------------------------------------------------------------- layers


def attention(p, x):
    q, k, v = (jnp.einsum("btd,dnh->btnh", _normalised(x), p[name]) for name in "qkv")
    s = jnp.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(H)
    w = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((T, T), bool)), s, -jnp.inf))
    return x + jnp.einsum("btnh,nhd->btd", jnp.einsum("bnts,bsnh->btnh", w, v), p["o"])


def merged_heads(p, x):
    def split(y):
        return y.reshape(B, T, N, H).transpose(0, 2, 1, 3)

    q, k, v = (split(x @ p[name].reshape(D, D)) for name in "qkv")
    w = jax.nn.softmax(q @ k.transpose(0, 1, 3, 2) / np.sqrt(H))
    return x + (w @ v).transpose(0, 2, 1, 3).reshape(B, T, D) @ p["o"].reshape(D, D)


def rematerialised(p, x):
    return jax.checkpoint(attention)(p, x)


def hidden(p, x):
    return x + jax.nn.gelu(_normalised(x) @ p["gate"][0]) @ p["down"][0]


def norm(p, x):
    return _normalised(x) * p["scale"] + p["scale"]


def convolution(p, x):
    y = lax.conv_general_dilated(x, p["kernel"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
    return x + jax.nn.silu(y)


def recurrence(p, x):
    def step(h, now):
        h = jnp.tanh(h @ p["kernel"][0] + now)
        return h, h

    return x + lax.scan(step, jnp.zeros((B, D)), x.transpose(1, 0, 2))[1].transpose(1, 0, 2)


def _route(p, x):
    w, chosen = lax.top_k(jax.nn.softmax(x @ p["router"]), 2)
    return w / w.sum(-1, keepdims=True), chosen


def _experts(p, x):
    h = jax.nn.silu(jnp.einsum("btd,edf->btef", x, p["gate"]))
    return jnp.einsum("btef,efd->bted", h, p["down"])


def one_hot_mixture(p, x):
    w, chosen = _route(p, x)
    return x + jnp.einsum("bted,bte->btd", _experts(p, x), (jax.nn.one_hot(chosen, E) * w[..., None]).sum(-2))


def masked_mixture(p, x):
    g = jax.nn.softmax(x @ p["router"])
    c = jnp.where(jax.nn.one_hot(lax.top_k(g, 2)[1], E).sum(-2) > 0, g, 0.0)
    return x + jnp.einsum("bted,bte->btd", _experts(p, x), c / c.sum(-1, keepdims=True))


def scattered_mixture(p, x):
    w, chosen = (a.reshape(B * T, 2) for a in _route(p, x))
    c = jnp.zeros((B * T, E)).at[jnp.arange(B * T)[:, None], chosen].set(w)
    return x + jnp.einsum("bted,bte->btd", _experts(p, x), c.reshape(B, T, E))


def slots(p, x):
    g = jax.nn.softmax(x @ p["router"])
    mine = jax.nn.one_hot(jnp.argmax(g, -1), E)
    place = (jnp.cumsum(mine, 1) * mine - 1).astype(jnp.int32)
    dispatch = mine[..., None] * jax.nn.one_hot(place, C)
    h = jax.nn.relu(jnp.einsum("ebcd,edf->ebcf", jnp.einsum("btec,btd->ebcd", dispatch, x), p["gate"]))
    y = jnp.einsum("ebcf,efd->ebcd", h, p["down"])
    return x + jnp.einsum("ebcd,btec->btd", y, dispatch * jnp.max(g, -1)[..., None, None])


def loop(p, x):
    (w, chosen), out = _route(p, x), jnp.zeros_like(x)
    for e in range(E):
        own = jnp.sum(jnp.where(chosen == e, w, 0), -1, keepdims=True)
        out = out + own * (jax.nn.silu(x @ p["gate"][e]) @ p["down"][e])
    return x + out


def scanned_experts(p, x):
    w, chosen = _route(p, x)

    def body(out, q):
        gate, down, e = q
        own = jnp.sum(jnp.where(chosen == e, w, 0), -1, keepdims=True)
        return out + own * (jax.nn.silu(x @ gate) @ down), None

    return x + lax.scan(body, jnp.zeros_like(x), (p["gate"], p["down"], jnp.arange(E)))[0]


def ragged(p, x):
    tokens = x.reshape(-1, D)
    chosen = jnp.argmax(tokens @ p["router"], -1)
    order, sizes = jnp.argsort(chosen), jnp.bincount(chosen, length=E).astype(jnp.int32)
    y = lax.ragged_dot(jax.nn.relu(lax.ragged_dot(tokens[order], p["gate"], sizes)), p["down"], sizes)
    return x + y[jnp.argsort(order)].reshape(x.shape)


MIXTURES: list[Layer] = [one_hot_mixture, masked_mixture, scattered_mixture, slots, loop, scanned_experts]
LAYERS: list[Layer] = [
    attention, merged_heads, rematerialised, hidden, norm, convolution, recurrence, *MIXTURES, ragged
]  # fmt: skip

# ---------------------------------------------------------------------- what is below and above them


def looked_up(p, tokens):
    return p["embedding"][tokens]


def one_hot_tokens(p, tokens):
    return jax.nn.one_hot(tokens, V) @ p["embedding"]


def one_hot_positions(p, tokens):
    return p["embedding"][tokens] + jax.nn.one_hot(jnp.arange(T), T) @ p["positions"]


def _parameters() -> dict[str, jax.Array]:
    shapes = {
        "q": (D, N, H), "k": (D, N, H), "v": (D, N, H), "o": (N, H, D), "scale": (D,), "kernel": (3, D, D),
        "router": (D, E), "gate": (E, D, F), "down": (E, F, D),
    }  # fmt: skip
    return {name: weights(*shape) for name, shape in shapes.items()}


def stack(layers: list[Layer], depth: int, embedding: Layer = looked_up, loss: bool = False) -> tuple[Any, Any]:
    """A model of so many layers, those of ``layers`` again and again, and its arguments."""

    def model(p, tokens):
        x = embedding(p, tokens)
        for i in range(depth):
            x = layers[i % len(layers)](p["layers"][i], x)
        if not loss:
            return x
        logits = jax.nn.log_softmax(x @ p["head"])
        return -jnp.mean(jnp.take_along_axis(logits, tokens[..., None], -1))

    tables = {"embedding": weights(V, D), "positions": weights(T, D), "head": weights(D, V)}
    p = tables | {"layers": [_parameters() for _ in range(depth)]}
    return (jax.value_and_grad(model) if loss else model), (p, jnp.arange(B * T).reshape(B, T) % V)
