"""``AUTOPALLAS_REPORT``: the reports of the whole process, printed or written when it ends."""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
from dataclasses import dataclass, field

from autopallas import environment
from autopallas.report.records import Report

__all__ = ["record"]


@dataclass(slots=True)
class _Log:
    """The reports so far.  They are kept only where the environment asks for them."""

    entries: list[tuple[str, Report]] = field(default_factory=list)
    destination: str | None = None
    process: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, name: str, report: Report, destination: str) -> None:
        with self.lock:
            if self.destination is None:
                # The program may change its folder before it ends.
                self.destination = destination if destination == "1" else os.path.abspath(destination)
                self.process = os.getpid()
                atexit.register(self.flush)
            self.entries.append((name, report))

    def flush(self) -> None:
        """Prints or writes what was recorded; an error here must not change how the process ends."""
        if self.destination is None or self.process != os.getpid():
            return
        with self.lock:
            entries = list(self.entries)
        try:
            if self.destination == "1":
                print(_as_text(entries), file=sys.stderr)
            else:
                _write(self.destination, entries)
        except (OSError, ValueError) as error:
            try:
                print(f"autopallas: the report cannot be written to {self.destination}: {error}", file=sys.stderr)
            except (OSError, ValueError):
                pass  # Standard error itself is closed: nobody is left to tell.


_LOG = _Log()


def record(name: str, report: Report) -> None:
    """Keeps a report for the end of the process, if ``AUTOPALLAS_REPORT`` asks for that.

    Args:
      name: the function that was traced.
      report: what happened to it.

    Raises:
      OptionError: the environment holds a bad ``AUTOPALLAS_*`` variable.

    Example:
      >>> record("loss", Report())
    """
    destination = environment.read().report
    if destination is not None:
        _LOG.add(name, report, destination)


def _as_text(entries: list[tuple[str, Report]]) -> str:
    from autopallas.report import text

    return "\n\n".join(f"== {name} ==\n{text.render(report)}" for name, report in entries)


def _write(path: str, entries: list[tuple[str, Report]]) -> None:
    match os.path.splitext(path)[1]:
        case ".json":
            content = json.dumps([report.to_dict() for _, report in entries], indent=2, allow_nan=False) + "\n"
        case ".html":
            from autopallas.report import html

            content = html.page(entries)
        case _:
            content = _as_text(entries) + "\n"
    # Written beside the file and renamed, so that a reader never sees half of a report.
    unfinished = f"{path}.{os.getpid()}"
    try:
        with open(unfinished, "w", encoding="utf-8") as file:
            file.write(content)
        os.replace(unfinished, path)
    except BaseException:
        if os.path.exists(unfinished):
            os.remove(unfinished)
        raise
