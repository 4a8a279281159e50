"""Prints or writes the reports of the whole process when it ends: ``AUTOPALLAS_REPORT``, ``autopallas run``."""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from autopallas import environment
from autopallas.report.records import Report

__all__ = ["JSON", "TABLE", "collect", "record", "withdraw", "write"]

TABLE, JSON = "table", "json"
"""Destinations of :func:`collect`: standard error, with one table for each function that has anything, or as JSON."""
_STREAMS = (TABLE, JSON, "1")


@dataclass(slots=True)
class _Log:
    """The reports so far.  They are kept only if somebody asks for them."""

    entries: list[tuple[str, Report | Callable[[], Report]]] = field(default_factory=list)
    destination: str | None = None
    process: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, destination: str) -> None:
        with self.lock:
            if self.destination is None:
                # The program may change its folder before it ends.
                self.destination = destination if destination in _STREAMS else os.path.abspath(destination)
                self.process = os.getpid()
                atexit.register(self.flush)

    def add(self, name: str, report: Report | Callable[[], Report]) -> None:
        with self.lock:
            self.entries.append((name, report))

    def remove(self, report: Report | Callable[[], Report]) -> None:
        with self.lock:
            self.entries = [entry for entry in self.entries if entry[1] is not report]

    def flush(self) -> None:
        """Prints or writes what was recorded; an error here must not change how the process ends."""
        if self.destination is None or self.process != os.getpid():
            return
        with self.lock:
            entries = [(name, report if isinstance(report, Report) else report()) for name, report in self.entries]
        try:
            if self.destination == TABLE:
                _show(entries)
            elif self.destination == JSON:
                print(_as_json(entries), file=sys.stderr)
            elif self.destination == "1":
                print(_as_text(entries), file=sys.stderr)
            else:
                write(self.destination, entries)
                if sys.stderr.isatty():
                    print(f"autopallas: wrote {os.path.relpath(self.destination)}", file=sys.stderr)
        except (OSError, ValueError) as error:
            try:
                print(f"autopallas: the report cannot be written to {self.destination}: {error}", file=sys.stderr)
            except (OSError, ValueError):
                pass  # standard error itself is closed, so nobody can be told


_LOG = _Log()


def record(name: str, report: Report | Callable[[], Report]) -> None:
    """Keeps a report for the end of the process, if ``AUTOPALLAS_REPORT`` asks for it.

    Args:
      name: the function that was traced.
      report: what happened to it; a function, which is called at the end, if that may still change.

    Raises:
      OptionError: the environment holds a bad ``AUTOPALLAS_*`` variable.

    Example:
      >>> record("loss", Report())
    """
    destination = environment.read().report
    if destination is not None:
        _LOG.begin(destination)
    if _LOG.destination is not None:
        _LOG.add(name, report)


def withdraw(report: Report | Callable[[], Report]) -> None:
    """Takes back a recorded report that turned out to be wrong."""
    _LOG.remove(report)


def collect(destination: str) -> None:
    """Keeps all reports from now on, for the end of the process; takes precedence over the environment.

    Args:
      destination: ``TABLE``, ``JSON``, "1", or a path as ``AUTOPALLAS_REPORT`` takes it.
    """
    _LOG.begin(destination)


def _show(entries: list[tuple[str, Report]]) -> None:
    """Shows what a person wants to see at the end of a run: each function once, and if something was found."""
    from autopallas.report import terminal

    told: dict[str, tuple[str, Report]] = {}
    for name, report in entries:
        if report.sites or report.near_misses or report.failures:
            told.setdefault(f"{name} {report.to_json()}", (name, report))
    several = "function" if len(entries) == 1 else "functions"
    head = f"autopallas traced {len(entries)} compiled {several}"
    if not told:
        print(f"{head}; no known computation was recognised in any, nor nearly so.", file=sys.stderr)
        return
    has = "has" if len(told) == 1 else "have"
    print(f"{head}; {len(told)} {has} sites, near misses or failures.\n", file=sys.stderr)
    terminal.show(told.values(), sys.stderr)


def _as_json(entries: list[tuple[str, Report]]) -> str:
    return json.dumps([report.to_dict() for _, report in entries], indent=2, allow_nan=False)


def _as_text(entries: list[tuple[str, Report]]) -> str:
    from autopallas.report import text

    return "\n\n".join(f"== {name} ==\n{text.render(report)}" for name, report in entries)


def write(path: str, entries: list[tuple[str, Report]]) -> None:
    """Writes (name, report) pairs to a file ``.json``, ``.html`` or ``.txt``, either completely or not at all.

    Raises:
      OSError: the file cannot be written.
    """
    match os.path.splitext(path)[1]:
        case ".json":
            content = _as_json(entries) + "\n"
        case ".html":
            from autopallas.report import html

            content = html.page(entries)
        case _:
            content = _as_text(entries) + "\n"
    # Written beside the file and renamed, so that a reader never sees half of a report.
    unfinished = f"{path}.{os.getpid()}"
    try:
        handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)  # paths are private
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(content)
        os.replace(unfinished, path)
    except BaseException:
        if os.path.exists(unfinished):
            os.remove(unfinished)
        raise
