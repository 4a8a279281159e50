"""Layers with recurrences, as their papers define them, whose tracing is measured (``python -m benchmarks.tracing``).

Letters: B sequences, T steps, D the width, H heads, N rows and columns of a head's state, S numbers of a channel's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["LAYERS", "SHAPES", "B", "D", "T"]

Weights = Mapping[str, jax.Array]
Layer = Callable[[Weights, jax.Array], jax.Array]
Shapes = dict[str, tuple[int, ...]]

B, T, D, H, N, S = 2, 512, 256, 4, 64, 16
_MIXED: Shapes = {"norm": (D,), "out": (D, D), "q": (D, D), "k": (D, D), "v": (D, D), "gate": (D, D)}


def _norm(x: jax.Array, scale: jax.Array | float = 1.0) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-5) * scale


def _heads(x: jax.Array) -> jax.Array:
    """Returns the heads of all steps, the steps first, [T, B, H, N]."""
    return x.reshape(B, T, H, N).swapaxes(0, 1)


def _gated(p: Weights, x: jax.Array, normal: jax.Array, states: jax.Array) -> jax.Array:
    """Returns what follows heads that were read step by step, [T, B, H, N]: a norm, a gate and a projection."""
    return x + (jax.nn.silu(normal @ p["gate"]) * _norm(states.swapaxes(0, 1)).reshape(B, T, D)) @ p["out"]


def _zeros() -> jax.Array:
    return jnp.zeros((B, H, N, N))


def retnet(p: Weights, x: jax.Array) -> jax.Array:
    """RetNet (Sun et al., 2023, arXiv:2307.08621): a decay for each head, the same in all steps."""
    y = _norm(x, p["norm"])
    decay = 1 - jnp.exp2(-5.0 - jnp.arange(H))

    def step(state: jax.Array, given: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v = given
        state = decay[:, None, None] * state + k[..., :, None] * v[..., None, :]
        return state, jnp.einsum("bhn,bhnp->bhp", q, state)

    return _gated(p, x, y, lax.scan(step, _zeros(), tuple(_heads(y @ p[name]) for name in "qkv"))[1])


def gla(p: Weights, x: jax.Array) -> jax.Array:
    """Gated linear attention (Yang et al., 2024, arXiv:2312.06635): a decay for each row of the state."""
    y = _norm(x, p["norm"])

    def step(state: jax.Array, given: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, decay = given
        state = decay[..., None] * state + k[..., None] * v[..., None, :]
        return state, jnp.einsum("bhn,bhnp->bhp", q * N**-0.5, state)

    decay = jax.nn.sigmoid(y @ p["low"] @ p["high"]) ** (1 / 16)
    return _gated(p, x, y, lax.scan(step, _zeros(), tuple(_heads(a) for a in (*_read(p, y), decay)))[1])


def _read(p: Weights, y: jax.Array) -> tuple[jax.Array, ...]:
    return y @ p["q"], y @ p["k"], y @ p["v"]


def delta_net(p: Weights, x: jax.Array) -> jax.Array:
    """Gated delta nets (Yang et al., 2024, arXiv:2412.06464): each step corrects the state along its key."""
    y = _norm(x, p["norm"])
    q, k, v = (jax.nn.silu(_heads(a)) for a in _read(p, y))
    q, k = (a * lax.rsqrt(jnp.sum(a * a, -1, keepdims=True) + 1e-6) for a in (q, k))
    rate, decay = jax.nn.sigmoid(y @ p["rate"]), jnp.exp(-jnp.exp(p["a"]) * jax.nn.softplus(y @ p["time"]))

    def step(state: jax.Array, given: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, rate, decay = given
        state = decay[..., None, None] * state
        change = rate[..., None] * (v - jnp.einsum("bhn,bhnp->bhp", k, state))
        state = state + k[..., :, None] * change[..., None, :]
        return state, jnp.einsum("bhn,bhnp->bhp", q, state)

    given = q, k, v, rate.swapaxes(0, 1), decay.swapaxes(0, 1)
    return _gated(p, x, y, lax.scan(step, _zeros(), given)[1])


def indexing(p: Weights, x: jax.Array) -> jax.Array:
    """The same as ``retnet``, in a loop over the numbers of the steps, which reads and writes rows of arrays."""
    y = _norm(x, p["norm"])
    q, k, v = (_heads(a) for a in _read(p, y))

    def step(i: jax.Array, carried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        state, found = carried
        state = 0.95 * state + k[i][..., :, None] * v[i][..., None, :]
        return state, found.at[i].set(jnp.einsum("bhn,bhnp->bhp", q[i], state))

    return _gated(p, x, y, lax.fori_loop(0, T, step, (_zeros(), jnp.zeros_like(v)))[1])


def _selective(scan: Callable[[jax.Array, jax.Array], jax.Array]) -> Layer:
    """Mamba (Gu and Dao, 2023, arXiv:2312.00752), by a scan along the second axis."""

    def layer(p: Weights, x: jax.Array) -> jax.Array:
        u, gate = jnp.split(_norm(x, p["norm"]) @ p["in"], 2, -1)
        time, b, c = jnp.split(u @ p["x"], (S, 2 * S), -1)
        time = jax.nn.softplus(time @ p["time"])
        decay = jnp.exp(time[..., None] * -jnp.exp(p["a"]))
        states = scan(decay, (time * u)[..., None] * b[..., None, :])
        return x + (jnp.einsum("btds,bts->btd", states, c) * jax.nn.silu(gate)) @ p["out"]

    return layer


def _associative(decay: jax.Array, given: jax.Array) -> jax.Array:
    return lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (decay, given), axis=1)[1]


def _doubling(decay: jax.Array, given: jax.Array) -> jax.Array:
    by = 1
    while by < T:
        ones, zeros = jnp.ones_like(decay[:, :by]), jnp.zeros_like(given[:, :by])
        given = given + decay * jnp.concatenate([zeros, given[:, :-by]], 1)
        decay = decay * jnp.concatenate([ones, decay[:, :-by]], 1)
        by *= 2
    return given


LAYERS: dict[str, Layer] = {
    "retnet": retnet, "gla": gla, "delta net": delta_net, "indexing": indexing, "mamba": _selective(_associative),
    "mamba by doubling": _selective(_doubling),
}  # fmt: skip

_SELECTIVE: Shapes = {
    "norm": (D,), "in": (D, 2 * D), "x": (D, 3 * S), "time": (S, D), "a": (D, S), "out": (D, D),
}  # fmt: skip
SHAPES: dict[str, Shapes] = {
    "retnet": _MIXED, "indexing": _MIXED, "mamba": _SELECTIVE, "mamba by doubling": _SELECTIVE,
    "gla": _MIXED | {"low": (D, S), "high": (S, D)}, "delta net": _MIXED | {"rate": (D, H), "time": (D, H), "a": (H,)},
}  # fmt: skip
"""By the layer, the shapes of its weights."""
