"""Provides attention in its usual spellings, at the sizes of the tuned table.

Letters: B batch, T query length, S key length (T unless it is given), N heads, D head size.  Arrays are
[B, T, N, D] and [B, S, N, D].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from autopallas.compat import ArrayFunction, Shaped
from autopallas.workbench.cases import DIRECTIONS, Case, Direction, with_gradients

__all__ = ["ORIGINALS", "case_of", "cross", "direct", "in_direction", "square", "table_grid", "types", "window_size"]


def full(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Computes softmax attention in its usual spelling; the other masks differ in one line."""
    scores = jnp.einsum("btnd,bsnd->bnts", query, key) / np.sqrt(query.shape[-1]).astype(query.dtype)
    return _weighted(scores, value)


def causal(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    scores = jnp.einsum("btnd,bsnd->bnts", query, key) / np.sqrt(query.shape[-1]).astype(query.dtype)
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return _weighted(jnp.where(mask, scores, -jnp.inf), value)


def full32(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Computes the same with scores in float32, as is usual where bfloat16 is not precise enough."""
    scores = jnp.einsum("btnd,bsnd->bnts", query, key, preferred_element_type=jnp.float32)
    return _weighted(scores / np.sqrt(query.shape[-1]).astype(np.float32), value)


def causal32(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    scores = jnp.einsum("btnd,bsnd->bnts", query, key, preferred_element_type=jnp.float32)
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return _weighted(jnp.where(mask, scores / np.sqrt(query.shape[-1]).astype(np.float32), -jnp.inf), value)


def window(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    scores = jnp.einsum("btnd,bsnd->bnts", query, key) / np.sqrt(query.shape[-1]).astype(query.dtype)
    return _weighted(jnp.where(_near(scores), scores, -jnp.inf), value)


def window32(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    scores = jnp.einsum("btnd,bsnd->bnts", query, key, preferred_element_type=jnp.float32)
    return _weighted(jnp.where(_near(scores), scores / np.sqrt(query.shape[-1]).astype(np.float32), -jnp.inf), value)


def padded(query: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array) -> jax.Array:
    scores = jnp.einsum("btnd,bsnd->bnts", query, key) / np.sqrt(query.shape[-1]).astype(query.dtype)
    mask = jnp.arange(key.shape[1])[None, :] < lengths[:, None]
    return _weighted(jnp.where(mask[:, None, None, :], scores, jnp.finfo(scores.dtype).min), value)


def causal_padded(query: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array) -> jax.Array:
    """Computes attention with both masks, added as a finite fill, as language models of public code do."""
    scores = jnp.einsum("btnd,bsnd->bnts", query, key) / np.sqrt(query.shape[-1]).astype(query.dtype)
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool)) & (jnp.arange(key.shape[1]) < lengths[:, None])[:, None, None, :]
    return _weighted(scores + jnp.where(mask, 0, jnp.finfo(scores.dtype).min).astype(scores.dtype), value)


def window_padded(query: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array) -> jax.Array:
    """Computes attention of a window with the padding of its sequences, as language models' trainers do."""
    scores = jnp.einsum("btnd,bsnd->bnts", query, key) / np.sqrt(query.shape[-1]).astype(query.dtype)
    mask = _near(scores) & (jnp.arange(key.shape[1]) < lengths[:, None])[:, None, None, :]
    return _weighted(jnp.where(mask, scores, jnp.finfo(scores.dtype).min), value)


def bias(query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array) -> jax.Array:
    scores = jnp.einsum("btnd,bsnd->bnts", query, key) / np.sqrt(query.shape[-1]).astype(query.dtype)
    return _weighted(scores + bias, value)


def masked(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array) -> jax.Array:
    """Computes attention with a mask that the program is given, [B, 1, T, S], as language models' trainers do."""
    scores = jnp.einsum("btnd,bsnd->bnts", query, key) / np.sqrt(query.shape[-1]).astype(query.dtype)
    return _weighted(jnp.where(mask, scores, jnp.finfo(scores.dtype).min), value)


def _near(scores: jax.Array) -> jax.Array:
    """Returns which keys the rows of scores see in a window, [T, S]."""
    distance = jnp.arange(scores.shape[-2])[:, None] - jnp.arange(scores.shape[-1])[None, :]
    return (distance >= 0) & (distance < window_size(scores.shape[-1]))


def _weighted(scores: jax.Array, value: jax.Array) -> jax.Array:
    weights = jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(value.dtype)
    return jnp.einsum("bnts,bsnd->btnd", weights, value)


ORIGINALS: dict[str, Callable[..., jax.Array]] = {
    "full": full,
    "causal": causal,
    "window": window,
    "padded": padded,
    "causal_padded": causal_padded,
    "window_padded": window_padded,
    "bias": bias,
    "masked": masked,
    "full32": full32,
    "causal32": causal32,
    "window32": window32,
}


def window_size(length: int) -> int:
    """Returns how many keys, including its own, a row of a windowed attention sees."""
    return max(1, length // 2)


def in_direction(case: Case, function: Callable[..., jax.Array]) -> ArrayFunction:
    """Returns the function, or with it the gradients of query, key and value from a cotangent, the last argument."""
    return with_gradients(case, function, 3)


def types(case: Case) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the types of query, key, value, then lengths or the bias, and last the cotangent of a backward pass."""
    sizes = dict(case.sizes)
    batch, heads, head_size = sizes["B"], sizes["N"], sizes["D"]
    queries, keys = sizes["T"], sizes.get("S", sizes["T"])

    def of(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(case.dtype))

    given = [of(batch, length, heads, head_size) for length in (queries, keys, keys)]
    if "padded" in case.mask:
        given.append(jax.ShapeDtypeStruct((batch,), jnp.dtype(jnp.int32)))
    elif case.mask == "bias":
        given.append(of(1, heads, queries, keys))
    elif case.mask == "masked":
        given.append(jax.ShapeDtypeStruct((batch, 1, queries, keys), jnp.dtype(bool)))
    if case.direction == "forward+backward":
        given.append(of(batch, queries, heads, head_size))
    return tuple(given)


def case_of(types: Sequence[Shaped], variant: str, direction: Direction) -> Case:
    """Returns the case of query [B, T, N, D] and key and value [B, S, N, D]."""
    if len(types) != 3 or any(len(getattr(t, "shape", ())) != 4 for t in types):
        raise ValueError("attention takes query [B, T, N, D], key and value [B, S, N, D]")
    (batch, queries, heads, size), key, value = (tuple(t.shape) for t in types)
    keys = key[1]
    if key != value or key != (batch, keys, heads, size) or len({t.dtype for t in types}) > 1:
        raise ValueError("key and value must be alike, and agree with query in batch, heads, head size and dtype")
    sizes = (("B", batch), ("T", queries), ("S", keys), ("N", heads), ("D", size))
    return Case("attention", direction, types[0].dtype.name, variant, sizes)


_DIRECT = ("full", "causal", "full32", "causal32")


def direct(case: Case) -> ArrayFunction | None:
    """Returns the public function with the same mask; None if it has no such mask."""
    from autopallas.kernels.attention.api import attention

    return partial(attention, is_causal="causal" in case.mask) if case.mask in _DIRECT else None


def table_grid(platform: str = "cpu") -> tuple[Case, ...]:
    """Returns a case for each row of the tuned table, with fewer heads for greater lengths, to save time and memory.

    On TPUs scores are in float32, because the compiler's simulation has no bfloat16 arithmetic.  The original's scores
    take a gigabyte, more than vector memory holds.
    """
    if platform == "tpu":
        sizes = ((512, 16, 64), (1024, 16, 16), (2048, 16, 4), (4096, 16, 1), (8192, 4, 1))
        return tuple(
            square(direction, dtype, mask, length, head_size, heads, batch)
            for direction in DIRECTIONS
            for dtype, masks in (("bfloat16", ("full32", "causal32", "window32")), ("float32", ("full", "causal")))
            for mask in masks
            for head_size in (64, 128)
            for length, heads, batch in sizes
        )
    masks, given = ("full", "causal", "window", "padded"), ("causal_padded", "window_padded", "masked", "bias")
    squares = ((256, 8), (512, 8), (1024, 8), (2048, 8), (4096, 4), (8192, 2), (16384, 2))
    return tuple(
        case
        for direction in DIRECTIONS
        for d in ("float32", "bfloat16")
        for case in (
            *(
                square(direction, d, mask, length, heads=heads)
                for length, heads in squares
                for mask in masks
                if length <= 4096 or direction == "forward"
            ),
            *(cross(direction, d, m, t, s) for t, s in ((1, 2048), (512, 2048)) for m in ("full", "padded")),
            *(square(direction, d, mask, length) for length in (256, 512, 1024, 2048) for mask in given),
            *(
                square(direction, d, mask, length, batch=2)
                for length in (256, 512, 1024, 2048)
                for mask in ("full", "causal", "padded", *given)
            ),
        )
    )


def square(
    direction: Direction, dtype: str, mask: str, length: int, head_size: int = 64, heads: int = 8, batch: int = 1
) -> Case:
    """Returns a case with as many queries as keys."""
    return Case("attention", direction, dtype, mask, (("B", batch), ("T", length), ("N", heads), ("D", head_size)))


def cross(direction: Direction, dtype: str, mask: str, queries: int, keys: int) -> Case:
    """Returns a case with fewer queries than keys."""
    return Case("attention", direction, dtype, mask, (("B", 1), ("T", queries), ("S", keys), ("N", 8), ("D", 64)))
