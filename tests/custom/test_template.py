"""The template package of examples/ works as it is, and its tests pass."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_the_tests_of_the_template_pass():
    environment = os.environ | {
        "AUTOPALLAS_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "examples"), str(ROOT)]),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", "examples/own_kernel"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "skipped" not in result.stdout
