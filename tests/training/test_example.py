"""The example trains, replaces its attentions and its loss in both directions, and answers bad input."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"
SMALL = "--steps 3 --sequence-length 32 --batch 2 --layers 2 --width 16 --heads 2 --vocabulary 50 --objective always"


def test_it_trains_both_ways_alike():
    done = subprocess.run([sys.executable, EXAMPLE, *SMALL.split()], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for expected in (
        "14 sites replaced",  # six of them are gradients of weights
        "replaced, forward and backward",
        "within the tolerance",
        "first step",
        "step, median",
        "temporary memory",
    ):
        assert expected in done.stdout


@pytest.mark.nightly
def test_it_trains_alike_divided_among_devices():
    mesh = "--mesh data=4,model=2 --batch 4 --vocabulary 64"
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, EXAMPLE, *SMALL.split(), *mesh.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "within the tolerance" in done.stdout
    # What one of the devices computes: the attention of a sequence, and the loss of its rows over half of the words.
    assert "8 sites replaced" in done.stdout
    assert "attention B=1 N=2 T=32" in done.stdout
    assert "cross_entropy N=32 D=16 V=32" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["--steps", "0"],
        ["--mesh", "data=2"],
        ["--mesh", "data=2,model=1", "--batch", "3"],
        ["--width", "10", "--heads", "4"],
        ["--seed", "-1"],
        ["--no-such-option"],
    ],
)
def test_bad_input_is_answered_in_one_line(arguments, capsys, monkeypatch):
    specification = importlib.util.spec_from_file_location("train_gpt", EXAMPLE)
    assert specification is not None
    module = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, "train_gpt", module)
    specification.loader.exec_module(module)
    with pytest.raises(SystemExit) as stopped:
        module.parse(arguments)
    assert stopped.value.code == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
