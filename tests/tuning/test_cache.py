"""The cache on disk: what goes in comes out, and nothing that lies there can do harm."""

from __future__ import annotations

import json
import os
import random
import stat
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
from entries import failed, key, tuned

from autopallas.errors import AutopallasWarning
from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.tuning import cache as module
from autopallas.tuning.cache import WARNED, Cache, directory
from autopallas.tuning.entry import MAXIMUM_BYTES, Entry, EntryError, parse


@pytest.fixture(autouse=True)
def _fresh_warnings():
    WARNED.forget()
    yield
    WARNED.forget()


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "cache")


def path_of(cache: Cache, entry: Entry) -> Path:
    assert cache.folder is not None
    return cache.folder / f"{entry.digest}.json"


def refused(cache: Cache, entry: Entry) -> str:
    """The one warning with which the entry's file is ignored."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert cache.get(key(0)) is None
        assert cache.get(key(0)) is None
        assert list(cache.entries()) == []
    assert len(caught) == 1
    return str(caught[0].message)


# --- in and out ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", [tuned(), failed()], ids=["tuned", "failed"])
def test_an_entry_comes_back_equal_in_another_cache_object(cache, tmp_path, entry):
    assert cache.put(entry)
    assert Cache(tmp_path / "cache").get(key(0)) == entry
    assert cache.get(key(1)) is None
    assert list(cache.entries()) == [entry]


def test_the_last_entry_of_a_key_wins(cache):
    cache.put(tuned(query_block=64))
    cache.put(tuned(query_block=128))
    assert cache.get(key(0)).block_sizes["query_block"] == 128
    assert len(list(cache.entries())) == 1


def test_clear_removes_entries_and_nothing_else(cache):
    for number in range(3):
        cache.put(tuned(number))
    other = cache.folder / "notes.json"
    other.write_text("mine")
    (cache.folder / f".{'0' * 64}.{'0' * 16}.tmp").write_text("left behind")
    assert cache.clear() == 3
    assert [file.name for file in cache.folder.iterdir()] == ["notes.json"]


def test_folder_and_files_are_the_users_alone(cache):
    cache.put(tuned())
    assert stat.S_IMODE(cache.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(cache.folder.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path_of(cache, tuned()).stat().st_mode) == 0o600


def test_the_oldest_entries_go_where_there_are_too_many(cache, monkeypatch):
    monkeypatch.setattr(module, "_MOST_ENTRIES", 3)
    for number in range(5):
        cache.put(tuned(number))
        os.utime(path_of(cache, tuned(number)), (1000 + number, 1000 + number))
    cache.put(tuned(5))
    assert [n for n in range(6) if cache.get(key(n)) is not None] == [3, 4, 5]


def test_the_size_is_bounded_in_bytes_too(cache, monkeypatch):
    monkeypatch.setattr(module, "_MOST_BYTES", 3 * len(tuned().to_json()))
    for number in range(6):
        cache.put(tuned(number))
        os.utime(path_of(cache, tuned(number)), (1000 + number, 1000 + number))
    assert len(list(cache.entries())) == 3


def test_what_a_killed_process_left_is_removed_after_a_while(cache):
    cache.put(tuned())
    old, new = (cache.folder / f".{digit * 64}.{'0' * 16}.tmp" for digit in "ab")
    for file in (old, new):
        file.write_text("{")
    os.utime(old, (time.time() - 7200,) * 2)
    cache.put(tuned(1))
    assert not old.exists()
    assert new.exists()


def test_the_folder_is_the_variables_or_the_platforms(monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOPALLAS_CACHE_DIR", str(tmp_path))
    assert directory() == tmp_path
    monkeypatch.delenv("AUTOPALLAS_CACHE_DIR")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert directory() == Path("/somewhere/autopallas")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/someone")
    assert directory() == Path("/home/someone/.cache/autopallas")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert directory() == Path("/home/someone/Library/Caches/autopallas")


# --- files that are no entries ---------------------------------------------------------------------------------------


def _changed(change):
    data = tuned().to_dict()
    change(data)
    return json.dumps(data)


BROKEN = {
    "empty": "",
    "no JSON": "import os",
    "a list": "[]",
    "a number": "17",
    "null": "null",
    "deep": "[" * 100000,
    "NaN": _changed(lambda d: d.update(seconds=float("nan"))),
    "infinite": _changed(lambda d: d["row"].update(kernel_us=float("inf"))),
    "overflowing": _changed(lambda d: None).replace('"kernel_us": 100.0', '"kernel_us": 1e999'),
    "huge integer": _changed(lambda d: None).replace('"kernel_bytes": 1000', '"kernel_bytes": ' + "9" * 5000),
    "long integer": _changed(lambda d: d["row"].update(kernel_bytes=10**19)),
    "huge block": _changed(lambda d: d["block_sizes"].update(query_block=2**31)),
    "negative block": _changed(lambda d: d["block_sizes"].update(query_block=-1)),
    "fractional block": _changed(lambda d: d["block_sizes"].update(query_block=1.5)),
    "block sizes missing": _changed(lambda d: d.update(block_sizes=None)),
    "many block sizes": _changed(lambda d: d.update(block_sizes={str(n): 1 for n in range(100)})),
    "no time": _changed(lambda d: d["row"].update(kernel_us=0)),
    "time is true": _changed(lambda d: d["row"].update(kernel_us=True)),
    "not measured": _changed(lambda d: d["row"].update(evidence="estimated")),
    "row missing": _changed(lambda d: d.update(row=None)),
    "field missing": _changed(lambda d: d.pop("rejected")),
    "field unknown": _changed(lambda d: d.update(module="os")),
    "other format": _changed(lambda d: d.update(format=1)),
    "format is a text": _changed(lambda d: d.update(format="1")),
    "other outcome": _changed(lambda d: d.update(outcome="eval")),
    "outcome is a list": _changed(lambda d: d.update(outcome=["tuned"])),
    "escape codes": _changed(lambda d: d["row"].update(date="\x1b[2J")),
    "lone surrogate": _changed(lambda d: d.update(reason="\ud800")),
    "another key": tuned(1).to_json(),
    "another version": tuned(0, versions={"jax": "0.9.0", "jaxlib": "0.9.0"}).to_json(),
    "key is a path": _changed(lambda d: d.update(key="../../etc/passwd")),
    "rejected is long": _changed(lambda d: d.update(rejected=d["rejected"] * 1000)),
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_a_file_that_is_no_entry_is_ignored_with_one_warning(cache, text):
    cache.put(tuned())
    path_of(cache, tuned()).write_text(text)
    assert str(path_of(cache, tuned())) in refused(cache, tuned())
    assert cache.put(tuned())
    assert cache.get(key(0)) == tuned()


def test_every_truncation_is_ignored(cache):
    whole = tuned().to_json()
    cache.put(tuned())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for length in range(len(whole)):
            path_of(cache, tuned()).write_text(whole[:length])
            assert cache.get(key(0)) is None


def test_random_bytes_and_flipped_bytes_give_a_valid_entry_or_none():
    draw = random.Random(0)
    whole = tuned().to_json().encode()
    survived = 0
    for _ in range(3000):
        if draw.random() < 0.3:
            data = draw.randbytes(draw.randrange(200))
        else:
            data = bytearray(whole)
            for _ in range(draw.randrange(1, 4)):
                data[draw.randrange(len(data))] = draw.randrange(256)
        try:
            entry = parse(bytes(data), key(0))
        except EntryError:
            continue
        survived += 1
        assert entry.key == key(0).description
        assert all(0 <= v < 2**31 for v in entry.block_sizes.values())
        assert 0 < entry.row.kernel_us < float("inf")
    assert survived < 3000


def test_a_long_file_is_not_read(cache):
    cache.put(tuned())
    path_of(cache, tuned()).write_bytes(b" " * (MAXIMUM_BYTES + 1))
    assert "more than" in refused(cache, tuned())


def test_a_long_entry_is_not_written(cache):
    with pytest.warns(AutopallasWarning, match="more than"):
        assert not cache.put(tuned(specs=["x" * MAXIMUM_BYTES]))
    assert list(cache.entries()) == []


def test_a_link_is_not_followed_neither_for_reading_nor_for_writing(cache, tmp_path):
    target = tmp_path / "target"
    target.write_text(tuned().to_json())
    cache.put(tuned())
    path_of(cache, tuned()).unlink()
    path_of(cache, tuned()).symlink_to(target)
    refused(cache, tuned())
    assert cache.put(tuned(query_block=64))
    assert target.read_text() == tuned().to_json()
    assert not path_of(cache, tuned()).is_symlink()


def test_a_folder_that_is_a_link_is_not_used(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "tuning").symlink_to(elsewhere)
    cache = Cache(tmp_path)
    with pytest.warns(AutopallasWarning):
        assert not cache.put(tuned())
    assert list(elsewhere.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the platform has no named pipes")
def test_a_pipe_or_a_folder_in_the_place_of_a_file_is_ignored(cache):
    cache.put(tuned())
    path_of(cache, tuned()).unlink()
    os.mkfifo(path_of(cache, tuned()))
    refused(cache, tuned())
    path_of(cache, tuned()).unlink()
    path_of(cache, tuned()).mkdir()
    WARNED.forget()
    refused(cache, tuned())


# --- sizes of an operation -------------------------------------------------------------------------------------------


def test_block_sizes_become_those_of_the_operation_that_was_asked_for():
    assert tuned().sizes_for(BlockSizes) == BlockSizes(256, 256)
    scheduled = BlockSizes(256, 256, "persistent")
    data = tuned().to_dict() | {"block_sizes": scheduled.to_dict()}
    assert parse(json.dumps(data)).sizes_for(BlockSizes) == scheduled


@pytest.mark.parametrize(
    "sizes",
    [{"query_block": 256}, {"query_block": 256, "key_block": "256"}, {"query_block": True, "key_block": 1}]
    + [{"query_block": 0, "key_block": 8}, {"rows_block": 8, "vocabulary_block": 8}]
    + [{"query_block": 8, "key_block": 8, "schedule": "none"}, {"query_block": 8, "key_block": 8, "schedule": 1}],
)
def test_block_sizes_of_another_shape_are_refused(sizes):
    data = tuned().to_dict() | {"block_sizes": sizes}
    with pytest.raises(EntryError):
        parse(json.dumps(data)).sizes_for(BlockSizes)


# --- disks that take nothing -----------------------------------------------------------------------------------------


def _full(*args, **kwargs):
    raise OSError(28, "No space left on device")


def test_a_disk_that_takes_nothing_costs_the_disk_cache_only(cache, monkeypatch):
    monkeypatch.setattr(module.os, "open", _full)
    with pytest.warns(AutopallasWarning, match="No space left") as caught:
        assert [cache.put(tuned(0)), cache.put(tuned(1))] == [False, False]
    assert len(caught) == 1
    assert cache.get(key(0)) == tuned(0), "this process has it nevertheless"


def test_a_write_that_breaks_off_leaves_the_old_entry_and_no_file(cache, monkeypatch):
    cache.put(tuned(query_block=64))
    monkeypatch.setattr(module.os, "replace", _full)
    with pytest.warns(AutopallasWarning, match="No space left"):
        assert not cache.put(tuned(query_block=128))
    assert len(list(cache.folder.iterdir())) == 1
    assert Cache(cache.folder.parent).get(key(0)).block_sizes["query_block"] == 64


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="for root no folder is read-only")
def test_a_read_only_folder_is_read_and_not_written(cache):
    cache.put(tuned())
    cache.folder.chmod(0o500)
    try:
        with pytest.warns(AutopallasWarning, match="cannot keep"):
            assert not cache.put(tuned(1))
        assert Cache(cache.folder.parent).get(key(0)) == tuned()
    finally:
        cache.folder.chmod(0o700)


def test_a_file_in_the_place_of_the_folder_costs_the_disk_cache_only(tmp_path):
    (tmp_path / "file").write_text("")
    cache = Cache(tmp_path / "file")
    with pytest.warns(AutopallasWarning, match="cannot keep"):
        assert not cache.put(tuned())


def test_without_any_folder_results_stay_in_the_process():
    cache = Cache(None)
    with pytest.warns(AutopallasWarning):
        assert not cache.put(tuned())
    assert cache.get(key(0)) == tuned()
    assert list(cache.entries()) == []
    assert cache.clear() == 0


# --- many processes --------------------------------------------------------------------------------------------------


def run(mode: str, folder: Path) -> None:
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, here / "processes.py", mode, folder], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform cannot fork")
def test_sixteen_processes_on_the_same_keys_lose_and_crash_nothing(tmp_path):
    run("crowd", tmp_path)
    cache = Cache(tmp_path)
    assert {entry.digest for entry in cache.entries()} == {key(n).digest for n in range(4)}
    assert len(list(cache.folder.iterdir())) == 4


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform cannot fork")
def test_killed_processes_leave_a_valid_cache(tmp_path):
    run("kill", tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        entries = list(Cache(tmp_path).entries())
    files = [file for file in (tmp_path / "tuning").iterdir() if file.suffix == ".json"]
    assert entries
    assert len(entries) == len(files)
