"""Computes causal linear attention with decays in plain JAX, chunk by chunk, forward and backward.

Every factor is the exponential of a sum of logarithms of decays over a segment of steps: between two steps of a chunk,
from before a chunk to a step of it, from a step to the chunk's end, and over the whole chunk.  All of these are factors
of pairs of steps that the program sees too, so that what overflows here overflows there; products of decays are never
divided by others.  Of the states only those at the beginnings of chunks are kept for the backward.

Letters: B sequences, T steps, C steps of a chunk, N features, P columns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from autopallas.kernels.linear_attention.operation import LinearAttentionSpec, seen

__all__ = ["Gradients", "gradients", "summed"]

Array: TypeAlias = jax.Array
_einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)

_LEAST = -1e30
"""Logarithm of a decay of which nothing is left: sums of it stay finite."""
_SMALLEST = 1e-30
"""What stands for smaller decays of which powers are taken."""


class _Logs(NamedTuple):
    """Logarithms of the factors of one chunk.

    Attributes:
      between: [B, C, C], from step s to step t.
      until: [B, C], from before the chunk to each step.
      after: [B, C], from each step to the end of the chunk.
      whole: [B], of all steps of the chunk.
    """

    between: Array
    until: Array
    after: Array
    whole: Array


class _Steps(NamedTuple):
    """Queries, keys and values of a chunk, and what its decays are computed from; or those of all chunks, stacked."""

    query: Array
    key: Array
    value: Array
    decay: tuple[Array, Array]


class Gradients(NamedTuple):
    """The cotangents of the operands; that of the decay is None where it is not wanted."""

    query: Array
    key: Array
    value: Array
    decay: Array | None


def summed(spec: LinearAttentionSpec, chunk: int, query: Array, key: Array, value: Array, decay: Array | None) -> Array:
    """Returns the sums [B, T, P] of values [B, T, P], each times its score.

    Args:
      spec: the site.
      chunk: the number of steps of a chunk.
      query, key, value: of all sequences and steps, in the dtype in which they are summed.
      decay: [B|1, T|1], as the site has it, in that dtype; None where it is a number.
    """
    steps, _ = _chunks(spec, chunk, query, key, value, decay)

    def one(state: Array, own: _Steps) -> tuple[Array, Array]:
        logs = _logs(spec, *own.decay)
        weights = _einsum("btn,bsn->bts", own.query, own.key) * _seen(spec, logs)
        found = _einsum("bts,bsp->btp", weights, own.value)
        found += _einsum("btn,bnp->btp", own.query * jnp.exp(logs.until)[..., None], state)
        return _advanced(logs, state, own), found

    _, found = lax.scan(one, _first(query, value), steps)
    return _whole(spec, found)


def gradients(
    spec: LinearAttentionSpec,
    chunk: int,
    query: Array,
    key: Array,
    value: Array,
    decay: Array | None,
    cotangent: Array,
    with_decay: bool,
) -> Gradients:
    """Returns the cotangents of the arguments of :func:`summed`, from that of its result; that of the decay if it is
    wanted, ``with_decay``."""
    steps, pull = _chunks(spec, chunk, query, key, value, decay)
    dy = _split(spec, chunk, cotangent)

    def enter(state: Array, own: _Steps) -> tuple[Array, Array]:
        return _advanced(_logs(spec, *own.decay), state, own), state

    _, states = lax.scan(enter, _first(query, value), steps)

    def one(dstate: Array, given: tuple[_Steps, Array, Array]) -> tuple[Array, _Steps]:
        own, state, dy = given
        q, k, v = own[:3]
        logs, of_logs = jax.vjp(functools.partial(_logs, spec), *own.decay)
        factors = _seen(spec, logs)
        until, after = jnp.exp(logs.until)[..., None], jnp.exp(logs.after)[..., None]
        whole = jnp.exp(logs.whole)
        weights = _einsum("btn,bsn->bts", q, k) * factors
        dweights = _einsum("btp,bsp->bts", dy, v)
        dscores = dweights * factors
        into = until * _einsum("btp,bnp->btn", dy, state)
        out = after * _einsum("bsp,bnp->bsn", v, dstate)
        dquery = _einsum("bts,bsn->btn", dscores, k) + into
        dkey = _einsum("bts,btn->bsn", dscores, q) + out
        dvalue = _einsum("bts,btp->bsp", weights, dy) + _einsum("bsn,bnp->bsp", k * after, dstate)
        ddecay = own.decay
        if with_decay:
            between = jnp.where(seen(q.shape[1], False, True), dweights * weights, 0)  # a step's own factor is always 1
            of_states = whole * jnp.sum(state * dstate, (-2, -1))
            ddecay = of_logs(_Logs(between, jnp.sum(q * into, -1), jnp.sum(k * out, -1), of_states))
        before = whole[:, None, None] * dstate + _einsum("btn,btp->bnp", q * until, dy)
        return before, _Steps(dquery, dkey, dvalue, ddecay)

    _, found = lax.scan(one, jnp.zeros_like(states[0]), (steps, states, dy), reverse=True)
    given = Gradients(*pull(found))
    return given if with_decay else given._replace(decay=None)


def _first(query: Array, value: Array) -> Array:
    return jnp.zeros((query.shape[0], query.shape[2], value.shape[2]), query.dtype)


def _advanced(logs: _Logs, state: Array, own: _Steps) -> Array:
    """Returns the state after a chunk."""
    added = _einsum("bsn,bsp->bnp", own.key * jnp.exp(logs.after)[..., None], own.value)
    return jnp.exp(logs.whole)[:, None, None] * state + added


def _seen(spec: LinearAttentionSpec, logs: _Logs) -> Array:
    """Returns the factors between the steps of a chunk; 0 where a step does not see another."""
    return jnp.exp(jnp.where(seen(logs.until.shape[1], False, spec.strict), logs.between, -jnp.inf))


def _logs(spec: LinearAttentionSpec, decay: Array, before: Array) -> _Logs:
    """Returns the logarithms of a chunk's factors, whose derivatives by a reference that cancels are left out.

    Args:
      spec: the site.
      decay: [B, C], the logarithms of the steps' decays, or their sums until each step; all the same where these are.
      before: [B], the sum before the chunk, where those are sums.
    """
    size, dtype = decay.shape[1], decay.dtype
    t, s = (lax.broadcasted_iota(dtype, (size, size), axis) for axis in (0, 1))
    if spec.decay_form == "steps":
        later = (t > s).astype(dtype)  # [r, s]: step r is after s
        between = _einsum("tr,brs->bts", (t >= s).astype(dtype), decay[:, :, None] * later)
        return _Logs(between, jnp.cumsum(decay, 1), _einsum("br,rs->bs", decay, later), jnp.sum(decay, 1))
    if spec.decay_form == "sums":
        last = lax.stop_gradient(decay[:, -1:])
        between = decay[:, :, None] - decay[:, None, :]
        return _Logs(between, decay - before[:, None], last - decay, last[:, 0] - before)
    one, most = decay[:, :1], spec.steps - 1  # no pair is further apart: beyond, what grows may be infinite
    until = one * jnp.minimum(t[:, 0] + 1, most)
    return _Logs(one[..., None] * (t - s), until, one * (size - 1 - t[:, 0]), one[:, 0] * min(size, most))


# ---------------------------------------------------------------------- from the site's arrays to chunks, and back


def _chunks(
    spec: LinearAttentionSpec, chunk: int, query: Array, key: Array, value: Array, decay: Array | None
) -> tuple[_Steps, Callable[[_Steps], tuple[Array, Array, Array, Array | None]]]:
    """Returns the chunks, and what gives the cotangents of the arguments from those of the chunks."""

    def split(q: Array, k: Array, decay: Array | None) -> tuple[Array, Array, tuple[Array, Array]]:
        signs = _signs(spec, decay)
        if signs is not None:
            q, k = q * signs, k * signs
        logs = _logarithms(spec, decay, query)
        found = _split(spec, chunk, logs, repeated=spec.decay_form == "sums")
        # The first chunk begins with a state of zeros: nothing is read of the sum before it.
        before = lax.stop_gradient(jnp.concatenate([found[:1, :, 0], found[:-1, :, -1]]))
        return _split(spec, chunk, q * spec.factor), _split(spec, chunk, k), (found, before)

    (q, k, logs), pull = jax.vjp(split, query, key, decay)
    v, of_value = jax.vjp(functools.partial(_split, spec, chunk), value)

    def pulled(found: _Steps) -> tuple[Array, Array, Array, Array | None]:
        dquery, dkey, ddecay = pull((found.query, found.key, found.decay))
        return dquery, dkey, *of_value(found.value), ddecay

    return _Steps(q, k, v, logs), pulled


def _logarithms(spec: LinearAttentionSpec, decay: Array | None, like: Array) -> Array:
    """Returns the logarithms of the steps' decays, or their sums, [B, T], in the order in which states are computed."""
    shape = like.shape[:2]
    if decay is None:
        return jnp.full(shape, spec.rate, like.dtype)
    if spec.decay_form == "powers":  # of nothing the first power has a derivative
        decay += lax.stop_gradient(jnp.where(jnp.abs(decay) < _SMALLEST, _SMALLEST - decay, 0))
    if spec.decay_form in ("powers", "captured"):
        decay = jnp.log(jnp.abs(decay))
    logs = jnp.broadcast_to(spec.rate * decay, shape)
    if spec.decay_form == "steps":  # between two steps are those after the first one, up to the last
        logs = jnp.maximum(logs, _LEAST)
        logs = jnp.concatenate([jnp.zeros_like(logs[:, :1]), logs[:, 1:]], 1)
        return jnp.roll(logs, -1, 1) if spec.reverse else logs
    return -logs if spec.decay_form == "sums" and spec.reverse else logs


def _signs(spec: LinearAttentionSpec, decay: Array | None) -> Array | None:
    """Returns the signs of the powers of decays at each step, [B|1, T, 1]; None where these have none."""
    if spec.decay_form != "powers" or decay is None:
        return None
    odd = jnp.arange(spec.steps) % 2 == 1
    return jnp.where((decay < 0) & odd, -1.0, 1.0).astype(decay.dtype)[..., None]


def _split(spec: LinearAttentionSpec, chunk: int, x: Array, repeated: bool = False) -> Array:
    """Returns [T / C, B, C, ...] of [B, T, ...], the steps in the order in which states are computed.

    Steps that are missing in the last chunk stand behind the others: zeros, or the last step, ``repeated``.
    """
    x = jnp.flip(x, 1) if spec.reverse else x
    if missing := -x.shape[1] % chunk:
        x = jnp.pad(x, ((0, 0), (0, missing), *((0, 0) for _ in x.shape[2:])), mode="edge" if repeated else "constant")
    return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)


def _whole(spec: LinearAttentionSpec, found: Array) -> Array:
    """Returns [B, T, P] of chunks [T / C, B, C, P]."""
    x = jnp.moveaxis(found, 0, 1).reshape(found.shape[1], -1, found.shape[3])[:, : spec.steps]
    return jnp.flip(x, 1) if spec.reverse else x
