"""Verdicts that cannot be read or written, and what somebody else may have put in their place."""

from __future__ import annotations

import ast
import json
import os
import stat
from pathlib import Path

import pytest

import autopallas
from autopallas.tuning.entry import MAXIMUM_BYTES
from autopallas.tuning.probe_cache import ProbeResults
from tests.faults import programs
from tests.faults.programs import break_kernel, forget, program, warned

_KEPT: dict[str, bytes] = {}
"""The verdict that a kernel fails, as it was written to the disk once: the name of its file, and what that holds."""


@pytest.fixture
def written(monkeypatch):
    """(the file of that verdict, the program)."""
    case = program()
    if not _KEPT:
        with monkeypatch.context() as patched:
            break_kernel(patched, "attention", "forward", programs.uncompilable)
            with warned(1):
                case.same(autopallas.optimize(case.function, objective="always")(*case.operands))
        (made,) = ProbeResults.current().folder.iterdir()
        _KEPT[made.name] = made.read_bytes()
        made.unlink()
        made.parent.rmdir()
        forget()
    ((name, content),) = _KEPT.items()
    folder = ProbeResults.current().folder
    folder.mkdir(mode=0o700, parents=True)
    (folder / name).write_bytes(content)
    return folder / name, case


def _data(file, **changes):
    return json.dumps(json.loads(file.read_text()) | changes)


FILES = {
    "cut off": lambda file: file.write_text(file.read_text()[:100]),
    "another format": lambda file: file.write_text(_data(file, format=9)),
    "another outcome": lambda file: file.write_text(_data(file, outcome=["works"])),
    "another key": lambda file: file.write_text(_data(file, key={"a": 1})),
    "another field": lambda file: file.write_text(_data(file, run="rm")),
    "no date": lambda file: file.write_text(_data(file, until="soon")),
    "not a number": lambda file: file.write_text(_data(file).replace('"until":', '"until": NaN, "x":')),
    "escape sequences": lambda file: file.write_text(_data(file, error="\x1b[2J")),
    "too long": lambda file: file.write_text(_data(file, error="x" * MAXIMUM_BYTES)),
    "bytes": lambda file: file.write_bytes(bytes(range(256))),
    "a pipe": lambda file: (file.unlink(), os.mkfifo(file)),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "a link": lambda file: (file.rename(file.parent / "other"), file.symlink_to(file.parent / "other")),
}


@pytest.mark.parametrize("change", FILES.values(), ids=FILES)
def test_a_verdict_that_cannot_be_read(written, change):
    file, case = written
    change(file)
    fn = autopallas.optimize(case.function, objective="always")
    with warned(1, "ignores"):
        case.same(fn(*case.operands))
    assert fn.report().counts() == {"attention": 1}, "what is not known to fail is tried"


def test_a_verdict_from_the_far_future_is_not_believed(written):
    file, case = written
    file.write_text(_data(file, until=2.0**34))
    fn = autopallas.optimize(case.function, objective="always")
    case.same(fn(*case.operands))
    assert fn.report().counts() == {"attention": 1}


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), PermissionError(13, "Permission denied")])
def test_a_verdict_that_cannot_be_written(error, monkeypatch):
    case = program()

    def full(*arguments, **keywords):
        raise error

    monkeypatch.setattr("autopallas.tuning.cache.os.open", full)
    break_kernel(monkeypatch, "attention", "forward", programs.uncompilable)
    fn = autopallas.optimize(case.function, objective="always")
    with warned(2):  # of the kernel, and of the disk
        for _ in range(3):
            case.same(fn(*case.operands))
    assert fn.report().counts() == {}, "this process remembers without the disk"


def test_folder_and_files_are_the_users_alone(monkeypatch):
    case = program()
    break_kernel(monkeypatch, "attention", "forward", programs.uncompilable)
    with warned(1):
        case.same(autopallas.optimize(case.function, objective="always")(*case.operands))
    (file,) = ProbeResults.current().folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_no_module_can_turn_data_into_code():
    """Nothing is unpickled, and nothing evaluated but the script that ``run`` was given."""
    found = set()
    root = Path(autopallas.__file__).parent
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Import(names=names) | ast.ImportFrom(names=names):
                    words = {part for alias in names for part in alias.name.split(".")}
                    words |= set((getattr(node, "module", None) or "").split("."))
                    bad = words & {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml"}
                case ast.Call(func=ast.Name(id=name)):
                    bad = {name} & {"eval", "exec", "compile", "__import__"}
                case _:
                    continue
            found |= {(str(path.relative_to(root)), word) for word in bad}
    assert found == {("cli/script.py", "exec"), ("cli/script.py", "compile")}


def test_what_is_listed_and_shown_is_plain_text(written, capsys):
    from autopallas.cli import main

    file, _ = written
    file.write_text(_data(file, error="it \u2028 <b>failed</b>".replace("\u2028", "")))
    assert main(["cache", "list"]) == 0
    out = capsys.readouterr().out
    assert "fails (compile): it" in out
    assert main(["cache", "show", file.stem[:8]]) == 0
    assert json.loads(capsys.readouterr().out)["outcome"] == "fails"
