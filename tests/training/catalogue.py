"""How a train step is written down for the tests: a function with a derivative inside, its arguments and its sites."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.nn import softmax
from support.catalogue import array

__all__ = ["STEPS", "B", "D", "H", "L", "S", "Step", "T", "W", "attend", "deep", "loss_of", "qkv", "step", "wave"]

B, H, T, S, D = 2, 3, 7, 11, 4
"""Batch, heads, queries, keys, size of a head: no two alike, so that a T x S value is known by its shape."""
L, W = 5, 8
"""Layers and width of the models, which have two heads and T positions."""


@dataclass(frozen=True)
class Step:
    """``sizes``: T and S, of which no product may be left; None where the program itself holds one on purpose."""

    name: str
    function: Callable[..., Any]
    arguments: Callable[[], Sequence[Any]]
    sites: int
    sizes: tuple[int, int] | None


STEPS: dict[str, Step] = {}


def qkv(dtype: Any = jnp.float32) -> Sequence[Any]:
    """q [B, H, T, D], k and v [B, H, S, D]."""
    return [array(B, H, n, D, dtype=dtype, seed=i) for i, n in enumerate((T, S, S))]


def deep() -> Sequence[Any]:
    """Weights of L layers, and x [B, T, W]."""
    return [array(L, 4, W, W, seed=7, scale=0.4), array(B, T, W, seed=8)]


def step(
    arguments: Callable[[], Sequence[Any]] = qkv, sites: int = 1, sizes: tuple[int, int] | None = (T, S)
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enters a function into the catalogue.  ``sites`` is how many attentions are in it."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__
        assert name not in STEPS, name
        STEPS[name] = Step(name, function, arguments, sites, (T, T) if arguments is deep and sizes else sizes)
        return function

    return enter


def attend(q: Any, k: Any, v: Any) -> Any:
    """Causal attention, the last query seeing the last key."""
    t, s = q.shape[-2], k.shape[-2]
    causal = jnp.arange(s) <= jnp.arange(t)[:, None] + (s - t)
    return softmax(jnp.where(causal, q @ k.mT * 0.5, -1e9)) @ v


def wave(x: Any) -> Any:
    """As many numbers as ``x`` has, no two alike."""
    return jnp.cos(jnp.arange(x.size, dtype=jnp.float32) * 0.7).reshape(x.shape).astype(x.dtype)


def loss_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """A scalar of a function's result: each element gets a cotangent of its own."""
    return lambda *args: jnp.sum(jnp.sin(function(*args) * 1.3).astype(jnp.float32))


def layer(x: Any, w: Any, attention: Callable[..., Any] = attend) -> Any:
    """x [B, T, W] and w [4, W, W] -> [B, T, W]."""
    q, k, v = (jnp.swapaxes((x @ w[i]).reshape(*x.shape[:-1], 2, -1), -2, -3) for i in range(3))
    out = jnp.swapaxes(attention(q, k, v), -2, -3).reshape(x.shape)
    return x + jnp.tanh(out @ w[3])
