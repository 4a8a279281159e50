"""Tables of scalars as arithmetic, and what kernels follow when they are traced for a simulation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopallas.autotune.trial import Trial
from autopallas.compile.tpu import lowered_for
from autopallas.kernels.attention.block_sizes import BlockSizes as AttentionBlocks
from autopallas.kernels.grouped_matmul.block_sizes import BlockSizes as GroupedBlocks
from autopallas.kernels.grouped_matmul.visits import even_bounds, group_bounds
from autopallas.kernels.tpu_schedule_tracing import Table, part_of, simulated
from autopallas.sites.interpret import mode
from autopallas.workbench.cases import Case, match_of


@pytest.mark.parametrize("highest", [1, 2, 9, 1000, 2**31 - 1])
@pytest.mark.parametrize("length", [1, 2, 5, 33])
def test_a_table_is_read_like_an_array(highest, length):
    values = np.random.default_rng(highest).integers(0, highest, length, endpoint=True).astype(np.int32)
    table = Table(values)
    read = jax.jit(lambda i: table[i])
    assert [int(read(i)) for i in range(length)] == values.tolist()


def test_a_multiple_of_the_index_takes_no_constants():
    for values in ([7, 4, 1, -2], [3, 3, 3], [5]):
        table = Table(np.array(values))
        assert table.words == 0
        assert [int(table[i]) for i in range(len(values))] == values
    assert Table(np.array([-1, 5, -(2**31), 2**31 - 1])).words == 4


def attention(mask, direction="forward+backward", length=48):
    return Case("attention", direction, "float32", mask, (("B", 1), ("T", length), ("N", 2), ("D", 16)))


def grouped(rows):
    return Case("grouped_matmul", "forward+backward", "float32", "even", (("M", rows), ("K", 32), ("N", 32), ("G", 4)))


def record_of(case, sizes):
    trial = Trial.abstract(match_of(case))
    with simulated() as record:
        lowered_for(trial.kernel("pallas_tpu", sizes), trial.arguments, "tpu-v5e")
    return record


def test_what_kernels_follow_is_noted():
    full = record_of(attention("full", length=128), AttentionBlocks(16, 128))
    assert full.altered == ["no row has a large logsumexp"]
    causal = record_of(attention("causal", "forward"), AttentionBlocks(16, 128))
    assert (causal.altered, causal.unknown) == (["autopallas_attention_tpu"], [])
    padded = record_of(attention("padded", "forward"), AttentionBlocks(16, 128))
    assert (padded.altered, padded.unknown) == ([], ["autopallas_attention_tpu"])
    groups = record_of(grouped(64), GroupedBlocks(16))
    assert {"groups of equal sizes", "autopallas_grouped_matmul_drhs"} <= set(groups.altered)
    assert not groups.unknown


@pytest.mark.parametrize(
    "case, sizes",
    [(attention("causal", "forward"), AttentionBlocks(16, 128)), (grouped(70), GroupedBlocks(16))],
    ids=["attention", "grouped matmul"],
)
def test_the_program_that_is_simulated_computes_the_same(case, sizes):
    match = match_of(case)
    trial = Trial.of(match)
    if case.kernel == "grouped_matmul":
        rows, groups = case.size("M"), case.size("G")
        start, end = even_bounds(1, groups, rows)
        sizes_of_groups = jnp.asarray(end - start, jnp.int32)
        for operands, _ in trial.arguments:
            for place, x in enumerate(operands):
                if jnp.issubdtype(x.dtype, jnp.integer):
                    operands[place] = sizes_of_groups.reshape(x.shape)
        assert np.array_equal(group_bounds(sizes_of_groups[None], rows)[0], start)
    with mode(True):
        kernel = trial.kernel("pallas_tpu", sizes)
        expected = jax.jit(kernel)(*trial.arguments)
        with simulated() as record:
            found = jax.jit(kernel)(*trial.arguments)
    assert record.altered
    assert not record.unknown
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_of_a_grid_whose_steps_are_alike_a_part_is_traced():
    assert part_of("k", (64, 64, 4), 2) == (64, 64, 4), "not where it is run"
    with simulated():
        assert part_of("k", (64, 64, 4), 2) == (64, 64, 4), "nor unless it is asked for"
    with simulated(steps=8) as record:
        assert part_of("short", (2, 2, 2), 2) == (2, 2, 2)
        assert part_of("inner", (64, 8, 2), 2) == (1, 4, 2)
        assert part_of("outer", (64, 8, 8), 1) == (1, 8, 8)
        assert part_of("different", (64, 64), 0) == (64, 64)
    assert record.parts == {"inner": 128.0, "outer": 64.0}
