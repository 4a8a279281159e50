"""``autopallas report``."""

from __future__ import annotations

import importlib
import json
import sys

import pytest

from autopallas.report import Report

MODULE = """
import autopallas, jax, jax.numpy as jnp

def attend(q, k, v):
    scores = q @ k.T / 8
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape, bool)), scores, -jnp.inf)
    return jax.nn.softmax(scores, axis=-1) @ v

def leaky(q, k, v):
    p = jax.nn.softmax(q @ k.T, axis=-1)
    return p @ v, p

optimized = autopallas.optimize(attend, objective="always")
demanding = autopallas.optimize(leaky, require={"attention": 1})
number = 3

def looks(x):
    return x if x.sum() > 0 else -x

def names(x):
    return "x"
"""
SHAPES = "f32[300,64],f32[300,64],f32[300,64]"


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "reportable.py").write_text(MODULE)
    importlib.invalidate_caches()
    yield
    sys.modules.pop("reportable", None)


def test_it_prints_a_table_of_80_columns_with_places_as_seen_from_here(command):
    status, out, err = command("report", "reportable:optimized", "--shapes", SHAPES)
    assert (status, err) == (0, "")
    assert "reportable:optimized: 1 site replaced" in out
    assert "reportable.py:7 (attend)" in out
    assert max(map(len, out.splitlines())) <= 80


def test_a_near_miss_is_told_with_its_reason_and_advice(command):
    status, out, _ = command("report", "reportable:leaky", "--shapes", SHAPES)
    assert status == 0
    assert "attention at reportable.py:11 (leaky): the scores or probabilities are also returned" in " ".join(
        out.split()
    )
    assert "Return or log the probabilities from a separate function" in " ".join(out.split())


def test_the_passes_are_told_where_they_are_asked_for(command):
    arguments = ("report", "reportable:attend", "--shapes", SHAPES)
    assert "find sites" not in command(*arguments)[1]
    _, out, _ = command(*arguments, "--trace")
    found = next(line for line in out.splitlines() if line.split()[:2] == ["find", "sites"])
    assert found.split()[-1] == "1"
    assert max(map(len, out.splitlines())) <= 80


def test_json_is_a_report(command):
    _, out, _ = command("report", "reportable:attend", "--shapes", SHAPES, "--objective", "always", "--json")
    assert Report.from_json(out).counts() == {"attention": 1}


def test_details_are_the_text_of_the_report(command):
    _, out, _ = command("report", "reportable:attend", "--shapes", SHAPES, "--details")
    assert "spec            attention" in out


def test_a_target_is_decided_and_compiled_for(command):
    pytest.importorskip("libtpu", reason="the TPU's compiler is not installed (extra tpu-check)")
    shapes = ",".join(["bf16[512,128]"] * 3)
    status, out, err = command("report", "reportable:optimized", "--shapes", shapes, "--target", "tpu-v5e", "--json")
    assert status == 0, err
    told = json.loads(out)
    assert told["report"]["device_kind"] == "TPU v5 lite"
    assert Report.from_dict(told["report"]).counts() == {"attention": 1}
    assert all(len(pair) == 2 for pair in told["target"].values())


def test_this_machines_compiler_tells_memory_before_and_after(command):
    status, out, err = command("report", "reportable:optimized", "--shapes", SHAPES, "--target", "cpu", "--json")
    assert status == 0, err
    before, after = json.loads(out)["target"]["temporary bytes"]
    assert before > 300 * 300 * 4 > 0, "all scores at once"
    assert after < before


def test_where_everything_is_turned_off_it_says_so(command, monkeypatch):
    monkeypatch.setenv("AUTOPALLAS_DISABLE", "1")
    status, out, err = command("report", "reportable:attend", "--shapes", SHAPES)
    assert (status, out) == (2, "")
    assert "AUTOPALLAS_DISABLE is set" in err


@pytest.mark.parametrize("suffix", [".html", ".json", ".txt"])
def test_it_writes_a_file(command, tmp_path, suffix):
    status, out, _ = command("report", "reportable:optimized", "--shapes", SHAPES, "-o", f"out{suffix}")
    assert (status, out) == (0, f"wrote out{suffix}\n")
    assert "reportable.py" in (tmp_path / f"out{suffix}").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["reportable", "--shapes", SHAPES], "'reportable' is no function's name"),
        (["absent:f", "--shapes", SHAPES], "there is no module absent"),
        (["reportable.py:attend", "--shapes", SHAPES], "begins with a file; write its module, reportable:attend"),
        (["reportable:absent", "--shapes", SHAPES], "reportable has no absent"),
        (["reportable:atend", "--shapes", SHAPES], "reportable has no atend; did you mean attend?"),
        (["reportable:number", "--shapes", SHAPES], "is no function; its type is int"),
        (["reportable:attend", "--shapes", "f32[3"], "it ends where , or ] belongs"),
        (["reportable:attend", "--shapes", "f32[3]"], "cannot be traced with these shapes"),
        (["reportable:attend", "--shapes", SHAPES, "-o", "out.pdf"], "out.pdf is no report"),
        (["reportable:attend", "--shapes", SHAPES, "-o", "absent/out.html"], "cannot be written"),
        (["reportable:attend", "--shapes", SHAPES, "--objective", "speed"], "invalid choice"),
        (["reportable:demanding", "--shapes", SHAPES], "fewer sites were replaced than required (attention: 0 of 1)"),
        (
            ["reportable:attend", "--shapes", SHAPES, "--target", "tpu-v1"],
            "there is no target tpu-v1; there are cpu, gpu, h100, tpu-v4",
        ),
        (["reportable:attend", "--shapes", SHAPES, "--target", "h100"], "this machine has cpu, not h100"),
        (["reportable:attend"], "the following arguments are required: --shapes"),
    ],
)
def test_bad_input_is_one_line_and_status_2(command, arguments, message):
    status, out, err = command("report", *arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", ["looks", "names"])
def test_a_function_that_jit_cannot_trace_is_told_without_a_warning(command, recwarn, name):
    status, out, err = command("report", f"reportable:{name}", "--shapes", "f32[3]")
    assert (status, err, list(recwarn)) == (0, "", [])
    assert "the function runs as it is written, since jax.jit cannot trace it: " in " ".join(out.split())
    assert "Untraceable" not in out
    assert "no device" not in out


@pytest.mark.parametrize(
    ("redirection", "status", "message"),
    [
        (">&-", 0, ""),
        (">/dev/full", 2, "autopallas report: standard output cannot be written: No space left on device\n"),
    ],
)
def test_an_output_that_is_closed_or_full_is_no_traceback(process, redirection, status, message):
    line = f'exec "{sys.executable}" -m autopallas report reportable:attend --shapes "{SHAPES}" {redirection}'
    run = "import subprocess, sys; sys.exit(subprocess.run(['sh', '-c', sys.argv[1]]).returncode)"
    ran = process(line, python=("-c", run))
    assert (ran.returncode, ran.stderr) == (status, message)
