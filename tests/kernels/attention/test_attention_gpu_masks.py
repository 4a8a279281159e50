"""Masks that are data on a GPU: the tiles that side inputs hide by a low score are found at run time, and left out."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import KEY, QUERY, SCORE, Case, named, oracle_of, side
from support.oracle import errors
from test_attention_fills import BF16, F16, KINDS, SCALE
from test_attention_gpu_fills import both, needs_interpreter
from test_attention_implementations import BY_NAME

from autopallas.compile.gpu import H100
from autopallas.kernels.attention import dynamic_tiles, fill_proofs, fills, gpu_block_sizes
from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.kernels.attention.dynamic_tiles import merged, run_time_states, unseen
from autopallas.kernels.attention.fill_proofs import Proof
from autopallas.kernels.attention.fills import fill_of, hides_by_sides, mask_class
from autopallas.kernels.attention.gpu_grid import Visits
from autopallas.kernels.attention.operands import Operands, Results
from autopallas.kernels.attention.programs import traced
from autopallas.kernels.attention.spec import SideSpec
from autopallas.kernels.attention.tiles import DEAD, PARTIAL
from autopallas.sites.interpret import mode

FULL_GRID = os.environ.get("FULL_GRID") == "1"
SIZES = BlockSizes(64, 64)
I32, BOOL, F32 = (np.dtype(name) for name in ("int32", "bool", "float32"))
LENGTH = 200


def varies(letters: str) -> tuple[bool, bool, bool, bool, bool]:
    b, k, g, t, s = (axis in letters for axis in "BKGTS")
    return b, k, g, t, s


OF_ROWS, OF_KEYS = SideSpec(I32, varies("BT")), SideSpec(I32, varies("BS"))
FORMS: dict[str, tuple[Any, tuple[SideSpec, ...]]] = {
    "segments": (lambda s, i, j, a, b: jnp.where(a == b, s * SCALE, -1e9), (OF_ROWS, OF_KEYS)),
    "causal segments": (lambda s, i, j, a, b: jnp.where((i >= j) & (a == b), s * SCALE, -1e9), (OF_ROWS, OF_KEYS)),
    "a mask": (lambda s, i, j, m: jnp.where(m, s * SCALE, -1e9), (SideSpec(BOOL, varies("BTS")),)),
    "a padding": (lambda s, i, j, m: jnp.where(m, s * SCALE, -1e4), (SideSpec(BOOL, varies("BS")),)),
    "an added mask": (lambda s, i, j, m: s * SCALE + m, (SideSpec(F32, varies("BTS")),)),
    "an added padding": (lambda s, i, j, m: s * SCALE + m, (SideSpec(F32, varies("BS")),)),
    "one minus a mask": (
        lambda s, i, j, m: s * SCALE - 1e9 * (1 - m.astype(np.float32)), (SideSpec(I32, varies("BS")),),
    ),
    "a mask beside a bias": (
        lambda s, i, j, m, b: jnp.where(m, s * SCALE + b, -1e9),
        (SideSpec(BOOL, varies("BS")), SideSpec(F32, varies("TS"))),
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small attentions of one head are treated as large ones of many."""
    monkeypatch.setattr(fills, "_LEAST_SCORES", 0)
    monkeypatch.setattr(fills, "_LEAST_SHARING", 1)
    both.cache_clear()
    yield
    both.cache_clear()


def case_of(form: str, **changes: Any) -> Case:
    program, sides = FORMS[form]
    inputs = (side(n, x.dtype) for n, x in enumerate(sides))
    sizes = dict(batch=2, key_heads=1, query_length=LENGTH, key_length=LENGTH) | changes
    return Case(f"data {form}", score=traced(program, SCORE, QUERY, KEY, *inputs), sides=sides, **sizes)


def drawn(case: Case, form: str, kind: str = "usual", dtype: Any = BF16) -> tuple[Operands, Any]:
    """Returns operands, of which the last keys are hidden from the first rows, and the cotangent."""
    query, key, value, _, sink, dout = replace(case, sides=()).operands(F32)
    match kind:
        case "low scores":  # of some rows, below the fill
            query, key = query.at[..., 20:23, :].set(-1e6), jnp.abs(key) * 1e5
        case "a hidden key is NaN":
            key = key.at[..., -1, 0].set(np.nan)
        case "a hidden key is infinite":
            key = key.at[..., -1, 0].set(np.inf)
        case "a hidden value is NaN":
            value = value.at[..., -1, 0].set(np.nan)
        case "a hidden value is infinite":
            value = value.at[..., -1, 0].set(-np.inf)
        case "a query is NaN":
            query = query.at[..., 3, 0].set(np.nan)
        case "a cotangent is infinite":
            dout = dout.at[..., 3, 0].set(np.inf)
        case "a cotangent is NaN":
            dout = dout.at[..., 3, 0].set(np.nan)
    t, s = jnp.arange(case.query_length), jnp.arange(case.key_length)
    starts = jnp.array([[70, 140], [30, 190]])  # of the second and the third segment of each example
    of_rows, of_keys = (jnp.sum(x[None, :, None] >= starts[:, None], -1).astype(jnp.int32) for x in (t, s))
    seen = of_rows[:, :, None] == of_keys[:, None, :]
    if kind == "rows without any key":
        seen = seen & (t >= 20)[None, :, None] & (t != 75)[None, :, None]
        of_rows = jnp.where((t < 20) | (t == 75), 7, of_rows)
    shown = s < jnp.array([[65], [100]])
    of_positions = {"T": of_rows, "S": of_keys if "segments" in form else shown, "TS": seen}
    sides = []
    for x in case.sides:
        axes = "".join(axis for axis, v in zip("BKGTS", x.varies, strict=True) if v)
        if axes == "TS":
            mask = jnp.asarray(np.random.default_rng(0).standard_normal((1, len(t), len(s))), F32)
        else:
            mask = of_positions[axes.removeprefix("B")]
            mask = jnp.where(mask, 0.0, -1e9).astype(F32) if x.dtype == F32 else mask.astype(x.dtype)
        shape = tuple(n if v else 1 for n, v in zip((2, 1, 1, len(t), len(s)), x.varies, strict=True))
        sides.append(mask.reshape(shape))
    query, key, value, dout = (x.astype(dtype) for x in (query, key, value, dout))
    return Operands(query, key, value, tuple(sides), sink), dout


def scores(case: Case, given: Operands) -> np.ndarray:
    """Whether each score of the first head is low, with products of 0, [B, T, S]."""
    t, s = jnp.arange(case.query_length)[:, None], jnp.arange(case.key_length)[None]
    found = case.score.evaluate(jnp.zeros((), F32), t, s, given.sides)
    return np.broadcast_to(np.asarray(found), (2, 1, 1, len(t), s.size))[:, 0, 0] < -500


# ---------------------------------------------------------------------- what is found


@pytest.mark.parametrize("form", FORMS)
def test_tiles_that_are_hidden_throughout_are_found(form):
    case = case_of(form)
    given, _ = drawn(case, form)
    assert hides_by_sides(case.spec(BF16))
    found = np.asarray(Proof.of(case.spec(BF16), given).unseen)
    low = scores(case, given)
    wanted = [[[low[b, i : i + 64, j : j + 64].all() for j in range(0, LENGTH, 64)] for i in range(0, LENGTH, 64)]
              for b in range(2)]  # fmt: skip
    np.testing.assert_array_equal(np.broadcast_to(found, (2, 4, 4)), wanted)
    assert found.any()


@pytest.mark.parametrize("form", ["segments", "a mask"])
def test_rows_without_a_key_keep_all_tiles(form):
    case = case_of(form)
    given, _ = drawn(case, form, "rows without any key")
    found = np.asarray(Proof.of(case.spec(BF16), given).unseen)
    assert not found[:, :2].any(), "rows 0 to 19 and 75 see nothing"
    assert found[:, 2:].any()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_unusual_is_not_left_out(kind):
    case = case_of("segments")
    given, dout = drawn(case, "segments", kind)
    spec = case.spec(BF16)
    unusual = kind in {"low scores", "a hidden key is NaN", "a hidden key is infinite", "a hidden value is NaN",
                       "a hidden value is infinite", "a query is NaN"}  # fmt: skip
    assert np.asarray(Proof.of(spec, given).unseen).any() != unusual
    unusual |= kind in {"a cotangent is infinite", "a cotangent is NaN"}
    assert np.asarray(Proof.of(spec, given, dout).unseen).any() != unusual
    assert not np.asarray(Proof.of(spec, given, jnp.ones_like(dout), (jnp.array([np.nan]),)).unseen).any()


def test_positions_count_too():
    case = case_of("causal segments")
    spec, (given, _) = case.spec(BF16), drawn(case, "causal segments")
    proof = Proof.of(spec, given)
    found = np.asarray(Visits.of(spec, "row", 64, 64, given.sides, proof).table)[..., :2]
    np.testing.assert_array_equal(found, [[[0, 1], [0, 2], [0, 2], [0, 2]], [[0, 1], [0, 2], [0, 3], [0, 2]]])
    wide = Visits.of(spec, "column", 64, 128, given.sides, proof)
    np.testing.assert_array_equal(np.asarray(wide.table)[..., 1], [[3, 2], [3, 2]])
    assert Visits.of(spec, "row", 64, 64, given.sides, proof).longest_first
    assert mask_class(spec, "pallas_gpu") == "causal and dynamic"
    assert gpu_block_sizes.schedules(spec) == ("",)


def test_rows_of_other_masks_hold_but_for_their_schedule():
    """The time of a full mask is a bound of what is computed, and of lists nothing is known before."""
    spec = case_of("segments", batch=64, key_heads=8).spec(BF16)
    assert mask_class(spec, "pallas_gpu") == mask_class(spec, "cudnn") == "full"
    assert gpu_block_sizes.schedules(spec) == ("",)
    assert gpu_block_sizes.schedule_of(spec, BlockSizes(128, 128, "persistent"), H100) == ""
    assert "checked at run time" in spec.checks("pallas_gpu")[0]
    assert spec.checks("xla") == ()


def test_where_little_is_shared_or_computed_nothing_is_looked_for(monkeypatch):
    monkeypatch.undo()
    spec = case_of("segments", key_heads=8, query_length=1024, key_length=1024).spec(BF16)
    assert hides_by_sides(spec)
    assert not hides_by_sides(replace(spec, key_heads=4))
    assert hides_by_sides(replace(spec, key_heads=4, groups=2))
    assert not hides_by_sides(replace(spec, query_length=512))
    of_heads = SideSpec(F32, varies("KTS"))
    biased = replace(case_of("a mask beside a bias", key_heads=8, query_length=1024, key_length=1024).spec(BF16))
    assert hides_by_sides(biased)
    assert not hides_by_sides(replace(biased, sides=(biased.sides[0], of_heads)))


@pytest.mark.parametrize(
    "program",
    [
        lambda s, m: jnp.where(m, s * SCALE, -100.0),
        lambda s, m: jnp.where(m, -s, -1e9),
        lambda s, m: jnp.where(m, jnp.sqrt(s), -1e9),
        lambda s, m: s * jnp.where(m, 1.0, 1e9),
    ],
    ids=["a fill that is not low", "falls", "an infinite derivative", "a factor"],
)
def test_other_programs_are_left_alone(program):
    case = replace(case_of("a padding"), score=traced(program, SCORE, side(0, bool)))
    given, _ = drawn(case, "a padding")
    proof = Proof.of(case.spec(BF16), given)
    assert proof is None or not np.asarray(proof.unseen).any()


# ---------------------------------------------------------------------- what is decided of tiles


@pytest.mark.parametrize("name", ["segments and causal", "lengths", "mask as a side input"])
@pytest.mark.parametrize("at_once", [2**22, 1])
def test_dead_tiles_are_those_of_the_other_implementations(name, at_once, monkeypatch):
    monkeypatch.setattr(dynamic_tiles, "_AT_ONCE", at_once)
    case = replace(BY_NAME[name], query_length=193, key_length=330, batch=3)
    spec, sides = case.spec(), case.operands()[3]
    found = np.asarray(unseen(spec, sides))
    for row_block, column_block in [(64, 64), (128, 64), (64, 192), (192, 256)]:
        wanted = np.asarray(run_time_states(spec, row_block, column_block, sides))
        states = merged(jnp.asarray(found), row_block, column_block, *wanted.shape[1:])
        np.testing.assert_array_equal(np.where(states, DEAD, PARTIAL), wanted)
    assert merged(jnp.asarray(found), 16, 32, 13, 11).shape == (*found.shape[:1], 13, 11)
    assert unseen(replace(spec, assume_finite=False), sides) is None


def test_no_array_of_the_size_of_the_scores(monkeypatch):
    """Where rows are more than are decided at once, booleans of one part of them, not fused on a CPU, are there, and
    what becomes of them: those of all rows would be 16 times as many."""
    monkeypatch.setattr(dynamic_tiles, "_AT_ONCE", 2 * 64 * 16)
    case = replace(BY_NAME["segments and causal"], query_length=1024, key_length=1024)
    run = jax.jit(lambda *sides: unseen(case.spec(), sides))
    temporary = run.lower(*case.operands()[3]).compile().memory_analysis().temp_size_in_bytes
    assert temporary < 3 * case.batch * 64 * 1024


# ---------------------------------------------------------------------- what is computed


def check(form: str, kind: str, dtype: Any = BF16, sizes: BlockSizes = SIZES, **changes: Any) -> None:
    """With hidden tiles left out and without: the same NaNs, the same infinities, and numbers to within roundings to
    the operands' dtype: of results, and of probabilities that are added up."""
    case = case_of(form, **changes)
    spec, (given, dout) = case.spec(dtype), drawn(case, form, kind, dtype)
    with mode(True):
        found, wanted = (both(replace(spec, assume_finite=a), sizes)(given, dout) for a in (True, False))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
        finite = np.isfinite(b)
        np.testing.assert_array_equal(a[~finite], b[~finite])
        if finite.any():
            np.testing.assert_allclose(a[finite], b[finite], rtol=1e-2, atol=1e-3 * max(np.abs(b[finite]).max(), 1e-30))


@needs_interpreter
@pytest.mark.parametrize("kind", [*KINDS, "rows without any key"])
def test_the_numbers_are_those_of_all_tiles(kind):
    if not FULL_GRID and kind not in ("low scores", "rows without any key"):
        pytest.skip("one of the cases that make check-gpu runs")
    check("segments", kind)


@needs_interpreter
@pytest.mark.parametrize("form", FORMS)
def test_masks(form):
    if not FULL_GRID and form != "a mask":
        pytest.skip("one of the cases that make check-gpu runs")
    check(form, "usual")


@needs_interpreter
@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": F16},
        {"groups": 2},
        {"query_length": 77, "key_length": 211},
        {"sizes": BlockSizes(128, 64)},
        {"sizes": BlockSizes(128, 128)},
        {"head_size": 72, "value_head_size": 72},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_shapes(changes):
    if not FULL_GRID and "query_length" not in changes:
        pytest.skip("one of the cases that make check-gpu runs")
    check("causal segments", "usual", **changes)


@needs_interpreter
@pytest.mark.parametrize("form", ["segments", "an added mask"])
def test_errors_are_those_of_roundings(form):
    """Against float64, in values and gradients; of a mask that is added too.

    The bound is five roundings to bfloat16, 2 ** -8: probabilities, gradients of scores and results are rounded.
    """
    if not FULL_GRID and form != "segments":
        pytest.skip("one of the cases that make check-gpu runs")
    case = case_of(form)
    (given, dout), spec = drawn(case, form), case.spec(BF16)
    with mode(True):
        out, rows, factor, gradients = both(spec, SIZES)(given, dout)
    wanted = oracle_of(case, BF16, (*given, dout))
    for name, found in named(Results(out, rows, factor), gradients).items():
        assert max(errors(found, wanted[name])) < 2e-2, name


@needs_interpreter
def test_tiles_that_are_left_out_are_not_read(monkeypatch):
    """Were they left out where nothing is shown, low scores would give other numbers."""
    real = fill_proofs._unseen
    monkeypatch.setattr(fill_proofs, "_unseen", lambda spec, sides, greatest: real(spec, sides, jnp.float32(1.0)))
    monkeypatch.setattr(fill_proofs, "usual", lambda *_, **__: jnp.asarray(True))
    with pytest.raises(AssertionError):
        check("segments", "low scores")


def test_a_fill_of_positions_alone_is_as_it_was():
    spec = replace(case_of("causal segments"), sides=(), score=traced(
        lambda s, i, j: jnp.where(i >= j, s, -1e9), SCORE, QUERY, KEY)).spec(BF16)  # fmt: skip
    assert fill_of(spec) is not None
    assert not hides_by_sides(spec)
