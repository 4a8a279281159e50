"""The documentation is true: its code runs, its commands are accepted, its links and lists are complete."""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import autopallas
from autopallas.cli import COMMANDS, main, parser
from autopallas.custom.registry import declared

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_LANGUAGES = {"python", "sh", "text"}
_LEFT_OUT = ("pip install ", "make ", "python3 -m venv ", ".venv/bin/python -m pip ")
"""Commands of other tools, whose effect a test does not want."""
_PARSED_ALONE = ("tune", "run", "cache show", "cache import", "check", "court", "profile")
"""Commands that take long, start a script, or need a file: only their arguments are checked here."""


def blocks(page):
    return _BLOCK.findall(page.read_text())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A user's folder, with a model and a script."""
    for name in ("model.py", "train.py"):
        shutil.copy(ROOT / "tests" / "docs" / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield tmp_path
    for name in ("model", "train"):
        sys.modules.pop(name, None)
    for one in declared():
        one.remove()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_says_what_it_is(page):
    assert {language for language, _ in blocks(page)} <= _LANGUAGES


@pytest.mark.parametrize("page", [p for p in PAGES if "```" in p.read_text()], ids=lambda page: page.name)
def test_the_code_of_a_page_runs_from_top_to_bottom(page, folder, capsys):
    names: dict[str, object] = {"__name__": page.stem}
    for language, code in blocks(page):
        if language == "python":
            first = code.partition("\n")[0]
            if first.startswith("# autopallas/"):  # a part of the package: test_adding_an_operation.py
                continue
            if first.startswith("# ") and first.endswith(".py"):
                (folder / first[2:]).write_text(code)
                sys.modules.pop(first[2:-3], None)
            path = folder / f"{page.stem}.block.py"  # a report names places in it
            path.write_text(code)
            exec(compile(code, str(path), "exec"), names)
        elif language == "sh":
            for line in code.splitlines():
                command(line.partition("   #")[0].strip(), capsys)


def command(line, capsys):
    if not line or line.startswith(_LEFT_OUT):
        return
    line = line.removeprefix(".venv/bin/")
    assert line.startswith("python -m autopallas "), line
    arguments = shlex.split(line)[3:]
    if " ".join(arguments).startswith(_PARSED_ALONE):
        assert all((ROOT / word).exists() for word in arguments if word.startswith("tests/")), line
        parser().parse_args(arguments)
        return
    status = main(arguments)
    assert status == 0, capsys.readouterr().err


def test_the_command_line_page_has_every_command():
    page = (ROOT / "docs" / "command-line.md").read_text()
    assert set(re.findall(r"^\| `(\w+)", page, re.MULTILINE)) == set(COMMANDS)


def test_the_public_names_are_documented():
    everything = "".join(page.read_text() for page in PAGES)
    for name in autopallas.__all__:
        assert name.strip("_") in everything, name


def test_the_pages_build_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="mkdocs is not installed (extra docs)")
    # Without --quiet, which hides warnings from --strict too.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (tmp_path / "site" / "report" / "index.html").exists()


def test_generated_tables_are_up_to_date(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["generate.py", "--check"])
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as end:
        runpy.run_path("docs/generate.py", run_name="__main__")
    assert not end.value.code
