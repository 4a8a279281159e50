"""Computes causal linear attention in plain JAX, chunk by chunk; with decays in ``xla_decays.py``.

Within a chunk of steps are scores, as in attention; what the chunks before it add is one matrix of N x P numbers for
each sequence.  So memory grows with T, and time with T times the chunk.  The gradients are three linear attentions:
that of the queries sees the steps that the result sees, and those of keys and values the steps that see them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from autopallas.kernels.linear_attention import xla_decays
from autopallas.kernels.linear_attention.operation import LinearAttentionSpec, divisor, scaled, seen
from autopallas.numerics.classes import Numerics
from autopallas.sites.device import Device
from autopallas.sites.index_notation import summed_to
from autopallas.sites.operation import Supported, Unsupported
from autopallas.sites.spec import BlockSizes, Sizes

__all__ = ["NUMERICS", "backward", "forward", "gains", "running_sizes", "supports"]

NUMERICS: Numerics = "tolerance"
"""How its results relate to the original's."""
_STEPS = 64
"""Steps of a chunk where no block sizes say otherwise."""
_SCALED = ("query", "key")
"""Operands that may have factors."""


def supports(spec: LinearAttentionSpec, device: Device) -> Supported | Unsupported:
    """Returns that every spec is supported."""
    return Supported()


def gains(spec: LinearAttentionSpec) -> tuple[str, ...]:
    """Returns what may be gained: nothing where a sequence is one chunk, whose scores are computed as written."""
    return ("time", "memory") if spec.steps > _STEPS else ()


def running_sizes(spec: LinearAttentionSpec, block_sizes: BlockSizes, device: Device) -> Sizes:
    """Returns the steps of a chunk, which are those of a sequence at most."""
    return {"chunk": _steps_of_chunk(spec, block_sizes)}


def _steps_of_chunk(spec: LinearAttentionSpec, block_sizes: BlockSizes | None) -> int:
    return min(_STEPS if block_sizes is None else int(block_sizes.to_dict()["chunk"]), spec.steps)


def forward(spec: LinearAttentionSpec, block_sizes: BlockSizes | None, operands: Mapping[str, jax.Array]) -> jax.Array:
    """Returns the result, [B, T, P]."""
    q, k, v = _wide(spec, operands)
    if not spec.normalised:
        return _sums(spec, block_sizes, operands, q, k, v).astype(spec.result_dtype)
    v, mean = _centred(v)
    return _divided(spec, _sums(spec, block_sizes, operands, q, k, v), mean).astype(spec.result_dtype)


def backward(
    spec: LinearAttentionSpec,
    block_sizes: BlockSizes | None,
    operands: Mapping[str, jax.Array],
    cotangent: jax.Array,
    wanted: frozenset[str],
) -> dict[str, jax.Array]:
    """Returns the cotangents of the operands named in ``wanted``."""
    q, k, v = _wide(spec, operands)
    dy = cotangent.astype(v.dtype)
    if spec.normalised:
        v, mean = _centred(v)
        sums = _sums(spec, block_sizes, operands, q, k, v)
        (dy,) = jax.vjp(lambda sums: _divided(spec, sums, mean), sums)[1](dy)
    found: dict[str, jax.Array] = {}
    if spec.decay_form is not None:
        decay = _decay(spec, operands)
        name = "log_decays" if "log_decays" in operands else "decay"
        given = xla_decays.gradients(spec, _steps_of_chunk(spec, block_sizes), q, k, v, decay, dy, name in wanted)
        found = {"query": given.query, "key": given.key, "value": given.value[..., : spec.columns]}
        if given.decay is not None:
            found[name] = given.decay.reshape(operands[name].shape)
    else:
        if not wanted.isdisjoint(("query", "query_factor")):
            found["query"] = _summed(spec, block_sizes, dy, v, k, spec.reverse)
        if not wanted.isdisjoint(("key", "key_factor")):
            found["key"] = _summed(spec, block_sizes, v, dy, q, not spec.reverse)
        if "value" in wanted:
            found["value"] = _summed(spec, block_sizes, k, q, dy[..., : spec.columns], not spec.reverse)
    for name in _SCALED:
        if name in found and f"{name}_factor" in operands:
            of_factor = functools.partial(_scaled, spec, name)
            _, pull = jax.vjp(of_factor, operands[name], operands[f"{name}_factor"])
            found[name], found[f"{name}_factor"] = pull(found[name])
    return {
        name: summed_to(x, operands[name].shape).astype(operands[name].dtype)
        for name, x in found.items()
        if name in wanted
    }


def _sums(
    spec: LinearAttentionSpec,
    block_sizes: BlockSizes | None,
    operands: Mapping[str, jax.Array],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
) -> jax.Array:
    """Returns the sums of values, each times its score, with or without decays."""
    if spec.decay_form is None:
        return _summed(spec, block_sizes, query, key, value, spec.reverse)
    return xla_decays.summed(spec, _steps_of_chunk(spec, block_sizes), query, key, value, _decay(spec, operands))


def _decay(spec: LinearAttentionSpec, operands: Mapping[str, jax.Array]) -> jax.Array | None:
    """Returns the operand from which decays are computed, [B|1, T|1]; None where there is none."""
    found = operands["log_decays"] if "log_decays" in operands else operands.get("decay")
    return None if found is None else found.astype(spec.accumulation_dtype).reshape(found.shape[0], -1)


def _wide(spec: LinearAttentionSpec, operands: Mapping[str, jax.Array]) -> list[jax.Array]:
    """Returns queries, keys and values of all sequences and steps, in the dtype in which they are summed."""
    q, k = (_scaled(spec, name, operands[name], operands.get(f"{name}_factor")) for name in _SCALED)
    v = operands["value"].astype(spec.accumulation_dtype)
    return [q, k, jnp.broadcast_to(v, (spec.batch, spec.steps, v.shape[-1]))]


def _scaled(spec: LinearAttentionSpec, name: str, x: jax.Array, by: jax.Array | None) -> jax.Array:
    """Returns queries or keys of all sequences and steps, times the factors of their steps."""
    return jnp.broadcast_to(scaled(spec, name, x, by), (spec.batch, spec.steps, x.shape[-1]))


def _centred(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns values without their mean, with a further column of ones, by which the scores are summed; and the mean.

    The gradients are those of differences between values and results: of what all have in common, sums over many
    steps would leave rounding errors.  Where values differ by more than half of their mean there is little of that, and
    the mean is 0 instead: it might be far larger than the values that an early step sees, and leave nothing of these.
    """
    mean = jnp.mean(values, 1, keepdims=True)
    farthest = jnp.max(jnp.abs(values - mean), 1, keepdims=True)
    mean = jnp.where(2 * farthest <= jnp.abs(mean), mean, 0)
    return jnp.concatenate([values - mean, jnp.ones_like(values[..., :1])], -1), mean


def _divided(spec: LinearAttentionSpec, sums: jax.Array, mean: jax.Array) -> jax.Array:
    """Returns the quotients of sums [B, T, P + 1] of values without their mean, with the mean."""
    rest, total = sums[..., :-1], sums[..., -1:]
    if spec.magnitudes or spec.least is not None:
        return (rest + mean * total) / divisor(spec, total)
    rest = rest - spec.epsilon * mean if spec.epsilon else rest
    return rest / divisor(spec, total) + mean


def _summed(
    spec: LinearAttentionSpec,
    block_sizes: BlockSizes | None,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    reverse: bool,
) -> jax.Array:
    """Returns ``factor * sum over s of (query[t] . key[s]) * value[s]``, [B, T, P], over the steps s until t, or from t
    on where ``reverse``."""
    steps = query.shape[1]
    chunk = _steps_of_chunk(spec, block_sizes)
    own = seen(chunk, reverse, spec.strict)

    def one(state: jax.Array, given: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v = given
        scores = jnp.where(own, _product("btn,bsn->bts", q, k), 0)
        found = _product("bts,bsp->btp", scores, v) + _product("btn,bnp->btp", q, state)
        return state + _product("bsn,bsp->bnp", k, v), found

    missing = -steps % chunk  # steps of zeros, behind the others, that add nothing
    given = tuple(_in_chunks(x, missing, chunk) for x in (query * spec.factor, key, value))
    first = jnp.zeros((query.shape[0], query.shape[2], value.shape[2]), query.dtype)
    _, found = lax.scan(one, first, given, reverse=reverse)
    return jnp.moveaxis(found, 0, 1).reshape(query.shape[0], steps + missing, -1)[:, :steps]


def _in_chunks(x: jax.Array, missing: int, chunk: int) -> jax.Array:
    """Returns [T / C, B, C, ...] of [B, T, ...]."""
    x = jnp.pad(x, ((0, 0), (0, missing), (0, 0))) if missing else x
    return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, x.shape[2]), 1, 0)


def _product(subscripts: str, first: jax.Array, second: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, first, second, precision=lax.Precision.HIGHEST)
