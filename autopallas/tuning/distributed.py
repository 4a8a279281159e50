"""Gives all processes of a distributed program one answer: they compile the same program, so they must choose alike.

Process 0 looks into its cache and publishes what it found in the key-value store that the processes share.  The store
keeps the first value of a name.  A process that waits too long publishes "nothing found" itself.  Whether that value or
another one was first, every process reads the same value, no matter who came when.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from autopallas import compat
from autopallas.tuning.cache import WARNED, Cache
from autopallas.tuning.entry import Entry, EntryError, parse
from autopallas.tuning.key import TuningKey, digest_of

__all__ = ["Agreement", "Store", "agreement"]

PATIENCE_SECONDS = 30.0
"""How long a process waits for the answer of process 0, the first time."""
_IMPATIENCE_SECONDS = 1.0
"""How long it waits after it once waited in vain: process 0 is busy otherwise, and each site would cost as much."""

PROBE_SECONDS = 240.0
"""How long process 0 waits for what the others found out about a kernel, which each of them has to compile."""

QUIET_SECONDS = 10.0
"""Time after which a user is told what a process is waiting for."""

_MOMENT = 0.2
"""Time to allow for reading a value that is already there."""

_NOTHING = "-"
_LOCAL = ("kernel_version", "platform", "device_kind", "runtime", "versions", "flags")
"""Fields of an entry's key that describe the machine: they may differ between processes, but the answer must not."""


class Store(Protocol):
    """Interface of the store that processes share: the client of ``jax.distributed``."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None: ...

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str: ...


class Agreement:
    """Entries of process 0's cache, for every process.

    Attributes:
      store: the store that the processes share.
    """

    def __init__(self, store: Store, process: int, cache: Callable[[], Cache], patience: float = PATIENCE_SECONDS):
        self.store = store
        self._process = process
        self._leads = process == 0
        self._cache = cache
        self._patience = patience
        self._known: dict[str, str] = {}
        self._given: dict[str, list[str]] = {}
        self._lock = threading.Lock()

    def usable(self) -> bool:
        """Returns whether process 0 had a cache when the first process asked.  If not, nobody has to wait again."""
        return self._agreed("any", lambda: "yes" if self._cache().usable() else _NOTHING) != _NOTHING

    def get(self, key: TuningKey) -> Entry | None:
        """Returns the entry of a key, the same in every process; None if there is none, or none that can be used."""
        if not self.usable():
            return None

        def own() -> str:
            found = self._cache().get(key)
            # An unfinished entry serves programs that may search; these processes may not.
            return _NOTHING if found is None or found.outcome == "unfinished" else found.to_json()

        text = self._agreed(self._shared(key), own)
        if text == _NOTHING:
            return None
        try:
            return parse(text)
        except EntryError as error:
            WARNED.once("agree", f"autopallas ignores a tuning result of process 0: {error}")
            return None

    def unanimous(
        self, key: TuningKey, fault: tuple[str, str] | None, processes: int, patience: float = PROBE_SECONDS
    ) -> tuple[str, str] | None:
        """Returns None if a kernel works in every process, else the fault that one of them found, the same in all.

        Args:
          key: the key of the kernel.
          fault: what this process found: (stage, error).
          processes: how many processes there are.
          patience: the seconds within which all have to answer; a process that does not answer counts as a fault.
        """

        def verdict(answers: Sequence[str]) -> str:
            return next((answer for answer in answers if answer != _NOTHING), _NOTHING)

        name, own = f"autopallas/verdicts/{self._shared(key)}", json.dumps(fault) if fault else _NOTHING
        with self._lock:
            answer = self._polled(name, own, verdict, range(processes), patience)
        if answer == _NOTHING:
            return None
        stage, error_text = json.loads(answer)
        return str(stage), str(error_text)

    def same(self, name: str, own: str, processes: Sequence[int], patience: float | None = None) -> str | None:
        """Returns None if some processes give the same answer, else why they do not, the same in all.

        Args:
          name: the name of the question.  It may be asked again, with the answers changed in all of them.
          own: the answer of this process.
          processes: the processes that are asked.
          patience: the seconds within which all have to answer.
        """

        def verdict(answers: Sequence[str]) -> str:
            different = json.dumps(["agree", "the processes made different programs"])
            return _NOTHING if len(set(answers)) == 1 else different

        with self._lock:
            given = self._given.setdefault(name, [])
            if own not in given:
                given.append(own)
            name = f"autopallas/programs/{name}/{given.index(own)}"
            answer = self._polled(name, own, verdict, processes, PROBE_SECONDS if patience is None else patience)
        return None if answer == _NOTHING else str(json.loads(answer)[1])

    def _polled(
        self,
        name: str,
        own: str,
        verdict: Callable[[Sequence[str]], str],
        processes: Sequence[int],
        patience: float,
    ) -> str:
        """Returns the verdict on what some processes answer, the same in all; a fault if one does not answer."""
        if name not in self._known:
            self._known[name] = json.dumps(["probe", "the processes could not agree"])
            try:
                self._offer(f"{name}/{self._process}", own)
                try:
                    # All wait for all: the first to find out that one does not answer tells the others.
                    given = self._all([f"{name}/{process}" for process in processes], patience)
                    if self._process == processes[0]:
                        self._offer(name, verdict(given))
                    self._known[name] = self._read(name, PATIENCE_SECONDS)
                except Exception as error:
                    if "DEADLINE_EXCEEDED" not in str(error):
                        raise
                    self._offer(name, json.dumps(["probe", "a process did not answer"]))
                    self._known[name] = self._read(name, PATIENCE_SECONDS)
            except Exception as error:
                WARNED.once("agree", f"autopallas could not agree with other processes: {error}")
        return self._known[name]

    def _all(self, names: Sequence[str], patience: float) -> list[str]:
        """Reads what is published under some names, within so many seconds; warns if it takes long."""
        end = time.monotonic() + patience
        quiet = min(patience, QUIET_SECONDS)
        try:
            return [self._read(name, max(end - patience + quiet - time.monotonic(), _MOMENT)) for name in names]
        except Exception as error:
            if "DEADLINE_EXCEEDED" not in str(error) or quiet == patience:
                raise
        text = "autopallas waits for other processes, which have to trace and lower the same programs as this one: for"
        WARNED.once("wait", f"{text} {patience:.0f} seconds at most, then the original runs")
        return [self._read(name, max(end - time.monotonic(), _MOMENT)) for name in names]

    def _shared(self, key: TuningKey) -> str:
        """Returns a name for a key that is the same on machines of different kinds."""
        return digest_of({name: value for name, value in key.description.items() if name not in _LOCAL})

    def _agreed(self, name: str, own: Callable[[], str]) -> str:
        with self._lock:
            if name not in self._known:
                try:
                    self._known[name] = self._settle(f"autopallas/tuning/{name}", own)
                except Exception as error:
                    WARNED.once("agree", f"autopallas could not agree on tuning results with other processes: {error}")
                    self._known[name] = _NOTHING
            return self._known[name]

    def _settle(self, name: str, own: Callable[[], str]) -> str:
        if self._leads:
            self._offer(name, own())
        try:
            return self._read(name, self._patience)
        except Exception as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
        self._patience = min(self._patience, _IMPATIENCE_SECONDS)
        self._offer(name, _NOTHING)
        return self._read(name, PATIENCE_SECONDS)

    def _offer(self, name: str, value: str) -> None:
        try:
            self.store.key_value_set(name, value, allow_overwrite=False)
        except Exception as error:
            if "ALREADY_EXISTS" not in str(error):
                raise

    def _read(self, name: str, seconds: float) -> str:
        return self.store.blocking_key_value_get(name, int(seconds * 1000))


class _Current:
    """The agreement of this process: what is settled stays settled as long as the processes are connected."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: Agreement | None = None

    def get(self) -> Agreement | None:
        connection = compat.distributed_store()
        if connection is None:
            return None
        store, process = connection
        with self._lock:
            if self._made is None or self._made.store is not store:
                self._made = Agreement(store, process, Cache.current)
            return self._made


_CURRENT = _Current()


def agreement() -> Agreement | None:
    """Returns the agreement among this program's processes; None if ``jax.distributed`` does not connect them."""
    return _CURRENT.get()
