"""Chooses block sizes of the GPU kernels for an H100, by shared memory and registers.

``query_block`` is 64 rows for each of the one to three warpgroups that compute, and ``key_block`` the keys of a stage.
Where queries are few, ``blocks_per_processor`` says among how many blocks of threads the keys are divided.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from autopallas.kernels.attention.block_sizes import PERSISTENT, SECTIONS, BlockSizes, Schedule
from autopallas.kernels.attention.fills import hides_by_sides
from autopallas.kernels.attention.gpu_grid import WARPGROUP_ROWS, head_size_of, stored, turned_sides
from autopallas.kernels.attention.gpu_score_units import F16, fit
from autopallas.kernels.attention.spec import AttentionSpec
from autopallas.kernels.gpu import SHARED_MEMORY, processors, rounded, shared_bytes
from autopallas.sites.device import Device
from autopallas.sites.elementwise import ElementwiseProgram, Index, Score

__all__ = [
    "Tiles",
    "backward_tiles",
    "candidates",
    "default",
    "divided",
    "fitting",
    "forward_tiles",
    "schedule_of",
    "schedules",
    "shared_memory",
]

Kernel: TypeAlias = Literal["forward", "few_queries", "query", "key_value"]

_PREFERRED = ((128, 128), (128, 256), (192, 128), (128, 64), (192, 64), (64, 128), (64, 64))
_MOST_STAGES = 4
_MOST_LISTED = 2**16
"""Blocks of which lists are made for persistent ones; of more, the last ones take a small part of the time."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """The division of a kernel's work.

    Attributes:
      warpgroups: number of warpgroups that compute, each with 64 positions at home.
      away: positions of the other axis in a stage.
      stages: stages of the ring in shared memory.
      outputs: the gradients that each call computes; with a head size of 256 the registers hold one.
    """

    warpgroups: int
    away: int
    stages: int
    outputs: tuple[tuple[str, ...], ...] = ()


def _sizes(spec: AttentionSpec) -> tuple[int, int, int]:
    d, dv = head_size_of(spec.head_size), head_size_of(spec.value_head_size)
    assert d is not None
    assert dv is not None
    return d, dv, max(d, dv)


def shared_memory(spec: AttentionSpec, kernel: Kernel, tiles: Tiles) -> int:
    """Returns the bytes of shared memory of one block."""
    d, dv, _ = _sizes(spec)
    dtype, rows = spec.query_dtype, tiles.warpgroups * WARPGROUP_ROWS
    forward = kernel in ("forward", "few_queries")
    home = [((rows, d), dtype)] + [((rows, dv), dtype)] * (not forward)
    if kernel == "few_queries":  # what each warpgroup gives; all have the same queries if these are so few
        of_queries = rounded(spec.groups * spec.query_length, WARPGROUP_ROWS)
        home = [((of_queries, d), dtype), ((rows, dv), np.dtype(np.float32))]
    stages = [((tiles.stages, tiles.away, d), dtype), ((tiles.stages, tiles.away, dv), dtype)]
    if not forward and fit(spec) and tiles.outputs != (("value",),):
        stages.append(((tiles.stages, tiles.away, d), F16))
    if kernel == "key_value":
        stages.append(((tiles.stages, 2, tiles.away), np.dtype(np.float32)))  # shift and delta of the rows
        stages += [((tiles.stages, tiles.away, rows), stored(spec.sides[n])) for n in turned_sides(spec, True)]
    return shared_bytes([*home, *stages], barriers=tiles.warpgroups + 4 * tiles.stages + 1)


def _staged(spec: AttentionSpec, kernel: Kernel, tiles: Tiles) -> Iterator[Tiles]:
    """Yields the tiles with as many stages as fit, if two do."""
    for stages in range(_MOST_STAGES, 1, -1):
        found = Tiles(tiles.warpgroups, tiles.away, stages, tiles.outputs)
        if shared_memory(spec, kernel, found) <= SHARED_MEMORY:
            yield found


def forward_tiles(spec: AttentionSpec, block_sizes: BlockSizes) -> Tiles:
    """Returns the forward's tiles for these block sizes, reduced to what registers and shared memory allow."""
    _, _, widest = _sizes(spec)
    # A thread holds its share of result, scores and 16-bit weights in 232 registers, or 160 with three warpgroups.
    most = min(3 if widest <= 64 else 2, -(-spec.query_length // WARPGROUP_ROWS))
    warpgroups = max(1, min(block_sizes.query_block // WARPGROUP_ROWS, most))
    most_away = 256 if widest <= 64 and warpgroups < 3 and _lean(spec) else 128
    # Weights that hide keys, or are within the sum, are held beside the scores: 128 keys of heads of 128 spill.
    if widest > 192 or (widest > 96 and (spec.keeps or spec.inner_weights)):
        most_away = 64
    away = min(rounded(block_sizes.key_block, 64), most_away)
    for w, a in ((warpgroups, away), (warpgroups, 64), (1, 64)):
        for found in _staged(spec, "forward", Tiles(w, a, 0)):
            return found
    raise AssertionError("two stages of the smallest tiles always fit")


_MOST_DIVIDED = {True: 128, False: 64}
"""Rows of a tile of few queries, for heads of up to 128 and wider ones: shared memory holds the sums of all rows."""


def divided(spec: AttentionSpec, block_sizes: BlockSizes, device: Device | None = None) -> tuple[Tiles, int] | None:
    """Returns the tiles of few queries, and how many blocks of threads divide the keys of a head.

    None where no block sizes ask for it, or rows are too many.  Blocks that the processors compute at the same time
    are as many as may be without one more round; where side inputs show how many keys there are to visit, which may
    differ, all that are asked for.
    """
    rows, most = spec.groups * spec.query_length, block_sizes.blocks_per_processor
    _, _, widest = _sizes(spec)
    if not most or rows > _MOST_DIVIDED[widest <= 128]:
        return None
    away = min(rounded(block_sizes.key_block, 64), 64 if widest > 192 else 128)
    least = -(-rows // WARPGROUP_ROWS)
    # Two warpgroups that divide the keys each have a stage, and one more has to be filled meanwhile.
    pairs = ((2, away, 3), (least, away, 2), (least, 64, 2))
    tiles = next(t for w, a, n in pairs for t in _staged(spec, "few_queries", Tiles(w, a, 0)) if t.stages >= n)
    heads, slots = spec.batch * spec.key_heads, processors(device or Device.current())
    shares = range(1, max(1, min(most * slots // heads, -(-spec.key_length // tiles.away))) + 1)
    if "dynamic" in spec.mask_class:
        return tiles, shares[-1]
    return tiles, min(shares, key=lambda n: -(-heads * n // slots) / n)


def backward_tiles(spec: AttentionSpec, kernel: Literal["query", "key_value"]) -> Tiles:
    """Returns the tiles of a kernel of the backward, which do not depend on the forward's.

    A block has 128 positions at home if the axis has more than 64 and the registers hold what each of two warpgroups
    sums, whatever the number of rows that suits the forward.
    """
    _, _, widest = _sizes(spec)
    outputs: tuple[tuple[str, ...], ...] = (("query",),)
    light = widest <= 128 and _light(spec)
    if kernel == "key_value":
        outputs = (("key", "value"),) if widest <= 96 or light else (("key",), ("value",))
    most, away = 2 if widest <= 128 else 1, 64
    if not light:
        held = (n for n in (64, 32) if _registers(spec, kernel, outputs, n) <= _MOST_REGISTERS[most])
        away = next(held, 16)
    length = spec.query_length if kernel == "query" else spec.key_length
    for warpgroups in range(most if length > WARPGROUP_ROWS else 1, 0, -1):
        for found in _staged(spec, kernel, Tiles(warpgroups, away, 0, outputs)):
            return found
    raise AssertionError("two stages of the smallest tiles always fit")


_MOST_REGISTERS = {2: 192, 1: 176}
"""Registers of a thread for what :func:`_registers` counts, by the number of warpgroups; more were seen to spill."""


def _registers(spec: AttentionSpec, kernel: Kernel, outputs: tuple[tuple[str, ...], ...], away: int) -> float:
    """Estimates what a thread of the backward holds at once: gradients, tiles, and numbers along the streamed axis."""
    d, dv, _ = _sizes(spec)
    streamed = 3 if kernel == "key_value" else 4  # the axis of rows, or of columns, in a side input's ``varies``
    tiles = 2 + sum(0.25 if s.dtype == np.bool_ else 1 for s in spec.sides if s.varies[3] and s.varies[4])
    vectors = 2 if kernel == "key_value" else 0  # shift and delta
    for side in spec.sides:
        if not (side.varies[3] and side.varies[4]):
            vectors += side.varies[streamed]
            vectors += side.differentiable and side.varies[4] == (kernel == "key_value")
    vectors += bool((spec.query_length if kernel == "key_value" else spec.key_length) % 64)  # which positions exist
    gradients = max(sum(dv if name == "value" else d for name in names) for names in outputs)
    return gradients / 2 + away / 4 * (2 * tiles + vectors)


def _lean(spec: AttentionSpec) -> bool:
    """Returns whether the forward holds no more for each key than its score and its weight: no side inputs, and no last
    block that is shorter beside a sink."""
    lean = not (spec.sides or spec.weights or spec.inner_weights) and spec.score_dtype == np.float32
    lean &= spec.sink is None or spec.key_length % 256 == 0
    return lean and spec.reads_weights == spec.value_dtype


def _light(spec: AttentionSpec) -> bool:
    """Returns whether two tiles fit into the registers beside the gradients of keys and values of 128 numbers each.

    Nothing else may need registers for each element: neither side inputs along rows or columns nor a derivative that
    depends on the score.  A mask that one comparison decides does not: it is computed anew where it is used again.
    Beside a last block of rows that is shorter nothing may be computed for each row or column.
    """
    sides = any(side.varies[3] or side.varies[4] for side in spec.sides)
    if sides or spec.weights or spec.inner_weights:
        return False
    found = [(name, axes) for name, axes in _axes_of(spec.score) if name != "convert_element_type"]
    if spec.query_length % WARPGROUP_ROWS and (spec.sides or any(len(axes) == 1 for _, axes in found)):
        return False
    names = [name for name, axes in found if len(axes) > 1]
    return len(names) <= 3 and set(names) <= _LINEAR and sum(name in ("mul", "div") for name in names) <= 1


_LINEAR = frozenset("mul div select_n ge gt le lt eq ne".split())


def _axes_of(program: ElementwiseProgram) -> Iterator[tuple[str, set[str]]]:
    """Yields each instruction's primitive, with the axes along which its result varies."""
    axes: list[set[str]] = [
        {"query", "key"} if isinstance(i, Score) else {i.axis} if isinstance(i, Index) else set()
        for i in program.inputs
    ]
    for instruction in program.instructions:
        axes.append(set().union(*(axes[n] for n in instruction.arguments)))
        yield instruction.primitive.name, axes[-1]


def fitting(spec: AttentionSpec, block_sizes: BlockSizes, device: Device | None = None) -> BlockSizes:
    """Returns the sizes with which the forward computes, on a device or the current one, if these are asked for."""
    found = divided(spec, block_sizes, device)
    if found is not None:
        tiles, _ = found
        rows = rounded(spec.groups * spec.query_length, WARPGROUP_ROWS)
        return BlockSizes(rows, tiles.away, blocks_per_processor=block_sizes.blocks_per_processor)
    tiles = forward_tiles(spec, block_sizes)
    return BlockSizes(tiles.warpgroups * WARPGROUP_ROWS, tiles.away, schedule_of(spec, block_sizes, device))


def schedule_of(spec: AttentionSpec, block_sizes: BlockSizes, device: Device | None = None) -> Schedule:
    """Returns the schedule with which the kernels compute, on a device or the current one, if these block sizes are
    asked for.

    There is none to choose where each processor has at most one block, or data hide keys by low scores, for which rows
    of other masks hold; and none by lists where these would be long.
    """
    rows = forward_tiles(spec, block_sizes).warpgroups * WARPGROUP_ROWS
    blocks = spec.batch * spec.key_heads * spec.groups * -(-spec.query_length // rows)
    if blocks <= processors(device or Device.current()) or hides_by_sides(spec):
        return ""
    return SECTIONS if block_sizes.schedule == PERSISTENT and blocks > _MOST_LISTED else block_sizes.schedule


def schedules(spec: AttentionSpec) -> tuple[Schedule, ...]:
    """Returns the schedules that may be the fastest, the best guess first.

    Where blocks visit what side inputs show at run time, there is one: a processor that takes the next block whenever
    it has finished one is better than lists that do not know.  Sections matter where blocks visit different numbers.

    On an H200 persistent blocks of threads had 0.85 to 0.99 of the time of the plain order forward under causal masks,
    and with gradients 0.92 to 0.99; without a mask 0.95 to 0.98 forward, and 1.14 with gradients (B1 T16384 N16 D128).
    """
    if spec.mask_class not in ("full", "causal", "static") or hides_by_sides(spec):
        return ("",)
    return ("", PERSISTENT) if spec.mask_class == "full" else (PERSISTENT, "", SECTIONS)


def candidates(spec: AttentionSpec, device: Device | None = None) -> tuple[BlockSizes, ...]:
    """Returns different block sizes to try, best guess first; every schedule of those that are most often best."""
    found = [fitting(spec, sizes, device) for sizes in _DIVIDED] if _gains_by_division(spec, device) else []
    for n, pair in enumerate(_PREFERRED):
        tried = schedules(spec) if n < _SCHEDULED else ("",)
        found += [fitting(spec, BlockSizes(*pair, schedule), device) for schedule in tried]
    return tuple(dict.fromkeys(found))


_DIVIDED = tuple(BlockSizes(64, keys, blocks_per_processor=blocks) for blocks in (1, 3) for keys in (64, 128))
"""Block sizes that are tried first where there are few queries."""


def _gains_by_division(spec: AttentionSpec, device: Device | None) -> bool:
    """Returns whether queries are few: a head's do not fill a tile, which several heads share, or keys are many more,
    which blocks of threads divide, or two warpgroups."""
    if divided(spec, _DIVIDED[0], device) is None:
        return False
    shared = spec.groups > 1 and spec.query_length < WARPGROUP_ROWS
    return shared or spec.key_length >= _MANY_KEYS * spec.query_length


_MANY_KEYS = 8
"""Keys for each query from which these are few."""


_SCHEDULED = 2
"""How many of the preferred sizes are tried with every schedule."""


def default(spec: AttentionSpec, known: BlockSizes | None = None, device: Device | None = None) -> BlockSizes:
    """Returns ``known``, from other heads, as far as these heads allow it, else the first candidate.

    Sizes of more rows than there are queries come from other lengths, and say nothing of whether keys are divided.  For
    heads that the kernels do not support, it returns what any implementation would take.
    """
    if head_size_of(spec.head_size) is None or head_size_of(spec.value_head_size) is None:
        return (known or BlockSizes.get_default()).fitted(spec)
    if known is not None and known.query_block > rounded(spec.query_length, WARPGROUP_ROWS):
        known = None if _gains_by_division(spec, device) else known
    return candidates(spec, device)[0] if known is None else fitting(spec, known, device)
