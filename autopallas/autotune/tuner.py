"""Finds the block sizes of a site: in the cache on disk, in the tuned table, by a search, or the next best.

The sources are ordered by how reliable they are: a result of this very machine; the table's row of the exact bucket;
what a search finds now, where one is allowed; the table's nearest row; the default.

A search that nobody asked for is left out of sites whose original takes little time, of an implementation that restates
the original, and on GPUs where the table has a measured row for one of a site's implementations, since the journal that
gave it has one for each that was timed.  It is also left out of plain JAX, on GPUs where a kernel for the platform
works, and on TPUs where one was just found to gain, and on both of what was measured to be slower than the original in
the nearest bucket.  All of them together have a limited time.  On CPUs and GPUs it is a quick one: it tries the two
best guesses, within a few seconds.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, cast

import jax

from autopallas.autotune.search import Yardstick, search
from autopallas.compile.outside_trace import KERNELS, is_within, isolated, within
from autopallas.options import Options
from autopallas.sites.device import Device
from autopallas.sites.operation import HOME, operation_named
from autopallas.sites.spec import BlockSizes
from autopallas.sites.workload import SiteWorkload, Workload
from autopallas.tuning import coverage
from autopallas.tuning.cache import WARNED, Cache
from autopallas.tuning.distributed import agreement
from autopallas.tuning.duration import takes_long
from autopallas.tuning.entry import Entry, EntryError
from autopallas.tuning.evidence import Evidence
from autopallas.tuning.key import TuningKey, key_of
from autopallas.tuning.lookup import Choice, of_table

__all__ = ["Tuner"]


@dataclass(frozen=True, slots=True)
class _Miss:
    """Start of a search: its key, an earlier result without block sizes, and the next best choice."""

    key: TuningKey
    known: Entry | None
    otherwise: Choice


class _Limits(NamedTuple):
    """Seconds of searches that nobody asked for.

    Attributes:
      program: for all searches of a program.
      least: the smallest budget with which one begins.
      quick: for a quick search of one kind of site, for each implementation; None where searches are full ones.
    """

    program: float
    least: float
    quick: float | None


_LIMITS = {"cpu": _Limits(10.0, 1.0, 3.0), "gpu": _Limits(30.0, 5.0, 15.0), "tpu": _Limits(60.0, 5.0, None)}
"""By platform.  On a GPU XLA tries forms of the original's products while it compiles: of attention with its gradients
that took 3 to 6 seconds on an H200, and compiling one candidate 4 to 8."""

_searching = threading.Lock()
"""Searches of one process take turns, since they would disturb each other's times."""


def _is_measured(found: Choice | _Miss) -> bool:
    """Returns whether a table's row decides about the site's own bucket, and was measured."""
    if isinstance(found, _Miss) or found.row is None:
        return False
    return found.source == "table" and found.exact and found.row.evidence == "measured"


def _was_slower(found: Choice, objective: str) -> bool:
    """Returns whether the row of the nearest bucket was measured to be slower than the original, which is no reason to
    wait for a search that looks for time."""
    if objective != "time" or found.source != "nearest" or found.row is None:
        return False
    return found.row.evidence == "measured" and found.row.speedup < 1.0


class Tuner:
    """The choices for one program.

    Args:
      device: where it will run.
      options: the options in force.
      runs: whether it is about to run there, so that a search that nobody asked for may be worth its time.

    Attributes:
      searches: how many searches were run.
      cache_hits: how many answers came from the disk.
    """

    def __init__(self, device: Device, options: Options, runs: bool = False):
        self._device = device
        self._options = options
        # Processes that compile one program together must choose alike, but each sees its own disk and clock.
        self._alone = jax.process_count() == 1
        self._cache = Cache.current() if self._alone else Cache(None)
        self._shared = None if self._alone else agreement()
        self.searches = 0
        self.cache_hits = 0
        self._quick = self._alone and runs and self._wants_quick()
        self._unasked = options.autotune is None
        self._seconds = self._limits.program if self._unasked else math.inf

    @property
    def _limits(self) -> _Limits:
        return _LIMITS.get(self._device.platform, _LIMITS["tpu"])

    def _wants_quick(self) -> bool:
        """Returns whether unknown sites are worth a quick search: on CPUs and GPUs, if the options leave it open."""
        options = self._options
        return (
            options.autotune is None
            and options.objective != "always"
            and options.lock is None
            and self._limits.quick is not None
            and self._device.here
        )

    @property
    def _may_search(self) -> bool:
        asked = self._options.autotune
        return self._alone and (self._quick or self._device.platform in ("gpu", "tpu") if asked is None else asked)

    def choose(self, match: Workload, implementation: str) -> Choice:
        """Returns the block sizes of one implementation of a site."""
        return self.choices(match, (implementation,))[implementation]

    def choices(self, match: Workload, implementations: Sequence[str]) -> dict[str, Choice]:
        """Returns the block sizes of several implementations of a site.

        Implementations that have to be searched for share the seconds of the site: each has its part, and what the
        previous ones left over.
        """
        budget = min(self._options.tune_seconds, self._seconds)
        if self._quick and self._limits.quick is not None:
            budget = min(budget, self._limits.quick * len(implementations))
        looked_up = {name: self._looked_up(match, name, budget / len(implementations)) for name in implementations}
        if (
            self._unasked
            and self._device.platform == "gpu"
            and any(_is_measured(found) for found in looked_up.values())
        ):
            looked_up = {n: found.otherwise if isinstance(found, _Miss) else found for n, found in looked_up.items()}
        open_ = sum(isinstance(found, _Miss) for found in looked_up.values())
        part, left = budget / max(open_, 1), budget
        choices: dict[str, Choice] = {}
        yardstick = Yardstick()
        for name, found in looked_up.items():
            if isinstance(found, _Miss) and self._outdone(name, choices):
                found, open_ = found.otherwise, open_ - 1
            if isinstance(found, Choice):
                choices[name] = found
                continue
            begin = time.monotonic()
            site = cast(SiteWorkload, match)  # a direct call is never searched for
            choices[name] = self._searched(site, name, found, max(part, left / open_), yardstick)
            took = time.monotonic() - begin
            left, self._seconds, open_ = left - took, self._seconds - took, open_ - 1
        return choices

    def _outdone(self, implementation: str, choices: Mapping[str, Choice]) -> bool:
        """Returns whether a search of plain JAX that nobody asked for is left out: where a kernel that is written for
        the platform was just found to gain, and on a GPU wherever one works, since what such a kernel does not gain in
        time plain JAX does not either."""
        platform, objective = self._device.platform, self._options.objective
        if not self._unasked or platform == "cpu" or HOME.get(implementation) == platform:
            return False
        own = [choice for name, choice in choices.items() if HOME.get(name) == platform and choice.failure is None]
        if platform == "gpu" and objective == "time" and own:
            return True
        found = (Evidence.of(choice.row, objective) for choice in own if choice.source == "autotune")
        return any(evidence is not None and evidence.licenses for evidence in found)

    def _looked_up(self, match: Workload, implementation: str, seconds: float) -> Choice | _Miss:
        """Returns what is known without a search; ``seconds`` is the least that one would have."""
        source = self._shared or self._cache
        search = self._may_search and not (self._unasked and self._cannot_pay(match, implementation, seconds))
        key = self._key(match, implementation) if search or source.usable() else None
        entry = None if key is None else source.get(key)
        if entry is not None:
            choice = self._of(entry, match, "cache")
            if choice is not None and not self._of_another(choice, match):
                self.cache_hits += 1
                quick = choice.row is not None and choice.row.evidence == "quickly measured"
                if choice.failure or choice.row and (self._quick or not search or not quick):
                    return choice
        tabled = of_table(match, implementation, self._device, self._options.objective)
        if tabled.exact and not (tabled.row and tabled.row.evidence == "estimated" and search):
            return tabled
        if self._unasked and self._device.platform != "cpu" and _was_slower(tabled, self._options.objective):
            return tabled
        if entry is not None and entry.outcome == "unfinished" and entry.seconds >= seconds:
            return replace(tabled, note=entry.reason)
        return tabled if key is None or not search else _Miss(key, entry, tabled)

    def _cannot_pay(self, match: Workload, implementation: str, seconds: float) -> bool:
        """Returns whether a search of so many seconds that nobody asked for would find nothing worth its time."""
        operation = operation_named(match.op)
        objective, platform = self._options.objective, self._device.platform
        hopeless = operation.only_restates(implementation)
        hopeless = hopeless or not operation.may_gain(implementation, objective, match.spec, platform)
        if platform != "cpu":  # where small rewrites, which come last, gain by a row alone
            hopeless = hopeless or operation.priority < 0
        return seconds < self._limits.least or hopeless or not takes_long(match, platform)

    def _of_another(self, choice: Choice, match: Workload) -> bool:
        """Returns whether a result was measured quickly against another original, which may compile differently.

        The key does not distinguish originals; a full search is requested by somebody who knows the program.
        """
        row = choice.row
        return row is not None and row.evidence == "quickly measured" and bool(coverage.gap(row, match, self._device))

    def _key(self, match: Workload, implementation: str) -> TuningKey | None:
        try:
            return key_of(match, implementation, self._device)
        except (OSError, TypeError, ValueError) as error:  # no sources to hash, or a spec that is not plain data
            WARNED.once("key", f"autopallas cannot keep tuning results of {match.op}: {type(error).__name__}: {error}")
            return None

    def _of(self, entry: Entry, match: Workload, source: Literal["cache", "autotune"]) -> Choice | None:
        """Returns the choice that an entry gives; None if it gives nothing that can be used."""
        if entry.outcome == "failed":
            return Choice(None, source, failure=entry.reason or "an earlier search found no block sizes that work")
        if entry.outcome == "unfinished":
            return Choice(None, source, note=entry.reason)
        kind = operation_named(match.op).part("block_sizes").BlockSizes
        entry = entry.serving(self._options.objective)
        try:
            sizes = entry.sizes_for(kind)
            fitted = sizes.fitted(match.spec)
            row = None if entry.row is None else entry.row.of(sizes)
            return Choice(fitted, source, row)
        except EntryError as error:
            WARNED.once("read", f"autopallas ignores the tuning result {entry.digest}: {error}")
            return None

    def _searched(
        self, match: SiteWorkload, implementation: str, miss: _Miss, seconds: float, yardstick: Yardstick
    ) -> Choice:
        key, known, otherwise = miss.key, miss.known, miss.otherwise
        if is_within(KERNELS):  # a candidate calls an optimized function with this site
            return replace(otherwise, note="it is part of a kernel that is searched for or probed")
        with _searching, within(KERNELS):
            entry = self._cache.get(key)  # another thread may have searched for the same meanwhile
            if entry is None or entry == known:
                self.searches += 1
                first = cast(BlockSizes, otherwise.block_sizes)  # a table's choice always has block sizes
                try:
                    entry = isolated(
                        lambda: search(
                            match, implementation, key, first, seconds, known, quick=self._quick, yardstick=yardstick
                        )
                    )
                except Exception as error:
                    if self._options.strict:
                        raise
                    entry = Entry(
                        key.description, "unfinished", reason=f"{type(error).__name__}: {error}", seconds=seconds
                    )
                    WARNED.once("search", f"autopallas could not search for block sizes of {match.op}: {entry.reason}")
                self._cache.put(entry)
        choice = self._of(entry, match, "autotune")
        if choice is None or not (choice.failure or choice.row):
            return replace(otherwise, note=entry.reason)
        return choice
