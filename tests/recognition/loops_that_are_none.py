"""Loops that are not affine in what they carry, and are no recurrences."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax, nn

from tests.recognition.recurrences import REFUSED, B, D, H, N, P, T, k, normal, q, refused, unit, v, x, zeros

__all__ = ["REFUSED"]

Array = Any


@refused(x, reason="max of")
def largest(x: Array) -> Array:
    def step(h: Array, x: Array) -> Any:
        h = jnp.maximum(0.9 * h + x, 0.0)
        return h, h

    return lax.scan(step, zeros(B, D), x)[1]


@refused(x, reason="logistic of")
def gate_reads_the_state(x: Array) -> Array:
    def step(h: Array, x: Array) -> Any:
        h = nn.sigmoid(h) * h + x
        return h, h

    return lax.scan(step, zeros(B, D), x)[1]


@refused(x, normal(T, B, D), reason="logistic of")
def gate_reads_data_and_the_state(x: Array, y: Array) -> Array:
    def step(h: Array, own: Any) -> Any:
        x, y = own
        h = nn.sigmoid(y + 0.1 * h.sum()) * h + x
        return h, h

    return lax.scan(step, zeros(B, D), (x, y))[1]


@refused(q, k, v, reason="tanh of")
def gate_reads_the_readout(q: Array, k: Array, v: Array) -> Array:
    """The decay of a matrix state is computed from what is read of it."""

    def step(state: Array, own: Any) -> Any:
        q, k, v = own
        y = jnp.sum(q[..., None] * state, -2)
        state = jnp.tanh(y)[..., None, :] * state + k[..., None] * v[..., None, :]
        return state, y

    return lax.scan(step, zeros(B, H, N, P), (q, k, v))[1]


@refused(x, reason="gt of")
def spikes(x: Array) -> Array:
    def step(h: Array, x: Array) -> Any:
        h = 0.9 * h + x
        fires = (h > 1).astype(h.dtype)
        return h * (1 - fires), fires

    return lax.scan(step, zeros(B, D), x)[1]


@refused(x, reason="gt of")
def selected_by_the_state(x: Array) -> Array:
    def step(h: Array, x: Array) -> Any:
        h = jnp.where(h > 0, 0.9 * h, h) + x
        return h, h

    return lax.scan(step, zeros(B, D), x)[1]


@refused(x, reason="mul of")
def squared(x: Array) -> Array:
    def step(h: Array, x: Array) -> Any:
        h = 0.9 * h + 0.01 * h * h + x
        return h, h

    return lax.scan(step, zeros(B, D), x)[1]


@refused(x, reason="mul of")
def normalised_state(x: Array) -> Array:
    def step(h: Array, x: Array) -> Any:
        h = 0.9 * h + x
        h = h * lax.rsqrt(jnp.mean(h * h) + 1e-6)
        return h, h

    return lax.scan(step, zeros(B, D), x)[1]


@refused(x, reason="reads of it, and the state is not summed over")
def centred(x: Array) -> Array:
    """Affine, but each element reads all others."""

    def step(h: Array, x: Array) -> Any:
        h = 0.9 * (h - jnp.mean(h, -1, keepdims=True)) + x
        return h, h

    return lax.scan(step, zeros(B, D), x)[1]


@refused(normal(T, D, D), reason="change places")
def transposed(x: Array) -> Array:
    def step(state: Array, x: Array) -> Any:
        state = 0.9 * state.T + x
        return state, state

    return lax.scan(step, zeros(D, D), x)[1]


@refused(x, reason="on each other: all of it together is multiplied by a matrix")
def coupled(x: Array) -> Array:
    def step(carried: Any, x: Array) -> Any:
        place, speed = carried
        speed = 0.9 * speed + x - 0.1 * place
        place = place - 0.1 * speed
        return (place, speed), place

    return lax.scan(step, (zeros(B, D), zeros(B, D)), x)[1]


@refused(x, reason="max of")
def clipped(x: Array) -> Array:
    def step(h: Array, x: Array) -> Any:
        h = jnp.clip(0.9 * h + x, -1, 1)
        return h, h

    return lax.scan(step, zeros(B, D), x)[1]


@refused(x, normal(D, 4 * D), normal(D, 4 * D), reason="not by sums and products")
def lstm(x: Array, wx: Array, wh: Array) -> Array:
    def step(carried: Any, x: Array) -> Any:
        h, c = carried
        i, f, g, o = jnp.split(x @ wx + h @ wh, 4, -1)
        c = nn.sigmoid(f) * c + nn.sigmoid(i) * jnp.tanh(g)
        h = nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    return lax.scan(step, (zeros(B, D), zeros(B, D)), x)[1]


@refused(x, normal(D, D), reason="multiplied by a matrix")
def dense(x: Array, w: Array) -> Array:
    def step(h: Array, x: Array) -> Any:
        h = 0.1 * h @ w + x
        return h, h

    return lax.scan(step, zeros(B, D), x)[1]


@refused(x, 0.3 * normal(T, D), normal(D, D))
def nonlinear(x: Array, w: Array, u: Array) -> Array:
    def step(h: Array, given: Any) -> Any:
        x, w = given
        h = jnp.tanh((w * h) @ u) + x
        return h, h

    return lax.scan(step, zeros(B, D), (x, w))[1]


@refused(x, reason="slice of the carried value")
def rolled(x: Array) -> Array:
    def step(h: Array, x: Array) -> Any:
        h = 0.9 * jnp.roll(h, 1, -1) + x
        return h, h

    return lax.scan(step, zeros(B, D), x)[1]


@refused(q, k, v, reason="corrected along other axes")
def corrected_along_columns(q: Array, k: Array, v: Array) -> Array:
    """What is read back runs along the columns, and readouts sum over rows."""

    def step(state: Array, own: Any) -> Any:
        q, k, v = own
        read = jnp.einsum("bhp,bhnp->bhn", v, state)
        state = state - 0.01 * read[..., None] * v[..., None, :] + k[..., None] * v[..., None, :]
        return state, jnp.einsum("bhn,bhnp->bhp", q, state)

    return lax.scan(step, zeros(B, H, N, P), (q, k, v))[1]


@refused(q, unit, v, normal(B, H, N, N), reason="multiplied by a matrix")
def corrected_by_a_matrix(q: Array, k: Array, v: Array, w: Array) -> Array:
    """What is read of the state goes through a matrix before it is written."""

    def step(state: Array, own: Any) -> Any:
        q, k, v = own
        state = (
            0.9 * state - 0.1 * jnp.einsum("bhnm,bhmp->bhnp", w * k[..., None], state) + k[..., None] * v[..., None, :]
        )
        return state, jnp.einsum("bhn,bhnp->bhp", q, state)

    return lax.scan(step, zeros(B, H, N, P), (q, k, v))[1]


@refused(q, unit, v)
def correction_through_a_function(q: Array, k: Array, v: Array) -> Array:
    """What is read of the state is bent before it is written."""

    def step(state: Array, own: Any) -> Any:
        q, k, v = own
        error = v - jnp.tanh(jnp.einsum("bhn,bhnp->bhp", k, state))
        state = 0.9 * state + k[..., None] * error[..., None, :]
        return state, jnp.einsum("bhn,bhnp->bhp", q, state)

    return lax.scan(step, zeros(B, H, N, P), (q, k, v))[1]


@refused(x)
def magnitude(x: Array) -> Array:
    def step(h: Array, x: Array) -> Any:
        h = jnp.abs(0.9 * h) + x
        return h, h

    return lax.scan(step, zeros(B, D), x)[1]


@refused(x, reason="div of")
def divided_by_the_state(x: Array) -> Array:
    def step(h: Array, x: Array) -> Any:
        h = 0.9 * h + x / (2.0 + h)
        return h, h

    return lax.scan(step, zeros(B, D), x)[1]


@refused(x)
def quantised(x: Array) -> Array:
    def step(h: Array, x: Array) -> Any:
        h = jnp.round(8 * (0.9 * h + x)) / 8
        return h, h

    return lax.scan(step, zeros(B, D), x)[1]


@refused(q, unit, v)
def correction_by_the_norm(q: Array, k: Array, v: Array) -> Array:
    """What is read of the state is normalised by itself."""

    def step(state: Array, own: Any) -> Any:
        q, k, v = own
        read = jnp.einsum("bhn,bhnp->bhp", k, state)
        read = read * lax.rsqrt(jnp.sum(read * read, -1, keepdims=True) + 1)
        state = 0.9 * state + k[..., None] * (v - read)[..., None, :]
        return state, jnp.einsum("bhn,bhnp->bhp", q, state)

    return lax.scan(step, zeros(B, H, N, P), (q, k, v))[1]


@refused(x, reason="min of")
def capped(x: Array) -> Array:
    def step(h: Array, x: Array) -> Any:
        h = jnp.minimum(0.9 * h + x, 1.0)
        return h, h

    return lax.scan(step, zeros(B, D), x)[1]


@refused(q, k, v)
def kept_as_signs(q: Array, k: Array, v: Array) -> Array:
    """Of a matrix state only the signs are carried on."""

    def step(state: Array, own: Any) -> Any:
        q, k, v = own
        state = 0.5 * jnp.sign(state) + k[..., None] * v[..., None, :]
        return state, jnp.einsum("bhn,bhnp->bhp", q, state)

    return lax.scan(step, zeros(B, H, N, P), (q, k, v))[1]
