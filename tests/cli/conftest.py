"""A command line in this process, and one in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autopallas.cli import main

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def command(capsys):
    """(exit status, standard output, standard error) of a command; a traceback would fail the test."""

    def run(*arguments):
        try:
            status = main([str(a) for a in arguments])
        except SystemExit as stopped:
            status = stopped.code
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


@pytest.fixture
def process(tmp_path):
    """The same in a process of its own, in the test's folder."""

    def run(*arguments, python=(), **environment):
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        return subprocess.run(
            [sys.executable, *python, *([] if python else ["-m", "autopallas"]), *arguments],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": path} | environment,
            capture_output=True,
            text=True,
            check=False,
        )

    run.folder = tmp_path
    return run
