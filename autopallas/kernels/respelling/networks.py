"""Recurrent networks, and a solver of differential equations, that samples of respellings measure."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["float32_types", "gru_loss", "gru_loss_of_products", "lstm", "lstm_loss", "solver"]


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


def gru_loss(x: jax.Array, w: jax.Array, u: jax.Array) -> jax.Array:
    """Returns a loss of a GRU; x is [time, batch, width], w and u are [width, 3 width]."""
    width = x.shape[-1]

    def step(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        reset = jax.nn.sigmoid(x @ w[:, :width] + h @ u[:, :width])
        keep = jax.nn.sigmoid(x @ w[:, width : 2 * width] + h @ u[:, width : 2 * width])
        h = keep * h + (1 - keep) * jnp.tanh(x @ w[:, 2 * width :] + reset * (h @ u[:, 2 * width :]))
        return h, h

    return jnp.sum(jnp.sin(lax.scan(step, jnp.zeros_like(x[0]), x)[1]))


def gru_loss_of_products(z: jax.Array, u: jax.Array) -> jax.Array:
    """Returns a loss of a GRU whose inputs were multiplied before; z is [time, batch, 3 width], u [width, 3 width]."""
    width = len(u)

    def step(h: jax.Array, z: jax.Array) -> tuple[jax.Array, jax.Array]:
        reset, keep = (jax.nn.sigmoid(z[:, i : i + width] + h @ u[:, i : i + width]) for i in (0, width))
        h = keep * h + (1 - keep) * jnp.tanh(z[:, 2 * width :] + reset * (h @ u[:, 2 * width :]))
        return h, h

    return jnp.sum(jnp.sin(lax.scan(step, jnp.zeros((z.shape[1], width)), z)[1]))


def solver(x: jax.Array, w: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
    """Returns gradients of Heun's method for a network of two layers; x is [batch, width]."""

    def loss(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        def slope(x: jax.Array) -> jax.Array:
            return jnp.tanh(x @ w) @ v

        def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            first = slope(x)
            return x + 0.05 * (first + slope(x + 0.1 * first)), None

        return jnp.sum(jnp.sin(lax.scan(step, x, None, 32)[0]))

    found: tuple[jax.Array, ...] = jax.grad(loss, (0, 1, 2))(x, w, v)
    return found
