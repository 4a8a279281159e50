"""Attention and its gradients in float64 and plain NumPy, head by head: the truth that errors refer to.

It is written from the formulas alone and shares no code with what it judges.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]


def attention(
    query: Array,
    key: Array,
    value: Array,
    cotangent: Array | None = None,
    *,
    causal: bool = False,
    window: int | None = None,
    lengths: Array | None = None,
    bias: Array | None = None,
) -> Any:
    """softmax(q k^T / sqrt(D) + bias) v over the live keys of each row.

    Args:
      query, key, value: [B, T, N, D], [B, S, N, D], [B, S, N, D].
      cotangent: [B, T, N, D], or None.
      causal: key j is live for query i only where j <= i.
      window: key j is live for query i only where i - j < window.
      lengths: [B]; key j is live only where j < lengths.
      bias: [1, N, T, S], added to the scores.

    Returns:
      The output [B, T, N, D]; with a cotangent ``(output, (query's, key's, value's gradient))``.
    """
    batch, length, heads, head_size = query.shape
    output = np.empty((batch, length, heads, value.shape[-1]))
    gradients = np.empty_like(query), np.empty_like(key), np.empty_like(value)
    live: Any = np.tri(length, key.shape[1], dtype=bool) if causal else np.ones((length, key.shape[1]), bool)
    if window is not None:
        live &= ~np.tri(length, key.shape[1], -window, dtype=bool)
    for b in range(batch):
        row_live = live if lengths is None else live & (np.arange(key.shape[1]) < lengths[b])
        for n in range(heads):
            q, k, v = query[b, :, n], key[b, :, n], value[b, :, n]
            scores = q @ k.T / np.sqrt(head_size)
            if bias is not None:
                scores += bias[0, n]
            scores = np.where(row_live, scores, -np.inf)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            output[b, :, n] = weights @ v
            if cotangent is None:
                continue
            d_output = cotangent[b, :, n]
            d_weights = d_output @ v.T
            d_scores = weights * (d_weights - (weights * d_weights).sum(axis=-1, keepdims=True)) / np.sqrt(head_size)
            for gradient, g in zip(gradients, (d_scores @ k, d_scores.T @ q, weights.T @ d_output), strict=True):
                gradient[b, :, n] = g
    return output if cotangent is None else (output, gradients)
