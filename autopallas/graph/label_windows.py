"""Reads elements of rows of logits, which are not picked by a label for each row, as such labels.

``jnp.diagonal(z, n)`` of [2n, 2n] logits picks elements of the first n rows alone.  These are some of the elements that
are picked of all rows, if the rows without a label have label 0; what is scattered there for them is 0.  A slice of one
column picks the same label in each row, and the ``pad`` of its derivative puts an element for each row among zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

import jax
import numpy as np
from jax import lax

from autopallas.compat import ArrayFunction, JaxprEqn, Var
from autopallas.graph.custom_rules import ELEMENTWISE
from autopallas.graph.known_integers import known_array
from autopallas.graph.rows import picked_labels

__all__ = ["Column", "Cut", "Window", "summed_axes"]


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive rows of a matrix, of each of which one element is picked, or to each of which one is added.

    Attributes:
      shape: the shape of the matrix.
      start, size: the first of these rows, and how many there are.
      component: which component of an index counts the elements of a row.
    """

    shape: tuple[int, int]
    start: int
    size: int
    component: int

    @staticmethod
    def of(
        equation: JaxprEqn, definitions: Mapping[Var, JaxprEqn], known: dict[Var, np.ndarray | None]
    ) -> Window | None:
        """Returns the window of a gather or scatter whose rows are known; None where they are not a part of the rows in
        their order.

        ``known`` has integers that are known, the body's constants first, to which others are added.
        """
        picks, component = picked_labels(equation) or (None, 0)
        shape, indices = equation.invars[0].aval.shape, equation.invars[1]
        if picks is None or len(shape) != 2 or len(picks.index_shape) != 1 or not isinstance(indices, Var):
            return None
        (source,), joined = picks.sources, definitions.get(indices)
        if isinstance(source, int) or joined is None or joined.primitive.name != "concatenate":
            return None
        if joined.params["dimension"] != 1 or any(a.aval.shape[1] != 1 for a in joined.invars):
            return None
        rows = known_array(joined.invars[source[0]], definitions, known)
        if rows is None or not 0 < rows.size < shape[0] or not 0 <= int(rows[0, 0]) <= shape[0] - rows.size:
            return None
        start = int(rows[0, 0])
        if not np.array_equal(rows[:, 0], np.arange(start, start + rows.size)):
            return None
        return Window((int(shape[0]), int(shape[1])), start, int(rows.size), component)

    def gathered(self, equation: JaxprEqn) -> Callable[[jax.Array, jax.Array], jax.Array]:
        """Returns the gather as one of an element of each row, of which some are taken."""
        numbers = lax.GatherDimensionNumbers((), (1,), (1,), (0,), (0,))
        mode, fill = equation.params["mode"], equation.params["fill_value"]

        def gathered(matrix: jax.Array, indices: jax.Array) -> jax.Array:
            every = lax.gather(matrix, self._labels(indices), numbers, (1, 1), mode=mode, fill_value=fill)
            return lax.slice_in_dim(every, self.start, self.start + self.size)

        return gathered

    def scattered(self, equation: JaxprEqn) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
        """Returns the scatter as one of an element for each row, which is 0 for the others."""
        numbers = lax.ScatterDimensionNumbers((), (1,), (1,), (0,), (0,))

        def scattered(zeros: jax.Array, indices: jax.Array, updates: jax.Array) -> jax.Array:
            every = lax.pad(updates, lax.full((), 0, updates.dtype), [self._around])
            return lax.scatter_add(zeros, self._labels(indices), every, numbers, mode=equation.params["mode"])

        return scattered

    @property
    def _around(self) -> tuple[int, int, int]:
        return self.start, self.shape[0] - self.start - self.size, 0

    def _labels(self, indices: jax.Array) -> jax.Array:
        """Returns the label of each row, [rows, 1]."""
        labels = lax.slice_in_dim(indices, self.component, self.component + 1, axis=1)
        return lax.pad(labels, lax.full((), 0, labels.dtype), [self._around, (0, 0, 0)])


@dataclass(frozen=True, slots=True)
class Column:
    """One element of each row of logits, at the same position in all.

    Attributes:
      shape: the shape of the logits.
      axis: the axis along which a row's elements lie.
      index: the position.
    """

    shape: tuple[int, ...]
    axis: int
    index: int

    @staticmethod
    def of(equation: JaxprEqn) -> Column | None:
        """Returns the column that a slice takes, or that a ``pad`` puts among other elements; None if it is none."""
        params, before, after = equation.params, equation.invars[0].aval.shape, equation.outvars[0].aval.shape
        whole, part = (before, after) if equation.primitive.name == "slice" else (after, before)
        axes = [axis for axis, (n, m) in enumerate(zip(whole, part, strict=True)) if n != m]
        if len(whole) < 2 or len(axes) != 1 or part[axes[0]] != 1:
            return None
        (axis,) = axes
        if equation.primitive.name == "slice":
            index = params["start_indices"][axis]
        else:
            index = params["padding_config"][axis][0]
            if any(low < 0 or high < 0 or between for low, high, between in params["padding_config"]):
                return None
        return Column(tuple(whole), axis, int(index))

    def picked(self, logits: jax.Array) -> jax.Array:
        """Picks the element of each row as a label is picked."""
        batching = tuple(range(len(self._rows)))
        numbers = lax.GatherDimensionNumbers((), (self.axis,), (self.axis,), self._others, batching)
        mode = lax.GatherScatterMode.PROMISE_IN_BOUNDS
        found = lax.gather(logits, self._labels, numbers, (1,) * len(self.shape), mode=mode)
        return lax.expand_dims(found, (self.axis,))

    def placed(self, elements: jax.Array) -> jax.Array:
        """Puts an element of each row among zeros, as the gradient of a label's logit is put."""
        batching = tuple(range(len(self._rows)))
        numbers = lax.ScatterDimensionNumbers((), (self.axis,), (self.axis,), self._others, batching)
        zeros, mode = lax.full(self.shape, 0, elements.dtype), lax.GatherScatterMode.PROMISE_IN_BOUNDS
        return lax.scatter_add(zeros, self._labels, lax.squeeze(elements, (self.axis,)), numbers, mode=mode)

    @property
    def _others(self) -> tuple[int, ...]:
        return tuple(axis for axis in range(len(self.shape)) if axis != self.axis)

    @property
    def _rows(self) -> tuple[int, ...]:
        return tuple(self.shape[axis] for axis in self._others)

    @property
    def _labels(self) -> jax.Array:
        return lax.full((*self._rows, 1), self.index, np.int32)


@dataclass(frozen=True, slots=True)
class Cut:
    """Consecutive rows of logits that are cut out along one axis, and of each of which a label is picked.

    Where the other rows are read too, as in a transducer of whose last label there is a blank alone, the labels are
    picked of all rows: label 0 of the others, which is left out again.

    Attributes:
      axis: the axis along which rows are cut out.
      start, size: the first of these rows, and how many there are.
      whole: how many rows there were.
    """

    axis: int
    start: int
    size: int
    whole: int

    @staticmethod
    def of(equation: JaxprEqn) -> Cut | None:
        """Returns what a slice cuts out, or what a ``pad`` puts back; None if it does not along one axis alone."""
        params, before, after = equation.params, equation.invars[0].aval.shape, equation.outvars[0].aval.shape
        takes = equation.primitive.name == "slice"
        axes = [axis for axis, (n, m) in enumerate(zip(before, after, strict=True)) if n != m]
        if len(axes) != 1:
            return None
        (axis,) = axes
        if takes:
            strides = params["strides"]
            if strides is not None and any(by != 1 for by in strides):
                return None
            return Cut(axis, int(params["start_indices"][axis]), after[axis], before[axis])
        if any(low < 0 or high < 0 or between for low, high, between in params["padding_config"]):
            return None
        return Cut(axis, int(params["padding_config"][axis][0]), before[axis], after[axis])

    def labels_axis(self, equation: JaxprEqn) -> int | None:
        """Returns the axis of a gather's or scatter's indices that goes along with the rows; None if none does."""
        numbers = equation.params["dimension_numbers"]
        gathers = equation.primitive.name == "gather"
        if self.axis not in numbers.operand_batching_dims:
            return None
        own = numbers.start_indices_batching_dims if gathers else numbers.scatter_indices_batching_dims
        return int(own[numbers.operand_batching_dims.index(self.axis)])

    def _elements_axis(self, equation: JaxprEqn) -> int:
        """Returns the axis of what is picked or added that goes along with the rows."""
        numbers, labels = equation.params["dimension_numbers"], self.labels_axis(equation)
        gathers = equation.primitive.name == "gather"
        elements = (equation.outvars[0] if gathers else equation.invars[2]).aval.shape
        apart = numbers.offset_dims if gathers else numbers.update_window_dims
        assert labels is not None
        return [axis for axis in range(len(elements)) if axis not in apart][labels]

    def gathered(self, equation: JaxprEqn) -> ArrayFunction:
        """Returns the gather as one from all rows, of which some are taken."""
        labels, axis = self.labels_axis(equation), self._elements_axis(equation)
        params = equation.params
        assert labels is not None

        def gathered(logits: jax.Array, indices: jax.Array) -> jax.Array:
            every = lax.gather(
                logits, self._around(indices, labels), params["dimension_numbers"], params["slice_sizes"],
                mode=params["mode"], fill_value=params["fill_value"],
            )  # fmt: skip
            return lax.slice_in_dim(every, self.start, self.start + self.size, axis=axis)

        return gathered

    def scattered(self, equation: JaxprEqn) -> ArrayFunction:
        """Returns the scatter into zeros, with zeros put around it, as one into zeros of all rows."""
        labels, axis = self.labels_axis(equation), self._elements_axis(equation)
        numbers, mode = equation.params["dimension_numbers"], equation.params["mode"]
        shape = list(equation.outvars[0].aval.shape)
        shape[self.axis] = self.whole
        assert labels is not None

        def scattered(indices: jax.Array, updates: jax.Array) -> jax.Array:
            zeros = lax.full(shape, 0, updates.dtype)
            given = self._around(indices, labels), self._around(updates, axis)
            return lax.scatter_add(zeros, *given, numbers, mode=mode)

        return scattered

    def _around(self, x: jax.Array, axis: int) -> jax.Array:
        own = (self.start, self.whole - self.start - self.size, 0)
        return lax.pad(x, lax.full((), 0, x.dtype), [own if d == axis else (0, 0, 0) for d in range(x.ndim)])


def summed_axes(equations: Sequence[JaxprEqn], exponents: Set[Var]) -> set[tuple[tuple[int, ...], int]]:
    """Returns the shapes of exponentials of ``exponents``, each with the one axis over which these are summed."""
    exponentials: set[Var] = set()
    found: set[tuple[tuple[int, ...], int]] = set()
    for equation in equations:
        name, reads = equation.primitive.name, [a for a in equation.invars if isinstance(a, Var)]
        if name in ("exp", "exp2"):
            if not exponents.isdisjoint(reads):
                exponentials.update(equation.outvars)
        elif name in ELEMENTWISE and not exponentials.isdisjoint(reads):
            exponentials.update(equation.outvars)
        elif name == "reduce_sum" and not exponentials.isdisjoint(reads) and len(equation.params["axes"]) == 1:
            found.add((tuple(reads[0].aval.shape), int(equation.params["axes"][0])))
    return found
