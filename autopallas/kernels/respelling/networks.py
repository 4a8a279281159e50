"""A train step that samples of several kinds of respelling measure."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["float32_types", "lstm", "lstm_loss"]


def float32_types(*shapes: tuple[int, ...]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the types of float32 arrays of some shapes."""
    return tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)


def lstm_loss(x: jax.Array, w: jax.Array, u: jax.Array) -> jax.Array:
    """Returns a loss of an LSTM; x is [time, batch, width], w and u are [width, 4 width]."""

    def step(carried: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        h, c = carried
        i, f, g, o = jnp.split(x @ w + h @ u, 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    first = jnp.zeros_like(x[0])
    return jnp.sum(jnp.sin(lax.scan(step, (first, first), x)[1]))


def lstm(x: jax.Array, w: jax.Array, u: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the gradients of :func:`lstm_loss`."""
    found: tuple[jax.Array, ...] = jax.grad(lstm_loss, (0, 1, 2))(x, w, u)
    return found
