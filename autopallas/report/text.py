"""Renders the report for a terminal: plain text that fits 80 columns."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopallas.errors import printable
from autopallas.report.records import Attempt, Canary, Failure, NearMiss, Report, Site

__all__ = [
    "Kind",
    "canary",
    "failure_line",
    "gains",
    "headline",
    "is_empty",
    "kinds",
    "nothing_found",
    "passes",
    "ranges",
    "rematerialised",
    "render",
    "second_start",
    "site_rows",
    "tuning",
    "where",
]

WIDTH = 80
_LABEL = 16


def render(report: Report) -> str:
    """Returns the whole report as text of at most 80 columns, without a newline at its end.

    Example:
      >>> print(render(Report(platform="cpu", device_kind="cpu")))
      autopallas: nothing found
      on cpu
      <BLANKLINE>
      No known computation was recognised, and none was nearly recognised, so the
      program runs as it was written.
    """
    head = [f"autopallas: {headline(report)}"]
    if report.platform:
        head.append(_wrapped("on " + where(report)))
    if tuned := tuning(report):
        head.append(tuned)
    blocks = ["\n".join(head)]
    blocks += list(_sites(report.sites))
    if report.rematerialised:
        head_of_arrays, arrays = rematerialised(report)
        blocks.append("\n".join([_wrapped(head_of_arrays), *(_wrapped(f"- {line}", "  ") for line in arrays)]))
    if report.near_misses:
        blocks.append("\n".join(_near_misses(report.near_misses)))
    if report.failures:
        blocks.append("\n".join(_failures(report.failures)))
    if report.notes:
        blocks.append("\n".join(["Without effect:", *(_wrapped(f"- {note}", "  ") for note in report.notes)]))
    if report.canary is not None:
        head_of_calls, lines = canary(report.canary)
        blocks.append("\n".join([_wrapped(head_of_calls), *(_wrapped(f"- {line}", "  ") for line in lines)]))
    if is_empty(report):
        blocks.append(_wrapped(nothing_found(report)))
    return "\n\n".join(blocks)


def headline(report: Report) -> str:
    """Returns the report's contents in one line: "2 sites replaced, 1 kept, 1 near miss"."""
    applied = sum(report.counts().values())
    kept = len(report.sites) - applied
    parts = []
    if applied:
        parts.append(f"{applied} site{'s' * (applied > 1)} replaced")
    if kept:
        parts.append(f"{kept} kept" if parts else f"{kept} site{'s' * (kept > 1)} kept")
    if arrays := sum(one.arrays for one in report.rematerialised):
        parts.append(f"{arrays} array{'s' * (arrays > 1)} rematerialised")
    if misses := len(report.near_misses):
        parts.append(f"{misses} near miss{'es' * (misses > 1)}")
    if failures := len(report.failures):
        parts.append(f"{failures} failure{'s' * (failures > 1)}")
    return ", ".join(parts) or ("nothing found" if report.platform else "nothing traced yet")


def is_empty(report: Report) -> bool:
    """Returns whether there is nothing to tell of a program."""
    return not (report.sites or report.rematerialised or report.near_misses or report.failures)


def rematerialised(report: Report) -> tuple[str, list[str]]:
    """Returns what backwards compute again, in place of keeping it: a headline, and a line for each place."""
    arrays, sizes = Counter[str](), Counter[str]()
    for one in report.rematerialised:
        arrays[one.location] += one.arrays
        sizes[one.location] += one.bytes
    head = (
        f"Rematerialised (computed again for a backward; {sizes.total() / 2**20:.3g} MiB less are kept, as estimated):"
    )
    return head, [
        f"{count} array{'s' * (count > 1)}, {sizes[place] / 2**20:.3g} MiB, at {place}"
        for place, count in arrays.items()
    ]


def where(report: Report) -> str:
    """Returns the device and the versions, in one line, of a report that names them."""
    kind = report.device_kind
    device = report.platform + (f" ({kind})" if kind and kind != report.platform else "")
    return ", ".join([device, *(f"{name} {version}" for name, version in sorted(report.versions.items()))])


def tuning(report: Report) -> str:
    """Returns what it took to find block sizes, in one line; empty if tables sufficed."""
    searches, hits = report.tuning.get("searches", 0), report.tuning.get("cache_hits", 0)
    parts = [f"{searches} search{'es' * (searches > 1)} for block sizes"] if searches else []
    parts += [f"{hits} answer{'s' * (hits > 1)} from the cache on disk"] if hits else []
    return ", ".join(parts)


def passes(report: Report) -> str:
    """Returns the passes of the pipeline: the time of each, and the equations and sites that it left."""
    lines = ["Passes (equations and sites after each):"]
    for one in report.trace:
        lines.append(f"  {one.name:30} {one.seconds * 1e3:10.1f} ms {one.equations:8} {one.sites:6}")
    if report.trace:
        lines += textwrap.wrap(second_start(report), 80)
    return "\n".join(lines)


def second_start(report: Report) -> str:
    """Returns what a further start of the program pays again, and what is kept on disk."""
    total = sum(one.seconds for one in report.trace)
    choosing = sum(one.seconds for one in report.trace if one.stage == "plan")
    return (
        f"A second start traces the program again and repeats these passes: {(total - choosing) * 1e3:.0f} ms, and to "
        f"choose implementations at most the {choosing * 1e3:.0f} ms of this start, in which a search or a probe of a "
        "kernel counts once: their results are kept. Compiling is saved where JAX keeps what it compiled "
        "(JAX_COMPILATION_CACHE_DIR)."
    )


def nothing_found(report: Report) -> str:
    """Returns what it means that a report is empty."""
    if not report.platform:
        return (
            "No function has been traced yet, or AUTOPALLAS_DISABLE is set. A report is there after the first call, or "
            "from autopallas.explain(function, *arguments), which traces and runs nothing."
        )
    return "No known computation was recognised, and none was nearly recognised, so the program runs as it was written."


def _verdict(site: Site) -> str:
    """Returns the verdict in words."""
    if site.verdict == "kept":
        return "kept: recognised, but the original code runs"
    direction = "forward and backward" if site.direction == "forward+backward" else "forward"
    return f"replaced, {direction}"


def _block_sizes(site: Site) -> str:
    """Returns the sizes that run, where they come from, and what is there if it differs; "" if there are none."""
    if not site.block_sizes:
        return ""
    chosen, running = site.block_sizes, site.running_sizes or site.block_sizes
    origin = {
        "explicit": "given explicitly",
        "cache": "from the cache on disk",
        "table": "from the tuned table",
        "autotune": "searched for now",
        "nearest": "from the nearest row of the tuned table",
        "default": "the default",
        None: "",
    }[site.block_sizes_from]
    differing = {name: size for name, size in chosen.items() if size and running.get(name, size) != size}
    asked = f"for {_sizes(differing)}" if differing else ""
    said = ", ".join(filter(None, (asked, origin)))
    return f"{_sizes(running)} ({said})" if said else _sizes(running)


def _sizes(sizes: Mapping[str, int | bool | str]) -> str:
    return " ".join(f"{name}={size}" for name, size in sizes.items())


def _attempt(attempt: Attempt) -> tuple[str, str]:
    name, stage, error = attempt
    return ("left out", f"{name}: {error}") if stage == "supports" else ("tried", f"{name}, failed at {stage}: {error}")


def site_rows(site: Site) -> list[tuple[str, str]]:
    """Returns the facts about a site as (label, text) pairs, none of them empty."""
    rows = [
        ("verdict", _verdict(site)),
        ("reason", site.reason),
        ("inside", site.path),
        ("implementation" if site.verdict == "applied" else "candidate", site.implementation or ""),
        ("numerics", site.numerics or ""),
        ("block sizes", _block_sizes(site)),
        ("spec", site.spec_line),
        *(("assumes", assumption) for assumption in site.assumptions),
        *(("checks", check) for check in site.checks),
        *map(_attempt, site.attempts),
    ]
    return [(label, text) for label, text in rows if text]


@dataclass(frozen=True, slots=True)
class Kind:
    """The sites of one kind, with their numbers in the report.  They are told together."""

    name: str
    sites: tuple[tuple[int, Site], ...]

    @property
    def numbers(self) -> list[int]:
        return [number for number, _ in self.sites]

    def of(self, verdict: str) -> list[Site]:
        return [site for _, site in self.sites if site.verdict == verdict]

    def places(self) -> Counter[str]:
        """Returns how many sites there are at each place."""
        return Counter(site.location for _, site in self.sites)

    def gain(self) -> str:
        """Returns the gain in time of the replaced sites, "5.13x" or "5.13x to 8.01x"; empty if none was measured."""
        found = sorted({float(time[:-1]) for site in self.of("applied") if (time := gains(site)[0])})
        return " to ".join(f"{value:.3g}x" for value in dict.fromkeys((*found[:1], *found[-1:])))

    def rows(self) -> list[tuple[str, str]]:
        """Returns the facts as (label, text) pairs, none of them empty."""
        applied, gain = self.of("applied"), self.gain()
        kept = Counter(site.reason for site in self.of("kept"))
        shown = [*self.places()][:_PLACES]
        further = len(self.places()) - len(shown)
        instead = {line for site in applied for line in site.replacement.splitlines()[1:]}
        rows = [
            ("replaced", f"{len(applied)}{f', {gain} as fast' if gain else ''}" if applied else ""),
            *(("kept", f"{count}: {reason}") for reason, count in kept.items()),
            ("at", ", ".join(shown) + (f", and {further} other places" if further else "")),
            *(("instead", line) for line in sorted(instead)),
            ("numerics", ", ".join(sorted({site.numerics for site in applied if site.numerics}))),
            *(("assumes", line) for line in sorted({line for site in applied for line in site.assumptions})),
        ]
        return [(label, text) for label, text in rows if text]


_PLACES = 4
"""Places of a kind that are named."""


def kinds(sites: tuple[Site, ...]) -> list[Kind]:
    """Returns the sites that have a kind, grouped by it."""
    found: dict[str, list[tuple[int, Site]]] = {}
    for number, site in enumerate(sites, 1):
        if site.kind:
            found.setdefault(f"{site.op}: {site.kind}", []).append((number, site))
    return [Kind(name, tuple(own)) for name, own in sorted(found.items())]


def _sites(sites: tuple[Site, ...]) -> Iterator[str]:
    # The layers of an unrolled model are listed once.
    numbers: dict[tuple[str, ...], list[int]] = {}
    for number, site in enumerate(sites, 1):
        if site.kind:
            continue
        rows = [_row(label, text) for label, text in site_rows(site)]
        numbers.setdefault((f"{site.op} at {site.location}", *rows), []).append(number)
    for (head, *rows), same in numbers.items():
        several = f", {len(same)} sites" if len(same) > 1 else ""
        yield "\n".join([_wrapped(f"[{ranges(same)}] {head}{several}", "    "), *rows])
    for kind in kinds(sites):
        count = len(kind.sites)
        head = f"[{ranges(kind.numbers)}] {kind.name}, {count} site{'s' * (count > 1)}"
        yield "\n".join([_wrapped(head, "    "), *(_row(label, text) for label, text in kind.rows())])


def gains(site: Site) -> tuple[str, str]:
    """Returns the evidence as text: ("2.57x", "0.07x"), the speed and the temporary memory relative to the original."""
    row = site.measured or {}
    try:
        time = f"{_figure(row, 'original_us') / _figure(row, 'kernel_us'):.2f}x"
        memory = f"{_figure(row, 'kernel_bytes') / _figure(row, 'original_bytes'):.2g}x"
    except (KeyError, TypeError, ZeroDivisionError):
        return "", ""
    return time, memory


def _figure(row: Mapping[str, object], name: str) -> float:
    value = row[name]
    if not isinstance(value, (int, float)):
        raise TypeError(f"{name} is no number")
    return value


def ranges(numbers: list[int]) -> str:
    """Shortens ascending numbers: [1, 2, 3, 5] becomes "1-3, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _near_misses(misses: tuple[NearMiss, ...]) -> Iterator[str]:
    yield "Near misses (close to a known computation; left as they are):"
    places: dict[tuple[str, str], dict[str, Counter[str]]] = {}
    for miss in misses:
        places.setdefault((miss.op, miss.reason), {}).setdefault(miss.advice, Counter())[miss.location] += 1
    for (op, reason), advised in places.items():
        yield _wrapped(f"- {op}: {reason}", "  ")
        for advice, locations in advised.items():
            for location, count in locations.items():
                yield _wrapped(f"    at {location}" + (f", {count} times" if count > 1 else ""), "       ")
            if advice:
                yield _wrapped(f"    {advice}", "    ")


def _failures(failures: tuple[Failure, ...]) -> Iterator[str]:
    yield "Failures (the program runs on without the rewrite concerned):"
    for failure in failures:
        yield _wrapped(f"- {failure_line(failure)}", "  ")


def failure_line(failure: Failure) -> str:
    """Returns a failure in one line: its stage, what it concerned, if that is known, and its error."""
    concerned = " ".join(part for part in (failure.op, failure.location and f"at {failure.location}") if part)
    return f"{failure.stage}{', ' + concerned if concerned else ''}: {failure.error}"


def canary(found: Canary) -> tuple[str, list[str]]:
    """Returns what compared calls gave: a headline, and a line for each site or output, breach and note."""
    head = (
        f"Calls compared with the original: {found.compared} (a fraction of {found.fraction:g}). Largest relative "
        "distance of outputs, and how often:"
    )
    lines = []
    for name, counts in found.errors.items():
        told = ((bound if bound in _EXACT else f"up to {bound}", count) for bound, count in counts.items())
        lines.append(f"{name}: " + ", ".join(f"{bound}: {count}" for bound, count in told))
    return head, lines + [f"IN BREACH: {breach}" for breach in found.breaches] + [f"note: {n}" for n in found.notes]


_EXACT = ("0", "not finite")


def _row(label: str, text: str) -> str:
    head = f"    {label}".ljust(_LABEL + 4)
    return _wrapped(text, " " * len(head), head)


def _wrapped(text: str, indent: str = "", first: str | None = None) -> str:
    shown = printable(text)
    lead = shown[: len(shown) - len(shown.lstrip())] if first is None else first
    return "\n".join(textwrap.wrap(shown.strip(), WIDTH, initial_indent=lead, subsequent_indent=indent))
