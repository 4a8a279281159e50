"""The mixture-of-experts example trains, replaces its ragged dots in both directions, and answers bad input."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = "--steps 3 --sequence-length 32 --layers 2 --width 16 --heads 2 --experts 4 --vocabulary 50 --objective always"


def test_it_trains_both_ways_alike():
    command = [sys.executable, EXAMPLES / "train_moe.py", *SMALL.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for expected in (
        "20 sites replaced",  # attention, ragged dots, norms, gradients of weights, sorts by expert, and the loss
        "grouped_matmul at",
        "replaced, forward and backward",
        "within the tolerance",
        "temporary memory",
    ):
        assert expected in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [["--experts", "2", "--experts-per-token", "3"], ["--width", "10", "--heads", "4"], ["--no-such-option"]],
)
def test_bad_input_is_answered_in_one_line(arguments, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    module = importlib.import_module("train_moe")
    with pytest.raises(SystemExit) as stopped:
        module.parse(arguments)
    assert stopped.value.code == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
