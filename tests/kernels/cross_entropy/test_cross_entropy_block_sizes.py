"""Block sizes fit every shape, and the table finds them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cross_entropy_cases import F32, Case
from hypothesis import given, settings
from hypothesis import strategies as st

from autopallas.kernels.cross_entropy.block_sizes import BlockSizes
from autopallas.kernels.cross_entropy.operation import OPERATION
from autopallas.kernels.cross_entropy.spec import SideSpec
from autopallas.kernels.cross_entropy.tuned_block_sizes import BUCKETS, TABLE, find, infer_block_sizes, table_key
from autopallas.sites.device import Device
from autopallas.sites.operation import IMPLEMENTATIONS
from autopallas.tuning.table import LEAST_MEMORY

CPU = Device("cpu", "cpu")
SIZE = st.integers(1, 200_000)
BLOCK = st.integers(1, 300_000)


def spec_of(rows: int, vocabulary: int, **changes):
    return Case("sizes", rows=rows, vocabulary=vocabulary, kinds=("max", "exp_sum", "pick"), **changes).spec()


def in_one_pass(rows: int, vocabulary: int):
    """Statistics and gradients together, as in a train step."""
    case = Case("sizes", rows=rows, vocabulary=vocabulary, kinds=("max", "exp_sum", "pick"))
    return case.with_products(case.spec(), "finish")


@settings(max_examples=200, deadline=None)
@given(SIZE, SIZE, BLOCK, BLOCK)
def test_fitted_block_sizes_are_valid(rows, vocabulary, rows_block, vocabulary_block):
    spec = spec_of(rows, vocabulary)
    for sizes in (BlockSizes(rows_block, vocabulary_block), *BlockSizes.candidates(spec), BlockSizes.get_default()):
        fitted = sizes.fitted(spec)
        for block, asked, length in zip(
            fitted.to_dict().values(), sizes.to_dict().values(), (rows, vocabulary), strict=True
        ):
            assert 1 <= block <= length
            assert block == length or block % 8 == 0
            assert block >= min(asked, length), "a block is rounded up, never down to a divisor"
        assert fitted.fitted(spec) == fitted


@settings(max_examples=100, deadline=None)
@given(SIZE, SIZE)
def test_candidates_are_distinct_and_bounded_in_memory(rows, vocabulary):
    spec = spec_of(rows, vocabulary)
    candidates = [sizes.fitted(spec) for sizes in BlockSizes.candidates(spec)]
    assert candidates
    assert len(set(candidates)) == len(candidates)
    for sizes in candidates:
        assert sizes.rows_block * sizes.vocabulary_block * 4 <= 64 * 2**20


def test_a_candidate_for_the_whole_vocabulary_spans_a_larger_one_too():
    whole = BlockSizes.candidates(in_one_pass(2048, 32000))[0]
    assert whole.fitted(spec_of(2048, 50257)).vocabulary_block == 50257


def test_a_prime_length_keeps_its_block():
    assert BlockSizes(256, 1280).fitted(spec_of(1009, 50257)) == BlockSizes(256, 1280)


def test_streaming_the_weight_needs_the_least_memory():
    case = Case("sizes", rows=2048, hidden=512, vocabulary=128000, kinds=("max", "exp_sum", "pick"))
    spec = case.with_products(case.spec(), "finish")
    streamed = BlockSizes(2048, 2048).temporary_bytes(spec, "forward+backward")
    assert streamed < BlockSizes(512, 128000).temporary_bytes(spec, "forward+backward") / 4
    assert streamed < 2 * 2048 * 128000 * 4 / 20  # of logits and their gradient
    assert BlockSizes(2048, 2048).temporary_bytes(replace(spec, products=(), finish=())) < streamed


@pytest.mark.parametrize("value", [0, -8, 2.0, "8", True])
def test_nonsense_is_refused(value):
    with pytest.raises(ValueError, match="vocabulary_block"):
        BlockSizes(8, value)


def test_the_table_is_well_formed():
    names = {b.name for b in BUCKETS}
    for rows in TABLE.values():
        for (implementation, direction, dtype, bucket, invariants), row in rows.items():
            assert implementation in IMPLEMENTATIONS
            assert direction in ("forward", "forward+backward")
            assert np.dtype(dtype) if dtype != "bfloat16" else True
            assert bucket in names
            assert set(invariants.removesuffix(LEAST_MEMORY).split(", ")) <= {"plain", "argmax", "N x V input"}
            assert isinstance(row.block_sizes, BlockSizes)
            assert row.evidence in ("measured", "simulated", "estimated")
            assert row.kernel_us > 0
            assert row.original_us > 0
            assert row.date
            assert row.versions


@settings(max_examples=100, deadline=None)
@given(SIZE, SIZE)
def test_every_shape_has_a_bucket_and_block_sizes(rows, vocabulary):
    spec = spec_of(rows, vocabulary)
    assert table_key(spec, "xla", "forward")[3] in {b.name for b in BUCKETS}
    sizes = infer_block_sizes(spec, CPU)
    assert sizes == sizes.fitted(spec)


def test_what_costs_more_than_a_logsumexp_is_filed_apart():
    spec = spec_of(2048, 32000)
    more = Case("sizes", rows=2048, vocabulary=32000, kinds=("max", "exp_sum", "argmax")).spec()
    wide = replace(spec, sides=(*spec.sides, SideSpec(F32, (True, True))))
    keys = [table_key(s, "xla", "forward")[4] for s in (spec, more, wide)]
    assert keys == ["plain", "argmax", "N x V input"]
    assert {table_key(s, "xla", "forward")[3] for s in (spec, more, wide)} == {"N2048 V32000"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("direction", ["forward", "forward+backward"])
def test_the_cpu_has_rows_for_a_large_vocabulary(dtype, direction):
    spec = spec_of(2048, 32000) if direction == "forward" else in_one_pass(2048, 32000)
    spec = replace(spec, row_dtype=np.dtype(dtype), weight_dtype=np.dtype(dtype))
    found = find(spec, CPU, "xla", direction)
    assert found is not None
    assert found.source == "table"


def test_where_the_logits_are_largest_memory_is_saved_twentyfold():
    found = find(in_one_pass(2048, 128000), CPU, "xla", "forward+backward")
    assert found is not None
    assert found.source == "table"
    assert found.row.kernel_bytes * 20 <= found.row.original_bytes


def test_what_was_measured_in_one_pass_says_nothing_of_two():
    assert find(spec_of(2048, 32000), CPU, "xla", "forward+backward") is None


def test_implementations_that_do_not_exist_are_unsupported():
    answer = OPERATION.supports("pallas_gpu_of_tomorrow", spec_of(8, 8), CPU)
    assert "no implementation" in answer.reason
