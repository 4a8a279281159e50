"""Computes attention in Pallas for Mosaic TPU: no T x S array is in main memory, in either direction.

The algorithm is FlashAttention-2 (Dao 2023, https://arxiv.org/abs/2307.08691).  Keys and values are never repeated for
the query heads that share them, the score program is evaluated tile by tile, and tiles that positions or, at run time,
side inputs prove dead are not visited.
"""

from __future__ import annotations

from autopallas.kernels.attention import tpu_backward, tpu_block_sizes, tpu_forward
from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.kernels.attention.operands import Cotangents, Gradients, Operands, Residuals, Results
from autopallas.kernels.attention.spec import AttentionSpec
from autopallas.kernels.attention.tpu_grid import geometry
from autopallas.kernels.tpu import MIB, generation, reason_against
from autopallas.numerics.classes import Numerics
from autopallas.sites.device import Device
from autopallas.sites.operation import Supported, Unsupported
from autopallas.sites.spec import Sizes

__all__ = ["NUMERICS", "backward", "candidates", "default_block_sizes", "forward", "running_sizes", "supports"]

NUMERICS: Numerics = "tolerance"
"""How its results relate to the original's."""


def supports(spec: AttentionSpec, device: Device) -> Supported | Unsupported:
    """Supports what Mosaic has the primitives and dtypes for; on other devices than TPUs only if interpreted."""
    if spec.statistics is not None:
        return Unsupported("it has a row program, whose statistics this implementation does not compute yet")
    programs = [spec.score, *(w.program for w in spec.inner_weights + spec.weights)]
    dtypes = [spec.query_dtype, spec.key_dtype, spec.value_dtype, spec.score_dtype, spec.result_dtype]
    dtypes += [side.dtype for side in spec.sides]
    if (reason := reason_against(device, programs, dtypes)) is not None:
        return reason
    known = generation(device)
    if tpu_block_sizes.fitting(spec, BlockSizes.get_default(), known) is None:
        return Unsupported(f"its smallest blocks do not fit into the {known.budget // MIB} MiB of vector memory")
    return Supported()


def candidates(spec: AttentionSpec, device: Device) -> tuple[BlockSizes, ...]:
    """Returns block sizes to try, best guess first, each within the vector memory of the device."""
    return tpu_block_sizes.candidates(spec, generation(device))


def default_block_sizes(spec: AttentionSpec, device: Device, known: BlockSizes | None) -> BlockSizes:
    """Returns ``known``, from other heads, or the first candidate, whichever certainly fits into vector memory."""
    return tpu_block_sizes.default(spec, generation(device), known)


def running_sizes(spec: AttentionSpec, block_sizes: BlockSizes, device: Device) -> Sizes:
    """Returns the sizes of the tiles that are computed, forward and backward; heads that are rows count as such."""
    shape = geometry(spec, _fitted(spec, block_sizes, device))
    return {"query_block": shape.query_block, "key_block": shape.key_block}


def _fitted(spec: AttentionSpec, block_sizes: BlockSizes, device: Device) -> BlockSizes:
    """Fits block sizes into the vector memory of a device."""
    return tpu_block_sizes.fitting(spec, block_sizes, generation(device)) or block_sizes


def forward(spec: AttentionSpec, block_sizes: BlockSizes, operands: Operands) -> Results:
    """Runs one kernel, and a second one on blocks of rows whose hidden tiles count."""
    return tpu_forward.forward(spec, _fitted(spec, block_sizes, Device.current()), operands)


def backward(
    spec: AttentionSpec, block_sizes: BlockSizes, operands: Operands, residuals: Residuals, cotangents: Cotangents
) -> Gradients:
    """Runs a kernel for each set of gradients that sum over the same tiles."""
    return tpu_backward.backward(spec, _fitted(spec, block_sizes, Device.current()), operands, residuals, cotangents)
