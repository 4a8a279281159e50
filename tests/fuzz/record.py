"""The ranges of seeds in which nothing was wrong, with the commit at which they were run."""

from __future__ import annotations

import datetime
import json
import subprocess
from pathlib import Path
from typing import Any

import jax

__all__ = ["FILE", "clean_ranges", "recorded", "remember", "unrecorded_changes"]

FILE = Path(__file__).with_name("clean_ranges.json")
_ROOT = Path(__file__).resolve().parents[2]
_COUNTS = ("autopallas", "tests/fuzz/*.py")
"""What a range says something about.  Changes elsewhere leave it true."""


def clean_ranges() -> list[dict[str, Any]]:
    """All that is recorded."""
    ranges: list[dict[str, Any]] = json.loads(FILE.read_text())
    return ranges


def recorded(first: int, programs: int) -> bool:
    """Whether a range is recorded for the code as it is, and this JAX."""
    mine = [r for r in clean_ranges() if r["commit"] == _commit() and r["jax"] == jax.__version__]
    covered = {seed for r in mine for seed in range(r["first"], r["first"] + r["programs"])}
    return covered.issuperset(range(first, first + programs))


def remember(first: int, programs: int, replaced: int) -> None:
    """Writes that a range is clean; one that goes on where another of the same commit ends is joined to it."""
    entry = {
        "first": first,
        "programs": programs,
        "replaced": replaced,
        "commit": _commit(),
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
    }
    ranges = clean_ranges()
    for other in ranges:
        alike = all(other[name] == entry[name] for name in ("commit", "jax"))
        if alike and other["first"] + other["programs"] == first:
            other |= {"programs": other["programs"] + programs, "replaced": other["replaced"] + replaced}
            other["date"] = entry["date"]
            break
    else:
        ranges.append(entry)
    lines = ",\n".join(f"  {json.dumps(r)}" for r in ranges)
    FILE.write_text(f"[\n{lines}\n]\n")


def unrecorded_changes() -> str:
    """What differs from the last commit in the code that a range says something about."""
    return _git("status", "--porcelain", "--", *_COUNTS)


def _commit() -> str:
    """The last commit that changed that code."""
    return _git("log", "-1", "--format=%h", "--", *_COUNTS)


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=_ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()
