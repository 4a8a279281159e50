"""Masks with finite fills on a GPU: what is known of scores before they are computed, and what is left out by it."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import KEY, QUERY, SCORE, Case, named, oracle, side
from support.oracle import errors
from test_attention_fills import BF16, BIAS, FORMS, KINDS, MASKS, NO_MASKS, PADDING, SCALE, case_of, operands, seen

from autopallas import compat
from autopallas.kernels.attention import gpu_forward, pallas_gpu
from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.kernels.attention.fill_proofs import Proof
from autopallas.kernels.attention.fills import fill_of, mask_class, skips, tile_states
from autopallas.kernels.attention.gpu_grid import Visits
from autopallas.kernels.attention.gpu_order import Order
from autopallas.kernels.attention.operands import Cotangents, Operands, Results
from autopallas.kernels.attention.programs import causal, traced
from autopallas.kernels.attention.schedule import edges
from autopallas.kernels.attention.tiles import DEAD, HIDDEN
from autopallas.kernels.gpu import too_few_threads
from autopallas.sites.interpret import mode

FULL_GRID = os.environ.get("FULL_GRID") == "1"
REASON = compat.missing_mosaic_gpu() or too_few_threads()
needs_interpreter = pytest.mark.skipif(REASON is not None, reason=str(REASON))
SIZES = BlockSizes(64, 64)
CASE = {"batch": 2, "key_heads": 1, "query_length": 270, "key_length": 270}


def narrow(case: Case, kind: str) -> tuple[Operands, Any]:
    """Returns operands in bfloat16, and the cotangent."""
    query, key, value, sides, sink, dout = operands(case, kind)
    return Operands(*(x.astype(BF16) for x in (query, key, value)), sides, sink), dout.astype(BF16)


def proof(case: Case, kind: str) -> Proof:
    found = Proof.of(case.spec(BF16), narrow(case, kind)[0])
    assert found is not None
    return found


def certain(case: Case, kind: str = "usual") -> np.ndarray:
    spec = case.spec(BF16)
    least = tile_states(spec, edges(spec.query_length, 64), edges(spec.key_length, 64)).least
    return np.asarray(proof(case, kind).rows(least))


@pytest.mark.parametrize("form", FORMS)
def test_usual_rows_are_certain(form):
    case = case_of(form, **CASE)
    assert skips(case.spec(BF16), "pallas_gpu")
    assert certain(case).shape == (1, 270)
    assert certain(case).all()


@pytest.mark.parametrize("form", NO_MASKS)
def test_fills_that_are_not_low_are_no_masks(form):
    case = case_of(NO_MASKS[form], **CASE)
    assert Proof.of(case.spec(BF16), narrow(case, "usual")[0]) is None


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_unusual_is_not_certain(kind):
    fine = {"usual", "a cotangent is infinite", "a cotangent is NaN"}  # which only a backward sees
    rows = certain(case_of("-1e9", **CASE), kind)
    assert rows.all() if kind in fine else not rows.any()  # squares of values of 1e18 have an infinite sum


def test_the_cotangent_and_numbers_of_rows_count_in_a_backward():
    case = case_of("-1e9", **CASE)
    given, dout = narrow(case, "a cotangent is NaN")
    assert not Proof.of(case.spec(BF16), given, dout).usual
    assert not Proof.of(case.spec(BF16), given, jnp.ones_like(dout), (jnp.array([1.0, np.nan]),)).usual
    assert Proof.of(case.spec(BF16), given, jnp.ones_like(dout), (jnp.ones(2),)).usual


def test_rows_without_a_key_are_not_certain():
    form, _ = MASKS["rows without any key"]
    np.testing.assert_array_equal(certain(case_of(form, **CASE))[0], np.arange(270) >= 9)


def test_rows_are_certain_where_side_inputs_leave_a_key():
    """Of a causal mask with padding at the beginning, the first rows see nothing."""
    score = traced(lambda s, i, j, m: jnp.where(seen(i, j) & m, s * SCALE, -1e9), SCORE, QUERY, KEY, side(0, bool))
    case = Case("sides", score=score, sides=(PADDING,), draw="m", **CASE)
    spec, (given, _) = case.spec(BF16), narrow(case, "usual")
    mask = jnp.arange(270) >= jnp.array([100, 0])[:, None]
    given = given._replace(sides=(mask.reshape(given.sides[0].shape),))
    least = tile_states(spec, edges(270, 64), edges(270, 64)).least
    rows = np.asarray(Proof.of(spec, given).rows(least))
    np.testing.assert_array_equal(rows, np.arange(270) >= np.array([100, 0])[:, None])
    visits = Visits.of(spec, "row", 64, 64, given.sides, Proof.of(spec, given))
    np.testing.assert_array_equal(visits.table[:, :, 1], [[5, 5, 3, 4, 5], [1, 2, 3, 4, 5]])


def test_a_score_that_may_fall_is_not_bounded():
    form = traced(lambda s, i, j: jnp.where(seen(i, j), -s, -1e9), SCORE, QUERY, KEY)
    spec = Case("falls", score=form, **CASE).spec(BF16)
    assert fill_of(spec) is not None
    assert skips(spec, "xla")
    assert not skips(spec, "pallas_gpu")
    assert mask_class(spec, "pallas_gpu") == "full"
    assert not spec.checks("pallas_gpu")


@pytest.mark.parametrize("home", ["row", "column"])
def test_hidden_tiles_are_listed_for_rows_that_need_them(home):
    """The lists are those of a mask of -inf; where nothing is certain, no tile is left out, or computed without it."""
    case = case_of("-1e9", **CASE)
    spec = case.spec(BF16)
    dead = replace(spec, live=causal())
    wanted = Visits.of(dead, home, 128, 64, ())
    for kind in ("usual", "low scores"):
        found = Visits.of(spec, home, 128, 64, (), proof(case, kind))
        counts = np.asarray(found.table)[0, :, :2]
        np.testing.assert_array_equal(counts[:, 0], wanted.known[0, :, 0] if kind == "usual" else 0)
        np.testing.assert_array_equal(counts[:, 1], wanted.known[0, :, 1] if kind == "usual" else found.away_blocks)
        for blocks in np.asarray(found.table)[0, :, 2:]:
            assert sorted(blocks) == list(range(found.away_blocks))
        np.testing.assert_array_equal(found.known[0, :, :2], wanted.known[0, :, :2])
        assert (found.ordered, found.longest_first) == (wanted.ordered, wanted.longest_first)
        orders = (Order.of(visits, 8, "persistent", 2**20) for visits in (found, wanted))
        np.testing.assert_array_equal(*(order.lists for order in orders))


@cache
def both(spec, sizes: BlockSizes) -> Any:
    """Forward and backward, compiled once for all kinds of operands."""

    @jax.jit
    def run(given, dout):
        found = pallas_gpu.forward(spec, sizes, given)
        return *found, pallas_gpu.backward(spec, sizes, given, found.residuals, Cotangents(dout))

    return run


def check(case: Case, kind: str, sizes: BlockSizes = SIZES) -> None:
    """With hidden tiles left out and without: the same numbers, the same NaNs, the same infinities.

    Numbers are the same to within roundings to bfloat16, 2 ** -8: of results, and of probabilities that are added
    up, since tiles that are computed by other programs scale scores in another order.
    """
    spec, (given, dout) = case.spec(BF16), narrow(case, kind)
    assert fill_of(spec) is not None
    with mode(True):
        found, wanted = (both(replace(spec, assume_finite=a), sizes)(given, dout) for a in (True, False))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
        finite = np.isfinite(b)
        np.testing.assert_array_equal(a[~finite], b[~finite])
        if finite.any():
            np.testing.assert_allclose(a[finite], b[finite], rtol=1e-2, atol=1e-3 * max(np.abs(b[finite]).max(), 1e-30))


SMALL = {"batch": 1, "key_heads": 1, "query_length": 135, "key_length": 135}


@needs_interpreter
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["-1e9", "-1e9 added", "product and sum"])
def test_the_numbers_are_those_of_all_tiles(form, kind):
    if not FULL_GRID and (form, kind) not in {("-1e9", "usual"), ("-1e9", "low scores")}:
        pytest.skip("one of the cases that make check-gpu runs")
    check(case_of(form, **SMALL), kind)


@needs_interpreter
@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    if not FULL_GRID and name not in ("rows without any key", "a sink"):
        pytest.skip("one of the cases that make check-gpu runs")
    form, changes = MASKS[name]
    check(case_of(form, **{**SMALL, **changes}), "usual")


@needs_interpreter
@pytest.mark.parametrize("kind", ["usual", "low scores"])
def test_side_inputs(kind):
    """A padding beside the mask, and a bias whose gradient fills tiles."""
    if not FULL_GRID and kind != "usual":
        pytest.skip("one of the cases that make check-gpu runs")

    def form(s, i, j, m, b):
        return jnp.where(seen(i, j) & m, s * SCALE + b, -1e9)

    score = traced(form, SCORE, QUERY, KEY, side(0, bool), side(1))
    check(Case("sides", score=score, sides=(PADDING, BIAS), draw="mn", **{**SMALL, "groups": 2}), kind)


@needs_interpreter
@pytest.mark.parametrize("schedule", ["sections", "persistent"])
def test_schedules(schedule, monkeypatch):
    monkeypatch.setattr(gpu_forward.gpu, "processors", lambda device: 1)
    check(case_of("-1e9", **{**SMALL, "batch": 2}), "low scores", BlockSizes(64, 64, schedule))
    check(case_of("-1e9", **{**SMALL, "batch": 2}), "usual", BlockSizes(64, 64, schedule))


@needs_interpreter
@pytest.mark.parametrize("form", ["-1e9", "-1e4", "arithmetic", "soft cap"])
def test_errors_are_those_of_roundings(form):
    """Against float64, in values and gradients.

    The bound is five roundings to bfloat16, 2 ** -8: probabilities, gradients of scores and results are rounded.
    """
    if not FULL_GRID and form != "-1e9":
        pytest.skip("one of the cases that make check-gpu runs")
    case = case_of(form, **{**SMALL, "groups": 2})
    (given, dout), spec = narrow(case, "usual"), case.spec(BF16)
    with mode(True):
        out, rows, factor, gradients = both(spec, SIZES)(given, dout)
    wanted = oracle(case, BF16)
    for name, found in named(Results(out, rows, factor), gradients).items():
        assert max(errors(found, wanted[name])) < 2e-2, name


@needs_interpreter
def test_hidden_tiles_are_not_read(monkeypatch):
    """Tiles that are left out are not computed: with lists that were never completed, low scores are wrong."""
    case = case_of("-1e9", **SMALL)
    monkeypatch.setattr(Proof, "blocks", lambda self, least, size: jnp.ones((1, -(-135 // size)), bool))
    both.cache_clear()
    with pytest.raises(AssertionError):
        check(case, "low scores")
    both.cache_clear()


def test_states_of_a_causal_mask():
    states = tile_states(case_of("-1e9", **CASE).spec(BF16), edges(270, 64), edges(270, 64)).states
    assert np.array_equal(states == HIDDEN, np.triu(np.ones_like(states), 1) > 0)
    assert not np.any(states == DEAD)
