"""The TPU kernels of grouped matmul: every case interpreted, some under the simulated TPU, and tables of visits."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from test_grouped_matmul_implementations import (
    SIZES,
    USES,
    GroupedMatmulImplementation,
    everything,
    operands,
    spec_of,
    truth,
    truths,
)
from test_grouped_matmul_implementations import error as error_of

import autopallas
from autopallas.kernels import tpu
from autopallas.kernels.grouped_matmul import pallas_tpu, tpu_cores
from autopallas.kernels.grouped_matmul.block_sizes import BlockSizes
from autopallas.kernels.grouped_matmul.operands import Operands
from autopallas.kernels.grouped_matmul.operation import OPERATION
from autopallas.kernels.grouped_matmul.pallas_tpu import Tile
from autopallas.kernels.grouped_matmul.tuned_block_sizes import infer_block_sizes
from autopallas.kernels.grouped_matmul.visits import capacity, group_bounds, visits_by_group, visits_by_tile
from autopallas.kernels.tpu import GENERATIONS
from autopallas.sites import interpret
from autopallas.sites.device import Device
from autopallas.sites.elementwise import Score, traced
from autopallas.sites.operation import Unsupported

EVERYTHING = os.environ.get("FULL_GRID") == "1"
"""`make check-tpu` runs what `make test` has no time for."""
V5E = Device("tpu", "TPU v5 lite")

ODD = [(37, 1, 13, 3), (1, 5, 3, 4), (1, 1, 1, 1), (29, 9, 1, 2), (64, 16, 8, 16)]
WIDE = {
    "tails everywhere": (BlockSizes(16, 128, 128), dict(rows=70, inner=200, columns=300, groups=4), [3, 0, 39, 20]),
    "aligned": (BlockSizes(16, 128, 128), dict(rows=64, inner=256, columns=256, groups=3), [16, 32, 16]),
    "all of an axis at once": (BlockSizes(32), dict(rows=70, inner=130, columns=140, groups=4), [33, 0, 0, 37]),
}
"""Shapes that take several blocks of every axis."""


class TestPallasTpu(GroupedMatmulImplementation):
    name = "pallas_tpu"

    @pytest.fixture(autouse=True)
    def interpreted(self):
        with interpret.mode(True):
            yield

    @pytest.mark.parametrize("shape", ODD if EVERYTHING else ODD[:2])
    def test_odd_shapes(self, module, shape):
        super().test_odd_shapes(module, shape)

    @pytest.mark.parametrize("use", USES if EVERYTHING else USES[2:])
    def test_narrow_dtypes(self, module, use):
        super().test_narrow_dtypes(module, use, "bfloat16")

    @pytest.mark.parametrize("block", [1, 3, 16, 30] if EVERYTHING else [3])
    @pytest.mark.parametrize("use", USES if EVERYTHING else USES[1:2])
    def test_any_block_size_gives_the_same(self, module, use, block):
        self.check(module, spec_of(use), SIZES["uneven"], sizes=BlockSizes(block))

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"] if EVERYTHING else ["bfloat16"])
    @pytest.mark.parametrize("name", WIDE if EVERYTHING else ["tails everywhere"])
    def test_blocks_of_every_axis(self, module, name, dtype):
        block, shape, group_sizes = WIDE[name]
        for use in USES if EVERYTHING else USES[:1]:  # the gradients are the other two
            self.check(module, spec_of(use, dtype, **shape), group_sizes, sizes=block)

    @pytest.mark.parametrize("block", [8, 15])
    def test_an_epilogue_of_sums_over_groups_that_overlap(self, module, block):
        """It is computed some rows at a time, and of each row once."""
        program = traced(jax.nn.sigmoid, Score(np.dtype(np.float32)))
        spec = spec_of("forward", batch=2, epilogue=program)
        first, second, _ = operands(spec)
        group_sizes = [SIZES["negative, so that groups overlap"], SIZES["uneven"]]
        given = Operands(first, second, jnp.asarray(group_sizes))
        found = jax.jit(partial(module.forward, spec, BlockSizes(block)))(given)
        for example, sizes in enumerate(group_sizes):
            product = truth("forward", first[example], second[example], sizes)
            assert error_of(found[example], 1 / (1 + np.exp(-product))) < 1e-5

    @pytest.mark.parametrize("first, second", [("bfloat16", "float32"), ("float32", "bfloat16")])
    def test_mixed_operands_are_multiplied_in_the_wider_dtype(self, module, first, second):
        spec = replace(
            spec_of("forward"), first_dtype=np.dtype(jnp.dtype(first)), second_dtype=np.dtype(jnp.dtype(second))
        )
        a, b, c = operands(spec)
        group_sizes = jnp.asarray([SIZES["uneven"]])
        found = self.run(module, spec, a, b, group_sizes, c)
        wanted = truths(spec, a, b, group_sizes, c)
        assert error_of(found["result"], wanted["result"]) < 1e-6


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", WIDE if EVERYTHING else ["tails everywhere"])
def test_the_simulated_tpu_finds_no_fault(name, use):
    """No block out of bounds, no result left and returned to, nothing read that was never written."""
    block, shape, group_sizes = WIDE[name]
    spec = spec_of(use, "float32", **shape)
    first, second, cotangent = operands(spec)
    sizes = jnp.asarray([group_sizes], jnp.int32)
    with interpret.mode(pltpu.InterpretParams(uninitialized_memory="nan")):
        found = jax.jit(partial(pallas_tpu.forward, spec, block))(Operands(first, second, sizes))
    assert error_of(found, truths(spec, first, second, sizes, cotangent)["result"]) <= 1e-5


TWO_CORES = jax.sharding.AbstractDevice("TPU v5", 2, "tpu")
V5P = Device("tpu", "TPU v5")


@pytest.mark.parametrize("use, group_sizes, inner_block", [
    ("forward", [33, 0, 20, 11], 128), ("forward", [0, 0, 0, 0], 256), ("forward", [5, 3, 0, 0], 256),
    ("dlhs", [33, 0, 20, 11], 256), ("dlhs", [1, 30, 0, 33], 128),
][: None if EVERYTHING else 1])  # fmt: skip
def test_cores_that_share_the_rows_do_not_race(use, group_sizes, inner_block, monkeypatch):
    spec = spec_of(use, "float32", rows=64, inner=256, columns=256, groups=4)
    first, second, cotangent = operands(spec)
    sizes = jnp.asarray([group_sizes], jnp.int32)
    monkeypatch.setattr(pallas_tpu, "shared_tile", lambda *_: Tile(16, inner_block, 128))
    monkeypatch.setattr(pallas_tpu, "generation", lambda _: tpu.generation(V5P))
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=TWO_CORES)
    simulated = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
    with interpret.mode(simulated), jax.sharding.use_abstract_mesh(mesh):
        found = jax.jit(partial(pallas_tpu.forward, spec, BlockSizes(16)))(Operands(first, second, sizes))
    assert error_of(found, truths(spec, first, second, sizes, cotangent)["result"]) <= 1e-5


@pytest.mark.parametrize("kind, columns, shared", [
    ("TPU v5", 128, True), ("TPU v5", 384, True), ("TPU v5", 1024, False), ("TPU v5", 100, False),
    ("TPU v4", 384, True), ("TPU v5 lite", 384, False),
])  # fmt: skip
def test_cores_share_the_rows_where_columns_would_leave_one_idle(kind, columns, shared):
    spec = spec_of("forward", "bfloat16", rows=1024, inner=256, columns=columns, groups=4)
    types = [jax.ShapeDtypeStruct((1, *s), jnp.bfloat16) for s in (spec.first_shape(), spec.second_shape())]
    types.append(jax.ShapeDtypeStruct((1, 4), jnp.int32))
    with Device("tpu", kind).lowered():
        traced = jax.jit(partial(pallas_tpu.forward, spec, BlockSizes(512))).trace(Operands(*types))
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert ("autopallas_grouped_matmul_forward_on_cores" in text) == shared
    assert "autopallas_grouped_matmul_forward" in text


@pytest.mark.parametrize("cores", [1, 2, 3])
def test_shares_give_each_visit_to_one_core_and_no_tile_to_two(cores):
    random = np.random.default_rng(cores)
    for largest in (0, 3, 9, 40):
        start, end, _ = group_bounds(jnp.asarray(random.integers(0, largest + 1, (1, 5))), 60)
        visits = visits_by_tile(start, end, 60, 8)
        found = np.asarray(tpu_cores.shares(visits.tile, visits.number, 8, cores))
        assert found[0] == 0
        assert found[-1] == visits.number
        assert (np.diff(found) >= 0).all()
        tiles = [set(np.asarray(visits.tile)[a:b].tolist()) for a, b in itertools.pairwise(found)]
        assert sum(map(len, tiles)) == 8
        assert max(map(len, tiles)) <= -(-8 // cores)


def test_both_interpreters_leave_other_rows_zero():
    spec = spec_of("forward", **WIDE["aligned"][1])
    first, second, cotangent = operands(spec)
    with interpret.mode(True):
        result, *_ = everything(pallas_tpu, spec, BlockSizes(16, 128, 128))(
            first, second, jnp.asarray([[0, 5, 0]]), cotangent
        )
    np.testing.assert_array_equal(result[0, 5:], 0)
    assert np.abs(result[0, :5]).min(axis=1).max() > 0


# ---------------------------------------------------------------------- visits


@pytest.mark.parametrize("by", ["tile", "group"])
@pytest.mark.parametrize("batch, rows, block", [(1, 40, 16), (3, 13, 4), (2, 6, 17), (1, 1, 8)])
def test_visits_pair_each_owned_row_with_its_group_once(batch, rows, block, by):
    total, groups = batch * rows, 3 * batch
    table = visits_by_tile if by == "tile" else visits_by_group

    @jax.jit
    def made(group_sizes: Any) -> Any:
        start, end, apart = group_bounds(group_sizes, rows)
        return start, end, apart, table(start, end, total, block)

    random = np.random.default_rng(rows)
    for largest in (0, 1, 2, 5, 9, 14, 40) * 5:
        start, end, apart, visits = jax.device_get(made(random.integers(0, largest + 1, (batch, 3))))
        assert apart
        owner = np.full(total, -1)
        for g, (a, b) in enumerate(zip(start, end, strict=True)):
            owner[a:b] = g
        count = int(visits.number)
        assert count <= capacity(total, block, groups)
        tile, group, begin, behind, first, last = (x[:count] for x in visits[:6])
        seen = np.full(total, -1)
        for t, g, a, b in zip(tile, group, begin, behind, strict=True):
            own = t * block + np.arange(a, max(a, b))
            assert (seen[own] == -1).all()
            seen[own] = g
        np.testing.assert_array_equal(seen, owner)
        # Each result is begun once, ended once, and never returned to.
        written, results = (tile, -(-total // block)) if by == "tile" else (group, groups)
        assert sorted(set(written)) == list(range(results))
        assert (np.diff(written) >= 0).all()
        np.testing.assert_array_equal(first, np.r_[1, np.diff(written) > 0])
        np.testing.assert_array_equal(last, np.r_[np.diff(written) > 0, 1])


def test_overlapping_groups_are_noticed():
    assert not group_bounds(jnp.asarray([[4, -1, 3]]), 8)[2]


# ---------------------------------------------------------------------- before a compile


@pytest.mark.parametrize(
    "changes, reason",
    [
        (dict(dtype="float16"), "bfloat16 and float32, not float16"),
        (dict(assume_finite=False), "assume_finite is off"),
        (dict(rows=2_000_000), "scalar memory"),
    ],
)
def test_what_it_does_not_support_it_says(changes, reason):
    answer = OPERATION.supports("pallas_tpu", spec_of("forward", **changes), V5E)
    assert isinstance(answer, Unsupported)
    assert reason in answer.reason


def test_it_runs_on_a_tpu_or_interpreted():
    assert isinstance(pallas_tpu.supports(spec_of("forward"), Device("cpu", "cpu")), Unsupported)
    assert not isinstance(pallas_tpu.supports(spec_of("forward"), V5E), Unsupported)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("inner, columns, groups", [(4096, 4096, 8), (14336, 4096, 64), (100, 40, 3), (1000, 999, 7)])
def test_tiles_fit_every_generation_and_are_aligned(use, inner, columns, groups):
    for dtype in ("bfloat16", "float32"):
        spec = spec_of(use, dtype, rows=8192, inner=inner, columns=columns, groups=groups)
        wide, deep = (columns, inner) if use != "dlhs" else (inner, columns)
        for generation in GENERATIONS:
            tile = Tile.of(spec, BlockSizes(512), 8192, generation.budget)
            assert tile.vmem_bytes(spec) <= generation.budget
            assert tile.rows % 16 == 0
            assert tile.columns % 128 == 0 or tile.columns == wide
            assert tile.inner % 128 == 0 or tile.inner == deep


def test_a_tpu_has_block_sizes_of_its_own():
    spec = spec_of("forward", "bfloat16", rows=8192, inner=4096, columns=4096, groups=8)
    v5p = Device("tpu", "TPU v5")  # of which no table knows
    found = pallas_tpu.candidates(spec, v5p)
    assert len(set(found)) == len(found) > 3
    assert infer_block_sizes(spec, v5p, "pallas_tpu") == found[0]
    for known in (V5E, Device("tpu", "TPU v6 lite")):
        assert infer_block_sizes(spec, known, "pallas_tpu").row_block == 1024


def test_what_is_lowered_for_a_tpu_is_the_kernel():
    spec = spec_of("forward", "bfloat16", rows=1024, inner=256, columns=256, groups=4)
    types = [jax.ShapeDtypeStruct((1, *s), jnp.bfloat16) for s in (spec.first_shape(), spec.second_shape())]

    def both(first: Any, second: Any, group_sizes: Any) -> Any:
        given = Operands(first, second, group_sizes)
        out = pallas_tpu.forward(spec, BlockSizes(512), given)
        return out, pallas_tpu.backward(spec, BlockSizes(512), given, out)

    with V5E.targeted():
        traced = jax.jit(both).trace(*types, jax.ShapeDtypeStruct((1, 4), jnp.int32))
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
    for use in USES:
        assert f'kernel_name = "autopallas_grouped_matmul_{use}"' in text


@pytest.mark.parametrize("asked", [{"objective": "always"}, {"implementation": "pallas_tpu"}], ids=str)
def test_a_train_step_exported_for_a_tpu_contains_the_kernels(asked):
    def loss(lhs: Any, rhs: Any, group_sizes: Any) -> Any:
        return jnp.square(jax.lax.ragged_dot(lhs, rhs, group_sizes)).sum()

    types = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 32), (4, 32, 48))]
    step = jax.jit(autopallas.optimize(jax.grad(loss, (0, 1)), **asked))
    text = jax.export.export(step, platforms=["tpu"])(*types, jax.ShapeDtypeStruct((4,), jnp.int32)).mlir_module()
    for use in USES:
        assert f'kernel_name = "autopallas_grouped_matmul_{use}"' in text
