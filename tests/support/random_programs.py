"""Random programs: dots, elementwise operations, reductions, control flow; right and subtly wrong attentions."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.nn import softmax

__all__ = ["random_program"]

N = 6
"""Every value of a random program is [2, N, N]: any two can meet, and no axis is known by its size."""


def _mask(draw: random.Random) -> Any:
    row, column = jnp.arange(N)[:, None], jnp.arange(N)[None]
    return draw.choice([column <= row, jnp.abs(row - column) < 3, column < 4, (row + column) % 2 == 0])


def _scores(draw: random.Random, q: Any, k: Any) -> Any:
    s = draw.choice([lambda: q @ k.mT, lambda: jnp.einsum("btd,bsd->bts", q, k), lambda: (k @ q.mT).mT])()
    s = s * draw.choice([1.0, 0.4, N**-0.5])
    for _ in range(draw.randrange(3)):
        s = draw.choice([
            lambda s: s + jnp.arange(N) * 0.1,
            lambda s: 2 * jnp.tanh(s / 2),
            lambda s: jnp.where(_mask(draw), s, draw.choice([-1e9, -jnp.inf, -30.0])) if draw.random() < 0.8 else s,
            lambda s: s - lax.stop_gradient(s.max(-1, keepdims=True)),
        ])(s)  # fmt: skip
    return s


def _weights(draw: random.Random, s: Any) -> Any:
    return draw.choice([
        lambda: softmax(s),
        lambda: jnp.exp(jax.nn.log_softmax(s)),
        lambda: jnp.exp(s - jax.nn.logsumexp(s, -1, keepdims=True)),
        lambda: (lambda e: e / e.sum(-1, keepdims=True))(jnp.exp(s - lax.stop_gradient(s.max(-1, keepdims=True)))),
    ])()  # fmt: skip


def _right(draw: random.Random, a: Any, b: Any, c: Any) -> Any:
    s = _scores(draw, a, b)
    if draw.random() < 0.3:
        e = jnp.exp(s - lax.stop_gradient(s.max(-1, keepdims=True)))
        return (e @ c) / e.sum(-1, keepdims=True)
    return _weights(draw, s) @ c


def _broken(draw: random.Random, a: Any, b: Any, c: Any) -> Any:
    """Nearly an attention: what an inexact guard would take for one."""
    s = a @ b.mT * 0.5
    e = jnp.exp(s)
    p = softmax(s)
    return draw.choice([
        lambda: softmax(s, -2) @ c,
        lambda: p.mT @ c,
        lambda: softmax(s, -2).mT @ c,
        lambda: (e / e.sum(-2, keepdims=True)) @ c,
        lambda: (e / (e.sum(-1, keepdims=True) + 0.5)) @ c,
        lambda: (e / e.sum(-1)[:, None, :]) @ c,
        lambda: (e / jnp.exp(s.mT).sum(-1, keepdims=True)) @ c,
        lambda: (e / e[:, :, 1:].sum(-1, keepdims=True)) @ c,
        lambda: (e / e.sum(-1, keepdims=True) ** 2) @ c,
        lambda: jnp.where(p > 0.1, p, 0) @ c,
        lambda: softmax(p) @ c,
        lambda: (p * s) @ c,
        lambda: p @ (c * s),
        lambda: p @ c + p,
        lambda: lax.stop_gradient(p) @ c,
        lambda: (p + 0.01) @ c,
        lambda: jnp.maximum(p, 0.05) @ c,
        lambda: softmax(jnp.sort(s, -1)) @ c,
        lambda: softmax(s - s.mean(-1, keepdims=True) * 0.5 * s) @ c,
        lambda: softmax(s * s.max(-1, keepdims=True)) @ c,
        lambda: jax.nn.sigmoid(s) @ c,
        lambda: softmax(s[:, ::-1]) @ c,
        lambda: p[:, :, ::-1] @ c,
        lambda: softmax(s, (-1, -2)) @ c,
        lambda: softmax(s, 0) @ c,
    ])()  # fmt: skip


def random_program(seed: int, reverse: bool = True) -> tuple[Callable[..., Any], int]:
    """A function of three arrays [2, N, N], and how many right attentions were put into it.

    With ``reverse`` it can be differentiated in reverse mode, so its loops have a fixed count.
    """
    plan = random.Random(seed)
    count = 0

    def operation(depth: int) -> Callable[..., Any]:
        """One step from a list of values to the next value; drawn once, so that each trace makes the same program."""
        nonlocal count
        own = plan.randrange(2**32)
        picks = [plan.randrange(100) for _ in range(3)]
        kinds = ["right"] * 3 + ["broken"] * 2 + ["dot", "elementwise", "reduction", "layout"]
        kind = plan.choice(kinds + ["scan", "cond", "checkpoint", "while", "jit"] * (depth < 2))
        count += kind == "right"
        inner = (
            block(depth + 1, plan.randrange(1, 3)) if kind in ("scan", "cond", "checkpoint", "while", "jit") else None
        )

        def apply(values: list[Any]) -> Any:
            draw = random.Random(own)
            a, b, c = (values[p % len(values)] for p in picks)
            if kind == "right":
                return _right(draw, a, b, c)
            if kind == "broken":
                return _broken(draw, a, b, c)
            if kind == "dot":
                return jnp.tanh(draw.choice([a @ b, a.mT @ b, a @ b.mT]))
            if kind == "elementwise":
                return draw.choice(
                    [a + b, a * jax.nn.sigmoid(b), jnp.where(a > 0, b, c), jnp.exp(-a * a), jax.nn.relu(a)]
                )
            if kind == "reduction":
                return a - draw.choice([b.mean(-1, keepdims=True), b.max(-2, keepdims=True), jnp.cumsum(b, -1) * 0.1])
            if kind == "layout":
                return draw.choice([a.mT, a[:, ::-1], a.reshape(2, N * N).reshape(2, N, N), jnp.roll(a, 1, -1)])
            if kind == "scan":
                return lax.scan(lambda x, y: (jnp.tanh(inner([x, b, y])), None), a, jnp.stack([c, c * 0.5]))[0]
            if kind == "while":
                step = lambda x: jnp.tanh(inner([x, b, c]))  # noqa: E731
                if reverse:
                    return lax.fori_loop(0, 2, lambda _, x: step(x), a)
                return lax.while_loop(lambda x: x[0] < 2, lambda x: (x[0] + 1, step(x[1])), (0, a))[1]
            if kind == "cond":
                return lax.cond(a.sum() < 1e4, lambda a, b, c: inner([a, b, c]), lambda a, b, c: c, a, b, c)
            wrap = jax.checkpoint if kind == "checkpoint" else jax.jit
            return wrap(lambda a, b, c: inner([a, b, c]))(a, b, c)

        return apply

    def block(depth: int, length: int) -> Callable[..., Any]:
        steps = [operation(depth) for _ in range(length)]

        def run(values: list[Any]) -> Any:
            values = list(values)
            for step in steps:
                new = step(values)
                values = [jnp.clip(new, -3, 3), *values][:4]
            return values[0]

        return run

    body = block(0, plan.randrange(2, 5))
    return lambda a, b, c: body([a, b, c]), count
