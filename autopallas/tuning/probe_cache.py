"""Keeps verdicts on whether an implementation with its block sizes works for a site on this machine.

A verdict comes from a probe or a failure.  Good and bad ones are kept beside the tuning results, one checked JSON file
per key, and believed for a limited time.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from autopallas.sites.device import Device
from autopallas.sites.spec import BlockSizes
from autopallas.sites.workload import SiteWorkload
from autopallas.tuning.cache import Folder, directory
from autopallas.tuning.entry import MAXIMUM_BYTES, EntryError, checked_text, read_json, storable
from autopallas.tuning.key import Description, TuningKey, canonical, digest_of, key_of

__all__ = ["DAY", "ProbeResult", "ProbeResults", "probe_key"]

FORMAT = 1
DAY = 86400.0
_LIFETIME = {"works": 90 * DAY, "fails": 7 * DAY, "memory": DAY}
"""How long a verdict is believed.  A kernel that lacked memory may have enough tomorrow."""
_LATEST = 2.0**35
_FIELDS = {"format", "key", "outcome", "stage", "error", "until"}


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The verdict on one key.

    Attributes:
      key: the description of what was tried.
      outcome: "works" or "fails".
      stage: where it failed: "trace", "lowering", "compile", "run", "memory", "hang".
      error: how it failed, on one line.
      until: the time, in seconds since 1970, after which it is not believed any more.
    """

    key: Description
    outcome: Literal["works", "fails"]
    stage: str = ""
    error: str = ""
    until: float = 0.0

    @staticmethod
    def of(key: TuningKey, stage: str = "", error: str = "") -> ProbeResult:
        """Returns a new verdict: that a stage failed, or, without a stage, that everything works."""
        outcome: Literal["works", "fails"] = "fails" if stage else "works"
        lifetime = _LIFETIME["memory" if stage == "memory" else outcome]
        return ProbeResult(key.description, outcome, stage, storable(error), time.time() + lifetime)

    @property
    def digest(self) -> str:
        return digest_of(self.key)

    @property
    def current(self) -> bool:
        """Whether it is still believed; a verdict from the future is not."""
        return time.time() <= self.until <= time.time() + max(_LIFETIME.values()) + DAY

    def to_dict(self) -> dict[str, object]:
        """Returns the verdict in JSON's types."""
        data = {"format": FORMAT, "key": dict(self.key), "outcome": self.outcome, "stage": self.stage}
        return data | {"error": storable(self.error), "until": self.until}

    def to_json(self) -> str:
        return canonical(self.to_dict())


def parse(text: str | bytes, digest: str) -> ProbeResult:
    """Reads a verdict.  The text is data: nothing in it is executed, imported, or opened.

    Raises:
      EntryError: it is no verdict of this format, or another key's.
    """
    if len(text) > MAXIMUM_BYTES:
        raise EntryError(f"it is longer than {MAXIMUM_BYTES} bytes")
    data = read_json(text)
    if not isinstance(data, dict) or data.keys() != _FIELDS or data["format"] != FORMAT:
        raise EntryError("it is no verdict of this version")
    key, outcome, until = data["key"], data["outcome"], data["until"]
    try:
        mine = isinstance(key, dict) and digest_of(key) == digest
    except (ValueError, RecursionError):
        mine = False
    if not mine:
        raise EntryError("it is another key's")
    if outcome not in ("works", "fails") or not isinstance(outcome, str):
        raise EntryError("its outcome is neither works nor fails")
    if isinstance(until, bool) or not isinstance(until, (int, float)) or not 0 <= until <= _LATEST:
        raise EntryError("its date is not one")
    stage, error = checked_text(data["stage"], "stage"), checked_text(data["error"], "error")
    if bool(stage) != (outcome == "fails"):
        raise EntryError("its outcome and its stage contradict each other")
    return ProbeResult(cast(Description, key), cast(Literal["works", "fails"], outcome), stage, error, float(until))


class ProbeResults(Folder[ProbeResult]):
    """The verdicts in one folder.  Failures of this process are also remembered in it, whatever the disk says."""

    def __init__(self, base: Path | None):
        super().__init__(base, "verdicts")
        self._own: dict[str, ProbeResult] = {}

    @staticmethod
    def current() -> ProbeResults:
        """Returns the verdicts that the environment asks for now."""
        return _at(directory())

    def parse(self, text: str | bytes, digest: str) -> ProbeResult:
        return parse(text, digest)

    def own(self, key: TuningKey) -> ProbeResult | None:
        """Returns the verdict on a failure in this process, or None."""
        return self._own.get(key.digest)

    def get(self, key: TuningKey) -> ProbeResult | None:
        """Returns the verdict on a key, if there is one that is believed."""
        found = self._own.get(key.digest) or super().get(key)
        return found if found is not None and found.current else None

    def put(self, entry: ProbeResult) -> bool:
        if entry.outcome == "fails":
            self._own[entry.digest] = entry
        return super().put(entry)

    def known(self) -> bool:
        """Returns whether there may be any verdict; if not, no key is computed."""
        return bool(self._own) or bool(self._unwritten) or self.usable()

    def clear(self) -> int:
        self._own.clear()
        return super().clear()


@functools.lru_cache(maxsize=16)
def _at(base: Path | None) -> ProbeResults:
    return ProbeResults(base)


def probe_key(match: SiteWorkload, implementation: str, block_sizes: BlockSizes | None, device: Device) -> TuningKey:
    """Returns the key of one implementation with its block sizes for one site: for exact sizes, unlike a tuning key."""
    types = [[str(t) for t in (*part.original.in_avals, *part.original.out_avals)] for part in match.passes]
    sizes = None if block_sizes is None else block_sizes.to_dict()
    exact: Description = {"block_sizes": sizes, "types": types}
    try:
        exact.update(key_of(match, implementation, device).description)
        exact["specs"] = [part.spec.to_dict() for part in match.passes]
        return TuningKey(digest_of(exact), exact)
    except (OSError, TypeError, ValueError):  # no sources to hash, or a spec that is not plain data
        exact = {"implementation": implementation, "site": repr((match.site, block_sizes, device))}
        return TuningKey(digest_of(exact), exact)
