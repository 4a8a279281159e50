"""Provides attention as a function that can be used without the rest of autopallas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from autopallas.compat import Dtype, PyTree
from autopallas.kernels.arguments import check_block_sizes, check_floating, kind, require
from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.kernels.attention.operands import Cotangents, Operands, Residuals, Results
from autopallas.kernels.attention.operation import OPERATION
from autopallas.kernels.attention.programs import causal, traced
from autopallas.kernels.attention.spec import AttentionSpec, Layouts, SideSpec
from autopallas.sites.device import Device
from autopallas.sites.elementwise import ElementwiseProgram, Index, Input, Score, Side
from autopallas.tuning.direct import block_sizes_for

__all__ = ["attention"]

Array: TypeAlias = jax.Array

_MASKED = -0.7 * float(np.finfo(np.float32).max)


def attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    bias: Array | None = None,
    mask: Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    sink: Array | None = None,
    implementation: str | Sequence[str] | None = None,
    block_sizes: BlockSizes | None = None,
) -> Array:
    """Computes softmax attention, ``softmax(cap(scale * query key^T) + bias, where mask) value``, with no T x S array.

    The algorithm is FlashAttention-2 (Dao 2023, https://arxiv.org/abs/2307.08691).  Scores, maxima and sums are float32
    (float64 for float64 operands).  Differentiable in reverse mode once, with respect to query, key, value, bias and
    sink; forward mode and second derivatives are not available here (``autopallas.optimize`` has them).

    Letters: B batch, N query heads, K key heads (a divisor of N; query head n reads key head ``n // (N // K)``), T
    query length, S key length, D head size, Dv head size of the values.

    Arguments:
      query: [B, T, N, D], floating point.
      key: [B, S, K, D], floating point.
      value: [B, S, K, Dv], floating point.
      bias: [B|1, N|1, T|1, S|1], floating point, added to the scaled and capped scores.
      mask: [B|1, N|1, T|1, S|1], bool; False hides a key from a row.  A row without any key gets the mean of the values
        of all S keys, as with ``jax.nn.dot_product_attention``.
      is_causal: whether row t sees the keys 0 .. t only.
      scale: factor of the scores; ``1 / sqrt(D)`` by default.
      logits_soft_cap: c in ``c * tanh(scores / c)``.
      sink: [N], floating point: one more logit per head, without a value.
      implementation: None for the best one here, a name ("xla", "reference", ...), or a sequence of names to try in
        order, with a warning for each that cannot be used.
      block_sizes: tile sizes; from the cache or the tuned table by default.

    Returns:
      [B, T, N, Dv] in the query's dtype.

    Raises:
      TypeError, ValueError: an argument has the wrong dtype, rank or size.
      UnsupportedError: the named implementation cannot compute this, or none of several can.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from autopallas.kernels.attention import attention
      >>> x = jax.random.normal(jax.random.key(0), (2, 100, 8, 64))
      >>> attention(x, x, x, is_causal=True).shape
      (2, 100, 8, 64)
    """
    _check_operands(query, key, value)
    require(scale is None or math.isfinite(scale), f"scale is {scale}; it must be a finite number")
    require(logits_soft_cap is None or logits_soft_cap > 0, f"logits_soft_cap is {logits_soft_cap}; it must be > 0")
    check_block_sizes(block_sizes, BlockSizes)
    factor = 1 / math.sqrt(query.shape[3]) if scale is None else float(scale)
    operands = _canonical(query, key, value, bias, mask, sink)
    spec = _spec(operands, bias is not None, mask is not None, is_causal, factor, logits_soft_cap)
    device = Device.current()

    def call(name: str) -> Array:
        sizes = block_sizes_for(OPERATION.name, spec, device, name, block_sizes)
        result: Array = _attention(name, spec, sizes, operands)
        return result

    out = OPERATION.first_that_works(spec, device, implementation, call)
    return jnp.transpose(out, (0, 3, 1, 2, 4)).reshape(*query.shape[:3], value.shape[3])


def _check_operands(query: Array, key: Array, value: Array) -> None:
    """Raises if query, key and value do not agree."""
    batch, length, heads, size = _shape("query", query)
    key_batch, key_length, key_heads, key_size = _shape("key", key)
    value_batch, value_length, value_heads, value_size = _shape("value", value)
    require(key_batch == batch, f"key has batch {key_batch} and query {batch}; broadcast one of them")
    require(key_size == size, f"key has head size {key_size} and query {size}; they are multiplied and must agree")
    require(value_batch == batch, f"value has batch {value_batch} and query {batch}; broadcast one of them")
    require(value_length == key_length, f"value has {value_length} positions and key {key_length}; they must agree")
    require(value_heads == key_heads, f"value has {value_heads} heads and key {key_heads}; they must agree")
    require(heads % key_heads == 0, f"query has {heads} heads, not a multiple of key's {key_heads}")
    require(min(batch, length, heads, size, key_length, value_size) > 0, "query, key and value must not be empty")


def _canonical(
    query: Array, key: Array, value: Array, bias: Array | None, mask: Array | None, sink: Array | None
) -> Operands:
    """Returns the operands in canonical shapes; the side inputs are bias and mask, as far as they are given."""
    batch, length, heads, size = query.shape
    key_length, key_heads = key.shape[1:3]
    groups = heads // key_heads
    sides = []
    for name, x in (("bias", bias), ("mask", mask)):
        if x is not None:
            _check_side(name, x, (batch, heads, length, key_length))
            sides.append(_grouped(x, key_heads, groups))
    if sink is not None:
        check_floating("sink", sink)
        require(sink.shape == (heads,), f"sink has shape {sink.shape}; it must be one per query head, ({heads},)")
        sink = sink.reshape(1, key_heads, groups, 1, 1)
    q = jnp.transpose(query.reshape(batch, length, key_heads, groups, size), (0, 2, 3, 1, 4))
    return Operands(q, jnp.swapaxes(key, 1, 2), jnp.swapaxes(value, 1, 2), tuple(sides), sink)


def _spec(
    operands: Operands, has_bias: bool, has_mask: bool, is_causal: bool, scale: float, logits_soft_cap: float | None
) -> AttentionSpec:
    """Describes the attention of canonical operands."""
    batch, key_heads, groups, length, size = operands.query.shape
    key_length, value_size = operands.value.shape[2:]
    sides = tuple(SideSpec(np.dtype(x.dtype), _varies(x)) for x in operands.sides)
    dtypes = [np.dtype(x.dtype) for x in operands[:3]]
    score_dtype = np.dtype(np.float64 if np.float64 in dtypes else np.float32)
    kinds = tuple((position, s.dtype) for position, s in enumerate(sides))
    bias_side, mask_side = (kinds[0] if has_bias else None), (kinds[-1] if has_mask else None)
    # Nothing is rounded except to the dtype that all operands have, and to that of the result.
    rounded = dtypes[0] if len({*dtypes}) == 1 else None
    return AttentionSpec(
        batch=batch,
        key_heads=key_heads,
        groups=groups,
        query_length=length,
        key_length=key_length,
        head_size=size,
        value_head_size=value_size,
        query_dtype=dtypes[0],
        key_dtype=dtypes[1],
        value_dtype=dtypes[2],
        score_dtype=score_dtype,
        result_dtype=dtypes[0],
        score=_score_program(score_dtype, scale, logits_soft_cap, bias_side, mask_side, is_causal),
        sides=sides,
        sink=None if operands.sink is None else _varies(operands.sink),
        live=_live_program(mask_side, is_causal),
        weights_dtype=rounded,
        score_gradient_dtype=rounded,
        layouts=Layouts.with_heads_after_lengths(),
    )


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attention(name: str, spec: AttentionSpec, block_sizes: tuple[BlockSizes, BlockSizes], operands: Operands) -> Array:
    return _results(name, spec, block_sizes[0], operands).out


def _results(name: str, spec: AttentionSpec, block_sizes: BlockSizes, operands: Operands) -> Results:
    module = OPERATION.implementation(name)
    assert module is not None
    found: Results = module.forward(spec, block_sizes, operands)
    return found


def _attention_forward(
    name: str, spec: AttentionSpec, block_sizes: tuple[BlockSizes, BlockSizes], operands: Operands
) -> tuple[Array, tuple[Operands, Residuals]]:
    found = _results(name, spec, block_sizes[1], operands)
    return found.out, (operands, found.residuals)


def _attention_backward(
    name: str,
    spec: AttentionSpec,
    block_sizes: tuple[BlockSizes, BlockSizes],
    saved: tuple[Operands, Residuals],
    dout: Array,
) -> tuple[PyTree]:
    module = OPERATION.implementation(name)
    assert module is not None
    return (Operands(*module.backward(spec, block_sizes[1], *saved, Cotangents(dout))),)


_attention.defvjp(_attention_forward, _attention_backward)


_SideInput: TypeAlias = tuple[int, Dtype]
_INT32 = np.dtype(np.int32)


@lru_cache(maxsize=256)
def _score_program(
    dtype: np.dtype,
    scale: float,
    logits_soft_cap: float | None,
    bias: _SideInput | None,
    mask: _SideInput | None,
    is_causal: bool,
) -> ElementwiseProgram:
    inputs: list[Input] = [Score(dtype), *(Side(*side) for side in (bias, mask) if side is not None)]
    if is_causal:
        inputs += [Index("query", _INT32), Index("key", _INT32)]

    def x(score: Array, *rest: Array) -> Array:
        values = iter(rest)
        score = score * dtype.type(scale)
        if logits_soft_cap is not None:
            score = jnp.tanh(score / dtype.type(logits_soft_cap)) * dtype.type(logits_soft_cap)
        if bias is not None:
            score = score + next(values).astype(dtype)
        shown = next(values) if mask is not None else None
        if is_causal:
            past = next(values) >= next(values)
            shown = past if shown is None else shown & past
        return score if shown is None else jnp.where(shown, score, dtype.type(_MASKED))

    return traced(x, *inputs)


@lru_cache(maxsize=256)
def _live_program(mask: _SideInput | None, is_causal: bool) -> ElementwiseProgram | None:
    if mask is None:
        return causal() if is_causal else None
    if not is_causal:
        return ElementwiseProgram((Side(*mask),), (), 0)
    return traced(lambda m, i, j: m & (i >= j), Side(*mask), Index("query", _INT32), Index("key", _INT32))


def _shape(name: str, x: Array) -> tuple[int, int, int, int]:
    check_floating(name, x)
    if x.ndim != 4:
        raise ValueError(f"{name} has shape {x.shape}; it must be [batch, length, heads, head size]: add or merge axes")
    batch, length, heads, size = x.shape
    return batch, length, heads, size


def _check_side(name: str, x: Array, full: tuple[int, int, int, int]) -> None:
    if name == "bias":
        check_floating(name, x)
    elif not hasattr(x, "dtype") or x.dtype != jnp.bool_:
        raise TypeError(f"{name} must be a boolean array, not {kind(x)}; compare or convert it")
    if x.ndim != 4 or any(n not in (1, m) for n, m in zip(x.shape, full, strict=True)):
        raise ValueError(
            f"{name} has shape {x.shape}; it must broadcast against [batch, heads, query length, key length] = {full} "
            "with all four axes present: add axes of size 1"
        )


def _grouped(x: Array, key_heads: int, groups: int) -> Array:
    """Reshapes [B|1, N|1, T|1, S|1] to [B|1, K|1, G|1, T|1, S|1]."""
    batch, heads, length, key_length = x.shape
    return x.reshape(batch, *((key_heads, groups) if heads > 1 else (1, 1)), length, key_length)


def _varies(x: Array) -> tuple[bool, bool, bool, bool, bool]:
    """Returns along which axes an array varies."""
    b, k, g, t, s = (n > 1 for n in x.shape)
    return b, k, g, t, s
