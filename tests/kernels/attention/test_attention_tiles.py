"""What is decided about tiles from positions alone is what evaluating the program on every position gives."""

from __future__ import annotations

import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import CASES, Case, side

import autopallas
from autopallas.kernels.attention import intervals
from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.kernels.attention.intervals import Ranges
from autopallas.kernels.attention.programs import causal, traced
from autopallas.kernels.attention.schedule import schedule
from autopallas.kernels.attention.tiles import DEAD, FULL, PARTIAL, classify, increasing, scale_of, simplified, tile_map
from autopallas.sites.elementwise import ElementwiseProgram, Index, Score, Side, reproducible

I32, F32 = np.dtype(np.int32), np.dtype(np.float32)
QUERY, KEY = Index("query", I32), Index("key", I32)

MASKS = {
    "causal": lambda i, j: i >= j,
    "causal, negated": lambda i, j: ~(j > i),
    "causal, by difference": lambda i, j: i - j >= 0,
    "causal, from floats": lambda i, j: i.astype(F32) - j.astype(F32) > -0.5,
    "causal, by sign": lambda i, j: jnp.sign(i - j) >= 0,
    "causal, by selection": lambda i, j: jnp.where(i >= j, 0.0, -jnp.inf) == 0.0,
    "offset": lambda i, j: i + 11 >= j,
    "window": lambda i, j: (i >= j) & (i - j < 9),
    "two-sided window": lambda i, j: jnp.abs(i - j) <= 6,
    "prefix": lambda i, j: (i >= j) | (j < 10),
    "blocks": lambda i, j: i // 8 == j // 8,
    "chunked causal": lambda i, j: (i >= j) & (i // 16 == j // 16),
    "dilated": lambda i, j: (i - j) % 3 == 0,
    "exclusive or": lambda i, j: (i < 12) ^ (j < 20),
    "bits": lambda i, j: ((i >> 3) & 1) == ((j >> 3) & 1),
    "clamped": lambda i, j: jnp.clip(i - 8, 0, 12) <= j,
    "scaled": lambda i, j: 2 * i + 1 >= 3 * j,
    "product": lambda i, j: i * j < 100,
    "squares": lambda i, j: i * i + j * j < 900,
    "float division": lambda i, j: i / 7 >= j / 5,
    "no mask": lambda i, j: i >= 0,
    "nothing": lambda i, j: j < 0,
    "unknown function": lambda i, j: jnp.sin(i.astype(F32)) > jnp.cos(j.astype(F32)),
    "narrow integers": lambda i, j: i.astype(jnp.int8) >= j.astype(jnp.int8),
}


def exact(program: ElementwiseProgram, rows: int, columns: int) -> np.ndarray:
    found = program.evaluate(None, jnp.arange(rows)[:, None], jnp.arange(columns)[None], ())
    return np.broadcast_to(np.asarray(found), (rows, columns))


def spec_of(live: ElementwiseProgram | None, rows: int, columns: int, **changes):
    return Case("tiles", query_length=rows, key_length=columns, live=live).spec(**changes)


def edges(length: int, block: int) -> tuple[tuple[int, int], ...]:
    return tuple((start, min(start + block, length)) for start in range(0, length, block))


def check_tiles(live: ElementwiseProgram, rows: int, columns: int, row_block: int, column_block: int) -> int:
    """Compares the map with the exact mask; the number of dead tiles."""
    mask = exact(live, rows, columns)
    row_edges, column_edges = edges(rows, row_block), edges(columns, column_block)
    states = tile_map(spec_of(live, rows, columns), row_edges, column_edges)
    for (i, j), state in np.ndenumerate(states):
        tile = mask[slice(*row_edges[i]), slice(*column_edges[j])]
        if state == FULL:
            assert tile.all()
        if state == DEAD:
            assert not tile.any()
            assert mask[slice(*row_edges[i])].any(axis=1).all(), "a row without any live key must be computed whole"
    return int((states == DEAD).sum())


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("sizes", [(40, 40, 8, 8), (37, 53, 16, 8)], ids=str)
def test_tile_states_agree_with_the_mask(name, sizes):
    check_tiles(traced(MASKS[name], QUERY, KEY), *sizes)


@pytest.mark.parametrize(
    "name, dead",
    [("causal", 10), ("causal, from floats", 10), ("causal, by selection", 10), ("window", 16), ("blocks", 20),
     ("two-sided window", 12), ("exclusive or", 8), ("bits", 12)],
)  # fmt: skip
def test_dead_tiles_are_found(name, dead):
    assert check_tiles(traced(MASKS[name], QUERY, KEY), 40, 40, 8, 8) == dead


def random_mask(seed: int):
    """A random boolean function of positions."""
    random = np.random.default_rng(seed)

    def number(i, j, depth):
        pick = random.integers(0, 9 if depth else 3)
        if pick == 0:
            return i
        if pick == 1:
            return j
        if pick == 2:
            return jnp.int32(random.integers(-9, 40))
        a, b = number(i, j, depth - 1), number(i, j, depth - 1)
        positive = jnp.int32(random.integers(1, 9))
        return (
            a + b, a - b, jnp.minimum(a, b), jnp.maximum(a, b), jax.lax.div(a, positive) + jnp.abs(b),
            jnp.where(a > b, -a, jax.lax.rem(b, positive)),
        )[pick - 3]  # fmt: skip

    def boolean(i, j, depth):
        pick = random.integers(0, 10 if depth else 6)
        if pick < 6:
            a, b = number(i, j, 2), number(i, j, 2)
            return (a < b, a <= b, a > b, a >= b, a == b, a != b)[pick]
        a, b = boolean(i, j, depth - 1), boolean(i, j, depth - 1)
        return (a & b, a | b, ~a, a ^ b)[pick - 6]

    return lambda i, j: boolean(i, j, 2)


@pytest.mark.parametrize("seed", range(60))
def test_random_masks(seed):
    check_tiles(traced(random_mask(seed), QUERY, KEY), 29, 35, 8, 8)


@pytest.mark.parametrize("seed", range(0, 60, 4))
def test_bounds_hold_on_every_rectangle(seed):
    program = traced(random_mask(seed), QUERY, KEY)
    random = np.random.default_rng(seed)
    corners = np.sort(random.integers(0, 40, (2, 50, 2)), axis=-1) + [0, 1]
    bounds = intervals.evaluate(program, Ranges(*corners[0].T, *corners[1].T))
    mask = exact(program, 41, 41)
    for n, ((a, b), (c, d)) in enumerate(zip(*corners, strict=True)):
        tile = mask[a:b, c:d]
        assert bounds.low[n] <= tile.min()
        assert tile.max() <= bounds.high[n]


def test_parts_of_merged_axes():
    row, column = Index("query", I32, stride=6, extent=4), Index("key", I32, offset=1, extent=6)
    for program in (
        traced(lambda i, j: i >= j, row, Index("key", I32, stride=6)),
        traced(lambda i, j: i + 2 >= j, row, column),
    ):
        check_tiles(program, 24, 30, 6, 5)


def test_mask_classes():
    assert classify(spec_of(None, 40, 40)) == "full"
    assert classify(spec_of(traced(MASKS["no mask"], QUERY, KEY), 40, 40)) == "full"
    for name, mask in MASKS.items():
        expected = "causal" if name.startswith("causal") or name == "narrow integers" else "static"
        if name != "no mask":
            assert classify(spec_of(traced(mask, QUERY, KEY), 40, 40)) == expected, name
    dynamic = traced(lambda i, j, m: (i >= j) & m, QUERY, KEY, side(0, bool))
    assert classify(spec_of(dynamic, 40, 40)) == "dynamic"
    assert classify(spec_of(causal(), 17, 40)) == classify(spec_of(causal(), 40, 17)) == "causal"
    assert classify(spec_of(causal(), 1, 40)) == "causal"
    narrow = traced(MASKS["narrow integers"], QUERY, KEY)
    assert classify(spec_of(narrow, 400, 400)) == "static"  # 128 wraps to -128


def test_masks_of_side_inputs_skip_nothing():
    dynamic = traced(lambda i, j, m: (i >= j) & m, QUERY, KEY, side(0, bool))
    states = tile_map(spec_of(dynamic, 32, 32), edges(32, 8), edges(32, 8))
    assert (states == PARTIAL).all()


def test_nothing_is_skipped_unless_values_may_be_assumed_finite():
    spec = spec_of(causal(), 32, 32, assume_finite=False)
    assert not (tile_map(spec, edges(32, 8), edges(32, 8)) == DEAD).any()


def test_rows_without_a_live_key_are_computed_whole():
    late = traced(lambda i, j: i - 3 >= j, QUERY, KEY)
    states = tile_map(spec_of(late, 32, 32), edges(32, 8), edges(32, 8))
    assert not (states[0] == DEAD).any()
    assert (states[1, 2:] == DEAD).all()


def test_long_causal_masks_are_not_evaluated_position_by_position():
    spec = spec_of(causal(), 2**15, 2**15)
    start = time.process_time()
    states = tile_map(spec, edges(2**15, 256), edges(2**15, 256))
    assert spec.mask_class == "causal"
    assert (states == DEAD).sum() == 128 * 127 // 2
    assert time.process_time() - start < 5  # evaluating 2**30 positions would take far longer


def test_known_predicates_are_resolved_in_full_tiles():
    masked = traced(lambda s, i, j: jnp.where(i >= j, s * 2, -jnp.inf), Score(F32), QUERY, KEY)
    below = Ranges(*(np.array([n]) for n in (8, 16, 0, 8)))
    program = simplified(masked, below)
    assert program.primitives == {"mul"}
    assert increasing(program)
    across = Ranges(*(np.array([n]) for n in (8, 16, 8, 16)))
    assert simplified(masked, across) == masked
    assert not increasing(masked)


@pytest.mark.parametrize(
    "function, expected",
    [(lambda s: s * 3, True), (lambda s: s * -3, False), (lambda s: 3 - s, False), (lambda s: s - 3, True),
     (lambda s: jnp.tanh(s / 5) * 5 + 1, True), (lambda s: s / -5, False), (lambda s: 5 / s, False),
     (lambda s: s * s, False), (lambda s: s.astype(jnp.bfloat16), True), (lambda s: -s, False),
     (lambda s: s + s * 2, True), (lambda s: jnp.abs(s), False), (lambda s: s * jnp.inf, False)],
)  # fmt: skip
def test_increasing_programs(function, expected):
    assert increasing(traced(function, Score(F32))) == expected


def visit(visited, rows, columns, programs, carry):
    """Counts what no earlier block of an axis has had."""
    new = [slice(p.start if p.first is None else p.first, p.start + p.size) for p in (rows, columns)]
    visited[tuple(new)] += 1
    return carry


def test_a_schedule_visits_every_live_tile_once():
    for case in CASES:
        spec = case.spec()
        plan = schedule(spec, BlockSizes(8, 16))
        visited = np.zeros((spec.query_length, spec.key_length), int)
        # Plain integers make plain loops of what JAX would trace.
        with jax.disable_jit():
            for block in range(plan.row_blocks):
                plan.over_columns(block, partial(visit, visited, plan.rows(block)), 0)
        assert visited.max() == 1
        if case.live is None:
            assert visited.min() == 1
        elif not case.live.sides:
            mask = exact(case.live, *visited.shape)
            assert visited[mask].min() == 1


def test_the_picture_of_a_long_mask_has_few_tiles_and_the_same_kinds():
    from autopallas.kernels.attention.fills import picture

    live = traced(lambda i, j: i >= j, QUERY, KEY)
    small, large = spec_of(live, 1024, 1024), spec_of(live, 2**16, 2**16)
    assert picture(small, 256, 256) == {"rows": 256, "columns": 256, "states": ["1000", "2100", "2210", "2221"]}
    shown = picture(large, 256, 256, most=4)
    assert shown["states"] == ["1000", "2100", "2210", "2221"]
    assert (shown["rows"], shown["columns"]) == (16384, 16384)


def test_only_what_is_scaled_has_a_scale():
    def scale(function, dtype=np.float32):
        return scale_of(traced(function, Score(np.dtype(dtype))))

    assert scale(lambda s: s) == 1
    assert scale(lambda s: np.float32(2) * (s / np.float32(8))) == 0.25
    others = (lambda s: s * s, lambda s: -s, lambda s: s * np.float32(-1), lambda s: s + np.float32(2),
              lambda s: s / np.float32(0), lambda s: np.float32(3) / s, lambda s: s * np.float32(1e30))  # fmt: skip
    assert [scale(f) for f in others] == [None] * len(others)
    assert scale(lambda s: s * jnp.bfloat16(2), jnp.bfloat16) is None


class TestReproducible:
    """:func:`autopallas.sites.elementwise.reproducible`."""

    side = Side(0, F32)

    @pytest.mark.parametrize(
        "function",
        [
            lambda s, t: s * 0.3 + t,
            lambda s, t: s / 0.3 + t,
            lambda s, t: s * t,
            lambda s, t: t / (1 + jnp.exp(-s)),
            lambda s, t: jnp.where(t > 0, s, -1e9),
        ],
    )
    def test_what_rounds_alike_stays_as_it_is(self, function):
        program = traced(function, Score(F32), self.side)
        assert reproducible(program) == program

    def test_numbers_of_16_bits_stay_divided(self):
        narrow = np.dtype(jnp.bfloat16)
        program = traced(lambda s, t: s / t, Score(narrow), Side(0, narrow))
        assert reproducible(program) is program

    @pytest.mark.parametrize(
        "function",
        [
            lambda s, t: s / t,
            lambda s, t: s / jnp.sqrt(t) / (t + 1),
            lambda s, t: (s - 1000 * t) * t,
            lambda s, t: s * t + t,
            lambda s, t: -s * (t * 0.8) / jnp.exp(t),
            lambda s, t: jax.nn.relu(s) / t,
        ],
    )
    def test_another_program_computes_the_same_but_for_roundings(self, function):
        program = traced(function, Score(F32), self.side)
        written = reproducible(program)
        assert written != program
        score = np.linspace(-3, 3, 35, dtype=np.float32).reshape(5, 7)
        side = np.linspace(0.2, 2, 7, dtype=np.float32)[None]
        wanted = program.evaluate(score, None, None, (side,))
        np.testing.assert_allclose(written.evaluate(score, None, None, (side,)), wanted, rtol=1e-6, atol=1e-6)
        assert np.isnan(written.evaluate(score * np.nan, None, None, (side,))).all()

    def test_infinite_numbers_and_zeros_are_divided_as_before(self):
        program = traced(lambda s, t: s / t, Score(F32), self.side)
        ends = np.array([0.0, -0.0, 1.0, -2.0, np.inf, -np.inf, np.nan, 1e30], np.float32)
        found, wanted = (p.evaluate(ends[:, None], None, None, (ends,)) for p in (reproducible(program), program))
        np.testing.assert_array_equal(found, wanted)


def test_loops_over_tiles_read_merged_rows_and_columns_and_carry_no_axis_of_one_group():
    def loss(q, k, v):
        scores = jnp.einsum("btnd,bsnd->bnts", q, k)
        weights = jax.nn.softmax(jnp.where(jnp.tri(1024, dtype=bool), scores, jnp.finfo(scores.dtype).min))
        return (jnp.einsum("bnts,bsnd->btnd", weights, v) ** 2).sum()

    run = autopallas.optimize(jax.grad(loss, (0, 1, 2)), ops=["attention"], implementation="xla", objective="always")
    x = jax.ShapeDtypeStruct((2, 1024, 3, 8), jnp.float32)
    loops = [line for line in run.lower(x, x, x).as_text().splitlines() if "stablehlo.while" in line]
    assert loops
    assert not any("tensor<2x3x1x1024" in line for line in loops)
    assert any("tensor<2x3072x8xf32>" in line for line in loops)
    assert any("tensor<2x3x1024x8xf32>" in line for line in loops), "rows are written in a loop, in place"
