"""The GPU kernel of cross-entropy, interpreted with race detection; and what it refuses."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cross_entropy_cases import BF16, F32, F64, KINDS, LOSS, Case
from cross_entropy_implementation import BY_NAME, SIZES, CrossEntropyImplementation
from support.drained import drained_barriers
from support.multicast import interpreted_multicast

from autopallas import compat
from autopallas.kernels import gpu_pipeline
from autopallas.kernels.cross_entropy import gpu_logits, gpu_statistics, gpu_values, pallas_gpu, xla
from autopallas.kernels.cross_entropy.block_sizes import BlockSizes
from autopallas.kernels.cross_entropy.gradients import Pull
from autopallas.kernels.cross_entropy.operands import Operands
from autopallas.kernels.cross_entropy.spec import Product, Statistic
from autopallas.kernels.cross_entropy.statistics import stream
from autopallas.kernels.cross_entropy.tiles import TileOperands
from autopallas.kernels.gpu import APPROXIMATED, too_few_threads
from autopallas.sites import interpret
from autopallas.sites.device import Device
from autopallas.sites.elementwise import Score, traced
from autopallas.sites.operation import Supported

EVERYTHING = os.environ.get("FULL_GRID") == "1"
"""`make check-gpu` runs what `make test` has no time for."""
H100 = Device("gpu", "NVIDIA H100 80GB HBM3")
MISSING = compat.missing_mosaic_gpu()
needs_mosaic = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
REASON = MISSING or too_few_threads()
needs_interpreter = pytest.mark.skipif(REASON is not None, reason=str(REASON))

TILED = {
    "tails": Case("tails", rows=150, hidden=72, vocabulary=300, labels=(-3, 330), kinds=LOSS),
    "table": Case("table", rows=130, hidden=200, vocabulary=520, labels=(0, 520), kinds=KINDS, vocabulary_major=True),
    "whole": Case("whole", rows=150, hidden=72, vocabulary=512, labels=(250, 260), kinds=LOSS),
    "no label": Case("no label", rows=70, hidden=72, vocabulary=300, labels=(-9, 0), kinds=LOSS),
}
"""Several tiles of rows and of the vocabulary, more steps than stages, and tails of every axis; a vocabulary that fills
its tiles, with labels in the last columns of one and the first of the next; and rows whose labels are none."""


SHARING = {
    "pairs": Case("pairs", rows=500, hidden=136, vocabulary=520, labels=(-3, 600), kinds=LOSS),
    "pairs, table": Case("pairs, table", rows=200, hidden=72, vocabulary=300, kinds=KINDS, vocabulary_major=True),
}
"""An even number of tiles of rows, so that two blocks load the same columns of the weight together."""


class Gpu(CrossEntropyImplementation):
    name = "pallas_gpu"
    __test__ = False


@pytest.fixture
def racing():
    from jax.experimental.pallas import mosaic_gpu

    with interpret.mode(mosaic_gpu.InterpretGPUParams(detect_races=True)), interpreted_multicast(), drained_barriers():
        yield Gpu()


@pytest.fixture
def kernels_alone(monkeypatch):
    """What XLA's parts would compute fails."""
    monkeypatch.setattr(pallas_gpu, "xla", None)


def some(names, chosen):
    return list(names) if EVERYTHING else list(chosen)


@needs_interpreter
@pytest.mark.parametrize("dtype", some([BF16, np.dtype(np.float16)], [BF16]), ids=str)
@pytest.mark.parametrize(
    "name",
    some(
        BY_NAME, ["odd sizes", "odd embedding table", "soft cap", "ties", "row factor and bias", "NaN and infinities"]
    ),
)
def test_statistics_and_gradients(racing, kernels_alone, name, dtype):
    racing.check(pallas_gpu, BY_NAME[name], SIZES["vocabulary streams"], dtype)


@needs_interpreter
@pytest.mark.parametrize("name", some(TILED, ["tails"]))
def test_several_tiles_of_every_axis(racing, kernels_alone, name):
    for _ in range(3 if EVERYTHING else 1):  # threads of the interpreter run in another order each time
        racing.check(pallas_gpu, TILED[name], BlockSizes(1000, 136), BF16)


@needs_interpreter
@pytest.mark.parametrize("name", some(SHARING, ["pairs, table"]))
def test_two_blocks_load_the_weight_together(kernels_alone, name):
    from jax.experimental.pallas import mosaic_gpu

    case = SHARING[name]
    assert gpu_logits.paired(case.rows)
    assert not gpu_logits.paired(384)
    with interpret.mode(mosaic_gpu.InterpretGPUParams(detect_races=True)), interpreted_multicast() as transfers:
        Gpu().check(pallas_gpu, case, BlockSizes(1000, 136), BF16)
    assert transfers[0] > 0


@needs_interpreter
@pytest.mark.parametrize("rows", [100, 200])
def test_blocks_end_when_every_stage_has_been_given_back(monkeypatch, rows):
    """Else the consumers, of a cluster those of the other block too, arrive where nothing waits for them any more."""
    from jax.experimental.pallas import mosaic_gpu

    case = replace(TILED["tails"], rows=rows)
    x, w, sides, _ = case.operands(BF16)
    operands = Operands(x, w, sides)

    def run():
        with (
            interpret.mode(mosaic_gpu.InterpretGPUParams(detect_races=True)),
            interpreted_multicast(),
            drained_barriers() as barriers,
        ):
            jax.block_until_ready(jax.jit(partial(pallas_gpu.forward, case.spec(BF16), SIZES["tiles"]))(operands))
        return barriers[0]

    assert run() > 0
    monkeypatch.setattr(gpu_pipeline.Ring, "drain", lambda self, steps: None)
    with pytest.raises(Exception, match="a block ended when"):
        run()


@needs_interpreter
def test_logits_are_rounded_to_their_dtype(racing):
    """Ties and the argmax of rounded logits, which are exact here before they are rounded."""
    case = Case("rounded", whole=True, hidden=64, size=100.0, kinds=("max", "argmax", "ties"))
    spec = case.spec(BF16, logit_dtype=BF16)
    x, w, sides, _ = case.operands(BF16)
    (maximum, argmax, ties), _ = jax.jit(partial(pallas_gpu.forward, spec, SIZES["tiles"]))(Operands(x, w, sides))
    exact = np.asarray(x, np.float32) @ np.asarray(w, np.float32)
    z = np.asarray(jnp.asarray(exact).astype(BF16).astype(F32))
    np.testing.assert_array_equal(maximum, z.max(axis=1))
    np.testing.assert_array_equal(argmax, z.argmax(axis=1))
    np.testing.assert_array_equal(ties, (z == z.max(axis=1, keepdims=True)).sum(axis=1))
    assert np.asarray(ties).max() > 1


class _Hardware:
    """``jax.numpy`` with exponentials as far off as the hardware's may be, all of them in one direction.

    ``ex2.approx.ftz.f32`` of the argument times log2(e), rounded: within 2**-22, and 0 for what is not normal.
    """

    def __getattr__(self, name):
        return getattr(jnp, name)

    @staticmethod
    def exp(x):
        power = jnp.exp2(x * np.float32(np.log2(np.e)))
        return jnp.where(power < 2.0**-126, 0, power * np.float32(1 + 2**-22))


OFFSETS = {
    "large offset": Case("large offset", hidden=64, vocabulary=300, labels=(0, 300), whole=True, kinds=LOSS),
    "masked": replace(BY_NAME["rows without positions"], labels=(-20, 70), kinds=LOSS),
    "infinities": replace(BY_NAME["vocabulary mask"], kinds=LOSS),
    "activations of 1000": BY_NAME["activations of 1000"],
}


@needs_interpreter
@pytest.mark.parametrize("name", some(OFFSETS, ["large offset", "infinities"]))
def test_the_hardwares_exponentials_keep_the_error(racing, monkeypatch, name):
    """Each row's logsumexp, and the logit of its label, within 4e-6 of float64 on the same logits."""
    case = OFFSETS[name]
    spec = case.spec(BF16)
    x, w, sides, _ = case.operands(BF16)
    if name == "large offset":
        x, w = x.at[:, 0].set(1), w.at[0].set(2**14)
    monkeypatch.setattr(gpu_statistics, "jnp", _Hardware())
    found, _ = jax.jit(partial(pallas_gpu.forward, spec, SIZES["tiles"]))(Operands(x, w, sides))
    x, w = np.asarray(x, F64), np.asarray(w, F64)
    exact = x @ (w.T if case.vocabulary_major else w)
    if len(sides) > 1:
        beside = np.asarray(sides[1])
        exact = np.where(beside, exact, -np.inf) if beside.dtype == np.bool_ else exact + np.asarray(beside, F64)
    maximum, total, picked = (np.asarray(value, F64) for value in found)
    label = np.asarray(sides[0])[:, 0]
    inside = (label >= 0) & (label < case.vocabulary)
    own = np.where(inside, np.take_along_axis(exact, np.clip(label, 0, case.vocabulary - 1)[:, None], 1)[:, 0], 0)
    with np.errstate(divide="ignore"):
        shift = np.where(np.isfinite(exact.max(1)), exact.max(1), 0)
        logsumexp = shift + np.log(np.exp(exact - shift[:, None]).sum(1))
        ours = np.where(np.isfinite(maximum), maximum, 0) + np.log(total)
    scale = np.where(np.isfinite(logsumexp), np.maximum(np.abs(logsumexp), 1), 1)
    np.testing.assert_array_equal(np.isfinite(ours), np.isfinite(logsumexp))
    difference = np.where(np.isfinite(logsumexp), ours, 0) - np.where(np.isfinite(logsumexp), logsumexp, 0)
    assert (np.abs(difference) / scale).max() <= 4e-6
    np.testing.assert_allclose(picked, own, rtol=4e-6, atol=4e-6 * np.abs(exact[np.isfinite(exact)]).max())


@pytest.mark.parametrize(
    "function, reads",
    [(lambda z: z.astype(F32) * 2, F32), (lambda z: z, None), (lambda z: z.astype(F32) + z * 0, None)],
)
def test_rounded_logits_are_widened_where_they_are_only_widened(function, reads):
    """Two are rounded in one instruction; a program that computes with them in bfloat16 has them as they are."""
    found = gpu_logits.of_wide(traced(function, Score(BF16)))
    assert found is None if reads is None else found.inputs[0] == Score(reads)
    assert gpu_logits.of_wide(traced(lambda z: z * 2, Score(F32))) is None


def test_only_what_computes_no_function_of_its_own_is_approximated():
    """A soft cap by the hardware's tanh would be off by 2**-11 of itself."""
    assert APPROXIMATED.isdisjoint(BY_NAME["row factor and bias"].program().primitives)
    assert not APPROXIMATED.isdisjoint(BY_NAME["soft cap"].program().primitives)


def test_tiles_that_have_a_label():
    labels = jnp.full((70, 1), -1).at[3].set(0).at[5].set(127).at[64].set(128).at[69].set(299)
    found = gpu_statistics.tiles_of_labels([labels], 128, 128, 3)
    np.testing.assert_array_equal(found, [[1, 0, 0], [1, 1, 1]])  # rows behind the end count as label 0
    one = gpu_statistics.tiles_of_labels([jnp.full((1, 1), 200), jnp.full((1, 1), -1)], 128, 128, 3)
    np.testing.assert_array_equal(one, [[0, 1, 0]] * 2)


@needs_interpreter
@pytest.mark.parametrize("form", ["finish", "products"])
@pytest.mark.parametrize("name", some(["odd embedding table", "bias"], ["bias"]))
def test_products(racing, kernels_alone, name, form):
    racing.check_products(pallas_gpu, BY_NAME[name], form, SIZES["vocabulary streams"], BF16)


KEPT = {
    "tails": TILED["tails"],
    "pairs, table": SHARING["pairs, table"],
    "bias": BY_NAME["bias"],
    "soft cap": BY_NAME["soft cap"],
    "row factor and bias": BY_NAME["row factor and bias"],
}


@needs_interpreter
@pytest.mark.parametrize("name", some(KEPT, ["tails", "row factor and bias"]))
def test_products_of_logits_that_are_kept(racing, kernels_alone, name):
    """A block of rows after the other, with the whole vocabulary; the last block is the shorter one."""
    racing.check_products(pallas_gpu, KEPT[name], "finish", BlockSizes(128, 1000), BF16)


@needs_interpreter
def test_logits_that_are_kept_are_those_of_the_statistics(racing):
    """The kernel stores what it has looked at: rounded to the logits' dtype, once."""
    case = replace(TILED["tails"], whole=True, size=100.0, kinds=LOSS)
    spec = case.spec(BF16, logit_dtype=BF16)
    x, w, sides, _ = case.operands(BF16)
    statistics, logits = jax.jit(partial(pallas_gpu._statistics_and_logits, spec))(Operands(x, w, sides))
    exact = np.asarray(x, np.float32) @ np.asarray(w, np.float32)
    np.testing.assert_array_equal(logits, jnp.asarray(exact).astype(BF16))
    np.testing.assert_array_equal(statistics[0], np.asarray(logits, np.float32).max(axis=1))


@needs_interpreter
def test_where_the_greatest_logit_is_compared_xla_finds_both(racing, monkeypatch):
    """What the kernel finds with its roundings would not be found again with XLA's."""
    case = BY_NAME["ties"]
    spec = case.with_products(case.spec(BF16), "finish")
    greatest = tuple(Statistic(kind, spec.statistics[0].program) for kind in ("argmax", "ties"))
    spec = replace(spec, statistics=(*spec.statistics, *greatest))
    x, w, sides, _ = case.operands(BF16)
    monkeypatch.setattr(pallas_gpu, "_kept", None)
    found, wanted = (m.forward(spec, BlockSizes(8, 1000), Operands(x, w, sides)) for m in (pallas_gpu, xla))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@needs_mosaic
@pytest.mark.parametrize("vocabulary, part", [(300, 192), (1000, 256), (130, 128)])
def test_parts_of_the_vocabulary_begin_where_tma_reads_whole_tiles(monkeypatch, vocabulary, part):
    """A size near by that divides the vocabulary begins parts in the middle of TMA's tiles of 64 columns."""
    case = Case("parts", rows=8, hidden=8, vocabulary=vocabulary, labels=(0, vocabulary), kinds=LOSS)
    begun = []

    def values_call(spec, wanted, vectors, columns):
        def call(start, *operands):
            begun.append((int(start[0]), columns))
            return tuple(jnp.zeros((spec.rows, columns), dtype) for _, dtype in wanted)

        return call

    monkeypatch.setattr(gpu_values, "values_call", values_call)
    spec = case.with_products(case.spec(BF16), "products")
    x, w, sides, _ = case.operands(BF16)
    with jax.disable_jit():
        pallas_gpu.forward(spec, BlockSizes(8, part), Operands(x, w, (*sides, jnp.zeros((8, 1), F32))))
    assert sum(columns for _, columns in begun) >= vocabulary
    assert [start % gpu_logits.ALIGNED for start, _ in begun] == [0] * len(begun)


@needs_interpreter
def test_products_that_mosaic_lacks_are_left_to_xla(racing):
    case = replace(BY_NAME["plain"], kinds=("max", "exp_sum"))
    inverse = traced(lambda z: jax.lax.erf_inv(z / 100), Score(F32))
    spec = replace(case.spec(BF16), products=(Product("rows", inverse, BF16),))
    assert isinstance(pallas_gpu.supports(spec, Device.current()), Supported)
    x, w, sides, _ = case.operands(BF16)
    found, wanted = (m.forward(spec, SIZES["tiles"], Operands(x, w, sides)).products[0] for m in (pallas_gpu, xla))
    np.testing.assert_array_equal(found, wanted)


@needs_interpreter
def test_without_cotangents_gradients_are_zero(racing):
    case = replace(BY_NAME["plain"], kinds=("max", "exp_sum"))
    spec = case.spec(BF16)
    x, w, sides, _ = case.operands(BF16)
    operands = Operands(x, w, sides)
    residuals = pallas_gpu.forward(spec, SIZES["tiles"], operands).residuals
    wanted = (True, True, False)
    dx, dw, _ = pallas_gpu.backward(spec, SIZES["tiles"], operands, residuals, (None, None), wanted)
    np.testing.assert_array_equal(dx, jnp.zeros_like(x))
    np.testing.assert_array_equal(dw, jnp.zeros_like(w))


@pytest.mark.parametrize("name", ["ties", "soft cap", "row factor and bias"])
def test_the_gradient_as_a_program_is_the_gradient(name):
    """One entry's, for kernels, against a tile's: every statistic, the logits and the side inputs."""
    case = BY_NAME[name]
    spec = case.spec()
    x, w, sides, cotangents = case.operands()
    operands = TileOperands.of(spec, Operands(x, w, sides))
    statistics, _ = xla.forward(spec, SIZES["one tile"], Operands(x, w, sides))
    pull = Pull.of(spec, operands.labels, statistics, cotangents, lambda other: stream(other, SIZES["tiles"], operands))
    every = (0, spec.rows), (0, spec.vocabulary)
    tile = operands.tile(spec, operands.rows(every[0]), operands.columns(every[1]), *every)
    floating = [n for n, side in enumerate(spec.sides) if side.differentiable]
    dscore, dsides = pull.tile(tile, every[0], floating)
    given = tile._replace(sides=(*tile.sides, *pull.arrays()))
    for number, wanted in zip([None, *floating], [dscore, *dsides], strict=True):
        program = pull.program(number)
        found = given.value(program)
        assert found.dtype == wanted.dtype
        np.testing.assert_allclose(np.asarray(found, F32), np.asarray(wanted, F32), rtol=1e-5, atol=1e-6)


@needs_mosaic
def test_what_is_not_supported_is_refused_with_a_reason():
    plain = replace(BY_NAME["plain"], kinds=LOSS)
    assert isinstance(pallas_gpu.supports(plain.spec(BF16), H100), Supported)
    for spec, device, said in [
        (plain.spec(F32), H100, "not float32"),
        (plain.spec(BF16, F32), H100, "not float32"),
        (replace(BY_NAME["N x V bias"], kinds=LOSS).spec(BF16), H100, "varies over rows and vocabulary"),
        (plain.spec(BF16), Device("gpu", "NVIDIA A100-SXM4-80GB"), "this GPU is NVIDIA A100-SXM4-80GB"),
        (plain.spec(BF16), Device("cpu", "cpu"), "AUTOPALLAS_INTERPRET=1"),
    ]:
        assert said in pallas_gpu.supports(spec, device).reason
