"""The project's archives, its tools and its documentation see each module once."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from pathlib import Path

import pytest

import autopallas
from autopallas.environment import VARIABLES
from autopallas.options import OptionArguments

ROOT = Path(__file__).parent.parent
DATA = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "autopallas/tuning/data").rglob("*.csv"))
MODULES = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "autopallas").rglob("*.py"))


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    # The wheel is made from the source archive, which so proves complete; without isolation no index is needed.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


@pytest.fixture(scope="module")
def wheel_names(archives):
    (path,) = archives.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return archive.namelist()


@pytest.fixture(scope="module")
def source_names(archives):
    (path,) = archives.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        return [name.partition("/")[2] for name in archive.getnames()]


def test_the_wheel_holds_each_module_once_and_the_package_alone(wheel_names):
    assert {name: n for name, n in Counter(wheel_names).items() if n > 1} == {}
    assert sorted(name for name in wheel_names if name.endswith(".py")) == MODULES
    assert {name.partition("/")[0].partition("-")[0] for name in wheel_names} == {"autopallas"}


def test_the_wheel_says_that_the_package_is_typed(wheel_names):
    assert "autopallas/py.typed" in wheel_names


def test_the_wheel_has_the_style_and_script_of_reports(wheel_names):
    assert {"autopallas/report/page.css", "autopallas/report/page.js"} <= set(wheel_names)


def test_both_archives_have_the_rows_of_the_tables(wheel_names, source_names):
    assert "autopallas/tuning/data/cpu/attention.csv" in DATA
    assert set(DATA) <= set(wheel_names) & set(source_names)


def test_the_source_archive_holds_each_module_once_and_the_tests(source_names):
    assert {name: n for name, n in Counter(source_names).items() if n > 1} == {}
    assert [name for name in source_names if name.startswith(("kernels", "patterns"))] == []
    assert sorted(n for n in source_names if n.startswith("autopallas/") and n.endswith(".py")) == MODULES
    assert {"README.md", "LICENSE", "pyproject.toml", "Makefile", "tests/test_packaging.py"} <= set(source_names)


@pytest.mark.parametrize("name", ["kernels", "patterns"])
def test_the_links_at_the_top_lead_into_the_package(name):
    link = ROOT / name
    if not link.exists():
        pytest.skip("the links are in a checkout only")
    assert link.is_symlink()
    assert link.readlink() == Path("autopallas", name)


def test_ruff_sees_each_module_once():
    pytest.importorskip("ruff")
    command = [sys.executable, "-m", "ruff", "check", "--show-files", str(ROOT)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")
    seen = Counter(str(Path(path).resolve().relative_to(ROOT)) for path in shown if path.endswith(".py"))
    assert {path: n for path, n in seen.items() if path in MODULES} == dict.fromkeys(MODULES, 1)


def test_the_documentation_lists_every_variable_as_the_code_does():
    page = (ROOT / "docs" / "options.md").read_text()
    for variable in VARIABLES:
        row = f"| `{variable.name}` | {variable.accepts.replace('|', chr(92) + '|')} | {variable.meaning} |"
        assert row in page, row


def test_the_documentation_lists_every_option():
    page = (ROOT / "docs" / "options.md").read_text()
    for name in OptionArguments.__annotations__:
        assert f"| `{name}` |" in page, name


def test_importing_the_package_touches_no_device():
    # With a platform that does not exist, whatever asks JAX for a device fails.
    environment = os.environ | {"JAX_PLATFORMS": "absent"}
    for program, fails in (("import autopallas", False), ("import autopallas, jax; jax.devices()", True)):
        result = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=False)
        assert (result.returncode != 0) == fails, result.stderr


def test_the_public_names_are_completed():
    assert set(autopallas.__all__) <= set(dir(autopallas))
