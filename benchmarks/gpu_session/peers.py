"""Kernels for Hopper that JAX's wheel holds beside its examples: what ours are compared with.

They are no public interface and not tested here for correctness; where one cannot be imported or lowered, its row says
so.  Attention computes in float16 alone, so its operands are cast first; the trace tells the casts from the kernel.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

import jax.numpy as jnp

__all__ = ["attention", "matmul", "ragged_dot", "transposed_ragged_dot"]

_PACKAGE = "jax.experimental.pallas.ops.gpu"
_TESTS = "jax._src.test_util"


def _module(name: str) -> ModuleType:
    """Imports one of them.  They import JAX's test helpers without use, and these need absl, which JAX does not."""
    absent = importlib.util.find_spec("absl") is None and _TESTS not in sys.modules
    if absent:
        sys.modules[_TESTS] = ModuleType(_TESTS)
    try:
        return importlib.import_module(f"{_PACKAGE}.{name}")
    finally:
        if absent:
            del sys.modules[_TESTS]


def attention(query: Any, key: Any, value: Any, *, causal: bool) -> Any:
    """Computes attention, [B, T, N, D], with D a multiple of 64 and T of 128."""
    module = _module("attention_mgpu")
    config = module.TuningConfig(
        block_q=64,
        block_kv=128 if query.shape[-1] <= 128 else 64,
        max_concurrent_steps=2,
        causal=causal,
    )
    half = [x.astype(jnp.float16) for x in (query, key, value)]
    return module.attention(*half, config).astype(query.dtype)


def matmul(left: Any, right: Any) -> Any:
    """Computes a dense product of [M, K] and [K, N], multiples of 256, 64 and 256."""
    module = _module("hopper_matmul_mgpu")
    config = module.TuningConfig(tile_m=128, tile_n=128, tile_k=64, max_concurrent_steps=4, grid_tile_width=8)
    return module.matmul(left, right, None, config)


_RAGGED = {"block_m": 128, "block_n": 128, "block_k": 64, "max_concurrent_steps": 4, "grid_block_n": 1}


def ragged_dot(rows: Any, weights: Any, sizes: Any, *, transposed: bool = False) -> Any:
    """Computes [M, K] by [G, K, N], or by [G, N, K] transposed, to [M, N]."""
    return _module("ragged_dot_mgpu").ragged_dot(rows, weights, group_sizes=sizes, transpose_rhs=transposed, **_RAGGED)


def transposed_ragged_dot(lhs: Any, dout: Any, sizes: Any) -> Any:
    """Computes [M, K] and [M, N] to [G, K, N]."""
    return _module("transposed_ragged_dot_mgpu").transposed_ragged_dot(lhs, dout, group_sizes=sizes, **_RAGGED)
