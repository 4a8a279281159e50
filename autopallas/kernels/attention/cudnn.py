"""Computes attention by cuDNN, through ``jax.nn.dot_product_attention``: with a scale, and a causal mask or window.

That this is all is proven, not inferred from a spelling: once the mask is resolved on the live keys, the score program
has to be a multiplication, and each row needs a live key.  A bias, lengths and masks that are arrays are not supported:
cuDNN's backward computes probabilities as exp(x - logsumexp), which is 1 instead of 1 / S in a row that a finite fill
hides entirely, and only at run time is it known whether there is such a row.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from autopallas.kernels.attention import intervals
from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.kernels.attention.gpu_elements import scale_of
from autopallas.kernels.attention.intervals import Ranges
from autopallas.kernels.attention.operands import Cotangents, Gradients, Operands, Residuals, Results
from autopallas.kernels.attention.spec import AttentionSpec
from autopallas.kernels.attention.tiles import simplified
from autopallas.kernels.gpu import MATRIX_DTYPES, is_hopper
from autopallas.numerics.classes import Numerics
from autopallas.sites.device import Device
from autopallas.sites.operation import Supported, Unsupported

__all__ = ["NUMERICS", "Reduced", "backward", "candidates", "forward", "reduced", "supports"]

NUMERICS: Numerics = "tolerance"
"""How its results relate to the original's."""

Array: TypeAlias = jax.Array

TILES = False
"""Whether there are tiles; without them block sizes are ignored."""

_LIBRARY: Literal["cudnn"] = "cudnn"


class Reduced(NamedTuple):
    """An attention as the arguments of cuDNN.

    Attributes:
      scale: the factor of the scores.
      causal: whether row t sees only the keys 0 .. t.
      window: how many keys before its own a row sees; None for all.
    """

    scale: float
    causal: bool
    window: int | None = None


def supports(spec: AttentionSpec, device: Device) -> Supported | Unsupported:
    """Supports 16-bit operands on this machine's Hopper GPU, with only a scale and a mask of positions."""
    if not is_hopper(device):
        return Unsupported(f"cuDNN's attention is offered on Hopper only, not on {device.kind or device.platform}")
    if not device.here:
        return Unsupported("programs for another machine do not call cuDNN: its version there is unknown")
    names = {d.name for d in (spec.query_dtype, spec.key_dtype, spec.value_dtype, spec.result_dtype)}
    if len(names) > 1 or not names <= set(MATRIX_DTYPES):
        return Unsupported(f"cuDNN's attention has operands and results all of {' or all of '.join(MATRIX_DTYPES)}")
    if spec.reads_weights != spec.value_dtype:
        return Unsupported(f"cuDNN's attention rounds probabilities to {spec.value_dtype}, and the original does not")
    if spec.head_size != spec.value_head_size or spec.head_size % 8 or spec.head_size > 256:
        return Unsupported("cuDNN's attention has one head size, a multiple of 8 up to 256")
    if spec.sink is not None or spec.statistics is not None or spec.weights or spec.inner_weights:
        return Unsupported("cuDNN's attention has no sinks, no weights beside the softmax, and no row programs")
    if reduced(spec) is None:
        return Unsupported("its score program is not proven to be a scale with a causal mask, a window, or no mask")
    return Supported()


@lru_cache(maxsize=256)
def reduced(spec: AttentionSpec) -> Reduced | None:
    """Expresses the score program and its mask as cuDNN's arguments; returns None if that is impossible."""
    if spec.score_dtype != np.float32:
        return None  # cuDNN does not round its scores
    if spec.live is None:
        scale = scale_of(spec.score)
        return None if scale is None else Reduced(scale, causal=False)
    length = spec.query_length
    if spec.live.sides or not spec.assume_finite or length != spec.key_length:
        return None
    left = _keys_of_the_last_row(spec) - 1
    row = np.arange(length, dtype=np.int64)
    first = np.maximum(row - left, 0)
    live = Ranges(row, row + 1, first, row + 1)
    before = Ranges(row, row + 1, np.zeros_like(row), first)
    after = Ranges(row, row + 1, row + 1, np.full_like(row, length))
    if left < 0 or not np.all(intervals.evaluate(spec.live, live).always):
        return None
    for dead in (before, after):
        dead = dead.take(dead.area > 0)
        if len(dead) and not np.all(intervals.evaluate(spec.live, dead).never):
            return None
    scale = scale_of(simplified(spec.score, live))
    return None if scale is None else Reduced(scale, causal=True, window=None if left == length - 1 else left)


def _keys_of_the_last_row(spec: AttentionSpec) -> int:
    assert spec.live is not None
    length = spec.key_length
    columns = np.arange(length, dtype=np.int64)
    last = np.full_like(columns, spec.query_length - 1)
    answer = intervals.evaluate(spec.live, Ranges(last, last + 1, columns, columns + 1))
    return int(np.count_nonzero(answer.always))


def candidates(spec: AttentionSpec, device: Device) -> tuple[BlockSizes, ...]:
    """Returns one: cuDNN chooses its blocks itself."""
    return (BlockSizes.get_default(),)


def forward(spec: AttentionSpec, block_sizes: BlockSizes, operands: Operands) -> Results:
    """Calls cuDNN, which rounds the logsumexp to the operands' dtype."""
    with jax.named_scope("autopallas_attention_cudnn"):
        out, logsumexp = _attention(spec, operands.query, operands.key, operands.value)
    return Results(out, (logsumexp.astype(spec.accumulation_dtype),))


def backward(
    spec: AttentionSpec, block_sizes: BlockSizes, operands: Operands, residuals: Residuals, cotangents: Cotangents
) -> Gradients:
    """Differentiates :func:`forward` by ``jax.vjp``.

    JAX offers no separate backward, so that the forward is part of this one; if both are in one program, XLA merges the
    equal calls.
    """
    with jax.named_scope("autopallas_attention_cudnn_backward"):
        _, pull_back = jax.vjp(lambda q, k, v: _attention(spec, q, k, v)[0], *operands[:3])
        dquery, dkey, dvalue = pull_back(cotangents.out.astype(operands.query.dtype))
    return Gradients(dquery, dkey, dvalue, tuple(None for _ in spec.sides), None)


def _attention(spec: AttentionSpec, query: Array, key: Array, value: Array) -> tuple[Array, Array]:
    """Computes the result [B, K, G, T, D] and the logsumexp [B, K, G, T], from cuDNN's [B, T, N, D]."""
    wanted = reduced(spec)
    assert wanted is not None
    q = jnp.moveaxis(query.reshape(spec.batch, -1, *query.shape[3:]), 1, 2)
    k, v = (jnp.moveaxis(x, 1, 2) for x in (key, value))
    out, logsumexp = jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=wanted.scale,
        is_causal=wanted.causal,
        local_window_size=None if wanted.window is None else (wanted.window, 0),
        implementation=_LIBRARY,
        return_residual=True,
    )
    out = jnp.moveaxis(out, 1, 2).reshape(*query.shape[:4], -1)
    return out, jnp.moveaxis(logsumexp, 1, 2).reshape(query.shape[:4])
