"""Models of four layers with recurrences, written step by step as their papers define them.

Letters: B sequences, T steps, H heads, P channels of a head, N rows of a state, D = H P.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["mamba2", "rwkv6"]

Arrays: TypeAlias = dict[str, jax.Array]
Model: TypeAlias = Callable[[Arrays, jax.Array], jax.Array]

LAYERS, HEADS, CHANNELS, STATE = 4, 8, 64, 64
WIDTH = HEADS * CHANNELS
BATCH, LENGTH = 1, 2048


def _drawn(shapes: dict[str, tuple[int, ...]]) -> Arrays:
    """Weights of all layers, [layers, ...], of about the scale that keeps activations as they are."""
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {
        name: jax.random.normal(key, (LAYERS, *shape)) / (shape[0] if len(shape) > 1 else 4) ** 0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def _rms_norm(x: jax.Array, scale: jax.Array | float = 1.0) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-5) * scale


def _shifted(x: jax.Array) -> jax.Array:
    """The step before, [B, T, D]; zeros before the first."""
    return jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]


def _layers(layer: Callable[[Arrays, jax.Array], jax.Array]) -> Model:
    def model(w: Arrays, x: jax.Array) -> jax.Array:
        for i in range(LAYERS):
            x = layer({name: of_all[i] for name, of_all in w.items()}, x)
        return x

    return model


def mamba2() -> tuple[Model, Arrays, jax.Array]:
    """Mamba-2 (Dao and Gu, 2024, arXiv:2405.21060): the decay is one number for each head."""
    inner = WIDTH + 2 * STATE

    def step(h: jax.Array, given: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        decay, x, b, c = given  # [B, H], [B, H, P], [B, N], [B, N]
        h = decay[..., None, None] * h + x[..., None] * b[:, None, None]
        return h, jnp.einsum("bhpn,bn->bhp", h, c)

    def layer(w: Arrays, x: jax.Array) -> jax.Array:
        gate, u, time = jnp.split(_rms_norm(x, 1 + w["norm"]) @ w["in"], (WIDTH, WIDTH + inner), -1)
        numbers = ("NWC", "WIO", "NWC")
        u = lax.conv_general_dilated(u, w["conv"], (1,), [(3, 0)], dimension_numbers=numbers, feature_group_count=inner)
        u, b, c = jnp.split(jax.nn.silu(u), (WIDTH, WIDTH + STATE), -1)
        u = u.reshape(BATCH, LENGTH, HEADS, CHANNELS)
        time = jax.nn.softplus(time + w["bias"])
        given = jnp.exp(-time * jnp.exp(w["a"])), time[..., None] * u, b, c
        h = jnp.zeros((BATCH, HEADS, CHANNELS, STATE))
        y = lax.scan(step, h, jax.tree.map(lambda a: a.swapaxes(0, 1), given))[1].swapaxes(0, 1)
        y = (y + w["d"][:, None] * u).reshape(BATCH, LENGTH, WIDTH)
        return x + _rms_norm(y * jax.nn.silu(gate)) @ w["out"]

    shapes: dict[str, tuple[int, ...]] = {
        "norm": (WIDTH,), "in": (WIDTH, WIDTH + inner + HEADS), "conv": (4, 1, inner), "bias": (HEADS,), "a": (HEADS,),
        "d": (HEADS,), "out": (WIDTH, WIDTH),
    }  # fmt: skip
    return _layers(layer), _drawn(shapes), jax.random.normal(jax.random.key(1), (BATCH, LENGTH, WIDTH))


def rwkv6() -> tuple[Model, Arrays, jax.Array]:
    """RWKV-6 (Peng et al., 2024, arXiv:2404.05892): each channel decays by itself, and the step has a bonus."""
    rank = 32

    def step(s: jax.Array, given: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        r, k, v, decay, bonus = given  # [B, H, P] each, but the bonus [H, P]
        kv = k[..., None] * v[..., None, :]
        y = jnp.einsum("bhk,bhkv->bhv", r, s + bonus[..., None] * kv)
        return decay[..., None] * s + kv, y

    def layer(w: Arrays, x: jax.Array) -> jax.Array:
        y = _rms_norm(x)
        before = _shifted(y) - y
        mixed = y + before * w["mix"]
        low = jnp.tanh(mixed @ w["low"]).reshape(BATCH, LENGTH, 5, rank)
        of_each = y + before * (w["mixes"] + jnp.einsum("btir,ird->ibtd", low, w["high"]))
        r, k, v, g = (
            (m @ w[name]).reshape(BATCH, LENGTH, HEADS, CHANNELS)
            for m, name in zip(of_each[:4], ("r", "k", "v", "g"), strict=True)
        )
        decay = jnp.exp(-jnp.exp(w["decay"] + jnp.tanh(of_each[4] @ w["decay_low"]) @ w["decay_high"]))
        decay = decay.reshape(BATCH, LENGTH, HEADS, CHANNELS)
        bonus = w["bonus"].reshape(HEADS, CHANNELS)
        moved = jax.tree.map(lambda a: a.swapaxes(0, 1), (r, k, v, decay))
        s = jnp.zeros((BATCH, HEADS, CHANNELS, CHANNELS))
        out = lax.scan(lambda s, given: step(s, (*given, bonus)), s, moved)[1].swapaxes(0, 1)
        mean = out.mean(-1, keepdims=True)
        out = (out - mean) * lax.rsqrt(out.var(-1, keepdims=True) + 1e-5) * jax.nn.silu(g)
        x = x + out.reshape(BATCH, LENGTH, WIDTH) @ w["out"]
        y = _rms_norm(x)
        before = _shifted(y) - y
        hidden = jnp.square(jax.nn.relu((y + before * w["mix_up"]) @ w["up"]))
        return x + jax.nn.sigmoid((y + before * w["mix_gate"]) @ w["gate"]) * (hidden @ w["down"])

    shapes: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(("mix", "mix_up", "mix_gate", "decay", "bonus"), (WIDTH,)),
        **dict.fromkeys(("r", "k", "v", "g", "out", "gate"), (WIDTH, WIDTH)),
        "mixes": (5, 1, 1, WIDTH), "low": (WIDTH, 5 * rank), "high": (5, rank, WIDTH), "up": (WIDTH, 3 * WIDTH),
        "decay_low": (WIDTH, rank), "decay_high": (rank, WIDTH), "down": (3 * WIDTH, WIDTH),
    }  # fmt: skip
    return _layers(layer), _drawn(shapes), jax.random.normal(jax.random.key(1), (BATCH, LENGTH, WIDTH))
