"""Defines what one row of a table says, and where it is filed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Generic, Literal, TypeAlias, TypeVar, cast

from autopallas import compat
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
    "jax_line",
    "key_of_least_time",
    "running_jax",
]

Evidence: TypeAlias = Literal["measured", "quickly measured", "simulated", "estimated"]
"""Kind of evidence.  Rows of tables are never "quickly measured": that is what a short search on this machine gives."""
Key: TypeAlias = tuple[str, str, str, str, str]
"""(implementation, direction, dtype, bucket, invariants)"""

S = TypeVar("S", covariant=True)
Other = TypeVar("Other")
"""Block sizes of an operation's class, or by name."""

LEAST_MEMORY = ", least memory"
"""Suffix of the invariants of a key's second row: that of the candidate of least memory, if it is not the fastest and
at most :data:`MEMORY_SLOWDOWN` times as slow as the original.  Objective "memory" asks for it."""

MEMORY_SLOWDOWN = 1.3
"""Largest time relative to the original that a replacement may take under objective "memory"."""

DEVICES = (
    "cpu",
    "NVIDIA H100",
    "NVIDIA H200",
    "NVIDIA GH200",
    "NVIDIA",
    "TPU v4",
    "TPU v5e",
    "TPU v5p",
    "TPU v6e",
    "TPU v7x",
)
"""Devices that tables know.  "NVIDIA" is any NVIDIA device without rows of its own: its rows are never exact."""


@dataclass(frozen=True, slots=True)
class Row(Generic[S]):
    """Block sizes, and what the kernel and the original cost with them on that device and bucket.

    Times are microseconds per call, bytes are of temporary memory.  These attributes tell what rows of CPUs hold for,
    by :mod:`autopallas.tuning.coverage`:

    Attributes:
      extensions: the processor's, as :func:`autopallas.tuning.processor.vector_extensions` names them; "unknown" if
        it says nothing; None: not stated, which counts as "avx2", with which the first rows were measured.
      batch: how many independent parts the measured original had, such as sequences; 1 if there is no such axis.
      spelling: the matrix products of the measured original in einsum notation, if they differ from those of the
        operation's cases.

    A ratio that one process measures differs from that of the next by a tenth and more.  So the times of a row may be
    those of the median of several processes:

    Attributes:
      processes: how many measured it.
      lower_gain: the lower quartile of their gains in time; None if there was one process.
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
    processes: int = 1
    lower_gain: float | None = None

    def of(self, block_sizes: Other) -> Row[Other]:
        """Returns the row with other block sizes, or with these in another form."""
        return replace(cast("Row[Other]", self), block_sizes=block_sizes)

    @property
    def speedup(self) -> float:
        return self.original_us / self.kernel_us

    @property
    def assured_gain(self) -> float:
        """Gain in time that can be relied on: the lower quartile of several processes, or what one measured."""
        return self.speedup if self.lower_gain is None else min(self.lower_gain, self.speedup)

    @property
    def measured_with(self) -> str:
        """Vector extensions that the row is for, if it is of a CPU."""
        return self.extensions or "avx2"

    @property
    def jax_line(self) -> str:
        """Minor version of JAX that the row was measured with."""
        return jax_line(self.versions)


Rows: TypeAlias = Mapping[Key, Row[BlockSizes]]
"""Rows of one device."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """A named range of sizes: ``ranges`` gives (lowest, highest), both inclusive, of each size that it bounds."""

    name: str
    ranges: Mapping[str, tuple[int, int]]

    def __contains__(self, sizes: Mapping[str, int]) -> bool:
        return all(low <= sizes[name] <= high for name, (low, high) in self.ranges.items())


def jax_line(versions: str) -> str:
    """Returns the minor version of JAX in a row's versions; empty if there is none.

    Example:
      >>> jax_line("jax 0.12.0.1"), jax_line("jax 0.10.2, libtpu 0.0.34"), jax_line("")
      ('0.12', '0.10', '')
    """
    found = re.match(r"jax (\d+\.\d+)\b", versions)
    return found[1] if found else ""


def running_jax() -> str:
    """Returns the version of JAX that runs, as rows state it."""
    return f"jax {compat.versions()['jax']}"


def key_of_least_time(key: Key) -> Key:
    """Returns the key of the row of least time, beside which there may be one of least memory."""
    return (*key[:4], key[4].removesuffix(LEAST_MEMORY))
