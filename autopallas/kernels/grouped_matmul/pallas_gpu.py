"""Grouped matmul for Mosaic GPU: persistent kernels for Hopper's TMA and wgmma over tiles that start where groups do.

A tile of rows belongs to one group, as in MegaBlocks (Gale et al. 2022, https://arxiv.org/abs/2211.15841), and needs no
padding: it starts where its group does, rounded down to the 8 rows that TMA moves together, and of a group's first and
last tile only its own rows are stored.  Rows that no group owns are a segment of their own, whose sum has no terms.

Arrays are padded where K or N are no multiples of 64, or the rows none of 8: TMA's swizzled tiles are whole.

Letters: B batch, M rows, K and N the weights' two sides, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp

from autopallas.kernels.gpu import MATRIX_DTYPES, reason_against, rounded
from autopallas.kernels.grouped_matmul import xla
from autopallas.kernels.grouped_matmul.block_sizes import BlockSizes
from autopallas.kernels.grouped_matmul.gpu_tiles import PART, Tile
from autopallas.kernels.grouped_matmul.gpu_visits import ALIGNED, group_bounds, visits
from autopallas.kernels.grouped_matmul.operands import Gradients, Operands
from autopallas.kernels.grouped_matmul.spec import GroupedMatmulSpec, ProductSpec
from autopallas.numerics.classes import Numerics
from autopallas.sites.device import Device
from autopallas.sites.operation import Supported, Unsupported
from autopallas.sites.spec import Sizes

__all__ = ["NUMERICS", "backward", "candidates", "forward", "running_sizes", "supports"]

NUMERICS: Numerics = "tolerance"
"""How its results relate to the original's."""

Array: TypeAlias = jax.Array

EPILOGUES = True
"""Whether ``forward`` takes a spec with an epilogue; those that do not say so are given none."""


def supports(spec: GroupedMatmulSpec, device: Device) -> Supported | Unsupported:
    """bfloat16 or float16, on H100s; results in these or in float32."""
    if (answer := reason_against(device, [spec.first_dtype, spec.second_dtype], held=[spec.result_dtype])) is not None:
        return answer
    if not spec.assume_finite:
        return Unsupported("assume_finite is off: an inf or NaN in one group's weights would not reach other groups")
    return Supported()


def candidates(spec: ProductSpec, device: Device) -> tuple[BlockSizes, ...]:
    """What a search should try, best guess first; what is left open is what :class:`Tile` begins with."""
    rows = (128, 64) if spec.rows_per_group > 64 else (64, 128)
    blocks = [(0, 0), *((inner, 128) for inner in (64, 128) if max(spec.contracting, spec.columns) >= 128)]
    return tuple(dict.fromkeys(BlockSizes(n, *block).fitted(spec) for n in rows for block in blocks))


def running_sizes(spec: GroupedMatmulSpec, block_sizes: BlockSizes, device: Device) -> Sizes:
    """The tile of the kernel."""
    if not _is_multiplied(spec):
        return xla.running_sizes(spec, block_sizes.fitted(spec), device)
    tile = Tile.of(spec, block_sizes)
    return {"row_block": tile.rows, "inner_block": tile.inner, "column_block": tile.columns}


def _is_multiplied(spec: GroupedMatmulSpec) -> bool:
    """Whether wgmma multiplies the operands as they are: what is not of 16 bits is not cut to them."""
    return spec.first_dtype == spec.second_dtype and spec.first_dtype.name in MATRIX_DTYPES


def forward(spec: GroupedMatmulSpec, block_sizes: BlockSizes, operands: Operands) -> Array:
    """One kernel computes it: that of rows by weights, or that of the weights' gradient."""
    if not _is_multiplied(spec):  # in a mixture of experts, or a gradient
        return xla.forward(spec, block_sizes.fitted(spec), operands)
    if spec.epilogue is not None and reason_against(Device.current(), programs=[spec.epilogue]) is not None:
        return spec.finished(forward(spec.product, block_sizes, operands))
    sizes = jnp.broadcast_to(operands.group_sizes, (spec.batch, spec.groups))
    kernel = _weights if spec.use == "drhs" else _rows
    return kernel(spec, block_sizes, operands._replace(group_sizes=sizes))


def backward(
    spec: GroupedMatmulSpec,
    block_sizes: BlockSizes,
    operands: Operands,
    cotangent: Array,
    wanted: Sequence[bool] = (True, True),
) -> Gradients:
    """Each gradient is one of the other two uses."""
    return xla.gradients(forward, spec, block_sizes, operands, cotangent, wanted)


def _rows(spec: GroupedMatmulSpec, sizes: BlockSizes, operands: Operands) -> Array:
    """[B|1, M, K] by [B|1, G, K, N] to [B, M, N]; for "dlhs" [B|1, M, N] by [B|1, G, K, N] to [B, M, K]."""
    from autopallas.kernels.grouped_matmul.gpu_kernels import rows_call

    rows, weights, group_sizes, scales = operands
    tile, total = Tile.of(spec, sizes), spec.batch * spec.rows
    flat = _flat(spec, rows)
    held = _padded(weights.reshape(-1, *weights.shape[2:]), (1, PART, PART))
    columns = held.shape[2 if spec.use == "forward" else 1]
    tables = visits(group_sizes, spec.rows, tile.rows)
    kernel = rows_call(spec, tile, flat.shape[0], columns)
    out = kernel(tables.table, tables.number, tables.bounds, flat, held)
    return out[:total, : spec.result_shape()[1]].reshape(spec.batch, *spec.result_shape())


def _weights(spec: GroupedMatmulSpec, sizes: BlockSizes, operands: Operands) -> Array:
    """[B|1, M, K] by [B|1, M, N] to [B, G, K, N]."""
    from autopallas.kernels.grouped_matmul.gpu_kernels import weights_call

    lhs, dout = _flat(spec, operands.first), _flat(spec, operands.second)
    bounds = group_bounds(operands.group_sizes, spec.rows).reshape(-1, 2)
    kernel = weights_call(spec, Tile.of(spec, sizes), len(lhs), len(bounds), lhs.shape[1], dout.shape[1])
    out = kernel(bounds, lhs, dout)
    return out[:, : spec.contracting, : spec.columns].reshape(spec.batch, *spec.result_shape())


def _flat(spec: GroupedMatmulSpec, rows: Array) -> Array:
    """The examples' rows one behind the other, [B M, ...]."""
    every = jnp.broadcast_to(rows, (spec.batch, *rows.shape[1:]))
    return _padded(every.reshape(-1, rows.shape[2]), (ALIGNED, PART))


def _padded(array: Array, multiples: Sequence[int]) -> Array:
    """With zeros behind each axis up to a multiple; the array itself where there is nothing to add."""
    added = [rounded(n, multiple) - n for n, multiple in zip(array.shape, multiples, strict=True)]
    return jnp.pad(array, [(0, n) for n in added]) if any(added) else array
