"""Describes how the labels of a site are sharded over the devices of a mesh."""

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
    """Which labels each array of a site has, and which labels may be sharded.

    Attributes:
      operands: every use of an operand.
      results, residuals: the dimensions of each.
      labels: the labels that may be sharded.
      combined: per result, labels that it lacks and over which it need not be summed, since the site does that.
      between: the dimensions of intermediate values, which show how the original shards the computation; empty where
        that is not known.
      rows: labels along which no operand is gathered.
      whole: the reason why nothing may be sharded; empty where something may.

    A site with a ``prelude`` is sharded after it: its operands are what the prelude returns.
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
    """Mesh axes of each sharded label.

    Attributes:
      sizes: the sizes of the mesh's axes.
      axes: per label, the axes over which it is sharded, the outermost first.
    """

    sizes: tuple[tuple[str, int], ...]
    axes: tuple[tuple[Label, tuple[str, ...]], ...]

    def of(self, label: Label) -> tuple[str, ...]:
        """Returns the axes over which a label is sharded."""
        return dict(self.axes).get(label, ())

    def count(self, label: Label) -> int:
        """Returns into how many parts a label is sharded."""
        sizes = dict(self.sizes)
        return math.prod(sizes[axis] for axis in self.of(label))

    def divides(self, labels: Sequence[Label]) -> bool:
        """Returns whether any of the labels is sharded."""
        return any(self.of(label) for label in labels)

    def local(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Returns the sizes of the labels on one device."""
        return tuple(size // self.count(label) for label, size in enumerate(sizes))

    def spec(self, view: View) -> PartitionSpec:
        """Returns how an array with these dimensions is sharded."""
        named = [tuple(axis for label in labels for axis in self.of(label)) for _, labels in view]
        return PartitionSpec(*(axes or None for axes in named))

    def lacking(self, views: Sequence[View], but: frozenset[Label] = frozenset()) -> tuple[str, ...]:
        """Returns the axes over which labels are sharded that are neither in ``views`` nor in ``but``."""
        own = {label for view in views for _, labels in view for label in labels} | but
        return tuple(axis for label, axes in self.axes if label not in own for axis in axes)


@dataclass(frozen=True, slots=True)
class PositionOperand:
    """Array of positions by labels: ``offset + (p // stride) % extent``, where p is the mixed radix of the labels."""

    labels: tuple[Label, ...]
    dtype: Dtype
    offset: int = 0
    stride: int = 1
    extent: int = 2**31 - 1

    @property
    def view(self) -> View:
        return tuple((0, (label,)) for label in self.labels)

    def array(self, sizes: Sequence[int]) -> jax.Array:
        """Returns the positions as an array with one dimension for each label."""
        shape = tuple(sizes[label] for label in self.labels)
        place = jnp.arange(math.prod(shape), dtype=jnp.int32) // self.stride % self.extent + self.offset
        return place.reshape(shape).astype(self.dtype)


class PositionOperands:
    """Collects position arrays as further operands of a site, of which each device gets a part."""

    def __init__(self, operands: int):
        self.counted: list[PositionOperand] = []
        self._operands = operands

    def operand(self, counted: PositionOperand) -> Operand:
        """Returns the operand for some positions."""
        if counted not in self.counted:
            self.counted.append(counted)
        return Operand(self._operands + self.counted.index(counted), counted.view)

    def source(self, source: Operand | Positions, division: Division) -> Operand | Positions:
        """Returns a source as one device reads it: positions along sharded labels become an operand."""
        if isinstance(source, Operand) or not division.divides(source.labels):
            return source
        offset, labels = source.dimension
        return self.operand(PositionOperand(labels, source.dtype, offset))

    @property
    def types(self) -> tuple[Dtype, ...]:
        return tuple(counted.dtype for counted in self.counted)


class Prelude(Protocol):
    """Computation on the operands of some sites that runs before they are sharded."""

    @property
    def reads(self) -> Sequence[frozenset[int]]:
        """For each array that it returns, the positions of the operands that the array is computed from."""

    def __call__(self, operands: Sequence[jax.Array]) -> list[jax.Array]: ...


class Divisible(SiteDescription, Protocol):
    """A site that can be computed in parts."""

    @property
    def sizes(self) -> tuple[int, ...]: ...

    def shardable_axes(self) -> ShardableAxes:
        """Returns which labels its arrays have, and which labels may be sharded."""

    def per_device(self, division: Division) -> tuple[SiteDescription, tuple[PositionOperand, ...]]:
        """Returns the site that each device computes, and the positions that it reads beside the operands."""

    def standalone(self, division: Division) -> SiteDescription:
        """Returns the same as a site that one device can compute without the others, to be measured."""
