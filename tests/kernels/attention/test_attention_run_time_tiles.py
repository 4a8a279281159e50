"""Tiles that only the run time knows: none with a live element is dropped, and the lists visit each once."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_attention_implementations import BY_NAME

from autopallas.kernels.attention.dynamic_tiles import compacted, run_time_states
from autopallas.kernels.attention.tiles import DEAD, PARTIAL

T, S, BQ, BK = 37, 70, 8, 16


def sized(name):
    return replace(BY_NAME[name], query_length=T, key_length=S, batch=3)


@pytest.mark.parametrize("name", ["segments and causal", "lengths", "mask as a side input"])
def test_a_tile_is_dead_exactly_if_it_may_be_skipped(name):
    case = sized(name)
    spec, sides = case.spec(), case.operands()[3]
    found = np.asarray(run_time_states(spec, BQ, BK, sides))
    t, s = jnp.arange(T).reshape(T, 1), jnp.arange(S).reshape(1, S)
    alive = np.broadcast_to(spec.live.evaluate(None, t, s, sides), (3, *[1] * 2, T, S))[:, 0, 0]
    assert found.shape == (3, -(-T // BQ), -(-S // BK))
    assert (found == DEAD).any() == (name != "mask as a side input")
    for b, i, j in np.ndindex(found.shape):
        rows, columns = slice(i * BQ, (i + 1) * BQ), slice(j * BK, (j + 1) * BK)
        every_row_has_a_key = alive[b, rows].any(axis=1).all()
        wanted = alive[b, rows, columns].any() or not every_row_has_a_key
        assert found[b, i, j] == (PARTIAL if wanted else DEAD)


def test_nothing_is_skipped_without_side_inputs_or_the_assumption():
    assert run_time_states(sized("causal").spec(), BQ, BK, ()) is None
    case = sized("lengths")
    assert run_time_states(case.spec(assume_finite=False), BQ, BK, case.operands()[3]) is None


def test_no_array_of_the_size_of_the_scores():
    case = replace(BY_NAME["segments and causal"], query_length=1024, key_length=1024)
    run = jax.jit(lambda *sides: run_time_states(case.spec(), 128, 128, sides))
    temporary = run.lower(*case.operands()[3]).compile().memory_analysis().temp_size_in_bytes
    # One block of rows at a time: for each example 128 x 1024 booleans, and as much again for what becomes of them.
    # Booleans of all rows would be eight times one of these.
    assert temporary < 2 * case.batch * 128 * 1024


@pytest.mark.parametrize("group", ["row", "column", "tile", "all"])
@pytest.mark.parametrize("seed", range(4))
def test_lists_visit_each_live_tile_once_in_order(group, seed):
    random = np.random.default_rng(seed)
    states = np.where(random.random((2, 4, 5)) < (0.2, 0.5, 0.9, 0.0)[seed], PARTIAL, DEAD).astype(np.int32)
    lists, most = compacted(jnp.asarray(states), group, 4, 8)
    counts = []
    for b in range(2):
        row, column, flags = (np.asarray(x).reshape(2, -1)[b] for x in lists)
        live = (flags & 3) != DEAD
        assert sorted(zip(row[live], column[live], strict=True)) == sorted(map(tuple, np.argwhere(states[b] != DEAD)))
        block = {"row": row, "column": column, "tile": row * 5 + column, "all": row * 0}[group]
        first, last = np.flatnonzero(flags & 4), np.flatnonzero(flags & 8)
        expected = {"row": 4, "column": 5, "tile": 20, "all": 1}[group]
        assert len(first) == len(last) == expected
        for begin, end in zip(first, last, strict=True):
            assert (block[begin : end + 1] == block[begin]).all()
        assert len(set(block[first])) == expected
        count = last[-1] + 1
        assert not flags[count:].any()
        assert (row[count:] == row[count - 1]).all()
        counts.append(count)
    assert most == max(counts)
