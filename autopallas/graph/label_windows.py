"""Completes gathers of one element of each of some consecutive rows to gathers of one element of every row.

``jnp.diagonal(z, n)`` of [2n, 2n] logits picks elements of the first n rows alone.  These are some of the elements that
are picked of all rows, if the rows without a label have label 0; what is scattered there for them is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import numpy as np
from jax import lax

from autopallas.compat import JaxprEqn, Var
from autopallas.graph.known_integers import known_array
from autopallas.graph.rows import picked_labels

__all__ = ["Window"]


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
