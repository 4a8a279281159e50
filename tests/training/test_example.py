"""The example trains, replaces its attentions and its loss in both directions, and answers bad input."""

from __future__ import annotations

import importlib.util
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
        "3 sites replaced",
        "replaced, forward and backward",
        "within the tolerance",
        "first step",
        "step, median",
        "temporary memory",
    ):
        assert expected in done.stdout


@pytest.mark.parametrize(
    "arguments", [["--steps", "0"], ["--width", "10", "--heads", "4"], ["--seed", "-1"], ["--no-such-option"]]
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
