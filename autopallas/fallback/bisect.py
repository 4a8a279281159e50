"""Finds the replaced sites that fail, by tracing with only some sites replaced and halving the set."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from autopallas.custom.operation import pattern_of
from autopallas.faults import contained
from autopallas.patterns import Match
from autopallas.plan.decision import Decision
from autopallas.sharding.local import local_match
from autopallas.sites.device import Device
from autopallas.trace_context import TraceContext
from autopallas.tuning.key import TuningKey
from autopallas.tuning.probe_cache import probe_key

__all__ = [
    "ALL_SITES",
    "NO_SITES",
    "SEEN",
    "Suspect",
    "allowing",
    "bisect_failures",
    "is_bisecting",
    "no_site_is_allowed",
    "only_allowed",
]

T = TypeVar("T")

ALL_SITES = ("everything",)
NO_SITES: tuple[str, ...] = ()
allowing: TraceContext[tuple[str, ...] | None] = TraceContext(None)
"""Keys of the sites that may be replaced while a failing site is searched for; None outside of a search.  Part of the
trace key."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """A replaced site that may have failed."""

    key: TuningKey
    op: str
    implementation: str
    location: str


@dataclass
class _Seen(threading.local):
    """Replaced sites that the traces of this thread met, by their keys' digests."""

    suspects: dict[str, Suspect] = field(default_factory=dict)


SEEN = _Seen()


def is_bisecting() -> bool:
    """Returns whether the present trace serves only to find out what fails."""
    return allowing.value is not None


def no_site_is_allowed() -> bool:
    """Returns whether the present trace has to keep every original."""
    return bool(allowing.value == NO_SITES)


def only_allowed(matches: Sequence[Match], decisions: list[Decision], device: Device) -> list[Decision]:
    """Keeps the originals of applied sites outside the allowed set, while a failing site is searched for."""
    allowed = allowing.value
    if allowed is None:
        return decisions
    result = []
    for match, decision in zip(matches, decisions, strict=True):
        pattern = pattern_of(match.site)
        if decision.verdict == "applied" and pattern is not None and not pattern.block_sizes:
            if allowed != ALL_SITES:  # no verdict is kept of such a site
                decision = replace(decision, verdict="kept", reason="left out to find what fails")
        elif decision.verdict == "applied":
            name, left_out = decision.implementation or "", True
            with contained(match.location, match.op, "plan"):
                key = probe_key(local_match(match), name, decision.block_sizes, device)
                SEEN.suspects.setdefault(key.digest, Suspect(key, match.op, name, match.location))
                left_out = allowed != ALL_SITES and key.digest not in allowed
            if left_out:
                decision = replace(decision, verdict="kept", reason="left out to find what fails")
        result.append(decision)
    return result


def bisect_failures(suspects: Sequence[T], fails: Callable[[Sequence[T]], bool]) -> list[T]:
    """Finds the suspects that fail, by halving; returns all of them where they fail only together.

    Args:
      suspects: a set that fails as a whole.
      fails: tells whether a subset fails.

    Example:
      >>> bisect_failures(range(8), lambda some: 5 in some)
      [5]
    """
    if len(suspects) <= 1:
        return list(suspects)
    half = len(suspects) // 2
    found = [one for part in (suspects[:half], suspects[half:]) if fails(part) for one in bisect_failures(part, fails)]
    return found or list(suspects)
