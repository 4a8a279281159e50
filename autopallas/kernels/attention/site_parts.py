"""The parts that an attention's site consists of beside its queries, keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from autopallas.kernels.attention.spec import Weight
from autopallas.sites.elementwise import ElementwiseProgram
from autopallas.sites.index_notation import Labels, Operand, Reader, Source

__all__ = ["Joined", "KeyBlock", "RowProgram", "RowStatistic", "RowTerm", "ScoreTerm", "SideSource"]


@dataclass(frozen=True, slots=True)
class RowTerm(Reader):
    """A term ``coefficient * f(source)`` of a sum over logarithms, without the key axis and without the scores.

    ``constant``: the coefficient itself.  ``value``: f is the identity.  ``log``: f is the logarithm.
    """

    coefficient: float
    kind: Literal["constant", "value", "log"]
    source: Source | None = None


@dataclass(frozen=True, slots=True)
class ScoreTerm(Reader):
    """A product of further queries and keys, with its own head axis, that is added to the scores.

    Kernels take the concatenation of all head axes.  The queries are multiplied by ``scale``, a power of two or its
    negative, so that nothing is rounded.
    """

    query: Operand
    key: Operand
    head_labels: Labels
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class KeyBlock(Reader):
    """Keys and values of one part of the key axis, with the labels of this part; the parts are concatenated."""

    key: Operand
    value: Operand
    key_labels: Labels


@dataclass(frozen=True, slots=True)
class Joined(Reader):
    """A side input that varies along the keys, one part for each block of keys; None for a part that is not read."""

    parts: tuple[Source | None, ...]

    @property
    def labels(self) -> Labels:
        return tuple(dict.fromkeys(label for part in self.sources for label in part.labels))

    @property
    def first(self) -> Source:
        """One of the parts, which all have the same dtype."""
        return self.sources[0]


SideSource: TypeAlias = Source | Joined
"""Where a side input of the programs comes from."""


@dataclass(frozen=True, slots=True)
class RowStatistic:
    """A number that the kernel computes for each row, as an input of a row program.

    ``sum``: the sum of the exponentials.  ``shift``: the maximum, which is subtracted in them.  ``further``: the spec's
    statistic number ``position``.
    """

    kind: Literal["sum", "shift", "further"]
    position: int = 0

    @property
    def place(self) -> int:
        """Its position among the kernel's numbers for each row."""
        return {"sum": 0, "shift": 1, "further": 2 + self.position}[self.kind]


@dataclass(frozen=True, slots=True)
class RowProgram(Reader):
    """A factor of each row, computed outside the kernel; side input n of the program is number n of ``inputs``.

    Attributes:
      program: computes the factor.
      inputs: what the program reads.
      statistics: further statistics that the kernel computes for each row.
      follows_maximum: whether the factor's derivative runs through a maximum, which kernels do not differentiate.
    """

    program: ElementwiseProgram
    inputs: tuple[Source | RowStatistic, ...]
    statistics: tuple[ElementwiseProgram | tuple[Weight, ...], ...]
    follows_maximum: bool

    @property
    def sums(self) -> list[int]:
        """Positions, among the kernel's numbers for each row, of the statistics that are sums."""
        return [2 + i for i, statistic in enumerate(self.statistics) if isinstance(statistic, tuple)]
