"""Gated MLPs for Mosaic TPU: one kernel has both projections of a tile, and what is computed of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import jax

from autopallas.kernels.gated_mlp import xla_products
from autopallas.kernels.gated_mlp.operation import OPERATION, GatedMlpSpec
from autopallas.kernels.gated_mlp.tpu_units import Tile, Units
from autopallas.kernels.tpu import generation, reason_against
from autopallas.numerics.classes import Numerics
from autopallas.sites.device import Device
from autopallas.sites.operation import Supported, Unsupported
from autopallas.sites.spec import BlockSizes, Sizes

__all__ = ["GAINS", "NUMERICS", "backward", "candidates", "forward", "running_sizes", "supports"]

NUMERICS: Numerics = "tolerance"
"""How its results relate to the original's."""
GAINS = ("memory",)
"""What it is for: XLA evaluates the activation within the second projection, and is as fast where it keeps both."""

Arrays: TypeAlias = Mapping[str, jax.Array]
_MATRIX_DTYPES = ("bfloat16", "float32")


def supports(spec: GatedMlpSpec, device: Device) -> Supported | Unsupported:
    """bfloat16 and float32 on TPUs, and programs that Mosaic has, with their derivatives."""
    if (answer := reason_against(device, xla_products.programs_of(spec), spec.dtypes())) is not None:
        return answer
    for dtype in spec.dtypes():
        if dtype.name not in _MATRIX_DTYPES:
            return Unsupported(f"TPUs' matrix units take {' and '.join(_MATRIX_DTYPES)}, not {dtype}")
    return Supported()


def candidates(spec: GatedMlpSpec, device: Device) -> tuple[BlockSizes, ...]:
    """Returns what a search should try, best guess first; columns and what is summed over at a time follow from the
    VMEM."""
    kind = OPERATION.part("block_sizes").BlockSizes
    sizes = [size for size in (1024, 512, 2048, 256) if size < spec.rows * spec.batch]
    return tuple(kind(rows=size) for size in sizes or [512])


def running_sizes(spec: GatedMlpSpec, block_sizes: BlockSizes, device: Device) -> Sizes:
    """Returns the rows of the forward's tiles; those of a model with weights of its own end with the model's rows."""
    wanted, budget = int(block_sizes.to_dict()["rows"]), generation(device).budget
    tile = Tile.of(spec, wanted, spec.batch * spec.rows, [xla_products.unit_dtype(spec)], 0, budget)
    return {"rows": tile.rows}


def forward(spec: GatedMlpSpec, block_sizes: BlockSizes, operands: Arrays) -> jax.Array:
    """Returns the result, [B, M, N], or [B, M, H] without ``down``."""
    return xla_products.forward(spec, operands, Units.of(spec, block_sizes, operands).call)


def backward(
    spec: GatedMlpSpec, block_sizes: BlockSizes, operands: Arrays, cotangent: jax.Array, wanted: frozenset[str]
) -> dict[str, jax.Array]:
    """Returns the cotangents of the operands named in ``wanted``."""
    return xla_products.backward(spec, operands, cotangent, wanted, Units.of(spec, block_sizes, operands).call)
