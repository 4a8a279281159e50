"""Attention: the spellings that are measured, and the cases.

Letters: B batch, T query and key length, N heads, D head size.  Arrays are [B, T, N, D].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopallas
from benchmarks import attention_oracle
from benchmarks.case import AUTOPALLAS, ORIGINAL, Candidate, Case, Chosen, Direction

ORACLE_LIMIT = 8 * 4096 * 4096
"""B * N * T * T up to which a float64 result is computed: some seconds of NumPy."""


def full(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Softmax attention as people write it; the other masks differ in one line."""
    scores = jnp.einsum("btnd,bsnd->bnts", query, key) / np.sqrt(query.shape[-1]).astype(query.dtype)
    return _weighted(scores, value)


def causal(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    scores = jnp.einsum("btnd,bsnd->bnts", query, key) / np.sqrt(query.shape[-1]).astype(query.dtype)
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return _weighted(jnp.where(mask, scores, -jnp.inf), value)


def padded(query: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array) -> jax.Array:
    scores = jnp.einsum("btnd,bsnd->bnts", query, key) / np.sqrt(query.shape[-1]).astype(query.dtype)
    mask = jnp.arange(key.shape[1])[None, :] < lengths[:, None]
    return _weighted(jnp.where(mask[:, None, None, :], scores, jnp.finfo(scores.dtype).min), value)


def bias(query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array) -> jax.Array:
    scores = jnp.einsum("btnd,bsnd->bnts", query, key) / np.sqrt(query.shape[-1]).astype(query.dtype)
    return _weighted(scores + bias, value)


def _weighted(scores: jax.Array, value: jax.Array) -> jax.Array:
    weights = jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(value.dtype)
    return jnp.einsum("bnts,bsnd->btnd", weights, value)


ORIGINALS: dict[str, Callable[..., jax.Array]] = {"full": full, "causal": causal, "padded": padded, "bias": bias}


def library(mask: str, query: jax.Array, key: jax.Array, value: jax.Array, *rest: jax.Array) -> jax.Array:
    """The same by JAX's own function, for orientation."""
    extra: dict[str, Any] = {}
    if mask == "causal":
        extra = {"is_causal": True}
    elif mask == "padded":
        extra = {"key_value_seq_lengths": rest[0]}
    elif mask == "bias":
        extra = {"bias": rest[0]}
    result: jax.Array = jax.nn.dot_product_attention(query, key, value, **extra)
    return result


def candidates(case: Case) -> dict[str, Candidate]:
    """The original, the original under ``autopallas.optimize``, and JAX's own function."""
    original = ORIGINALS[case.mask]
    optimized = autopallas.optimize(original, objective="always")

    def chosen() -> Chosen:
        sites = optimized.report().sites
        if len(sites) != 1:
            return Chosen(f"kept: {len(sites)} sites were found")
        if sites[0].verdict != "applied":
            return Chosen(f"kept: {sites[0].reason}")
        return Chosen(sites[0].implementation or "", sites[0].block_sizes)

    def candidate(function: Callable[..., Any], chosen: Callable[[], Chosen]) -> Candidate:
        return Candidate(_step(function) if case.direction == "forward+backward" else function, chosen)

    dot_product_attention = partial(library, case.mask)
    return {
        ORIGINAL: candidate(original, lambda: Chosen(ORIGINAL)),
        AUTOPALLAS: candidate(optimized, chosen),
        "jax.nn": candidate(dot_product_attention, lambda: Chosen("jax.nn.dot_product_attention")),
    }


def _step(function: Callable[..., jax.Array]) -> Callable[..., Any]:
    """The output and the gradients for query, key and value, from one cotangent."""

    def forward_and_backward(cotangent: jax.Array, *operands: jax.Array) -> Any:
        output, pull_back = jax.vjp(lambda *qkv: function(*qkv, *operands[3:]), *operands[:3])
        return output, pull_back(cotangent)

    return forward_and_backward


def arguments(case: Case) -> tuple[jax.Array, ...]:
    """Query, key, value; before them the cotangent where there is a backward pass; after them lengths or the bias."""
    batch, length, heads = case.size("B"), case.size("T"), case.size("N")
    random = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(random.standard_normal(shape, np.float32), case.dtype)

    operands = [normal(batch, length, heads, case.size("D")) for _ in range(4)]
    if case.direction == "forward":
        del operands[0]
    if case.mask == "padded":
        operands.append(jnp.full((batch,), live_keys(length), jnp.int32))
    elif case.mask == "bias":
        operands.append(normal(1, heads, length, length))
    return tuple(operands)


def live_keys(length: int) -> int:
    """How many keys of a padded row are real."""
    return 3 * length // 4


def operations(case: Case) -> float:
    """Two multiply-adds per head size for each live pair of query and key; 2.5 times that in the backward pass."""
    length = case.size("T")
    pairs = {"causal": length * (length + 1) / 2, "padded": length * live_keys(length)}.get(case.mask, length * length)
    forward = 4.0 * case.size("B") * case.size("N") * case.size("D") * pairs
    return forward * (3.5 if case.direction == "forward+backward" else 1.0)


def oracle(case: Case, arguments: tuple[Any, ...]) -> Any:
    """The result in float64, of the arguments as they were rounded to the case's dtype."""
    if case.size("B") * case.size("N") * case.size("T") ** 2 > ORACLE_LIMIT:
        return None
    wide = [np.asarray(a).astype(np.float64) for a in arguments]
    cotangent = wide.pop(0) if case.direction == "forward+backward" else None
    query, key, value, *rest = wide
    return attention_oracle.attention(
        query,
        key,
        value,
        cotangent,
        causal=case.mask == "causal",
        lengths=rest[0] if case.mask == "padded" else None,
        bias=rest[0] if case.mask == "bias" else None,
    )


def grid(name: str) -> tuple[Case, ...]:
    """The cases: "quick" is a sample, "standard" what is checked in for the CPU, "wide" adds lengths and head sizes."""

    def case(direction: Direction, dtype: str, mask: str, length: int, head_size: int = 64) -> Case:
        return Case("attention", direction, dtype, mask, (("B", 1), ("T", length), ("N", 8), ("D", head_size)))

    if name == "quick":
        return (
            case("forward", "float32", "full", 1024),
            *(case("forward", "float32", "causal", length) for length in (512, 2048)),
            case("forward", "bfloat16", "causal", 1024),
            case("forward+backward", "float32", "causal", 1024),
        )
    lengths, dtypes = (512, 1024, 2048, 4096), ("float32", "bfloat16")
    if name == "standard":
        return (
            *(case("forward", d, mask, length) for d in dtypes for mask in ("causal", "full") for length in lengths),
            *(case("forward", "float32", mask, length) for mask in ("padded", "bias") for length in lengths[1:3]),
            *(case("forward+backward", d, "causal", length) for d in dtypes for length in lengths[1:3]),
            *(case("forward+backward", "float32", "full", length) for length in lengths[1:3]),
        )
    if name == "wide":
        longest_lengths: dict[Direction, int] = {"forward": 8192, "forward+backward": 4096}
        return tuple(
            case(direction, d, mask, length, head_size)
            for direction, longest in longest_lengths.items()
            for d in dtypes
            for mask in ORIGINALS
            for length in (*lengths, 8192)
            for head_size in (64, 128)
            if length <= longest
        )
    raise ValueError(f"no grid is called {name!r}")
