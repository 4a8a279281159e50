"""Chooses block sizes of the TPU kernels, by an estimate of vector memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.kernels.attention.spec import AttentionSpec, SideSpec
from autopallas.kernels.attention.tpu_grid import geometry
from autopallas.kernels.attention.tpu_operands import Block, columns_block, number_block, rows_block, side_block, stored
from autopallas.kernels.tpu import LANES, MIB, Generation, block_bytes

__all__ = ["candidates", "default", "fitting", "vmem_bytes"]

F32 = np.dtype(np.float32)


class _Kept(NamedTuple):
    """What the compiler keeps in vector memory besides blocks and accumulators, fitted to its reports.

    Attributes:
      numbers: numbers for each query, each across all lanes.
      tiles: tiles of float32, without the part in registers.
      registers: bytes of a tile in registers.
    """

    numbers: float
    tiles: float
    registers: int = 1 * MIB


_KEPT = {
    "forward": {"v4": _Kept(5.5, 0.75, 0), "later": _Kept(5.0, 0.75)},
    "query": {"v4": _Kept(3.5, 0.95, 0), "later": _Kept(2.25, 0.55), "v7x": _Kept(1.0, 0.5)},
    "key_value": {"v4": _Kept(0.0, 1.15, 0), "later": _Kept(0.0, 0.75)},
}
"""By kernel and generation, fitted with head size 128 and tiles of 512 x 512, 1024 x 1024 and 512 x 2048."""

_UNCERTAINTY = 1.25
"""Largest ratio of estimate and budget with which sizes are tried: nothing that may fit is left out."""
_CERTAINTY = 1.5
"""If a generation offers 16 MiB: ratio of budget and estimate with which sizes certainly fit, also with side inputs."""

_PREFERRED = ((1024, 1024), (512, 2048), (1024, 2048), (512, 1024), (512, 512), (256, 512), (256, 256), (128, 128))


def vmem_bytes(spec: AttentionSpec, block_sizes: BlockSizes, generation: Generation) -> dict[str, int]:
    """Estimates the vector memory of each kernel: "forward", "query", "key_value".

    Blocks of inputs and outputs count twice, accumulators once; the rest is fitted to the compiler's reports.
    """
    shape = geometry(spec, block_sizes)
    tile = block_bytes((shape.query_block, shape.key_block), F32)
    numbers = block_bytes((shape.query_block, LANES), F32)
    query = rows_block(shape, spec.head_size, spec.query_dtype)
    result = rows_block(shape, spec.value_head_size, spec.result_dtype)
    key = columns_block(shape, spec.head_size, spec.key_dtype)
    value = columns_block(shape, spec.value_head_size, spec.value_dtype)
    rows = number_block(shape, F32)
    sides = [side_block(shape, s, stored(s)) for s in spec.sides]
    sink = [] if spec.sink is None else [side_block(shape, SideSpec(F32, spec.sink), F32)]
    keeps = any(w.kind == "where" for w in spec.weights)

    def scratch(block: Block) -> int:
        return block_bytes(block.tile, F32)

    read = [query, key, value, result, rows, rows, *sides]
    found = {
        "forward": _twice([query, key, value, *sides, *sink, result, rows]) + scratch(result) + keeps * numbers,
        "query": _twice([*read, query]) + scratch(query),
        "key_value": _twice([*read, key, value]) + scratch(key) + scratch(value),
    }
    for name in found:
        kept = _KEPT[name].get("v4" if generation.name == "any" else generation.name, _KEPT[name]["later"])
        found[name] += int(kept.numbers * numbers + kept.tiles * max(0, tile - kept.registers))
    return found


def _twice(blocks: Sequence[Block]) -> int:
    return 2 * sum(block.bytes for block in blocks)


def _fits(spec: AttentionSpec, block_sizes: BlockSizes, generation: Generation, certain: bool = False) -> bool:
    """Returns whether the blocks may fit into vector memory, or, if ``certain``, whether they do by the estimate.

    A certain fit into a small memory needs an estimate well below the limit.
    """
    estimate = max(vmem_bytes(spec, block_sizes, generation).values())
    small = generation.limit is None
    return estimate <= generation.budget * ((1 / _CERTAINTY if small else 1) if certain else _UNCERTAINTY)


def fitting(spec: AttentionSpec, block_sizes: BlockSizes, generation: Generation) -> BlockSizes | None:
    """Halves the longer side of the tile until it fits into vector memory; returns None if nothing fits."""
    while not _fits(spec, block_sizes, generation):
        query, key = block_sizes.query_block, block_sizes.key_block
        if query <= 16 and key <= LANES:
            return None
        query, key = (max(query // 2, 16), key) if query >= key or key <= LANES else (query, max(key // 2, LANES))
        block_sizes = BlockSizes(query, key).fitted(spec)
    return block_sizes


def candidates(spec: AttentionSpec, generation: Generation) -> tuple[BlockSizes, ...]:
    """Returns different block sizes to try, best guess first, each within vector memory."""
    sizes = [BlockSizes(*pair).fitted(spec) for pair in _PREFERRED]
    return tuple(dict.fromkeys(s for s in sizes if _fits(spec, s, generation)))


def default(spec: AttentionSpec, generation: Generation, known: BlockSizes | None = None) -> BlockSizes:
    """Returns ``known``, from such an attention, or the first candidate, whichever certainly fits.

    Candidates begin with large blocks, because each step of the grid takes additional time.
    """
    sizes = (*(() if known is None else (known.fitted(spec),)), *candidates(spec, generation))
    return (
        next((s for s in sizes if _fits(spec, s, generation, certain=True)), None)
        or fitting(spec, BlockSizes(128, 128).fitted(spec), generation)
        or BlockSizes(16, 128).fitted(spec)
    )
