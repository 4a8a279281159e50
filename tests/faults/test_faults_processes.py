"""What one process leaves for the next: in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parents[2]

PROGRAM = """
import os, signal, sys, warnings
os.environ["JAX_PLATFORMS"] = "cpu"
import pytest
import autopallas
from tests.faults import programs
case = programs.program()
case.wanted
fault = {"kill": programs._called_back(lambda x: os.kill(os.getpid(), signal.SIGKILL)),
         "compile": programs.uncompilable, "none": lambda x: x}[sys.argv[1]]
programs.break_kernel(pytest.MonkeyPatch(), "attention", "forward", fault)
fn = autopallas.optimize(case.function, objective="always")
case.same(fn(*case.operands))
print(fn.report().counts()["attention"], [f.stage for f in fn.report().failures])
"""


def run(fault, cache):
    environment = os.environ | {"AUTOPALLAS_CACHE_DIR": str(cache), "PYTHONPATH": str(HERE)}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, fault], env=environment, cwd=HERE, capture_output=True, text=True, timeout=120
    )


def test_the_process_after_a_killed_one(tmp_path):
    assert run("kill", tmp_path).returncode == -signal.SIGKILL
    after = run("none", tmp_path)
    assert after.stdout.strip() == "1 []", after.stderr


def test_the_process_after_one_whose_kernel_failed(tmp_path):
    first, second = run("compile", tmp_path), run("none", tmp_path)
    assert first.stdout.strip() == second.stdout.strip() == "0 ['compile']", first.stderr + second.stderr
    assert "does not use xla" in first.stderr
    assert "does not use xla" not in second.stderr
