"""The GPU kernels of recurrences, interpreted with race detection, against the loop in float64."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.drained import drained_barriers
from test_recurrence_chunks import DECAYS, errors, loop, spec, with_gradients

import autopallas
from autopallas import compat
from autopallas.kernels.gpu import too_few_threads
from autopallas.kernels.recurrence import pallas_gpu
from autopallas.kernels.recurrence.block_sizes import BlockSizes
from autopallas.kernels.recurrence.cases import in_direction, retention, types
from autopallas.kernels.recurrence.chunks import Recurrence, by_scans, chunked
from autopallas.sites import interpret
from autopallas.sites.device import Device
from autopallas.sites.operation import Supported, Unsupported
from autopallas.workbench.cases import Case

EVERYTHING = os.environ.get("FULL_GRID") == "1"
"""`make check-gpu` runs what `make test` has no time for."""
H100 = Device("gpu", "NVIDIA H100 80GB HBM3")
BF16 = np.dtype(jnp.bfloat16)

MISSING = compat.missing_mosaic_gpu()
needs_mosaic = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
REASON = MISSING or too_few_threads()
needs_interpreter = pytest.mark.skipif(REASON is not None, reason=str(REASON))

TOLERANCE = 4e-3
"""The last digit of bfloat16, beside twice the loop's own error in bfloat16."""


@pytest.fixture
def interpreted():
    """Kernels are interpreted, races and barriers that are left behind are errors."""
    from jax.experimental.pallas import mosaic_gpu

    with interpret.mode(mosaic_gpu.InterpretGPUParams(detect_races=True)), drained_barriers() as barriers:
        yield
    assert barriers[0] > 0, "no kernel was interpreted"


def arrays(decay: np.ndarray, rows: int = 64, columns: int = 64, shared: bool = False, seed: int = 0) -> Recurrence:
    """A recurrence whose numbers are those that bfloat16 has."""
    random = np.random.default_rng(seed)
    steps, groups, heads = decay.shape

    def rounded(x: Any) -> jax.Array:
        return jnp.asarray(x, jnp.bfloat16).astype(jnp.float32)

    lead, of_heads = (steps, groups, 1 if shared else heads), (groups, heads)
    shapes = ((*lead, rows), (steps, *of_heads, columns), (*lead, rows), (*of_heads, rows, columns))
    key, value, query, initial = (rounded(random.standard_normal(shape)) for shape in shapes)
    return Recurrence(rounded(decay), key, value, rounded(query * rows**-0.5), initial)


def check(given: Recurrence, before: bool, as_bfloat16: bool = False) -> None:
    """Values, last state and all gradients are within twice the error of the loop in bfloat16, or its last digit;
    where keys, values and queries are given in bfloat16, so are the values and their gradients."""
    random = np.random.default_rng(1)
    weights = [
        jnp.asarray(random.standard_normal(x.shape), jnp.bfloat16).astype(jnp.float32)
        for x in (given.value, given.initial)
    ]
    narrow = {name: getattr(given, name).astype(jnp.bfloat16) for name in ("key", "value", "query")}
    own = given._replace(**narrow) if as_bfloat16 else given
    ours = with_gradients(lambda x: chunked(x, 64, before, pallas_gpu.of_chunks), own, weights)
    (y, last), gradients = ours
    assert (y.dtype, last.dtype) == (own.query.dtype, jnp.float32)
    assert [x.dtype for x in gradients] == [x.dtype for x in own if x is not None]
    narrow = Recurrence(*(None if x is None else x.astype(jnp.bfloat16) for x in given))
    theirs = with_gradients(lambda x: loop(x, before), narrow, weights)
    with jax.enable_x64(True):
        wide = Recurrence(*(None if x is None else jnp.asarray(np.asarray(x, np.float64)) for x in given))
        doubled = [jnp.asarray(np.asarray(w, np.float64)) for w in weights]
        true = [[np.asarray(x) for x in part] for part in with_gradients(lambda x: loop(x, before), wide, doubled)]
    for own, original, exact in zip(ours, theirs, true, strict=True):
        for error, base in zip(errors(own, exact), errors(original, exact), strict=True):
            assert error <= max(TOLERANCE, 2 * base)


SHAPES = {
    "one step": (1, 1, 1, 64, 64),
    "two chunks, heads and groups": (70, 2, 2, 64, 64),
    "wide rows": (65, 1, 2, 128, 64),
    "wide columns": (64, 2, 1, 64, 128),
    "more chunks than stages": (300, 1, 1, 64, 64),
    "wide": (129, 1, 1, 128, 128),
    "small states": (77, 1, 3, 40, 72),
}
QUICK = ("two chunks, heads and groups",)
BOTH = ((False, False), (True, True), (False, True), (True, False))


@needs_interpreter
@pytest.mark.parametrize("shared, before", BOTH if EVERYTHING else BOTH[:2])
@pytest.mark.parametrize("shape", SHAPES if EVERYTHING else QUICK)
def test_chunks_compute_what_the_loop_does(interpreted, shape, shared, before):
    steps, groups, heads, rows, columns = SHAPES[shape]
    decay = np.random.default_rng(2).uniform(0.5, 1, (steps, groups, heads))
    check(arrays(decay, rows, columns, shared), before)


@needs_interpreter
@pytest.mark.parametrize("shared", (False, True) if EVERYTHING else (True,))
def test_what_the_program_has_in_bfloat16_is_read_and_written_in_it(interpreted, shared):
    check(arrays(np.random.default_rng(2).uniform(0.5, 1, (128, 2, 2)), 64, 64, shared), False, as_bfloat16=True)


@needs_interpreter
@pytest.mark.parametrize("kind", DECAYS if EVERYTHING else ("both signs", "some zero"))
def test_any_decay_is_as_exact_as_in_the_loop(interpreted, kind):
    """Products of decays neither lose digits nor stop being finite."""
    check(arrays(DECAYS[kind](np.random.default_rng(3), (150, 1, 1))), False)


@needs_interpreter
def test_a_decay_may_be_known_more_exactly_than_it_rounds(interpreted):
    """With ``1 - a`` for a small ``a`` the decay that bfloat16 rounds to one would not decay at all."""
    given = arrays(np.ones((256, 1, 1)))
    given = given._replace(**{name: abs(getattr(given, name)) for name in ("key", "value", "query", "initial")})
    excess = jnp.full((256, 1, 1), -1e-3, jnp.float32)
    found = chunked(given._replace(excess=excess), 64, False, pallas_gpu.of_chunks)
    true = chunked(given._replace(decay=given.decay - 1e-3), 64, False, by_scans)
    plain = chunked(given, 64, False, by_scans)
    assert max(errors(found, [np.asarray(x, np.float64) for x in true])) < TOLERANCE
    assert max(errors(plain, [np.asarray(x, np.float64) for x in true])) > 0.1


@needs_interpreter
def test_examples_are_further_groups(interpreted):
    """Under vmap, of which one operand may lack the axis."""
    given = arrays(np.random.default_rng(5).uniform(0.5, 1, (20, 2, 1)))
    stacked = given._replace(value=jnp.stack([given.value, -2 * given.value, given.value + 1]))
    axes = Recurrence(None, None, 0, None, None)

    def run(of_chunks):
        def loss(given):
            y, last = chunked(given, 64, False, of_chunks)
            return jnp.sum(jnp.sin(y)) + jnp.sum(last), (y, last)

        return jax.jit(jax.vmap(jax.grad(loss, has_aux=True), in_axes=(axes,)))(stacked)

    found, true = (jax.tree.leaves(run(of_chunks)) for of_chunks in (pallas_gpu.of_chunks, by_scans))
    assert max(errors(found, [np.asarray(x, np.float64) for x in true])) < 4 * TOLERANCE


def test_what_the_kernels_lack_is_plain_jax():
    """A smaller state of another kind may stand beside the one that was asked about."""
    random = np.random.default_rng(0)
    given = Recurrence(
        *(jnp.asarray(random.uniform(0.5, 1, (1, 8, 1, 2, 4)), jnp.float32) for _ in range(4)), jnp.zeros((1, 2, 4, 4))
    )
    for found, true in zip(pallas_gpu.of_chunks(False, given), by_scans(False, given), strict=True):
        np.testing.assert_array_equal(found, true)


@needs_mosaic
def test_what_is_refused_has_its_reason():
    own = spec(state_dtype=BF16, result_dtype=BF16)
    assert isinstance(pallas_gpu.supports(own, H100), Supported)
    reasons = {
        "float32 state": {"state_dtype": np.dtype(np.float32)},
        "float16 state": {"state_dtype": np.dtype(np.float16)},
        "its own decay": {"decay": "channel"},
        "delta rule": {"delta": True},
        "no products": {"decay": "elementwise"},
        "larger than": {"rows": 256},
    }
    for reason, changes in reasons.items():
        answer = pallas_gpu.supports(replace(own, **changes), H100)
        assert isinstance(answer, Unsupported)
        assert reason in answer.reason
    assert isinstance(pallas_gpu.supports(own, Device("gpu", "NVIDIA A100")), Unsupported)


def test_there_is_one_form():
    (one,) = pallas_gpu.candidates(spec(steps=1000), H100)
    assert one == BlockSizes("chunked", "chunked", 64)


@needs_mosaic
@pytest.mark.parametrize(
    "options, verdict",
    [({}, "kept"), ({"objective": "always"}, "applied"), ({"implementation": "pallas_gpu", "strict": True}, "applied")],
    ids=str,
)
def test_without_a_measured_row_it_is_applied_where_it_is_asked_for(options, verdict):
    sizes = (("T", 100), ("B", 2), ("H", 3), ("N", 64), ("P", 40))
    case = Case("recurrence", "forward+backward", "bfloat16", "scalar", sizes)
    function = autopallas.optimize(in_direction(case, retention), **options)
    with H100.targeted():
        lowered = jax.jit(function).trace(*types(case)).lower(lowering_platforms=("cuda",))
        (site,) = function.report().sites
    assert (site.verdict, site.implementation) == (verdict, "pallas_gpu")
    text = lowered.as_text()
    for kernel in ("states", "results", "gradients"):
        assert (f"autopallas_recurrence_{kernel}" in text) is (verdict == "applied")


@needs_mosaic
def test_a_float32_loop_is_chunks_in_plain_jax():
    sizes = (("T", 100), ("B", 2), ("H", 3), ("N", 64), ("P", 64))
    case = Case("recurrence", "forward", "float32", "scalar", sizes)
    function = autopallas.optimize(retention, objective="always")
    with H100.targeted():
        jax.jit(function).trace(*types(case)).lower(lowering_platforms=("cuda",))
        (site,) = function.report().sites
    assert (site.verdict, site.implementation) == ("applied", "xla")
