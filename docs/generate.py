"""Writes the tables of the documentation that the code knows: ``python docs/generate.py``; ``--check`` compares."""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autopallas.environment import VARIABLES
from autopallas.kernels.respelling.tuned_block_sizes import TABLE

PAGES = Path(__file__).parent
COURT = PAGES.parent / "benchmarks" / "results" / "court-cpu.json"
PROGRAMS = PAGES.parent / "benchmarks" / "results" / "programs-cpu.json"


def environment() -> str:
    """The environment variables, from the table by which they are parsed."""
    rows = ["| variable | accepts | meaning |", "|---|---|---|"]
    for variable in VARIABLES:
        accepts = variable.accepts.replace("|", "\\|")
        rows.append(f"| `{variable.name}` | {accepts} | {variable.meaning} |")
    return "\n".join(rows)


WORTH_IT = 1.1
"""Gain in time from which on a respelling is used."""


FOR_MEMORY = "scan_checkpoint"
"""Kind of respelling that is used for its memory."""


EXTENSIONS = {"avx2": "AVX2", "avx512_bf16": "AVX-512", "avx512_fp16": "AVX-512"}
"""The vector extensions that respellings were measured with, and how the table names them."""


def respellings() -> str:
    """The gains of respellings on CPUs, from the table's rows: a line for each kind and form."""
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    for (*_, invariants), row in TABLE.files.read("cpu"):
        kind, form, *_ = invariants.split(", ")
        if kind != FOR_MEMORY:
            extensions = EXTENSIONS[str(row.extensions)]
            found.setdefault((kind, form), {}).setdefault(extensions, []).append(row.speedup)
    names = list(dict.fromkeys(EXTENSIONS.values()))
    rows = [
        f"| kind | form | {' | '.join(f'median gain with {name} (from, to)' for name in names)} | rows "
        "| of these left alone |",
        "|---|---|---|---|---|---|",
    ]
    for (kind, form), by_extensions in sorted(found.items()):
        cells = [gains_in_words(by_extensions.get(name, [])) for name in names]
        gains = [gain for own in by_extensions.values() for gain in own]
        left = sum(gain < WORTH_IT for gain in gains)
        rows.append(f"| `{kind}` | {form} | {' | '.join(cells)} | {len(gains)} | {left or ''} |")
    return "\n".join(rows)


def gains_in_words(gains: list[float]) -> str:
    """The median of gains that are used, the least and the greatest."""
    used = [gain for gain in gains if gain >= WORTH_IT]
    if not used:
        return "none" if gains else ""
    return f"{statistics.median(used):.2g} ({min(used):.2g}, {max(used):.3g})"


def checkpoints() -> str:
    """What loops that run again in chunks take and save, from the table's rows."""
    rows = ["| steps | values not stacked | speed | temporary memory |", "|---|---|---|---|"]
    for (*_, bucket, invariants), row in TABLE.files.read("cpu"):
        kind, form, *large = invariants.split(", ")
        if kind == FOR_MEMORY:
            memory = row.kernel_bytes / row.original_bytes
            size = "more" if large else f"about {int(bucket[1:]):,}"
            rows.append(f"| {form} | {size} | {row.speedup:.2f} | {memory:.2f} |")
    return "\n".join(rows)


def machines() -> dict[str, list[dict[str, Any]]]:
    """The recorded rows of unmodified programs of other libraries, by kind of processor."""
    by_machine: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(json.loads(PROGRAMS.read_text(encoding="utf-8")), key=lambda row: str(row["program"])):
        machine = f"{row['processor']} ({row['vector_extensions']}), JAX {row['versions']['jax']}"
        by_machine.setdefault(machine, []).append(row)
    return dict(sorted(by_machine.items()))


def figures(row: dict[str, Any]) -> tuple[float, float, float, float]:
    """A program's gain in time, its temporary memory by default and by objective, and its first step, as ratios."""
    memory, first = row["temporary_bytes"], row["first_step_cpu_seconds"]
    used, least = (memory[name] / memory["original"] for name in ("optimized", "memory"))
    return row["cpu_ratio"][0], used, least, first["optimized"] / first["original"]


def in_short() -> str:
    """What programs gain by default on each kind of processor: a line for each program."""
    by_machine = machines()
    found: dict[str, dict[str, tuple[float, ...]]] = {}
    for machine, rows in by_machine.items():
        for row in rows:
            gain, used, _, begins = figures(row)
            found.setdefault(row["program"], {})[machine] = (gain, used, begins)
    names = [machine.split(",")[0] for machine in by_machine]
    head = " | ".join(f"{name}: faster | memory | first step" for name in names)
    lines = [f"| program | {head} |", f"|---{'|---|---|---' * len(names)}|"]
    for program, own in sorted(found.items()):
        cells = [" | ".join(f"{value:.2f}" for value in own.get(machine, ())) or " | | " for machine in by_machine]
        lines.append(f"| {program} | {' | '.join(cells)} |")
    means = [
        f"**{statistics.geometric_mean(column):.2f}**"
        for machine in by_machine
        for column in zip(*(own[machine] for own in found.values() if machine in own), strict=True)
    ]
    return "\n".join([*lines, f"| **geometric mean** | {' | '.join(means)} |"])


def programs() -> str:
    """What each program gains, with quartiles, and under the objective "memory": a table for each processor."""
    lines: list[str] = []
    for machine, rows in machines().items():
        dates = sorted({row[name] for row in rows for name in ("date", "first_step_date") if name in row})
        lines += [
            f"{machine}, {' to '.join(sorted({dates[0], dates[-1]}))}:",
            "",
            '| program | faster | temporary memory | of objective "memory" | first step |',
            "|---|---|---|---|---|",
        ]
        for row in rows:
            gain, used, least, begins = figures(row)
            spread = "({:.2f}, {:.2f})".format(*row["cpu_ratio"][1:])
            lines.append(f"| {row['program']} | {gain:.2f} {spread} | {used:.2f} | {least:.2f} | {begins:.2f} |")
        means = [f"**{statistics.geometric_mean(column):.2f}**" for column in zip(*map(figures, rows), strict=True)]
        lines += [f"| **geometric mean** | {' | '.join(means)} |", ""]
    return "\n".join(lines[:-1])


def court() -> str:
    """The recorded verdicts on the kernels of this package: all variants of an implementation together."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for verdict in json.loads(COURT.read_text(encoding="utf-8"))["verdicts"]:
        name, implementation = verdict["kernel"].split(" by ")
        found.setdefault((name.split()[0], implementation), []).append(verdict)
    rows = ["| operation | implementation | variants | cases | wrong | refused |", "|---|---|---|---|---|---|"]
    for (operation, implementation), verdicts in sorted(found.items()):
        tallies = [tally for verdict in verdicts for tally in verdict["tallies"].values()]
        counts = [sum(tally[name] for tally in tallies) for name in ("heard", "failed", "refused")]
        rows.append(f"| {operation} | {implementation} | {len(verdicts)} | {' | '.join(map(str, counts))} |")
    return "\n".join(rows)


TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "environment": ("options.md", environment),
    "respellings": ("respellings.md", respellings),
    "checkpoints": ("respellings.md", checkpoints),
    "court": ("in-production.md", court),
    "programs in short": ("../README.md", in_short),
    "programs": ("benchmarks.md", programs),
}
"""Per name, the page and what gives the table."""


def main() -> int:
    """0, or with ``--check`` 1 where a page is not up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a page would change")
    check = parser.parse_args().check
    stale = []
    for name, (page, table) in TABLES.items():
        path = PAGES / page
        text = path.read_text(encoding="utf-8")
        marks = re.compile(rf"(<!-- generated: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        new, count = marks.subn(lambda found, table=table: f"{found[1]}{table()}\n{found[2]}", text)
        if count != 1:
            print(f"{page} has no place for the table {name}", file=sys.stderr)
            return 1
        if new != text:
            stale.append(page)
            if not check:
                path.write_text(new, encoding="utf-8")
    if stale and check:
        print(f"not up to date: {', '.join(stale)}; run python docs/generate.py", file=sys.stderr)
    return int(bool(stale and check))


if __name__ == "__main__":
    sys.exit(main())
