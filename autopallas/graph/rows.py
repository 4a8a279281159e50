"""Describes some rows of an array: their axis, which rows, and how to select them or put them back among zeros."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import GatherScatterMode

from autopallas.compat import JaxprEqn, Literal, Var
from autopallas.numerics.casts import counts_exactly

__all__ = [
    "REDUCTIONS",
    "SELECTIONS",
    "Picked",
    "Rows",
    "groups",
    "layout_of",
    "picked",
    "picked_from_several",
    "picked_labels",
    "piece",
    "reshaped",
    "rolled",
    "selection",
    "window",
]

Atom = Var | Literal

REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "argmax"})
"""Primitives that reduce rows, along other axes than that of the rows."""
SELECTIONS = frozenset({"slice", "dynamic_slice", "gather", "rev"})
"""Primitives that may select rows."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Some positions along an axis of an array.

    Attributes:
      axis: the axis; if it is to be split first, the axis before the split; if axes are to be merged first, the first.
      parts: the sizes into which it is split; a single one if it is not.
      part: which of these parts the positions are selected from.
      start: the first position, or the variable that holds it; with ``mode`` the variable that holds all positions,
        [size, 1].
      size, stride: how many positions, and the distance between them; -1 for all positions in reverse.  The first
        position follows the last: if all positions are selected from another start, they are rolled.
      mode: the mode of the gather that picks positions by index, or None.
      fill: what rows out of range are filled with; ``mode`` is then that of the gather that picks other rows in their
        place.  In the opposite direction they are dropped.
    """

    axis: int
    parts: tuple[int, ...]
    part: int
    start: int | Var
    size: int
    stride: int = 1
    mode: GatherScatterMode | None = None
    fill: float | None = None
    merged: int = 1
    """Number of axes, from ``axis`` on, that are merged into one first; above 1 only if the axis is not split."""

    @property
    def more(self) -> int:
        """How many axes more there are after splitting, or fewer after merging."""
        return len(self.parts) - self.merged

    @property
    def axes(self) -> range:
        """Axes before splitting or merging."""
        return range(self.axis, self.axis + self.merged)

    @property
    def all(self) -> bool:
        """Whether all rows are selected, perhaps in another order."""
        return self.mode is None and abs(self.stride) == 1 and self.size == self.parts[self.part]

    @property
    def choice(self) -> tuple[Hashable, ...]:
        """Description of the selection that does not depend on the axis."""
        return self.parts[self.part], self.start, self.size, self.stride, self.mode, self.fill is None

    def within(self, start: jax.Array) -> jax.Array:
        """Returns whether each index is in range, [size]."""
        index, last = lax.reshape(start, (self.size,)), self.parts[self.part] - 1
        return lax.bitwise_and(lax.ge(index, lax.full_like(index, 0)), lax.le(index, lax.full_like(index, last)))

    def filled(self, array: jax.Array, within: jax.Array, fill: float) -> jax.Array:
        """Fills selected rows whose index is out of range with ``fill``."""
        within = lax.broadcast_in_dim(within, array.shape, (self.axis + self.part,))
        return lax.select(within, array, lax.full_like(array, fill))

    def at(self, axis: int) -> Rows:
        return replace(self, axis=axis)

    def among(self, axes: Sequence[int] | Mapping[int, int]) -> Rows | None:
        """Returns the same rows in an array where axis d has become ``axes[d]``; None if axes that are to be merged do
        not follow one another there."""
        own = [axes[d] for d in self.axes]
        return self.at(own[0]) if own == [*range(own[0], own[0] + self.merged)] else None

    def shape(self, before: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of what is selected."""
        chosen = [self.size if p == self.part else n for p, n in enumerate(self.parts)]
        return *before[: self.axis], *chosen, *before[self.axis + self.merged :]

    def moved(self, axis: int) -> int:
        """Returns where another axis is afterwards."""
        return axis if axis < self.axis else axis + self.more

    def all_moved(self, axes: Sequence[int]) -> list[int]:
        """Returns where axes are afterwards; of the rows' own axes, all or none must be among them."""
        found: list[int] = []
        for axis in axes:
            if axis == self.axis:
                found += range(axis, axis + len(self.parts))
            elif axis not in self.axes:
                found.append(self.moved(axis))
        return found

    def varies(self, shape: Sequence[int], whole: Sequence[int]) -> bool:
        """Returns whether an operand has the axes of an elementwise result of the shape ``whole``."""
        return len(shape) == len(whole) and all(shape[d] == whole[d] for d in self.axes)

    def fits(self, shape: Sequence[int], whole: Sequence[int]) -> bool:
        """Returns whether an operand of an elementwise result can be read at the rows: it has them, or is the same for
        all rows, unless these are split."""
        if not shape or self.varies(shape, whole):
            return True
        return len(self.parts) == 1 and all(shape[d] == 1 for d in self.axes)

    def repeated(self, array: jax.Array) -> jax.Array:
        """Reshapes an operand that is the same for all rows, to be read with what is selected."""
        shape = array.shape
        return lax.reshape(array, (*shape[: self.axis], 1, *shape[self.axis + self.merged :])) if shape else array

    def select(self, array: jax.Array, start: jax.Array | None = None) -> jax.Array:
        """Selects ``array`` at the positions; ``start`` is the value of a variable start."""
        own = self.axis + self.part
        if self.more:
            rest = array.shape[self.axis + self.merged :]
            array = lax.reshape(array, (*array.shape[: self.axis], *self.parts, *rest))
        if self.stride < 0:
            return lax.rev(array, (own,))
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
        taken: jax.Array = lax.dynamic_slice_p.bind(array, *_starts(start, own, array.ndim), slice_sizes=tuple(sizes))
        return taken

    def put(self, array: jax.Array, before: Sequence[int], start: jax.Array | None = None) -> jax.Array:
        """Inverts :meth:`select`: returns an array of the shape ``before``, zero elsewhere."""
        own = self.axis + self.part
        full = (*before[: self.axis], *self.parts, *before[self.axis + self.merged :])
        if self.stride < 0:
            array = lax.rev(array, (own,))
        elif isinstance(self.start, int) and self.all:
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
    """Rolls an array so that its first position along an axis is ``start``."""
    parts = (lax.slice_in_dim(array, start, None, 1, axis), lax.slice_in_dim(array, 0, start, 1, axis))
    return lax.concatenate(parts, axis)


def _starts(start: jax.Array, axis: int, rank: int) -> list[jax.Array]:
    return [start if d == axis else jnp.zeros((), start.dtype) for d in range(rank)]


def selection(equation: JaxprEqn) -> Rows | None:
    """Returns the rows that an equation selects along one axis, or None."""
    name, params = equation.primitive.name, equation.params
    if name not in SELECTIONS:
        return None
    before, after = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    if name == "rev":
        reversed_axes = [d for d in params["dimensions"] if before[d] > 1]
        if len(reversed_axes) != 1:
            return None
        (axis,) = reversed_axes
        return Rows(axis, (before[axis],), 0, before[axis] - 1, before[axis], -1)
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
    """Returns the array of which an equation's result is a part along one axis, and the rows of the part."""
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
    """Returns an array and its rolled rows if two ``pieces`` of it, concatenated, are the array rolled."""
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
    if isinstance(start, Literal):  # a start beyond the last possible one is clamped to it
        return Rows(axis, (whole[axis],), 0, max(0, min(int(start.val), whole[axis] - part[axis])), part[axis])
    return Rows(axis, (whole[axis],), 0, start, part[axis])


def picked(
    indices: Atom, own: tuple[Sequence[int], Sequence[int], Sequence[int]], batching: Sequence[int],
    whole: Sequence[int], part: Sequence[int], mode: GatherScatterMode, fill: float | None = None,
) -> Rows | None:  # fmt: skip
    """Returns the rows that a gather picks along one axis at indices [size, 1], with the other axes whole.

    ``own``: the dimensions of its result (or of a scatter's updates) that are not picked, and the axis twice; ``fill``:
    the value of rows out of range, NaN if None.
    """
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
    """Returns the runs of axes that contain an axis: (sizes, the axis's position, the run's begin), shortest first."""
    found = [(tuple(shape[i:j]), axis - i, i) for i in range(axis + 1) for j in range(axis + 1, len(shape) + 1)]
    return sorted(found, key=lambda g: len(g[0]))


def reshaped(before: Sequence[int], after: Sequence[int], rows: Rows) -> Rows | None:
    """Returns the rows of a reshape's operand that give those of its result."""
    first, merged = math.prod(after[: rows.axis]), math.prod(after[d] for d in rows.axes)
    for axis, size in enumerate(before):
        if math.prod(before[:axis]) == first and size == merged:
            return replace(rows, axis=axis, merged=1)
    if rows.merged == 1:
        for parts, part, begin in groups(after, rows.axis):
            for axis, size in enumerate(before):
                if size == math.prod(parts) and math.prod(before[:axis]) == math.prod(after[:begin]):
                    return replace(rows, axis=axis, parts=parts, part=part)
    for axis, size in enumerate(before):
        if math.prod(before[:axis]) == first and size != 1:
            for end in range(axis + 2, len(before) + 1):
                if math.prod(before[axis:end]) == merged:
                    return replace(rows, axis=axis, merged=end - axis)
    return None


@dataclass(frozen=True, slots=True)
class Picked:
    """Rows of several axes together, such as ``z[sequence, position]``, picked by a gather, or the places of a scatter.

    Attributes:
      axes: the consecutive axes along which rows are picked.
      sizes: their sizes.
      index_shape: the shape of the indices, without their components.
      sources: for each axis, the dimension of the indices that counts it (it is a batch axis), or (component,).
      windows: for each axis, how many rows are picked from each index on.
    """

    axes: range
    sizes: tuple[int, ...]
    index_shape: tuple[int, ...]
    sources: tuple[int | tuple[int], ...]
    windows: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the rows that are picked: that of the indices, then the windows."""
        return (*self.index_shape, *self.windows)

    @property
    def rows(self) -> int:
        """Number of rows that are picked."""
        return math.prod(self.shape)

    def flat(self, indices: jax.Array) -> jax.Array:
        """Returns one index per row, [rows, 1], into the merged axes, clipped as gathers do."""
        found = jnp.zeros(self.shape, jnp.int32)
        for axis, (source, size, window) in enumerate(zip(self.sources, self.sizes, self.windows, strict=True)):
            if isinstance(source, int):
                own = lax.broadcasted_iota(jnp.int32, self.shape, source)
            else:
                component = self._component(indices, source[0])
                last = np.asarray(size - window, component.dtype)
                first = lax.clamp(np.zeros_like(last), component, last).astype(jnp.int32)
                own = first + lax.broadcasted_iota(jnp.int32, self.shape, len(self.index_shape) + axis)
            found = found * size + own
        return lax.reshape(found, (self.rows, 1))

    def _component(self, indices: jax.Array, position: int) -> jax.Array:
        """Returns one component of the indices, for each row that is picked."""
        component = lax.index_in_dim(indices, position, len(self.index_shape), keepdims=False)
        return lax.broadcast_in_dim(component, self.shape, range(len(self.index_shape)))

    def components(self) -> list[int]:
        """Returns which components of the indices count rows."""
        return [source[0] for source in self.sources if not isinstance(source, int)]

    def within(self, indices: jax.Array) -> jax.Array:
        """Returns whether all components of an index are in range, windows included, [rows]."""
        found = jnp.ones(self.shape, bool)
        for source, size, window in zip(self.sources, self.sizes, self.windows, strict=True):
            if not isinstance(source, int):
                component = self._component(indices, source[0])
                last = np.asarray(size - window, component.dtype)
                found = found & (component >= 0) & (component <= last)
        return lax.reshape(found, (self.rows,))


def picked_from_several(equation: JaxprEqn) -> Picked | None:
    """Returns what a gather picks, or a scatter puts, if it is rows of several axes together, with the others whole."""
    numbers, whole = _IndexNumbers.of(equation), equation.invars[0].aval.shape
    sizes, mode = numbers.sizes, equation.params["mode"]
    # An index along an axis that is taken whole is clipped to the only possible place.
    ignored = {d for d in numbers.along if sizes[d] == whole[d]} if mode is GatherScatterMode.CLIP else set()
    axes = sorted({*numbers.along, *numbers.batching} - ignored)
    others = [d for d in range(len(whole)) if d not in axes]
    several = len(axes) > 1 or any(sizes[d] > 1 for d in axes)
    if not several or not axes or any(sizes[d] != whole[d] for d in others):
        return None
    if not any(whole[d] > 1 for d in others):  # single elements, such as the labels of one sequence
        return None
    # The result's dimensions are the axes before, the indices', the windows and the axes behind, but for size 1.
    named = dict(zip(numbers.windows, numbers.left, strict=True))
    places = [(named.get(d, axes[0]), d in named) for d in range(len(numbers.result))]
    order = [place for place in places if place[0] not in axes or not place[1] or sizes[place[0]] > 1]
    return numbers.picked(equation, axes) if order == sorted(order) else None


def picked_labels(equation: JaxprEqn) -> tuple[Picked, int] | None:
    """Returns the rows of a gather or scatter of single elements, and which index component counts the last axis."""
    numbers, whole = _IndexNumbers.of(equation), equation.invars[0].aval.shape
    last = len(whole) - 1
    every = sorted({*numbers.along, *numbers.batching}) == [*range(last + 1)]
    if last < 1 or not every or last not in numbers.along or any(size != 1 for size in numbers.sizes.values()):
        return None
    if len(numbers.along) < 2 or numbers.windows or not counts_exactly(equation.invars[1].aval.dtype, whole[-1] - 1):
        return None
    rows = numbers.picked(equation, [*range(last)])
    return None if rows is None else (rows, numbers.along.index(last))


@dataclass(frozen=True, slots=True)
class _IndexNumbers:
    """The dimension numbers of a gather or scatter, in a gather's terms.

    Attributes:
      along: the operand's dimensions that components of the indices count.
      batching, counted: the operand's dimensions that go with dimensions of the indices, and those dimensions.
      windows, left: dimensions of the result (or of the updates) that come from the operand, and which these are there.
      sizes: how much is taken along each dimension of the operand.
      result: the shape of the result, or of the updates.
    """

    along: tuple[int, ...]
    batching: tuple[int, ...]
    counted: tuple[int, ...]
    windows: tuple[int, ...]
    left: tuple[int, ...]
    sizes: Mapping[int, int]
    result: tuple[int, ...]

    @staticmethod
    def of(equation: JaxprEqn) -> _IndexNumbers:
        numbers, rank = equation.params["dimension_numbers"], len(equation.invars[0].aval.shape)
        batching = tuple(numbers.operand_batching_dims)
        gathers = equation.primitive.name == "gather"
        gone = numbers.collapsed_slice_dims if gathers else numbers.inserted_window_dims
        left = tuple(d for d in range(rank) if d not in (*gone, *batching))
        if gathers:
            result, windows = equation.outvars[0].aval.shape, tuple(numbers.offset_dims)
            sizes = dict(enumerate(equation.params["slice_sizes"]))
            along, counted = numbers.start_index_map, numbers.start_indices_batching_dims
        else:
            result, windows = equation.invars[2].aval.shape, tuple(numbers.update_window_dims)
            sizes = dict.fromkeys(range(rank), 1) | {d: result[w] for d, w in zip(left, windows, strict=True)}
            along, counted = numbers.scatter_dims_to_operand_dims, numbers.scatter_indices_batching_dims
        return _IndexNumbers(tuple(along), batching, tuple(counted), windows, left, sizes, tuple(result))

    def picked(self, equation: JaxprEqn, axes: Sequence[int]) -> Picked | None:
        """Returns the rows of some axes, if they follow one another and the indices can count them."""
        indices, whole = equation.invars[1], equation.invars[0].aval.shape
        if isinstance(indices, Literal) or [*axes] != [*range(axes[0], axes[0] + len(axes))]:
            return None
        sources: list[int | tuple[int]] = []
        for axis in axes:
            if axis in self.batching:
                sources.append(int(self.counted[self.batching.index(axis)]))
            elif counts_exactly(indices.aval.dtype, whole[axis] - 1):
                sources.append((self.along.index(axis),))
            else:
                return None
        sizes, index_shape = tuple(whole[d] for d in axes), tuple(indices.aval.shape[:-1])
        windows = tuple(self.sizes[d] for d in axes)
        return Picked(range(axes[0], axes[-1] + 1), sizes, index_shape, tuple(sources), windows)


def layout_of(
    equation: JaxprEqn, own: Rows | None, shape: tuple[int, ...], rows: Rows
) -> Callable[[jax.Array], jax.Array]:
    """Returns a layout operation or reduction as a function of rows: ``own`` of its operand, ``rows`` of its result."""
    name, params = equation.primitive.name, equation.params
    if name in REDUCTIONS:
        assert own is not None
        axes = tuple(own.moved(a) for a in params["axes"])
        return lambda x: equation.primitive.bind(x, **{**params, "axes": axes})
    if name == "broadcast_in_dim":
        targets = params["broadcast_dimensions"]
        if own is not None:
            return lambda x: lax.broadcast_in_dim(x, shape, rows.all_moved(targets))
        gone = [d for d, target in enumerate(targets) if target in rows.axes and rows.merged > 1]
        kept = [rows.moved(target) for d, target in enumerate(targets) if d not in gone]
        return lambda x: lax.broadcast_in_dim(lax.squeeze(x, gone), shape, kept)
    if name == "transpose":
        return lambda x: lax.transpose(x, params["permutation"])
    return lambda x: lax.reshape(x, shape)
