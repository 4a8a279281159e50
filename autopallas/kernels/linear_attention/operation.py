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

__all__ = ["OPERATION", "LinearAttentionSpec", "Spelling", "reference", "seen"]

Spelling: TypeAlias = Literal["scores", "states"]
"""What a program stores for all steps: the scores of all pairs of steps, or the sums of outer products."""


@dataclass(frozen=True)
class LinearAttentionSpec(Spec):
    """Sums over the steps s up to each step t: ``y[t] = sum of score[t, s] * value[s]``.

    ``score[t, s]`` is ``factor * (query[t] . key[s])``, where normalised over ``epsilon`` plus the sum of these.
    Operands: query, key [B|1, T|1, N]; value [B|1, T|1, P]; floating.
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
    spelling: Spelling = "scores"
    """What the original stores: "scores" of all pairs of steps, or "states", sums of outer products, for all steps."""

    def assumptions(self) -> tuple[str, ...]:
        return ("queries, keys and values are finite, and so are sums of their products (assume_finite)",)

    def __str__(self) -> str:
        order = ", from the last step" if self.reverse else ""
        order += ", without the own step" if self.strict else ""
        order += ", normalised" if self.normalised else ""
        sizes = f"B={self.batch} T={self.steps} N={self.features} P={self.columns}"
        return f"linear_attention {sizes} {self.query_dtype}, by {self.spelling}{order}"


def seen(count: int, reverse: bool, strict: bool) -> jax.Array:
    """Returns which of ``count`` steps each of them sums over, [count, count]."""
    t, s = (lax.broadcasted_iota(jnp.int32, (count, count), axis) for axis in (0, 1))
    t, s = (s, t) if reverse else (t, s)
    return s < t if strict else s <= t


def reference(spec: LinearAttentionSpec, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Computes the formula of :class:`LinearAttentionSpec` as ``spec.spelling`` says; the result is [B, T, P]."""
    dtype = spec.accumulation_dtype
    shape = spec.batch, spec.steps
    q, k, v = (jnp.broadcast_to(x.astype(dtype), (*shape, x.shape[-1])) for x in (query, key, value))
    high = lax.Precision.HIGHEST
    if spec.spelling == "scores":
        scores = jnp.einsum("btn,bsn->bts", q, k, precision=high)
        scores = jnp.where(seen(spec.steps, spec.reverse, spec.strict), spec.factor * scores, 0)
        found = jnp.einsum("bts,bsp->btp", scores, v, precision=high)
        total = jnp.sum(scores, -1, keepdims=True)
    else:
        states = _running(spec, k[..., :, None] * v[..., None, :])
        found = spec.factor * jnp.einsum("btn,btnp->btp", q, states, precision=high)
        total = spec.factor * jnp.sum(q * _running(spec, k), -1, keepdims=True)
    return (found / (total + spec.epsilon) if spec.normalised else found).astype(spec.result_dtype)


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

OPERATION = DeclaredOperation(
    "linear_attention",
    reference=reference,
    operands={"query": "B T N", "key": "B T N", "value": "B T P"},
    result="B T P",
    sizes={"B": "batch", "T": "steps", "N": "features", "P": "columns"},
    rows="B",
    sample=_SAMPLE,
    variants={"states": replace(_SAMPLE, spelling="states"), "normalised": replace(_SAMPLE, normalised=True)},
    measured_sizes=tuple(
        {"B": 8, "T": steps, "N": width, "P": width} for steps, width in ((512, 64), (2048, 64), (1024, 32))
    ),
    block_sizes=block_sizes_class("linear_attention", {"chunk": 64}, _candidates),
)
