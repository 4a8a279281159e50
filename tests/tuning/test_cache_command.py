"""``python -m autopallas cache``: what it prints, what it removes, and what it refuses."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace

import pytest
from entries import failed, key, tuned

from autopallas.cli import main


@pytest.fixture
def filled(user_cache):
    for entry in (tuned(0), tuned(1, query_block=64), failed(2, "compile: no such instruction")):
        user_cache.put(entry)
    return user_cache


def run(capsys, *arguments: str) -> str:
    assert main(["cache", *arguments]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out


def refused(capsys, *arguments: str) -> str:
    """The one line that says why."""
    with pytest.raises(SystemExit) as exit:  # the parser leaves of itself
        sys.exit(main(["cache", *arguments]))
    assert exit.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    return printed.err


def test_list_has_one_line_per_result(filled, capsys):
    head, *lines = run(capsys, "list").splitlines()
    assert head.split() == ["key", "operation", "implementation", "direction", "bucket", "device", "result"]
    assert sorted(line.split()[0] for line in lines) == sorted(key(n).digest[:12] for n in range(3))
    assert sum("query_block=64" in line and "2.50x the speed" in line for line in lines) == 1
    assert sum("failed: compile: no such instruction" in line for line in lines) == 1


def test_list_as_json(filled, capsys):
    listed = json.loads(run(capsys, "list", "--json"))
    assert {item["key"]: item["outcome"] for item in listed} == {
        key(0).digest: "tuned",
        key(1).digest: "tuned",
        key(2).digest: "failed",
    }


def test_an_empty_cache_says_where_it_would_be(user_cache, capsys):
    assert str(user_cache.folder) in run(capsys, "list")
    assert json.loads(run(capsys, "list", "--json")) == []


@pytest.mark.parametrize("arguments", [("list",), ("show", "ab"), ("clear",), ("export", "-")])
def test_a_folder_that_cannot_be_read_is_not_taken_for_an_empty_one(filled, capsys, monkeypatch, arguments):
    def refuse(folder):
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(os, "scandir", refuse)
    assert "cannot be read: Permission denied" in refused(capsys, *arguments)


def test_show_takes_the_beginning_of_a_key(filled, capsys):
    shown = run(capsys, "show", key(0).digest[:10])
    for part in (key(0).digest, "query_block=256", "compare: differs by 0.5", "query_length", "0.12.0"):
        assert part in shown
    told = json.loads(run(capsys, "show", key(0).digest, "--json"))
    assert told.pop("digest") == key(0).digest
    assert told == tuned(0).to_dict()


def test_show_tells_the_result_of_least_memory_too(filled, capsys):
    lean = replace(tuned(0).row, block_sizes={"query_block": 64, "key_block": 64}, kernel_bytes=500)
    filled.put(replace(tuned(0), lean=lean))
    shown = run(capsys, "show", key(0).digest)
    assert "query_block=256" in shown
    (line,) = (line for line in shown.splitlines() if line.startswith("least memory"))
    assert "query_block=64" in line
    assert "2.50x the speed, 0.12x the memory" in line


def test_show_refuses_a_key_that_is_not_there_or_not_one(filled, capsys):
    assert "no key begins with 'xyz'" in refused(capsys, "show", "xyz")
    assert "no key begins with ''" in refused(capsys, "show", "")
    filled.clear()
    for number in range(17):  # two of them begin with the same digit
        filled.put(tuned(number))
    counts = [sum(key(n).digest.startswith(digit) for n in range(17)) for digit in "0123456789abcdef"]
    digit = "0123456789abcdef"[counts.index(max(counts))]
    assert f"{max(counts)} keys begin with" in refused(capsys, "show", digit)


def test_a_text_cannot_steer_the_terminal(user_cache, capsys):
    entry = failed(0, "bad\x1b[2Jnews\n")
    user_cache.put(entry)
    assert "\x1b" not in run(capsys, "list")
    user_cache.put(tuned(1, versions={"jax": "0.1\x1b[2J"}, bucket=["\x1b[2J"], specs=["\x1b[2J"]))
    assert "\x1b" not in run(capsys, "list")
    assert "\x1b" not in run(
        capsys, "show", key(1, versions={"jax": "0.1\x1b[2J"}, bucket=["\x1b[2J"], specs=["\x1b[2J"]).digest
    )


def test_clear_removes_all(filled, capsys):
    assert "removed 3 results" in run(capsys, "clear")
    assert list(filled.entries()) == []
    assert json.loads(run(capsys, "clear", "--json")) == {"removed": 0}


def test_what_was_exported_can_be_imported_elsewhere(filled, capsys, tmp_path, monkeypatch):
    file = tmp_path / "results.json"
    assert "3 results" in run(capsys, "export", str(file))
    before = list(filled.entries())
    assert run(capsys, "export", "-") == file.read_text()
    filled.clear()
    assert json.loads(run(capsys, "import", str(file), "--json")) == {"imported": 3}
    assert list(filled.entries()) == before


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[1, 2]", "did not write it"),
        (b'{"archive": "something else", "entries": []}', "did not write it"),
        (b'{"archive": "autopallas tuning results"}', "no list of entries"),
        (b'{"archive": "autopallas tuning results", "entries": [{"format": 99}]}', "entry 1"),
        (b'{"archive": "autopallas tuning results", "entries": ["../../../etc/passwd"]}', "entry 1"),
    ],
)
def test_a_file_that_holds_no_results_is_refused(user_cache, capsys, tmp_path, content, reason):
    file = tmp_path / "file"
    file.write_bytes(content)
    assert reason in refused(capsys, "import", str(file))
    assert list(user_cache.entries()) == []


def test_one_bad_entry_spoils_the_import(user_cache, capsys, tmp_path):
    file = tmp_path / "file"
    bad = tuned(1).to_dict() | {"block_sizes": {"query_block": 10**15}}
    file.write_text(json.dumps({"archive": "autopallas tuning results", "entries": [tuned(0).to_dict(), bad]}))
    assert "entry 2 cannot be used" in refused(capsys, "import", str(file))
    assert list(user_cache.entries()) == []


def test_files_that_are_not_there_or_cannot_be_written_are_refused(filled, capsys, tmp_path):
    assert "no file" in refused(capsys, "import", str(tmp_path / "absent"))
    assert f"{tmp_path} is no file" in refused(capsys, "import", str(tmp_path))
    assert "cannot be written" in refused(capsys, "export", str(tmp_path / "absent" / "file"))


@pytest.mark.parametrize("arguments", [[], ["frobnicate"], ["show"], ["list", "--jsn"], ["export"]])
def test_a_bad_command_line_is_told_in_one_line(capsys, arguments):
    assert "--help" in refused(capsys, *arguments)


def test_an_option_that_does_not_exist_is_told_by_the_command_that_lacks_it(capsys):
    assert "autopallas cache list: unrecognized arguments: --jsn" in refused(capsys, "list", "--jsn")


def test_a_bad_variable_is_told_in_one_line(capsys, monkeypatch):
    monkeypatch.setenv("AUTOPALLAS_CACHE_DIR", __file__)
    assert "AUTOPALLAS_CACHE_DIR" in refused(capsys, "list")


@pytest.mark.parametrize("arguments", [[], ["cache"], ["cache", "list"], ["cache", "import"]])
def test_every_level_has_help(capsys, arguments):
    with pytest.raises(SystemExit) as exit:
        main([*arguments, "--help"])
    assert exit.value.code == 0
    assert "usage: autopallas" in capsys.readouterr().out


def test_a_reader_that_leaves_is_no_error(filled, monkeypatch, capfd):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as nobody:
        monkeypatch.setattr(sys, "stdout", nobody)
        assert main(["cache", "list"]) == 0
        nobody.write("as the interpreter does at its end")
    assert capfd.readouterr().err == ""
