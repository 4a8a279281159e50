"""Recurrences whose steps add several products to a state, or correct it along several rows one after the other."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax, nn

from tests.recognition.recurrences import H, N, P, T, found, normal, refused, zeros

__all__: list[str] = []

Array = Any

R = 3
q, k, v = normal(T, H, N), normal(T, H, N), normal(T, H, P)
gate = normal(T, H) + 2
keys, values, rates = normal(T, R, H, N), normal(T, R, H, P), normal(T, R, H)
units = keys / jnp.linalg.norm(keys, axis=-1, keepdims=True)


@found(normal(T, H, P, R), normal(T, H, R, N), normal(T, H, N, R), gate, decay="scalar")
def several_inputs_and_outputs(x: Array, b: Array, c: Array, gate: Array) -> Array:
    """Mamba-3: a step adds a product of two narrow matrices, and reads the state along as many rows."""

    def step(state: Array, own: Any) -> Any:
        x, b, c, gate = own
        state = nn.sigmoid(gate)[:, None, None] * state + x @ b
        return state, state @ c

    return lax.scan(step, zeros(H, P, N), (x, b, c, gate))[1]


@found(q, keys, values, normal(T, H, N) + 2, normal(T) > -1, decay="channel")
def sums_of_products(q: Array, keys: Array, values: Array, gate: Array, valid: Array) -> Array:
    """Products that are made by broadcasting, and summed up before they are added where a step is valid; the state is
    read before the step."""

    def step(state: Array, own: Any) -> Any:
        q, k, v, gate, valid = own
        added = jnp.sum(k[..., :, None] * v[..., None, :], 0)
        y = jnp.einsum("hn,hnp->hp", q, state)
        return nn.sigmoid(gate)[..., None] * state + jnp.where(valid, added, 0.0), y

    return lax.scan(step, zeros(H, N, P), (q, keys, values, gate, valid))[1]


@found(q, keys, values, gate, decay="scalar")
def two_products_with_a_shared_key(q: Array, keys: Array, values: Array, gate: Array) -> Array:
    """Of three products two have the same key: a step adds two."""

    def step(state: Array, own: Any) -> Any:
        q, k, v, gate = own
        both = k[0][..., None] * v[0][..., None, :] - 0.5 * k[1][..., None] * v[1][..., None, :]
        state = nn.sigmoid(gate)[..., None, None] * state + both + k[0][..., None] * v[2][..., None, :]
        return state, jnp.einsum("hn,hnp->hp", q, state)

    return lax.scan(step, zeros(H, N, P), (q, keys, values, gate))[1]


@found(q, units, values, rates, gate, decay="scalar")
def gated_delta_product(q: Array, keys: Array, values: Array, rates: Array, gate: Array) -> Array:
    """Gated DeltaProduct: three keys of a step replace their values, one after the other."""

    def step(state: Array, own: Any) -> Any:
        q, keys, values, rates, gate = own
        state = nn.sigmoid(gate)[..., None, None] * state
        for k, v, rate in zip(keys, values, rates, strict=True):
            error = v - jnp.einsum("hn,hnp->hp", k, state)
            state = state + nn.sigmoid(rate)[..., None, None] * k[..., None] * error[..., None, :]
        return state, jnp.einsum("hn,hnp->hp", q, state)

    return lax.scan(step, zeros(H, N, P), (q, keys, values, rates, gate))[1]


@found(units, values, rates, decay="scalar")
def errors_between_corrections(keys: Array, values: Array, rates: Array) -> Array:
    """What is read between the corrections of a step is stacked, and the state lies transposed."""

    def step(state: Array, own: Any) -> Any:
        errors = []
        for k, v, rate in zip(*own, strict=True):
            errors.append(v - jnp.einsum("hpn,hn->hp", state, k))
            state = state + nn.sigmoid(rate)[..., None, None] * errors[-1][..., None] * k[..., None, :]
        return state, jnp.stack(errors)

    return lax.scan(step, zeros(H, P, N), (keys, values, rates))[1]


@found(q[:, 0], units[:, :, 0], values[:, 0, 0], rates[:, 0, 0], decay="scalar")
def two_householders(q: Array, keys: Array, v: Array, rate: Array) -> Array:
    """DeltaProduct by matrices, from the right."""

    def step(state: Array, own: Any) -> Any:
        q, keys, v, rate = own
        for k in keys[:2]:
            state = state @ (jnp.eye(N) - nn.sigmoid(rate) * jnp.outer(k, k))
        state = state + jnp.outer(v, keys[0])
        return state, state @ q

    return lax.scan(step, zeros(P, N), (q, keys, v, rate))[1]


@found(q, units, values, rates, gate, decay="scalar", trained=False)
def delta_product_in_a_loop(q: Array, keys: Array, values: Array, rates: Array, gate: Array) -> Array:
    """The keys of a step are gone through in a loop of their own."""

    def step(state: Array, own: Any) -> Any:
        q, keys, values, rates, gate = own

        def replace(state: Array, own: Any) -> Any:
            k, v, rate = own
            error = v - jnp.einsum("hn,hnp->hp", k, state)
            return state + nn.sigmoid(rate)[..., None, None] * k[..., None] * error[..., None, :], error.sum()

        state, errors = lax.scan(replace, nn.sigmoid(gate)[..., None, None] * state, (keys, values, rates))
        return state, jnp.einsum("hn,hnp->hp", q, state) + errors.sum()

    return lax.scan(step, zeros(H, N, P), (q, keys, values, rates, gate))[1]


@found(q, k, v, gate[0], decay="scalar")
def keys_that_are_averaged(q: Array, k: Array, v: Array, gate: Array) -> Array:
    """A carried average of the keys, no larger than a key, is computed before the state that it is added to."""

    def step(carried: Any, own: Any) -> Any:
        state, average = carried
        q, k, v = own
        average = nn.sigmoid(gate)[:, None] * average + k
        state = 0.9 * state + average[..., None] * v[..., None, :]
        return (state, average), jnp.einsum("hn,hnp->hp", q, state)

    return lax.scan(step, (zeros(H, N, P), zeros(H, N)), (q, k, v))[1]


# ---------------------------------------------------------------------- what has no such form


@refused(q, units, gate, reason="corrected along more than one row at once")
def two_rows_at_once(q: Array, keys: Array, gate: Array) -> Array:
    """Both corrections read the state before the step."""

    def step(state: Array, own: Any) -> Any:
        q, k, gate = own
        first, second = (jnp.einsum("hn,hnp->hp", own, state) for own in k[:2])
        state = nn.sigmoid(gate)[..., None, None] * state - 0.3 * k[0][..., None] * first[..., None, :]
        state = state - 0.3 * k[1][..., None] * second[..., None, :]
        return state, jnp.einsum("hn,hnp->hp", q, state)

    return lax.scan(step, zeros(H, N, P), (q, keys, gate))[1]


@refused(q, units, values)
def corrections_with_something_else_between(q: Array, keys: Array, values: Array) -> Array:
    def step(state: Array, own: Any) -> Any:
        q, k, v = own
        for i in range(2):
            error = v[i] - jnp.einsum("hn,hnp->hp", k[i], state)
            state = jnp.tanh(state + k[i][..., None] * error[..., None, :])
        return state, jnp.einsum("hn,hnp->hp", q, state)

    return lax.scan(step, zeros(H, N, P), (q, keys, values))[1]


@refused(normal(T, H, N), normal(T, 9, H, N, scale=0.3), reason="sub of")
def more_corrections_than_are_looked_for(q: Array, keys: Array) -> Array:
    def step(state: Array, own: Any) -> Any:
        q, keys = own
        for k in keys:
            read = jnp.einsum("hn,hnp->hp", k, state)
            state = state - 0.1 * k[..., None] * read[..., None, :]
        return state + q[..., None], jnp.einsum("hn,hnp->hp", q, state)

    return lax.scan(step, zeros(H, N, P), (q, keys))[1]


@refused(q, k, v, gate, reason="would take more memory than anything that the loop reads")
def momentum(q: Array, k: Array, v: Array, gate: Array) -> Array:
    """Titans: what is added to the state is a matrix that decays itself."""

    def step(carried: Any, own: Any) -> Any:
        speed, state = carried
        q, k, v, gate = own
        speed = nn.sigmoid(gate)[..., None, None] * speed + k[..., None] * v[..., None, :]
        state = 0.9 * state + speed
        return (speed, state), jnp.einsum("hn,hnp->hp", q, state)

    return lax.scan(step, (zeros(H, N, P), zeros(H, N, P)), (q, k, v, gate))[1]


@refused(q[:8], k[:8], v[:8], reason="it has no more than 8 steps")
def few_steps(q: Array, k: Array, v: Array) -> Array:
    def step(state: Array, own: Any) -> Any:
        q, k, v = own
        state = 0.9 * state + k[..., None] * v[..., None, :]
        return state, jnp.einsum("hn,hnp->hp", q, state)

    return lax.scan(step, zeros(H, N, P), (q, k, v))[1]


@refused(v[:8])
def few_steps_of_something_else(x: Array) -> Array:
    def step(state: Array, x: Array) -> Any:
        state = 0.9 * jnp.tanh(state) + x
        return state, state

    return lax.scan(step, zeros(H, P), x)[1]


@refused(q[:, 0], units[:, 0, 0], v[:, 0], reason="which is computed before the loop")
def transitions_before_the_loop(q: Array, k: Array, v: Array) -> Array:
    """The matrices of the delta rule are made for all steps, before the loop."""
    transitions = jnp.eye(N) - 0.5 * k[:, :, None] * k[:, None, :]

    def step(state: Array, own: Any) -> Any:
        transition, q, k, v = own
        state = transition @ state + jnp.outer(k, v)
        return state, q @ state

    return lax.scan(step, zeros(N, P), (transitions, q, k, v))[1]
