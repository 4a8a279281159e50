"""After a failure: which replaced site is at fault, and the call's result all the same.

A call of an optimized function that fails while it is lowered, compiled, launched or run is done again with nothing
replaced.  If that works, the failure was of a replaced site.  The one at fault is found by halving, remembered on disk,
and from then on the next implementation, at last the original, takes its place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from autopallas import compat
from autopallas.custom.site import OwnSite
from autopallas.faults import contained, one_line
from autopallas.graph import Graph
from autopallas.patterns import Match
from autopallas.plan.decision import Decision
from autopallas.rewrite.sites import splice
from autopallas.sharding.local import alone
from autopallas.sites.device import Device
from autopallas.tuning.cache import WARNED
from autopallas.tuning.key import TuningKey
from autopallas.tuning.probe_cache import Verdict, Verdicts, verdict_key

__all__ = [
    "Blamed",
    "Recoverable",
    "condemn",
    "guilty",
    "in_search",
    "mark_theirs",
    "narrowed",
    "nothing_allowed",
    "one_line",
    "recovered",
    "spliced",
    "theirs",
    "warn_of",
]

T = TypeVar("T")

_EVERYTHING = ("everything",)
_NOTHING: tuple[str, ...] = ()
_allowed = compat.trace_context(None)
"""While the site at fault is looked for: the keys of those that may be replaced.  Part of the trace key."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """A replaced site."""

    key: TuningKey
    op: str
    implementation: str
    location: str


@dataclass(frozen=True, slots=True)
class Blamed:
    """A failure, and the site it is blamed on; none where it did not happen again."""

    stage: str
    error: str
    suspect: Suspect | None = None


@dataclass
class _Seen(threading.local):
    """The replaced sites of the traces of this thread."""

    suspects: dict[str, Suspect] = field(default_factory=dict)


_SEEN = _Seen()


def in_search() -> bool:
    """Whether what is traced now serves only to find out what fails."""
    return _allowed.value is not None


def nothing_allowed() -> bool:
    """Whether what is traced now has to stay as it is written."""
    return bool(_allowed.value == _NOTHING)


def narrowed(matches: Sequence[Match], decisions: list[Decision], device: Device) -> list[Decision]:
    """The decisions, in a search without those that it leaves out."""
    if not in_search():
        return decisions
    allowed, result = _allowed.value, []
    for match, decision in zip(matches, decisions, strict=True):
        if decision.verdict == "applied" and isinstance(match.site, OwnSite):  # no file on disk can tell these
            if allowed != _EVERYTHING:
                decision = replace(decision, verdict="kept", reason="left out to find what fails")
        elif decision.verdict == "applied":
            name, left_out = decision.implementation or "", True
            with contained(match.location, match.op, "plan"):
                key = verdict_key(alone(match), name, decision.block_sizes, device)
                _SEEN.suspects.setdefault(key.digest, Suspect(key, match.op, name, match.location))
                left_out = allowed != _EVERYTHING and key.digest not in allowed
            if left_out:
                decision = replace(decision, verdict="kept", reason="left out to find what fails")
        result.append(decision)
    return result


def mark_theirs(error: Exception) -> None:
    """Says of an error that the user's own function raised it."""
    error.__dict__["_autopallas_theirs"] = True


def theirs(error: Exception) -> bool:
    """Whether the user's own function raised it."""
    return "_autopallas_theirs" in error.__dict__


def guilty(suspects: Sequence[T], fails: Callable[[Sequence[T]], bool]) -> list[T]:
    """Those that fail, found by halving; all, where they fail only together.

    Args:
      suspects: of which the whole fails.
      fails: whether some of them fail.

    Example:
      >>> guilty(range(8), lambda some: 5 in some)
      [5]
    """
    if len(suspects) <= 1:
        return list(suspects)
    half = len(suspects) // 2
    found = [one for part in (suspects[:half], suspects[half:]) if fails(part) for one in guilty(part, fails)]
    return found or list(suspects)


class Recoverable(Protocol):
    """What a call that failed offers."""

    def __call__(self) -> Any:
        """Does the call, and waits for its result."""

    def trace(self) -> Any:
        """Traces it, as ``jax.jit(f).trace`` does."""

    def spent(self) -> bool:
        """Whether arguments are gone, which were donated."""


def recovered(call: Recoverable, error: Exception) -> tuple[Any, list[Blamed]] | None:
    """The result of a call that failed with ``error`` while sites were replaced, and what is to blame.

    None where that is not known, since the failing call may have had effects, which must not happen twice.

    Raises:
      Exception: what the call raises with nothing replaced: then it is the program's own.
    """
    _SEEN.suspects.clear()
    fault: _Fault | None = None
    with _allowed(_NOTHING):
        effects = bool(call.trace().jaxpr.effects)
    if effects:
        fault = _compiled(call, _EVERYTHING)
        if fault is None:
            return None
    with _allowed(_NOTHING):
        result = call()
    fault, check = fault or _compiled(call, _EVERYTHING), _compiled
    if fault is None and not call.spent():
        fault, check = _run(call, _EVERYTHING), _run
    suspects = sorted(_SEEN.suspects)
    if fault is None:
        fault = _Fault.of("run", error)
        if not call.spent():  # it works now: what was wrong then is nobody's fault
            return result, [Blamed(fault.stage, fault.error)]
        return result, [Blamed(fault.stage, fault.error, _SEEN.suspects[key]) for key in suspects]
    found = {tuple(suspects): fault}

    def fails(keys: Sequence[str]) -> bool:
        again = check(call, tuple(keys))
        if again is not None:
            found[tuple(keys)] = again
        return again is not None

    blamed = []
    for key in guilty(suspects, fails):
        own = found.get((key,), fault)
        blamed.append(Blamed(own.stage, own.error, _SEEN.suspects[key]))
    return result, blamed


@dataclass(frozen=True, slots=True)
class _Fault:
    stage: str
    error: str

    @staticmethod
    def of(stage: str, error: Exception) -> _Fault:
        text = one_line(error)
        return _Fault("memory" if stage == "run" and is_memory(error) else stage, text)


def is_memory(error: Exception) -> bool:
    """Whether an error is about too little memory."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


def _compiled(call: Recoverable, allowed: tuple[str, ...]) -> _Fault | None:
    stage = "trace"
    try:
        with _allowed(allowed):
            traced = call.trace()
            stage = "lowering"
            lowered = traced.lower()
            stage = "compile"
            lowered.compile()
    except Exception as error:
        return _Fault.of(stage, error)
    return None


def _run(call: Recoverable, allowed: tuple[str, ...]) -> _Fault | None:
    try:
        with _allowed(allowed):
            call()
    except Exception as error:
        return _Fault.of("run", error)
    return None


def condemn(blamed: Sequence[Blamed]) -> None:
    """Remembers what is to blame, on disk, and says so."""
    for one in blamed:
        if one.suspect is None:
            reason = f"{one.stage} failed with {one.error}"
            WARNED.once(reason, f"autopallas ran a call again as it is written, since with replaced sites {reason}")
            continue
        Verdicts.current().put(Verdict.of(one.suspect.key, one.stage, one.error))
        warn_of(one.suspect.op, one.suspect.location, one.suspect.implementation, one.stage, one.error)


def warn_of(op: str, location: str, implementation: str, stage: str, error: str) -> None:
    """One warning for each site and reason."""
    WARNED.once(
        f"{op} {location} {implementation} {stage} {error}",
        f"autopallas does not use {implementation} for the {op} at {location}: {stage} failed with {error}",
    )


def spliced(
    program: Any, graph: Graph, matches: Sequence[Match], decisions: list[Decision], strict: bool
) -> tuple[Any, list[Decision]]:
    """The program with the applied sites replaced, but for those that cannot be; and the decisions that hold."""
    applied = [number for number, decision in enumerate(decisions) if decision.verdict == "applied"]
    errors: dict[int, str] = {}

    def some(chosen: Sequence[int]) -> list[Decision]:
        result = list(decisions)
        for number in applied:
            if number not in chosen:
                own, text = decisions[number], errors.get(number, "")
                attempts = (*own.attempts, (own.implementation or "", "rewrite", text))
                reason = f"it could not be replaced: {text}"
                result[number] = replace(own, verdict="kept", reason=reason, attempts=attempts)
        return result

    def fails(chosen: Sequence[int]) -> bool:
        try:
            splice(graph, matches, some(chosen))
        except Exception as error:
            errors.update(dict.fromkeys(chosen, one_line(error)))
            return True
        return False

    left = applied
    while left:
        kept = some(left)
        try:
            result = splice(graph, matches, kept)
        except Exception as error:
            if strict:
                raise
            errors.update(dict.fromkeys(left, one_line(error)))
        else:
            return result, kept
        for number in (found := guilty(left, fails)):
            own = decisions[number]
            warn_of(matches[number].op, matches[number].location, own.implementation or "", "rewrite", errors[number])
        left = [number for number in left if number not in found]
    return program, some([])
