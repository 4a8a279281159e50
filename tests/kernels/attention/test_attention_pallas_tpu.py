"""The TPU kernels on a CPU: interpreted, lowered for a TPU, and under ``optimize``.

``make check-tpu`` runs every case (``FULL_GRID=1``), else a choice of them, for interpreting takes long.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import KEY, QUERY, SCORE, Case, causal
from support.oracle import errors
from test_attention_implementations import BY_NAME, AttentionImplementation, both, computed

import autopallas
from autopallas.errors import UnsupportedError
from autopallas.kernels.attention import pallas_tpu
from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.kernels.attention.operands import Cotangents, Operands
from autopallas.kernels.attention.operation import OPERATION
from autopallas.kernels.attention.programs import traced
from autopallas.kernels.attention.tiles import DEAD
from autopallas.kernels.attention.tpu_grid import Grid, geometry
from autopallas.sites.device import Device
from autopallas.sites.interpret import mode
from autopallas.sites.operation import Unsupported

FULL_GRID = os.environ.get("FULL_GRID") == "1"
QUICK = {
    f"test_values_and_gradients[{name}]"
    for name in (
        "one query", "causal with more keys", "segments and causal", "biases of every shape",
        "sink and rows without keys", "probabilities multiplied", "weights inside the sum",
        "weights of zero inside the sum beside huge exponentials", "negative weights inside the sum, a mask and a sink",
    )
} | {
    "test_products_read_what_the_originals_do[('float32', 'bfloat16', 'bfloat16')]",
    "test_products_read_what_the_originals_do[('bfloat16', 'bfloat16', 'bfloat16')]",
    "test_narrow_operands[bias-bfloat16]",
    "test_backward_probabilities_are_at_most_1_whatever_the_scores[float32]",
    "test_backward_probabilities_are_at_most_1_whatever_the_scores[bfloat16]",
    "test_sums_over_rows_do_not_add_up_what_the_result_was_rounded_by[soft cap and position bias]",
    "test_scores_that_are_only_scaled_have_exponentials_with_base_2[full]",
    "test_scores_that_are_only_scaled_have_exponentials_with_base_2[causal]",
}  # fmt: skip
LOWERED = (
    "full with odd sizes", "one query", "grouped queries", "causal with more keys", "mask as a side input",
    "segments and causal", "biases of every shape", "soft cap and position bias", "sink and rows without keys",
    "probabilities multiplied", "weights inside the sum",
)  # fmt: skip
"""Of each kind of operand and program one; `make check-tpu` compiles every case, which includes lowering it."""
SIZES = BlockSizes(16, 128)
F32 = np.dtype(np.float32)


def larger(case: Case) -> Case:
    """With several tiles along each axis, the last ones not whole: a block of keys is never below 128."""
    more = 13 if case.query_length > 1 else 0
    return replace(case, query_length=case.query_length + more, key_length=case.key_length + 145)


class TestPallasTpu(AttentionImplementation):
    name = "pallas_tpu"
    sizes = SIZES

    @pytest.fixture(autouse=True)
    def interpreted(self, request):
        if not FULL_GRID and request.node.name not in QUICK:
            pytest.skip("one of the cases that make check-tpu runs")
        with mode(True):
            yield

    def resized(self, case):
        return larger(case)

    def check(self, module, case, dtype, sizes):
        super().check(module, larger(case), dtype, sizes)

    @pytest.mark.parametrize("live", ["full", "causal"])
    def test_scores_that_are_only_scaled_have_exponentials_with_base_2(self, module, live):
        score, condition = None, None
        if live == "causal":
            score = traced(lambda s, i, j: jnp.where(i >= j, s * np.float32(0.3), -np.inf), SCORE, QUERY, KEY)
            condition = causal()
        case = Case("scaled", query_length=256, key_length=256, head_size=16, value_head_size=16, size=20.0,
                    score=score, live=condition)  # fmt: skip
        AttentionImplementation.check(self, module, case, "bfloat16", BlockSizes(128, 128))
        for dtype in (jnp.bfloat16, jnp.float32):
            spec = case.spec(dtype)
            *types, _ = jax.eval_shape(lambda dtype=dtype: case.operands(dtype))
            run = partial(module.forward, spec, BlockSizes(128, 128))
            assert ("exp2" in str(jax.make_jaxpr(run)(Operands(*types)))) == (dtype == jnp.bfloat16)

    def test_float64_stays_float64(self, module):
        pytest.skip("pallas_tpu: TPUs do not compute with float64")


class TestTpuInterpreter:
    """JAX's simulation of a TPU's memories: reads out of bounds, of what was never written, and races are errors."""

    @pytest.mark.parametrize(
        "name", ["causal with more keys", "grouped queries", "biases of every shape", "lengths", "sink"]
    )
    def test_values_and_gradients(self, name):
        if not FULL_GRID and name != "causal with more keys":
            pytest.skip("one of the cases that make check-tpu runs")
        from jax.experimental.pallas import tpu as pltpu

        case = replace(larger(BY_NAME[name]), batch=1, key_heads=1)
        with mode(pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")):
            found = computed(pallas_tpu, case, F32, SIZES)
        wanted = computed(OPERATION.implementation("reference"), case, F32, SIZES)
        for part, value in wanted.items():
            assert errors(found[part], value)[0] < 1e-5, part


# ---------------------------------------------------------------------- the grid


def visits(grid: Grid) -> np.ndarray:
    """How often each tile is visited, by whatever the grid is."""
    shape = grid.geometry
    count = np.zeros(shape.states.shape, int)
    dimensions = [(name, extent) for name, extent, _ in grid.dimensions if name in ("row", "column", "tile")]
    tables = grid.tables or ()
    for ids in np.ndindex(*(extent for _, extent in dimensions)):
        at = dict(zip([name for name, _ in dimensions], ids, strict=True))
        given = [at.get(name, 0) for name, _, _ in grid.dimensions]
        place = grid.place(given, tables)
        if place.state != DEAD:
            count[place.row, place.column] += 1
    return count


@pytest.mark.parametrize("group", ["row", "column", "tile", "all"])
@pytest.mark.parametrize("name", ["full", "causal with more keys", "sliding window", "blocks", "grouped queries"])
def test_a_grid_visits_every_live_tile_once_and_begins_and_ends_each_output(name, group):
    case = replace(BY_NAME[name], query_length=61, key_length=700)
    shape = geometry(case.spec(), SIZES)
    grid = Grid.of(shape, ("B", "K", "G"), group)
    np.testing.assert_array_equal(visits(grid), (shape.states != DEAD).astype(int))
    extents = [extent for _, extent, _ in grid.dimensions][3:]
    open_block, written = None, []
    for ids in np.ndindex(*extents):
        place = grid.place((0, 0, 0, *ids), grid.tables or ())
        block = {"row": place.row, "column": place.column, "tile": (place.row, place.column), "all": 0}[group]
        assert bool(place.first) == (open_block is None)
        assert open_block in (None, block)
        open_block = None if place.last else block
        if place.last:
            written.append(block)
    rows, columns = shape.states.shape
    assert (
        len(written) == len(set(written)) == {"row": rows, "column": columns, "tile": rows * columns, "all": 1}[group]
    )


def test_dead_tiles_are_no_steps():
    case = replace(BY_NAME["causal"], query_length=2048, key_length=2048)
    grid = Grid.of(geometry(case.spec(), BlockSizes(256, 256)), ("B", "K", "G"), "row")
    assert grid.listed == 8 * 9 // 2


def test_few_queries_of_many_heads_share_a_tile():
    shape = geometry(Case("decode", groups=8, query_length=1, key_length=4096).spec(), BlockSizes(512, 1024))
    assert (shape.merged, shape.rows, shape.query_block) == (True, 8, 16)


# ---------------------------------------------------------------------- refusals and lowering


def test_what_mosaic_lacks_is_refused_before_any_compile():
    from attention_cases import SCORE, traced

    device = Device("tpu", "TPU v5 lite")
    spec = BY_NAME["causal"].spec
    assert not isinstance(pallas_tpu.supports(spec(), device), Unsupported)
    assert "float16" in pallas_tpu.supports(spec(np.float16), device).reason
    lacking = replace(spec(), score=traced(lambda s: jnp.cbrt(s), SCORE))
    assert "cbrt" in pallas_tpu.supports(lacking, device).reason
    assert "AUTOPALLAS_INTERPRET=1" in pallas_tpu.supports(spec(), Device("cpu", "cpu")).reason


@pytest.mark.parametrize("name", BY_NAME if FULL_GRID else LOWERED)
def test_cases_are_lowered_for_a_tpu(name):
    case = larger(BY_NAME[name])
    spec, types = case.spec(jnp.bfloat16), jax.eval_shape(lambda: case.operands(jnp.bfloat16))

    def run(*given: Any) -> Any:
        *arrays, dout = given
        return both(pallas_tpu, spec, SIZES, Operands(*arrays), Cotangents(dout))[1]

    with Device("tpu", "TPU v5 lite").lowered():
        text = jax.jit(run).trace(*types).lower(lowering_platforms=("tpu",)).as_text()
    for kernel in ("tpu", "tpu_backward_query", "tpu_backward_key_value"):
        assert f'kernel_name = "autopallas_attention_{kernel}"' in text


# ---------------------------------------------------------------------- through optimize


def attend(query, key, value):
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / 4.0
    i = jnp.arange(scores.shape[-1])
    scores = jnp.where(i[:, None] >= i, scores, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)


def loss(function):
    return lambda *operands: (function(*operands).astype(jnp.float32) ** 2).sum()


X = jnp.asarray(np.random.default_rng(0).standard_normal((2, 37, 2, 16)), jnp.float32)
KERNEL = "tpu_custom_call"


def test_interpreted_end_to_end_on_a_cpu(monkeypatch):
    monkeypatch.setenv("AUTOPALLAS_INTERPRET", "1")
    optimized = autopallas.optimize(attend, implementation="pallas_tpu")
    found = jax.jit(jax.value_and_grad(loss(optimized), (0, 1, 2)))(X, X, X)
    wanted = jax.jit(jax.value_and_grad(loss(attend), (0, 1, 2)))(X, X, X)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    assert optimized.report().sites[0].implementation == "pallas_tpu"


def test_without_interpretation_a_cpu_refuses_to_run_it():
    optimized = autopallas.optimize(attend, implementation="pallas_tpu")
    with pytest.raises(UnsupportedError, match="AUTOPALLAS_INTERPRET=1"):
        optimized(X, X, X)


@pytest.mark.parametrize("asked", [{"objective": "always"}, {"implementation": "pallas_tpu"}], ids=str)
def test_an_export_for_a_tpu_from_a_cpu_contains_the_kernels(asked):
    optimized = autopallas.optimize(attend, **asked)
    forward = jax.export.export(jax.jit(optimized), platforms=["tpu"])(X, X, X)
    assert forward.mlir_module().count(KERNEL) == 1
    gradient = jax.jit(jax.grad(loss(optimized), (0, 1, 2)))
    assert jax.export.export(gradient, platforms=["tpu"])(X, X, X).mlir_module().count(KERNEL) >= 3


def test_one_export_for_both_has_kernels_for_the_tpu_only():
    optimized = autopallas.optimize(attend, objective="always")
    both = jax.export.export(jax.jit(optimized), platforms=["tpu", "cpu"])(X, X, X)
    assert both.mlir_module().count(KERNEL) == 1
    np.testing.assert_allclose(both.call(X, X, X), attend(X, X, X), atol=1e-5)


def test_a_kernel_that_cannot_be_lowered_leaves_the_original(monkeypatch):
    monkeypatch.setattr(pallas_tpu.tpu_forward, "forward", lambda *_: 1 / 0)
    optimized = autopallas.optimize(attend, objective="always")
    text = jax.export.export(jax.jit(optimized), platforms=["tpu"])(X[:, :29], X[:, :29], X[:, :29]).mlir_module()
    assert KERNEL not in text
