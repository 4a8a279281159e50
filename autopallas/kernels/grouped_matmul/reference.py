"""Grouped matmul as it is written down: the oracle of the tests, and an implementation for whoever wants to read along.

Every group meets every row, with zeros in the place of the rows that it does not own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp

from autopallas.kernels.accumulation import einsum
from autopallas.kernels.grouped_matmul.block_sizes import BlockSizes
from autopallas.kernels.grouped_matmul.operands import Gradients, Operands
from autopallas.kernels.grouped_matmul.spec import GroupedMatmulSpec
from autopallas.numerics.classes import Numerics
from autopallas.sites.device import Device
from autopallas.sites.operation import Supported, Unsupported

__all__ = ["NUMERICS", "backward", "forward", "supports"]

NUMERICS: Numerics = "tolerance"
"""How its results relate to the original's."""

Array: TypeAlias = jax.Array

EPILOGUES = True
"""Whether ``forward`` takes a spec with an epilogue; those that do not say so are given none."""


def supports(spec: GroupedMatmulSpec, device: Device) -> Supported | Unsupported:
    """Everything, everywhere."""
    return Supported()


def forward(spec: GroupedMatmulSpec, block_sizes: BlockSizes | None, operands: Operands) -> Array:
    """This is the formula of :class:`GroupedMatmulSpec`, line by line."""
    first, second, group_sizes, _ = operands
    dtype = spec.accumulation_dtype
    row = jnp.arange(spec.rows, dtype=group_sizes.dtype)
    end = jnp.cumsum(group_sizes, axis=-1, dtype=group_sizes.dtype)
    start = end - group_sizes

    def owned(x: Array, g: Array | int) -> Array:
        """[B, M, ...] with zeros in the rows that are not of group g."""
        inside = (row >= start[:, g, None]) & (row < end[:, g, None])
        return jnp.where(inside[..., None], x, 0)

    equation = {"forward": "bmk,bkn->bmn", "dlhs": "bmn,bkn->bmk", "drhs": "bmk,bmn->bkn"}[spec.use]
    parts = []
    for g in range(spec.groups):
        other = owned(second, g) if spec.use == "drhs" else second[:, g]
        parts.append(einsum(equation, owned(first, g), other, dtype, spec.precision))
    result = jnp.stack(parts, axis=1) if spec.use == "drhs" else sum(parts[1:], parts[0])
    return spec.finished(jnp.broadcast_to(result, (spec.batch, *spec.result_shape())).astype(spec.result_dtype))


def backward(
    spec: GroupedMatmulSpec,
    block_sizes: BlockSizes | None,
    operands: Operands,
    cotangent: Array,
    wanted: Sequence[bool] = (True, True),
) -> Gradients:
    """``jax.vjp`` of :func:`forward` gives the gradients."""
    first, second, group_sizes, _ = operands
    _, pull = jax.vjp(lambda a, b: forward(spec.product, block_sizes, Operands(a, b, group_sizes)), first, second)
    dfirst, dsecond = pull(cotangent)
    return Gradients(dfirst if wanted[0] else None, dsecond if wanted[1] else None)
