"""Measures how long a device was busy with each of several runs, by JAX's profiler."""

from __future__ import annotations

import contextlib
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import jax

__all__ = ["Traced", "busy_seconds", "kernel_seconds", "profiled", "traced"]


class Event(Protocol):
    """Interface of an event in a profile."""

    @property
    def name(self) -> str: ...

    @property
    def start_ns(self) -> float: ...

    @property
    def duration_ns(self) -> float: ...


class Line(Protocol):
    """Interface of a line in a profile: events of one kind."""

    @property
    def name(self) -> str: ...

    @property
    def events(self) -> Iterable[Event]: ...


class Plane(Protocol):
    """Interface of a plane in a profile: a device, or the processes that use it."""

    @property
    def name(self) -> str: ...

    @property
    def lines(self) -> Iterable[Line]: ...


_NAME = "autopallas run "
_DEVICES = ("/device:GPU", "/device:TPU")


class Traced(NamedTuple):
    """What a profile says of each run; None for what it does not say.

    Attributes:
      busy: the seconds that the device was busy, as :func:`busy_seconds` returns them.
      kernels: the seconds of each kernel, as :func:`kernel_seconds` returns them.
    """

    busy: list[float] | None
    kernels: list[Mapping[str, float]] | None


def profiled(runs: Sequence[Callable[[], object]]) -> list[float] | None:
    """Runs functions one after the other under the profiler.

    Args:
      runs: the functions; each waits for its result.

    Returns:
      The seconds that the device was busy with each; None if the profiler does not tell: on a CPU, or while somebody
      else profiles.  The functions have been run in any case.
    """
    found = traced(runs)
    return None if found is None else found.busy


def traced(runs: Sequence[Callable[[], object]]) -> Traced | None:
    """Runs functions as :func:`profiled` does; returns what the profile says of each, or None without a profile."""
    with tempfile.TemporaryDirectory(prefix="autopallas-", ignore_cleanup_errors=True) as folder:
        try:
            jax.profiler.start_trace(folder)
        except Exception:  # only one profile can be active
            _run(runs)
            return None
        try:
            _run(runs)
        finally:
            with contextlib.suppress(Exception):
                jax.profiler.stop_trace()
        try:
            (file,) = Path(folder).glob("**/*.xplane.pb")
            planes = list(jax.profiler.ProfileData.from_file(str(file)).planes)
            return Traced(busy_seconds(planes, len(runs)), kernel_seconds(planes, len(runs)))
        except Exception:
            return None


def _run(runs: Sequence[Callable[[], object]]) -> None:
    for number, run in enumerate(runs):
        with jax.profiler.TraceAnnotation(f"{_NAME}{number}"):
            run()


def busy_seconds(planes: Iterable[Plane], count: int) -> list[float] | None:
    """Returns the seconds that the device was busy with each run; overlapping events count once.

    Args:
      planes: those of a profile, which have a name and lines of events, with ``start_ns`` and ``duration_ns``.
      count: the number of runs.

    Returns:
      One number for each run; None unless the device was seen to be busy with every one.
    """
    spans: dict[str, tuple[float, float]] = {}
    events: list[tuple[float, float]] = []
    for plane in planes:
        lines = list(plane.lines)
        if plane.name.startswith(_DEVICES):
            modules = [line for line in lines if line.name == "XLA Modules"]
            streams = [line for line in lines if line.name.startswith("Stream")]
            events += [_span(event) for line in (modules or streams) for event in line.events]
        else:
            named = (event for line in lines for event in line.events if event.name.startswith(_NAME))
            spans |= {event.name: _span(event) for event in named}
    events.sort()
    found = []
    for number in range(count):
        if (span := spans.get(f"{_NAME}{number}")) is None:
            return None
        begin, end = span
        busy, until = 0.0, begin
        for start, stop in events:
            if begin <= start < end:
                busy += max(stop - max(start, until), 0.0)
                until = max(until, stop)
        found.append(busy * 1e-9)
    return found if found and all(found) else None


def kernel_seconds(planes: Iterable[Plane], count: int) -> list[Mapping[str, float]] | None:
    """Returns, for each run, the seconds of each kernel by name, of those that a GPU's streams began during the run.

    Args:
      planes: those of a profile, as for :func:`busy_seconds`.
      count: the number of runs.

    Returns:
      One mapping for each run; None unless every run has a kernel.
    """
    spans: dict[str, tuple[float, float]] = {}
    kernels: list[tuple[str, float, float]] = []
    for plane in planes:
        for line in plane.lines:
            if plane.name.startswith(_DEVICES):
                if line.name.startswith("Stream"):
                    kernels += [(event.name, *_span(event)) for event in line.events]
            else:
                spans |= {event.name: _span(event) for event in line.events if event.name.startswith(_NAME)}
    found: list[Mapping[str, float]] = []
    for number in range(count):
        begin, end = spans.get(f"{_NAME}{number}", (0.0, 0.0))
        sums: defaultdict[str, float] = defaultdict(float)
        for name, start, stop in kernels:
            if begin <= start < end:
                sums[name] += (stop - start) * 1e-9
        found.append(sums)
    return found if found and all(found) else None


def _span(event: Event) -> tuple[float, float]:
    return float(event.start_ns), float(event.start_ns + event.duration_ns)
