"""Measures programs, each part in a process of its own, and says what the bars say of them."""

from __future__ import annotations

import datetime
import json
import math
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks import environment
from benchmarks.programs.child import MEMORY, OPTIMIZED, ORIGINAL, ROWS
from benchmarks.programs.program import Program

__all__ = ["covered", "measured", "summary", "verdicts"]

Row = dict[str, Any]

SECONDS = 900.0
"""After which a process is given up."""
SLOWEST = 0.97
"""Least ratio of processor time by default options."""
MEMORY_MOST, MEMORY_PAID = 1.05, 1.3
"""More temporary memory than the first times the original's needs a gain in time of the second."""
FIRST_STEP_MOST, FIRST_STEP_SECONDS = 1.15, 0.3
"""A first step without a search may take so many times the original's, or so many seconds more."""


class _Failed(Exception):
    """A process that measures part of a program ended otherwise than with a result."""


def measured(program: Program, rounds: int, repeats: int, cache: Path) -> Row:
    """One row: a program as it is written and under default options.

    Processes come in this order: the first step of both, without a search, ``repeats`` times each, of which the least
    counts; the first step with the quick search and ``cache``, as a user's first run has it; the same again, with what
    that search found; and both in turns, with that too.

    Args:
      program: what to measure.
      rounds: how often both run in turns.
      repeats: first steps of each kind.
      cache: the folder in which results of searches are kept.
    """
    row: Row = {
        "program": program.name, "direction": program.direction,
        "processor": environment.processor(), "vector_extensions": environment.vector_extensions(),
        "versions": environment.versions() | {name: metadata.version(name) for name in program.packages},
        "date": datetime.date.today().isoformat(),
    }  # fmt: skip
    try:
        row |= _first_steps(program, repeats, cache)
        row |= _child("steps", program, rounds, cache, searches=True)
    except _Failed as failure:
        row["failure"] = str(failure)
    return row


def with_first_steps(row: Row, program: Program, repeats: int, cache: Path) -> Row:
    """The row of a program that was measured before, with first steps of today."""
    try:
        return row | _first_steps(program, repeats, cache)
    except _Failed as failure:
        return row | {"failure": str(failure)}


def covered(program: Program) -> tuple[list[Mapping[str, Any]], str]:
    """The sites of a program that have a kernel on this platform, and what failed.

    Each has its name, whether the tuned tables have a row for it, and why it is replaced or kept.  Nothing runs, and
    nothing is searched for or read from a cache.
    """
    try:
        with tempfile.TemporaryDirectory() as empty:
            return _child(ROWS, program, 0, Path(empty), searches=False)["sites"], ""
    except _Failed as failure:
        return [], str(failure)


def _first_steps(program: Program, repeats: int, cache: Path) -> Row:
    first: dict[str, list[float]] = {ORIGINAL: [], OPTIMIZED: []}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as empty:
            for what, seconds in first.items():
                seconds.append(_child(what, program, 0, Path(empty), searches=False)["cpu_seconds"])
    found = {what: min(seconds) for what, seconds in first.items()}
    for what in ("searched", "cached"):
        found[what] = _child(OPTIMIZED, program, 0, cache, searches=True)["cpu_seconds"]
    return {"first_step_cpu_seconds": found, "first_step_date": datetime.date.today().isoformat()}


def _child(what: str, program: Program, rounds: int, cache: Path, searches: bool) -> Mapping[str, Any]:
    variables = {
        **environment.ALLOCATOR_SETTINGS, **os.environ,
        "AUTOPALLAS_CACHE_DIR": str(cache), "KERAS_BACKEND": "jax", "TF_CPP_MIN_LOG_LEVEL": "3",
    }  # fmt: skip
    if not searches:
        variables["AUTOPALLAS_AUTOTUNE"] = "0"
    command = [sys.executable, "-m", "benchmarks.programs.child", what, program.name, str(rounds)]
    try:
        done = subprocess.run(
            command, env=variables, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        raise _Failed(f"{what}: no result within {SECONDS:.0f} seconds") from None
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        said = done.stderr.strip().splitlines()
        raise _Failed(f"{what}: {said[-1] if said else f'status {done.returncode}'}")
    found: Mapping[str, Any] = json.loads(lines[-1])
    return found


def verdicts(row: Row) -> list[str]:
    """What a row falls short of, in words; empty where it passes."""
    if row.get("failure"):
        return [f"failed: {row['failure']}"]
    found = []
    ratio, memory = row["cpu_ratio"][0], row["temporary_bytes"]
    if ratio < SLOWEST:
        found.append(f"slower: {ratio:.2f} times as fast")
    if memory[OPTIMIZED] > MEMORY_MOST * memory[ORIGINAL] and ratio < MEMORY_PAID:
        found.append(f"temporary memory {memory[OPTIMIZED] / memory[ORIGINAL]:.2f}")
    first = row["first_step_cpu_seconds"]
    if first[OPTIMIZED] > max(FIRST_STEP_MOST * first[ORIGINAL], first[ORIGINAL] + FIRST_STEP_SECONDS):
        steps = paid_after(row)
        paid = "never paid" if steps is None else f"paid after {steps} steps"
        found.append(f"first step {first[OPTIMIZED] / first[ORIGINAL]:.2f}, {paid}")
    return found


def paid_after(row: Row) -> int | None:
    """The number of steps after which a longer first step is gained back; None where a step gains nothing."""
    first, step = row["first_step_cpu_seconds"], row["cpu_seconds"]
    longer = first[OPTIMIZED] - first[ORIGINAL]
    if longer <= 0:
        return 0
    gain = step[ORIGINAL] - step[OPTIMIZED] if None not in (step[ORIGINAL], step[OPTIMIZED]) else 0.0
    return math.ceil(longer / gain) if gain > 0 else None


def line(row: Row) -> str:
    """A row as one line of text."""
    if row.get("failure"):
        return f"{row['program']:52} {row['failure'][:100]}"
    median, lower, upper = row["cpu_ratio"]
    memory, first = row["temporary_bytes"], row["first_step_cpu_seconds"]
    by_verdict = Counter((site["kind"] or site["op"], site["verdict"]) for site in row["sites"])
    sites = ", ".join(f"{n} {op} {verdict}" for (op, verdict), n in sorted(by_verdict.items()))
    parts = (
        f"{row['program']:48} {median:5.2f} [{lower:.2f}, {upper:.2f}]",
        f"memory {memory[OPTIMIZED] / memory[ORIGINAL]:.2f} (smallest {memory[MEMORY] / memory[ORIGINAL]:.2f})",
        f"first step {first[OPTIMIZED] / first[ORIGINAL]:.2f} of {first[ORIGINAL]:.1f} s",
        f"searching {first['searched']:.1f} s, afterwards {first['cached']:.1f} s",
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
    first = [row["first_step_cpu_seconds"] for row in ran]
    decided = [site for row in ran for site in row["sites"]]
    faster = _mean(row["cpu_ratio"][0] for row in ran)
    used, least = (_mean(m[name] / m[ORIGINAL] for m in memory) for name in (OPTIMIZED, MEMORY))
    begin, cached = (_mean(f[name] / f[ORIGINAL] for f in first) for name in (OPTIMIZED, "cached"))
    return (
        f"{len(ran)} programs, geometric means: {faster:.2f} times as fast; temporary memory {used:.2f}, and "
        f'{least:.2f} under objective "memory"; first step {begin:.2f} without a search, {cached:.2f} with what an '
        "earlier one found. "
        f"{sum(site['verdict'] == 'applied' for site in decided)} of {len(decided)} sites are replaced."
    )


def _mean(values: Iterable[float]) -> float:
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms))
