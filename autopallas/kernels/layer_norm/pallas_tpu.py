"""LayerNorm for Mosaic TPU: one kernel forward and one backward, each of which reads its rows once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import jax

from autopallas.kernels.layer_norm.operation import LayerNormSpec
from autopallas.kernels.row_moments_tpu import MomentsKernels
from autopallas.numerics.classes import Numerics
from autopallas.sites.device import Device
from autopallas.sites.operation import Supported, Unsupported
from autopallas.sites.spec import BlockSizes

__all__ = ["GAINS", "NUMERICS", "backward", "forward", "supports"]

NUMERICS: Numerics = "tolerance"
"""How its results relate to the original's."""
GAINS: tuple[str, ...] = ()
"""Nothing that a measurement by itself would show: alone it moves less than XLA does, but XLA computes norms within the
operations before and after them, which a kernel keeps apart."""
TILES = False
"""The kernels take as many rows at a time as fit into the VMEM."""

Arrays: TypeAlias = Mapping[str, jax.Array]
_KERNELS = MomentsKernels("layer_norm", centred=True)


def supports(spec: LayerNormSpec, device: Device) -> Supported | Unsupported:
    """bfloat16 and float32 on TPUs, and rows of which a few fit into VMEM."""
    return _KERNELS.supports(spec, device)


def forward(spec: LayerNormSpec, block_sizes: BlockSizes, operands: Arrays) -> jax.Array:
    """Returns the result, [B, M, N]."""
    return _KERNELS.forward(spec, operands)


def backward(
    spec: LayerNormSpec, block_sizes: BlockSizes, operands: Arrays, cotangent: jax.Array, wanted: frozenset[str]
) -> dict[str, jax.Array]:
    """Returns the cotangents of the operands named in ``wanted``."""
    return _KERNELS.backward(spec, operands, cotangent, wanted)
