"""The TPU kernels of recurrences, interpreted, against the loop in float64; and what they refuse."""

from __future__ import annotations

import os
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from test_recurrence_chunks import DECAYS, arrays, check, corrected, errors, loop, spec, with_gradients

import autopallas
from autopallas.kernels import tpu
from autopallas.kernels.recurrence import pallas_tpu, tpu_kernels
from autopallas.kernels.recurrence.block_sizes import BlockSizes
from autopallas.kernels.recurrence.cases import ORIGINALS, in_direction, retention, types
from autopallas.kernels.recurrence.chunks import chunked
from autopallas.kernels.recurrence.example import program
from autopallas.kernels.recurrence.operation import OPERATION
from autopallas.kernels.recurrence.tpu_kernels import Layout, by_kernels
from autopallas.sites import interpret
from autopallas.sites.device import Device
from autopallas.sites.operation import Supported, Unsupported
from autopallas.workbench.cases import Case

EVERYTHING = os.environ.get("FULL_GRID") == "1"
V5E = Device("tpu", "TPU v5 lite")


def some(names, chosen):
    return list(names) if EVERYTHING else list(chosen)


@pytest.fixture
def interpreted():
    with interpret.mode(True):
        yield


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("steps, chunk", some([(37, 8), (32, 32), (5, 16), (1, 4), (70, 64)], [(37, 8), (5, 16)]))
def test_the_kernels_compute_what_the_loop_does(steps, chunk, shared, before):
    check(arrays(np.random.default_rng(2).uniform(0.5, 1, (steps, 2, 3)), shared), chunk, before, by_kernels)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("kind", some(DECAYS, ["near one", "some zero", "both signs", "one, but a few"]))
def test_any_decay_is_as_exact_as_in_the_loop(kind):
    """1000 steps: products of decays neither lose digits nor stop being finite."""
    check(arrays(DECAYS[kind](np.random.default_rng(3), (1000, 1, 2))), 64, False, by_kernels)


KINDS = {
    "channel": {},
    "delta": {"rate": 0.7},
    "delta, written apart": {"rate": 0.7, "apart": True},
    "channel, delta": {"rate": 0.7},
    "channel, delta, written apart": {"rate": 0.7, "apart": True},
}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("kind", KINDS)
def test_decays_of_rows_and_delta_rules(kind, before):
    shape = (13, 2, 3, 4) if "channel" in kind else (13, 2, 3)
    given = arrays(np.random.default_rng(2).uniform(0.5, 1, shape))
    check(corrected(given, **KINDS[kind]) if "delta" in kind else given, 8, before, by_kernels)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("decay", ["one, but a few", "some zero", "both signs"])
@pytest.mark.parametrize("kind", ["channel", "delta", "channel, delta"])
def test_any_decay_of_rows_and_in_delta_rules(kind, decay):
    shape = (100, 1, 2, 4) if "channel" in kind else (100, 1, 2)
    given = arrays(DECAYS[decay](np.random.default_rng(3), shape))
    check(corrected(given, 0.9) if "delta" in kind else given, 32, False, by_kernels)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_heads_may_be_in_several_blocks(shared, monkeypatch):
    """Blocks of two heads: each gives a part of the cotangents of the keys that it shares with others."""
    monkeypatch.setattr(tpu_kernels, "_MOST_HEADS", 2)
    check(arrays(np.random.default_rng(2).uniform(0.5, 1, (20, 2, 4)), shared), 8, False, by_kernels)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("channels", [False, True], ids=["scalar", "channel"])
def test_a_decay_may_be_known_more_exactly_than_it_rounds(channels):
    small = np.full((2000, 1, 1, 4) if channels else (2000, 1, 1), np.float32(1.23e-4))
    given = arrays(1 - small)
    given = given._replace(**{n: jnp.abs(getattr(given, n)) for n in ("key", "value", "query", "initial")})
    with jax.enable_x64(True):
        wide = type(given)(*(jnp.asarray(np.asarray(x, np.float64)) for x in given[:5]))
        true = [np.asarray(x) for x in loop(wide._replace(decay=jnp.asarray(1 - small.astype(np.float64))), False)]
    excess = jnp.asarray(-small, jnp.float32)
    assert max(errors(chunked(given._replace(excess=excess), 64, False, by_kernels), true)) < 4e-6
    assert max(errors(chunked(given, 64, False, by_kernels), true)) > 8e-6


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_the_simulated_tpu_finds_no_fault(shared, monkeypatch):
    """No block out of bounds, no result left and returned to, nothing read that was never written."""
    monkeypatch.setattr(tpu_kernels, "_MOST_HEADS", 2)
    given = arrays(np.random.default_rng(2).uniform(0.5, 1, (40, 2, 4)), shared)
    weights = jnp.ones(given.value.shape), jnp.ones(given.initial.shape)
    values, gradients = with_gradients(lambda x: loop(x, False), given, weights)
    with interpret.mode(pltpu.InterpretParams(uninitialized_memory="nan")):
        found = with_gradients(lambda x: chunked(x, 16, False, by_kernels), given, weights)
    for own, wanted in zip([*found[0], *found[1]], [*values, *gradients], strict=True):
        np.testing.assert_allclose(own, wanted, rtol=1e-4, atol=1e-5 * float(jnp.max(jnp.abs(wanted))))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("mapped", [False, True], ids=["one", "vmap"])
def test_a_program_runs_with_the_kernels(mapped):
    original, types = program()
    random = np.random.default_rng(0)
    lead = (2,) if mapped else ()
    given = [jnp.asarray(0.3 * random.standard_normal((*lead, 50, *t.shape[1:])), jnp.float32) for t in types[:3]]
    given.append(jnp.asarray(random.uniform(0.9, 1, (*lead, *types[3].shape)), jnp.float32))
    function = jax.vmap(original) if mapped else original

    def train(f):
        return lambda *a: jax.value_and_grad(lambda *a: jnp.sum(jnp.cos(f(*a))), (0, 1, 2, 3))(*a)

    optimized = autopallas.optimize(train(function), implementation="pallas_tpu", strict=True)
    wanted, found = train(function)(*given), optimized(*given)
    sites = [s for s in optimized.report().sites if s.op == "recurrence"]
    assert {(s.verdict, s.implementation) for s in sites} == {("applied", "pallas_tpu")}
    for own, exact in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(own, exact, rtol=1e-4, atol=2e-5 * float(jnp.max(jnp.abs(exact))))


def test_what_is_exported_for_a_tpu_is_the_kernel():
    original, types = program()
    optimized = autopallas.optimize(original, implementation="pallas_tpu")

    def step(*given):
        return jax.grad(lambda *a: jnp.sum(optimized(*a)), (0, 1, 2, 3))(*given)

    for function, names in ((optimized, ["forward"]), (step, ["states", "backward"])):
        text = jax.export.export(jax.jit(function), platforms=["tpu"])(*types).mlir_module()
        for name in names:
            assert f'kernel_name = "autopallas_recurrence_{name}"' in text


@pytest.mark.parametrize(
    "device, direction, objective, verdict",
    [
        ("TPU v5 lite", "forward", "time", "applied"),
        ("TPU v5 lite", "forward+backward", "time", "applied"),
        ("TPU v5 lite", "forward+backward", "memory", "applied"),
        ("TPU v6 lite", "forward", "time", "applied"),
        ("TPU v6 lite", "forward+backward", "time", "applied"),
        ("TPU v4", "forward", "time", "kept"),
    ],
)
def test_simulated_rows_license_it_where_there_are_some(device, direction, objective, verdict):
    sizes = (("T", 2048), ("B", 1), ("H", 8), ("N", 64), ("P", 64))
    case = Case(OPERATION.name, direction, "float32", "scalar", sizes)
    with Device("tpu", device).targeted():
        optimized = autopallas.optimize(in_direction(case, retention), objective=objective)
        jax.jit(optimized).trace(*types(case))
        sites = [s for s in optimized.report().sites if s.op == "recurrence"]
    assert {(s.verdict, s.implementation) for s in sites} == {(verdict, "pallas_tpu")}


@pytest.mark.parametrize(
    "variant, steps, heads, verdict",
    [
        ("delta", 512, 8, "applied"),
        ("delta", 384, 8, "applied"),
        ("delta", 500, 8, "applied"),
        ("delta", 257, 8, "kept"),
        ("delta", 512, 16, "kept"),
        ("channel", 257, 8, "applied"),
        ("channel", 512, 16, "applied"),
    ],
)
def test_steps_that_hardly_fill_their_chunks_count(variant, steps, heads, verdict):
    sizes = (("T", steps), ("B", 1), ("H", heads), ("N", 64), ("P", 64))
    case = Case(OPERATION.name, "forward", "float32", variant, sizes)
    with Device("tpu", "TPU v6 lite").targeted():
        sites = autopallas.explain(ORIGINALS[variant], *types(case)).sites
    (site,) = (s for s in sites if s.op == "recurrence")
    assert site.verdict == verdict
    assert (verdict == "kept") == ("may be left" in site.reason)


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"decay": "elementwise"}, "no products"),
        ({"state_dtype": np.dtype(np.float16)}, "float16"),
        ({"state_dtype": np.dtype(np.float64)}, "float64"),
        ({"rows": 4096, "columns": 4096}, "vector memory"),
    ],
)
def test_it_says_what_it_cannot_compute(changes, reason):
    answer = OPERATION.supports("pallas_tpu", spec(**changes), V5E)
    assert isinstance(answer, Unsupported)
    assert reason in answer.reason


def test_it_runs_on_tpus_alone():
    assert isinstance(pallas_tpu.supports(spec(), V5E), Supported)
    assert isinstance(pallas_tpu.supports(spec(), Device("cpu", "cpu")), Unsupported)


def test_blocks_of_heads_fill_the_vector_memory():
    for generation in tpu.GENERATIONS:
        for heads, most in ((1, 1), (6, 6), (8, 8), (12, 6), (13, 1), (80, 8)):
            assert Layout(64, 64, 64).heads_of_block(heads, generation.budget) == most
        for rows in (16, 64, 128, 256, 512):
            layout = Layout(128, rows, rows)
            assert layout.vmem_bytes(layout.heads_of_block(8, generation.budget)) < generation.budget


def test_candidates_fit_the_state_and_the_steps():
    long = spec(steps=2048, rows=64, columns=64)
    assert [c.chunk for c in pallas_tpu.candidates(long, V5E)] == [128, 64]
    assert [c.chunk for c in pallas_tpu.candidates(replace(long, steps=50), V5E)] == [64]
    assert pallas_tpu.default_block_sizes(long, V5E, None) == BlockSizes("chunked", "chunked", 128)
