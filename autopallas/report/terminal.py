"""Shows the report at a glance: a table of all sites, at most 80 columns wide, then what was kept or missed, and why.

With ``rich`` (extra ``cli``) on a terminal it has colours; the text is the same without.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from autopallas.errors import printable
from autopallas.report import text
from autopallas.report.records import Report, Site

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["relative", "show", "summary"]

WIDTH = 80
_PLACE = re.compile(r"(?P<file>.*):(?P<line>\d+) \((?P<function>.*)\)", re.DOTALL)
_HEAD = ("", "operation", "where", "verdict", "runs on", "time", "memory")
_STYLES = {"replaced": "green", "kept": "yellow"}


@dataclass(frozen=True, slots=True)
class _Group:
    """Sites that a reader would not tell apart, or all of one kind with the same verdict, and their numbers."""

    numbers: tuple[int, ...]
    sites: tuple[Site, ...]

    @property
    def site(self) -> Site:
        return self.sites[0]

    def cells(self) -> tuple[str, ...]:
        """Returns the cells of the table's row, but for the numbers."""
        op, place, verdict, runs, time, memory = _cells(self.site)
        if not self.site.kind:
            return op, place, verdict, runs, time, memory
        kind = text.Kind("", tuple(zip(self.numbers, self.sites, strict=True)))
        places = kind.places()
        where = place if len(places) == 1 else f"{len(places)} places"
        return f"{op}: {self.site.kind}", where, verdict, runs, kind.gain().replace(" to ", "-"), ""


def summary(reports: Iterable[tuple[str, Report]]) -> str:
    """Returns one or several reports as plain text of at most 80 columns, without a newline at its end.

    Args:
      reports: (title, report) pairs; the title may be empty.

    Example:
      >>> site = Site("attention", "model.py:12 (attend)", "", "forward", "kept", "nothing was measured")
      >>> print(summary([("step", Report(sites=(site,), platform="cpu"))]))
      step: 1 site kept
      on cpu
      <BLANKLINE>
         operation  where                 verdict  runs on   time  memory
      1  attention  model.py:12 (attend)  kept     original
      <BLANKLINE>
      Kept:
      - 1: nothing was measured
    """
    return "\n\n".join("\n".join(line for line, _ in lines) for lines in _blocks(reports))


def show(reports: Iterable[tuple[str, Report]], stream: TextIO) -> None:
    """Prints the summary, in colour if ``stream`` is a terminal and ``rich`` is installed."""
    reports = list(reports)
    console = _console(stream)
    if console is None:
        print(summary(reports), file=stream)
        return
    from rich.text import Text

    for position, lines in enumerate(_blocks(reports)):
        if position:
            console.print()
        for line, style in lines:
            console.print(Text(line, style=style))


def _console(stream: TextIO) -> Console | None:
    if not stream.isatty():
        return None
    try:
        from rich.console import Console as Rich
    except ImportError:
        return None
    return Rich(file=stream, soft_wrap=True, highlight=False)


def relative(words: str) -> str:
    """Returns a text with the places in it relative to the current folder, if they lie in it."""
    try:
        here = os.getcwd() + os.sep
    except OSError:  # a folder that is gone
        return words
    return words.replace(here, "") if here != os.sep else words


# ---------------------------------------------------------------------- lines with their style


def _blocks(reports: Iterable[tuple[str, Report]]) -> Iterator[list[tuple[str, str]]]:
    """Yields the lines of each report; names the machine if it differs from the previous report's."""
    before = ""
    for title, report in reports:
        yield _lines(title, report, bool(report.platform) and text.where(report) != before)
        before = text.where(report)


def _lines(title: str, report: Report, machine: bool) -> list[tuple[str, str]]:
    head = f"{printable(title)}: " if title else "autopallas: "
    lines = [(line, "bold") for line in textwrap.wrap(head + text.headline(report), WIDTH)]
    lines += [(line, "dim") for line in textwrap.wrap(f"on {text.where(report)}", WIDTH) if machine]
    if tuned := text.tuning(report):
        lines.append((tuned, "dim"))
    groups = _groups(report.sites)
    if groups:
        lines += [("", ""), *_table(groups)]
    kept: dict[str, list[int]] = {}
    for group in groups:
        for number, site in zip(group.numbers, group.sites, strict=True):
            if site.verdict == "kept" and (site.kind or site is group.site):
                kept.setdefault(site.reason, []).extend([number] if site.kind else group.numbers)
    told = [f"{text.ranges(sorted(numbers))}: {relative(reason)}" for reason, numbers in kept.items()]
    lines += _listed("Kept:", told)
    if report.rematerialised:
        head_of_arrays, arrays = text.rematerialised(report)
        lines += _listed(head_of_arrays, [relative(line) for line in arrays])
    misses: dict[tuple[str, str, str], list[str]] = {}
    for miss in report.near_misses:
        places = misses.setdefault((miss.op, miss.reason, miss.advice), [])
        if relative(miss.location) not in places:
            places.append(relative(miss.location))
    near = [f"{op} at {', '.join(at)}: {relative(why)}. {do}".rstrip() for (op, why, do), at in misses.items()]
    lines += _listed("Near misses:", near)
    lines += _listed("Without effect:", list(report.notes))
    lines += _listed("Failures:", [relative(text.failure_line(failure)) for failure in report.failures])
    if report.canary is not None:
        lines += _listed(*text.canary(report.canary))
    if text.is_empty(report):
        lines += [("", ""), *((line, "") for line in textwrap.wrap(text.nothing_found(report), WIDTH))]
    return lines


def _listed(head: str, items: Sequence[str]) -> list[tuple[str, str]]:
    if not items:
        return []
    wrapped = (line for item in items for line in textwrap.wrap(f"- {printable(item)}", WIDTH, subsequent_indent="  "))
    return [("", ""), (head, "bold"), *((line, "") for line in wrapped)]


def _groups(sites: Sequence[Site]) -> list[_Group]:
    same: dict[tuple[str, ...], list[int]] = {}
    for number, site in enumerate(sites, 1):
        key = (site.op, site.kind, site.verdict) if site.kind else (*_cells(site), site.reason, site.path)
        same.setdefault(key, []).append(number)
    return [_Group(tuple(numbers), tuple(sites[number - 1] for number in numbers)) for numbers in same.values()]


def _table(groups: Sequence[_Group]) -> list[tuple[str, str]]:
    rows = [(text.ranges(list(group.numbers)), *group.cells()) for group in groups]
    widths = [max(len(row[i]) for row in (_HEAD, *rows)) for i in range(len(_HEAD))]
    gaps = 2 * (len(widths) - 1)
    for column, least in ((2, 16), (4, 8), (0, 3), (1, 9)):  # columns that may be shortened, first the place
        excess = sum(widths) + gaps - WIDTH
        widths[column] = max(min(widths[column], least), widths[column] - max(excess, 0))

    def line(cells: Sequence[str]) -> str:
        cells = [_without_function(cell, widths[2]) if i == 2 else cell for i, cell in enumerate(cells)]
        shown = [_shortened(cell, width, i == 2) for i, (cell, width) in enumerate(zip(cells, widths, strict=True))]
        aligned = [c.rjust(w) if i > 4 else c.ljust(w) for i, (c, w) in enumerate(zip(shown, widths, strict=True))]
        return "  ".join(aligned).rstrip()

    return [(line(_HEAD), "dim"), *((line(row), _STYLES[row[3]]) for row in rows)]


def _cells(site: Site) -> tuple[str, ...]:
    """Returns operation, place, verdict, what runs there, and its cost relative to the original."""
    replaced = site.verdict == "applied"
    sizes = "x".join(str(size) for size in (site.running_sizes or site.block_sizes or {}).values())
    runs = f"{site.implementation} {sizes}".strip() if replaced else "original"
    time, memory = text.gains(site) if replaced else ("", "")
    place = printable(relative(site.location))
    return printable(site.op), place, "replaced" if replaced else "kept", runs, time, memory


def _without_function(place: str, width: int) -> str:
    """Returns "file:line" alone if "file:line (function)" is too long."""
    found = _PLACE.fullmatch(place)
    return place if found is None or len(place) <= width else f"{found['file']}:{found['line']}"


def _shortened(cell: str, width: int, from_the_left: bool) -> str:
    if len(cell) <= width:
        return cell
    return f"…{cell[-(width - 1) :]}" if from_the_left else f"{cell[: width - 1]}…"
