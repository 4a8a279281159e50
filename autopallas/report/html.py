"""Renders the report for a browser: one self-contained page that requests nothing, and folds without scripts too.

Everything that comes from the reported program is escaped.  As a second line of defence, the page's policy lets only
its own script run, by hash, and loads no resource.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from html import escape
from importlib import resources

from autopallas.places import users_place
from autopallas.report import pictures, terminal, text
from autopallas.report.records import Failure, NearMiss, Report, Site

__all__ = ["frame", "page"]

_PLACE = re.compile(r"(?P<file>.*):(?P<line>\d+) \((?P<function>.*)\)", re.DOTALL)
_AROUND = 2
_LARGEST_SOURCE = 4 * 2**20
_OPEN_AT_FIRST = 3
_KINDS = {"applied": "Replaced", "kept": "Kept", "miss": "Near misses", "failure": "Failures"}


def page(reports: Iterable[tuple[str, Report]], before: str = "") -> str:
    """Returns an HTML document with one or several reports.

    Args:
      reports: (title, report) pairs; the title may be empty.
      before: a section, as HTML, that comes before the reports.

    Returns:
      The document.

    Example:
      >>> page([("loss", Report())]).startswith("<!doctype html>")
      True
    """
    entries = list(reports)
    body = "\n".join([*_top(entries), before, *(part for title, report in entries for part in _report(title, report))])
    script, style = _resource("page.js"), _resource("page.css")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>autopallas report</title>\n'
        f"<style>{style}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n<script>{script}</script>\n</body>\n</html>\n"
    )


def frame(report: Report) -> str:
    """Returns the page in a frame of its own, for notebooks: its style and script do not affect anything around it."""
    height = min(760, 260 + 60 * (len(report.sites) + len(report.near_misses)))
    return (
        f'<iframe title="autopallas report" sandbox="allow-scripts" style="width:100%;height:{height}px;border:0" '
        f'srcdoc="{escape(page([("", report)]))}"></iframe>'
    )


@cache
def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


# ---------------------------------------------------------------------- summary


def _top(entries: Sequence[tuple[str, Report]]) -> Iterator[str]:
    sites = [site for _, report in entries for site in report.sites]
    misses = [miss for _, report in entries for miss in report.near_misses]
    failures = [failure for _, report in entries for failure in report.failures]
    yield "<header><h1>autopallas report</h1>"
    if len(entries) == 1:
        title, report = entries[0]
        yield f'<p class="headline">{escape(f"{title}: " if title else "")}{escape(text.headline(report))}</p>'
    else:
        whole = Report(sites=tuple(sites), near_misses=tuple(misses), failures=tuple(failures), platform="all")
        several = f"{len(entries)} function{'s' * (len(entries) != 1)}"
        yield f'<p class="headline">{several}: {escape(text.headline(whole))}</p>'
    places = dict.fromkeys(text.where(report) for _, report in entries)
    yield f'<p class="soft">{"<br>".join(escape(f"on {where}") for where in places)}</p></header>'
    operations = dict.fromkeys([*(site.op for site in sites), *(miss.op for miss in misses)])
    if operations:
        yield '<div class="operations">'
        for op in operations:
            yield _operation(op, [s for s in sites if s.op == op], sum(miss.op == op for miss in misses))
        yield "</div>"
        counts = Counter(site.verdict for site in sites) | Counter({"miss": len(misses), "failure": len(failures)})
        yield _filters(list(operations), {kind: counts[kind] for kind in _KINDS if counts[kind]})


def _operation(op: str, sites: Sequence[Site], misses: int) -> str:
    """Renders one operation at a glance."""
    applied = [site for site in sites if site.verdict == "applied"]
    kept = len(sites) - len(applied)
    parts = [f"{len(applied)} replaced"] * bool(applied) + [f"{kept} kept"] * bool(kept)
    parts += [f"{misses} near miss{'es' * (misses > 1)}"] * bool(misses)
    total = max(len(sites) + misses, 1)
    bars, start = [], 0.0
    for kind, count in (("replaced", len(applied)), ("kept", kept), ("miss", misses)):
        width = 100 * count / total
        bars.append(f'<rect class="{kind}" x="{start:.2f}" width="{width:.2f}" height="6"/>')
        start += width
    measured = [found for site in applied for found in pictures.compared(site) if found[0] == "time"]
    gain = ""
    if measured:
        factor = sum(original for _, original, *_ in measured) / sum(kernel for _, _, kernel, *_ in measured)
        gain = f'<div class="gain">{factor:.2f}× <small>as fast</small></div>'
    share = f'<svg viewBox="0 0 100 6" preserveAspectRatio="none" aria-hidden="true">{"".join(bars)}</svg>'
    return (
        f'<div class="operation"><strong>{escape(op)}</strong>{gain}<div class="share">{share}</div>'
        f'<span class="soft">{", ".join(parts)}</span></div>'
    )


def _filters(operations: Sequence[str], counts: dict[str, int]) -> str:
    def button(group: str, value: str, label: str) -> str:
        return (
            f'<button type="button" data-filter="{group}" data-value="{escape(value)}" aria-pressed="false">'
            f"{escape(label)}</button>"
        )

    kinds = "".join(button("kind", kind, f"{_KINDS[kind]} {count}") for kind, count in counts.items())
    ops = "".join(button("op", op, op) for op in operations) if len(operations) > 1 else ""
    gap = '<span class="gap"></span>' if ops else ""
    return (
        f'<div class="filters" hidden>{kinds}{gap}{ops}<input type="search" placeholder="Search" '
        'aria-label="Search in sites and near misses"><button type="button" class="fold">Unfold all</button></div>'
        '<p class="nothing nothing-matches" hidden>Nothing matches these filters.</p>'
    )


# ---------------------------------------------------------------------- one report


def _report(title: str, report: Report) -> Iterator[str]:
    yield "<section>"
    if title:
        yield f"<h2>{escape(title)}</h2>"
        yield f'<p class="soft">{escape(text.headline(report))}</p>'
    if tuned := text.tuning(report):
        yield f'<p class="soft">{escape(tuned)}</p>'
    groups: dict[tuple[object, ...], list[int]] = {}
    for number, site in enumerate(report.sites, 1):
        if site.kind:
            continue
        key = (site.op, site.location, site.verdict, *text.site_rows(site))
        groups.setdefault(key, []).append(number)
    for position, numbers in enumerate(groups.values()):
        yield from _site(report.sites[numbers[0] - 1], numbers, position < _OPEN_AT_FIRST and len(groups) <= 8)
    for kind in text.kinds(report.sites):
        yield _kind(kind)
    if report.rematerialised:
        head, lines = text.rematerialised(report)
        yield f"<h3>{escape(head)}</h3>"
        yield from (f"<p>{escape(line)}</p>" for line in lines)
    if report.near_misses:
        yield '<h3 data-kind="miss">Near misses: close to a known computation, left as they are</h3>'
        for miss, count in Counter(report.near_misses).items():
            yield from _near_miss(miss, count)
    if report.failures:
        yield '<h3 data-kind="failure">Failures: the program runs on without the rewrite</h3>'
        for failure in report.failures:
            yield _failure(failure)
    if report.notes:
        yield "<h3>Without effect</h3>"
        yield from (f"<p>{escape(note)}</p>" for note in report.notes)
    if report.canary is not None:
        head, lines = text.canary(report.canary)
        yield f"<h3>{escape(head)}</h3>"
        yield from (f"<p>{escape(line)}</p>" for line in lines)
    if text.is_empty(report):
        yield f'<p class="nothing">{escape(text.nothing_found(report))}</p>'
    yield from _passes(report)
    yield "</section>"


def _passes(report: Report) -> Iterator[str]:
    """Renders the time of each pass over the program, and what the pass left."""
    if not report.trace:
        return
    seconds = sum(one.seconds for one in report.trace)
    yield f'<details class="more passes"><summary>Passes over the program, {seconds * 1e3:.1f} ms</summary><table>'
    yield "<tr><th>pass</th><th>ms</th><th>equations after it</th><th>sites</th></tr>"
    for one in report.trace:
        numbers = f"<td>{one.seconds * 1e3:.1f}</td><td>{one.equations}</td><td>{one.sites}</td>"
        yield f"<tr><td>{escape(one.name)}</td>{numbers}</tr>"
    yield f'</table><p class="soft">{escape(text.second_start(report))}</p></details>'


def _item(kind: str, op: str, opened: bool, head: Iterable[str], body: Iterable[str]) -> str:
    return (
        f'<details class="item {kind}" data-kind="{kind}" data-op="{escape(op)}"{" open" * opened}>'
        f'<summary>{"".join(head)}</summary><div class="body">{"".join(body)}</div></details>'
    )


def _head(pill: str, op: str, location: str, times: int, gain: str = "") -> Iterator[str]:
    yield f'<span class="pill">{pill}</span><strong>{escape(op)}</strong>'
    if times > 1:
        yield f'<span class="times">×{times}</span>'
    yield f'<span class="place">{escape(terminal.relative(location))}</span>'
    if gain:
        yield f'<span class="gain">{gain}</span>'


def _kind(kind: text.Kind) -> str:
    """Renders all sites of one kind as one item."""
    applied, places, gain = kind.of("applied"), kind.places(), kind.gain().replace("x", "×")
    pill, verdict = ("Replaced", "applied") if applied else ("Kept", "kept")
    op, _, name = kind.name.partition(": ")
    where = next(iter(places)) if len(places) == 1 else f"{len(places)} places"
    head = _head(pill, f"{op}: {name}", where, len(kind.sites), f"{gain} as fast" if gain else "")
    rows = "".join(f"<dt>{escape(label)}</dt><dd>{escape(value)}</dd>" for label, value in kind.rows())
    specs = dict.fromkeys(site.spec_line for _, site in kind.sites)
    listed = "".join(f"<dt>spec</dt><dd>{escape(line)}</dd>" for line in specs)
    return _item(verdict, op, False, head, [f'<div class="columns"><dl>{rows}{listed}</dl></div>'])


def _site(site: Site, numbers: Sequence[int], opened: bool) -> Iterator[str]:
    measured = pictures.compared(site)
    time, memory = text.gains(site)
    gain = (
        f"{time.replace('x', '×')} as fast, {memory.replace('x', '×')} memory" if measured and time and memory else ""
    )
    if gain and site.verdict == "kept":
        gain = f"kernel: {gain}"
    pill = "Replaced" if site.verdict == "applied" else "Kept"
    yield _item(
        site.verdict,
        site.op,
        opened,
        _head(pill, site.op, site.location, len(numbers), gain),
        _site_body(site, numbers),
    )


def _site_body(site: Site, numbers: Sequence[int]) -> Iterator[str]:
    yield f'<p class="why">{escape(_in_words(site))}</p><div class="columns"><dl>'
    rows = [(label, value) for label, value in text.site_rows(site) if label not in ("verdict", "reason")]
    if len(numbers) > 1:
        rows.append(("sites", text.ranges(list(numbers))))
    if site.measured:
        known = [str(site.measured[name]) for name in ("evidence", "date", "versions") if site.measured.get(name)]
        if known and site.block_sizes_from == "table":
            known.append("at one size of this bucket, not in your program")
        rows += [("evidence", ", ".join(known))] if known else []
    for label, value in rows:
        yield f"<dt>{escape(label)}</dt><dd>{escape(value)}</dd>"
    yield "</dl>"
    yield from _mask(site)
    yield "</div>"
    measured = pictures.compared(site)
    if measured:
        yield '<div class="measured">'
        for label, original, kernel, *shown in measured:
            yield f"<div><h4>{label}</h4>{pictures.bars(original, kernel, (shown[0], shown[1]))}</div>"
        yield "</div>"
    yield from _source(site.location)
    equations = [("before", site.original), ("after", site.replacement)]
    if any(printed for _, printed in equations):
        yield '<details class="more"><summary>Equations</summary><div class="equations">'
        for label, printed in equations:
            if printed:
                yield f"<div><h4>{label}</h4><pre>{escape(printed)}</pre></div>"
        yield "</div></details>"


def _in_words(site: Site) -> str:
    direction = "forward and backward" if site.direction == "forward+backward" else "the forward"
    if site.verdict == "applied":
        return f"A kernel runs here in place of {direction}: {_sentence(site.reason)}"
    return f"Recognised, {direction}, but the original code runs: {_sentence(site.reason)}"


def _sentence(reason: str) -> str:
    return f"{terminal.relative(reason).rstrip('.')}."


def _mask(site: Site) -> Iterator[str]:
    picture = site.spec.get("tiles") if isinstance(site.spec, dict) else None
    drawn = pictures.tiles(picture) if isinstance(picture, dict) else ""
    if not drawn or not isinstance(picture, dict):
        return
    counts = pictures.tile_counts(picture)
    total = sum(counts.values()) or 1
    note = f"{counts['skipped'] / total:.0%} of the tiles are never computed." if counts["skipped"] else ""
    if site.spec.get("mask_class") == "dynamic" and not counts.get("hidden"):
        note = "The mask is data: which tiles are computed is known only when the program runs."
    yield (
        f'<figure><div class="drawing"><span class="down">queries</span>{drawn}<span class="across">keys</span></div>'
        '<div class="legend">'
    )
    names = {"full": "computed", "partial": "computed under the mask", "skipped": "skipped"}
    names["hidden"] = "skipped where that is shown to change nothing, when the program runs"
    for name, count in counts.items():
        if count:
            key = f'<svg class="tiles" viewBox="0 0 1 1"><rect class="{name}" width="1" height="1"/></svg>'
            yield f"<span>{key}{names[name]} {count}</span>"
    yield f"</div>{f'<div>{note}</div>' if note else ''}</figure>"


def _near_miss(miss: NearMiss, count: int) -> Iterator[str]:
    yield _item(
        "miss",
        miss.op,
        True,
        _head("Near miss", miss.op, miss.location, count),
        [
            f'<p class="why">Left as it is: {escape(_sentence(miss.reason))}</p>',
            f'<p class="hint">{escape(miss.advice)}</p>' if miss.advice else "",
            *_source(miss.location),
        ],
    )


def _failure(failure: Failure) -> str:
    head = _head("Failure", failure.op or failure.stage, failure.location or failure.stage, 1)
    return _item("failure", failure.op, False, head, [f'<p class="why">{escape(failure.error)}</p>'])


def _source(location: str) -> Iterator[str]:
    """Renders the line of the user's code with its neighbours, if the file is available."""
    found = _PLACE.fullmatch(users_place(location))
    if found is None or not found["file"].endswith(".py"):
        return
    try:
        if not os.path.isfile(found["file"]) or os.path.getsize(found["file"]) > _LARGEST_SOURCE:
            return
        with open(found["file"], encoding="utf-8", errors="replace") as file:
            lines = file.read().splitlines()
    except (OSError, ValueError):
        return
    at = int(found["line"]) if len(found["line"]) < 9 else 0
    if not 1 <= at <= len(lines):
        return
    numbers = list(range(max(1, at - _AROUND), min(len(lines), at + _AROUND) + 1))
    while numbers[-1] > at and not lines[numbers[-1] - 1].strip():
        numbers.pop()
    shown = [
        f"<span{' class=here' if number == at else ''}><i>{number}</i>{escape(lines[number - 1])}</span>"
        for number in numbers
    ]
    yield f'<pre class="source">{"".join(shown)}</pre>'
