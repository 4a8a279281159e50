"""Renders a profile as a page: a picture of what each place is worth, and the report below it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from autopallas.report import html, terminal
from autopallas.report.records import Report

if TYPE_CHECKING:
    from autopallas.workbench.worth import Whole, Worth

__all__ = ["page", "picture"]

_BAR, _ROW, _LABEL = 440, 34, 20


def page(name: str, report: Report, found: Whole) -> str:
    """Returns an HTML document.

    Args:
      name: the function's name.
      report: its report.
      found: the measurement.
    """
    return html.page([(name, report)], before=picture(found))


def picture(found: Whole) -> str:
    """Draws, for each place, how much longer a step takes without it: a bar, with its interval as a line."""
    measured = [worth for worth in found.worths if worth.seconds is not None]
    if not measured:
        return '<section><h2>What each site is worth</h2><p class="nothing">Nothing was measured.</p></section>'
    note = f"{found.rounds} rounds, {found.clock} time; the lines are 95% intervals"
    return (
        f'<section><h2>What each site is worth</h2><p class="soft">{escape(_whole(found))} Without one place, a step '
        f"takes so much more ({escape(note)}):</p>"
        f'<svg class="worth" role="img" viewBox="0 0 {_BAR + 20} {_ROW * len(measured)}" '
        f'style="max-width:46em;width:100%"><title>What each site is worth</title>{"".join(_rows(measured))}</svg>'
        "</section>"
    )


def _whole(found: Whole) -> str:
    if found.original is None or found.optimized is None:
        return ""
    before, after = found.original.median * 1e3, found.optimized.median * 1e3
    return f"A step takes {before:.3g} ms as it is written, {after:.3g} ms with all sites."


def _rows(measured: Sequence[Worth]) -> Iterator[str]:
    known = [(worth, worth.seconds) for worth in measured if worth.seconds is not None]
    ends = [0.0, *(end for _, seconds in known for end in (seconds.lower, seconds.upper))]
    scale = _BAR / ((max(ends) - min(ends)) or 1.0)

    def across(value: float) -> float:
        return 10 + (value - min(ends)) * scale

    for number, (worth, seconds) in enumerate(known):
        top = _ROW * number
        middle = top + _LABEL + 5
        start, end = sorted((across(0), across(seconds.median)))
        color = "#2f7d4f" if seconds.median > 0 else "#b3492d"
        times = f" ({worth.sites} sites)" if worth.sites > 1 else ""
        more = "" if worth.temporary_bytes is None else f", {worth.temporary_bytes / 2**20:+.1f} MiB"
        figures = f"{seconds.median * 1e3:+.3g} ms{more}"
        label = f"{worth.op} at {terminal.relative(worth.location)}{times}: {figures}"
        low, high = across(seconds.lower), across(seconds.upper)
        yield f'<text x="10" y="{top + 15}" font-size="11" fill="currentColor">{escape(label)}</text>'
        yield f'<rect x="{start:.1f}" y="{middle - 4}" width="{max(end - start, 0.5):.1f}" height="8" fill="{color}"/>'
        yield f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{middle}" y2="{middle}" stroke="currentColor"/>'
    zero = f'x1="{across(0):.1f}" x2="{across(0):.1f}" y1="0" y2="{_ROW * len(known)}"'
    yield f'<line {zero} stroke="currentColor" opacity=".4"/>'
