"""The format of the checked-in tables, and how a row is found in one.  Exists once, for all operations.

A table is ``device -> {(implementation, direction, dtype, bucket, invariants): Row}``.  Buckets are ordered ranges of
sizes, never exact shapes; the first one that contains the sizes wins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

__all__ = ["Bucket", "Evidence", "Found", "Key", "Row", "Table", "bucket_of", "lookup"]

Evidence: TypeAlias = Literal["measured", "simulated", "estimated"]
Key: TypeAlias = tuple[str, str, str, str, str]
"""(implementation, direction, dtype, bucket, invariants)"""


@dataclass(frozen=True, slots=True)
class Row:
    """Block sizes, and what the kernel and the original cost with them on that device and bucket.

    Times are microseconds per call, bytes are of temporary memory.
    """

    block_sizes: Any
    kernel_us: float
    original_us: float
    kernel_bytes: int
    original_bytes: int
    evidence: Evidence
    date: str
    versions: str

    @property
    def speedup(self) -> float:
        return self.original_us / self.kernel_us


Table: TypeAlias = Mapping[str, Mapping[Key, Row]]


@dataclass(frozen=True, slots=True)
class Bucket:
    """A named range of sizes: ``ranges`` gives (lowest, highest), both inclusive, of each size that it bounds."""

    name: str
    ranges: Mapping[str, tuple[int, int]]

    def __contains__(self, sizes: Mapping[str, int]) -> bool:
        return all(low <= sizes[name] <= high for name, (low, high) in self.ranges.items())


def bucket_of(sizes: Mapping[str, int], buckets: Sequence[Bucket]) -> Bucket | None:
    """The first bucket that contains the sizes."""
    return next((b for b in buckets if sizes in b), None)


@dataclass(frozen=True, slots=True)
class Found:
    """A row, and whether its bucket is the one asked for ("table") or the "nearest" that has a row."""

    row: Row
    bucket: str
    source: Literal["table", "nearest"]


def lookup(
    table: Table,
    device: str,
    key: Key,
    buckets: Sequence[Bucket],
) -> Found | None:
    """The row of ``key``, else that of the nearest bucket in the order of ``buckets`` with all else equal, else None.

    Of two equally near buckets the smaller one, that is, the earlier, is taken.
    """
    rows = table.get(device, {})
    implementation, direction, dtype, bucket, invariants = key
    if key in rows:
        return Found(rows[key], bucket, "table")
    names = [b.name for b in buckets]
    if bucket not in names:
        return None
    here = names.index(bucket)
    for name in sorted(names, key=lambda n: (abs(names.index(n) - here), names.index(n))):
        row = rows.get((implementation, direction, dtype, name, invariants))
        if row is not None:
            return Found(row, name, "nearest")
    return None
