"""The benchmark command: its cases, its oracle, its command line, and the rows it writes."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopallas.kernels.attention import tuned_block_sizes
from autopallas.kernels.cross_entropy import tuned_block_sizes as tables_of_cross_entropy
from autopallas.sites.operation import operation_named
from autopallas.tuning import Failure, Measurement, Timing, table_files
from autopallas.workbench.cases import cases_of
from benchmarks import attention, cli, cross_entropy, environment, grouped_matmul, peak, resident, rows, table, terminal
from benchmarks.case import (
    AUTOPALLAS,
    DECLARED,
    DIRECTIONS,
    KEPT,
    KERNELS,
    ORIGINAL,
    Candidate,
    Case,
    Chosen,
    benchmark,
)
from benchmarks.declared import DeclaredBenchmark
from benchmarks.rows import Machine

CASES_OF_GROUPED_MATMUL = cases_of("grouped_matmul")

BARS = [
    "attention forward float32 causal B1 T2048 N8 D64",
    "attention forward float32 causal B1 T4096 N8 D64",
    "attention forward+backward float32 causal B1 T1024 N8 D64",
    "attention forward+backward float32 causal B1 T2048 N8 D64",
    "cross_entropy forward+backward bfloat16 plain N2048 D512 V32000",
    "cross_entropy forward+backward float32 plain N2048 D512 V32000",
    "cross_entropy forward+backward float32 plain N2048 D512 V128000",
    *(
        f"grouped_matmul {direction} {dtype} uneven M4096 K512 N1024 G{groups}"
        for direction in DIRECTIONS
        for dtype in ("float32", "bfloat16")
        for groups in (8, 64)
    ),
]
"""What the project promises a speed for."""


def small(direction: Any = "forward", mask: str = "causal", dtype: str = "float32") -> Case:
    return Case("attention", direction, dtype, mask, (("B", 2), ("T", 24), ("N", 3), ("D", 8)))


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert cli.main([*arguments, "--list"]) == 0
    return capsys.readouterr().out.splitlines()


def test_standard_grid_holds_the_cases_with_a_promised_speed(capsys: pytest.CaptureFixture[str]) -> None:
    listed = shown(capsys)
    assert set(BARS) <= set(listed)
    assert len(listed) == len(set(listed))
    for mask in ("full", "padded", "bias"):
        assert any(f" {mask} " in line for line in listed)


@pytest.mark.parametrize("kernel", KERNELS)
def test_quick_grid_is_a_part_and_wide_grid_more(capsys: pytest.CaptureFixture[str], kernel: str) -> None:
    quick, standard, wide = (shown(capsys, kernel, *options) for options in (["--quick"], [], ["--wide"]))
    assert set(quick) < set(standard) < set(wide)


def test_filters_select_by_whole_words_and_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, "--filter", "T2048 forward causal float32") == [BARS[0]]
    assert shown(capsys, "--filter", "T20") == []
    both = shown(capsys, "--filter", "bias T1024", "--filter", "padded T1024")
    assert len(both) == 2


def test_a_misspelt_operation_or_option_is_an_error_that_names_the_valid_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["atention"])
    assert stopped.value.code == 2
    assert "there are: attention" in capsys.readouterr().err
    assert cli.main(["--filter", "nothing"]) == 2


@pytest.mark.parametrize("mask", list(attention.ORIGINALS))
def test_oracle_original_and_library_compute_the_same(mask: str) -> None:
    case = small("forward+backward", mask)
    arguments = attention.arguments(case)
    expected = jax.tree.leaves(attention.oracle(case, arguments))
    assert all(e.dtype == np.float64 for e in expected)
    assert np.array_equal(attention.oracle(small("forward", mask), arguments[:-1]), expected[0])
    candidates = attention.candidates(case)
    for name in (ORIGINAL, "jax.nn"):
        result = jax.tree.leaves(jax.jit(candidates[name].function)(*arguments))
        assert len(result) == len(expected) == 4
        for e, r in zip(expected, result, strict=True):
            assert np.abs(e - np.asarray(r)).max() < 5e-6 * np.abs(e).max()


@pytest.mark.parametrize("mask", list(cross_entropy.ORIGINALS))
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_oracle_original_and_kernel_of_cross_entropy_compute_the_same(mask: str, direction: Any) -> None:
    case = Case("cross_entropy", direction, "float32", mask, (("N", 300), ("D", 8), ("V", 50)))
    arguments = cross_entropy.arguments(case)
    expected = jax.tree.leaves(cross_entropy.oracle(case, arguments))
    candidates = cross_entropy.candidates(case)
    for name in (ORIGINAL, cross_entropy.KERNEL):
        result = jax.tree.leaves(jax.jit(candidates[name].function)(*arguments))
        assert len(result) == len(expected)
        for e, r in zip(expected, result, strict=True):
            assert np.abs(e - np.asarray(r)).max() < 5e-6 * np.abs(e).max()
    assert cross_entropy.operations(case) == 2 * 300 * 8 * 50 * (3 if direction == "forward+backward" else 1)


def test_table_of_cross_entropy_has_a_case_for_every_bucket() -> None:
    filed = {
        tables_of_cross_entropy.table_key(cross_entropy.spec(case), "xla", case.direction)[1:]
        for case in cross_entropy.grid("table")
    }
    for direction in DIRECTIONS:
        for dtype in ("float32", "bfloat16"):
            plain = {bucket for d, t, bucket, kind in filed if (d, t, kind) == (direction, dtype, "plain")}
            # The largest takes too long, and the original more memory than most machines have.
            assert plain == {b.name for b in tables_of_cross_entropy.BUCKETS} - {"N8192 V128000"}
            assert (direction, dtype, "N2048 V32000", "argmax") in filed


@pytest.mark.parametrize("variant", CASES_OF_GROUPED_MATMUL.ORIGINALS)
def test_oracle_original_and_replacement_of_grouped_matmul_compute_the_same(variant: str) -> None:
    sizes = (("M", 24), ("K", 5), ("N", 6), ("G", 4))
    case = Case("grouped_matmul", "forward+backward", "float32", variant, sizes)
    arguments = grouped_matmul.arguments(case)
    assert [(a.shape, a.dtype) for a in arguments] == [(t.shape, t.dtype) for t in CASES_OF_GROUPED_MATMUL.types(case)]
    assert CASES_OF_GROUPED_MATMUL.case_of(arguments[:-1], variant, case.direction) == case
    candidates = grouped_matmul.candidates(case)
    results = {name: jax.tree.leaves(jax.jit(c.function)(*arguments)) for name, c in candidates.items()}
    expected = jax.tree.leaves(grouped_matmul.oracle(case, arguments)) or results[ORIGINAL]
    assert candidates[AUTOPALLAS].chosen().implementation == "xla"
    for found in results.values():
        for e, r in zip(expected, found, strict=True):
            assert np.abs(np.asarray(e) - np.asarray(r)).max() < 5e-6 * np.abs(np.asarray(e)).max()


@pytest.mark.parametrize("wrong", [(0, (13, 5)), (2, (4, 5, 6)), (4, (12, 3))])
def test_arguments_that_are_no_dense_mixture_are_refused(wrong: tuple[int, tuple[int, ...]]) -> None:
    sizes = (("M", 24), ("K", 5), ("N", 6), ("G", 4))
    given = list(CASES_OF_GROUPED_MATMUL.types(Case("grouped_matmul", "forward", "float32", "dense", sizes)))
    given[wrong[0]] = jax.ShapeDtypeStruct(wrong[1], given[wrong[0]].dtype)
    with pytest.raises(ValueError, match="must agree"):
        CASES_OF_GROUPED_MATMUL.case_of(given, "dense", "forward")


@pytest.mark.parametrize("kernel", DECLARED)
def test_a_declared_operation_is_measured_without_a_module_for_it(
    kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered = benchmark(kernel)
    standard = [case for case in offered.grid("standard") if case.dtype == "float32"]
    fitted = operation_named(kernel).fitted_sizes
    sizes = [fitted({x: min(n, 8) for x, n in case.sizes}) for case in standard]
    small = [replace(case, sizes=tuple(own.items())) for case, own in zip(standard, sizes, strict=True)]
    monkeypatch.setattr(DeclaredBenchmark, "grid", lambda *_: tuple(small))
    monkeypatch.setitem(peak.SIZE, jax.default_backend(), 64)
    effort = ["--seconds", "0.2", "--repetitions", "3", "--no-resident-memory"]
    assert cli.main([kernel, "--output", str(tmp_path), *effort]) == 0
    found = json.loads((tmp_path / f"{kernel}-{jax.default_backend()}.json").read_text())
    assert {row["direction"] for row in found} == set(DIRECTIONS)
    assert [row["candidate"] for row in found] == [ORIGINAL, AUTOPALLAS, "xla, called"] * len(small)
    for row in found:
        assert row["failure"] is None
        assert not row["implementation"].startswith(KEPT)
        assert row["wall_ratio"] > 0
        assert row["teraflops"] > 0
        assert row["max_error"] < 1e-5


def test_arithmetic_is_counted_over_live_pairs() -> None:
    sizes = (("B", 1), ("T", 4), ("N", 1), ("D", 1))
    counted = {m: attention.operations(Case("attention", "forward", "float32", m, sizes)) for m in attention.ORIGINALS}
    assert counted == {
        "full": 64,
        "full32": 64,
        "bias": 64,
        "causal": 40,
        "causal32": 40,
        "window": 28,
        "window32": 28,
        "padded": 48,
        "causal_padded": 36,
        "window_padded": 24,
        "masked": 36,
    }
    assert attention.operations(Case("attention", "forward+backward", "float32", "full", sizes)) == 3.5 * 64


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one run over one tiny case leaves behind."""
    directory = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "grid", lambda name: (small("forward+backward"),))
        patch.setitem(peak.SIZE, jax.default_backend(), 64)
        effort = ["--seconds", "0.5", "--repetitions", "4", "--no-resident-memory"]
        assert cli.main(["attention", "--output", str(directory), *effort]) == 0
    return directory


def test_rows_are_complete_and_say_how_they_came_about(written: Path) -> None:
    found = json.loads((written / f"attention-{jax.default_backend()}.json").read_text())
    assert [row["candidate"] for row in found] == [ORIGINAL, AUTOPALLAS, "jax.nn"]
    for row in found:
        assert row["kernel"] == "attention"
        assert row["evidence"] == "measured"
        assert row["failure"] is None
        assert row["shape"] == "B2 T24 N3 D8"
        assert row["device"] == jax.devices()[0].device_kind
        assert row["versions"]["jax"] == jax.__version__
        assert row["rounds"] == 4
        assert 0 < row["wall_seconds_lower"] <= row["wall_seconds"] <= row["wall_seconds_upper"]
        assert row["wall_ratio_lower"] <= row["wall_ratio"] <= row["wall_ratio_upper"]
        assert row["first_step_seconds"] >= row["compile_seconds"] > 0
        assert row["teraflops"] == pytest.approx(row["fraction_of_peak"] * row["peak_teraflops"], rel=1e-2)
        assert row["max_error"] < 1e-5
        assert row["mean_error"] < row["max_error"]
    assert found[0]["wall_ratio"] == found[0]["cpu_ratio"] == found[0]["temporary_ratio"] == 1.0
    assert found[1]["implementation"] == "xla"
    assert found[1]["block_sizes"]


def test_csv_says_what_json_says(written: Path) -> None:
    as_json = json.loads((written / f"attention-{jax.default_backend()}.json").read_text())
    with (written / f"attention-{jax.default_backend()}.csv").open(newline="") as file:
        as_csv = list(csv.DictReader(file))
    assert len(as_csv) == len(as_json)
    for flat, row in zip(as_csv, as_json, strict=True):
        assert list(flat) == list(row)
        assert float(flat["wall_seconds"]) == row["wall_seconds"]
        assert json.loads(flat["versions"]) == row["versions"]


def test_resident_memory_shows_what_a_program_occupies() -> None:
    case = Case("attention", "forward", "float32", "full", (("B", 1), ("T", 1024), ("N", 8), ("D", 64)))
    scores = 8 * 1024 * 1024 * 4
    assert scores < resident.peaks([(case, ORIGINAL)])[case, ORIGINAL] < 6 * scores


def test_a_failed_candidate_is_a_row_with_its_reason() -> None:
    measured = Measurement(
        {ORIGINAL: Timing(wall=(1.0,), cpu=(1.0,)), AUTOPALLAS: Timing(failure=Failure("compile", "no\nluck"))},
        baseline=ORIGINAL,
    )
    candidates = {name: Candidate(jnp.sum, lambda: Chosen("xla")) for name in measured.timings}
    found = rows.rows_of(small(), attention, candidates, measured, Machine.current({}))
    assert found[1].failure == "compile: no\nluck"
    assert found[1].wall_seconds is found[1].wall_ratio is found[1].fraction_of_peak is None
    assert "failed: compile: no" in terminal.table(found)


def test_table_fits_a_terminal_of_100_columns(written: Path) -> None:
    records = json.loads((written / f"attention-{jax.default_backend()}.json").read_text())
    found = [rows.Row(**{**record, "wall_seconds": 12.3456, "temporary_bytes": 2**33}) for record in records]
    assert max(map(len, terminal.table(found).splitlines())) <= 100


def test_table_has_a_case_for_every_bucket_and_kind_of_mask() -> None:
    filed = set()
    for case in attention.grid("table"):
        if case.dtype == "float32" and case.direction == "forward":
            shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in attention.arguments(case)]
            spec = table.Place.of(attention.original(case), shapes).match.spec
            filed.add(tuned_block_sizes.table_key(spec, "xla", case.direction)[3:])
    squares = [b.name for b in tuned_block_sizes.BUCKETS if b.name.startswith("T")]
    given = ("causal and dynamic", "static and dynamic", "dynamic, T x S input", "full, T x S input")
    assert filed == {
        *((bucket, mask) for bucket in squares for mask in ("full", "causal", "static", "dynamic")),
        *((bucket, mask) for bucket in ("decode", "other") for mask in ("full", "dynamic")),
        *((f"T{length}", mask) for length in (256, 512, 1024, 2048) for mask in given),
    }


def test_a_tuned_row_holds_what_was_measured_of_the_best_candidate() -> None:
    tuned = table.tune(small("forward", "padded"), "xla", count=1, seconds=0.1)
    assert tuned.key == ("xla", "forward", "float32", "T256", "dynamic, batched")
    assert tuned.row is not None
    assert str(list(tuned.row.block_sizes.to_dict().values())) in tuned.tried
    assert tuned.row.evidence == "measured"
    assert tuned.row.speedup == pytest.approx(max(r for r in tuned.tried.values() if r), rel=1e-2)


def test_rows_for_the_table_are_printed_as_its_file_has_them(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = ["--filter", "forward float32 uneven M8 K64 G2", "--candidates", "1", "--seconds", "0.1", "--print"]
    assert cli.main(["table", "grouped_matmul", *wanted]) == 0
    printed = capsys.readouterr().out.splitlines()
    header = (table_files.DATA / "cpu/grouped_matmul.csv").read_text().splitlines()[0]
    assert header in printed
    assert any(line.startswith("xla,forward,float32,G2 M/G4,small,") for line in printed)


def test_settings_in_force_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.ALLOCATOR_SETTINGS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XLA_FLAGS", "--xla_some_flag")
    monkeypatch.setenv("AUTOPALLAS_CACHE_DIR", "/a/folder/of/this/machine")
    recorded = environment.flags()
    assert "AUTOPALLAS_CACHE_DIR" not in recorded
    assert recorded.items() >= environment.ALLOCATOR_SETTINGS.items()
    assert recorded["XLA_FLAGS"] == "--xla_some_flag"
    assert not environment.ALLOCATOR_SETTINGS.keys() & environment.without_allocator_settings().keys()


def test_recorded_rows_name_no_folder_of_a_machine() -> None:
    results = Path(environment.__file__).parent / "results"
    for path in results.glob("*-*"):
        assert '"/' not in path.read_text(), path.name
