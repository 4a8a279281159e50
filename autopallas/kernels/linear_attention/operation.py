"""Declares the operation of causal linear attention (Katharopoulos et al., 2020, arXiv:2006.16236)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from autopallas.sites.block_sizes import block_sizes_class
from autopallas.sites.declared import DeclaredOperation
from autopallas.sites.spec import Dtype, Sizes, Spec

__all__ = ["OPERATION", "DecayForm", "LinearAttentionSpec", "Spelling", "divisor", "reference", "scaled", "seen"]

Spelling: TypeAlias = Literal["scores", "states"]
"""What a program stores for all steps: the scores of all pairs of steps, or the sums of outer products."""

DecayForm: TypeAlias = Literal["number", "rates", "powers", "captured", "steps", "sums"]
"""What the decay from step s to a later step t is: ``exp(rate * (t - s))``; that with ``decay`` as a further factor, or
``decay ** (rate * (t - s))``, captured or not; or ``exp(rate * sum)``, with the sum of ``log_decays[r]`` for s < r <= t
or with ``log_decays[t] - log_decays[s]``."""


@dataclass(frozen=True)
class LinearAttentionSpec(Spec):
    """Sums over the steps s up to each step t: ``y[t] = sum of score[t, s] * value[s]``.

    ``score[t, s]`` is ``factor * (query[t] . key[s])``, times the decay between both steps, and where normalised over
    ``epsilon`` plus the sum of these, or its magnitude; that is ``least`` at least, where given.
    Operands: query, key [B|1, T|1, N]; value [B|1, T|1, P]; decay [B|1] or log_decays [B|1, T|1] or none; query_factor
    and key_factor [B|1, T|1], by which queries and keys are multiplied, or none; floating.
    Of a captured array that tells masks, positions or a number, captured [B|1] is one element, of any dtype.
    """

    batch: int
    steps: int
    features: int
    columns: int
    query_dtype: Dtype
    key_dtype: Dtype
    value_dtype: Dtype
    result_dtype: Dtype
    factor: float = 1.0
    """A number by which scores are multiplied."""
    reverse: bool = False
    """Whether s is each step from t on."""
    strict: bool = False
    """Whether t itself is left out."""
    normalised: bool = False
    """Whether the sums are divided by those of the scores."""
    epsilon: float = 0.0
    """A number that is added to the sums of the scores."""
    magnitudes: bool = False
    """Whether sums are divided by the magnitudes of those of the scores, as in the matrix LSTM (arXiv:2405.04517)."""
    least: float | None = None
    """The least number by which sums are divided."""
    spelling: Spelling = "scores"
    """What the original stores: "scores" of all pairs of steps, or "states", sums of outer products, for all steps."""
    decay_dtype: Dtype | None = None
    log_decays_dtype: Dtype | None = None
    captured_dtype: Dtype | None = None
    query_factor_dtype: Dtype | None = None
    key_factor_dtype: Dtype | None = None
    divided: tuple[str, ...] = ()
    """Which of "query" and "key" are divided by their factors."""
    decay_form: DecayForm | None = None
    """How scores decay, if they do: by a "number", the rate; by a decay for all steps; or by logarithms."""
    rate: float = 1.0
    """A number by which the logarithms of decays are multiplied."""
    shared: bool = False
    """Whether sequences with decays of their own have the same queries and keys, whose products an original shares."""

    def assumptions(self) -> tuple[str, ...]:
        times = ", also times factors of their steps" if self.query_factor_dtype or self.key_factor_dtype else ""
        stated = f"queries, keys and values are finite{times}, and so are sums of their products (assume_finite)"
        decays = "decays are finite, also between steps that the mask hides (assume_finite)"
        return (stated,) if self.decay_form is None else (stated, decays)

    def __str__(self) -> str:
        told = {"from the last step": self.reverse, "without the own step": self.strict, "normalised": self.normalised}
        told[f"decays by {self.decay_form}"] = self.decay_form is not None
        told["factors of steps"] = bool(self.query_factor_dtype or self.key_factor_dtype)
        order = ", ".join([self.spelling, *(words for words, holds in told.items() if holds)])
        sizes = f"B={self.batch} T={self.steps} N={self.features} P={self.columns}"
        return f"linear_attention {sizes} {self.query_dtype}, by {order}"


def seen(count: int, reverse: bool, strict: bool) -> jax.Array:
    """Returns which of ``count`` steps each of them sums over, [count, count]."""
    t, s = (lax.broadcasted_iota(jnp.int32, (count, count), axis) for axis in ((1, 0) if reverse else (0, 1)))
    return s < t if strict else s <= t


def scaled(spec: LinearAttentionSpec, name: str, x: jax.Array, by: jax.Array | None) -> jax.Array:
    """Returns queries or keys in the dtype in which they are summed, times the factors of their steps or over these."""
    x = x.astype(spec.accumulation_dtype)
    factors = 1 if by is None else by.astype(x.dtype)[..., None]
    return x / factors if name in spec.divided else x * factors


def divisor(spec: LinearAttentionSpec, total: jax.Array) -> jax.Array:
    """Returns what sums are divided by, of sums of scores."""
    total = jnp.abs(total + spec.epsilon) if spec.magnitudes else total + spec.epsilon
    return total if spec.least is None else jnp.maximum(total, spec.least)


def reference(
    spec: LinearAttentionSpec, query: jax.Array, key: jax.Array, value: jax.Array,
    decay: jax.Array | None = None, log_decays: jax.Array | None = None, captured: jax.Array | None = None,
    query_factor: jax.Array | None = None, key_factor: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """Computes the formula of :class:`LinearAttentionSpec` as ``spec.spelling`` says; the result is [B, T, P]."""
    own = scaled(spec, "query", query, query_factor), scaled(spec, "key", key, key_factor)
    wide = (*own, value.astype(spec.accumulation_dtype))
    q, k, v = (jnp.broadcast_to(x, (spec.batch, spec.steps, x.shape[-1])) for x in wide)
    high = lax.Precision.HIGHEST
    if spec.spelling == "scores" or spec.decay_form is not None:
        scores = spec.factor * jnp.einsum("btn,bsn->bts", q, k, precision=high)
        given = decay if log_decays is None else log_decays
        scores = scores if spec.decay_form is None else scores * _decays(spec, given)
        scores = jnp.where(seen(spec.steps, spec.reverse, spec.strict), scores, 0)
        found = jnp.einsum("bts,bsp->btp", scores, v, precision=high)
        total = jnp.sum(scores, -1, keepdims=True)
    else:
        states = _running(spec, k[..., :, None] * v[..., None, :])
        found = spec.factor * jnp.einsum("btn,btnp->btp", q, states, precision=high)
        total = spec.factor * jnp.sum(q * _running(spec, k), -1, keepdims=True)
    return (found / divisor(spec, total) if spec.normalised else found).astype(spec.result_dtype)


def _decays(spec: LinearAttentionSpec, given: jax.Array | None) -> jax.Array:
    """Returns the decays between all pairs of steps, [B|1, T, T]; 1 where a step does not see another."""
    t, s = (lax.broadcasted_iota(jnp.int32, (1, spec.steps, spec.steps), axis) for axis in (1, 2))
    later, earlier = (s, t) if spec.reverse else (t, s)
    distance = spec.rate * jnp.maximum(later - earlier, 0).astype(spec.accumulation_dtype)
    if given is None or given.ndim == 1:
        by = 1 if given is None else given.astype(distance.dtype)[:, None, None]
        return jnp.power(by, distance) if spec.decay_form in ("powers", "captured") else jnp.exp(by * distance)
    logs = jnp.broadcast_to(given.astype(distance.dtype), (given.shape[0], spec.steps))[:, :, None]
    logs = lax.cumsum(jnp.where(t > s, logs, 0), axis=1) if spec.decay_form == "steps" else logs - logs.mT
    logs = logs.mT if spec.reverse else logs
    return jnp.exp(jnp.where(later >= earlier, spec.rate * logs, 0))


def _running(spec: LinearAttentionSpec, added: jax.Array) -> jax.Array:
    """Returns the sums over the steps that each step sees."""
    found: jax.Array = lax.cumsum(added, axis=1, reverse=spec.reverse)
    return found - added if spec.strict else found


def _candidates(spec: Spec) -> tuple[Sizes, ...]:
    """Returns numbers of steps that are computed together."""
    assert isinstance(spec, LinearAttentionSpec)
    sizes = [size for size in (64, 128, 32, 256) if size < spec.steps]
    return tuple({"chunk": size} for size in sizes or [32])


_FLOAT32 = jnp.dtype(jnp.float32)
_SAMPLE = LinearAttentionSpec(8, 1024, 64, 64, _FLOAT32, _FLOAT32, _FLOAT32, _FLOAT32)
_VARIANTS = {"states": replace(_SAMPLE, spelling="states"), "normalised": replace(_SAMPLE, normalised=True)}
_VARIANTS |= {"number": replace(_SAMPLE, decay_form="number", rate=-0.1)}
_VARIANTS |= {"magnitudes": replace(_SAMPLE, normalised=True, magnitudes=True, least=1.0)}
_OPERANDS = {"query": "B T N", "key": "B T N", "value": "B T P", "decay": "B", "log_decays": "B T", "captured": "B"}
_OPERANDS |= {"query_factor": "B T", "key_factor": "B T"}

OPERATION = DeclaredOperation(
    "linear_attention",
    reference=reference,
    operands=_OPERANDS,
    result="B T P",
    sizes={"B": "batch", "T": "steps", "N": "features", "P": "columns"},
    rows="B",
    sample=_SAMPLE,
    variants=_VARIANTS
    | {form: replace(_SAMPLE, decay_form=form, decay_dtype=_FLOAT32) for form in ("rates", "powers")}
    | {form: replace(_SAMPLE, decay_form=form, log_decays_dtype=_FLOAT32) for form in ("steps", "sums")}
    | {"factors": replace(_SAMPLE, query_factor_dtype=_FLOAT32, key_factor_dtype=_FLOAT32, divided=("query",))},
    measured_sizes=tuple({"B": 8, "T": t, "N": n, "P": n} for t, n in ((512, 64), (2048, 64), (1024, 32))),
    block_sizes=block_sizes_class("linear_attention", {"chunk": 64}, _candidates),
)
