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
from autopallas.kernels.attention.cases import ORIGINALS, in_direction, square, table_grid, window_size
from benchmarks import attention_oracle
from benchmarks.case import AUTOPALLAS, DIRECTIONS, ORIGINAL, Candidate, Case, Chosen, chosen_by

ORACLE_LIMIT = 8 * 4096 * 4096
"""How many scores there may be for a float64 result to be computed: some seconds of NumPy."""

LIBRARY_LIMIT = 8 * 2048 * 2048
"""How many scores there may be for JAX's own function to be run: beyond, it takes long and says nothing new."""

_WINDOWS = ("window", "window32", "window_padded")
_CAUSAL = ("causal", "causal32", "causal_padded", "masked", *_WINDOWS)
_OF_LENGTHS = ("padded", "causal_padded", "window_padded")
_PADDED = ("masked", *_OF_LENGTHS)


def live_keys(length: int) -> int:
    """How many keys of a padded row are real."""
    return max(1, 3 * length // 4)


def library(mask: str, query: jax.Array, key: jax.Array, value: jax.Array, *rest: jax.Array) -> jax.Array:
    """The same by JAX's own function, for orientation."""
    extra: dict[str, Any]
    if mask == "bias":
        extra = {"bias": rest[0]}
    elif mask == "masked":
        extra = {"mask": rest[0]}
    else:
        extra = {"is_causal": mask in _CAUSAL}
        if mask in _WINDOWS:
            extra["local_window_size"] = (window_size(key.shape[1]) - 1, 0)
        if mask in _OF_LENGTHS:
            extra["key_value_seq_lengths"] = rest[0]
    result: jax.Array = jax.nn.dot_product_attention(query, key, value, **extra)
    return result


def original(case: Case) -> Callable[..., jax.Array]:
    """The forward computation as people write it."""
    return ORIGINALS[case.mask]


def candidates(case: Case) -> dict[str, Candidate]:
    """The original, the original under ``autopallas.optimize``, and JAX's own function."""
    function = original(case)
    optimized = autopallas.optimize(function, objective="always", strict=True)

    def candidate(function: Callable[..., Any], chosen: Callable[[], Chosen]) -> Candidate:
        return Candidate(in_direction(case, function), chosen)

    found = {
        ORIGINAL: candidate(function, lambda: Chosen(ORIGINAL)),
        AUTOPALLAS: candidate(optimized, lambda: chosen_by(optimized)),
    }
    if _scores(case) <= LIBRARY_LIMIT:
        named = Chosen("jax.nn.dot_product_attention")
        found["jax.nn"] = candidate(partial(library, case.mask), lambda: named)
    return found


def arguments(case: Case) -> tuple[jax.Array, ...]:
    """Query, key, value, then lengths, the bias or the mask, and last the cotangent where there is a backward pass.

    A mask is what trainers of language models give: causal, with padding at the end.
    """
    batch, heads, head_size = case.size("B"), case.size("N"), case.size("D")
    queries, keys = _lengths(case)
    random = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(random.standard_normal(shape, np.float32), case.dtype)

    given = [normal(batch, length, heads, head_size) for length in (queries, keys, keys)]
    if case.mask in _OF_LENGTHS:
        given.append(jnp.full((batch,), live_keys(keys), jnp.int32))
    elif case.mask == "bias":
        given.append(normal(1, heads, queries, keys))
    elif case.mask == "masked":
        live = np.tri(queries, keys, dtype=bool) & (np.arange(keys) < live_keys(keys))
        given.append(jnp.asarray(np.broadcast_to(live, (batch, 1, queries, keys))))
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
    seen = window_size(keys) if case.mask in _WINDOWS else keys
    stored = live_keys(keys) if case.mask in _PADDED else keys
    if case.mask in _CAUSAL:
        pairs = sum(max(0, min(row + 1, stored) - max(0, row + 1 - seen)) for row in range(queries))
    else:
        pairs = queries * stored
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
        causal=case.mask in _CAUSAL,
        window=window_size(keys) if case.mask in _WINDOWS else None,
        lengths=np.full(query.shape[0], live_keys(keys)) if case.mask in _PADDED else None,
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
            square("forward", "float32", "full", 1024),
            *(square("forward", "float32", "causal", length) for length in (512, 2048)),
            square("forward", "bfloat16", "causal", 1024),
            square("forward+backward", "float32", "causal", 1024),
        )
    if name == "standard":
        return (
            *(square("forward", d, mask, length) for d in dtypes for mask in ("causal", "full") for length in lengths),
            *(square("forward", "float32", mask, length) for mask in ("padded", "bias") for length in lengths[1:3]),
            *(square("forward+backward", d, "causal", length) for d in dtypes for length in lengths[1:3]),
            *(square("forward+backward", "float32", "full", length) for length in lengths[1:3]),
        )
    if name == "wide":
        return tuple(
            square(direction, d, mask, length, head_size)
            for direction in DIRECTIONS
            for d in dtypes
            for mask in ("full", "causal", "window", "padded", "bias")
            for length in (*lengths, 8192)
            for head_size in (64, 128)
            if length < 8192 or direction == "forward"
        )
    if name == "table":
        return table_grid()
    raise ValueError(f"no grid is called {name!r}")
