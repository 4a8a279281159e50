"""Measures programs, each part in a process of its own, and says what the bars say of them."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks import environment
from benchmarks.programs.child import MEMORY, OPTIMIZED, ORIGINAL, QUICK, ROWS, SMALL
from benchmarks.programs.program import Program

__all__ = ["Effort", "covered", "measured", "summary", "verdicts"]

Row = dict[str, Any]

SECONDS, QUICK_SECONDS = 900.0, 240.0
"""After which a process is given up, and one of a quick run."""
SLOWEST = 0.97
"""Least ratio of times by default options."""
MEMORY_MOST, MEMORY_PAID = 1.05, 1.3
"""More temporary memory than the first times the original's needs a gain in time of the second."""
FIRST_STEP_MOST, FIRST_STEP_SECONDS = 1.15, 0.3
"""A first step without a search may take so many times the original's, or so many seconds more."""


class _Failed(Exception):
    """A process that measures part of a program ended otherwise than with a result.

    Attributes:
      found: what it had said by then.
    """

    def __init__(self, reason: str, found: Mapping[str, Any]):
        super().__init__(reason)
        self.found = found


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured, and where.

    Attributes:
      platform: "cpu", where processor time counts, or another one, where wall time does.
      device: its kind.
      rounds: how often both run in turns.
      repeats: first steps of each kind.
      quick: whether one process does: for the first step with a search, that of the original after it, whose products
        XLA may have tuned by then, and both in turns.
      small: whether programs are of the sizes of a dry run.
      tune_seconds: the option of that name; None for its default.
      limit: seconds after which a process is given up; None for what is usual.
    """

    platform: str
    device: str
    rounds: int = 15
    repeats: int = 2
    quick: bool = False
    small: bool = False
    tune_seconds: float | None = None
    limit: float | None = None

    @property
    def clock(self) -> str:
        return "cpu" if self.platform == "cpu" else "wall"


def measured(program: Program, effort: Effort, cache: Path) -> Row:
    """One row: a program as it is written and under default options.

    Processes come in this order: the first step of both, without a search, ``repeats`` times each, of which the least
    counts; the first step with the quick search and ``cache``, as a user's first run has it; the same again, with what
    that search found; and both in turns, with that too.  A quick run has less, as :class:`Effort` says.

    Args:
      program: what to measure.
      effort: how much of it.
      cache: the folder in which results of searches are kept.
    """
    row: Row = {
        "program": program.name + (" (dry run)" if effort.small else ""),
        "direction": program.direction, "device": effort.device,
        "processor": environment.processor(), "vector_extensions": environment.vector_extensions(),
        "versions": environment.versions() | {name: metadata.version(name) for name in program.packages},
        "date": datetime.date.today().isoformat(),
    }  # fmt: skip
    if effort.platform != "cpu":
        del row["vector_extensions"]
        row |= {"flags": environment.flags(), "tune_seconds": effort.tune_seconds}
    try:
        if not effort.quick:
            row |= _first_steps(program, effort, cache)
            row |= _child("steps", program, effort, cache)
            del row["first_step"]
            return row
        row |= _child("steps", program, effort, cache)
        first, clock = row.pop("first_step"), f"{effort.clock}_seconds"
        row[f"first_step_{clock}"] = {what: seconds[clock] for what, seconds in first.items()}
    except _Failed as failure:
        row |= {**failure.found, "failure": str(failure)}
    return row


def with_first_steps(row: Row, program: Program, effort: Effort, cache: Path) -> Row:
    """The row of a program that was measured before, with first steps of today."""
    try:
        return row | _first_steps(program, effort, cache)
    except _Failed as failure:
        return row | {"failure": str(failure)}


def with_smallest_memory(row: Row, program: Program, effort: Effort, cache: Path) -> Row:
    """The row of a program that was measured before, with its temporary memory under objective="memory" of today."""
    try:
        smallest = _child(MEMORY, program, effort, cache)["smallest"]
    except _Failed as failure:
        return row | {"failure": str(failure)}
    today = datetime.date.today().isoformat()
    return row | {"temporary_bytes": row["temporary_bytes"] | {MEMORY: smallest}, "smallest_date": today}


def covered(program: Program) -> tuple[list[Mapping[str, Any]], str]:
    """The sites of a program that have a kernel on this platform, and what failed.

    Each has its name, whether the tuned tables have a row for it, and why it is replaced or kept.  Nothing runs, and
    nothing is searched for or read from a cache.
    """
    try:
        with tempfile.TemporaryDirectory() as empty:
            return _child(ROWS, program, Effort("", ""), Path(empty), searches=False)["sites"], ""
    except _Failed as failure:
        return [], str(failure)


def _first_steps(program: Program, effort: Effort, cache: Path) -> Row:
    first: dict[str, list[float]] = {ORIGINAL: [], OPTIMIZED: []}
    clock = f"{effort.clock}_seconds"
    for _ in range(effort.repeats):
        with tempfile.TemporaryDirectory() as empty:
            for what, seconds in first.items():
                seconds.append(_child(what, program, effort, Path(empty), searches=False)[clock])
    found = {what: min(seconds) for what, seconds in first.items()}
    for what in ("searched", "cached"):
        found[what] = _child(OPTIMIZED, program, effort, cache)[clock]
    return {f"first_step_{clock}": found, "first_step_date": datetime.date.today().isoformat()}


def _child(what: str, program: Program, effort: Effort, cache: Path, searches: bool = True) -> Mapping[str, Any]:
    variables = {
        **(environment.ALLOCATOR_SETTINGS if effort.platform == "cpu" else {}), **os.environ,
        "AUTOPALLAS_CACHE_DIR": str(cache), "KERAS_BACKEND": "jax", "TF_CPP_MIN_LOG_LEVEL": "3",
    }  # fmt: skip
    if not searches:
        variables["AUTOPALLAS_AUTOTUNE"] = "0"
    flags = [flag for flag, on in ((QUICK, effort.quick), (SMALL, effort.small)) if on]
    if effort.tune_seconds is not None:
        flags.append(str(effort.tune_seconds))
    command = [sys.executable, "-m", "benchmarks.programs.child", what, program.name, str(effort.rounds), *flags]
    limit = effort.limit or (QUICK_SECONDS if effort.quick else SECONDS)
    process = subprocess.Popen(
        command, env=variables, cwd=Path(__file__).parents[2], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        said, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGUSR1)  # it then tells where it is
        time.sleep(1)
        process.kill()
        said, errors = process.communicate()
        found = {**_results(said), "stack": errors[-4000:]}
        raise _Failed(f"{what}: no result within {limit:.0f} seconds", found) from None
    found = _results(said)
    if process.returncode or not found:
        lines = errors.strip().splitlines()
        raise _Failed(f"{what}: {lines[-1] if lines else f'status {process.returncode}'}", found)
    return found


def _results(said: str) -> dict[str, Any]:
    """What a process said, of which libraries may have said something else."""
    found: dict[str, Any] = {}
    for line in said.splitlines():
        with contextlib.suppress(ValueError):
            found |= json.loads(line) if line.startswith("{") else {}
    return found


def _ratio(row: Row) -> list[float]:
    found: list[float] = row[f"{row.get('clock', 'cpu')}_ratio"]
    return found


def _first(row: Row) -> Mapping[str, float]:
    """The first steps of a row, which has no "optimized", that without a search, where the run was quick."""
    found: Mapping[str, float] = row[f"first_step_{row.get('clock', 'cpu')}_seconds"]
    return found


def verdicts(row: Row) -> list[str]:
    """What a row falls short of, in words; empty where it passes."""
    if row.get("failure"):
        return [f"failed: {row['failure']}"]
    found = []
    ratio, memory = _ratio(row)[0], row["temporary_bytes"]
    if ratio < SLOWEST:
        found.append(f"slower: {ratio:.2f} times as fast")
    if memory[OPTIMIZED] > MEMORY_MOST * memory[ORIGINAL] and ratio < MEMORY_PAID:
        found.append(f"temporary memory {memory[OPTIMIZED] / memory[ORIGINAL]:.2f}")
    first = _first(row)
    if OPTIMIZED in first and first[OPTIMIZED] > max(
        FIRST_STEP_MOST * first[ORIGINAL], first[ORIGINAL] + FIRST_STEP_SECONDS
    ):
        steps = paid_after(row)
        paid = "never paid" if steps is None else f"paid after {steps} steps"
        found.append(f"first step {first[OPTIMIZED] / first[ORIGINAL]:.2f}, {paid}")
    return found


def paid_after(row: Row) -> int | None:
    """The number of steps after which a longer first step is gained back; None where a step gains nothing."""
    first, step = _first(row), row[f"{row.get('clock', 'cpu')}_seconds"]
    longer = first[OPTIMIZED] - first[ORIGINAL]
    if longer <= 0:
        return 0
    gain = step[ORIGINAL] - step[OPTIMIZED] if None not in (step[ORIGINAL], step[OPTIMIZED]) else 0.0
    return math.ceil(longer / gain) if gain > 0 else None


def line(row: Row) -> str:
    """A row as one line of text."""
    if row.get("failure"):
        return f"{row['program']:52} {row['failure'][:300]}"
    median, lower, upper = _ratio(row)
    memory, first = row["temporary_bytes"], _first(row)
    by_verdict = Counter((site["kind"] or site["op"], site["verdict"]) for site in row["sites"])
    sites = ", ".join(f"{n} {op} {verdict}" for (op, verdict), n in sorted(by_verdict.items()))
    device, step = row.get("device_ratio"), row.get("wall_seconds")
    times = f"first step {first[ORIGINAL]:.1f} s, searching {first['searched']:.1f} s"
    if OPTIMIZED in first:
        times = (
            f"first step {first[OPTIMIZED] / first[ORIGINAL]:.2f} of {first[ORIGINAL]:.1f} s  "
            f"searching {first['searched']:.1f} s, afterwards {first['cached']:.1f} s"
        )
    parts = (
        f"{row['program']:48} {median:5.2f} [{lower:.2f}, {upper:.2f}]",
        *([f"device {device[0]:.2f}"] if device else ()),
        *([f"{1e3 * step[ORIGINAL]:.1f} ms"] if step and step[ORIGINAL] else ()),
        f"memory {memory[OPTIMIZED] / memory[ORIGINAL]:.2f}"
        + (f" (smallest {memory[MEMORY] / memory[ORIGINAL]:.2f})" if MEMORY in memory else ""),
        times,
        f"difference {row['difference']:.1e}",
        sites,
    )
    return "  ".join(parts)


def summary(rows: Sequence[Row]) -> str:
    """Geometric means over all programs that ran."""
    ran = [row for row in rows if not row.get("failure")]
    if not ran:
        return "no program ran"
    memory = [row["temporary_bytes"] for row in ran]
    first = [_first(row) for row in ran]
    decided = [site for row in ran for site in row["sites"]]
    faster, used = _mean(_ratio(row)[0] for row in ran), _mean(m[OPTIMIZED] / m[ORIGINAL] for m in memory)
    said = f"{len(ran)} programs, geometric means: {faster:.2f} times as fast; temporary memory {used:.2f}"
    if all(MEMORY in m for m in memory):
        said += f', and {_mean(m[MEMORY] / m[ORIGINAL] for m in memory):.2f} under objective "memory"'
    kinds = {OPTIMIZED: "without a search", "searched": "with one", "cached": "with what an earlier one found"}
    shown = [kind for kind in kinds if all(kind in f for f in first)]
    steps = ", ".join(f"{_mean(f[kind] / f[ORIGINAL] for f in first):.2f} {kinds[kind]}" for kind in shown)
    return (
        f"{said}; first step {steps}. "
        f"{sum(site['verdict'] == 'applied' for site in decided)} of {len(decided)} sites are replaced."
    )


def _mean(values: Iterable[float]) -> float:
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms))
