"""How the labels of a site are divided among the devices of a mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from autopallas.compat import Dtype
from autopallas.sites.calls import SiteDescription
from autopallas.sites.index_notation import Label, Operand, Positions, View

__all__ = ["Divisible", "Division", "PositionOperand", "PositionOperands", "Prelude", "ShardableAxes"]


@dataclass(frozen=True, slots=True)
class ShardableAxes:
    """Where the labels of a site are, and which may be divided.

    Attributes:
      operands: every use of an operand.
      results, residuals: the dimensions of each.
      labels: those that may be divided.
      combined: per result, labels that it lacks and over which it need not be summed: the site sees to that.
      between: the dimensions of values in between, by which it is known how the original divides the computation; empty
        where none can be told.
      rows: labels along which no operand is gathered.
      whole: why nothing may be divided; empty where something may.

    A site with a ``prelude`` is divided behind that: its operands are what the prelude gives.
    """

    operands: tuple[Operand, ...]
    results: tuple[View, ...]
    residuals: tuple[View, ...]
    labels: frozenset[Label]
    combined: tuple[frozenset[Label], ...]
    between: tuple[View, ...] = ()
    rows: frozenset[Label] = frozenset()
    whole: str = ""


@dataclass(frozen=True, slots=True)
class Division:
    """Mesh axes per label, for the labels that are divided.

    Attributes:
      sizes: of the mesh's axes.
      axes: per label, the axes over which it is divided, the outermost first.
    """

    sizes: tuple[tuple[str, int], ...]
    axes: tuple[tuple[Label, tuple[str, ...]], ...]

    def of(self, label: Label) -> tuple[str, ...]:
        """The axes over which a label is divided."""
        return dict(self.axes).get(label, ())

    def count(self, label: Label) -> int:
        """Into how many parts a label is divided."""
        sizes = dict(self.sizes)
        return math.prod(sizes[axis] for axis in self.of(label))

    def divides(self, labels: Sequence[Label]) -> bool:
        """Whether any of some labels is divided."""
        return any(self.of(label) for label in labels)

    def local(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The sizes of labels on one device."""
        return tuple(size // self.count(label) for label, size in enumerate(sizes))

    def spec(self, view: View) -> PartitionSpec:
        """How an array with these dimensions is divided."""
        named = [tuple(axis for label in labels for axis in self.of(label)) for _, labels in view]
        return PartitionSpec(*(axes or None for axes in named))

    def lacking(self, views: Sequence[View], but: frozenset[Label] = frozenset()) -> tuple[str, ...]:
        """The axes over which something is divided that has none of these dimensions."""
        own = {label for view in views for _, labels in view for label in labels} | but
        return tuple(axis for label, axes in self.axes if label not in own for axis in axes)


@dataclass(frozen=True, slots=True)
class PositionOperand:
    """Positions in an array of labels: ``offset + (p // stride) % extent`` with p the mixed radix of the labels."""

    labels: tuple[Label, ...]
    dtype: Dtype
    offset: int = 0
    stride: int = 1
    extent: int = 2**31 - 1

    @property
    def view(self) -> View:
        return tuple((0, (label,)) for label in self.labels)

    def array(self, sizes: Sequence[int]) -> jax.Array:
        """One dimension for each label."""
        shape = tuple(sizes[label] for label in self.labels)
        place = jnp.arange(math.prod(shape), dtype=jnp.int32) // self.stride % self.extent + self.offset
        return place.reshape(shape).astype(self.dtype)


class PositionOperands:
    """Positions as further operands of a site of which each device has a part."""

    def __init__(self, operands: int):
        self.counted: list[PositionOperand] = []
        self._operands = operands

    def operand(self, counted: PositionOperand) -> Operand:
        """The operand that gives some positions."""
        if counted not in self.counted:
            self.counted.append(counted)
        return Operand(self._operands + self.counted.index(counted), counted.view)

    def source(self, source: Operand | Positions, division: Division) -> Operand | Positions:
        """A source on one device: positions along divided labels are an operand."""
        if isinstance(source, Operand) or not division.divides(source.labels):
            return source
        offset, labels = source.dimension
        return self.operand(PositionOperand(labels, source.dtype, offset))

    @property
    def types(self) -> tuple[Dtype, ...]:
        return tuple(counted.dtype for counted in self.counted)


class Prelude(Protocol):
    """What some sites compute of their operands before they are divided."""

    @property
    def reads(self) -> Sequence[frozenset[int]]:
        """For each array that it gives, the positions of the operands that it is computed from."""

    def __call__(self, operands: Sequence[jax.Array]) -> list[jax.Array]: ...


class Divisible(SiteDescription, Protocol):
    """A site that can say how it is computed in parts."""

    @property
    def sizes(self) -> tuple[int, ...]: ...

    def shardable_axes(self) -> ShardableAxes:
        """Where its labels are, and which may be divided."""

    def per_device(self, division: Division) -> tuple[SiteDescription, tuple[PositionOperand, ...]]:
        """What each device computes, and what it reads beside the operands."""

    def standalone(self, division: Division) -> SiteDescription:
        """The same as something that one device can do without the others, to be measured."""
