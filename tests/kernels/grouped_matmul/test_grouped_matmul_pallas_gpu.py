"""The GPU kernels of grouped matmul, interpreted with race detection, and their tables of visits."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.drained import drained_barriers
from support.multicast import interpreted_multicast
from test_grouped_matmul_implementations import (
    SIZES,
    USES,
    GroupedMatmulImplementation,
    error,
    operands,
    spec_of,
    truths,
)

from autopallas import compat
from autopallas.kernels.gpu import SHARED_MEMORY, too_few_threads
from autopallas.kernels.grouped_matmul import pallas_gpu
from autopallas.kernels.grouped_matmul.block_sizes import BlockSizes
from autopallas.kernels.grouped_matmul.gpu_tiles import Tile
from autopallas.kernels.grouped_matmul.gpu_visits import ALIGNED, AT, COUNT, FIRST, HIGH, LAST, LOW, capacity, visits
from autopallas.kernels.grouped_matmul.operands import Operands
from autopallas.kernels.grouped_matmul.operation import OPERATION
from autopallas.kernels.grouped_matmul.tuned_block_sizes import infer_block_sizes
from autopallas.sites import interpret
from autopallas.sites.device import Device
from autopallas.sites.operation import Supported, Unsupported

EVERYTHING = os.environ.get("FULL_GRID") == "1"
"""`make check-gpu` runs what `make test` has no time for."""
H100 = Device("gpu", "NVIDIA H100 80GB HBM3")

MISSING = compat.missing_mosaic_gpu()
needs_mosaic = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
REASON = MISSING or too_few_threads()
needs_interpreter = pytest.mark.skipif(REASON is not None, reason=str(REASON))

WIDE = {
    "tails everywhere": (BlockSizes(128, 64, 128), dict(rows=150, inner=72, columns=200, groups=3), [3, 0, 139]),
    "small tiles, tails": (BlockSizes(64, 64, 128), dict(rows=90, inner=136, columns=72, groups=3), [70, 0, 11]),
    "whole tiles": (BlockSizes(128, 64, 128), dict(rows=256, inner=256, columns=128, groups=2), [128, 128]),
    "deep steps": (BlockSizes(128, 128, 64), dict(rows=136, inner=300, columns=64, groups=2), [130, 6]),
    "pairs, last tile in halves": (
        BlockSizes(128, 64, 128),
        dict(rows=291, inner=136, columns=200, groups=2),
        [128, 163],
    ),
    "one tile in halves": (BlockSizes(128, 64, 256), dict(rows=97, inner=200, columns=256, groups=1), [97]),
    "four strips, halves": (BlockSizes(128, 64, 256), dict(rows=261, inner=64, columns=512, groups=1), [261]),
    "halves, overlapping": (BlockSizes(128, 64, 128), dict(rows=120, inner=72, columns=128, groups=3), [100, -40, 60]),
}
"""Shapes of several tiles, and of more steps than there are stages. Two blocks are interpreted, or clusters of two
blocks where tiles are even in number along an axis, so that of an odd number of tiles, or of pairs, the last is
computed in halves."""


def racing() -> Any:
    from jax.experimental.pallas import mosaic_gpu

    return interpret.mode(mosaic_gpu.InterpretGPUParams(detect_races=True))


@needs_interpreter
class TestPallasGpu(GroupedMatmulImplementation):
    name = "pallas_gpu"
    sizes = BlockSizes(64)
    dtype = "bfloat16"

    @pytest.fixture(autouse=True)
    def interpreted(self):
        with racing(), drained_barriers(), interpreted_multicast() as transfers:
            yield transfers

    @pytest.mark.parametrize(
        "pattern", SIZES if EVERYTHING else ["rows past the sum", "negative, so that groups overlap"]
    )
    @pytest.mark.parametrize("use", USES if EVERYTHING else USES[:1])  # the gradients are the other two
    def test_values_and_gradients(self, module, use, pattern):
        super().test_values_and_gradients(module, use, pattern)

    @pytest.mark.parametrize("use", USES if EVERYTHING else USES[:1])
    def test_narrow_dtypes(self, module, use):
        super().test_narrow_dtypes(module, use, "float16")

    @pytest.mark.parametrize("shape", [(37, 1, 13, 3), (1, 5, 3, 4)] if EVERYTHING else [(37, 1, 13, 3)])
    def test_odd_shapes(self, module, shape):
        super().test_odd_shapes(module, shape)

    @pytest.mark.parametrize("block", [1, 128] if EVERYTHING else [128])
    @pytest.mark.parametrize("use", USES if EVERYTHING else USES[:1])
    def test_any_block_size_gives_the_same(self, module, use, block):
        super().test_any_block_size_gives_the_same(module, use, block)

    @pytest.mark.parametrize("shared", [False, True] if EVERYTHING else [True])
    def test_a_batch_with_sizes_of_its_own(self, module, shared):
        super().test_a_batch_with_sizes_of_its_own(module, shared)

    def test_all_group_sizes(self, module):
        for seed in range(20 if EVERYTHING else 2):
            group_sizes = np.random.default_rng(seed).integers(0, 12, 5)
            self.check(module, spec_of("forward", self.dtype), group_sizes)

    def test_what_one_group_holds_does_not_reach_another(self, module):
        for use in USES:
            spec = spec_of(use, self.dtype)
            first, second, _ = operands(spec)
            first = first.at[0, 4, 2].set(jnp.nan).at[0, 20, 1].set(jnp.inf)  # a row of group 1, and one past the sum
            second = second.at[0, 9, 3].set(jnp.inf) if use == "drhs" else second  # a row of group 3
            run = jax.jit(partial(module.forward, spec, self.sizes))
            given = Operands(first, second, jnp.asarray([SIZES["rows past the sum"]]))
            found = np.asarray(run(given)[0], np.float32)
            finite = np.isfinite(found).reshape(len(found), -1).all(axis=1)
            assert set(np.flatnonzero(~finite)) == ({1, 3} if use == "drhs" else {4})

    @pytest.mark.parametrize("name", WIDE if EVERYTHING else ["tails everywhere", "pairs, last tile in halves"])
    def test_several_tiles_of_every_axis(self, module, name):
        block, shape, group_sizes = WIDE[name]
        for _ in range(3 if EVERYTHING else 1):  # threads of the interpreter run in another order each time
            self.check(module, spec_of("forward", self.dtype, **shape), group_sizes, sizes=block)

    @pytest.mark.parametrize("use, shared", [("forward", "first"), ("drhs", "first"), ("drhs", "second")])
    def test_what_one_group_holds_does_not_reach_another_where_blocks_share_an_operand(self, module, use, shared):
        """Of three groups, one of them empty, the first and what is behind the last hold NaN."""
        inner, columns = (64, 256) if shared == "first" else (256, 64)
        spec = spec_of(use, "bfloat16", rows=150, inner=inner, columns=columns, groups=3)
        block = BlockSizes(128, 64, 128)
        first, second, cotangent = operands(spec)
        group_sizes = np.asarray([[67, 0, 65]])
        poisoned = first.at[0, 3, 2].set(jnp.nan).at[0, 140, 1].set(jnp.inf)
        if use == "drhs":
            second = second.at[0, 141].set(jnp.nan)
        found = jax.jit(partial(module.forward, spec, block))(Operands(poisoned, second, jnp.asarray(group_sizes)))[0]
        wanted = truths(spec, first, jnp.nan_to_num(second), group_sizes, cotangent)["result"][0]
        whole = np.delete(np.arange(len(found)), [0] if use == "drhs" else [3, 140])
        assert error(np.asarray(found, np.float32)[whole], wanted[whole]) <= 1e-2
        assert np.isnan(np.asarray(found, np.float32)[0 if use == "drhs" else 3]).any()

    def test_both_blocks_of_a_cluster_load_what_they_share(self, module, interpreted):
        block, shape, group_sizes = WIDE["tails everywhere"]
        spec = spec_of("forward", "bfloat16", **shape)
        first, second, _ = operands(spec)
        jax.jit(partial(module.forward, spec, block))(Operands(first, second, jnp.asarray([group_sizes])))
        # Of four visits, three of which have a group, each takes two steps: two parts of rows, loaded by two blocks.
        assert interpreted == [3 * 2 * 2 * 2]


@needs_mosaic
@pytest.mark.parametrize("name", [name for name in WIDE if "halves" in name])
def test_the_shapes_with_halves_have_an_odd_number_of_tiles(name):
    block, shape, group_sizes = WIDE[name]
    spec = spec_of("forward", "bfloat16", **shape)
    tile = Tile.of(spec, block)
    number = int(visits(jnp.asarray([group_sizes]), spec.rows, tile.rows).number[0])
    across = -(-spec.columns // tile.columns)
    assert tile.halves
    assert number * (across // 2 if tile.shared_operand(spec.columns) else across) % 2 == 1


def test_room_for_the_whole_result_takes_no_stage():
    large = dict(rows=8192, inner=4096, columns=4096, groups=8)
    found = [Tile.of(spec_of(use, "bfloat16", **large), BlockSizes(128)) for use in USES]
    assert [(tile.stages, tile.together) for tile in found] == [(3, 4), (3, 4), (4, 2)]


def test_blocks_share_the_larger_operand_that_both_have():
    tile = Tile(128, 64, 256, 4)
    assert tile.shared_operand(4096) == "first"  # rows may be of different groups
    assert tile.shared_operand(4096, 4096) == tile.shared_operand(768, 4096) == "second"
    assert tile.shared_operand(4096, 300) == "first"
    assert tile.shared_operand(768) is tile.shared_operand(768, 384) is tile.shared_operand(1, 1) is None


# ---------------------------------------------------------------------- what is supported


@needs_mosaic
def test_the_h100_is_supported_and_everything_else_is_refused_with_a_reason():
    spec = spec_of("forward", "bfloat16")
    assert isinstance(pallas_gpu.supports(spec, H100), Supported)
    for device, said in [
        (Device("gpu", "NVIDIA A100-SXM4-80GB"), "this GPU is NVIDIA A100-SXM4-80GB"),
        (Device("gpu", "NVIDIA B200"), "this GPU is NVIDIA B200"),
        (Device("gpu", "AMD Instinct MI300X"), "written for Hopper"),
        (Device("cpu", "cpu"), "AUTOPALLAS_INTERPRET=1"),
        (Device("tpu", "TPU v5 lite"), "it is a GPU kernel"),
    ]:
        assert said in OPERATION.supports("pallas_gpu", spec, device).reason
    for other, said in [
        (spec_of("forward", "float32"), "not float32"),
        (spec_of("forward", "bfloat16", assume_finite=False), "assume_finite"),
        (spec_of("forward", "float64"), "not float64"),
    ]:
        assert said in pallas_gpu.supports(other, H100).reason


def test_versions_without_mosaic_gpu_are_refused_with_a_reason(monkeypatch):
    monkeypatch.setattr(compat, "missing_mosaic_gpu", lambda: "its Mosaic GPU kernels need JAX 0.11 or later")
    answer = pallas_gpu.supports(spec_of("forward", "bfloat16"), H100)
    assert isinstance(answer, Unsupported)
    assert "JAX 0.11" in answer.reason


# ---------------------------------------------------------------------- tiles and visits


@pytest.mark.parametrize("result", ["bfloat16", "float32"])
@pytest.mark.parametrize("use", USES)
def test_every_candidate_fits_into_shared_memory(use, result):
    for rows, inner, columns in [(8192, 4096, 4096), (32768, 2048, 1408), (100, 7, 9)]:
        spec = spec_of(use, "bfloat16", rows=rows, inner=inner, columns=columns, groups=8)
        for sizes in pallas_gpu.candidates(spec, H100):
            tile = Tile.of(spec, sizes)
            assert tile.shared_bytes(spec) <= SHARED_MEMORY
            assert tile.stages >= 2
            assert tile.part_columns % 64 == 0
    assert infer_block_sizes(spec, H100, "pallas_gpu") == pallas_gpu.candidates(spec, H100)[0]


@pytest.mark.parametrize("blocks", [2, 5, 132])
def test_tiles_of_a_round_for_half_of_the_blocks_are_halved(monkeypatch, blocks):
    from autopallas.kernels.grouped_matmul import gpu_kernels

    monkeypatch.setattr(gpu_kernels.lax, "axis_size", lambda name: blocks)
    for count in range(3 * blocks):
        whole, halved = (int(n) for n in gpu_kernels._shared_out(jnp.int32(count), True))
        assert whole + halved == count
        rounds = -(-whole // blocks) + 0.5 * -(-2 * halved // blocks)
        assert rounds <= -(-count // blocks)
        assert halved == 0 or whole % blocks == 0
        assert halved <= blocks / 2
    assert [int(n) for n in gpu_kernels._shared_out(jnp.int32(7), False)] == [7, 0]


def test_tiles_of_128_rows_may_be_halved():
    assert Tile(128, 64, 256, 4).halves
    assert not Tile(128, 64, 64, 4).halves
    assert not Tile(64, 64, 256, 4).halves


@pytest.mark.parametrize("batch, rows, block", [(1, 200, 64), (3, 13, 64), (2, 70, 128), (1, 1, 64)])
def test_visits_hold_each_row_once_with_all_its_groups(batch, rows, block):
    groups = 3
    made = jax.jit(lambda sizes: visits(sizes, rows, block))
    random = np.random.default_rng(rows)
    for lowest, highest in [(0, 0), (0, 2), (0, 9), (0, rows), (-rows // 2, rows)] * 5:
        sizes = random.integers(lowest, highest + 1, (batch, groups)).astype(np.int32)
        found = jax.device_get(made(sizes))
        count = int(found.number[0])
        assert count <= capacity(batch, rows, groups, block) == len(found.table)
        ends = np.cumsum(sizes, axis=1)
        wanted: list[set[int]] = [set() for _ in range(batch * rows)]
        for b in range(batch):
            for g in range(groups):
                start, end = (int(np.clip(x, 0, rows)) for x in (ends[b, g] - sizes[b, g], ends[b, g]))
                for m in range(start, end):
                    wanted[b * rows + m].add(b * groups + g)
        seen = np.zeros(batch * rows, int)
        for visit in found.table[:count]:
            assert visit[AT] % ALIGNED == 0
            assert 0 <= visit[LOW] < visit[HIGH] <= block
            begin = visit[AT] + visit[LOW]
            own = range(begin, visit[AT] + visit[HIGH])
            seen[own] += 1
            between = range(visit[FIRST], visit[LAST] + 1)
            here = {g for g in between if found.bounds[g, 0] <= begin < found.bounds[g, 1]}
            assert len(here) == visit[COUNT]
            assert all(wanted[m] == here for m in own)
        assert (seen == 1).all()
