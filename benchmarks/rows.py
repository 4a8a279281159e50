"""The rows that a run leaves behind: flat records, as JSON and as CSV."""

from __future__ import annotations

import csv
import datetime
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autopallas.tuning import Measurement, Spread
from benchmarks import environment
from benchmarks.case import ORIGINAL, Benchmark, Candidate, Case


@dataclass(frozen=True, slots=True)
class Machine:
    """What all rows of a run share.  ``peaks``: floating-point operations per second of a matmul, by dtype."""

    backend: str
    device: str
    processor: str
    vector_extensions: str
    versions: Mapping[str, str]
    flags: Mapping[str, str]
    date: str
    peaks: Mapping[str, float]

    @staticmethod
    def current(peaks: Mapping[str, float]) -> Machine:
        return Machine(
            environment.backend(),
            environment.device(),
            environment.processor(),
            environment.vector_extensions(),
            environment.versions(),
            environment.flags(),
            datetime.date.today().isoformat(),
            peaks,
        )


@dataclass(frozen=True, slots=True)
class Row:
    """One candidate of one case.  docs/benchmarks.md says what each field means; None is "not measured"."""

    kernel: str
    candidate: str
    implementation: str
    direction: str
    shape: str
    dtype: str
    mask: str
    backend: str
    device: str
    processor: str
    vector_extensions: str
    block_sizes: Mapping[str, Any] | None
    compile_seconds: float | None
    first_step_seconds: float | None
    rounds: int
    wall_seconds: float | None
    wall_seconds_lower: float | None
    wall_seconds_upper: float | None
    cpu_seconds: float | None
    cpu_seconds_lower: float | None
    cpu_seconds_upper: float | None
    wall_ratio: float | None
    wall_ratio_lower: float | None
    wall_ratio_upper: float | None
    cpu_ratio: float | None
    cpu_ratio_lower: float | None
    cpu_ratio_upper: float | None
    teraflops: float | None
    peak_teraflops: float | None
    fraction_of_peak: float | None
    temporary_bytes: int | None
    original_temporary_bytes: int | None
    temporary_ratio: float | None
    resident_bytes: int | None
    original_resident_bytes: int | None
    resident_ratio: float | None
    max_error: float | None
    mean_error: float | None
    failure: str | None
    load: float
    evidence: str
    date: str
    versions: Mapping[str, str]
    flags: Mapping[str, str]


def rows_of(
    case: Case, benchmark: Benchmark, candidates: Mapping[str, Candidate], measured: Measurement, machine: Machine
) -> list[Row]:
    """The rows of one case, the original first; resident memory is not known yet."""
    peak = machine.peaks.get(case.dtype)
    rows = []
    for name, candidate in candidates.items():
        timing = measured[name]
        chosen = candidate.chosen()
        wall = timing.spread("wall")
        speed = benchmark.operations(case) / wall.median if wall else None
        difference = timing.difference
        row = Row(
            kernel=case.kernel,
            candidate=name,
            implementation=chosen.implementation,
            direction=case.direction,
            shape=case.shape,
            dtype=case.dtype,
            mask=case.mask,
            backend=machine.backend,
            device=machine.device,
            processor=machine.processor,
            vector_extensions=machine.vector_extensions,
            block_sizes=chosen.block_sizes,
            compile_seconds=_rounded(timing.compile_seconds),
            first_step_seconds=_rounded(timing.first_step_seconds),
            rounds=len(timing.wall),
            **_spread("wall_seconds", wall),
            **_spread("cpu_seconds", timing.spread("cpu")),
            **_spread("wall_ratio", measured.ratio(name, clock="wall")),
            **_spread("cpu_ratio", measured.ratio(name, clock="cpu")),
            teraflops=_rounded(speed and speed / 1e12),
            peak_teraflops=_rounded(peak and peak / 1e12),
            fraction_of_peak=_rounded(speed / peak if speed and peak else None),
            temporary_bytes=timing.temporary_bytes,
            original_temporary_bytes=measured[ORIGINAL].temporary_bytes,
            temporary_ratio=_ratio(timing.temporary_bytes, measured[ORIGINAL].temporary_bytes),
            resident_bytes=None,
            original_resident_bytes=None,
            resident_ratio=None,
            max_error=_rounded(difference.maximum if difference else None),
            mean_error=_rounded(difference.mean if difference else None),
            failure=str(timing.failure) if timing.failure else None,
            load=round(os.getloadavg()[0], 2),
            evidence="measured",
            date=machine.date,
            versions=machine.versions,
            flags=machine.flags,
        )
        rows.append(row)
    return rows


def with_resident_memory(row: Row, own: int | None, original: int | None) -> Row:
    """The row with the peak resident memory that was measured apart."""
    return replace(row, resident_bytes=own, original_resident_bytes=original, resident_ratio=_ratio(own, original))


def write(rows: Sequence[Row], directory: Path, stem: str) -> tuple[Path, Path]:
    """Writes ``<stem>.json``, a list of objects, and ``<stem>.csv``, one line each; returns their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    records = [_record(row) for row in rows]
    as_json, as_csv = directory / f"{stem}.json", directory / f"{stem}.csv"
    as_json.write_text("[\n" + ",\n".join(json.dumps(record, allow_nan=False) for record in records) + "\n]\n")
    with as_csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=Row.__slots__, lineterminator="\n")
        writer.writeheader()
        for record in records:
            writer.writerow({k: json.dumps(v) if isinstance(v, dict) else v for k, v in record.items()})
    return as_json, as_csv


def _record(row: Row) -> dict[str, Any]:
    """The row as JSON can hold it: an infinite error is a string, as JSON has no infinity."""
    record: dict[str, Any] = {}
    for name in Row.__slots__:
        value = getattr(row, name)
        if isinstance(value, Mapping):
            value = dict(value)
        elif isinstance(value, float) and value in (float("inf"), float("-inf")):
            value = str(value)
        record[name] = value
    return record


def _spread(name: str, spread: Spread | None) -> dict[str, Any]:
    """The three fields of a median with its quartiles."""
    values = (spread.median, spread.lower, spread.upper) if spread else (None, None, None)
    return {name + suffix: _rounded(value) for suffix, value in zip(("", "_lower", "_upper"), values, strict=True)}


def _rounded(value: float | None) -> float | None:
    """Four digits: more than a shared machine can promise."""
    return None if value is None else float(f"{value:.4g}")


def _ratio(own: int | None, original: int | None) -> float | None:
    return None if own is None or not original else _rounded(own / original)
