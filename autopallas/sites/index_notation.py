"""Index notation: describes how a site reads its operands, and converts them to and from canonical arrays.

A site's operands are arrays as the program has them.  A :data:`View` gives ``(offset, labels)`` for each dimension
of the array: the elements ``offset + mixed radix of the labels``.  Labels are small integers with sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import Field, dataclass, fields, replace
from typing import Any, ClassVar, Self, TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from autopallas.compat import Dtype

Label: TypeAlias = int
Labels: TypeAlias = tuple[Label, ...]
Dimension: TypeAlias = tuple[int, Labels]
View: TypeAlias = tuple[Dimension, ...]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Operand:
    """One use of a site's operand: its position, and the view under which it is read.

    ``fixed`` gives the index of each label of the view that has only one: so every other column is read as columns of
    two labels, of which the second is fixed.
    """

    position: int
    view: View
    fixed: tuple[tuple[Label, int], ...] = ()

    @property
    def labels(self) -> tuple[Label, ...]:
        """Labels along which the use varies."""
        fixed = dict(self.fixed)
        return tuple(label for _, labels in self.view for label in labels if label not in fixed)

    def batched(self, axes: Sequence[int | None], label: tuple[Label, ...]) -> Operand:
        """Returns the same use after vmap has put the axis of operands that have it in front, under a new label."""
        if axes[self.position] is None:
            return self
        return replace(self, view=((0, label), *self.view))


@dataclass(frozen=True, slots=True)
class Positions:
    """Array that is no operand: ``offset + mixed radix`` of some labels, as from an iota."""

    dimension: Dimension
    dtype: Dtype

    @property
    def labels(self) -> tuple[Label, ...]:
        return self.dimension[1]

    def batched(self, axes: Sequence[int | None], label: tuple[Label, ...]) -> Positions:
        return self


Source: TypeAlias = Operand | Positions


class Reader:
    """Base class of dataclasses that say what is read: their fields hold sources, also in tuples and in other readers.

    Nothing else is looked into, such as elementwise programs.
    """

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Field[object]]]

    @property
    def sources(self) -> tuple[Source, ...]:
        """Everything that is read, in the order of the fields."""
        return tuple(sources_in(tuple(getattr(self, f.name) for f in fields(self))))

    def with_sources(self, change: Callable[[Source], Source]) -> Self:
        """Returns the same with ``change(source)`` in the place of each source."""
        return replace(self, **{f.name: _changed(getattr(self, f.name), change) for f in fields(self) if f.init})


def sources_in(value: object) -> Iterator[Source]:
    """Yields a source itself, or all that a reader, or a tuple, holds."""
    if isinstance(value, Operand | Positions):
        yield value
    elif isinstance(value, Reader):
        yield from value.sources
    elif isinstance(value, tuple):
        for item in value:
            yield from sources_in(item)


def _changed(value: T, change: Callable[[Source], Source]) -> T:
    if isinstance(value, Operand | Positions):
        return cast(T, change(value))
    if isinstance(value, Reader):
        return value.with_sources(change)
    if isinstance(value, tuple):
        return cast(T, tuple(_changed(item, change) for item in value))
    return value


def read(
    source: Operand | Positions, operands: Sequence[jax.Array], sizes: Sequence[int], groups: Sequence[Sequence[Label]]
) -> jax.Array:
    """Returns the array with one dimension per group of labels; size 1 where it has none of a group's labels.

    If the array has some labels of a group and lacks others, it is broadcast along those.
    """
    if isinstance(source, Positions):
        offset, labels = source.dimension
        shape = [sizes[a] for a in labels]
        array = (jnp.arange(math.prod(shape), dtype=source.dtype) + jnp.asarray(offset, source.dtype)).reshape(shape)
    else:
        labels, fixed = source.labels, dict(source.fixed)
        array = operands[source.position]
        for axis, (offset, parts) in enumerate(source.view):
            extent = math.prod(sizes[a] for a in parts)
            if extent != array.shape[axis]:
                array = jax.lax.slice_in_dim(array, offset, offset + extent, axis=axis)
        every = [a for _, parts in source.view for a in parts]
        array = array.reshape([sizes[a] for a in every])
        for axis in reversed(range(len(every))):
            if every[axis] in fixed:
                array = jax.lax.index_in_dim(array, fixed[every[axis]], axis, keepdims=False)
    present = [[a for a in group if a in labels] for group in groups]
    array = array.transpose([labels.index(a) for group in present for a in group])
    full = [list(group) if have else [] for group, have in zip(groups, present, strict=True)]
    array = array.reshape([sizes[a] if a in labels else 1 for group in full for a in group])
    array = jnp.broadcast_to(array, [sizes[a] for group in full for a in group])
    return array.reshape([math.prod(sizes[a] for a in group) for group in full])


def write(array: jax.Array, view: View, sizes: Sequence[int], groups: Sequence[Sequence[Label]]) -> jax.Array:
    """Inverts :func:`read` for a result: from one dimension per group to the dimensions of ``view``."""
    order = [a for group in groups for a in group]
    array = array.reshape([sizes[a] for a in order])
    wanted = [a for _, labels in view for a in labels]
    array = array.transpose([order.index(a) for a in wanted])
    return array.reshape([math.prod(sizes[a] for a in labels) for _, labels in view])


def layout(labels: Sequence[Label], sizes: Sequence[int], groups: Sequence[Sequence[Label]]) -> tuple[int, ...]:
    """Returns the order in which an array has the groups of labels in memory, from major to minor.

    A group that the array lacks, or whose extent is 1, follows the one before it.  The order is that of the groups if
    the array has labels of one group between those of another.

    Args:
      labels: those of the array, from major to minor.
      sizes, groups: as in :func:`read`.

    Example:
      >>> batch, length, heads, size = range(4)
      >>> layout((batch, length, heads, size), (2, 256, 8, 64), ((batch,), (heads,), (length,), (size,)))
      (0, 2, 1, 3)
    """
    present = [a for a in labels if sizes[a] > 1]
    full = [[a for a in group if a in present] for group in groups]
    starts = [present.index(group[0]) if group else -1 for group in full]
    if any(present[start : start + len(group)] != group for start, group in zip(starts, full, strict=True) if group):
        return tuple(range(len(groups)))
    for i, group in enumerate(full):
        if not group and i:
            starts[i] = starts[i - 1]
    return tuple(sorted(range(len(groups)), key=starts.__getitem__))


def fill(
    source: Operand,
    array: np.ndarray,
    operands: Sequence[np.ndarray],
    sizes: Sequence[int],
    groups: Sequence[Sequence[Label]],
) -> None:
    """Writes into an operand so that :func:`read` returns ``array``; elements that are not read stay as they are.

    Args:
      source: the use through which it is read.
      array: one dimension per group, of the group's extent, or of size 1 to repeat it along the group.
      operands: the arrays of the site; one is changed.
      sizes, groups: as in :func:`read`.
    """
    order = [a for group in groups for a in group]
    alone = [extent == 1 for extent, group in zip(array.shape, groups, strict=True) for _ in group]
    array = array.reshape([1 if one else sizes[a] for a, one in zip(order, alone, strict=True)])
    labels, fixed = source.labels, dict(source.fixed)
    array = array[tuple(slice(None) if a in labels else 0 for a in order)]
    left = [a for a in order if a in labels]
    array = np.broadcast_to(array, [sizes[a] for a in left]).transpose([left.index(a) for a in labels])
    extents = [math.prod(sizes[a] for a in parts) for _, parts in source.view]
    slices = [slice(offset, offset + n) for (offset, _), n in zip(source.view, extents, strict=True)]
    window: tuple[Any, ...] = (*slices, ...)  # of an array without axes too this is a view, and no scalar
    every = [a for _, parts in source.view for a in parts]
    whole = operands[source.position][window].reshape([sizes[a] for a in every])
    whole[tuple(fixed.get(a, slice(None)) for a in every)] = array
    operands[source.position][window] = whole.reshape(extents)


def summed_to(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns the sum of an array along the axes along which ``shape`` is 1."""
    axes = tuple(i for i, (n, wanted) in enumerate(zip(array.shape, shape, strict=True)) if wanted == 1 != n)
    return jnp.sum(array, axes, keepdims=True) if axes else array
