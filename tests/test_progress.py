"""Progress is shown on a terminal, with and without rich, and never where standard error is a file."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import pty
import sys

import pytest

from autopallas.progress import Progress


def shown():
    """What a command with progress does."""
    with Progress("tuning attention") as say:
        say("2 of 8: query_block=256")
        print("a result")


def everything(terminal):
    """What was written to a terminal that is closed at the other end; it comes in parts, and ends with an error."""
    parts = []
    with contextlib.suppress(OSError):
        while part := os.read(terminal, 65536):
            parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize("rich", [True, False])
def test_a_terminal_shows_title_text_and_bar_and_results_stay_apart(rich, monkeypatch):
    if rich and importlib.util.find_spec("rich") is None:
        pytest.skip("rich is not installed (extra cli)")
    for name in () if rich else ("rich", "rich.console", "rich.progress"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    ours, theirs = pty.openpty()
    monkeypatch.setattr(sys, "stdout", out := io.StringIO())
    with open(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        shown()
    seen = everything(ours)
    monkeypatch.undo()
    os.close(ours)
    assert out.getvalue() == "a result\n"
    assert b"tuning attention" in seen
    assert b"query_block=256" in seen
    assert (b"####............" in seen) == (not rich)


def test_a_file_gets_nothing(capsys):
    shown()
    assert capsys.readouterr() == ("a result\n", "")
