"""Recurrences whose states are multiplied by matrices that are written out: identities, diagonals, outer products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, nn

from tests.recognition.recurrences import FOUND, REFUSED, H, N, P, T, found, normal, refused, zeros

__all__ = ["FOUND", "REFUSED"]

Array = Any

q, k, v = normal(T, N), normal(T, N), normal(T, P)
unit = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
rate, gate = nn.sigmoid(normal(T)), nn.sigmoid(normal(T, N) + 3)


@found(q, unit, v, rate, decay="scalar")
def householder_from_the_right(q: Array, k: Array, v: Array, rate: Array) -> Array:
    """DeltaNet as its paper writes it."""

    def step(state: Array, own: Any) -> Any:
        q, k, v, rate = own
        state = state @ (jnp.eye(N) - rate * jnp.outer(k, k)) + rate * jnp.outer(v, k)
        return state, state @ q

    return lax.scan(step, zeros(P, N), (q, k, v, rate))[1]


@found(q, unit, v, rate, decay="scalar")
def householder_of_a_scaled_identity(q: Array, k: Array, v: Array, rate: Array) -> Array:
    """The identity is made before the loop, and scaled in each step."""
    identity = jnp.identity(N)

    def step(state: Array, own: Any) -> Any:
        q, k, v, rate = own
        state = (0.95 * identity - rate * k[:, None] * k) @ state + jnp.einsum("n,p->np", k, v)
        return state, q @ state

    return lax.scan(step, zeros(N, P), (q, k, v, rate))[1]


@found(q, unit, v, rate, decay="scalar")
def householder_of_numpy(q: Array, k: Array, v: Array, rate: Array) -> Array:
    """The identity is an array of the program's text."""
    identity = np.eye(N, dtype=np.float32)

    def step(state: Array, own: Any) -> Any:
        q, k, v, rate = own
        state = state @ (identity - rate * jnp.outer(k, k)) + jnp.outer(v, k)
        return state, state @ q

    return lax.scan(step, zeros(P, N), (q, k, v, rate))[1]


@found(q, unit, v, rate, decay="scalar")
def householder_of_compared_numbers(q: Array, k: Array, v: Array, rate: Array) -> Array:
    def step(state: Array, own: Any) -> Any:
        q, k, v, rate = own
        same = (jnp.arange(N)[:, None] == jnp.arange(N)).astype(k.dtype)
        state = state @ (same - rate * jnp.outer(k, k)) + jnp.outer(v, k)
        return state, state @ q

    return lax.scan(step, zeros(P, N), (q, k, v, rate))[1]


@found(q, unit, v, rate, gate, decay="channel")
def diagonal_times_householder(q: Array, k: Array, v: Array, rate: Array, gate: Array) -> Array:
    """Two matrices of the step are multiplied before the state is."""

    def step(state: Array, own: Any) -> Any:
        q, k, v, rate, gate = own
        state = jnp.diag(gate) @ (jnp.eye(N) - rate * jnp.outer(k, k)) @ state + jnp.outer(k, v)
        return state, q @ state

    return lax.scan(step, zeros(N, P), (q, k, v, rate, gate))[1]


@found(normal(T, H, N), nn.sigmoid(normal(T, H, N)), normal(T, H, N), normal(T, H, P), 0.3 * normal(T, H, N),
       0.3 * normal(T, H, N), decay="channel")  # fmt: skip
def diagonal_minus_outer_product(r: Array, w: Array, k: Array, v: Array, removed: Array, written: Array) -> Array:
    """RWKV-7's transition as a matrix, of each head."""

    def step(state: Array, own: Any) -> Any:
        r, w, k, v, removed, written = own
        transition = jax.vmap(jnp.diag)(w) - removed[..., None] * written[..., None, :]
        state = jnp.einsum("hpi,hij->hpj", state, transition) + v[..., None] * k[..., None, :]
        return state, jnp.einsum("hpn,hn->hp", state, r)

    return lax.scan(step, zeros(H, P, N), (r, w, k, v, removed, written))[1]


@found(q, k, v, gate, decay="channel")
def diagonal_from_the_left(q: Array, k: Array, v: Array, gate: Array) -> Array:
    def step(state: Array, own: Any) -> Any:
        q, k, v, gate = own
        state = jnp.diag(gate) @ state + jnp.outer(k, v)
        return state, q @ state

    return lax.scan(step, zeros(N, P), (q, k, v, gate))[1]


@found(q, unit, v, normal(N, P), decay="scalar")
def trained_in_the_step(q: Array, k: Array, v: Array, weights: Array) -> Array:
    """TTT: each step goes down the gradient of a loss that is quadratic in what is carried."""

    def loss(weights: Array, k: Array, v: Array) -> Array:
        return jnp.mean(jnp.square(k @ weights - v))

    def step(weights: Array, own: Any) -> Any:
        q, k, v = own
        weights = weights - 0.5 * jax.grad(loss)(weights, k, v)
        return weights, q @ weights

    return lax.scan(step, weights, (q, k, v))[1]


@found(q, k, v, rate, decay="scalar")
def several_results(q: Array, k: Array, v: Array, rate: Array) -> Any:
    """What is read, its square, and what was read before the step."""

    def step(state: Array, own: Any) -> Any:
        q, k, v, rate = own
        before = q @ state
        state = rate * state + jnp.outer(k, v)
        y = q @ state
        return state, (y, jnp.sum(y * y), before)

    return lax.scan(step, zeros(N, P), (q, k, v, rate))[1]


@found(q, k, v, rate, decay="scalar")
def several_results_with_one_cotangent(q: Array, k: Array, v: Array, rate: Array) -> Array:
    def step(state: Array, own: Any) -> Any:
        q, k, v, rate = own
        state = rate * state + jnp.outer(k, v)
        return state, (q @ state, k @ state)

    first, second = lax.scan(step, zeros(N, P), (q, k, v, rate))[1]
    return jnp.sum(first) + jnp.sum(second)


# ---------------------------------------------------------------------- no identities


def multiplied(transition: Callable[[Array, Array], Array]) -> Callable[..., Array]:
    """The loop whose state is multiplied by a matrix of the step's key and rate."""

    def function(q: Array, k: Array, v: Array, rate: Array) -> Array:
        def step(state: Array, own: Any) -> Any:
            q, k, v, rate = own
            state = state @ transition(k, rate) + jnp.outer(v, k)
            return state, state @ q

        return lax.scan(step, zeros(P, N), (q, k, v, rate))[1]

    function.__name__ = transition.__name__
    return refused(q, unit, v, rate, reason="multiplied by a matrix")(function)


@multiplied
def shifted_identity(k: Array, rate: Array) -> Array:
    return jnp.eye(N, k=1) - rate * jnp.outer(k, k)


@multiplied
def identity_from_the_last_to_the_first(k: Array, rate: Array) -> Array:
    return jnp.eye(N)[::-1] - rate * jnp.outer(k, k)


@multiplied
def something_beside_the_diagonal(k: Array, rate: Array) -> Array:
    return jnp.where(jnp.eye(N, dtype=bool), rate, 0.01)


@multiplied
def lower_triangle(k: Array, rate: Array) -> Array:
    return jnp.tri(N) - rate * jnp.outer(k, k)


@multiplied
def householder_that_is_rounded(k: Array, rate: Array) -> Array:
    return (jnp.eye(N) - rate * jnp.outer(k, k)).astype(jnp.bfloat16).astype(jnp.float32)
