"""Attention: the spellings that are measured, and the cases.

Letters: B batch, T query length, S key length (T, where it is not given), N heads, D head size.  Arrays are
[B, T, N, D] and [B, S, N, D].
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
from benchmarks.case import AUTOPALLAS, DIRECTIONS, ORIGINAL, Candidate, Case, Chosen, Direction

ORACLE_LIMIT = 8 * 4096 * 4096
"""How many scores there may be for a float64 result to be computed: some seconds of NumPy."""

LIBRARY_LIMIT = 8 * 2048 * 2048
"""How many scores there may be for JAX's own function to be run: beyond, it takes long and says nothing new."""


def full(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Softmax attention as people write it; the other masks differ in one line."""
    scores = jnp.einsum("btnd,bsnd->bnts", query, key) / np.sqrt(query.shape[-1]).astype(query.dtype)
    return _weighted(scores, value)


def causal(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    scores = jnp.einsum("btnd,bsnd->bnts", query, key) / np.sqrt(query.shape[-1]).astype(query.dtype)
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return _weighted(jnp.where(mask, scores, -jnp.inf), value)


def window(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    scores = jnp.einsum("btnd,bsnd->bnts", query, key) / np.sqrt(query.shape[-1]).astype(query.dtype)
    distance = jnp.arange(scores.shape[-2])[:, None] - jnp.arange(scores.shape[-1])[None, :]
    mask = (distance >= 0) & (distance < window_size(scores.shape[-1]))
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


ORIGINALS: dict[str, Callable[..., jax.Array]] = {
    "full": full,
    "causal": causal,
    "window": window,
    "padded": padded,
    "bias": bias,
}


def window_size(length: int) -> int:
    """How many keys, its own among them, a row of a windowed attention sees."""
    return max(1, length // 2)


def live_keys(length: int) -> int:
    """How many keys of a padded row are real."""
    return max(1, 3 * length // 4)


def library(mask: str, query: jax.Array, key: jax.Array, value: jax.Array, *rest: jax.Array) -> jax.Array:
    """The same by JAX's own function, for orientation."""
    extra: dict[str, Any] = {}
    if mask == "causal":
        extra = {"is_causal": True}
    elif mask == "window":
        extra = {"is_causal": True, "local_window_size": (window_size(key.shape[1]) - 1, 0)}
    elif mask == "padded":
        extra = {"key_value_seq_lengths": rest[0]}
    elif mask == "bias":
        extra = {"bias": rest[0]}
    result: jax.Array = jax.nn.dot_product_attention(query, key, value, **extra)
    return result


def original(case: Case) -> Callable[..., jax.Array]:
    """The forward computation as people write it."""
    return ORIGINALS[case.mask]


def candidates(case: Case) -> dict[str, Candidate]:
    """The original, the original under ``autopallas.optimize``, and JAX's own function."""
    function = original(case)
    optimized = autopallas.optimize(function, objective="always", strict=True)

    def chosen() -> Chosen:
        report = optimized.report()
        for site in report.sites:
            if site.verdict == "applied":
                return Chosen(site.implementation or "", site.block_sizes)
        reasons = [site.reason for site in report.sites] + [miss.reason for miss in report.near_misses]
        return Chosen("kept: " + ("; ".join(reasons) or "no site was found"))

    def candidate(function: Callable[..., Any], chosen: Callable[[], Chosen]) -> Candidate:
        return Candidate(in_direction(case, function), chosen)

    found = {ORIGINAL: candidate(function, lambda: Chosen(ORIGINAL)), AUTOPALLAS: candidate(optimized, chosen)}
    if _scores(case) <= LIBRARY_LIMIT:
        named = Chosen("jax.nn.dot_product_attention")
        found["jax.nn"] = candidate(partial(library, case.mask), lambda: named)
    return found


def in_direction(case: Case, function: Callable[..., jax.Array]) -> Callable[..., Any]:
    """The function itself, or with the gradients for query, key and value from a cotangent, its last argument."""
    if case.direction == "forward":
        return function

    def forward_and_backward(*arguments: jax.Array) -> Any:
        *operands, cotangent = arguments
        output, pull_back = jax.vjp(lambda *qkv: function(*qkv, *operands[3:]), *operands[:3])
        return output, pull_back(cotangent)

    return forward_and_backward


def arguments(case: Case) -> tuple[jax.Array, ...]:
    """Query, key, value, then lengths or the bias, and last the cotangent where there is a backward pass."""
    batch, heads, head_size = case.size("B"), case.size("N"), case.size("D")
    queries, keys = _lengths(case)
    random = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(random.standard_normal(shape, np.float32), case.dtype)

    given = [normal(batch, length, heads, head_size) for length in (queries, keys, keys)]
    if case.mask == "padded":
        given.append(jnp.full((batch,), live_keys(keys), jnp.int32))
    elif case.mask == "bias":
        given.append(normal(1, heads, queries, keys))
    if case.direction == "forward+backward":
        given.append(normal(batch, queries, heads, head_size))
    return tuple(given)


def _lengths(case: Case) -> tuple[int, int]:
    """(T, S)."""
    sizes = dict(case.sizes)
    return sizes["T"], sizes.get("S", sizes["T"])


def _scores(case: Case) -> int:
    """How many scores the original computes."""
    queries, keys = _lengths(case)
    return case.size("B") * case.size("N") * queries * keys


def operations(case: Case) -> float:
    """Two multiply-adds per head size for each live pair of query and key; 2.5 times that in the backward pass."""
    queries, keys = _lengths(case)
    if case.mask in ("causal", "window"):
        seen = window_size(keys) if case.mask == "window" else keys
        pairs = sum(min(row + 1, seen, keys) for row in range(queries))
    else:
        pairs = queries * (live_keys(keys) if case.mask == "padded" else keys)
    forward = 4.0 * case.size("B") * case.size("N") * case.size("D") * pairs
    return forward * (3.5 if case.direction == "forward+backward" else 1.0)


def oracle(case: Case, arguments: tuple[Any, ...]) -> Any:
    """The result in float64, of the arguments as they were rounded to the case's dtype."""
    _, keys = _lengths(case)
    if _scores(case) > ORACLE_LIMIT:
        return None
    wide = [np.asarray(a).astype(np.float64) for a in arguments]
    cotangent = wide.pop() if case.direction == "forward+backward" else None
    query, key, value, *rest = wide
    return attention_oracle.attention(
        query,
        key,
        value,
        cotangent,
        causal=case.mask in ("causal", "window"),
        window=window_size(keys) if case.mask == "window" else None,
        lengths=rest[0] if case.mask == "padded" else None,
        bias=rest[0] if case.mask == "bias" else None,
    )


def grid(name: str) -> tuple[Case, ...]:
    """The cases.

    "quick" is a sample; "standard" is checked in for the CPU; "wide" adds lengths, head sizes and masks; "table" has a
    case for each row of the tuned table.
    """
    lengths, dtypes = (512, 1024, 2048, 4096), ("float32", "bfloat16")
    if name == "quick":
        return (
            _square("forward", "float32", "full", 1024),
            *(_square("forward", "float32", "causal", length) for length in (512, 2048)),
            _square("forward", "bfloat16", "causal", 1024),
            _square("forward+backward", "float32", "causal", 1024),
        )
    if name == "standard":
        return (
            *(_square("forward", d, mask, length) for d in dtypes for mask in ("causal", "full") for length in lengths),
            *(_square("forward", "float32", mask, length) for mask in ("padded", "bias") for length in lengths[1:3]),
            *(_square("forward+backward", d, "causal", length) for d in dtypes for length in lengths[1:3]),
            *(_square("forward+backward", "float32", "full", length) for length in lengths[1:3]),
        )
    if name == "wide":
        return tuple(
            _square(direction, d, mask, length, head_size)
            for direction in DIRECTIONS
            for d in dtypes
            for mask in ORIGINALS
            for length in (*lengths, 8192)
            for head_size in (64, 128)
            if length < 8192 or direction == "forward"
        )
    if name == "table":
        # Fewer heads where the lengths grow, for time and memory, but enough for several cores.
        squares = ((256, 8), (512, 8), (1024, 8), (2048, 8), (4096, 4), (8192, 2), (16384, 2))
        return tuple(
            case
            for direction in DIRECTIONS
            for d in dtypes
            for case in (
                *(
                    _square(direction, d, mask, length, heads=heads)
                    for length, heads in squares
                    for mask in ORIGINALS
                    if mask != "bias" and (length <= 4096 or direction == "forward")
                ),
                *(_cross(direction, d, m, t, s) for t, s in ((1, 2048), (512, 2048)) for m in ("full", "padded")),
            )
        )
    raise ValueError(f"no grid is called {name!r}")


def _square(direction: Direction, dtype: str, mask: str, length: int, head_size: int = 64, heads: int = 8) -> Case:
    return Case("attention", direction, dtype, mask, (("B", 1), ("T", length), ("N", heads), ("D", head_size)))


def _cross(direction: Direction, dtype: str, mask: str, queries: int, keys: int) -> Case:
    return Case("attention", direction, dtype, mask, (("B", 1), ("T", queries), ("S", keys), ("N", 8), ("D", 64)))
