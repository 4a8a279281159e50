"""Block sizes of the TPU kernels: what they take in vector memory, and which to begin with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.kernels.attention.spec import AttentionSpec, SideSpec
from autopallas.kernels.attention.tpu_grid import geometry
from autopallas.kernels.attention.tpu_operands import Block, columns_block, number_block, rows_block, side_block, stored
from autopallas.kernels.tpu import LANES, MIB, Generation, block_bytes

__all__ = ["candidates", "default", "fitting", "vmem_bytes"]

F32 = np.dtype(np.float32)

_FORWARD_TILES = 1.05
"""Tiles of float32 that the compiler keeps in vector memory beside blocks and scratch, as its account shows."""
_OLD_BACKWARD_TILES = {"query": 1.15, "key_value": 1.3}
_BACKWARD_TILES = {"query": 0.6, "key_value": 0.75}
_TILE_IN_REGISTERS = 1 * MIB
"""From v5 on, a backward's tile up to this size needs no room of its own."""

_UNCERTAINTY = 1.25
"""How far the compiler's account may be from the estimate; nothing that may fit is left out."""
_CERTAINTY = 1.5
"""Where a generation gives 16 MiB: how far below that an estimate is which certainly fits, also with side inputs."""

_PREFERRED = ((1024, 1024), (512, 2048), (1024, 2048), (512, 1024), (512, 512), (256, 512), (256, 256), (128, 128))


def vmem_bytes(spec: AttentionSpec, block_sizes: BlockSizes, generation: Generation) -> dict[str, int]:
    """An estimate of the vector memory of each kernel: "forward", "query", "key_value".

    Blocks of inputs and outputs are there twice, scratch once; what the compiler keeps of a tile is fitted to its
    account for v4, v5e, v5p and v6e.
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

    forward = _twice([query, key, value, *sides, *sink, result, rows])
    forward += (2 + keeps) * numbers + scratch(result) + int(_FORWARD_TILES * tile)
    read = [query, key, value, result, rows, rows, *sides]
    found = {
        "forward": forward,
        "query": _twice([*read, query]) + scratch(query) + 2 * numbers,
        "key_value": _twice([*read, key, value]) + scratch(key) + scratch(value),
    }
    for name in ("query", "key_value"):
        if generation.name in ("v4", "any"):
            found[name] += int(_OLD_BACKWARD_TILES[name] * tile)
        else:
            found[name] += int(_BACKWARD_TILES[name] * max(0, tile - _TILE_IN_REGISTERS))
    return found


def _twice(blocks: Sequence[Block]) -> int:
    return 2 * sum(block.bytes for block in blocks)


def _fits(spec: AttentionSpec, block_sizes: BlockSizes, generation: Generation, certain: bool = False) -> bool:
    """Whether the blocks may fit into vector memory; if certain, whether they do by the estimate, which where memory
    is small must not be near the limit."""
    estimate = max(vmem_bytes(spec, block_sizes, generation).values())
    small = generation.limit is None
    return estimate <= generation.budget * ((1 / _CERTAINTY if small else 1) if certain else _UNCERTAINTY)


def fitting(spec: AttentionSpec, block_sizes: BlockSizes, generation: Generation) -> BlockSizes | None:
    """The same, halved along the longer side of the tile until it fits into vector memory; None where nothing does."""
    query, key = block_sizes.query_block, block_sizes.key_block
    while not _fits(spec, BlockSizes(query, key), generation):
        if query <= 16 and key <= LANES:
            return None
        query, key = (max(query // 2, 16), key) if query >= key or key <= LANES else (query, max(key // 2, LANES))
    return BlockSizes(query, key)


def candidates(spec: AttentionSpec, generation: Generation) -> tuple[BlockSizes, ...]:
    """What a search should try, best guess first, each within vector memory and none twice."""
    sizes = [BlockSizes(*pair).fitted(spec) for pair in _PREFERRED]
    return tuple(dict.fromkeys(s for s in sizes if _fits(spec, s, generation)))


def default(spec: AttentionSpec, generation: Generation, known: BlockSizes | None = None) -> BlockSizes:
    """What is known of such an attention, else the first candidate, that certainly fits; large blocks, for each step of
    the grid costs time of its own."""
    sizes = (*(() if known is None else (known.fitted(spec),)), *candidates(spec, generation))
    return (
        next((s for s in sizes if _fits(spec, s, generation, certain=True)), None)
        or fitting(spec, BlockSizes(128, 128).fitted(spec), generation)
        or BlockSizes(16, 128).fitted(spec)
    )
