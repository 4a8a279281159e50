"""The report for a browser: one self-contained page, without scripts or requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

from autopallas.report import text
from autopallas.report.records import Report, Site

__all__ = ["page"]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
section { border-left: 4px solid #999; padding: .1rem 1rem; margin: 1.5rem 0; }
section.applied { border-color: #2a7d46; } section.kept { border-color: #b8860b; }
dl { display: grid; grid-template-columns: 9rem 1fr; gap: .1rem 1rem; } dt { color: #666; } dd { margin: 0; }
dd, h3, li { overflow-wrap: anywhere; } pre { overflow: auto; background: #f5f5f5; padding: .6rem; font-size: 13px; }
"""


def page(reports: Iterable[tuple[str, Report]]) -> str:
    """An HTML document with one or several reports.

    Args:
      reports: (title, report) pairs; the title may be empty.

    Returns:
      The document.  Everything that comes from the program reported on is escaped.

    Example:
      >>> page([("loss", Report())]).startswith("<!doctype html>")
      True
    """
    body = "\n".join(part for title, report in reports for part in _report(title, report))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>autopallas report</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>autopallas report</h1>\n{body}\n</body>\n</html>\n"
    )


def _report(title: str, report: Report) -> Iterator[str]:
    yield f"<h2>{escape(f'{title}: ' if title else '')}{escape(text.headline(report))}</h2>"
    yield f"<p>on {escape(text.where(report))}</p>"
    for site in report.sites:
        yield from _site(site)
    if report.near_misses:
        yield "<h3>Near misses</h3><p>Close to a known computation; left as they are.</p><ul>"
        for miss in report.near_misses:
            yield f"<li>{escape(miss.op)} at <code>{escape(miss.location)}</code>: {escape(miss.reason)}</li>"
        yield "</ul>"
    if report.failures:
        yield "<h3>Failures inside autopallas</h3><p>The program runs on without the rewrite concerned.</p><ul>"
        for failure in report.failures:
            place = " ".join(part for part in (failure.stage, failure.op, failure.location) if part)
            yield f"<li>{escape(place)}: {escape(failure.error)}</li>"
        yield "</ul>"
    if not (report.sites or report.near_misses or report.failures):
        yield f"<p>{escape(text.nothing_found(report))}</p>"


def _site(site: Site) -> Iterator[str]:
    yield f'<section class="{escape(site.verdict)}">'
    yield f"<h3>{escape(site.op)} at <code>{escape(site.location)}</code></h3>\n<dl>"
    for label, value in text.site_rows(site):
        yield f"<dt>{escape(label)}</dt><dd>{escape(value)}</dd>"
    yield "</dl>"
    for label, equations in (("original", site.original), ("replacement", site.replacement)):
        if equations:
            yield f"<details><summary>{label}</summary><pre>{escape(equations)}</pre></details>"
    yield "</section>"
