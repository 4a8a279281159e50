"""What one row of a table says, and where it is filed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Generic, Literal, TypeAlias, TypeVar, cast

from autopallas.sites.spec import BlockSizes

__all__ = [
    "DEVICES",
    "LEAST_MEMORY",
    "MEMORY_SLOWDOWN",
    "Bucket",
    "Evidence",
    "Key",
    "Row",
    "Rows",
    "key_of_least_time",
]

Evidence: TypeAlias = Literal["measured", "quickly measured", "simulated", "estimated"]
"""Rows of tables are never "quickly measured": that is what a short search found on this machine."""
Key: TypeAlias = tuple[str, str, str, str, str]
"""(implementation, direction, dtype, bucket, invariants)"""

S = TypeVar("S", covariant=True)
Other = TypeVar("Other")
"""Block sizes of an operation's class, or by name."""

LEAST_MEMORY = ", least memory"
"""What the invariants of a second row of a key end in: that of the candidate of least memory, where it is another one
than the fastest, and at most :data:`MEMORY_SLOWDOWN` times as slow as the original.  Objective "memory" asks for it."""

MEMORY_SLOWDOWN = 1.3
"""Under objective "memory", the most time that a replacement may cost relative to the original."""

DEVICES = ("cpu", "NVIDIA H100", "NVIDIA", "TPU v4", "TPU v5e", "TPU v5p", "TPU v6e", "TPU v7x")
"""The devices that tables know.  "NVIDIA" is any of them that has no rows of its own: its rows are never exact."""


@dataclass(frozen=True, slots=True)
class Row(Generic[S]):
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

    block_sizes: S
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

    def of(self, block_sizes: Other) -> Row[Other]:
        """The same for other block sizes, or for these in another form."""
        return replace(cast("Row[Other]", self), block_sizes=block_sizes)

    @property
    def speedup(self) -> float:
        return self.original_us / self.kernel_us

    @property
    def measured_with(self) -> str:
        """The vector extensions that the row is for, where it is of a CPU."""
        return self.extensions or "avx2"


Rows: TypeAlias = Mapping[Key, Row[BlockSizes]]
"""The rows of one device."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """A named range of sizes: ``ranges`` gives (lowest, highest), both inclusive, of each size that it bounds."""

    name: str
    ranges: Mapping[str, tuple[int, int]]

    def __contains__(self, sizes: Mapping[str, int]) -> bool:
        return all(low <= sizes[name] <= high for name, (low, high) in self.ranges.items())


def key_of_least_time(key: Key) -> Key:
    """The key of the row of least time, beside which one of least memory may stand."""
    return (*key[:4], key[4].removesuffix(LEAST_MEMORY))
