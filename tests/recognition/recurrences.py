"""Recurrences as people write them: loops that are affine in what they carry, and loops that are not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, nn

__all__ = [
    "FOUND", "REFUSED", "Found", "H", "N", "P", "Refused", "T", "found", "gated", "normal", "receptance", "refused",
    "retention", "state_space", "zeros",
]  # fmt: skip

T, B, H, N, P, D = 40, 2, 3, 8, 9, 8
"""Steps, sequences, heads, rows and columns of a state, elements of a vector.  No chunk divides T."""

Array = Any
_random = np.random.default_rng(0)


def normal(*shape: int, scale: float = 1.0) -> Array:
    return jnp.asarray(_random.standard_normal(shape) * scale, jnp.float32)


@dataclass(frozen=True)
class Found:
    """A program that holds one recurrence, and what kind of decay it has."""

    function: Callable[..., Array]
    arguments: tuple[Array, ...]
    decay: str
    trained: bool = True
    """Whether its backward is found too."""


@dataclass(frozen=True)
class Refused:
    """A program that holds none, and a word of the reason; an empty one where nothing is said."""

    function: Callable[..., Array]
    arguments: tuple[Array, ...]
    reason: str = ""


FOUND: dict[str, Found] = {}
REFUSED: dict[str, Refused] = {}


def found(*arguments: Array, decay: str, trained: bool = True) -> Callable[..., Any]:
    def entered(function: Callable[..., Array]) -> Callable[..., Array]:
        FOUND[function.__name__] = Found(function, arguments, decay, trained)
        return function

    return entered


def refused(*arguments: Array, reason: str = "") -> Callable[..., Any]:
    def entered(function: Callable[..., Array]) -> Callable[..., Array]:
        REFUSED[function.__name__] = Refused(function, arguments, reason)
        return function

    return entered


q, k, v = normal(T, B, H, N), normal(T, B, H, N), normal(T, B, H, P)
x = normal(T, B, D)


def zeros(*shape: int) -> Array:
    return jnp.zeros(shape, jnp.float32)


# ---------------------------------------------------------------------- matrix states, one decay per head


@found(q, k, v, jnp.linspace(0.9, 0.99, H), decay="scalar")
def retention(q: Array, k: Array, v: Array, decay: Array) -> Array:
    """RetNet: a decay for each head, the same in all steps."""

    def step(state: Array, own: Any) -> Any:
        q, k, v = own
        state = decay[:, None, None] * state + k[..., :, None] * v[..., None, :]
        return state, jnp.einsum("bhn,bhnp->bhp", q, state)

    return lax.scan(step, zeros(q.shape[1], q.shape[2], q.shape[3], v.shape[3]), (q, k, v))[1]


@found(q, k, v, jnp.linspace(0.9, 0.99, H), decay="scalar")
def retention_mapped(q: Array, k: Array, v: Array, decay: Array) -> Array:
    """The same for one head, mapped over heads and sequences."""

    def one(q: Array, k: Array, v: Array, decay: Array) -> Array:
        def step(state: Array, own: Any) -> Any:
            q, k, v = own
            state = decay * state + jnp.outer(k, v)
            return state, q @ state

        return lax.scan(step, zeros(N, P), (q, k, v))[1]

    return jax.vmap(jax.vmap(one, (1, 1, 1, 0), 1), (1, 1, 1, None), 1)(q, k, v, decay)


@found(q, k, v, decay="scalar")
def linear_attention(q: Array, k: Array, v: Array) -> Array:
    """No decay at all; the state is the transpose."""

    def step(state: Array, own: Any) -> Any:
        q, k, v = own
        state = state + v[..., :, None] * k[..., None, :]
        return state, jnp.sum(state * q[..., None, :], -1)

    return lax.scan(step, zeros(B, H, P, N), (q, k, v))[1]


@found(q, k, v, decay="scalar")
def linear_attention_normalised(q: Array, k: Array, v: Array) -> Array:
    """A feature map, and a second state that normalises."""

    def step(states: Any, own: Any) -> Any:
        state, total = states
        q, k, v = own
        q, k = nn.elu(q) + 1, nn.elu(k) + 1
        state, total = state + jnp.einsum("bhn,bhp->bhnp", k, v), total + k
        y = jnp.einsum("bhn,bhnp->bhp", q, state) / (jnp.einsum("bhn,bhn->bh", q, total)[..., None] + 1e-6)
        return (state, total), y

    return lax.scan(step, (zeros(B, H, N, P), zeros(B, H, N)), (q, k, v))[1]


def _state_space_arguments() -> tuple[Array, ...]:
    return normal(T, B, H, P), normal(T, B, H), normal(T, B, N), normal(T, B, N), normal(H), normal(H)


@found(*_state_space_arguments(), decay="scalar")
def state_space(x: Array, dt: Array, b: Array, c: Array, log_a: Array, skip: Array) -> Array:
    """Mamba-2: heads share B and C."""

    def step(state: Array, own: Any) -> Any:
        x, dt, b, c = own
        dt = nn.softplus(dt)
        decay = jnp.exp(dt * -jnp.exp(log_a))
        state = state * decay[..., None, None] + jnp.einsum("bh,bhp,bn->bhpn", dt, x, b)
        return state, jnp.einsum("bhpn,bn->bhp", state, c) + skip[:, None] * x

    shape = (x.shape[1], x.shape[2], x.shape[3], b.shape[2])
    return lax.scan(step, zeros(*shape), (x, dt, b, c))[1]


@found(q, k, v, normal(T, B, H), normal(B, H, N, P), decay="scalar")
def state_kept(q: Array, k: Array, v: Array, gate: Array, state: Array) -> Array:
    """A state is given; y reads the state before the step."""

    def step(state: Array, own: Any) -> Any:
        q, k, v, gate = own
        y = jnp.einsum("bhn,bhnp->bhp", q, state)
        return nn.sigmoid(gate)[..., None, None] * state + k[..., None] * v[..., None, :], y

    return lax.scan(step, state, (q, k, v, gate))[1]


@found(q, k, v, normal(T, B, H) > 1, decay="scalar")
def reset(q: Array, k: Array, v: Array, begins: Array) -> Array:
    """Documents in one sequence: the state begins anew."""

    def step(state: Array, own: Any) -> Any:
        q, k, v, begins = own
        state = jnp.where(begins[..., None, None], 0.0, 0.95 * state) + k[..., None] * v[..., None, :]
        return state, jnp.einsum("bhn,bhnp->bhp", q, state)

    return lax.scan(step, zeros(B, H, N, P), (q, k, v, begins))[1]


@found(q, k, v, normal(T, B, H), decay="scalar")
def reversed_retention(q: Array, k: Array, v: Array, gate: Array) -> Array:
    """From the last step to the first, with a step that is checkpointed."""

    @jax.checkpoint
    def step(state: Array, own: Any) -> Any:
        q, k, v, gate = own
        state = nn.sigmoid(gate)[..., None, None] * state + k[..., None] * v[..., None, :]
        return state, jnp.einsum("bhn,bhnp->bhp", q, state)

    return lax.scan(step, zeros(B, H, N, P), (q, k, v, gate), reverse=True)[1]


@found(q, k, v, normal(T, B, H), normal(T, B, H), decay="scalar")
def mlstm(q: Array, k: Array, v: Array, gate_in: Array, gate_forget: Array) -> Array:
    """xLSTM: a running maximum, which no state enters, and two states."""

    def step(states: Any, own: Any) -> Any:
        state, total, most = states
        q, k, v, gate_in, gate_forget = own
        forget = nn.log_sigmoid(gate_forget)
        after = jnp.maximum(forget + most, gate_in)
        keep, add = jnp.exp(forget + most - after), jnp.exp(gate_in - after)
        state = keep[..., None, None] * state + add[..., None, None] * k[..., :, None] * v[..., None, :]
        total = keep[..., None] * total + add[..., None] * k
        y = jnp.einsum("bhnp,bhn->bhp", state, q)
        return (state, total, after), y / jnp.maximum(jnp.abs(jnp.einsum("bhn,bhn->bh", total, q)), 1.0)[..., None]

    return lax.scan(step, (zeros(B, H, N, P), zeros(B, H, N), zeros(B, H)), (q, k, v, gate_in, gate_forget))[1]


@found(x, normal(D, 16, scale=0.3), normal(D, 16, scale=0.3), normal(D, 16, scale=0.3), normal(16, D), decay="scalar")
def projected_in_the_loop(x: Array, wq: Array, wk: Array, wv: Array, wo: Array) -> Array:
    """Projections stand in the loop, before and after the state."""

    def step(state: Array, x: Array) -> Any:
        q, k, v = x @ wq, x @ wk, x @ wv
        state = 0.9 * state + k[:, :, None] * v[:, None, :]
        return state, nn.silu(jnp.einsum("bn,bnp->bp", q, state)) @ wo

    return lax.scan(step, zeros(B, 16, 16), x)[1]


# ---------------------------------------------------------------------- matrix states, a decay for each row


@found(q, k, v, normal(T, B, H, N), normal(T, B, H, P), decay="channel")
def gated(q: Array, k: Array, v: Array, gate: Array, gate_out: Array) -> Array:
    """GLA, with norm and gate behind."""

    def step(state: Array, own: Any) -> Any:
        q, k, v, gate, gate_out = own
        state = (nn.sigmoid(gate) ** (1 / 16))[..., None] * state + k[..., None] * v[..., None, :]
        y = jnp.einsum("bhn,bhnp->bhp", q * q.shape[-1] ** -0.5, state)
        return state, y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6) * nn.silu(gate_out)

    shape = (*k.shape[1:], v.shape[-1])
    return lax.scan(step, zeros(*shape), (q, k, v, gate, gate_out))[1]


@found(q, k, v, normal(T, B, H, N), normal(H, N), decay="channel")
def receptance(r: Array, k: Array, v: Array, w: Array, bonus: Array) -> Array:
    """RWKV-6: y reads the state before the step, and the step's own product with a bonus."""

    def step(state: Array, own: Any) -> Any:
        r, k, v, w = own
        both = k[..., :, None] * v[..., None, :]
        y = jnp.einsum("bhn,bhnp->bhp", r, state + bonus[:, :, None] * both)
        return jnp.exp(-jnp.exp(w))[..., None] * state + both, y

    shape = (*k.shape[1:], v.shape[-1])
    return lax.scan(step, zeros(*shape), (r, k, v, w))[1]


@found(q, k, v, normal(N), decay="channel")
def constant_channels(q: Array, k: Array, v: Array, w: Array) -> Array:
    """Each row has a decay that is the same in all steps, and 1 - decay weights what is added."""
    decay = nn.sigmoid(w)

    def step(state: Array, own: Any) -> Any:
        q, k, v = own
        state = decay[:, None] * state + ((1 - decay) * k)[..., None] * v[..., None, :]
        return state, (q[..., None, :] @ state)[..., 0, :]

    return lax.scan(step, zeros(B, H, N, P), (q, k, v))[1]


# ---------------------------------------------------------------------- products of columns and rows


@found(q, k, v, jnp.linspace(0.9, 0.99, H), decay="scalar")
def retention_by_matrices(q: Array, k: Array, v: Array, decay: Array) -> Array:
    """A column times a row is an outer product, and a row times the state a readout."""

    def step(state: Array, own: Any) -> Any:
        q, k, v = own
        state = decay[:, None, None] * state + k[..., None] @ v[..., None, :]
        return state, (q[..., None, :] @ state)[..., 0, :]

    return lax.scan(step, zeros(B, H, N, P), (q, k, v))[1]


@found(q, k, v, normal(T, B, H, N), normal(H, N), decay="channel")
def receptance_by_matrices(r: Array, k: Array, v: Array, w: Array, bonus: Array) -> Array:
    """RWKV-6 as its authors write it."""

    def step(state: Array, own: Any) -> Any:
        r, k, v, w = own
        both = k[..., :, None] @ v[..., None, :]
        y = r[..., None, :] @ (bonus[:, :, None] * both + state)
        return both + jnp.exp(-jnp.exp(w))[..., None] * state, y[..., 0, :]

    return lax.scan(step, zeros(B, H, N, P), (r, k, v, w))[1]


@found(*(a.reshape(T, B, -1) for a in (q, k, v, normal(T, B, H, N))), normal(H, N), normal(H * P), decay="channel")
def receptance_normalised_in_the_step(r: Array, k: Array, v: Array, w: Array, bonus: Array, gain: Array) -> Array:
    """Heads are split in the step, where what is read of each is normalised: its mean is affine in the state too."""

    def step(state: Array, own: Any) -> Any:
        r, k, v, w = (x.reshape(B, H, -1) for x in own)
        both = k[..., :, None] * v[..., None, :]
        y = jnp.einsum("bhn,bhnp->bhp", r, state + bonus[:, :, None] * both)
        y = (y - y.mean(-1, keepdims=True)) / jnp.sqrt(y.var(-1, keepdims=True) + 1e-3)
        return jnp.exp(-jnp.exp(w))[..., None] * state + both, y.reshape(B, -1) * gain

    return lax.scan(step, zeros(B, H, N, P), (r, k, v, w))[1]


# ---------------------------------------------------------------------- delta rules

unit = k / jnp.linalg.norm(k, axis=-1, keepdims=True)


@found(q, unit, v, normal(T, B, H), decay="scalar")
def delta_rule(q: Array, k: Array, v: Array, beta: Array) -> Array:
    """DeltaNet: the value that a key had is replaced in part."""

    def step(state: Array, own: Any) -> Any:
        q, k, v, beta = own
        error = v - jnp.einsum("bhn,bhnp->bhp", k, state)
        state = state + (nn.sigmoid(beta)[..., None] * k)[..., None] * error[..., None, :]
        return state, jnp.einsum("bhn,bhnp->bhp", q, state)

    return lax.scan(step, zeros(B, H, N, P), (q, k, v, beta))[1]


@found(q, unit, v, normal(T, B, H), decay="scalar")
def fast_weights(q: Array, k: Array, v: Array, beta: Array) -> Array:
    """The same in four terms: the old value is removed, a mean of the old and the new one is written."""

    def step(state: Array, own: Any) -> Any:
        q, k, v, beta = own
        beta = nn.sigmoid(beta)[..., None]
        old = jnp.einsum("bhn,bhnp->bhp", k, state)
        new = beta * v + (1 - beta) * old
        state = state - k[..., None] * old[..., None, :] + k[..., None] * new[..., None, :]
        return state, jnp.einsum("bhn,bhnp->bhp", q, state)

    return lax.scan(step, zeros(B, H, N, P), (q, k, v, beta))[1]


@found(q, unit, v, normal(T, B, H), normal(T, B, H), normal(B, H, N, P), decay="scalar")
def gated_delta_rule(q: Array, k: Array, v: Array, beta: Array, gate: Array, state: Array) -> Array:
    """Gated delta net, as libraries write it step by step: the state decays before it is read."""

    def step(state: Array, own: Any) -> Any:
        q, k, v, beta, gate = own
        state = state * jnp.exp(-nn.softplus(gate))[..., None, None]
        read = (state * k[..., None]).sum(-2)
        change = (v - read) * nn.sigmoid(beta)[..., None]
        state = state + k[..., None] * change[..., None, :]
        return state, (state * q[..., None]).sum(-2)

    return lax.scan(step, state, (q, k, v, beta, gate))[1]


@found(q[..., :3], unit[..., :3], v[..., :2], normal(T, B, H), normal(T, B, H), decay="scalar")
def gated_delta_rule_of_a_small_state(q: Array, k: Array, v: Array, beta: Array, gate: Array) -> Array:
    """Three rows and two columns: a smaller state is the same recurrence."""

    def step(state: Array, own: Any) -> Any:
        q, k, v, beta, gate = own
        state = state * nn.sigmoid(gate)[..., None, None]
        change = (v - jnp.einsum("bhn,bhnp->bhp", k, state)) * nn.sigmoid(beta)[..., None]
        return (state := state + k[..., None] * change[..., None, :]), jnp.einsum("bhn,bhnp->bhp", q, state)

    return lax.scan(step, zeros(B, H, 3, 2), (q, k, v, beta, gate))[1]


@found(q, normal(T, B, H, N), k, v, unit, normal(T, B, H, N), decay="channel")
def generalised_delta_rule_by_matrices(r: Array, w: Array, k: Array, v: Array, removed: Array, rate: Array) -> Array:
    """RWKV-7 as its authors write it."""

    def step(state: Array, own: Any) -> Any:
        r, w, k, v, removed, rate = own
        read = state @ -removed[..., None]
        state = state * jnp.exp(-jnp.exp(w))[..., None, :] + read @ (removed * nn.sigmoid(rate))[..., None, :]
        state = state + v[..., None] @ k[..., None, :]
        return state, (state @ r[..., None])[..., 0]

    return lax.scan(step, zeros(B, H, P, N), (r, w, k, v, removed, rate))[1]


@found(q, unit, v, normal(T, B, H), normal(T, B, H, N), decay="channel")
def gated_delta_rule_by_channel(q: Array, k: Array, v: Array, beta: Array, gate: Array) -> Array:
    """Kimi's delta attention: each row has a decay of its own."""

    def step(state: Array, own: Any) -> Any:
        q, k, v, beta, gate = own
        state = state * nn.sigmoid(gate)[..., None]
        change = nn.sigmoid(beta)[..., None] * (v - jnp.einsum("bhn,bhnp->bhp", k, state))
        state = state + jnp.einsum("bhn,bhp->bhnp", k, change)
        return state, jnp.einsum("bhn,bhnp->bhp", q, state)

    return lax.scan(step, zeros(B, H, N, P), (q, k, v, beta, gate))[1]


@found(q, normal(T, B, H, N), k, v, unit, normal(T, B, H, N), decay="channel")
def generalised_delta_rule(r: Array, w: Array, k: Array, v: Array, removed: Array, rate: Array) -> Array:
    """RWKV-7: read and written along rows of their own; the state is the transpose."""

    def step(state: Array, own: Any) -> Any:
        r, w, k, v, removed, rate = own
        read = jnp.einsum("bhpn,bhn->bhp", state, -removed)
        state = (
            state * jnp.exp(-jnp.exp(w))[..., None, :] + read[..., None] * (removed * nn.sigmoid(rate))[..., None, :]
        )
        state = state + v[..., None] * k[..., None, :]
        return state, jnp.einsum("bhpn,bhn->bhp", state, r)

    return lax.scan(step, zeros(B, H, P, N), (r, w, k, v, removed, rate))[1]


@found(q, unit, v, normal(T, B, H), normal(T, B, H) > -0.5, decay="scalar")
def delta_rule_of_valid_steps(q: Array, k: Array, v: Array, beta: Array, valid: Array) -> Array:
    """Padded steps leave the state as it is."""

    def step(state: Array, own: Any) -> Any:
        q, k, v, beta, valid = own
        after = 0.95 * state
        change = nn.sigmoid(beta)[..., None] * (v - jnp.einsum("bhn,bhnp->bhp", k, after))
        state = jnp.where(valid[..., None, None], after + k[..., None] * change[..., None, :], state)
        return state, jnp.einsum("bhn,bhnp->bhp", q, state)

    return lax.scan(step, zeros(B, H, N, P), (q, k, v, beta, valid))[1]


@found(q, unit, v, normal(T, B, H) > 1, decay="scalar")
def delta_rule_with_resets(q: Array, k: Array, v: Array, begins: Array) -> Array:
    """Documents in one sequence, from the last step to the first; the error itself is stacked."""

    def step(state: Array, own: Any) -> Any:
        q, k, v, begins = own
        state = jnp.where(begins[..., None, None], 0.0, state)
        error = v - jnp.einsum("bhn,bhnp->bhp", k, state)
        return state + 0.5 * k[..., None] * error[..., None, :], error * jnp.sum(q, -1, keepdims=True)

    return lax.scan(step, zeros(B, H, N, P), (q, k, v, begins), reverse=True)[1]


@found(q[:, :, 0], unit[:, :, 0], v, normal(T, B, H), decay="scalar")
def delta_rule_of_shared_keys(q: Array, k: Array, v: Array, beta: Array) -> Array:
    """All heads of a sequence have one key and one query."""

    def step(state: Array, own: Any) -> Any:
        q, k, v, beta = own
        change = nn.sigmoid(beta)[..., None] * (v - jnp.einsum("bn,bhnp->bhp", k, state))
        state = state + k[:, None, :, None] * change[..., None, :]
        return state, jnp.einsum("bn,bhnp->bhp", q, state)

    return lax.scan(step, zeros(B, H, N, P), (q, k, v, beta))[1]


@found(q, unit, v, normal(T, B, H), decay="scalar")
def delta_rule_normalised(q: Array, k: Array, v: Array, beta: Array) -> Array:
    """A second state normalises, which has no delta rule."""

    def step(states: Any, own: Any) -> Any:
        state, total = states
        q, k, v, beta = own
        state, total = 0.9 * state, 0.9 * total + k
        change = nn.sigmoid(beta)[..., None] * (v - jnp.einsum("bhn,bhnp->bhp", k, state))
        state = state + k[..., None] * change[..., None, :]
        y = jnp.einsum("bhn,bhnp->bhp", q, state) / (1 + jnp.abs(jnp.einsum("bhn,bhn->bh", q, total)))[..., None]
        return (state, total), y

    return lax.scan(step, (zeros(B, H, N, P), zeros(B, H, N)), (q, k, v, beta))[1]


@found(q, k, v, decay="scalar")
def centred_rows(q: Array, k: Array, v: Array) -> Array:
    """The mean over the rows is taken off in each step: a delta rule whose rows are all ones."""

    def step(state: Array, own: Any) -> Any:
        q, k, v = own
        state = 0.9 * (state - state.mean(-2, keepdims=True)) + k[..., None] * v[..., None, :]
        return state, jnp.einsum("bhn,bhnp->bhp", q, state)

    return lax.scan(step, zeros(B, H, N, P), (q, k, v))[1]


@found(q, unit, normal(B, H, N, P), normal(T, B, H), decay="scalar")
def forgotten_by_key(q: Array, k: Array, state: Array, beta: Array) -> Array:
    """Nothing is added: each step forgets in part what its key reads."""

    def step(state: Array, own: Any) -> Any:
        q, k, beta = own
        read = jnp.einsum("bhn,bhnp->bhp", k, state)
        state = 0.99 * state - nn.sigmoid(beta)[..., None, None] * k[..., None] * read[..., None, :]
        return state, jnp.einsum("bhn,bhnp->bhp", q, state)

    return lax.scan(step, state, (q, k, beta))[1]


# ---------------------------------------------------------------------- vectors, with products to take out


@found(x, normal(D, D), normal(D, D), decay="elementwise")
def min_gru(x: Array, wz: Array, wh: Array) -> Array:
    def step(h: Array, x: Array) -> Any:
        z = nn.sigmoid(x @ wz)
        h = (1 - z) * h + z * (x @ wh)
        return h, h

    return lax.scan(step, zeros(B, D), x)[1]


@found(x, normal(D, D), normal(D, D), normal(D, D), decay="elementwise")
def min_lstm(x: Array, wf: Array, wi: Array, wh: Array) -> Array:
    def step(h: Array, x: Array) -> Any:
        f, i = nn.sigmoid(x @ wf), nn.sigmoid(x @ wi)
        h = f / (f + i) * h + i / (f + i) * (x @ wh)
        return h, h

    return lax.scan(step, zeros(B, D), x)[1]


@found(normal(T, D), normal(D, D, scale=0.5), normal(D, D, scale=0.5), normal(D), decay="elementwise")
def diagonal_state_space(u: Array, wb: Array, wc: Array, nu: Array) -> Array:
    """S5 with real numbers: products with two matrices, one before and one behind the state."""
    decay = jnp.exp(-jnp.exp(nu))

    def step(h: Array, u: Array) -> Any:
        h = decay * h + wb @ u
        return h, wc @ h

    return lax.scan(step, zeros(D), u)[1]


@found(x, normal(D, D), normal(D), decay="elementwise")
def token_shift(x: Array, wk: Array, w: Array) -> Array:
    """The step before is carried along."""

    def step(carried: Any, x: Array) -> Any:
        before, h = carried
        h = nn.sigmoid(w) * h + (0.5 * x + 0.5 * before) @ wk
        return (x, h), jnp.tanh(h)

    return lax.scan(step, (zeros(B, D), zeros(B, D)), x)[1]


@found(q, v, normal(T, B, H, N), decay="channel")
def tied_gates(q: Array, v: Array, gate: Array) -> Array:
    """HGRN2: what a row forgets is what it takes in."""

    def step(state: Array, own: Any) -> Any:
        q, v, gate = own
        kept = 0.5 + 0.5 * nn.sigmoid(gate)
        state = kept[..., None] * state + (1 - kept)[..., None] * v[..., None, :]
        return state, jnp.einsum("bhn,bhnp->bhp", q, state)

    return lax.scan(step, zeros(B, H, N, P), (q, v, gate))[1]


@found(q, k, v, normal(T, B, H), decay="scalar")
def towards_what_is_written(q: Array, k: Array, v: Array, gate: Array) -> Array:
    """The state moves towards what is written, read at once and unrolled."""

    def step(state: Array, own: Any) -> Any:
        q, k, v, gate = own
        state = state + 0.3 * nn.sigmoid(gate)[..., None, None] * (jnp.einsum("bhn,bhp->bhnp", k, v) - state)
        return state, jnp.sum(q[..., None] * state, -2)

    return lax.scan(step, zeros(B, H, N, P), (q, k, v, gate), unroll=4)[1]


@found(q, k, v, normal(H), decay="scalar")
def moving_average(q: Array, k: Array, v: Array, rate: Array) -> Array:
    """What is trained enters as itself and as what is left of one, of which both are computed before the loop."""
    kept = nn.sigmoid(rate)[:, None, None]

    def step(state: Array, own: Any) -> Any:
        q, k, v = own
        state = kept * state + (1 - kept) * k[..., None] * v[..., None, :]
        return state, jnp.einsum("bhn,bhnp->bhp", q, state)

    return lax.scan(step, zeros(B, H, N, P), (q, k, v))[1]


@found(normal(T, B, H * N), normal(4, H * N), q, v, normal(T, B, H), decay="scalar")
def convolved_in_the_step(x: Array, taps: Array, q: Array, v: Array, dt: Array) -> Array:
    """Mamba-2 as it decodes: the last steps' inputs are carried in a buffer, of which a convolution makes the keys."""

    def step(carried: Any, own: Any) -> Any:
        buffer, state = carried
        x, q, v, dt = own
        buffer = jnp.roll(buffer, -1, 0).at[-1].set(x)
        k = nn.silu(jnp.sum(buffer * taps[:, None], 0)).reshape(B, H, N)
        state = jnp.exp(-nn.softplus(dt))[..., None, None] * state + k[..., None] * v[..., None, :]
        return (buffer, state), jnp.einsum("bhn,bhnp->bhp", q, state)

    return lax.scan(step, (zeros(4, B, H * N), zeros(B, H, N, P)), (x, q, v, dt))[1]


@found(q, k, v, decay="scalar")
def until_a_length(q: Array, k: Array, v: Array) -> Array:
    """Sequences of several lengths: the state stays where one has ended, as in loops of recurrent layers."""
    lengths = jnp.array([T, T - 9])

    def step(state: Array, own: Any) -> Any:
        q, k, v, t = own
        after = 0.95 * state + k[..., None] * v[..., None, :]
        state = jnp.where((t < lengths)[:, None, None, None], after, state)
        return state, jnp.einsum("bhn,bhnp->bhp", q, state)

    return lax.scan(step, zeros(B, H, N, P), (q, k, v, jnp.arange(T)))[1]


@found(normal(T, N, scale=0.3), normal(T, N, scale=0.3), normal(T, P), decay="scalar")
def least_squares(q: Array, k: Array, v: Array) -> Array:
    """A layer that solves for the values by the keys so far: the inverse of a matrix is carried beside the sum."""

    def step(carried: Any, own: Any) -> Any:
        inverse, state = carried
        q, k, v = own
        read = inverse @ k
        inverse = inverse - jnp.outer(read, read) / (1 + k @ read)
        state = state + jnp.outer(k, v)
        return (inverse, state), q @ inverse @ state

    return lax.scan(step, (jnp.eye(N), zeros(N, P)), (q, k, v))[1]
