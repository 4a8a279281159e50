"""Processes that compile one program together use the same block sizes, whatever lies on their disks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from entries import key, tuned

from autopallas.errors import AutopallasWarning
from autopallas.tuning import distributed
from autopallas.tuning.cache import WARNED, Cache
from autopallas.tuning.distributed import Agreement
from autopallas.tuning.entry import Entry


class Shared:
    """A key-value store as ``jax.distributed`` has one."""

    def __init__(self):
        self.values = {}
        self.changed = threading.Condition()

    def key_value_set(self, key, value, allow_overwrite=False):
        with self.changed:
            if key in self.values and not allow_overwrite:
                raise RuntimeError(f"ALREADY_EXISTS: key {key} already exists.")
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key, timeout_in_ms):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, timeout_in_ms / 1000):
                raise RuntimeError(f"DEADLINE_EXCEEDED: GetKeyValue() timed out with key: {key}")
            return self.values[key]


def filled(folder: Path, *entries: Entry) -> Cache:
    cache = Cache(folder)
    for entry in entries:
        cache.put(entry)
    return cache


def processes(tmp_path, *contents, patience=5.0):
    """One agreement per process, over caches with the given entries."""
    store = Shared()
    caches = [filled(tmp_path / str(n), *entries) for n, entries in enumerate(contents)]
    return [Agreement(store, n, lambda cache=cache: cache, patience) for n, cache in enumerate(caches)]


def answers(agreements, asked, delays=(0.0, 0.0, 0.0)):
    """What each process gets, all asking at once, each after its delay."""
    got = [None] * len(agreements)

    def ask(number):
        time.sleep(delays[number])
        got[number] = agreements[number].get(asked)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(len(agreements))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return got


def test_every_process_gets_what_process_0_has(tmp_path):
    agreements = processes(tmp_path, [tuned(0, 64)], [tuned(0, 128)], [])
    assert answers(agreements, key(0)) == [tuned(0, 64)] * 3


def test_what_only_another_process_has_nobody_gets(tmp_path):
    agreements = processes(tmp_path, [tuned(1)], [tuned(0)], [tuned(0)])
    assert answers(agreements, key(0)) == [None] * 3


def test_machines_that_differ_still_agree(tmp_path):
    agreements = processes(tmp_path, [tuned(0, 64)], [])
    other = key(0, runtime="64 processors", flags={"XLA_FLAGS": "--other"})
    assert agreements[0].get(key(0)) == agreements[1].get(other) == tuned(0, 64)


def test_a_process_0_that_comes_too_late_does_not_go_its_own_way(tmp_path):
    agreements = processes(tmp_path, [tuned(0)], [], [tuned(0)], patience=0.1)
    assert answers(agreements, key(0), delays=(0.5, 0.0, 0.0)) == [None] * 3


def test_an_answer_stays_as_it_was_when_the_disk_changes(tmp_path):
    agreements = processes(tmp_path, [tuned(1)], [])
    assert agreements[0].get(key(0)) is None
    filled(tmp_path / "0", tuned(0))
    assert [a.get(key(0)) for a in agreements] == [None, None]


def test_without_a_cache_in_process_0_nobody_waits_for_a_site(tmp_path):
    agreements = processes(tmp_path, [], [tuned(0)])
    assert answers(agreements, key(0)) == [None, None]
    assert list(agreements[0].store.values) == ["autopallas/tuning/any"]


def test_waiting_in_vain_is_done_once(tmp_path):
    (_, lonely) = processes(tmp_path, [tuned(0)], [], patience=0.2)
    begin = time.monotonic()
    for number in range(50):
        assert lonely.get(key(number)) is None
    assert time.monotonic() - begin < 5


def test_an_unfinished_search_is_no_answer(tmp_path):
    agreements = processes(tmp_path, [Entry(key(0).description, "unfinished", reason="slow")], [])
    assert answers(agreements, key(0)) == [None, None]


def test_a_store_that_fails_costs_the_cache_only(tmp_path):
    class Broken(Shared):
        def key_value_set(self, key, value, allow_overwrite=False):
            raise RuntimeError("UNAVAILABLE: connection lost")

    agreement = Agreement(Broken(), 0, lambda: filled(tmp_path, tuned(0)))
    with pytest.warns(AutopallasWarning, match="connection lost"):
        assert agreement.get(key(0)) is None


def test_what_another_process_publishes_is_checked_like_a_file(tmp_path):
    (_, follower) = processes(tmp_path, [], [])
    follower.store.key_value_set("autopallas/tuning/any", "yes")
    (leader,) = processes(tmp_path / "other", [tuned(0)])
    leader.get(key(0))
    (name,) = [name for name in leader.store.values if not name.endswith("any")]
    follower.store.key_value_set(name, "__import__('os')")
    with pytest.warns(AutopallasWarning, match="not JSON"):
        assert follower.get(key(0)) is None


# --- real processes --------------------------------------------------------------------------------------------------


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return f"localhost:{probe.getsockname()[1]}"


@pytest.mark.parametrize("count", [2, 4])
def test_connected_processes_choose_alike_do_not_search_and_fall_back_together(tmp_path, count):
    here, address = Path(__file__).parent, free_address()
    running = [
        subprocess.Popen(
            [sys.executable, here / "peers.py", address, str(count), str(number), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"XLA_FLAGS": ""},
        )
        for number in range(count)
    ]
    try:
        finished = [process.communicate(timeout=150) for process in running]
    finally:
        for process in running:
            process.kill()
    found = []
    for process, (out, err) in zip(running, finished, strict=True):
        assert process.returncode == 0, err[-3000:]
        found.append(json.loads(out.splitlines()[-1]))
    assert all(of_process == found[0] for of_process in found)
    sizes = {"query_block": 40, "key_block": 48}
    assert found[0]["process 0 knows"] == [sizes, "cache", {"searches": 0, "cache_hits": 1}]
    assert found[0]["another knows"][1:] == ["default", {"searches": 0, "cache_hits": 0}]
    assert found[0]["process 0 comes late"][1] == "default"
    assert found[0]["works in all"] == ["applied", []]
    assert found[0]["fails in one"] == ["kept", ["compile"]]


# --- verdicts on kernels ---------------------------------------------------------------------------------------------


def verdicts(agreements, faults, absent=(), patience=5.0):
    """What each process is told, having found these faults."""
    told = ["absent"] * len(agreements)

    def ask(number):
        told[number] = agreements[number].unanimous(key(0), faults[number], len(agreements), patience)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(len(agreements)) if n not in absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return told


def test_a_kernel_that_works_everywhere_is_used_everywhere(tmp_path):
    assert verdicts(processes(tmp_path, [], [], []), [None, None, None]) == [None] * 3


@pytest.mark.parametrize("number", range(3))
def test_a_kernel_that_fails_in_one_process_is_used_in_none(number, tmp_path):
    fault = ("compile", "no such instruction")
    faults = [fault if n == number else None for n in range(3)]
    assert verdicts(processes(tmp_path, [], [], []), faults) == [fault] * 3


@pytest.mark.parametrize("absent", range(3))
def test_where_a_process_does_not_answer_no_kernel_is_used(absent, tmp_path):
    told = verdicts(processes(tmp_path, [], [], []), [None] * 3, absent=(absent,), patience=0.2)
    others = [answer for n, answer in enumerate(told) if n != absent]
    assert others[0] == others[1]
    assert others[0] is not None
    assert others[0][0] == "probe"


@pytest.mark.parametrize("asking", range(3))
def test_who_waits_for_the_others_says_so_and_does_not_wait_longer_than_asked(asking, tmp_path, monkeypatch):
    monkeypatch.setattr(distributed, "QUIET_SECONDS", 0.0)
    agreement, waited = processes(tmp_path, [], [], [])[asking], []
    read = agreement._read
    monkeypatch.setattr(agreement, "_read", lambda name, seconds: waited.append(seconds) or read(name, seconds))
    WARNED.forget()
    with pytest.warns(AutopallasWarning, match="waits for other processes"):
        assert agreement.same("program", "own", range(3), 0.4) == "a process did not answer"
    assert max(waited[:-1]) <= 0.4  # the last is for the verdict, which is there
