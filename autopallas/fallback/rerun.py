"""Runs a failed call again as it is written, and finds the replaced site at fault.

A call of an optimized function that fails while it is lowered, compiled, launched or run is repeated with nothing
replaced.  If that works, a replaced site has failed.  It is found by halving and remembered on disk; from then on the
next implementation takes its place, or in the end the original.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import jax

from autopallas.compat import PyTree
from autopallas.compile.subprocess import lacks_memory
from autopallas.errors import one_line
from autopallas.fallback.bisect import ALL_SITES, NO_SITES, SEEN, Suspect, allowing, bisect_failures
from autopallas.fallback.warn import warn_not_used
from autopallas.tuning.cache import WARNED
from autopallas.tuning.probe_cache import ProbeResult, ProbeResults

__all__ = ["Blamed", "Recoverable", "is_users_error", "mark_users_error", "record_failures", "rerun"]


@dataclass(frozen=True, slots=True)
class Blamed:
    """A failure and the site that it is blamed on; no site where the failure did not happen again."""

    stage: str
    error: str
    suspect: Suspect | None = None


def mark_users_error(error: Exception, as_it_is: object = None) -> None:
    """Marks an error as raised by the user's own function.

    Args:
      error: the error.
      as_it_is: the optimized function that raised it when the user's function was called as it is, and not traced.
    """
    error.__dict__["_autopallas_theirs"] = as_it_is


def is_users_error(error: Exception, as_it_is: object = None) -> bool:
    """Returns whether the user's own function raised the error; with ``as_it_is``, when it was not traced."""
    theirs = "_autopallas_theirs" in error.__dict__
    return theirs and (as_it_is is None or error.__dict__["_autopallas_theirs"] is as_it_is)


class Recoverable(Protocol):
    """Interface to a call that failed."""

    def __call__(self) -> PyTree:
        """Makes the call, and waits for its result."""

    def trace(self) -> jax.stages.Traced:
        """Traces the call, as ``jax.jit(f).trace`` does."""

    def spent(self) -> bool:
        """Returns whether donated arguments are gone."""


def rerun(call: Recoverable, error: Exception) -> tuple[PyTree, list[Blamed]] | None:
    """Repeats a call that failed with ``error`` while sites were replaced; returns its result and what is to blame.

    Returns None where the call has effects and no failure is found by compiling it.  The failing call may already have
    had its effects, and they must not happen twice.

    Raises:
      Exception: what the call raises with nothing replaced, since then the error is the program's own.
    """
    SEEN.suspects.clear()
    fault: _Fault | None = None
    with allowing(NO_SITES):
        effects = bool(call.trace().jaxpr.effects)
    if effects:
        fault = _compiled(call, ALL_SITES)
        if fault is None:
            return None
    with allowing(NO_SITES):
        result = call()
    fault, check = fault or _compiled(call, ALL_SITES), _compiled
    if fault is None and not call.spent():
        fault, check = _run(call, ALL_SITES), _run
    suspects = sorted(SEEN.suspects)
    if fault is None:
        fault = _Fault.of("run", error)
        if not call.spent():  # the call works now, so no site is to blame
            return result, [Blamed(fault.stage, fault.error)]
        return result, [Blamed(fault.stage, fault.error, SEEN.suspects[key]) for key in suspects]
    found = {tuple(suspects): fault}

    def fails(keys: Sequence[str]) -> bool:
        again = check(call, tuple(keys))
        if again is not None:
            found[tuple(keys)] = again
        return again is not None

    blamed = []
    for key in bisect_failures(suspects, fails):
        own = found.get((key,), fault)
        blamed.append(Blamed(own.stage, own.error, SEEN.suspects[key]))
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
    """Returns whether an error reports a lack of memory."""
    return lacks_memory(f"{type(error).__name__}: {error}")


def _compiled(call: Recoverable, allowed: tuple[str, ...]) -> _Fault | None:
    stage = "trace"
    try:
        with allowing(allowed):
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
        with allowing(allowed):
            call()
    except Exception as error:
        return _Fault.of("run", error)
    return None


def record_failures(blamed: Sequence[Blamed]) -> None:
    """Remembers on disk the sites that are to blame, and warns about them."""
    for one in blamed:
        if one.suspect is None:
            reason = f"{one.stage} failed with {one.error}"
            WARNED.once(reason, f"autopallas ran a call again as it is written, since with replaced sites {reason}")
            continue
        ProbeResults.current().put(ProbeResult.of(one.suspect.key, one.stage, one.error))
        warn_not_used(one.suspect.op, one.suspect.location, one.suspect.implementation, one.stage, one.error)
