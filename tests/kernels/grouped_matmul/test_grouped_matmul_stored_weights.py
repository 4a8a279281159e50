"""The GPU kernel that loads weights of 8 bits and widens them in shared memory, interpreted with race detection."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.drained import drained_barriers
from support.multicast import interpreted_multicast
from test_grouped_matmul_implementations import error, spec_of, truth
from test_grouped_matmul_pallas_gpu import H100, needs_interpreter, needs_mosaic, racing

from autopallas.kernels.gpu import SHARED_MEMORY
from autopallas.kernels.grouped_matmul import pallas_gpu, tuned_block_sizes, xla
from autopallas.kernels.grouped_matmul.block_sizes import STORED, BlockSizes
from autopallas.kernels.grouped_matmul.gpu_tiles import Tile
from autopallas.kernels.grouped_matmul.operands import Operands
from autopallas.kernels.grouped_matmul.spec import GroupedMatmulSpec
from autopallas.sites.elementwise import Score, Side, traced
from autopallas.sites.operation import Supported
from autopallas.tuning.lookup import of_table
from autopallas.tuning.table import Row, of_form

EVERYTHING = os.environ.get("FULL_GRID") == "1"
BF16, F16, F32 = (np.dtype(jnp.dtype(d)) for d in ("bfloat16", "float16", "float32"))
E4M3, E5M2 = np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2)

SCALES = {
    "none": (),
    "group": ("g11",),
    "columns": ("g1n",),
    "rows": ("gk1",),
    "one number": ("111",),
    "two": ("g1n", "1k1"),
    "blocks": ("gKN",),
    "blocks of rows": ("gKn",),
    "blocks of columns": ("gkN",),
}
"""Numbers along groups, K and N; large letters: one for each 128."""


def stored(use: Any, dtype: Any = E4M3, scales: str = "none", wide: Any = BF16, through: Any = BF16,
           **rest: Any) -> GroupedMatmulSpec:  # fmt: skip
    """A spec of weights of 8 bits, which are multiplied by scales in the dtype ``through``."""
    spec = spec_of(use, wide, **rest)
    sides = {"1": 1, "g": spec.groups, "k": spec.contracting, "n": spec.columns}
    sides |= {"K": max(1, spec.contracting // 128), "N": max(1, spec.columns // 128)}
    over = tuple(tuple(sides[letter] for letter in letters) for letters in SCALES[scales])

    def widen(weight: jax.Array, *given: jax.Array) -> jax.Array:
        found = weight.astype(through)
        for scale in given:
            found = found * scale
        return found.astype(wide)

    program = traced(widen, Score(np.dtype(dtype)), *(Side(i, np.dtype(through)) for i in range(len(over))))
    return replace(spec, widening=program, scales=over)


def operands(spec: GroupedMatmulSpec, group_sizes: Any, batch: int = 1) -> Operands:
    random = np.random.default_rng(spec.rows + spec.columns)
    first = jnp.asarray(random.standard_normal((spec.batch, *spec.first_shape())), spec.first_dtype)
    second = jnp.asarray(random.standard_normal((batch, *spec.second_shape())) * 2, spec.stored_dtype)
    scales = [
        jnp.asarray(random.uniform(0.5, 2, (batch, *over)), dtype)
        for over, dtype in zip(spec.scales, [i.dtype for i in spec.widening.inputs if isinstance(i, Side)], strict=True)
    ]
    return Operands(first, second, jnp.asarray(group_sizes, jnp.int32).reshape(-1, spec.groups), tuple(scales))


def run(spec: GroupedMatmulSpec, sizes: BlockSizes, given: Operands) -> np.ndarray:
    with racing(), drained_barriers(), interpreted_multicast():
        return np.asarray(jax.jit(partial(pallas_gpu.forward, spec, sizes))(given), np.float32)


def wanted(spec: GroupedMatmulSpec, given: Operands) -> np.ndarray:
    """In float64, from the weights that the program multiplies."""
    wide = spec.widen(given.second, given.scales)
    both = zip(range(spec.batch), np.broadcast_to(given.group_sizes, (spec.batch, spec.groups)), strict=True)
    return np.stack([truth(spec.use, given.first[b], wide[b if len(wide) > 1 else 0], n) for b, n in both])


CASES: dict[str, tuple[GroupedMatmulSpec, BlockSizes, Any]] = {
    "empty groups, rows past the sum, tails": (
        stored("forward", scales="columns", rows=150, inner=72, columns=200, groups=3),
        BlockSizes(128, 64, 128, STORED),
        [3, 0, 139],
    ),
    "weights read transposed, a scale along the sum": (
        stored("dlhs", E5M2, "columns", through=F32, rows=90, inner=136, columns=72, groups=3),
        BlockSizes(64, weights=STORED),
        [70, 0, 11],
    ),
    "last tile in halves, a scale along the sum": (
        stored("forward", scales="rows", through=F32, rows=291, inner=136, columns=200, groups=2),
        BlockSizes(128, weights=STORED),
        [128, 163],
    ),
    "halves, groups that overlap, two scales": (
        stored("forward", scales="two", rows=120, inner=72, columns=128, groups=3),
        BlockSizes(128, weights=STORED),
        [100, -40, 60],
    ),
    "whole tiles, two of columns, deep steps": (
        stored("dlhs", scales="rows", rows=128, inner=256, columns=256, groups=2),
        BlockSizes(128, 128, weights=STORED),
        [64, 64],
    ),
    "a group has one row": (
        stored("forward", scales="group", rows=3, inner=5, columns=4, groups=3),
        BlockSizes(64, weights=STORED),
        [1, 0, 1],
    ),
    "one row": (
        stored("forward", scales="one number", rows=1, inner=5, columns=3, groups=4),
        BlockSizes(64, weights=STORED),
        [0, 1, 0, 0],
    ),
    "a scale for each block": (
        stored("forward", scales="blocks", rows=70, inner=256, columns=384, groups=2),
        BlockSizes(64, weights=STORED),
        [31, 39],
    ),
    "blocks along the sum, and a column's own": (
        stored("forward", scales="blocks of rows", rows=70, inner=256, columns=72, groups=2),
        BlockSizes(128, weights=STORED),
        [31, 30],
    ),
    "blocks, weights read transposed": (
        stored("dlhs", scales="blocks of columns", through=F32, rows=40, inner=136, columns=256, groups=2),
        BlockSizes(64, weights=STORED),
        [11, 20],
    ),
    "no rows": (
        stored("forward", rows=20, inner=8, columns=8, groups=2),
        BlockSizes(64, weights=STORED),
        [0, 0],
    ),
    "float16": (
        stored("forward", E5M2, "columns", F16, F16, rows=70, inner=40, columns=72, groups=2),
        BlockSizes(64, weights=STORED),
        [31, 30],
    ),
}
FAST = ("empty groups, rows past the sum, tails", "weights read transposed, a scale along the sum",
        "last tile in halves, a scale along the sum")  # fmt: skip


@needs_interpreter
@pytest.mark.parametrize("name", CASES if EVERYTHING else FAST)
def test_values(name):
    spec, sizes, group_sizes = CASES[name]
    given = operands(spec, group_sizes)
    found = run(spec, sizes, given)
    assert found.shape == (1, *spec.result_shape())
    assert error(found, wanted(spec, given)) <= (4e-3 if spec.result_dtype == F16 else 2e-2)


@needs_interpreter
@pytest.mark.parametrize("wide", [BF16, F16] if EVERYTHING else [BF16])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_number_of_8_bits_is_widened_exactly(dtype, wide):
    """Each row picks one weight; NaN and infinities stay in their column, where others are multiplied by zero."""
    spec = replace(stored("forward", dtype, wide=wide, rows=256, inner=64, columns=64, groups=4), result_dtype=F32)
    every = np.arange(256, dtype=np.uint8).view(dtype)
    finite = np.where(np.isfinite(every.astype(np.float32)), every, dtype.type(0))
    weights = np.zeros((1, 4, 64, 64), dtype)
    weights[0, :, :, 0] = finite.reshape(4, 64)
    weights[0, :, 0, 1] = np.float32(np.nan)
    first = np.tile(np.eye(64, dtype=np.float32), (4, 1))[None]
    given = Operands(jnp.asarray(first, wide), jnp.asarray(weights), jnp.asarray([[64] * 4], jnp.int32))
    found = run(spec, BlockSizes(64, weights=STORED), given)[0]
    np.testing.assert_array_equal(found[:, 0], finite.astype(np.float32))
    assert np.isnan(found[:, 1]).all()
    assert (found[:, 2:] == 0).all()


@needs_interpreter
@pytest.mark.parametrize("use", ["forward", "dlhs"] if EVERYTHING else ["forward"])
def test_what_one_group_holds_does_not_reach_another(use):
    """Rows of NaN, weights of NaN and a scale of NaN, each of another group; and rows that no group has are zero."""
    spec = stored(use, scales="group", rows=90, inner=72, columns=72, groups=5)
    given = operands(spec, [13, 21, 0, 19, 20])
    clean = wanted(spec, given)[0]
    poisoned = given._replace(
        first=given.first.at[0, 2].set(jnp.nan).at[0, 80].set(jnp.nan),
        second=given.second.at[0, 1].set(jnp.nan),
        scales=(given.scales[0].at[0, 3].set(jnp.nan),),
    )
    found = run(spec, BlockSizes(64, weights=STORED), poisoned)[0]
    touched = np.zeros(90, bool)
    touched[[2, *range(13, 34), *range(34, 53)]] = True
    assert np.isnan(found[touched]).all()
    assert error(found[~touched], clean[~touched]) <= 2e-2
    assert (found[73:] == 0).all()


@needs_interpreter
@pytest.mark.parametrize("shared", [True, False] if EVERYTHING else [True])
def test_a_batch(shared):
    spec = stored("forward", scales="columns", rows=30, inner=40, columns=24, groups=3, batch=2)
    given = operands(spec, [[10, 0, 12], [3, 20, 7]], batch=1 if shared else 2)
    assert error(run(spec, BlockSizes(64, weights=STORED), given), wanted(spec, given)) <= 2e-2


@needs_interpreter
def test_an_epilogue_and_gradients_of_rows():
    program = traced(lambda y: jnp.maximum(y, 0), Score(BF16))
    spec = stored("forward", scales="columns", rows=70, inner=72, columns=136, groups=3, epilogue=program)
    given = operands(spec, [30, 0, 35])
    sizes = BlockSizes(64, weights=STORED)
    product = wanted(spec.product, given)
    assert error(run(spec, sizes, given), np.maximum(product, 0)) <= 2e-2

    cotangent = jnp.asarray(np.random.default_rng(5).standard_normal((1, 70, 136)), BF16)
    with racing(), drained_barriers(), interpreted_multicast():
        back = jax.jit(partial(pallas_gpu.backward, spec.product, sizes, wanted=(True, False)))
        dfirst, dsecond = back(given, cotangent)
    assert dsecond is None
    wide = np.asarray(spec.widen(given.second, given.scales), np.float64)
    assert error(dfirst, truth("dlhs", cotangent[0], wide[0], [30, 0, 35])[None]) <= 2e-2


# ---------------------------------------------------------------------- what the kernel takes


@needs_mosaic
def test_weights_are_loaded_as_they_are_stored_where_a_search_says_so():
    spec = stored("forward", scales="columns", rows=8192, inner=4096, columns=4096, groups=8)
    assert isinstance(pallas_gpu.supports(spec, H100), Supported)
    found = pallas_gpu.candidates(spec, H100)
    assert found[0].weights == ""
    assert {sizes.row_block for sizes in found if sizes.weights == STORED} == {64, 128}
    assert all(sizes.weights == "" for sizes in pallas_gpu.candidates(spec.widened, H100))
    assert "weights" not in found[0].to_dict()
    assert pallas_gpu.running_sizes(spec, found[1], H100)["weights"] == STORED
    assert "weights" not in pallas_gpu.running_sizes(spec, found[0], H100)


@needs_mosaic
@pytest.mark.parametrize("use", ["forward", "dlhs"])
def test_every_candidate_fits_into_shared_memory(use):
    for rows, inner, columns in [(8192, 4096, 4096), (512, 2880, 2880), (100, 7, 9)]:
        for result in (BF16, F32):
            spec = replace(stored(use, rows=rows, inner=inner, columns=columns, groups=8), result_dtype=result)
            for sizes in (sizes for sizes in pallas_gpu.candidates(spec, H100) if sizes.weights == STORED):
                tile = Tile.of(spec, sizes)
                assert tile.shared_bytes(spec) <= SHARED_MEMORY
                assert tile.stages >= 2
                assert tile.part_columns <= 128


def _reads_twice(weight: jax.Array) -> jax.Array:
    return weight.astype(BF16) + (weight * weight).astype(BF16)


LEFT = {
    "float32 weights": stored("forward", wide=F32),
    "a scale for each weight": replace(
        stored("forward", scales="columns"), scales=((5, 7, 11),)
    ),
    "arithmetic in 8 bits": replace(stored("forward"), widening=traced(_reads_twice, Score(E4M3))),
    "a function that the kernel lacks": replace(
        stored("forward"), widening=traced(lambda w: jnp.sinh(w.astype(BF16)), Score(E4M3))
    ),
}  # fmt: skip


@needs_mosaic
@pytest.mark.parametrize("name", LEFT)
def test_other_weights_are_widened_before(name, monkeypatch):
    """They are what is multiplied without such weights, by whatever multiplies it."""
    spec = LEFT[name]
    calls: list[Any] = []
    monkeypatch.setattr(pallas_gpu, "_rows", lambda spec, sizes, operands: calls.append(spec) or operands.first)
    monkeypatch.setattr(xla, "forward", lambda spec, sizes, operands: calls.append(spec) or operands.first)
    given = operands(spec, [6] * 5)
    jax.eval_shape(partial(pallas_gpu.forward, spec, BlockSizes(64, weights=STORED)), given)
    assert calls == [spec.widened]


@needs_mosaic
def test_scales_of_examples_that_share_weights_are_applied_before(monkeypatch):
    spec = stored("forward", scales="group", batch=2)
    given = operands(spec, [6] * 5, batch=1)
    given = given._replace(scales=(jnp.ones((2, 5, 1, 1), BF16),))
    calls: list[Any] = []
    monkeypatch.setattr(pallas_gpu, "_rows", lambda spec, sizes, operands: calls.append(operands.second.shape) or spec)
    pallas_gpu.forward(spec, BlockSizes(64, weights=STORED), given)
    assert calls == [(2, 5, 7, 11)]


def test_rows_of_weights_of_8_bits_come_first_and_others_hold_too(monkeypatch):
    spec = stored("forward", rows=8192, inner=4096, columns=4096, groups=8)
    site = SimpleNamespace(op="grouped_matmul", spec=spec, direction="forward", original=None, site=None)
    key = tuned_block_sizes.table_key(spec, "pallas_gpu", "forward")
    assert key == tuned_block_sizes.table_key(spec.widened, "pallas_gpu", "forward")
    measured = partial(Row, kernel_us=100.0, original_us=900.0, kernel_bytes=10, original_bytes=20,
                       evidence="measured", date="2026-11-29", versions="jax 0.11.2")  # fmt: skip
    rows = {key: measured(BlockSizes(128))}
    monkeypatch.setattr(tuned_block_sizes.TABLE, "rows", {"NVIDIA H100": rows})
    found = of_table(site, "pallas_gpu", H100)
    assert found.exact
    assert found.block_sizes.weights == ""
    rows[of_form(key, tuned_block_sizes.STORED_WEIGHTS)] = measured(BlockSizes(64, weights=STORED))
    assert of_table(site, "pallas_gpu", H100).block_sizes.weights == STORED
    site.spec = spec.widened
    assert of_table(site, "pallas_gpu", H100).block_sizes.weights == ""


def test_block_sizes_say_how_weights_are_loaded():
    with pytest.raises(ValueError, match="weights must be one of"):
        BlockSizes(64, weights="widened")  # type: ignore[arg-type]
    assert BlockSizes(64, weights=STORED).fitted(spec_of("forward")).to_dict()["weights"] == STORED
