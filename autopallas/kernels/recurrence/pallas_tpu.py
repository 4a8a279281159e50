"""Recurrences for Mosaic TPU: the loop over chunks is the grid of one kernel, and states stay in VMEM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax

from autopallas.kernels.recurrence import directions
from autopallas.kernels.recurrence.block_sizes import BlockSizes
from autopallas.kernels.recurrence.spec import RecurrenceSpec
from autopallas.kernels.recurrence.tpu_kernels import Layout, by_kernels
from autopallas.kernels.tpu import generation, reason_against
from autopallas.numerics.classes import Numerics
from autopallas.sites.device import Device
from autopallas.sites.operation import Supported, Unsupported

if TYPE_CHECKING:
    from autopallas.kernels.recurrence.site import RecurrenceSite

__all__ = ["NUMERICS", "backward", "candidates", "default_block_sizes", "forward", "supports"]

NUMERICS: Numerics = "tolerance"
"""How its results relate to the original's."""

_CHUNKS, _SHORTER_CHUNKS = (128, 64), (64, 32)
"""Steps of a chunk to try: with one decay for each head, and where a chunk takes products for each size of blocks."""


def supports(spec: RecurrenceSpec, device: Device) -> Supported | Unsupported:
    """Matrix states in float32, of which one fits into the vector memory with its chunks."""
    if (answer := reason_against(device, (), (spec.state_dtype, spec.result_dtype))) is not None:
        return answer
    if not spec.is_matrix:
        return Unsupported("no products compute several steps of its state at once")
    if spec.accumulation_dtype.name != "float32":
        return Unsupported(f"TPUs do not compute in {spec.accumulation_dtype}")
    if not candidates(spec, device):
        return Unsupported(f"a state of {spec.rows} x {spec.columns} and its chunks do not fit into the vector memory")
    return Supported()


def candidates(spec: RecurrenceSpec, device: Device) -> tuple[BlockSizes, ...]:
    """Returns what a search should try, best guess first."""
    budget = generation(device).budget
    sizes = _CHUNKS if spec.decay == "scalar" and not spec.delta else _SHORTER_CHUNKS
    offered = dict.fromkeys(BlockSizes("chunked", "chunked", size).fitted(spec) for size in sizes)
    by_channel = spec.decay == "channel"
    layouts = {own: Layout(own.chunk, spec.rows, spec.columns, by_channel, spec.delta) for own in offered}
    return tuple(own for own, layout in layouts.items() if layout.heads_of_block(1, budget))


def default_block_sizes(spec: RecurrenceSpec, device: Device, known: BlockSizes | None) -> BlockSizes:
    """Returns those of a row where they fit into the vector memory, and else the best guess."""
    offered = candidates(spec, device)
    wanted = None if known is None else known.fitted(spec)
    return wanted if wanted is not None and (wanted in offered or not offered) else offered[0]


def forward(site: RecurrenceSite, block_sizes: BlockSizes, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the last carried values and the stacked results."""
    return directions.forward(by_kernels, site, block_sizes, operands)


def backward(
    site: RecurrenceSite,
    block_sizes: BlockSizes,
    operands: Sequence[jax.Array],
    cotangents: Sequence[jax.Array],
    active: Sequence[int],
) -> tuple[jax.Array, ...]:
    """Returns the cotangents of the operands at the positions ``active``."""
    return directions.backward(by_kernels, site, block_sizes, operands, cotangents, active)
