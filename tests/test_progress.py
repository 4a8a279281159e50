"""Progress is shown on a terminal, with and without rich, and never where standard error is a file."""

from __future__ import annotations

import importlib.util
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
{without}
from autopallas.progress import Progress
with Progress("tuning attention") as say:
    say("2 of 8: query_block=256")
    import time; time.sleep(0.2)
    print("a result")
"""
WITHOUT = "sys.modules['rich'] = sys.modules['rich.console'] = sys.modules['rich.progress'] = None"


def run(program, stderr):
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent), "TERM": "xterm", "COLUMNS": "100"}
    return subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, stderr=stderr)


@pytest.mark.parametrize("rich", [True, False])
def test_a_terminal_shows_title_text_and_bar_and_results_stay_apart(rich):
    if rich and importlib.util.find_spec("rich") is None:
        pytest.skip("rich is not installed (extra cli)")
    ours, theirs = pty.openpty()
    child = run(PROGRAM.format(without="" if rich else WITHOUT), theirs)
    out, _ = child.communicate(timeout=60)
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 4096):
            shown += part
    except OSError:  # the other end is closed
        pass
    assert child.returncode == 0, shown
    assert out == b"a result\n"
    assert b"tuning attention" in shown
    assert b"query_block=256" in shown
    assert (b"####............" in shown) == (not rich)


def test_a_file_gets_nothing():
    child = run(PROGRAM.format(without=""), subprocess.PIPE)
    assert child.communicate(timeout=60) == (b"a result\n", b"")
