"""Some rows of an array: along which axis, which of them, and how they are taken out and put back among zeros."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import GatherScatterMode

from autopallas.compat import JaxprEqn, Literal, Var
from autopallas.numerics.casts import counts_exactly

__all__ = ["SELECTIONS", "Rows", "groups", "picked", "piece", "reshaped", "rolled", "selection", "window"]

Atom = Var | Literal

SELECTIONS = frozenset({"slice", "dynamic_slice", "gather"})
"""Primitives that may select rows."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Some positions along an axis of an array.

    Attributes:
      axis: the axis; of an array whose axis is to be split first, that one.
      parts: the sizes into which it is split; one, if it is not.
      part: of which of them positions are selected.
      start: the first position, or the variable that holds it; with ``mode`` the variable that holds all of them,
        [size, 1].
      size, stride: how many positions, and the distance between them.  Behind the last position comes the first: as
        many as there are, from another start, are all of them, rolled.
      mode: of the gather that picks positions by index, or None.
      fill: what rows out of range are filled with; then ``mode`` is that of the gather which picks others in their
        place.  Going back, they are dropped.
    """

    axis: int
    parts: tuple[int, ...]
    part: int
    start: int | Var
    size: int
    stride: int = 1
    mode: GatherScatterMode | None = None
    fill: float | None = None

    @property
    def more(self) -> int:
        """How many axes more there are after splitting."""
        return len(self.parts) - 1

    @property
    def all(self) -> bool:
        """Whether all rows are there, in another order."""
        return self.mode is None and self.stride == 1 and self.size == self.parts[self.part]

    @property
    def choice(self) -> tuple[Hashable, ...]:
        """What is selected, wherever the axis is."""
        return self.parts[self.part], self.start, self.size, self.stride, self.mode, self.fill is None

    def filled(self, array: jax.Array, start: jax.Array, fill: float) -> jax.Array:
        """What is selected, with ``fill`` in the rows whose index is out of range."""
        own, last = self.axis + self.part, self.parts[self.part] - 1
        index = lax.reshape(start, (self.size,))
        within = lax.bitwise_and(lax.ge(index, lax.full_like(index, 0)), lax.le(index, lax.full_like(index, last)))
        within = lax.broadcast_in_dim(within, array.shape, (own,))
        return lax.select(within, array, lax.full_like(array, fill))

    def at(self, axis: int) -> Rows:
        return replace(self, axis=axis)

    def shape(self, before: Sequence[int]) -> tuple[int, ...]:
        """The shape of what is selected."""
        chosen = [self.size if p == self.part else n for p, n in enumerate(self.parts)]
        return *before[: self.axis], *chosen, *before[self.axis + 1 :]

    def moved(self, axis: int) -> int:
        """Where another axis is afterwards."""
        return axis if axis < self.axis else axis + self.more

    def varies(self, shape: Sequence[int], whole: Sequence[int]) -> bool:
        """Whether an operand has the axis of an elementwise result of the shape ``whole``."""
        return len(shape) == len(whole) and shape[self.axis] == whole[self.axis]

    def fits(self, shape: Sequence[int], whole: Sequence[int]) -> bool:
        """Whether an operand of an elementwise result can be read at the rows; one that is repeated cannot be split."""
        return not shape or self.varies(shape, whole) or not self.more

    def select(self, array: jax.Array, start: jax.Array | None = None) -> jax.Array:
        """``array`` at the positions; ``start`` is the value of a variable one."""
        own = self.axis + self.part
        if self.more:
            array = lax.reshape(array, (*array.shape[: self.axis], *self.parts, *array.shape[self.axis + 1 :]))
        if isinstance(self.start, int) and self.all:
            return _rolled(array, self.start, own)
        if isinstance(self.start, int):
            stop = self.start + (self.size - 1) * self.stride + 1
            return lax.slice_in_dim(array, self.start, stop, self.stride, own)
        assert start is not None
        if self.mode is not None:
            kept, sizes = tuple(d for d in range(array.ndim) if d != own), list(array.shape)
            sizes[own] = 1
            numbers = lax.GatherDimensionNumbers(kept, (own,), (own,))
            return lax.gather(array, start, numbers, tuple(sizes), mode=self.mode)
        sizes = [self.size if d == own else n for d, n in enumerate(array.shape)]
        taken: jax.Array = lax.dynamic_slice_p.bind(
            array, *_starts(start, own, array.ndim), slice_sizes=tuple(sizes)
        )
        return taken

    def put(self, array: jax.Array, before: Sequence[int], start: jax.Array | None = None) -> jax.Array:
        """The inverse: an array of the shape ``before``, zero elsewhere."""
        own = self.axis + self.part
        full = (*before[: self.axis], *self.parts, *before[self.axis + 1 :])
        if isinstance(self.start, int) and self.all:
            array = _rolled(array, self.size - self.start, own)
        elif isinstance(self.start, int):
            rest = full[own] - self.start - (self.size - 1) * self.stride - 1
            config = [(self.start, rest, self.stride - 1) if d == own else (0, 0, 0) for d in range(len(full))]
            array = lax.pad(array, jnp.zeros((), array.dtype), config)
        elif self.mode is not None:
            assert start is not None
            kept = tuple(d for d in range(len(full)) if d != own)
            numbers = lax.ScatterDimensionNumbers(kept, (own,), (own,))
            array = lax.scatter_add(jnp.zeros(full, array.dtype), start, array, numbers, mode=self.mode)
        else:
            assert start is not None
            zeros = jnp.zeros(full, array.dtype)
            array = lax.dynamic_update_slice_p.bind(zeros, array, *_starts(start, own, len(full)))
        return lax.reshape(array, tuple(before)) if self.more else array


def _rolled(array: jax.Array, start: int, axis: int) -> jax.Array:
    """An array whose first position along an axis is ``start``."""
    parts = (lax.slice_in_dim(array, start, None, 1, axis), lax.slice_in_dim(array, 0, start, 1, axis))
    return lax.concatenate(parts, axis)


def _starts(start: jax.Array, axis: int, rank: int) -> list[jax.Array]:
    return [start if d == axis else jnp.zeros((), start.dtype) for d in range(rank)]


def selection(equation: JaxprEqn) -> Rows | None:
    """The rows that an equation selects along one axis."""
    name, params = equation.primitive.name, equation.params
    if name not in SELECTIONS:
        return None
    before, after = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    if name == "dynamic_slice":
        return window(equation.invars[1:], before, after)
    if name == "gather":
        numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
        own = numbers.offset_dims, numbers.collapsed_slice_dims, numbers.start_index_map
        whole = all(m in (n, 1) for n, m in zip(before, sizes, strict=True))
        batching = numbers.operand_batching_dims
        indices, fill = equation.invars[1], params["fill_value"]
        return picked(indices, own, batching, before, after, params["mode"], fill) if whole else None
    strides = params["strides"] or (1,) * len(before)
    changed = [d for d, (n, m) in enumerate(zip(before, after, strict=True)) if n != m]
    if len(changed) != 1:
        return None
    (axis,) = changed
    size = after[axis]
    return Rows(axis, (before[axis],), 0, int(params["start_indices"][axis]), size, strides[axis] if size > 1 else 1)


def piece(equation: JaxprEqn, variable: Var) -> tuple[Atom, Rows] | None:
    """The array of which an equation's result is a part along one axis, and which part."""
    source = equation.invars[0] if equation.invars else None
    if source is not None and equation.primitive.name == "slice":
        rows = selection(equation)
        return None if rows is None else (source, rows)
    if source is not None and equation.primitive.name == "split":
        axis, sizes = equation.params["axis"], equation.params["sizes"]
        position = next(i for i, v in enumerate(equation.outvars) if v is variable)
        start, size = sum(map(int, sizes[:position])), int(sizes[position])
        return source, Rows(axis, (source.aval.shape[axis],), 0, start, size)
    return None


def rolled(pieces: Sequence[tuple[Atom, Rows] | None], axis: int) -> tuple[Var, Rows] | None:
    """What an array is that is put together of two ``pieces`` of another along an axis: that one, rolled."""
    known = [found for found in pieces if found is not None]
    if len(pieces) != 2 or len(known) != 2:
        return None
    (source, first), (other, second) = known
    whole = first.parts[0]
    if source is not other or not isinstance(source, Var) or not isinstance(first.start, int) or not first.start:
        return None
    if (first.axis, first.more, first.stride, first.mode) != (axis, 0, 1, None) or first.start + first.size != whole:
        return None
    if replace(second, stride=1) != replace(first, start=0, size=first.start) or second.stride != 1:
        return None
    return source, replace(first, size=whole)


def window(starts: Sequence[Atom], whole: Sequence[int], part: Sequence[int]) -> Rows | None:
    changed = [d for d, (n, m) in enumerate(zip(whole, part, strict=True)) if n != m]
    if len(changed) != 1:
        return None
    (axis,) = changed
    start = starts[axis]
    if isinstance(start, Literal):  # a start behind the last possible one is that one
        return Rows(axis, (whole[axis],), 0, max(0, min(int(start.val), whole[axis] - part[axis])), part[axis])
    return Rows(axis, (whole[axis],), 0, start, part[axis])


def picked(
    indices: Atom, own: tuple[Sequence[int], Sequence[int], Sequence[int]], batching: Sequence[int],
    whole: Sequence[int], part: Sequence[int], mode: GatherScatterMode, fill: float | None = None,
) -> Rows | None:  # fmt: skip
    """The rows of a gather along one axis, whole otherwise, at indices [size, 1]; ``own``: the dimensions of its result
    (or of a scatter's updates) that are not picked, and the axis twice; ``fill``: of rows out of range, NaN if None."""
    kept, axes, mapped = own
    if len(axes) != 1 or axes != mapped or batching or isinstance(indices, Literal):
        return None
    (axis,) = axes
    shape = indices.aval.shape
    if axis < 0 or len(shape) != 2 or shape[1] != 1 or tuple(kept) != tuple(d for d in range(len(whole)) if d != axis):
        return None
    if tuple(part) != (*whole[:axis], shape[0], *whole[axis + 1 :]):
        return None
    if "FILL" not in str(mode).upper():
        return Rows(axis, (whole[axis],), 0, indices, shape[0], mode=mode)
    if not counts_exactly(indices.aval.dtype, whole[axis] - 1):
        return None
    own_fill = math.nan if fill is None else float(fill)
    return Rows(axis, (whole[axis],), 0, indices, shape[0], mode=lax.GatherScatterMode.CLIP, fill=own_fill)


def groups(shape: Sequence[int], axis: int) -> list[tuple[tuple[int, ...], int, int]]:
    """Runs of axes that hold one: their sizes, which of them it is, and where they begin; alone first."""
    found = [(tuple(shape[i:j]), axis - i, i) for i in range(axis + 1) for j in range(axis + 1, len(shape) + 1)]
    return sorted(found, key=lambda g: len(g[0]))


def reshaped(before: Sequence[int], after: Sequence[int], rows: Rows) -> Rows | None:
    """The rows of a reshape's operand that give those of its result."""
    first = math.prod(after[: rows.axis])
    for axis, size in enumerate(before):
        if math.prod(before[:axis]) == first and size == after[rows.axis]:
            return rows.at(axis)
    for parts, part, begin in groups(after, rows.axis):
        for axis, size in enumerate(before):
            if size == math.prod(parts) and math.prod(before[:axis]) == math.prod(after[:begin]):
                return replace(rows, axis=axis, parts=parts, part=part)
    return None
