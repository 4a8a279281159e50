"""The benchmark of other libraries' programs: its command line, what it compares, and what it says of rows."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopallas
from benchmarks import cli
from benchmarks.programs import child, measure, missing, programs
from benchmarks.programs import cli as programs_cli
from benchmarks.programs.program import Program, train_step

BYTES = {"original": 100, "optimized": 100, "memory": 50}
FIRST = {"original": 1.0, "optimized": 1.1, "searched": 3.0, "cached": 1.2}


def row(**changed: Any) -> dict[str, Any]:
    return {
        "program": "a library's model train B1 f32", "cpu_ratio": [2.0, 1.9, 2.1], "temporary_bytes": BYTES,
        "first_step_cpu_seconds": FIRST, "difference": 1e-6, "versions": {"jax": "0.12"},
        "processor": "a processor, 2 cores", "vector_extensions": "avx2",
        "sites": [{"op": "attention", "kind": None, "verdict": "applied"}],
        "cpu_seconds": {"original": 0.2, "optimized": 0.1}, **changed,
    }  # fmt: skip


def test_at_least_ten_programs_of_several_libraries_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["programs", "--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == len(programs()) >= 10
    assert len({line.split()[0] for line in listed}) >= 5
    assert {program.direction for program in programs()} == {"train step", "forward"}


def test_a_filter_chooses_by_all_its_words(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["programs", "--list", "--filter", "gpt-2 b4", "--filter", "whisper"])
    listed = capsys.readouterr().out.splitlines()
    assert listed
    assert all("Whisper" in line or ("GPT-2" in line and "B4" in line) for line in listed)


@pytest.mark.parametrize("options", [["--rounds", "0"], ["--repeats", "-1"], ["--rounds", "many"]])
def test_a_number_that_means_nothing_is_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["programs", *options])
    assert stopped.value.code == 2
    assert options[0] in capsys.readouterr().err


def test_nothing_chosen_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["programs", "--filter", "no such program"]) == 2
    assert "--list" in capsys.readouterr().out


def test_a_program_whose_library_is_missing_is_left_out_and_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = Program("absent forward", ("no-such-distribution",), lambda: (jnp.sum, ()))
    assert missing(absent) == ["no-such-distribution"]
    monkeypatch.setattr(programs_cli, "programs", lambda: [absent])
    assert cli.main(["programs"]) == 2
    assert "no-such-distribution not installed" in capsys.readouterr().out


def test_a_program_that_fails_is_a_row_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    unknown = Program("unknown forward", (), lambda: (jnp.sum, ()))  # a process of its own does not find it
    monkeypatch.setattr(programs_cli, "programs", lambda: [unknown])
    assert cli.main(["programs", "--output", str(tmp_path / "rows.json"), "--repeats", "1"]) == 1
    (written,) = json.loads((tmp_path / "rows.json").read_text())
    assert "original: ValueError" in written["failure"]
    assert "short of a bar: unknown forward: failed" in capsys.readouterr().out


def test_of_a_process_that_is_given_up_it_is_kept_what_it_said_and_where_it_was(monkeypatch, tmp_path) -> None:
    waits = "import faulthandler, signal, time; faulthandler.register(signal.SIGUSR1); print('{\"a\": 1}', flush=True)"
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} -c "$CODE"\n')
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(measure.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("CODE", f"{waits}; time.sleep(60)")
    found = measure.measured(
        Program("slow train", (), tuple), measure.Effort("gpu", "its kind", limit=5.0, quick=True), tmp_path
    )
    assert found["a"] == 1
    assert found["failure"] == "steps: no result within 5 seconds"
    assert "most recent call first" in found["stack"]


def test_rows_take_the_place_of_their_own_kind_alone(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    others = [row(vector_extensions="avx512_bf16"), row(processor="another processor, 2 cores")]
    programs_cli._write([row(difference=1.0), *others], file)
    programs_cli._write([row(difference=2.0)], file)
    assert sorted(one["difference"] for one in json.loads(file.read_text())) == [1e-6, 1e-6, 2.0]


def test_first_steps_alone_take_the_place_of_those_in_a_row(tmp_path, monkeypatch, capsys) -> None:
    file, name = tmp_path / "rows.json", "transformers GPT-2 train B4 T512 f32"
    monkeypatch.setattr(programs_cli, "missing", lambda program: [])
    for name_, value in (("processor", "a processor, 2 cores"), ("vector_extensions", "avx2")):
        monkeypatch.setattr(programs_cli.environment, name_, lambda value=value: value)
    monkeypatch.setattr(measure, "_child", lambda what, *_, **__: {"cpu_seconds": 3.0 if what == "original" else 4.0})
    versions = {"jax": jax.__version__}
    programs_cli._write([row(program=name, versions=versions, difference=2.0)], file)
    arguments = ["--first-steps", "--filter", "gpt-2 b4", "--output", str(file)]
    assert programs_cli.main(arguments) == 0
    (found,) = json.loads(file.read_text())
    assert found["difference"] == 2.0
    assert found["first_step_cpu_seconds"] == {"original": 3.0, "optimized": 4.0, "searched": 4.0, "cached": 4.0}
    programs_cli.main(["--first-steps", "--filter", "whisper", "--output", str(file)])
    assert "no row of this machine" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        programs_cli.main(["--first-steps"])


def test_smallest_memory_alone_takes_the_place_of_that_in_a_row(tmp_path, monkeypatch, capsys) -> None:
    file, name = tmp_path / "rows.json", "transformers GPT-2 train B4 T512 f32"
    monkeypatch.setattr(programs_cli, "missing", lambda program: [])
    for name_, value in (("processor", "a processor, 2 cores"), ("vector_extensions", "avx2")):
        monkeypatch.setattr(programs_cli.environment, name_, lambda value=value: value)
    monkeypatch.setattr(measure, "_child", lambda what, *_, **__: {"smallest": 7} if what == "memory" else {})
    before = row(program=name, versions={"jax": jax.__version__}, difference=2.0)
    programs_cli._write([before], file)
    arguments = ["--smallest-memory", "--filter", "gpt-2 b4", "--output", str(file)]
    assert programs_cli.main(arguments) == 0
    (found,) = json.loads(file.read_text())
    assert found["temporary_bytes"] == {**before["temporary_bytes"], "memory": 7}
    assert found["difference"] == 2.0
    for wrong in (["--smallest-memory"], ["--first-steps", *arguments]):
        with pytest.raises(SystemExit):
            programs_cli.main(wrong)
    assert "give one of the two" in capsys.readouterr().err


def test_what_falls_short_is_named() -> None:
    assert measure.verdicts(row()) == []
    assert "slower" in measure.verdicts(row(cpu_ratio=[0.96, 0.9, 1.0]))[0]
    more = BYTES | {"optimized": 106}
    assert "memory 1.06" in measure.verdicts(row(temporary_bytes=more, cpu_ratio=[1.2, 1.2, 1.2]))[0]
    assert measure.verdicts(row(temporary_bytes=more)) == []
    assert "first step 1.40" in measure.verdicts(row(first_step_cpu_seconds=FIRST | {"optimized": 1.4}))[0]
    assert measure.verdicts(row(first_step_cpu_seconds=FIRST | {"optimized": 1.3})) == []
    longer = FIRST | {"optimized": 1.375}
    for optimized, paid in ((0.125, "after 3 steps"), (0.1875, "after 6 steps"), (0.25, "never"), (None, "never")):
        seconds = {"original": 0.25, "optimized": optimized}
        assert paid in measure.verdicts(row(first_step_cpu_seconds=longer, cpu_seconds=seconds))[0]
    assert measure.paid_after(row(first_step_cpu_seconds=FIRST | {"optimized": 0.9})) == 0
    assert measure.verdicts(row(failure="steps: no luck")) == ["failed: steps: no luck"]


def test_means_are_geometric_and_leave_out_what_failed() -> None:
    said = measure.summary([row(), row(cpu_ratio=[0.5, 0.5, 0.5]), row(failure="no")])
    assert said.startswith("2 programs, geometric means: 1.00 times as fast; temporary memory 1.00, and 0.50")
    assert "2 of 2 sites are replaced" in said
    assert measure.summary([row(failure="no")]) == "no program ran"


def test_recorded_places_name_no_folder_of_a_machine() -> None:
    recorded = json.loads((Path(programs_cli.__file__).parents[1] / "results" / "programs-cpu.json").read_text())
    reasons = [reason for row in recorded for _, reason in row.get("near_misses", [])]
    assert reasons
    assert not [reason for reason in reasons if re.search(r"(?<![\w.])/", reason)]


def test_of_a_steps_state_the_change_is_compared() -> None:
    state = {"w": jnp.full(4, 1e3), "key": jax.random.key(0)}
    good, bad = ({"w": state["w"] + change, "key": state["key"]} for change in (1.0, 1.5))
    assert child.difference((good, jnp.zeros(())), (bad, jnp.zeros(())), (state,)) == pytest.approx(0.5)
    assert child.difference(np.ones(4), np.full(4, 1.5), (state,)) == pytest.approx(0.5)
    assert child.difference(jnp.zeros(3), jnp.ones(3), (jnp.ones(3),)) == pytest.approx(3**0.5)


def test_on_a_gpu_wall_time_counts_and_a_quick_row_has_what_was_measured() -> None:
    found = row(
        clock="wall", device="NVIDIA H100 80GB HBM3", cpu_ratio=None, wall_ratio=[1.5, 1.4, 1.6],
        device_ratio=[1.6, 1.6, 1.6], wall_seconds={"original": 0.15, "optimized": 0.1},
        temporary_bytes={"original": 100, "optimized": 80}, first_step_wall_seconds={"original": 9.0, "searched": 20.0},
    )  # fmt: skip
    del found["vector_extensions"], found["first_step_cpu_seconds"]
    assert measure.verdicts(found) == [], "of the first step without a search nothing is known"
    assert "slower: 0.90" in measure.verdicts(found | {"wall_ratio": [0.9, 0.9, 0.9]})[0]
    assert "1.50 [1.40, 1.60]  device 1.60  150.0 ms" in measure.line(found)
    assert "1.50 times as fast; temporary memory 0.80; first step 2.22 with one" in measure.summary([found])
    assert programs_cli._machine(found)[1] == "NVIDIA H100 80GB HBM3"


def test_a_program_runs_where_it_is_sized_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def measured(program: Program, effort: measure.Effort, cache: Path) -> dict[str, Any]:
        ran.append(f"{program.name} by {effort.clock} time")
        return {"program": program.name, "failure": "not run"}

    def built() -> Any:
        raise AssertionError

    chosen = [Program("one forward", (), built), Program("large train", (), built, "gpu", built)]
    monkeypatch.setattr(programs_cli, "programs", lambda: chosen)
    monkeypatch.setattr(measure, "measured", measured)
    assert cli.main(["programs", "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == ["one forward", "large train   (for a GPU)"]
    for platform in ("cpu", "gpu"):
        monkeypatch.setattr(programs_cli.environment, "backend_and_device", lambda of=platform: (of, "its kind"))
        cli.main(["programs"])
    assert ran == ["one forward by cpu time", "large train by wall time"]


def test_a_quick_dry_run_goes_the_whole_way(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    arguments = ["--dry-run", "--quick", "--rounds", "2", "--filter", "plain mamba", "--output", str(file)]
    assert cli.main(["programs", *arguments]) == 0, capsys.readouterr().out
    (found,) = json.loads(file.read_text())
    assert found["program"].endswith("(dry run)")
    assert "recurrence" in {site["op"] for site in found["sites"]}
    assert {"block_sizes_from", "measured", "reason", "implementation"} <= set(found["sites"][0])
    assert found["tuning"] == {"searches": 0, "cache_hits": 0}
    assert set(found["first_step_cpu_seconds"]) == {"original", "searched"}
    assert found["difference"] < 0.05


@pytest.mark.parametrize("program", [one for one in programs() if one.small], ids=lambda one: one.name)
def test_a_program_for_a_gpu_keeps_its_results_at_small_sizes(program: Program) -> None:
    if absent := missing(program):
        pytest.skip(f"needs {', '.join(absent)}")
    assert program.small is not None
    function, arguments = program.small()
    optimized = autopallas.optimize(function, objective="always")
    assert child.difference(jax.jit(function)(*arguments), optimized(*arguments), arguments) < 0.05
    assert len(optimized.report().sites) >= 3


def test_a_program_is_measured_with_its_sites() -> None:
    def loss(w: jax.Array, x: jax.Array, labels: jax.Array) -> jax.Array:
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x @ w), labels[:, None], 1))

    found = child._steps((train_step(loss), (jnp.ones((8, 16)), jnp.ones((4, 8)), jnp.arange(4))), rounds=2)
    assert [site["op"] for site in found["sites"]] == ["cross_entropy", "respelling"], "the loss, and w's gradient"
    assert found["rounds"] == 2
    assert found["difference"] < 1e-5
    assert found["failure"] is None
    text = measure.line(found | {"program": "p", "first_step_cpu_seconds": FIRST})
    assert "1 cross_entropy" in text


def test_coverage_counts_sites_with_a_row_and_names_those_without(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def sites(program: Program) -> tuple[list[dict[str, Any]], str]:
        if program.name == "broken":
            return [], "rows: no such thing"
        with_row = {"name": "attention", "has_row": True, "reason": "faster", "spec": "T=64"}
        return [with_row, with_row, {"name": "sort", "has_row": False, "reason": "no row", "spec": "A8"}], ""

    chosen = [Program(name, (), list) for name in ("whole", "broken")]
    monkeypatch.setattr(programs_cli, "programs", lambda: chosen)
    monkeypatch.setattr(measure, "covered", sites)
    assert cli.main(["programs", "--coverage"]) == 1, "one program failed"
    said = capsys.readouterr().out
    assert "2 of 3" in said
    assert "1 without: sort A8: no row" in said
    assert "rows: no such thing" in said
    assert "2 of 3 sites have a row of this machine (66.7%)" in said


def test_the_sites_of_a_program_say_whether_they_have_a_row() -> None:
    def built() -> tuple[Any, tuple[Any, ...]]:
        def function(x: jax.Array, scale: jax.Array) -> Any:
            norm = x * scale * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
            return norm, jnp.cumsum(x, axis=0), jnp.sort(x.astype(jnp.float16), axis=0)

        return function, (jnp.ones((512, 512)), jnp.ones(512))

    found = child._rows(built())["sites"]
    assert {site["name"] for site in found} == {"cumulative", "sort"}, "an RMSNorm has no kernel on a CPU"
    assert all(site["reason"] and site["spec"] for site in found)
    assert {site["has_row"] for site in found if site["name"] == "cumulative"} == {True}
