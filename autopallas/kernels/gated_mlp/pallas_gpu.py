"""Gated MLPs for Mosaic GPU: one kernel for Hopper's TMA and wgmma has both projections of a tile of hidden units.

The hidden units are computed without an array for either projection.  The products with one more matrix are XLA's.  The
backward computes both projections again in the same kernel, and their cotangents from them: nothing of the size of the
hidden units lives between forward and backward.  The cotangents of biases are sums of these over the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp

from autopallas.compat import Dtype
from autopallas.kernels.gated_mlp import xla, xla_products
from autopallas.kernels.gated_mlp.operation import OPERATION, GatedMlpSpec
from autopallas.kernels.gated_mlp.xla import VECTORS
from autopallas.kernels.gpu import reason_against, reason_against_programs
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
    """bfloat16 or float16 on Hopper GPUs, and activations that Mosaic GPU has."""
    multiplied = [spec.x_dtype, spec.gate_dtype, spec.up_dtype]
    vectors = [dtype for name in VECTORS if (dtype := getattr(spec, f"{name}_dtype")) is not None]
    programs = [without_rules(spec.program)]
    held = [xla_products.unit_dtype(spec), *vectors]
    return reason_against(device, multiplied, programs, held) or Supported()


def candidates(spec: GatedMlpSpec, device: Device) -> tuple[BlockSizes, ...]:
    """There is one; its rows are those of the backward's blocks."""
    return (OPERATION.part("block_sizes").BlockSizes(rows=2**30),)


def forward(spec: GatedMlpSpec, block_sizes: BlockSizes, operands: Arrays) -> jax.Array:
    """Returns the result, [B, M, N], or [B, M, H] without ``down``."""
    return xla_products.forward(spec, operands, partial(_values, spec, operands))


def backward(
    spec: GatedMlpSpec, block_sizes: BlockSizes, operands: Arrays, cotangent: jax.Array, wanted: frozenset[str]
) -> dict[str, jax.Array]:
    """Returns the cotangents of the operands named in ``wanted``, of all rows at once.

    XLA computes them where the cotangents of the projections are wider than the hidden units: a product with them is
    none of bfloat16 or float16.
    """
    narrow = {spec.x_dtype, spec.gate_dtype, spec.up_dtype} == xla_products.stored_dtypes(spec)
    programs = xla_products.programs_of(spec)
    if not narrow or spec.precision is not None or reason_against_programs(programs) is not None:
        return xla.backward(spec, None, operands, cotangent, wanted)
    return xla_products.backward(spec, operands, cotangent, wanted, partial(_values, spec, operands))


def _values(
    spec: GatedMlpSpec,
    operands: Arrays,
    programs: Sequence[ElementwiseProgram],
    dtypes: Sequence[Dtype | None],
    cotangent: jax.Array | None,
    reuse: bool,
) -> list[jax.Array]:
    """Returns the values of programs as :class:`xla_products.Compute` has them, all of one dtype.

    XLA adds up the stored values of those that are summed over the rows; the cotangent of a bias is mostly that of its
    projection, which is stored anyway.
    """
    from autopallas.kernels.gated_mlp.gpu_units import units

    (dtype,) = {dtype for dtype in dtypes if dtype is not None} or {xla_products.unit_dtype(spec)}
    x, gate, up = (operands[name] for name in ("x", "gate", "up"))
    vectors = [operands.get(name) for name in VECTORS]
    models = max(array.shape[0] for array in (gate, up, *vectors) if array is not None)

    def rows_of(array: jax.Array) -> jax.Array:
        return jnp.broadcast_to(array, (spec.batch, *array.shape[1:])).reshape(models, -1, array.shape[2])

    gate, up = (jnp.broadcast_to(weight, (models, *weight.shape[1:])) for weight in (gate, up))
    given = None if cotangent is None else rows_of(cotangent)
    different = list(dict.fromkeys(programs))
    values = dict(zip(different, units(different, dtype, rows_of(x), gate, up, vectors, given), strict=True))
    return [
        values[program].astype(jnp.float32).sum(1)
        if kind is None
        else values[program].reshape(spec.batch, spec.rows, spec.hidden)
        for program, kind in zip(programs, dtypes, strict=True)
    ]
