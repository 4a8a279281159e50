"""Computes attention in Pallas for Mosaic GPU, on an H100: no T x S array is in main memory, in either direction.

The algorithm is FlashAttention-2 (Dao 2023, https://arxiv.org/abs/2307.08691).  Keys and values are never repeated for
the query heads that share them, the score program is evaluated on the accumulator of wgmma, and tiles that positions
or, at run time, side inputs prove dead are not visited.
"""

from __future__ import annotations

import numpy as np

from autopallas.kernels.attention import gpu_block_sizes
from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.kernels.attention.operands import Cotangents, Gradients, Operands, Residuals, Results
from autopallas.kernels.attention.spec import AttentionSpec
from autopallas.kernels.gpu import PROGRAM_PRIMITIVES, reason_against
from autopallas.numerics.classes import Numerics
from autopallas.sites.device import Device
from autopallas.sites.operation import Supported, Unsupported
from autopallas.sites.spec import Sizes

__all__ = ["NUMERICS", "backward", "candidates", "default_block_sizes", "forward", "running_sizes", "supports"]

NUMERICS: Numerics = "tolerance"
"""How its results relate to the original's."""


def supports(spec: AttentionSpec, device: Device) -> Supported | Unsupported:
    """Supports 16-bit operands on an H100, if Mosaic GPU has the programs' primitives; elsewhere only interpreted."""
    from autopallas.kernels.attention.gpu_elements import primitives
    from autopallas.kernels.attention.gpu_grid import head_size_of

    if spec.statistics is not None:
        return Unsupported("it has a row program, whose statistics this implementation does not compute yet")
    programs = [spec.score, *(w.program for w in spec.inner_weights + spec.weights)]
    held = [spec.score_dtype, spec.result_dtype, *(side.dtype for side in spec.sides)]
    operands = [spec.query_dtype, spec.key_dtype, spec.value_dtype]
    if (reason := reason_against(device, operands, programs, held)) is not None:
        return reason
    for size in (spec.head_size, spec.value_head_size):
        if head_size_of(size) is None:
            return Unsupported(f"it holds heads of up to 256 numbers in registers, not of {size}")
    if min(spec.query_length, spec.key_length, spec.batch) < 1:
        return Unsupported("there is nothing to compute")
    multiplied = any(w.kind == "multiply" for w in spec.inner_weights + spec.weights)
    if multiplied and spec.value_dtype == np.float16:
        return Unsupported("probabilities times weights may leave the range of float16")
    if missing := sorted(primitives(spec) - PROGRAM_PRIMITIVES):
        return Unsupported(f"Mosaic GPU has no {', '.join(missing)}")
    if any(s.differentiable and s.varies[2] and s.varies[4] and not s.varies[3] for s in spec.sides):
        return Unsupported("it has no gradient for a side input with a number for each key and query head of a group")
    return Supported()


def candidates(spec: AttentionSpec, device: Device) -> tuple[BlockSizes, ...]:
    """Returns block sizes to try, best guess first."""
    return gpu_block_sizes.candidates(spec, device)


def default_block_sizes(spec: AttentionSpec, device: Device, known: BlockSizes | None) -> BlockSizes:
    """Returns ``known``, from other heads, as far as these heads allow it, else the first candidate."""
    return gpu_block_sizes.default(spec, known, device).fitted(spec)


def running_sizes(spec: AttentionSpec, block_sizes: BlockSizes, device: Device) -> Sizes:
    """Returns the sizes of the forward's tiles; those of the backward follow from the registers alone."""
    return gpu_block_sizes.fitting(spec, block_sizes, device).to_dict()


def forward(spec: AttentionSpec, block_sizes: BlockSizes, operands: Operands) -> Results:
    """Runs one kernel; where block sizes divide the keys of few queries, plain JAX joins what it gives."""
    from autopallas.kernels.attention import gpu_few_queries, gpu_forward

    if gpu_block_sizes.divided(spec, block_sizes) is not None:
        return gpu_few_queries.forward(spec, block_sizes, operands)
    return gpu_forward.forward(spec, block_sizes, operands)


def backward(
    spec: AttentionSpec, block_sizes: BlockSizes, operands: Operands, residuals: Residuals, cotangents: Cotangents
) -> Gradients:
    """Runs a kernel for each set of gradients that sum over the same tiles."""
    from autopallas.kernels.attention import gpu_backward

    return gpu_backward.backward(spec, block_sizes, operands, residuals, cotangents)
