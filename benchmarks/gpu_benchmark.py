"""What a benchmark of an operation's GPU kernels offers: what is checked, repeated and timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

from autopallas.tuning.table import Key

__all__ = ["MATMUL", "ORIGINAL", "Arguments", "Check", "GpuBenchmark", "Peer", "Timed"]

ORIGINAL, MATMUL = "xla", "matmul"
"""Candidates that every case may have."""

Arguments: TypeAlias = tuple[Any, ...] | Callable[[], tuple[Any, ...]]
"""Arrays, or what makes them: large ones are made when their turn has come."""


@dataclass(frozen=True)
class Check:
    """One comparison: ``function`` is what users run, ``reference`` the same in float32 at the highest precision."""

    name: str
    dtype: str
    direction: str
    function: Callable[..., Any]
    reference: Callable[..., Any]
    arguments: Arguments
    tolerance: float


class Peer(NamedTuple):
    """What the table has of a candidate that is an implementation of the operation, but not the benchmark's own."""

    key: Key
    block_sizes: Any


@dataclass(frozen=True)
class Timed:
    """One case that is timed.

    Attributes:
      name, dtype, direction: say what it is.
      candidates: name -> function; "xla" is what ratios refer to, "matmul" the ceiling.
      block_sizes: of those candidates that are the benchmark's own implementation; the fastest may become a row of the
        table.
      arguments: of all functions.
      operations: floating-point operations that the case cannot do without.
      key: the table's of that implementation, or None.
      peers: the candidates that are other implementations of the operation; each may become a row too.
      batch: the row's: how many independent parts the case has, where its table asks for that.
      bytes_moved: of memory that it cannot do without reading or writing.
      expansion: how many times as much of both the original does, where that is known; for estimates.
      lean: a candidate that the table has as that of least memory where nothing was measured, and how many times as
        much of both it does.
      priority: its place among the headlines, the cases that are timed first; 100 for all others.
    """

    name: str
    dtype: str
    direction: str
    candidates: Mapping[str, Callable[..., Any]]
    block_sizes: Mapping[str, Any]
    arguments: Arguments
    operations: float
    key: Key | None
    bytes_moved: float = 0.0
    expansion: float = 1.0
    lean: tuple[str, float] | None = None
    priority: int = 100
    peers: Mapping[str, Peer] = field(default_factory=dict)
    batch: int = 1


class GpuBenchmark(Protocol):
    """What the module ``benchmarks.gpu_<operation>`` offers; ``small``: shapes for a dry run."""

    IMPLEMENTATION: str

    def smoke(self, small: bool) -> Iterator[Check]:
        """Small cases that run each kernel once."""

    def checks(self, small: bool) -> Iterator[Check]:
        """The grid of shapes."""

    def stressed(self, small: bool) -> Iterator[Check]:
        """What is repeated."""

    def timed(self, small: bool) -> Iterator[Timed]:
        """What is timed, the most important first."""
