"""Tables: names of devices, rows for two objectives, generic rows, and writing them."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopallas.compile.tpu import GENERATIONS
from autopallas.environment import OPERATIONS
from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.sites.device import Device
from autopallas.tuning.table import DEVICES, LEAST_MEMORY, Bucket, Row, lookup, table_device
from autopallas.tuning.table_source import source_with_rows
from autopallas.workbench.cases import DIRECTIONS, Case, cases_of, match_of

BUCKETS = tuple(Bucket(name, {}) for name in "abcd")
TUNED = [op for op in OPERATIONS if cases_of(op) is not None]


def row(*sizes: int) -> Row:
    return Row(BlockSizes(*sizes), 12.5, 25.0, 1000, 2000, "measured", "2026-01-31", "jax 0.12, avx2")


def key(bucket: str, invariants: str = "full"):
    return ("xla", "forward", "float32", bucket, invariants)


@pytest.mark.parametrize(
    ("platform", "kind", "name"),
    [
        ("cpu", "cpu", "cpu"),
        ("gpu", "NVIDIA H100 80GB HBM3", "NVIDIA H100"),
        ("gpu", "NVIDIA H100 PCIe", "NVIDIA H100"),
        ("gpu", "NVIDIA A100-SXM4-40GB", "NVIDIA"),
        ("tpu", "TPU v4", "TPU v4"),
        ("tpu", "TPU v5 lite", "TPU v5e"),
        ("tpu", "TPU v5e", "TPU v5e"),
        ("tpu", "TPU v5", "TPU v5p"),
        ("tpu", "TPU v6 lite", "TPU v6e"),
        ("tpu", "TPU7x", "TPU v7x"),
    ],
)
def test_a_device_has_one_name(platform, kind, name):
    assert table_device(Device(platform, kind)) == name
    assert name in DEVICES


def test_every_generation_of_tpus_is_a_device_of_the_tables():
    names = {table_device(generation.device) for generation in GENERATIONS.values()}
    assert names == {name for name in DEVICES if name.startswith("TPU")}


@pytest.mark.parametrize("op", TUNED)
def test_tables_hold_known_devices_only(op):
    assert set(importlib.import_module(f"autopallas.kernels.{op}.tuned_block_sizes").TABLE) <= set(DEVICES)


@pytest.mark.parametrize("op", TUNED)
def test_rows_claim_what_can_have_been_done(op):
    """Only TPUs can be simulated; each row has figures of both sides, a date and versions."""
    table = importlib.import_module(f"autopallas.kernels.{op}.tuned_block_sizes").TABLE
    for device, rows in table.items():
        for key, row in rows.items():
            assert row.evidence in ("measured", "simulated", "estimated"), key
            assert row.evidence != "simulated" or device.startswith("TPU"), key
            assert row.kernel_us > 0 < row.original_us, key
            assert re.fullmatch(r"\d{4}-\d\d-\d\d", row.date), key
            assert "jax" in row.versions, key


def test_memory_has_a_row_of_its_own_where_there_is_one():
    table = {"cpu": {key("b"): row(8, 8), key("b", "full" + LEAST_MEMORY): row(16, 16), key("c"): row(32, 32)}}

    def found(bucket, objective):
        answer = lookup(table, "cpu", key(bucket), BUCKETS, objective)
        return answer.row.block_sizes.query_block, answer.source

    assert found("b", "time") == (8, "table")
    assert found("b", "memory") == (16, "table")
    assert found("c", "memory") == (32, "table"), "the one row serves both"
    assert found("a", "memory") == (16, "nearest")
    assert found("a", "time") == (8, "nearest")


def test_rows_of_the_generic_device_are_never_exact():
    table = {"NVIDIA": {key("a"): row(8, 8), key("b"): row(16, 16)}, "NVIDIA H100": {key("a"): row(32, 32)}}
    assert lookup(table, "NVIDIA H100", key("a"), BUCKETS).source == "table"
    generic = lookup(table, "NVIDIA", key("b"), BUCKETS)
    assert (generic.row.block_sizes.query_block, generic.source) == (16, "nearest")
    assert lookup({"NVIDIA": table["NVIDIA"]}, "NVIDIA H100", key("b"), BUCKETS).source == "nearest"
    assert lookup(table, "TPU v4", key("a"), BUCKETS) is None


SIZES = {
    "attention": ("batch", "query_length", "key_length", "head_size"),
    "cross_entropy": ("rows", "hidden", "vocabulary"),
    "grouped_matmul": ("rows", "groups", "contracting", "columns"),
}
PLAIN = {
    "attention": Case("attention", "forward", "float32", "causal", (("B", 1), ("T", 64), ("N", 2), ("D", 16))),
    "cross_entropy": Case("cross_entropy", "forward", "float32", "plain", (("N", 8), ("D", 16), ("V", 300))),
    "grouped_matmul": Case(
        "grouped_matmul", "forward", "float32", "uneven", (("M", 64), ("K", 16), ("N", 16), ("G", 4))
    ),
}


@functools.cache
def spec_of(op: str):
    return match_of(PLAIN[op]).spec


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_inferred_block_sizes_are_valid_for_any_shape_on_any_device(data):
    """Valid: fitting them again changes nothing, and none is longer than the longest axis."""
    op = data.draw(st.sampled_from(sorted(PLAIN)))
    lengths = {name: data.draw(st.integers(1, 300_000), label=name) for name in SIZES[op]}
    spec = dataclasses.replace(spec_of(op), **lengths)
    tables = importlib.import_module(f"autopallas.kernels.{op}.tuned_block_sizes")
    device = data.draw(st.sampled_from([Device("cpu", "cpu"), Device("gpu", "NVIDIA L4"), Device("tpu", "TPU v5")]))
    direction = data.draw(st.sampled_from(DIRECTIONS))
    objective = data.draw(st.sampled_from(("time", "memory")))
    found = tables.infer_block_sizes(spec, device, None, direction, objective)
    assert found == found.fitted(spec)
    assert all(0 <= value <= max(lengths.values()) for value in found.to_dict().values())


def test_a_regenerated_table_is_python_that_gives_the_same_rows():
    keys = [key(bucket) for bucket in ("b", "a")]
    before = "import this_first\n\n_ROWS: dict[Key, Row] = {\n}\n\nTABLE: Table = MappingProxyType({'cpu': _ROWS})\n"
    after = source_with_rows(before, dict.fromkeys(keys, row(128, 256)), "abcd")
    assert after.startswith("import this_first\n\n_ROWS")
    names = {"BlockSizes": BlockSizes, "Row": Row, "Key": tuple, "Table": dict, "MappingProxyType": dict}

    def run(source):
        there = dict(names)
        exec(source.partition("\n")[2], there)
        return there["TABLE"]

    assert list(run(after)["cpu"].items()) == [(k, row(128, 256)) for k in reversed(keys)]
    assert source_with_rows(after, run(after)["cpu"], "abcd") == after
    both = source_with_rows(after, {key("c"): row(8, 8)}, "abcd", "TPU v5e")
    assert run(both) == {**run(after), "TPU v5e": {key("c"): row(8, 8)}}
    told = {"extensions": "amx", "batch": 4, "spelling": "ab,bc->ac"}
    for names_told in (("extensions",), ("batch",), ("spelling",), ("extensions", "spelling"), tuple(told)):
        stated = dataclasses.replace(row(8, 8), **{name: told[name] for name in names_told})
        assert run(source_with_rows(after, {key("c"): stated}, "abcd"))["cpu"] == {key("c"): stated}
    again = source_with_rows(both, {key("d"): row(8, 8)}, "abcd", "TPU v5e")
    assert run(again)["TPU v5e"] == {key("d"): row(8, 8)}
    assert run(again)["cpu"] == run(after)["cpu"]
