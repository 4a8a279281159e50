"""``autopallas court``."""

from __future__ import annotations

import importlib
import json
import sys

import jax
import pytest

MODULE = """
import autopallas, jax, jax.numpy as jnp

def softmax(x):
    return jax.nn.softmax(x, axis=-1)

def wrong(x):
    y = softmax(x)
    return y.at[1].multiply(1.35) if x.shape[0] > 2 else y

def scaled(x, *, factor):
    return jnp.tanh(x) * factor

@autopallas.pattern(scaled, shapes=[jnp.ones((4, 8))], scalars=["factor"], name="court_scaled")
def own(x, *, factor):
    return factor * jnp.tanh(x)
"""
ARGUMENTS = ("--reference", "tried_module:softmax", "--shapes", "f32[4,8]", "--only", "sizes", "--no-gradients")


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    jax.devices()  # or the command would ask for several, for all tests of this process
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "tried_module.py").write_text(MODULE)
    importlib.invalidate_caches()
    yield
    own = getattr(sys.modules.pop("tried_module", None), "own", None)
    if own is not None:
        own.remove()


def test_a_wrong_kernel_is_status_1_with_its_smallest_case(command):
    status, out, _ = command("court", "tried_module:wrong", *ARGUMENTS)
    assert status == 1
    assert "tried_module:wrong is wrong in" in out
    assert "Smallest failing case (sizes): f32[3,1]" in out
    assert "row [1]" in out


def test_a_right_one_is_status_0_and_told_as_json(command):
    status, out, _ = command("court", "tried_module:softmax", *ARGUMENTS, "--json", "-o", "verdict.json")
    assert status == 0
    assert json.loads(out)["ok"] is True
    with open("verdict.json") as file:
        saved = json.load(file)
    assert [verdict["kernel"] for verdict in saved["verdicts"]] == ["tried_module:softmax"]
    assert saved["platform"] == "cpu"


def test_an_own_pattern_brings_its_reference_shapes_and_scalars(command):
    status, out, _ = command("court", "tried_module:own", "--only", "sizes")
    assert (status, "agrees with its reference" in out) == (0, True), out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("tried_module:wrong",), "give --reference MODULE:FUNCTION and --shapes"),
        ((), "name one kernel, or write --shipped"),
        (("tried_module:missing", *ARGUMENTS), "tried_module has no missing"),
        (("tried_module:wrong", "--reference", "tried_module:softmax", "--shapes", "f32[]"), "cannot be traced"),
        (("--shipped", "--ops", "nothing"), "there is no operation nothing"),
        (("tried_module:wrong", *ARGUMENTS, "--runs", "1"), "--runs: 1 is not a whole number above 1"),
        (("tried_module:wrong", *ARGUMENTS, "--seconds", "nan"), "--seconds: nan is not a number of seconds above 0"),
    ],
)
def test_bad_input_is_one_line_and_status_2(command, arguments, reason):
    status, _, err = command("court", *arguments)
    assert status == 2
    assert reason in err
    assert err.count("\n") == 1


def test_kernels_are_divided_over_host_devices(process):
    (process.folder / "tried_module.py").write_text(MODULE)
    done = process(
        *("court", "tried_module:softmax", "--reference", "tried_module:softmax", "--shapes", "f32[4,8]"),
        *("--only", "devices", "--json"),
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tallies"]["devices"]["heard"] == 2


def test_a_shipped_kernel_is_tried_as_it_is_used(command):
    status, out, _ = command("court", "--shipped", "--ops", "rms_norm", "--only", "runs", "--json")
    assert status == 0
    assert [verdict["kernel"] for verdict in json.loads(out)] == ["rms_norm plain by xla"]


def test_tpu_kernels_are_interpreted_also_where_they_are_lowered_later(command, monkeypatch):
    monkeypatch.setenv("AUTOPALLAS_INTERPRET", "0")  # put back after the test, which sets it
    only = ("--ops", "rms_norm", "--interpret", "--only", "runs", "--no-gradients", "-o", "verdict.json")
    status, _, _ = command("court", "--shipped", *only)
    assert status == 0
    with open("verdict.json") as file:
        verdicts = json.load(file)["verdicts"]
    (verdict,) = (one for one in verdicts if one["kernel"] == "rms_norm plain by pallas_tpu")
    assert (verdict["heard"], verdict["refused"]) == (2, [])
