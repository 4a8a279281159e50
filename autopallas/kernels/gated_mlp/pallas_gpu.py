"""Gated MLPs for Mosaic GPU: one kernel for Hopper's TMA and wgmma has both projections of a tile of hidden units.

The hidden units are computed without an array for either projection.  The product that follows is XLA's, and so is the
backward, which computes both projections again: nothing of the size of the hidden units lives between forward and
backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp

from autopallas.compat import Dtype
from autopallas.kernels.gated_mlp import xla, xla_products
from autopallas.kernels.gated_mlp.operation import OPERATION, GatedMlpSpec
from autopallas.kernels.gated_mlp.xla import VECTORS
from autopallas.kernels.gpu import reason_against
from autopallas.numerics.classes import Numerics
from autopallas.sites.device import Device
from autopallas.sites.elementwise import ElementwiseProgram
from autopallas.sites.elementwise_gradients import without_rules
from autopallas.sites.operation import Supported, Unsupported
from autopallas.sites.spec import BlockSizes

__all__ = ["NUMERICS", "backward", "candidates", "forward", "supports"]

NUMERICS: Numerics = "tolerance"
"""How its results relate to the original's."""
TILES = False
"""The tile follows from the registers that two accumulators leave."""

Arrays: TypeAlias = Mapping[str, jax.Array]


def supports(spec: GatedMlpSpec, device: Device) -> Supported | Unsupported:
    """bfloat16 or float16 on Hopper GPUs, activations that Mosaic GPU has, and no vectors, such as biases."""
    multiplied = [spec.x_dtype, spec.gate_dtype, spec.up_dtype]
    programs = [without_rules(spec.program)]
    if (answer := reason_against(device, multiplied, programs, [xla_products.unit_dtype(spec)])) is not None:
        return answer
    if vectors := [name for name in VECTORS if getattr(spec, f"{name}_dtype") is not None]:
        return Unsupported(f"its GPU kernel reads no {' or '.join(vectors)}")
    return Supported()


def candidates(spec: GatedMlpSpec, device: Device) -> tuple[BlockSizes, ...]:
    """There is one; its rows are those of the backward's blocks."""
    return (OPERATION.part("block_sizes").BlockSizes(rows=2**30),)


def forward(spec: GatedMlpSpec, block_sizes: BlockSizes, operands: Arrays) -> jax.Array:
    """Returns the result, [B, M, N], or [B, M, H] without ``down``."""
    from autopallas.kernels.gated_mlp.gpu_units import units

    def compute(
        programs: Sequence[ElementwiseProgram], dtypes: Sequence[Dtype | None], cotangent: jax.Array | None, reuse: bool
    ) -> list[jax.Array]:
        (program,), (dtype,) = programs, dtypes
        assert dtype is not None
        x, gate, up = (operands[name] for name in ("x", "gate", "up"))
        models = max(gate.shape[0], up.shape[0])
        x = jnp.broadcast_to(x, (spec.batch, *x.shape[1:])).reshape(models, -1, spec.features)
        gate, up = (jnp.broadcast_to(weight, (models, *weight.shape[1:])) for weight in (gate, up))
        found = units(program, dtype, x, gate, up)
        return [found.reshape(spec.batch, spec.rows, spec.hidden)]

    return xla_products.forward(spec, operands, compute)


def backward(
    spec: GatedMlpSpec, block_sizes: BlockSizes, operands: Arrays, cotangent: jax.Array, wanted: frozenset[str]
) -> dict[str, jax.Array]:
    """Returns the cotangents of the operands named in ``wanted``, of all rows at once."""
    return xla.backward(spec, None, operands, cotangent, wanted)
