"""Masks with finite fills: hidden tiles are left out where that changes nothing, whatever the numbers are."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import KEY, QUERY, SCORE, Case, side

from autopallas.kernels.attention import fills, intervals, xla, xla_backward
from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.kernels.attention.fills import fill_of, mask_class, tile_states
from autopallas.kernels.attention.intervals import Ranges
from autopallas.kernels.attention.operands import Cotangents, Operands
from autopallas.kernels.attention.operation import OPERATION
from autopallas.kernels.attention.programs import causal, traced
from autopallas.kernels.attention.schedule import schedule
from autopallas.kernels.attention.spec import AttentionSpec, SideSpec, Weight
from autopallas.kernels.attention.tiles import DEAD, HIDDEN, classify, scale_of, simplified, tile_map
from autopallas.kernels.attention.tpu_grid import geometry
from autopallas.sites.elementwise import Score
from autopallas.sites.interpret import mode

F32, BF16, F16, F64 = (np.dtype(jnp.dtype(name)) for name in ("float32", "bfloat16", "float16", "float64"))
FULL_GRID = os.environ.get("FULL_GRID") == "1"
SCALE = np.float32(0.125)
PADDING = SideSpec(np.dtype(bool), (True, False, False, False, True))
BIAS = SideSpec(F32, (False, True, False, True, True))


def seen(i, j):
    return i >= j


def added(i, j, s, low):
    return jnp.where(seen(i, j), jnp.zeros_like(s), jnp.asarray(low, s.dtype))


def arithmetic(i, j, s, low):
    return (1 - seen(i, j).astype(s.dtype)) * jnp.asarray(low, s.dtype)


FORMS = {
    "-1e9": lambda s, i, j: jnp.where(seen(i, j), s * SCALE, -1e9),
    "-1e4": lambda s, i, j: jnp.where(seen(i, j), s * SCALE, -1e4),
    "-1e30": lambda s, i, j: jnp.where(seen(i, j), s, -1e30) * SCALE,
    "-inf, then divided": lambda s, i, j: jnp.where(seen(i, j), s, -np.inf) / 8,
    "-1e9 added": lambda s, i, j: s * SCALE + added(i, j, s, -1e9),
    "added before a scale": lambda s, i, j: (s + added(i, j, s, -1e10)) / 8,
    "arithmetic": lambda s, i, j: s * SCALE + arithmetic(i, j, s, -1e10),
    "least of the dtype added": lambda s, i, j: s * SCALE + added(i, j, s, np.finfo(np.float32).min),
    "-inf added": lambda s, i, j: s * SCALE + added(i, j, s, -np.inf),
    "product and sum": lambda s, i, j: s * SCALE * seen(i, j) - 1e10 * (1 - seen(i, j).astype(F32)),
    "logarithm": lambda s, i, j: s * SCALE + jnp.log(seen(i, j).astype(F32)),
    "soft cap": lambda s, i, j: 30 * jnp.tanh(s / 30) + added(i, j, s, -1e9),
}
NO_MASKS = {
    "full": lambda s, i, j: s * SCALE,
    "distance": lambda s, i, j: s * SCALE - jnp.abs(i - j).astype(F32),
    "a fill that is not low": lambda s, i, j: jnp.where(seen(i, j), s * SCALE, -100.0),
    "a great fill": lambda s, i, j: jnp.where(seen(i, j), s * SCALE, 1e9),
    "minus a low fill": lambda s, i, j: -jnp.where(seen(i, j), s * SCALE, -1e9),
    "an infinite derivative": lambda s, i, j: jnp.where(seen(i, j), jnp.sqrt(s), -1e9),
    "a power of scores": lambda s, i, j: jnp.where(seen(i, j), s, -1e9) * s,
    "shown by its value": lambda s, i, j: jnp.where(s > 0, s, -1e9) + 0 * i.astype(F32),
}


def case_of(form, **changes: Any) -> Case:
    return Case(f"fill {form}"[:20], score=traced(FORMS.get(form, form), SCORE, QUERY, KEY), **changes)


def edges(length: int, block: int) -> tuple[tuple[int, int], ...]:
    return tuple((start, min(start + block, length)) for start in range(0, length, block))


# ---------------------------------------------------------------------- what is hidden


@pytest.mark.parametrize("form", FORMS)
def test_the_mask_is_found(form):
    spec = case_of(form, query_length=300, key_length=300).spec()
    assert fill_of(spec) is not None
    assert mask_class(spec) == spec.mask_class == "causal"
    assert mask_class(spec, "pallas_gpu") == "causal"
    assert mask_class(spec, "cudnn") == classify(spec) == "full"
    rows = edges(300, 64)
    wanted = tile_map(replace(spec, live=causal()), rows, rows)
    states = tile_states(spec, rows, rows).states
    np.testing.assert_array_equal(states == HIDDEN, wanted == DEAD)
    np.testing.assert_array_equal(states[states != HIDDEN], wanted[states != HIDDEN])


@pytest.mark.parametrize("form", NO_MASKS)
def test_no_mask_is_found(form):
    spec = case_of(NO_MASKS[form], query_length=300, key_length=300).spec()
    assert fill_of(spec) is None
    assert spec.mask_class == "full"


def test_a_positional_part_is_found_beside_side_inputs():
    score = traced(lambda s, i, j, m: jnp.where(seen(i, j) & m, s, -1e9), SCORE, QUERY, KEY, side(0, bool))
    spec = Case("padded", score=score, sides=(PADDING,), draw="m", query_length=300, key_length=300).spec()
    assert spec.mask_class == "causal and dynamic"
    assert mask_class(spec, "pallas_gpu") == "causal and dynamic"
    assert mask_class(spec, "cudnn") == "full", "which skips no hidden tile"
    assert int((tile_states(spec, edges(300, 64), edges(300, 64)).states == HIDDEN).sum()) == 10
    spec = replace(spec, live=traced(lambda i, j, m: seen(i, j) & m, QUERY, KEY, side(0, bool)))
    assert mask_class(spec, "xla") == mask_class(spec, "pallas_gpu") == "causal and dynamic"
    assert mask_class(spec, "cudnn") == "dynamic"
    assert int((tile_states(spec, edges(300, 64), edges(300, 64)).states == HIDDEN).sum()) == 10


def test_a_positional_part_that_is_not_causal():
    window = traced(lambda s, i, j, m: jnp.where((jnp.abs(i - j) < 40) & m, s, -1e9), SCORE, QUERY, KEY, side(0, bool))
    spec = Case("padded", score=window, sides=(PADDING,), draw="m", query_length=300, key_length=300).spec()
    assert spec.mask_class == "static and dynamic"
    padding = traced(lambda s, i, j, m: jnp.where(m, s, -1e9), SCORE, QUERY, KEY, side(0, bool))
    assert replace(spec, score=padding).mask_class == "full", "nothing is known before the program runs"


@pytest.mark.parametrize(
    "changes",
    [
        {"assume_finite": False},
        {"live": causal()},
        {"inner_weights": (Weight("multiply", traced(lambda i: i.astype(F32), QUERY)),)},
        {"weights": (Weight("multiply", traced(lambda i: i.astype(F32), QUERY)),)},
        {"statistics": (traced(lambda s: s, SCORE),)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_where_more_than_a_weight_of_zero_counts_nothing_is_hidden(changes):
    spec = replace(case_of("-1e9", query_length=300, key_length=300).spec(), **changes)
    assert fill_of(spec) is None


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_bounds_are_above_what_is_rounded(dtype):
    """The fill as the dtype has it, and the least maximum that is above it."""
    low = {"float16": -65504.0}.get(dtype.name, -1e30)
    for form in (lambda s, i, j: jnp.where(seen(i, j), s, s.dtype.type(low)),
                 lambda s, i, j: s + jnp.where(seen(i, j), s.dtype.type(0), s.dtype.type(low))):  # fmt: skip
        program = traced(form, Score(dtype), QUERY, KEY)
        spec = replace(Case("rounded", query_length=64, key_length=64, score=program).spec(), score_dtype=dtype)
        actual = float(program.evaluate(jnp.zeros((), dtype), jnp.int32(0), jnp.int32(63), ()).astype(jnp.float32))
        least = tile_states(spec, edges(64, 16), edges(64, 16)).least
        assert least > actual + 104
        assert least < actual * 0.8


# ---------------------------------------------------------------------- what is computed


def operands(case: Case, kind: str) -> list[Any]:
    """query, key, value, sides, sink, dout; of the kind that is asked for."""
    query, key, value, sides, sink, dout = case.operands(F32)
    last = (..., -1, 0)
    match kind:
        case "low scores":  # of some rows, below the fill
            query = query.at[..., 20:23, :].set(-1e6)
            key = jnp.abs(key) * 1e5
        case "scores near the fill":
            query = query.at[..., 20:23, :].set(jnp.asarray([-8e9, *[0.0] * (case.head_size - 1)]))
            key = key.at[..., 0].set(1.0)
        case "a hidden key is NaN":
            key = key.at[last].set(np.nan)
        case "a hidden key is infinite":
            key = key.at[last].set(np.inf)
        case "a hidden value is NaN":
            value = value.at[last].set(np.nan)
        case "a hidden value is infinite":
            value = value.at[last].set(-np.inf)
        case "a query is NaN":
            query = query.at[..., 3, 0].set(np.nan)
        case "a query is infinite":
            query = query.at[..., 3, 0].set(np.inf)
        case "a cotangent is infinite":
            dout = dout.at[..., 3, 0].set(np.inf)
        case "a cotangent is NaN":
            dout = dout.at[..., 3, 0].set(np.nan)
        case "products overflow":
            value, dout = value * 1e18, dout.at[..., 3, 0].set(3e38)
        case "a hidden score is huge":  # and as exact as it is huge
            query = query.at[..., 0].set(jnp.sign(query[..., 0]))
            key = key.at[..., -1, :].set(0.0).at[last].set(1e10)
    return [query, key, value, sides, sink, dout]


KINDS = (
    "usual", "low scores", "scores near the fill", "a hidden key is NaN", "a hidden key is infinite",
    "a hidden value is NaN", "a hidden value is infinite", "a query is NaN", "a query is infinite",
    "a cotangent is infinite", "a cotangent is NaN", "products overflow", "a hidden score is huge",
)  # fmt: skip


@cache
def both(name: str, spec: AttentionSpec, sizes: BlockSizes) -> Any:
    """Forward and backward, compiled once for all kinds of operands."""
    module: Any = OPERATION.implementation(name)

    @jax.jit
    def run(*given):
        *arrays, dout = given
        read = Operands(*arrays)
        found = module.forward(spec, sizes, read)
        return *found, module.backward(spec, sizes, read, found.residuals, Cotangents(dout))

    return run


def check(name: str, case: Case, kind: str, sizes: BlockSizes) -> None:
    """With hidden tiles left out and without: the same numbers, the same NaNs, the same infinities."""
    spec, given = case.spec(), operands(case, kind)
    assert fill_of(spec) is not None
    with mode(True) if name == "pallas_tpu" else nullcontext():
        found, wanted = (both(name, replace(spec, assume_finite=a), sizes)(*given) for a in (True, False))
    if kind == "a hidden score is huge":  # and so is what gradients of queries and keys are rounded by
        found, wanted = ((*results, gradients[2:]) for *results, gradients in (found, wanted))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
        finite = np.isfinite(b)
        np.testing.assert_array_equal(a[~finite], b[~finite])
        if finite.any():
            np.testing.assert_allclose(a[finite], b[finite], rtol=1e-5, atol=1e-5 * max(np.abs(b[finite]).max(), 1e-30))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["-1e9", "-1e9 added", "-inf, then divided"])
def test_the_numbers_are_those_of_all_tiles(form, kind):
    check("xla", case_of(form, query_length=37, key_length=37, groups=2), kind, BlockSizes(8, 8))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["-1e9", "-1e9 added"])
def test_the_numbers_are_those_of_all_tiles_on_a_tpu(form, kind):
    if not FULL_GRID and (form, kind) not in {
        ("-1e9", "usual"), ("-1e9", "low scores"), ("-1e9 added", "a hidden key is NaN"),
    }:  # fmt: skip
        pytest.skip("one of the cases that make check-tpu runs")
    case = case_of(form, batch=1, key_heads=1, query_length=270, key_length=270)
    check("pallas_tpu", case, kind, BlockSizes(16, 128))


MASKS = {
    "rows without any key": (lambda s, i, j: jnp.where(i - 9 >= j, s, -1e9), {}),
    "a window": (lambda s, i, j: jnp.where((i >= j) & (i - j < 5), s, -1e9), {}),
    "more queries than keys": (FORMS["-1e9"], {"key_length": 11}),
    "more keys than queries": (FORMS["-1e9"], {"query_length": 11}),
    "a sink": (FORMS["-1e9"], {"sink": (False, True, False, False, False)}),
    "one query": (lambda s, i, j: jnp.where(j < 9, s, -1e9), {"query_length": 1}),
    "one key": (lambda s, i, j: jnp.where(i + j > 30, s, -1e9), {"key_length": 1}),
    "few queries of several heads": (lambda s, i, j: jnp.where(i + 20 >= j, s, -1e9), {"query_length": 5, "groups": 3}),
    "two fills": (lambda s, i, j: jnp.where(i >= j, jnp.where(i - j < 20, s, -1e4), -1e9), {}),
    "probabilities masked again": (
        FORMS["-1e9"], {"weights": (Weight("where", traced(lambda i, j: i - 3 >= j, QUERY, KEY)),)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("kind", ["usual", "a hidden value is NaN", "a hidden score is huge"])
def test_masks(name, kind):
    form, changes = MASKS[name]
    check("xla", case_of(form, **{"query_length": 37, "key_length": 37, **changes}), kind, BlockSizes(8, 8))


@pytest.mark.parametrize("name", MASKS)
def test_masks_on_a_tpu(name):
    if not FULL_GRID and name not in ("rows without any key", "a sink"):
        pytest.skip("one of the cases that make check-tpu runs")
    form, changes = MASKS[name]
    case = case_of(form, batch=1, **{"query_length": 270, "key_length": 270, **changes})
    check("pallas_tpu", case, "usual", BlockSizes(16, 128))


@pytest.mark.parametrize("kind", ["usual", "low scores"])
def test_side_inputs(kind):
    def form(s, i, j, m, b):
        return jnp.where(seen(i, j) & m, s * SCALE + b, -1e9)

    score = traced(form, SCORE, QUERY, KEY, side(0, bool), side(1))
    case = Case("sides", score=score, sides=(PADDING, BIAS), draw="mn", query_length=37, key_length=37)
    check("xla", case, kind, BlockSizes(8, 8))

    def form_added(s, i, j, b):
        return s * SCALE + (b + jnp.where(seen(i, j), 0.0, -1e9))

    score = traced(form_added, SCORE, QUERY, KEY, side(0))
    case = Case("bias", score=score, sides=(BIAS,), draw="n", query_length=37, key_length=37)
    assert fill_of(case.spec()).magnitude is not None
    check("xla", case, kind, BlockSizes(8, 8))


def test_numerator_and_sum_apart():
    spec = replace(case_of("-1e9", query_length=37, key_length=37).spec(), statistics=())
    spec = replace(spec, statistics=(spec.score, (Weight("where", traced(lambda j: j % 2 == 0, KEY)),)))
    *arrays, dout = operands(case_of("-1e9", query_length=37, key_length=37), "usual")
    read = Operands(*arrays)
    assert fill_of(spec) is not None

    def run(spec):
        found = xla.forward(spec, BlockSizes(8, 8), read)
        cotangents = Cotangents(dout, (jnp.ones_like(found.rows[0]),) * 2)
        return found, xla.backward(spec, BlockSizes(8, 8), read, found.residuals, cotangents)

    found, wanted = (run(replace(spec, assume_finite=a)) for a in (True, False))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------------- what is left out


def tiles_of(monkeypatch, case: Case, given: list[Any]) -> tuple[int, int]:
    """How many tiles the forward and the backward compute."""
    count = [0]
    scores = xla.scores

    def counted(*arguments):
        jax.debug.callback(lambda: count.__setitem__(0, count[0] + 1))
        return scores(*arguments)

    for module in (xla, xla_backward):
        monkeypatch.setattr(module, "scores", counted)
    *arrays, dout = given
    read = Operands(*arrays)
    found = xla.forward(case.spec(), BlockSizes(8, 8), read)
    jax.effects_barrier()
    forward, count[0] = count[0], 0
    xla.backward(case.spec(), BlockSizes(8, 8), read, found.residuals, Cotangents(dout))
    jax.effects_barrier()
    return forward, count[0]


@pytest.mark.parametrize("form", FORMS)
def test_hidden_tiles_are_left_out(form, monkeypatch):
    case = case_of(form, batch=1, key_heads=1, query_length=40, key_length=40)
    assert tiles_of(monkeypatch, case, operands(case, "usual")) == (15, 15)


@pytest.mark.parametrize(
    "kind, tiles",
    [
        # Rows 20 to 22 are in the third block, which has two hidden tiles.
        ("low scores", (17, 17)),
        ("scores near the fill", (17, 17)),
        ("a hidden value is NaN", (25, 25)),
        ("a cotangent is infinite", (15, 25)),
    ],
)
def test_blocks_that_need_hidden_tiles_have_them(kind, tiles, monkeypatch):
    case = case_of("-1e9", batch=1, key_heads=1, query_length=40, key_length=40)
    assert tiles_of(monkeypatch, case, operands(case, kind)) == tiles


def test_the_last_tile_of_a_row_may_be_hidden(monkeypatch):
    case = case_of("-1e9", batch=1, key_heads=1, query_length=40, key_length=43)
    assert tiles_of(monkeypatch, case, operands(case, "usual")) == (15, 15)
    check("xla", case, "low scores", BlockSizes(8, 8))


def test_a_tpu_visits_no_hidden_tiles():
    shape = geometry(case_of("-1e9", query_length=300, key_length=300).spec(), BlockSizes(64, 128))
    assert shape.hides
    assert not np.any(shape.states[shape.hidden] != DEAD)
    assert not shape.whole.hides
    assert int((shape.whole.states != DEAD).sum()) == shape.states.size


def test_float64_needs_a_greater_distance():
    with jax.enable_x64(True):
        program = traced(lambda s, i, j: jnp.where(seen(i, j), s, -2000.0), Score(F64), QUERY, KEY)
        spec = replace(Case("wide", query_length=64, key_length=64, score=program).spec(F64), score_dtype=F64)
        assert spec.accumulation_dtype == F64
        assert -2000 + 746 < schedule(spec, BlockSizes(16, 16)).least < 0


def test_under_vmap():
    """The decision is one for all that is mapped, and right for each."""
    case = case_of("-1e9", batch=1, key_heads=1, query_length=37, key_length=37)
    several = [operands(case, kind) for kind in ("usual", "low scores", "a hidden value is NaN")]
    spec, sizes = case.spec(), BlockSizes(8, 8)
    stacked = Operands(*(jnp.stack([given[n] for given in several]) for n in range(3)))
    found = jax.tree.leaves(jax.vmap(partial(xla.forward, spec, sizes))(stacked))
    for n, given in enumerate(several):
        own = xla.forward(spec, sizes, Operands(*given[:3]))
        for a, b in zip(found, jax.tree.leaves(own), strict=True):
            np.testing.assert_allclose(a[n], b, rtol=1e-5, atol=1e-5)


def test_a_mask_is_looked_for_once(monkeypatch):
    """Evaluating programs on rectangles takes time while tracing: what was found of a spec is kept."""
    spec = case_of("-1e9", query_length=4096, key_length=4096).spec()
    fill_of(spec)
    monkeypatch.setattr(fills, "decided", None)
    assert fill_of(replace(spec)) is not None


# ---------------------------------------------------------------------- what is shown of numbers


def random_number(seed: int, dtype: Any):
    """A random function of score and positions, with infinities, and numbers near the ends of the dtype."""
    random = np.random.default_rng(seed)
    ends = [np.inf, -np.inf, float(jnp.finfo(dtype).max), float(jnp.finfo(dtype).min)]
    constants = [0.0, 1.0, -1.0, 0.5, 3.0, -1e4, 1e3, *ends]

    def constant():
        return jnp.asarray(constants[random.integers(len(constants))], dtype)

    def number(s, i, j, depth):
        pick = random.integers(0, 12 if depth else 3)
        if pick == 0:
            return s
        if pick == 1:
            return (i - j).astype(dtype)
        if pick == 2:
            return constant()
        a, b = number(s, i, j, depth - 1), number(s, i, j, depth - 1)
        seen = (i >= j, i - j < 5, j < 9)[random.integers(3)]
        return (
            a + b, a - b, a * b, a / constant(), -a, jnp.maximum(a, b), jnp.minimum(a, b), jnp.where(seen, a, b),
            jnp.tanh(a) * constant(), jnp.log(jnp.abs(a)),
            a.astype(jnp.float16).astype(dtype), a * seen.astype(dtype),
        )[random.integers(12)]  # fmt: skip

    return lambda s, i, j: number(s, i, j, 3)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("seed", range(40))
def test_bounds_of_numbers_hold(seed, dtype):
    """Where something is known of a rectangle, no number is beyond it, and none is NaN."""
    program = traced(random_number(seed, dtype), Score(dtype), QUERY, KEY)
    random, length, most = np.random.default_rng(seed), 24, 100.0
    scores = jnp.asarray(random.uniform(-most, most, (length, length)), dtype)
    positions = jnp.arange(length, dtype=jnp.int32)
    found = program.evaluate(scores, positions[:, None], positions[None], ())
    found = np.broadcast_to(np.asarray(found, np.float64), (length, length))
    corners = np.sort(random.integers(0, length, (2, 40, 2)), axis=-1) + [0, 1]
    for magnitude in (None, most):
        bounds = intervals.evaluate(program, Ranges(*corners[0].T, *corners[1].T), magnitude)
        for n, ((a, b), (c, d)) in enumerate(zip(*corners, strict=True)):
            tile = found[a:b, c:d]
            if not np.isnan(bounds.high[n]):
                assert tile.max() <= bounds.high[n]
            if not np.isnan(bounds.low[n]):
                assert tile.min() >= bounds.low[n]


@pytest.mark.parametrize("seed", range(40))
def test_simplified_numbers_are_equal(seed):
    program = traced(random_number(seed, F32), SCORE, QUERY, KEY)
    random, length = np.random.default_rng(seed), 24
    scores = jnp.asarray(random.uniform(-9, 9, (length, length)), F32)
    positions = jnp.arange(length, dtype=jnp.int32)
    for a, b, c, d in ((0, 24, 0, 24), (12, 24, 0, 8), (0, 4, 12, 24), (9, 10, 3, 4)):
        here = scores[a:b, c:d], positions[a:b, None], positions[None, c:d], ()
        less = simplified(program, Ranges(*(np.array([x]) for x in (a, b, c, d))))
        wanted = np.broadcast_to(program.evaluate(*here), here[0].shape)
        np.testing.assert_array_equal(np.broadcast_to(less.evaluate(*here), here[0].shape), wanted)


def test_what_a_mask_adds_is_gone_from_full_tiles():
    for form in ("-1e9 added", "arithmetic", "product and sum"):
        program = traced(FORMS[form], SCORE, QUERY, KEY)
        assert scale_of(simplified(program, Ranges(*(np.array([x]) for x in (16, 32, 0, 16))))) == 0.125
