"""Block sizes fit every shape, and the table finds them."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Case

import autopallas
from autopallas.kernels.attention import attention, tpu_block_sizes
from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.kernels.attention.cases import ORIGINALS, causal32, square, types
from autopallas.kernels.attention.operation import OPERATION
from autopallas.kernels.attention.programs import causal
from autopallas.kernels.attention.schedule import schedule
from autopallas.kernels.attention.tuned_block_sizes import BUCKETS, TABLE, find, infer_block_sizes, table_key
from autopallas.kernels.tpu import generation
from autopallas.sites.block_sizes import dividing
from autopallas.sites.device import Device
from autopallas.sites.operation import IMPLEMENTATIONS
from autopallas.tuning.table import LEAST_MEMORY, Bucket, Row, bucket_of, lookup

CPU = Device("cpu", "cpu")


def spec_of(query_length: int, key_length: int, **changes):
    return Case("sizes", query_length=query_length, key_length=key_length, **changes).spec()


@pytest.mark.parametrize("seed", range(20))
def test_fitted_block_sizes_are_valid(seed):
    random = np.random.default_rng(seed)
    lengths = [int(2 ** random.uniform(0, 14)) for _ in range(2)]
    spec = spec_of(*lengths, batch=int(random.integers(1, 9)), key_heads=int(random.integers(1, 9)))
    for sizes in (BlockSizes(*map(int, random.integers(1, 2000, 2))), *BlockSizes.candidates(spec)):
        fitted = sizes.fitted(spec)
        for block, asked, length in zip(fitted.to_dict().values(), sizes.to_dict().values(), lengths, strict=True):
            assert 1 <= block <= length
            assert block == length or block % 8 == 0
            assert block >= min(asked, length), "a block is rounded up, never down to a divisor"
        assert fitted.fitted(spec) == fitted
        batch, heads = fitted.heads_per_step(spec)
        assert spec.batch % batch == 0
        assert spec.key_heads % heads == 0
        assert fitted.temporary_bytes(spec) < fitted.temporary_bytes(spec, "forward+backward")


def test_a_prime_length_keeps_its_block():
    assert BlockSizes.get_default().fitted(spec_of(1009, 1009)) == BlockSizes(256, 256)


@pytest.mark.parametrize(
    "block, length, taken",
    [(256, 1500, 300), (256, 1000, 200), (512, 2044, 511), (256, 1536, 256), (256, 1009, 256), (16, 40, 16)],
)
def test_blocks_of_the_streaming_kernel_divide_the_length_where_a_size_near_by_does(block, length, taken):
    plan = schedule(spec_of(length, 2 * length), BlockSizes(block, block))
    assert plan.query_block == dividing(block, length) == taken
    assert (2 * length) % plan.key_block == 0 or plan.key_block == block


def test_all_blocks_of_an_axis_are_computed_by_one_loop_whether_they_divide_its_length_or_not():
    def loops(length):
        x = jax.ShapeDtypeStruct((2, length, 4, 8), jnp.float32)
        run = jax.jit(functools.partial(attention, implementation="xla", block_sizes=BlockSizes(256, 256)))
        return run.lower(x, x, x).as_text().count("stablehlo.while")

    assert loops(1500) == loops(1536) == loops(1009)


@pytest.mark.parametrize("value", [0, -8, 2.0, "8", True])
def test_nonsense_is_refused(value):
    with pytest.raises(ValueError, match="key_block"):
        BlockSizes(8, value)


def test_candidates_are_distinct():
    candidates = BlockSizes.candidates(spec_of(100, 100))
    assert len(set(candidates)) == len(candidates)


def test_the_first_bucket_that_contains_the_sizes_wins():
    buckets = (Bucket("small", {"N": (1, 8)}), Bucket("middle", {"N": (4, 64)}), Bucket("other", {}))
    assert [bucket_of({"N": n}, buckets).name for n in (1, 8, 9, 64, 65)] == [
        "small", "small", "middle", "middle", "other",
    ]  # fmt: skip


def test_lookup_prefers_the_exact_bucket_then_the_nearest():
    buckets = tuple(Bucket(name, {}) for name in "abcd")

    def row(name: str) -> Row:
        return Row(name, 1.0, 2.0, 3, 4, "measured", "2026-01-01", "jax 0.12")

    def key(bucket: str, invariants: str = "full") -> tuple[str, str, str, str, str]:
        return "xla", "forward", "float32", bucket, invariants

    table = {"cpu": {key("a"): row("a"), key("d"): row("d")}}
    found = {name: lookup(table, "cpu", key(name), buckets) for name in "abcd"}
    assert {name: f.source for name, f in found.items()} == {"a": "table", "b": "nearest", "c": "nearest", "d": "table"}
    assert {name: f.row.block_sizes for name, f in found.items()} == {"a": "a", "b": "a", "c": "d", "d": "d"}
    assert lookup(table, "cpu", key("a", "causal"), buckets) is None
    assert lookup(table, "tpu", key("a"), buckets) is None


def test_the_table_is_well_formed():
    names = {b.name for b in BUCKETS}
    for rows in TABLE.values():
        for (implementation, direction, dtype, bucket, invariants), row in rows.items():
            assert implementation in IMPLEMENTATIONS
            assert direction in ("forward", "forward+backward")
            assert np.dtype(dtype) if dtype != "bfloat16" else True
            assert bucket in names
            mask = invariants.removesuffix(LEAST_MEMORY).removesuffix(", batched")
            if implementation in ("pallas_gpu", "cudnn"):
                mask, _, head = mask.rpartition(", D")
                assert int(head) in (32, 64, 128, 256)
            if implementation == "pallas_tpu":
                mask = mask.removesuffix(", D64")
            mask = mask.removesuffix(", T x S input")
            assert mask in ("full", "causal", "static", "dynamic", "causal and dynamic", "static and dynamic")
            assert isinstance(row.block_sizes, BlockSizes)
            assert row.evidence in ("measured", "simulated", "estimated")
            assert row.kernel_us > 0
            assert row.original_us > 0
            assert row.date
            assert row.versions


def test_every_shape_has_a_bucket_and_block_sizes():
    for query_length, key_length in [(1, 1), (1, 8192), (16, 7), (300, 300), (77, 4096), (4096, 77), (2**20, 2**20)]:
        spec = spec_of(query_length, key_length)
        assert table_key(spec, "xla", "forward")[3] in {b.name for b in BUCKETS}
        sizes = infer_block_sizes(spec, CPU)
        assert sizes == sizes.fitted(spec)


def test_the_cpu_has_rows_for_causal_float32():
    for length in (1024, 2048):
        for direction in ("forward", "forward+backward"):
            found = find(spec_of(length, length, live=causal()), CPU, "xla", direction)
            assert found is not None
            assert found.source == "table"


@pytest.mark.parametrize("kind", ["TPU v5 lite", "TPU v6 lite"])
def test_what_a_tpus_table_knows_of_other_heads_is_taken_where_it_fits(kind):
    device, bfloat16 = Device("tpu", kind), np.dtype(jnp.bfloat16)
    dtypes = dict.fromkeys(("query_dtype", "key_dtype", "value_dtype", "result_dtype"), bfloat16)
    for size in (128, 4096):
        spec = replace(spec_of(2048, 2048), head_size=size, value_head_size=size, **dtypes)
        found = find(spec, device, "pallas_tpu")
        sizes = infer_block_sizes(spec, device, "pallas_tpu")
        needed = max(tpu_block_sizes.vmem_bytes(spec, sizes, generation(device)).values())
        assert needed <= generation(device).budget
        assert (sizes == found.row.block_sizes) == (size == 128)


def test_blocks_that_are_halved_to_fit_into_a_tpus_vector_memory_are_valid():
    """A block as long as its axis need be no multiple of 8, but half of it has to."""
    spec = replace(spec_of(114, 1), head_size=17665)
    sizes = infer_block_sizes(spec, Device("tpu", "TPU v5"), "pallas_tpu")
    assert sizes.query_block < 114
    assert sizes == sizes.fitted(spec)


@pytest.mark.parametrize("objective", ["time", "memory"])
@pytest.mark.parametrize(
    "batch, length, size, verdict",
    [(16, 1024, 128, "applied"), (1, 1024, 128, "kept"), (4, 2048, 64, "applied"), (1, 1024, 64, "kept")],
)
def test_scores_that_fit_into_a_tpus_vector_memory_are_left_to_its_compiler(objective, batch, length, size, verdict):
    case = square("forward", "bfloat16", "causal32", length, size, heads=16, batch=batch)
    with Device("tpu", "TPU v5 lite").targeted():
        (site,) = autopallas.explain(autopallas.optimize(causal32, objective=objective), *types(case)).sites
    assert site.verdict == verdict
    assert (verdict == "kept") == ("0x may be left" in site.reason)


@pytest.mark.parametrize("kind", ["TPU v5 lite", "TPU v6 lite"])
@pytest.mark.parametrize("batch, verdict", [(3, "kept"), (8, "applied")])
def test_scores_in_16_bits_fit_into_a_tpus_vector_memory_where_twice_as_many_are(kind, batch, verdict):
    case = square("forward", "bfloat16", "causal", 1024, 128, heads=16, batch=batch)
    with Device("tpu", kind).targeted():
        (site,) = autopallas.explain(ORIGINALS["causal"], *types(case)).sites
    assert site.verdict == verdict
    assert (verdict == "kept") == ("0x may be left" in site.reason)


def test_rows_of_tpus_hold_for_heads_of_half_the_lanes_or_for_wider_ones():
    for size, end in ((32, "D64"), (64, "D64"), (65, "full"), (128, "full"), (256, "full")):
        spec = replace(spec_of(2048, 2048), head_size=size, value_head_size=size)
        assert table_key(spec, "pallas_tpu", "forward")[-1].endswith(end)


def test_implementations_that_do_not_exist_are_unsupported():
    answer = OPERATION.supports("pallas_gpu_of_tomorrow", spec_of(8, 8), CPU)
    assert "no implementation" in answer.reason
