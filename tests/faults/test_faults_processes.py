"""What one process leaves for the next: in processes of their own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parents[2]

PROGRAM = """
import os, sys, warnings
os.environ["JAX_PLATFORMS"] = "cpu"
import pytest
import autopallas
from tests.faults import programs

def work(fault):
    case = programs.program()
    fault = {"kill": programs._called_back(lambda x: os.kill(os.getpid(), 9)),
             "compile": programs.uncompilable, "none": lambda x: x}[fault]
    programs.break_kernel(pytest.MonkeyPatch(), "attention", "forward", fault)
    fn = autopallas.optimize(case.function, objective="always")
    case.same(fn(*case.operands))
    print(fn.report().counts()["attention"], [f.stage for f in fn.report().failures], flush=True)

for fault in sys.argv[1:]:  # one process for each, none of which has to import again
    child = os.fork()
    if not child:
        try:
            work(fault)
        finally:
            sys.stderr.flush()
            os._exit(0)
    print("status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    print("--", file=sys.stderr, flush=True)
"""


def run(cache, *faults):
    """(standard output, standard error) of each of several processes, one after the other."""
    environment = os.environ | {"AUTOPALLAS_CACHE_DIR": str(cache), "PYTHONPATH": str(HERE)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *faults], env=environment, cwd=HERE, capture_output=True, text=True, timeout=120
    )
    told = [part.strip() for part in re.split(r"status (?=-?\d)", done.stdout)]
    return told, done.stderr.split("--\n")


def test_the_process_after_a_killed_one(tmp_path):
    told, errors = run(tmp_path, "kill", "none")
    assert told == ["", f"{-signal.SIGKILL}\n1 []", "0"], errors


def test_the_process_after_one_whose_kernel_failed(tmp_path):
    told, errors = run(tmp_path, "compile", "none")
    assert told == ["0 ['compile']", "0\n0 ['compile']", "0"], errors
    assert "does not use xla" in errors[0]
    assert "does not use xla" not in errors[1]
