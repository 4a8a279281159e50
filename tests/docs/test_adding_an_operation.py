"""The operation of docs/adding-an-operation.md has, in a copy of the package, all that a declared one has to have."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import autopallas

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "adding-an-operation.md"
TESTS = ("tests/kernels/test_declared.py", "tests/kernels/test_declared_function.py", "tests/test_benchmarks.py")


def test_the_operation_of_the_page_is_complete(tmp_path):
    package = Path(autopallas.__file__).parent
    shutil.copytree(package, tmp_path / "autopallas", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    files = re.findall(r"^```python\n# (autopallas/\S+)\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    for name, code in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(code)
    assert len(files) == 3
    (op,) = {Path(name).parent.name for name, _ in files if "/kernels/" in name}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml"]
    done = subprocess.run(
        [*command, f"--rootdir={ROOT}", "-k", f"{op} or devices_share", *(ROOT / name for name in TESTS)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
    assert re.search(r"1\d passed", done.stdout), done.stdout
    assert "skipped" not in done.stdout
