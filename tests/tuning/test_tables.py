"""Tables: names of devices, rows for two objectives, generic rows, and writing them."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
import subprocess
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autopallas import compat
from autopallas.compile.tpu import GENERATIONS
from autopallas.environment import OPERATIONS
from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.sites.device import Device
from autopallas.sites.operation import operation_named
from autopallas.tuning import processor, table_files
from autopallas.tuning.row import key_of_least_time
from autopallas.tuning.table import DEVICES, LEAST_MEMORY, Bucket, Row, lookup, table_device
from autopallas.tuning.table_files import Files, device_of, folder_of
from autopallas.workbench.cases import DIRECTIONS, Case, cases_of, match_of

BUCKETS = tuple(Bucket(name, {}) for name in "abcd")
TUNED = [op for op in OPERATIONS if operation_named(op).has("tuned_block_sizes")]


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
        ("gpu", "NVIDIA H200", "NVIDIA H200"),
        ("gpu", "NVIDIA GH200 480GB", "NVIDIA GH200"),
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


@pytest.mark.parametrize("here, other", [("NVIDIA H200", "NVIDIA H100"), ("NVIDIA H100", "NVIDIA GH200")])
def test_hopper_gpus_serve_each_other_with_measured_rows_that_gain_much(here, other):
    """The rows are of 8, 16 and 32 queries, by which they are told apart."""
    much, little = (dataclasses.replace(row(8, 8), original_us=gain, kernel_us=1.0) for gain in (1.5, 1.49))
    guess, own = dataclasses.replace(row(16, 16), evidence="estimated"), row(32, 32)

    def found(bucket, **rows):
        table = {other: {key("a"): rows["there"]}, here: {key("a"): rows["here"]} if "here" in rows else {}}
        answer = lookup(table, here, key(bucket), BUCKETS)
        assert answer.owner == (other if answer.row is rows["there"] else here)
        return answer.row.block_sizes.query_block, answer.source

    assert found("a", there=much) == (8, "table")
    assert found("a", there=little) == found("b", there=much) == (8, "nearest")
    assert found("a", there=dataclasses.replace(much, evidence="estimated")) == (8, "nearest")
    assert found("a", there=much, here=guess) == (8, "table")
    assert found("a", there=little, here=guess) == (16, "table")
    assert found("a", there=much, here=own) == (32, "table")
    assert lookup({other: {key("a"): much}}, "NVIDIA", key("a"), BUCKETS) is None


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


@pytest.mark.nightly
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
    sizes = [value for value in found.to_dict().values() if not isinstance(value, str)]  # some name a way to compute
    assert sizes
    assert all(0 <= value <= max(lengths.values()) for value in sizes)


TOLD = {"extensions": "amx", "batch": 4, "spelling": "ab,bc->ac", "processes": 3, "lower_gain": 1.25}


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setattr(table_files, "DATA", tmp_path)
    return Files("attention", BlockSizes, BUCKETS)


def test_rows_are_read_as_they_were_written_in_the_order_of_the_buckets(files):
    exact = dataclasses.replace(row(128, 256), kernel_us=0.1 + 0.2, versions='jax 0.12, "x"\n, libtpu')
    files.write("TPU v5e", {key("b"): exact, key("a"): row(8, 8), key("a", "full, least memory"): row(4, 4)})
    keys = [key("a"), key("a", "full, least memory"), key("b")]
    assert list(files["TPU v5e"].items()) == list(zip(keys, [row(8, 8), row(4, 4), exact], strict=True))
    assert list(files) == ["TPU v5e"]
    assert files.get("cpu") is None


@pytest.mark.parametrize("column", ["kernel_us", "original_us", "lower_gain"])
@pytest.mark.parametrize("figure", ["nan", "inf", "-3.0", "0"])
def test_a_figure_with_which_nothing_can_be_compared_is_no_row(files, column, figure):
    columns = ("implementation", "direction", "dtype", "bucket", "invariants", "kernel_us", "original_us")
    figures = {"kernel_us": "1.0", "original_us": "2.0", "lower_gain": "1.5"} | {column: figure}
    rest = {"kernel_bytes": "0", "original_bytes": "0", "evidence": "measured", "batch": "1"}
    line = dict.fromkeys(columns, "a") | figures | rest
    with pytest.raises(ValueError, match=f"{figure} where a number above 0 belongs"):
        files._row(tuple(line), tuple(line.values()))


@pytest.mark.parametrize(
    "names", [(), ("extensions",), ("batch",), ("spelling",), ("lower_gain", "processes"), tuple(TOLD)]
)
def test_what_a_row_holds_for_is_written(files, names):
    stated = dataclasses.replace(row(8, 8), **{name: TOLD[name] for name in names})
    files.write("cpu", {key("c"): stated})
    assert files["cpu"] == {key("c"): stated}


def test_rows_that_are_not_written_stay_as_they_are(files):
    path = files.write("cpu", {key(name): row(8, 8) for name in "abc"})
    before = path.read_text().splitlines()
    files.write("cpu", {key("b"): row(16, 16)})
    after = path.read_text().splitlines()
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, True, False, True]
    assert files["cpu"][key("b")] == row(16, 16), "what was read before is read again"
    files.write("TPU v4", {key("b"): row(32, 32)})
    assert path.read_text().splitlines() == after
    assert list(path.parent.iterdir()) == [path]


def test_a_second_row_goes_only_where_both_objectives_were_tuned(files):
    lean = key("a", "full" + LEAST_MEMORY)
    files.write("cpu", {key("a"): row(8, 8), lean: row(4, 4)})
    files.write("cpu", {key("a"): row(16, 16)})
    assert set(files["cpu"]) == {key("a"), lean}
    files.write("cpu", {key("a"): row(16, 16)}, both_objectives=True)
    assert set(files["cpu"]) == {key("a")}


def with_jax(version, size, extensions="avx2"):
    return dataclasses.replace(row(size, size), versions=f"jax {version}", extensions=extensions)


def test_a_row_of_least_memory_goes_with_the_row_of_least_time_that_it_was_measured_with(files):
    """On GPUs and TPUs a row takes the place of one of any version of JAX."""
    lean, alone = key("a", "full" + LEAST_MEMORY), key("b", "full" + LEAST_MEMORY)
    before = {key("a"): with_jax("0.12.0.1", 8), lean: with_jax("0.12.0.1", 4), alone: with_jax("0.12.0.1", 2)}
    files.write("NVIDIA H100", before)
    files.write("NVIDIA H100", {key("a"): with_jax("0.12.1", 16)})
    assert [k for k, _ in files.read("NVIDIA H100")] == [key("a"), lean, alone], "of the same minor version"
    files.write("NVIDIA H100", {key("a"): with_jax("0.11.2", 32)})
    assert [k for k, _ in files.read("NVIDIA H100")] == [key("a"), alone]


@pytest.mark.parametrize("version", ["0.10.2", "0.11.2", "0.12.0.1"])
def test_a_row_of_least_memory_does_not_hide_a_row_of_another_version_of_jax(files, monkeypatch, version):
    monkeypatch.setattr(compat, "versions", lambda: {"jax": version})
    rows = {key("a"): with_jax("0.11.2", 8), key("a", "full" + LEAST_MEMORY): with_jax("0.12.0.1", 4)}
    path = files.path("NVIDIA H100")
    path.parent.mkdir()
    path.write_text(files.text(list(rows.items())))
    assert files["NVIDIA H100"] == {key("a"): rows[key("a")]}


def test_a_cpus_vector_extensions_are_a_second_key(files, monkeypatch):
    def with_extensions(name, *sizes):
        return dataclasses.replace(row(*sizes), extensions=name)

    lean = key("a", "full" + LEAST_MEMORY)
    files.write("cpu", {key("a"): with_extensions("avx2", 8, 8), lean: with_extensions("avx2", 4, 4)})
    files.write("cpu", {key("a"): with_extensions("amx", 16, 16)}, both_objectives=True)
    files.write("cpu", {key("a"): with_extensions("neon", 32, 32)})
    assert len(files.read("cpu")) == 4

    def here(name):
        monkeypatch.setattr(processor, "vector_extensions", lambda: name)
        return {k[4]: found.block_sizes.query_block for k, found in files["cpu"].items()}

    assert here("avx2") == here("avx512") == here("neon_bf16") == {"full": 8, "full, least memory": 4}
    assert here("amx") == here("avx512_bf16") == {"full": 16}
    assert here("avx512_fp16")["full"] == 8, "those with float16 arithmetic multiply 16-bit numbers otherwise"
    assert here("neon") == {"full": 32}
    assert here(None) == here("avx2"), "what is not known multiplies like none of them"
    files.write("cpu", {key("a"): row(64, 64)})
    assert here("avx2")["full"] == 64, "a row that states nothing is one of AVX2"


def test_the_minor_version_of_jax_is_a_part_of_that_key_on_cpus(files, monkeypatch):
    lean = key("a", "full" + LEAST_MEMORY)
    files.write("cpu", {key("a"): with_jax("0.10.2", 8), lean: with_jax("0.10.2", 4)})
    files.write("cpu", {key("a"): with_jax("0.9.2", 2)})
    files.write("cpu", {key("a"): with_jax("0.12.0.1", 16)}, both_objectives=True)
    files.write("cpu", {key("a"): with_jax("0.12.0.1", 32, "amx"), key("b"): with_jax("0.10.2", 64)})
    for version in ("0.10.1", "0.12.0"):
        files.write("TPU v4", {key("a"): with_jax(version, 8)})
    assert (len(files.read("cpu")), len(files.read("TPU v4"))) == (6, 1)

    def here(version, extensions="avx2"):
        monkeypatch.setattr(compat, "versions", lambda: {"jax": version})
        monkeypatch.setattr(processor, "vector_extensions", lambda: extensions)
        return [files["cpu"][k].block_sizes.query_block for k in (key("a"), lean, key("b")) if k in files["cpu"]]

    assert here("0.10.4") == [8, 4, 64]
    assert here("0.12.1") == here("0.13.0") == [16, 64], "the latest, where none is of this version"
    assert here("0.9.0") == [2, 64]
    assert here("0.10.2", "amx") == [32, 64], "the processor comes first"
    files.write("cpu", {key("a"): with_jax("0.12.2", 128)})
    assert here("0.12.1") == [128, 64], "a row takes the place of one of the same version"


@pytest.mark.parametrize(("older", "newer"), [(5.0, 0.2), (0.2, 5.0)])
def test_a_minor_version_between_two_that_disagree_has_the_row_of_the_lesser_gain(files, monkeypatch, older, newer):
    gains = {"0.9.2": 9.0, "0.10.2": older, "0.12.0.1": newer, "0.14.0": 9.0}
    for number, (version, gain) in enumerate(gains.items(), start=1):
        rows = {
            key("a"): dataclasses.replace(row(number, 1), versions=f"jax {version}", original_us=gain, kernel_us=1.0)
        }
        files.write("cpu", rows)

    def here(version):
        monkeypatch.setattr(compat, "versions", lambda: {"jax": version})
        return files["cpu"][key("a")].block_sizes.query_block

    assert here("0.11.0") == here("0.11.3") == (2 if older < newer else 3)
    assert [here(version) for version in ("0.8.0", "0.10.0", "0.12.5", "0.15.1")] == [1, 2, 3, 4]


@given(st.text(st.characters(codec="utf-8"), min_size=1, max_size=20))
@example("..")
@example("a/b")
def test_the_folder_of_a_device_is_a_plain_name_and_gives_it_back(device):
    assert re.fullmatch("[A-Za-z0-9_%-]+", folder_of(device))
    assert device_of(folder_of(device)) == device


@pytest.mark.parametrize("op", TUNED)
def test_the_checked_in_files_are_as_they_would_be_written(op):
    files = importlib.import_module(f"autopallas.kernels.{op}.tuned_block_sizes").TABLE.files
    for device in files:
        assert files.text(files.read(device)) == files.path(device).read_text(), device


@pytest.mark.parametrize("op", TUNED)
def test_checked_in_rows_of_least_memory_have_a_row_of_least_time_of_the_same_processor_and_version(op):
    files = importlib.import_module(f"autopallas.kernels.{op}.tuned_block_sizes").TABLE.files
    for device in files:
        settings = {(key, row.measured_with, row.jax_line) for key, row in files.read(device)}
        lean = {place for place in settings if place[0][4].endswith(LEAST_MEMORY)}
        lacking = {(key_of_least_time(key), *setting) for key, *setting in lean} - settings
        assert not lacking, device


@pytest.mark.parametrize("variant", ["plain", "states", "normalised", "number", "rates", "powers", "steps", "sums"])
def test_the_cases_of_a_declared_operation_find_the_rows_that_were_measured_on_them(variant):
    """A parameter that was declared later, and that a site does not have, is no part of the key of its rows."""
    table = operation_named("linear_attention").part("tuned_block_sizes").TABLE
    cases = [
        case
        for case in cases_of("linear_attention").table_grid("cpu")
        if (case.mask, case.dtype, case.size("T"), case.size("N")) == (variant, "float32", 1024, 64)
    ]
    assert {case.direction for case in cases} == set(DIRECTIONS)
    for case in cases:
        match = match_of(case)
        found = table.find(match.spec, Device("cpu", "cpu"), "xla", match.direction)
        assert found is not None, case
        assert found.source == "table", case


def test_a_table_is_read_when_a_device_is_asked_for():
    """And nothing at all by importing autopallas."""
    source = """
import pathlib
read, opened = pathlib.Path.read_text, []
pathlib.Path.read_text = lambda path, *a, **kw: (opened.append("/".join(path.parts[-2:])), read(path, *a, **kw))[1]
import autopallas, sys
assert not any(name.endswith("tuned_block_sizes") for name in sys.modules)
from autopallas.kernels.attention.tuned_block_sizes import BUCKETS, TABLE, infer_block_sizes
assert not [name for name in opened if name.endswith(".csv")], opened
TABLE["TPU v5e"], TABLE["TPU v5e"]
assert [name for name in opened if name.endswith(".csv")] == ["TPU_v5e/attention.csv"], opened
"""
    subprocess.run([sys.executable, "-c", source], check=True)


def test_what_another_folder_lacked_is_not_remembered(monkeypatch, tmp_path):
    """A table whose folder is changed for a while, as tests do, has its own rows again behind it."""
    table = importlib.import_module("autopallas.kernels.attention.tuned_block_sizes").TABLE
    with monkeypatch.context() as changed:
        changed.setattr(table_files, "DATA", tmp_path)
        with pytest.raises(KeyError):
            table["NVIDIA H200"]
    assert table["NVIDIA H200"]
