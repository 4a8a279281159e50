"""Writes raw results: every configuration that was tried for every bucket, including failures, as CSV and JSON."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from autopallas.autotune.search import Tried
from autopallas.report.records import plain
from autopallas.sites.spec import SiteSpec, Sizes
from autopallas.tuning.table import Key, Row

__all__ = ["Result", "results_of", "write"]


@dataclass(frozen=True, slots=True)
class Result:
    """One configuration at one place of a table.

    Attributes:
      operation, implementation, direction, dtype, bucket, invariants, device: the place.
      spec: what was computed, in one line.
      block_sizes: the configuration, as JSON.
      outcome: "raced": timed against the original, or simulated; "slower": right, but left out of the race; otherwise
        the stage at which it failed.
      error: how it failed, or why there is no simulation.
      first_us: the time of its first timed run alone.
      kernel_us, original_us, kernel_bytes, original_bytes, evidence: the row, if it was in the race.
      difference: the greatest difference from the reference; empty if nothing was run.
      cycles, vmem_bytes: set if it was compiled ahead of time for a TPU.
      best_for: the objectives for which it is the best: "time", "memory", or both.
    """

    operation: str
    implementation: str
    direction: str
    dtype: str
    bucket: str
    invariants: str
    device: str
    spec: str
    block_sizes: str
    outcome: str
    error: str = ""
    first_us: float | None = None
    kernel_us: float | None = None
    original_us: float | None = None
    kernel_bytes: int | None = None
    original_bytes: int | None = None
    evidence: str = ""
    difference: float | None = None
    cycles: int | None = None
    vmem_bytes: int | None = None
    best_for: str = ""


def results_of(
    operation: str,
    key: Key,
    device: str,
    spec: SiteSpec,
    tried: Sequence[Tried],
    time: Row[Sizes] | None,
    memory: Row[Sizes] | None,
) -> list[Result]:
    """Returns the results of one site.

    Args:
      operation: the operation's name.
      key: the site's place in the table.
      device: the device, as tables name it.
      spec: the site's spec.
      tried: how far each candidate came.
      time, memory: the rows that were chosen, with block sizes by name; ``memory`` only if it is another one.
    """
    found = []
    for one in tried:
        sizes, row = dict(one.block_sizes), one.row
        goals = [] if time is None or dict(time.block_sizes) != sizes else ["time"] + ["memory"] * (memory is None)
        goals += ["memory"] if memory is not None and dict(memory.block_sizes) == sizes else []
        found.append(
            Result(
                operation,
                *key,
                device=device,
                spec=str(spec),
                block_sizes=json.dumps(sizes),
                outcome=one.stage or ("raced" if row is not None else "slower"),
                error=" ".join(one.error.split())[:1000],
                first_us=None if one.microseconds is None else float(f"{one.microseconds:.4g}"),
                kernel_us=None if row is None else row.kernel_us,
                original_us=None if row is None else row.original_us,
                kernel_bytes=one.temporary_bytes if row is None else row.kernel_bytes,
                original_bytes=None if row is None else row.original_bytes,
                evidence="" if row is None else row.evidence,
                difference=one.difference,
                cycles=one.cycles,
                vmem_bytes=one.vmem_bytes,
                best_for="+".join(goals),
            )
        )
    return found


def write(folder: Path, results: Sequence[Result]) -> tuple[Path, Path]:
    """Writes ``results.csv`` and ``results.json``, where the difference of a result that is not finite is a text.

    Raises:
      OSError: files cannot be written to the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    table, data = folder / "results.csv", folder / "results.json"
    with open(table, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Result)])
        writer.writeheader()
        writer.writerows(asdict(result) for result in results)
    rows = [plain(asdict(result) | {"block_sizes": json.loads(result.block_sizes)}) for result in results]
    data.write_text(json.dumps(rows, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return table, data
