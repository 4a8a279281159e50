"""Shows one line of progress on a terminal: a bar with ``rich`` (extra ``cli``), else characters; elsewhere nothing."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

__all__ = ["Progress"]

_FRACTION = re.compile(r"(\d+)\s*(?:/|of)\s*(\d+)")
_BAR = 16


class Progress:
    """``with Progress(title) as say``: ``say(text)`` shows the text, and a bar if it contains "3/8" or "3 of 8".

    Example:
      >>> with Progress("tuning attention") as say:
      ...     say("2 of 8: query_block=256")
    """

    def __init__(self, title: str):
        self._title = title
        self._shown = False
        self._rich: Bars | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Callable[[str], None]:
        try:
            self._shown = sys.stderr.isatty()
        except (AttributeError, ValueError):  # no stream, or a closed one
            self._shown = False
        if self._shown:
            self._rich = _bars()
        if self._rich is not None:
            self._rich.start()
            self._task = self._rich.add_task(self._title, total=None, text="")
        return self.say

    def say(self, text: str) -> None:
        if not self._shown:
            return
        done, total = fraction(text)
        if self._rich is not None and self._task is not None:
            self._rich.update(self._task, completed=done, total=total or None, text=text)
            return
        bar = f"[{'#' * (_BAR * done // total)}{'.' * (_BAR - _BAR * done // total)}] " if total else ""
        line = f"{self._title}: {bar}{text}"[: shutil.get_terminal_size().columns - 1]
        sys.stderr.write(f"\r\x1b[K{line}")
        sys.stderr.flush()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._rich is not None:
            self._rich.stop()
        elif self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def fraction(text: str) -> tuple[int, int]:
    """Parses (done, total) from a text; returns (0, 0) where it has none.

    Example:
      >>> fraction("[3/8] attention"), fraction("compiling")
      ((3, 8), (0, 0))
    """
    found = _FRACTION.search(text)
    if found is None:
        return 0, 0
    done, total = int(found[1]), int(found[2])
    return (done, total) if total > 0 and done <= total else (0, 0)


def _bars() -> Bars | None:
    """Returns a display that disappears at its end, or None without ``rich``."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Display
    except ImportError:
        return None
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=_BAR),
        TextColumn("{task.fields[text]}", markup=False),
        TimeElapsedColumn(),
    )
    both = sys.stdout is not None and sys.stdout.isatty()  # otherwise printed text must go where it was to go
    return Display(*columns, console=Console(stderr=True), transient=True, redirect_stdout=both)
