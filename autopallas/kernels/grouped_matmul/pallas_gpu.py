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

from autopallas.kernels.gpu import MATRIX_DTYPES, reason_against, reason_against_programs, rounded
from autopallas.kernels.grouped_matmul import xla
from autopallas.kernels.grouped_matmul.block_sizes import STORED, BlockSizes
from autopallas.kernels.grouped_matmul.gpu_tiles import PART, WIDEST, Tile
from autopallas.kernels.grouped_matmul.gpu_visits import ALIGNED, group_bounds, visits
from autopallas.kernels.grouped_matmul.operands import Gradients, Operands
from autopallas.kernels.grouped_matmul.spec import GroupedMatmulSpec, ProductSpec
from autopallas.numerics.classes import Numerics
from autopallas.sites.device import Device
from autopallas.sites.elementwise import ElementwiseProgram, Score
from autopallas.sites.operation import Supported, Unsupported
from autopallas.sites.spec import Sizes

__all__ = ["NUMERICS", "backward", "candidates", "forward", "running_sizes", "supports"]

NUMERICS: Numerics = "tolerance"
"""How its results relate to the original's."""

Array: TypeAlias = jax.Array

EPILOGUES = True
"""Whether ``forward`` takes a spec with an epilogue; those that do not say so are given none."""

WIDENS = True
"""Whether ``forward`` takes weights as they are stored; those that do not say so are given them as they are multiplied.
"""

_STORED_DTYPES = ("float8_e4m3fn", "float8_e5m2")
"""Dtypes of 8 bits that the kernel widens: each of their numbers is one of bfloat16 and of float16."""


def supports(spec: GroupedMatmulSpec, device: Device) -> Supported | Unsupported:
    """bfloat16 or float16, on H100s; results in these or in float32."""
    if (answer := reason_against(device, [spec.first_dtype, spec.second_dtype], held=[spec.result_dtype])) is not None:
        return answer
    if not spec.assume_finite:
        return Unsupported("assume_finite is off: an inf or NaN in one group's weights would not reach other groups")
    return Supported()


def candidates(spec: ProductSpec, device: Device) -> tuple[BlockSizes, ...]:
    """Returns what a search should try, best guess first; what is left open is what :class:`Tile` begins with."""
    rows = (128, 64) if spec.rows_per_group > 64 else (64, 128)
    blocks = [(0, 0), *((inner, 128) for inner in (64, 128) if max(spec.contracting, spec.columns) >= 128)]
    found = [BlockSizes(n, *block).fitted(spec) for n in rows for block in blocks]
    if isinstance(spec, GroupedMatmulSpec) and _is_widened(spec):
        found[1:1] = [BlockSizes(n, weights=STORED).fitted(spec) for n in rows]
    return tuple(dict.fromkeys(found))


def running_sizes(spec: GroupedMatmulSpec, block_sizes: BlockSizes, device: Device) -> Sizes:
    """Returns the tile of the kernel."""
    if not _is_multiplied(spec):
        return xla.running_sizes(spec, block_sizes.fitted(spec), device)
    stored = block_sizes.weights == STORED and _is_widened(spec)
    tile = Tile.of(spec if stored else spec.widened, block_sizes)
    sizes: Sizes = {"row_block": tile.rows, "inner_block": tile.inner, "column_block": tile.columns}
    return {**sizes, "weights": STORED} if stored else sizes


def _is_multiplied(spec: GroupedMatmulSpec) -> bool:
    """Whether wgmma multiplies the operands as they are: what is not of 16 bits is not cut to them."""
    return spec.first_dtype == spec.second_dtype and spec.first_dtype.name in MATRIX_DTYPES


def _is_widened(spec: GroupedMatmulSpec) -> bool:
    """Whether the kernel can make of weights of 8 bits those that are multiplied, as the program does.

    In the program's first step each stored number becomes one of more bits; what it does in 8 bits is left to XLA.  Of
    scales those that vary from weight to weight along one side fit into registers, and those of blocks of at least 64.
    """
    program = spec.widening
    if program is None or not _is_multiplied(spec) or spec.stored_dtype.name not in _STORED_DTYPES:
        return False
    for _, *numbers in spec.scales:
        each = [size // number for size, number in zip((spec.contracting, spec.columns), numbers, strict=True)]
        blocks = [one for one, number in zip(each, numbers, strict=True) if one > 1 and number > 1]
        if (each == [1, 1] and 1 not in numbers) or any(one % PART for one in blocks):
            return False
    scores = {number for number, given in enumerate(program.inputs) if isinstance(given, Score)}
    first = [i.primitive.name for i in program.instructions if not scores.isdisjoint(i.arguments)]
    later = ElementwiseProgram(tuple(i for i in program.inputs if not isinstance(i, Score)), program.instructions, 0)
    return set(first) == {"convert_element_type"} and reason_against_programs([later]) is None


def forward(spec: GroupedMatmulSpec, block_sizes: BlockSizes, operands: Operands) -> Array:
    """One kernel computes it: that of rows by weights, or that of the weights' gradient."""
    if spec.widening is not None:
        shared = operands.second.shape[0]  # what examples share has scales that they share
        together = all(scale.shape[0] in (1, shared) for scale in operands.scales)
        if block_sizes.weights != STORED or not together or not _is_widened(spec):
            widened = operands._replace(second=spec.widen(operands.second, operands.scales), scales=())
            return forward(spec.widened, block_sizes, widened)
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
    given = [_scale(spec, weights.shape[0], *both) for both in zip(scales, spec.scales, strict=True)]
    out = kernel(tables.table, tables.number, tables.bounds, flat, held, *given)
    return out[:total, : spec.result_shape()[1]].reshape(spec.batch, *spec.result_shape())


def _weights(spec: GroupedMatmulSpec, sizes: BlockSizes, operands: Operands) -> Array:
    """[B|1, M, K] by [B|1, M, N] to [B, G, K, N]."""
    from autopallas.kernels.grouped_matmul.gpu_kernels import weights_call

    lhs, dout = _flat(spec, operands.first), _flat(spec, operands.second)
    bounds = group_bounds(operands.group_sizes, spec.rows).reshape(-1, 2)
    kernel = weights_call(spec, Tile.of(spec, sizes), len(lhs), len(bounds), lhs.shape[1], dout.shape[1])
    out = kernel(bounds, lhs, dout)
    return out[:, : spec.contracting, : spec.columns].reshape(spec.batch, *spec.result_shape())


def _scale(spec: GroupedMatmulSpec, batch: int, scale: Array, numbers: tuple[int, int, int]) -> Array:
    """A scale of [B|1, G|1, blocks of K, blocks of N] as the kernel reads it: float32, with B and G as one axis, and
    that side last along which it varies from weight to weight.

    Threads read it, up to the end of the last tile, and not TMA, which would leave out what is behind the end.
    """
    wide = jnp.broadcast_to(scale.astype(jnp.float32), (batch, spec.groups, *scale.shape[2:]))
    flat = wide.reshape(batch * spec.groups, *scale.shape[2:])
    side = spec.varying_side(numbers)
    return flat if side is None else _padded(flat.swapaxes(1, 2) if side == 0 else flat, (1, 1, WIDEST))


def _flat(spec: GroupedMatmulSpec, rows: Array) -> Array:
    """The examples' rows one behind the other, [B M, ...]."""
    every = jnp.broadcast_to(rows, (spec.batch, *rows.shape[1:]))
    return _padded(every.reshape(-1, rows.shape[2]), (ALIGNED, PART))


def _padded(array: Array, multiples: Sequence[int]) -> Array:
    """With zeros behind each axis up to a multiple; the array itself where there is nothing to add."""
    added = [rounded(n, multiple) - n for n, multiple in zip(array.shape, multiples, strict=True)]
    return jnp.pad(array, [(0, n) for n in added]) if any(added) else array
