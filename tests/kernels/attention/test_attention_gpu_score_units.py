"""Units in which gradients of scores fit float16: found from bounds, and kept by the kernels."""

from __future__ import annotations

import os
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import QUERY, SCORE, Case, promoted_spec, traced
from test_attention_implementations import BY_NAME, both
from test_attention_pallas_gpu import needs_interpreter, racing

from autopallas.kernels.attention import (
    gpu_backward,
    gpu_backward_plan,
    gpu_block_sizes,
    gpu_score_units,
    pallas_gpu,
    reference,
)
from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.kernels.attention.gpu_score_units import Units, fit, halves, norm, slope
from autopallas.kernels.attention.operands import Cotangents, Operands
from autopallas.sites.elementwise import Side

FULL_GRID = os.environ.get("FULL_GRID") == "1"
BF16, F16, F32 = np.dtype(jnp.bfloat16), np.dtype(np.float16), np.dtype(np.float32)
SCALE = np.float32(-0.25)


@pytest.mark.parametrize(
    "score, bound",
    [
        (lambda s: s, 1.0),
        (lambda s: SCALE * s, 0.25),
        (lambda s: s / SCALE, 4.0),
        (lambda s: jnp.tanh(s / np.float32(20)) * np.float32(30), 1.5),
        (lambda s: jnp.where(s > 3, s * SCALE, -jnp.inf), 0.25),
        (lambda s: s + s, 2.0),
        (lambda s: -jnp.maximum(s, 2 * s), 2.0),
        (lambda s: s * s, None),
        (lambda s: jnp.exp(s), None),
        (lambda s: s / np.float32(0), None),
        (lambda s: s * np.float32(np.inf), None),
    ],
)
def test_a_derivative_is_bounded_by_the_programs_steps(score, bound):
    found = slope(traced(score, SCORE))
    assert found == (None if bound is None else pytest.approx(bound))


def test_what_varies_has_no_known_size():
    assert slope(traced(lambda s, t: s * t, SCORE, Side(0, F32))) is None
    assert slope(traced(lambda s, i: s * i.astype(F32), SCORE, QUERY)) is None
    assert slope(traced(lambda s, i: s * SCALE + i.astype(F32), SCORE, QUERY)) == 0.25


def test_gradients_fit_where_positions_alone_hide_keys():
    for name in ("full", "causal", "sliding window", "grouped queries"):
        assert fit(BY_NAME[name].spec(BF16))
    spec = BY_NAME["causal"].spec(BF16)
    assert not fit(BY_NAME["causal"].spec(F16))
    assert not fit(replace(spec, score_gradient_dtype=BF16))
    assert not fit(replace(spec, score_precision="HIGHEST"))
    for name in ("segments and causal", "bias", "sink", "lengths", "probabilities masked again"):
        assert not fit(BY_NAME[name].spec(BF16))
    assert not fit(replace(BY_NAME["dilated"], query_length=512, key_length=512).spec(BF16))  # in part, each block
    for name in ("rows without keys, finite fill", "rows without keys, fill -inf"):  # see what others do not
        assert not fit(BY_NAME[name].spec(BF16))


LONG = replace(BY_NAME["causal"], batch=1, key_heads=2, groups=2, query_length=150, key_length=150, head_size=64,
               value_head_size=64)  # fmt: skip
SHAPES = {
    "causal": LONG,
    "window": replace(LONG, score=BY_NAME["sliding window"].score, live=BY_NAME["sliding window"].live),
    "full": replace(LONG, score=BY_NAME["full"].score, live=BY_NAME["full"].live),
}


def uneven(case: Case):
    """Operands whose cotangents become smaller from row to row, to 2**-60, with one value that is 2**8 times the
    others, some that are 0, and one head whose keys are small."""
    query, key, value, _, _, dout = case.operands(F32)
    size = jnp.exp2(-jnp.floor(60 * jnp.arange(case.query_length) / case.query_length))
    value = value.at[:, :, 2].multiply(256).at[:, :, 3::7].set(0)
    key = key.at[:, 0].multiply(2.0**-20)
    return [x.astype(BF16) for x in (query, key, value, dout * size[:, None])]


def exact(case: Case, query, key, value, dout):
    """Gradients in float64."""
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in (query, key, value, dout)]
        spec = promoted_spec(case.spec(BF16))
        _, found = both(reference, spec, None, Operands(*wide[:3]), Cotangents(wide[3]))
        return [np.asarray(x) for x in found[:3]]


def by_rows(found, wanted):
    """The greatest error of a row by its norm; of a row that is 0, by 2**-140."""
    difference = np.linalg.norm(np.asarray(found, np.float64) - wanted, axis=-1)
    return float(np.max(difference / np.maximum(np.linalg.norm(wanted, axis=-1), 2.0**-140)))


@pytest.mark.parametrize("name", SHAPES)
def test_in_its_unit_a_gradient_of_a_score_is_as_exact_as_in_tf32(name):
    """For each row and for each key, however small those that it sees are beside others."""
    case = SHAPES[name]
    spec = case.spec(BF16)
    query, key, value, dout = uneven(case)
    q, k, v, d = (np.asarray(x, np.float64) for x in (query, key, value, dout))
    score = np.einsum("bkgtd,bksd->bkgts", q, k)
    i, j = np.arange(150)[:, None], np.arange(150)
    program = lambda s: np.asarray(spec.score.evaluate(jnp.asarray(s, F32), jnp.asarray(i), jnp.asarray(j), ()))  # noqa: E731
    x = program(score).astype(np.float64)
    p = np.exp(x - x.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = np.einsum("bkgtd,bksd->bkgts", d, v)
    gradient = np.where(p > 0, p * (dp - (p * dp).sum(-1, keepdims=True)) * 0.3, 0)
    units = Units.of(spec, norm(dout), value)

    def rounded(unit):
        assert np.all(np.isfinite(unit) & (unit > 0))
        assert np.array_equal(np.exp2(np.round(np.log2(unit))), unit)
        scaled = gradient * unit
        assert np.max(np.abs(scaled)) < 2**15.1
        return scaled.astype(F16).astype(np.float64)

    copy, scale = (np.asarray(x, np.float64) for x in halves(key))
    unit = np.asarray(units.rows, np.float64)[..., None]
    found = np.einsum("bkgts,bksd->bkgtd", rounded(unit), copy) / (unit * scale[..., None, None, None])
    assert by_rows(found, np.einsum("bkgts,bksd->bkgtd", gradient, k)) < 2**-9

    copy, scale = (np.asarray(x, np.float64) for x in halves(query))
    unit = np.asarray(units.keys, np.float64)
    found = np.einsum("bkgts,bkgtd->bksd", rounded(unit[:, :, None, None, :]), copy)
    assert by_rows(found / (unit * scale[..., None])[..., None], np.einsum("bkgts,bkgtd->bksd", gradient, q)) < 2**-9


@pytest.mark.parametrize("flipped", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_what_is_seen_is_found_in_blocks_of_every_size(name, flipped, monkeypatch):
    case = replace(SHAPES[name], query_length=140)
    spec = case.spec(BF16)
    i, j = np.arange(140)[:, None], np.arange(150)
    live = np.ones((140, 150), bool) if spec.live is None else spec.live.evaluate(None, jnp.asarray(i), j, ())
    live = np.asarray(live).T if flipped else np.asarray(live)
    away = np.random.default_rng(0).permutation(2 * live.shape[1]).reshape(1, 2, live.shape[1]).astype(np.float32)
    wanted = np.max(np.where(live, away[:, :, None], 0), axis=-1)
    for block in (16, 64, 256):
        monkeypatch.setattr(gpu_score_units, "_LEAST_BLOCK", block)
        gpu_score_units._seen.cache_clear()
        np.testing.assert_array_equal(gpu_score_units._greatest_seen(spec, jnp.asarray(away), flipped), wanted)
    gpu_score_units._seen.cache_clear()


@pytest.mark.parametrize("length", [4096, 16384, 2**17])
def test_gradients_fit_however_long_the_rows_are(length):
    assert fit(replace(BY_NAME["causal"], query_length=length, key_length=length).spec(BF16))


@pytest.mark.parametrize("factor", [0.0, 2.0**-126, 2.0**-60, 2.0**60, 2.0**110])
def test_units_of_the_smallest_and_the_largest_numbers_are_numbers(factor):
    case = SHAPES["causal"]
    spec = case.spec(BF16)
    query, _, value, dout = (x * jnp.asarray(factor, BF16) for x in uneven(case))
    units = Units.of(spec, norm(dout), value)
    copy, scale = halves(query)
    assert bool(jnp.all(jnp.isfinite(copy)) & jnp.all(scale > 0))
    for unit in units:
        assert bool(jnp.all(jnp.isfinite(unit) & (unit > 0)))


@needs_interpreter
@pytest.mark.parametrize("name", SHAPES)
def test_gradients_of_rows_and_keys_of_every_size(name, monkeypatch):
    """Each row's dq and each key's dk is as exact as with gradients of scores in two parts of bfloat16."""
    if not FULL_GRID and name != "causal":
        pytest.skip("one of the cases that make check-gpu runs")
    case = SHAPES[name]
    given = uneven(case)
    spec = case.spec(BF16)
    assert fit(spec)

    def gradients():
        run = jax.jit(lambda q, k, v, d: both(pallas_gpu, spec, BlockSizes(64, 64), Operands(q, k, v), Cotangents(d)))
        with racing():
            return run(*given)[1][:3]

    found = gradients()
    for module in (gpu_backward, gpu_backward_plan, gpu_block_sizes):
        monkeypatch.setattr(module, "fit", lambda spec: False)
    first = 0 if name == "full" else 1  # a row that sees one key has no gradient but what is rounded
    wanted = exact(case, *given)
    for part, own, other, right, begin in zip(
        ("dq", "dk", "dv"), found, gradients(), wanted, (first, 0, 0), strict=True
    ):
        errors = [by_rows(x[..., begin:, :], right[..., begin:, :]) for x in (own, other)]
        assert errors[0] <= 1.1 * errors[1] + 2**-9, (part, errors)
