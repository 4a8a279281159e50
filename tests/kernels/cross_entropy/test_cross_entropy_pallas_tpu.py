"""The TPU kernels of cross-entropy: every case interpreted, some under the simulated TPU, and what is lowered."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cross_entropy_cases import BF16, F32, KINDS, LOSS, ROW, Case, computed, oracle
from cross_entropy_implementation import BY_NAME, SIZES, CrossEntropyImplementation
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from support.oracle import errors

import autopallas
from autopallas.kernels.cross_entropy import cross_entropy, pallas_tpu
from autopallas.kernels.cross_entropy.block_sizes import BlockSizes
from autopallas.kernels.cross_entropy.operands import Operands
from autopallas.kernels.cross_entropy.operation import OPERATION
from autopallas.kernels.cross_entropy.spec import CrossEntropySpec, SideSpec
from autopallas.kernels.cross_entropy.tpu_memory import fitting, vmem_bytes
from autopallas.kernels.tpu import GENERATIONS
from autopallas.sites import interpret
from autopallas.sites.device import Device
from autopallas.sites.operation import Supported, Unsupported

EVERYTHING = os.environ.get("FULL_GRID") == "1"
"""`make check-tpu` runs what `make test` has no time for."""
V5E = Device("tpu", "TPU v5 lite")
TASKS = ("statistics", "rows", "columns")


def some(names, chosen):
    return list(names) if EVERYTHING else list(chosen)


class TestPallasTpu(CrossEntropyImplementation):
    name = "pallas_tpu"

    @pytest.fixture(autouse=True)
    def interpreted(self):
        with interpret.mode(True):
            yield

    @pytest.mark.parametrize(
        "name",
        some(BY_NAME, ["odd sizes", "odd embedding table", "one row", "smaller than a block", "labels out of range",
                       "soft cap", "row factor and bias", "vocabulary mask", "N x V bias", "rows without positions",
                       "ties", "NaN and infinities", "activations of 1000"]),
    )  # fmt: skip
    def test_statistics_and_gradients(self, module, name):
        super().test_statistics_and_gradients(module, name)

    @pytest.mark.parametrize("sizes", some(list(SIZES)[1:], ["one tile"]))
    @pytest.mark.parametrize("name", some(["ties", "N x V bias", "NaN and infinities"], ["ties"]))
    def test_any_block_sizes(self, module, name, sizes):
        super().test_any_block_sizes(module, name, sizes)

    @pytest.mark.parametrize("name", some(["row factor and bias", "activations of 1000"], ["row factor and bias"]))
    def test_narrow_operands(self, module, name):
        super().test_narrow_operands(module, name, BF16)

    @pytest.mark.parametrize("sizes", some(SIZES, ["tiles"]))
    def test_forward_and_backward_see_the_same_logits(self, module, sizes):
        super().test_forward_and_backward_see_the_same_logits(module, sizes)

    def test_no_kernel_asks_how_large_its_grid_is(self, module, monkeypatch):
        """Versions 0.11 of JAX answer with the grid of an earlier call of the same body."""
        monkeypatch.setattr(pl, "num_programs", None)
        super().test_statistics_and_gradients(module, "odd sizes")

    @pytest.mark.parametrize("sizes", some(SIZES, ["tiles"]))
    @pytest.mark.parametrize("form", ["finish", "products"])
    @pytest.mark.parametrize("name", some(["labels out of range", "N x V bias"], ["N x V bias"]))
    def test_products(self, module, name, form, sizes):
        super().test_products(module, name, form, sizes)

    @pytest.mark.parametrize("form", some(["finish", "products"], ["finish"]))
    @pytest.mark.parametrize("name", some(["plain", "odd embedding table"], ["odd embedding table"]))
    def test_products_of_narrow_operands(self, module, name, form):
        super().test_products_of_narrow_operands(module, name, form)

    @pytest.mark.parametrize("dtype", some([np.int8, np.uint8, np.int16, np.uint32], [np.uint8]))
    def test_labels_of_any_integer_dtype(self, module, dtype):
        super().test_labels_of_any_integer_dtype(module, dtype)


SIMULATED = {
    "tails": Case("tails", rows=40, hidden=9, vocabulary=300, labels=(0, 300), kinds=KINDS),
    "tails, embedding table": Case("tails, table", rows=40, hidden=8, vocabulary=150, labels=(-9, 400), kinds=LOSS,
                                   vocabulary_major=True),
    "side inputs": Case("side inputs", rows=40, vocabulary=150, logit=lambda z, t, b, f: z * t + b.astype(F32) + f,
                        sides=(SideSpec(F32, ROW), SideSpec(BF16, (False, True)), SideSpec(F32, (True, True))),
                        draw="nnn", labels=(0, 150), kinds=LOSS),
}  # fmt: skip


@pytest.mark.parametrize("name", some(SIMULATED, ["tails, embedding table"]))
def test_the_simulated_tpu_finds_no_fault(name, monkeypatch):
    """With blocks as the hardware takes them: none out of bounds, none returned to, no garbage in a result."""
    case, sizes = SIMULATED[name], BlockSizes(32, 128)
    spec, operands = case.spec(), case.operands()
    monkeypatch.setattr(pallas_tpu, "INTERPRETED_UNITS", (128, 32))
    with interpret.mode(pltpu.InterpretParams(uninitialized_memory="nan")):
        found = computed(OPERATION.implementation("pallas_tpu"), sizes, case, spec, operands)
    wanted = oracle(case, F32, None, F32)
    for key, value in wanted.items():
        # The gradient of a bfloat16 side input is in bfloat16: no number of this dtype need be as near to the oracle as
        # 5e-5 of the largest one.  But it is rounded only once, so half of its last place is added, not more.
        dtype = operands[2][int(key[5:])].dtype if key.startswith("dside") else F32
        rounded_once = np.abs(value) * float(jnp.finfo(dtype).eps) / 2 if dtype != F32 else 0
        beyond = np.sign(found[key] - value) * np.maximum(np.abs(found[key] - value) - rounded_once, 0)
        assert errors(value + beyond, value)[0] <= 5e-5, key


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_grids_of_one_process_keep_their_own_extents(dtype):
    """JAX 0.11.0 to 0.11.2 give a kernel that is one function for several grids the number of programs of the first:
    the end of a sum, where what lies behind is cleared and narrow results are written, would be missed."""
    random, sizes = np.random.default_rng(0), BlockSizes(128, 256)
    # float32 sums of 128 products; bfloat16 gradients have 8 bits, and the oracle rounds them elsewhere.
    tolerance = 5e-5 if dtype == F32 else 4e-2
    for rows, vocabulary in ((256, 512), (700, 512), (256, 1300), (130, 300)):
        x = jnp.asarray(random.standard_normal((rows, 128)), dtype)
        w = jnp.asarray(random.standard_normal((128, vocabulary)), dtype)
        labels = jnp.asarray(random.integers(0, vocabulary, rows))

        def loss(x, w, labels=labels, **chosen):
            return cross_entropy(x, w, labels, **chosen)[0].sum()

        with interpret.mode(True):
            found = jax.grad(partial(loss, implementation="pallas_tpu", block_sizes=sizes), (0, 1))(x, w)
        wanted = jax.grad(partial(loss, implementation="reference"), (0, 1))(x.astype(F32), w.astype(F32))
        for own, other in zip(found, wanted, strict=True):
            assert errors(np.asarray(own, F32), np.asarray(other))[0] <= tolerance, (rows, vocabulary)


# ---------------------------------------------------------------------- before a compile


def large(hidden: int = 4096, **changes) -> CrossEntropySpec:
    case = Case("large", rows=8192, hidden=hidden, vocabulary=131072, kinds=LOSS, vocabulary_major=True)
    return replace(case.with_products(case.spec(BF16, logit_dtype=BF16), "finish"), **changes)


@pytest.mark.parametrize("generation", GENERATIONS, ids=lambda g: g.name)
def test_tiles_fit_and_are_aligned(generation):
    for hidden in (64, 768, 4096, 5000):
        spec = large(hidden)
        for task in TASKS:
            for sizes in (BlockSizes(2048, 2048), BlockSizes(100, 300), BlockSizes(8, 8)):
                shape = fitting(spec, sizes, task, generation.budget)
                assert vmem_bytes(spec, shape, task) <= generation.budget
                assert shape.rows % 32 == 0
                assert shape.columns % 128 == 0
    device = Device("tpu", generation.kinds[0])
    assert pallas_tpu.supports(large(), device) == Supported()
    assert "no tile of hidden size 1000000" in pallas_tpu.supports(large(1_000_000), device).reason


def test_candidates_give_different_tiles():
    for generation in GENERATIONS:
        found = pallas_tpu.candidates(large(), Device("tpu", generation.kinds[0]))
        tiles = [tuple(fitting(large(), sizes, task, generation.budget) for task in TASKS) for sizes in found]
        assert len(set(tiles)) == len(tiles) > 1


def test_a_short_axis_is_one_block():
    case = Case("short", rows=7, hidden=64, vocabulary=100, kinds=LOSS)
    assert fitting(case.spec(), BlockSizes(7, 100), "statistics", 2**24) == (7, 100)


@pytest.mark.parametrize(
    "spec, reason",
    [
        (BY_NAME["plain"].spec(np.float16), "float16"),
        (BY_NAME["plain"].spec(logit_dtype=np.float16), "float16"),
        (BY_NAME["plain"].spec(np.float64), "float64"),
    ],
)
def test_what_it_does_not_support_it_says(spec, reason):
    answer = pallas_tpu.supports(spec, V5E)
    assert isinstance(answer, Unsupported)
    assert reason in answer.reason


def test_it_runs_on_a_tpu_or_interpreted():
    assert isinstance(pallas_tpu.supports(large(), Device("cpu", "cpu")), Unsupported)
    with interpret.mode(True):
        assert pallas_tpu.supports(large(), Device("cpu", "cpu")) == Supported()


@pytest.mark.parametrize("major", [True, False])
def test_what_is_lowered_for_a_tpu_are_the_kernels(major):
    case = Case("lowered", rows=1000, hidden=256, vocabulary=5000, kinds=LOSS, vocabulary_major=major)
    spec = case.with_products(case.spec(BF16, logit_dtype=BF16), "finish")
    types = [jax.ShapeDtypeStruct(s, BF16) for s in ((1000, 256), (5000, 256) if major else (256, 5000))]

    def train(x, w, labels):
        return pallas_tpu.forward(spec, BlockSizes(512, 1024), Operands(x, w, (labels,)))

    with V5E.targeted():
        traced = jax.jit(train).trace(*types, jax.ShapeDtypeStruct((1000, 1), jnp.int32))
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
    for task in TASKS:
        assert f'kernel_name = "autopallas_cross_entropy_{task}"' in text
    assert "1000x5000" not in text


@pytest.mark.parametrize("asked", [{"objective": "always"}, {"implementation": "pallas_tpu"}], ids=str)
def test_a_train_step_exported_for_a_tpu_contains_the_kernels(asked):
    def loss(x, w, labels):
        logits = x @ w
        return (jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]).mean()

    types = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 32), (32, 300))]
    step = jax.jit(autopallas.optimize(jax.grad(loss, (0, 1)), **asked))
    text = jax.export.export(step, platforms=["tpu"])(*types, jax.ShapeDtypeStruct((64,), jnp.int32)).mlir_module()
    for task in TASKS:
        assert f'kernel_name = "autopallas_cross_entropy_{task}"' in text
    assert "64x300" not in text
