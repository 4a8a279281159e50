"""The format of the checked-in tables, and how a row is found in one.  Exists once, for all operations.

A table is ``device -> {(implementation, direction, dtype, bucket, invariants): Row}``.  Buckets are ordered ranges of
sizes, never exact shapes; the first one that contains the sizes wins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from autopallas.sites.device import Device

__all__ = [
    "DEVICES",
    "LEAST_MEMORY",
    "MEMORY_SLOWDOWN",
    "Bucket",
    "Evidence",
    "Found",
    "Key",
    "Row",
    "Table",
    "bucket_of",
    "lookup",
    "table_device",
]

Evidence: TypeAlias = Literal["measured", "simulated", "estimated"]
Key: TypeAlias = tuple[str, str, str, str, str]
"""(implementation, direction, dtype, bucket, invariants)"""

LEAST_MEMORY = ", least memory"
"""What the invariants of a second row of a key end in: that of the candidate of least memory, where it is another one
than the fastest, and at most :data:`MEMORY_SLOWDOWN` times as slow as the original.  Objective "memory" asks for it."""

MEMORY_SLOWDOWN = 1.3
"""Under objective "memory", the most time that a replacement may cost relative to the original."""

DEVICES = ("cpu", "NVIDIA H100", "NVIDIA", "TPU v4", "TPU v5e", "TPU v5p", "TPU v6e", "TPU v7x")
"""The devices that tables know.  "NVIDIA" is any of them that has no rows of its own: its rows are never exact."""

_GENERIC = "NVIDIA"
_TPUS = {"TPU v5 lite": "TPU v5e", "TPU v5": "TPU v5p", "TPU v6 lite": "TPU v6e", "TPU7x": "TPU v7x"}
"""What JAX calls devices that tables call otherwise."""


def table_device(device: Device) -> str:
    """The table's name of a device.  All CPUs share one, and so do all H100s.

    Example:
      >>> table_device(Device("tpu", "TPU v5 lite")), table_device(Device("gpu", "NVIDIA H100 80GB HBM3"))
      ('TPU v5e', 'NVIDIA H100')
    """
    if device.platform == "cpu":
        return "cpu"
    if device.platform == "gpu":
        words = device.kind.split()
        return "NVIDIA H100" if "H100" in words else "NVIDIA" if "NVIDIA" in words else device.kind
    return _TPUS.get(device.kind, device.kind)


@dataclass(frozen=True, slots=True)
class Row:
    """Block sizes, and what the kernel and the original cost with them on that device and bucket.

    Times are microseconds per call, bytes are of temporary memory.  What rows of CPUs hold for, by
    :mod:`autopallas.tuning.coverage`:

    Attributes:
      extensions: of the processor, as :func:`autopallas.tuning.processor.vector_extensions` has them; "unknown" where
        it says nothing; None: not stated, which counts as "avx2", with which the first rows were measured.
      batch: how many independent parts the measured original had, such as sequences; 1 where there is no such axis.
      spelling: the matrix products of the measured original in the notation of einsum, where they are others than those
        of the operation's cases.
    """

    block_sizes: Any
    kernel_us: float
    original_us: float
    kernel_bytes: int
    original_bytes: int
    evidence: Evidence
    date: str
    versions: str
    extensions: str | None = None
    batch: int = 1
    spelling: str = ""

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


def lookup(table: Table, device: str, key: Key, buckets: Sequence[Bucket], objective: str = "time") -> Found | None:
    """The row of ``key``, else that of the nearest bucket in the order of ``buckets`` with all else equal, else None.

    Of two equally near buckets the smaller one, that is, the earlier, is taken.

    Args:
      table: the rows.
      device: as :func:`table_device` names it.
      key: where the table files what is asked for.
      buckets: in order.
      objective: under "memory" the row of least memory is taken, where there is one beside that of least time.
    """
    implementation, direction, dtype, bucket, invariants = key
    endings = (LEAST_MEMORY, "") if objective == "memory" else ("",)
    names = [b.name for b in buckets]
    here = names.index(bucket) if bucket in names else None
    order = [bucket] if here is None else sorted(names, key=lambda n: (abs(names.index(n) - here), names.index(n)))
    for owner in dict.fromkeys((device, _GENERIC) if device.startswith(_GENERIC) else (device,)):
        rows = table.get(owner, {})
        for name in order:
            for ending in endings:
                row = rows.get((implementation, direction, dtype, name, invariants + ending))
                if row is not None:
                    return Found(row, name, "table" if name == bucket and owner != _GENERIC else "nearest")
    return None
