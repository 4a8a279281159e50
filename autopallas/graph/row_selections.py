"""Moves selections of rows of logits back to the activations.

A next-token loss takes ``(x @ w)[:, :-1]``: the logits of some rows.  Under a gradient, the selection's derivative puts
the gradient among zeros (``pad``) before the products that end the backward.  Both commute with the product:
``(x @ w)[rows]`` is ``x[rows] @ w``; if P puts rows among zeros, ``P(d) @ w.T`` is ``P(d @ w.T)`` and ``x.T @ P(d)`` is
``x[rows].T @ d``.  So a selection moves back through elementwise computations, casts, broadcasts and reductions over
other axes to the operand of the product, and a value that is put among zeros moves on behind the product.  What
remains is a loss over all the rows that there are, like any other.

What a gradient written by hand adds to one element of each row, ``probabilities.at[rows, labels].add(-1)``, is added as
an array of its own, which is zero but for these elements, as in JAX's derivative of a gather; what it writes there is
selected from such an array.

The equations of a body change only if the body then has no more products than before.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import ChainMap
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopallas import compat
from autopallas.compat import JaxprEqn, Var
from autopallas.faults import contained
from autopallas.graph.flatten import Body, is_contraction
from autopallas.graph.given_integers import GivenIntegers
from autopallas.graph.known_integers import known_array
from autopallas.graph.label_sets import gathered, label_set, scattered
from autopallas.graph.label_windows import Column, Cut, Window, summed_axes
from autopallas.graph.rewritten_body import Atom
from autopallas.graph.rows import SELECTIONS, Rows, picked_from_several, picked_labels, rolled, selection
from autopallas.graph.selected_rows import DEEPEST, KEEPS_ROWS, THROUGH
from autopallas.graph.spread_rows import SpreadRows
from autopallas.numerics.casts import kind_of

__all__ = ["move_selections"]

_PUTS = frozenset({"pad", "dynamic_update_slice", "scatter-add", "rev"})
"""Primitives that put the gradient of a selection among zeros, or in the order of what it selected from."""
_ADDS = frozenset({"scatter-add", "scatter-sub"})
"""Primitives that add to elements of an array."""
_CHANGES = _ADDS | {"scatter"}
"""Primitives that change elements of an array."""
_MOST = 32
"""Largest number of selections to move in one body; a loss has a few."""


def move_selections(root: Body, assume_finite: bool = True, divided: bool = False) -> Body:
    """Moves selections of rows before the products that give logits, in place, in every body.

    Args:
      root: the program.
      assume_finite: whether 0 times anything may be taken for 0.
      divided: whether arrays are spread over several devices.  Rows of several axes then stay where they are, since the
        merged axes would have to be gathered from all devices.
    """
    choices: set[tuple[Hashable, ...]] = set()
    integers: GivenIntegers | None = None
    for body in root.walk():
        if _may_select(body, choices):
            integers = integers or GivenIntegers(root)
            with contained("a selection of rows", "cross_entropy", "graph"):
                if not _Mover(body, choices, integers, assume_finite, divided).run():
                    _Mover(body, choices, integers, assume_finite, divided, stay=True).run()
    return root


def _may_select(body: Body, choices: set[tuple[Hashable, ...]]) -> bool:
    names = {e.primitive.name for e in body.equations}
    selects = not names.isdisjoint(SELECTIONS | _CHANGES) and not names.isdisjoint(("exp", "exp2"))
    puts = bool(choices) and not names.isdisjoint(_PUTS)
    return "dot_general" in names and (selects or puts)


def _sums_rows(equation: JaxprEqn) -> bool:
    """Returns whether an equation sums each row: not all rows to one, as the gradient of a bias does."""
    if equation.primitive.name != "reduce_sum":
        return False
    axes = sorted(equation.params["axes"])
    return len(axes) == 1 or axes != list(range(len(axes)))


def _written_out(body: Body) -> set[Var]:
    """Returns the columns of arrays of which each column is read by itself: gates of experts that are written out one
    after the other are such columns, and no labels."""
    taken: dict[tuple[Var, int], dict[Var, int]] = {}
    for equation in body.equations:
        if equation.primitive.name == "slice" and isinstance(source := equation.invars[0], Var):
            if (column := Column.of(equation)) is not None:
                taken.setdefault((source, column.axis), {})[equation.outvars[0]] = column.index
    return {
        variable
        for (source, axis), columns in taken.items()
        if len(set(columns.values())) == source.aval.shape[axis]
        for variable in columns
    }


def _changed(equation: JaxprEqn, array: jax.Array, indices: jax.Array, updates: jax.Array) -> jax.Array:
    """Computes what a scatter makes of some elements: the array, and one that has these elements among zeros, are added
    up, or a third one with ones chooses between them."""
    params = equation.params

    def apart(elements: jax.Array) -> jax.Array:
        return lax.scatter_add(
            lax.full_like(array, 0),
            indices,
            elements,
            params["dimension_numbers"],
            indices_are_sorted=params["indices_are_sorted"],
            unique_indices=params["unique_indices"],
            mode=params["mode"],
        )

    if equation.primitive.name == "scatter":
        written = lax.gt(apart(lax.full_like(updates, 1)), lax.full_like(array, 0))
        return lax.select_n(written, array, apart(updates))
    return lax.add(array, apart(lax.neg(updates) if equation.primitive.name == "scatter-sub" else updates))


class _Mover(SpreadRows):
    """Moves the selections of one body.

    Args:
      body, choices, assume_finite, divided: as for :class:`SpreadRows`.
      integers: what makes integers that the body is given.
      stay: whether rows stay where they are, as where the product would be computed twice, of some rows and of all:
        then only labels that are picked of some rows are picked of all.
    """

    def __init__(
        self,
        body: Body,
        choices: set[tuple[Hashable, ...]],
        integers: GivenIntegers,
        assume_finite: bool,
        divided: bool,
        stay: bool = False,
    ):
        super().__init__(body, choices, assume_finite, divided)
        self.stay = stay
        self.cuts: dict[Var, tuple[Var, Cut]] = {}
        """Slices of logits that stay where they are."""
        self.pieces: dict[Var, tuple[Atom, Rows]] = {}
        """Slices of logits, by the variable that is read in their place."""
        given, arrays = integers.of(body)
        self._makers: Mapping[Var, JaxprEqn] = ChainMap(self.definitions, given)
        """What makes integers: equations of other bodies among them, which this one cannot read from."""
        self._constants = dict(zip(body.constvars, body.consts, strict=True)) | arrays
        self._integers: dict[Var, np.ndarray | None] = {
            variable: np.asarray(array)
            for variable, array in self._constants.items()
            if not compat.is_tracer(array) and jnp.issubdtype(array.dtype, jnp.integer)
        }
        self._own = self._flowing()
        self._written_out = _written_out(body)

    def run(self) -> bool:
        """Changes the body; returns False if what was found would add products, so that nothing was changed."""
        if not self.choices and not self._selects():
            return True
        for position, original in enumerate(self.body.equations):
            equation = self._renamed(original)
            new = self._in_place_of(equation)
            if new is not None:
                self.names[equation.outvars[0]] = new
            self._add_original(position, equation)
        if not self.names:
            return True
        if not self._replace(*self._live()):
            return False
        self.body.assumed.update(self.assumed)
        return True

    # ------------------------------------------------------------------ what flows where

    def _flowing(self) -> set[Var]:
        """Returns the results of products that flow element by element into an exponential that is summed so, as in a
        softmax.  Gates of recurrences are exponentials of products too, and their scans select many rows of these."""
        found: set[Var] = set()
        own: set[Var] = set()
        summed: set[Var] = set()
        layout = THROUGH | SELECTIONS | {"concatenate"}
        for equation in reversed(self.body.equations):
            name = equation.primitive.name
            operands = [a for a in equation.invars[: 1 if name in SELECTIONS else None] if isinstance(a, Var)]
            if _sums_rows(equation) or (name in layout and not summed.isdisjoint(equation.outvars)):
                summed.update(operands)
            exponential = name in ("exp", "exp2") and equation.outvars[0] in summed
            if exponential or (name in layout and not found.isdisjoint(equation.outvars)):
                found.update(operands)
            elif name == "dot_general" and equation.outvars[0] in found and is_contraction(equation):
                own.add(equation.outvars[0])
        self._summed = summed_axes(self.body.equations, found) if own else set()
        return own

    def _selects(self) -> bool:
        """Returns whether something selects from logits, or from what is computed from them row by row.  In most bodies
        nothing does, and the full walk is not needed."""
        scores = set(self._own)
        for equation in self.body.equations if scores else ():
            name = equation.primitive.name
            if name in _CHANGES and isinstance(first := equation.invars[0], Var) and first in scores:
                return True
            if name in KEEPS_ROWS and not scores.isdisjoint([a for a in equation.invars if isinstance(a, Var)]):
                if selection(equation) is not None:
                    return True
                if name == "gather" and any(f(equation) for f in (label_set, picked_from_several, picked_labels)):
                    return True
                scores.add(equation.outvars[0])
        return False

    def _changes_labels(self, equation: JaxprEqn) -> bool:
        """Returns whether an equation adds to one element of each row of what is computed from logits row by row, or
        replaces it, as a gradient that is written by hand does: ``probabilities.at[rows, labels].add(-1)``."""
        first, _, updates = equation.invars
        if not isinstance(first, Var) or first not in self.scores or len(self.names) >= _MOST:
            return False
        shape, added = first.aval.shape, math.prod(updates.aval.shape)
        if equation.primitive.name == "scatter" and not self._writes_once(equation):
            return False
        return jnp.issubdtype(first.aval.dtype, jnp.floating) and any(added * n == math.prod(shape) for n in shape)

    # ------------------------------------------------------------------ selections move back

    def _in_place_of(self, equation: JaxprEqn) -> Atom | None:
        """Returns what to read in place of an equation's result, if something is moved over the equation."""
        name = equation.primitive.name
        if not equation.outvars:
            return None
        if name in ("gather", "scatter-add"):
            several = self._label_set(equation) or self._label_window(equation)
            if several is not None:
                return several
        if name in _CHANGES and self._changes_labels(equation):
            return self._emit(equation, functools.partial(_changed, equation), *equation.invars)
        if name == "concatenate":
            pieces = [self.pieces.get(a) if isinstance(a, Var) else None for a in equation.invars]
            found = rolled(pieces, equation.params["dimension"])
            if found is not None and found[0] in self.logits and self._comes_to_a_product(*found):
                return self._select(*found, equation)
            return None
        column = self._column(equation) if name in ("slice", "pad") else None
        if column is not None:
            return column
        if self.stay:
            return self._of_cut(equation)
        rows = selection(equation)
        source = equation.invars[0] if equation.invars else None
        back = name == "rev" and rows is not None and rows.choice in self.choices  # it is its own derivative
        if isinstance(source, Var) and source in self.logits and not back:
            if rows is None and name == "gather":
                rows = self._merged(equation, picked_from_several(equation))
            if rows is not None:
                return self._selection(equation, source, rows)
            if name == "gather":
                return self._labels_of_rows(equation, source)
        spread = self._put(equation)
        if spread is not None:
            self.spread[equation.outvars[0]] = spread
            return None
        return self._over(equation)

    def _selection(self, equation: JaxprEqn, source: Var, rows: Rows) -> Atom | None:
        """Returns what to read in place of rows of logits."""
        selected = self._selected_rows(equation, source, rows)
        if selected is None:
            return None
        if rows.fill is not None:
            selected = self._filled(equation, rows, selected, rows.fill)
        elif equation.primitive.name == "slice" and isinstance(selected, Var):
            self.pieces[selected] = source, rows
        shape = equation.outvars[0].aval.shape
        if rows.shape(source.aval.shape) != shape:  # rows of several axes were merged
            selected = self._emit(equation, lambda array: lax.reshape(array, shape), selected)
            self.scores.add(selected)
        return selected

    def _selected_rows(self, equation: JaxprEqn, source: Var, rows: Rows) -> Atom | None:
        """Computes rows of logits from rows of the activations; rows that are out of range hold anything."""
        if rows.fill is not None and not jnp.issubdtype(source.aval.dtype, jnp.floating):
            return None
        if rows.size > rows.parts[rows.part] or len(self.names) >= _MOST or not self._comes_to_a_product(source, rows):
            return None
        self.choices.add(rows.choice)
        return self._select(source, replace(rows, fill=None), equation)

    def _labels_of_rows(self, equation: JaxprEqn, source: Var) -> Atom | None:
        """Returns what to read in place of one element of each of some rows of logits."""
        picks, component = picked_labels(equation) or (None, 0)
        if picks is None or any(self._counts(equation.invars[1], own) for own in (picks.components(), [component])):
            return None  # each row, or rows along the last axis and labels along another
        rows = self._merged(equation, picks)
        selected = None if rows is None else self._selected_rows(equation, source, rows)
        if rows is None or selected is None:
            return None
        mode, shape = equation.params["mode"], equation.outvars[0].aval.shape

        def labelled(array: jax.Array, indices: jax.Array) -> jax.Array:
            labels = lax.reshape(lax.index_in_dim(indices, component, indices.ndim - 1), (rows.size, 1))
            numbers = lax.GatherDimensionNumbers((), (1,), (1,), (0,), (0,))
            return lax.gather(array, labels, numbers, (1, 1), mode=mode, fill_value=equation.params["fill_value"])

        found: Atom = self._emit(equation, labelled, selected, equation.invars[1])
        if rows.fill is not None:
            found = self._filled(equation, rows, found, rows.fill)
        return self._emit(equation, lambda array: lax.reshape(array, shape), found)

    def _writes_once(self, equation: JaxprEqn) -> bool:
        """Returns whether a scatter writes to no element twice: each index has a row of its own."""
        if equation.params["update_jaxpr"] is not None:
            return False
        numbers, indices = equation.params["dimension_numbers"], equation.invars[1]
        batches = [int(axis) for axis in numbers.scatter_indices_batching_dims]
        total = math.prod(indices.aval.shape[:-1])
        if equation.params["unique_indices"] or total == math.prod(indices.aval.shape[axis] for axis in batches):
            return True
        definition = self._makers.get(indices) if isinstance(indices, Var) else None
        if definition is None or definition.primitive.name != "concatenate":
            return False
        if definition.params["dimension"] != len(indices.aval.shape) - 1:
            return False
        rows = {
            variable: np.asarray(constant)
            for variable, constant in self._constants.items()
            if constant.size == total and kind_of(constant.dtype) in "iu" and not compat.is_tracer(constant)
        }
        places = itertools.accumulate((a.aval.shape[-1] for a in definition.invars), initial=0)
        for component, place in zip(definition.invars, places, strict=False):
            found = known_array(component, self._makers, {**rows})
            if found is not None and np.array_equal(np.ravel(found), np.arange(total)):
                if self._is_apart(equation, int(numbers.scatter_dims_to_operand_dims[place]), total):
                    return True
        return False

    def _is_apart(self, equation: JaxprEqn, axis: int, total: int) -> bool:
        """Returns whether a scatter's indices 0, 1, ... of one axis are within it, so that none is moved to another
        one, and each stands for one row of the axis."""
        numbers, shape = equation.params["dimension_numbers"], equation.invars[0].aval.shape
        without = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
        kept = [i for i in range(len(shape)) if i not in without]
        window = [equation.invars[2].aval.shape[int(i)] for i in numbers.update_window_dims]
        return total <= shape[axis] and dict(zip(kept, window, strict=True)).get(axis, 1) == 1

    def _counts(self, indices: Atom, components: Sequence[int]) -> bool:
        """Returns whether components of indices count one by one."""
        definition = self._makers.get(indices) if isinstance(indices, Var) else None
        if definition is None or definition.primitive.name != "concatenate":
            return False
        last = len(indices.aval.shape) - 1
        if definition.params["dimension"] != last or any(a.aval.shape[last] != 1 for a in definition.invars):
            return False
        return all(self._is_count(definition.invars[component]) for component in components)

    def _is_count(self, atom: Atom) -> bool:
        for _ in range(DEEPEST):
            definition = self._makers.get(atom) if isinstance(atom, Var) else None
            if definition is None:
                constant = self._constants.get(atom) if isinstance(atom, Var) else None
                if constant is None or compat.is_tracer(constant):
                    return False
                return np.array_equal(np.ravel(constant), np.arange(np.size(constant)))
            name = definition.primitive.name
            if name == "iota":
                return True
            if name == "select_n":  # negative indices count from the end
                atom = definition.invars[1]
            elif name in ("broadcast_in_dim", "convert_element_type", "reshape", "expand_dims", "squeeze"):
                atom = definition.invars[0]
            else:
                return False
        return False

    def _label_set(self, equation: JaxprEqn) -> Atom | None:
        """Computes several elements of each row of logits, or the gradient of these, one after the other."""
        found, first = label_set(equation), equation.invars[0]
        if found is None or len(self.names) >= _MOST:
            return None
        indices, axis = found
        gathers = equation.primitive.name == "gather"
        choice = "labels", first.aval.shape, indices.aval.shape
        if gathers and isinstance(first, Var) and first in self.scores:
            self.choices.add(choice)
            return self._emit(equation, lambda *given: gathered(equation, axis, *given), *equation.invars)
        if not gathers and choice in self.choices and self._is_zero(first):
            return self._emit(equation, lambda *given: scattered(equation, axis, *given), *equation.invars)
        return None

    def _label_window(self, equation: JaxprEqn) -> Atom | None:
        """Computes one element of each of some consecutive rows of logits, or the gradient of these, for all rows."""
        first, gathers = equation.invars[0], equation.primitive.name == "gather"
        wanted = isinstance(first, Var) and first in self.logits if gathers else bool(self.choices)
        window = Window.of(equation, self._makers, self._integers) if wanted else None
        if window is None:
            return None
        if gathers and len(self.names) < _MOST:
            self.choices.add(("window", window))
            return self._emit(equation, window.gathered(equation), *equation.invars)
        if not gathers and ("window", window) in self.choices and self._is_zero(first):
            return self._emit(equation, window.scattered(equation), *equation.invars)
        return None

    def _of_cut(self, equation: JaxprEqn) -> Atom | None:
        """Computes the labels' elements of rows that were cut out, or the gradient of these, as those of all rows."""
        name, first = equation.primitive.name, equation.invars[0] if equation.invars else None
        if not isinstance(first, Var):
            return None
        if name == "slice" and first in self.logits:
            if (cut := Cut.of(equation)) is not None:
                self.cuts[equation.outvars[0]] = first, cut
        elif name == "gather" and first in self.cuts and len(self.names) < _MOST:
            source, cut = self.cuts[first]
            if cut.labels_axis(equation) is not None:
                self.choices.add(("cut", cut, source.aval.shape))
                return self._emit(equation, cut.gathered(equation), source, equation.invars[1])
        elif name == "pad" and self._is_zero(equation.invars[1]):
            cut, scatter = Cut.of(equation), self.definitions.get(first)
            known = cut is not None and ("cut", cut, equation.outvars[0].aval.shape) in self.choices
            if cut is None or not known or scatter is None or scatter.primitive.name != "scatter-add":
                return None
            if self._is_zero(scatter.invars[0]) and cut.labels_axis(scatter) is not None:
                return self._emit(equation, cut.scattered(scatter), *scatter.invars[1:])
        return None

    def _column(self, equation: JaxprEqn) -> Atom | None:
        """Computes the same element of each row of logits, or the gradient of these, as those of labels."""
        first, takes = equation.invars[0], equation.primitive.name == "slice"
        column = Column.of(equation) if isinstance(first, Var) and (takes or self.choices) else None
        if column is None or {axis for shape, axis in self._summed if shape == column.shape} != {column.axis}:
            return None
        if takes and equation.outvars[0] in self._written_out:
            return None
        if takes and first in self.logits and len(self.names) < _MOST:
            self.choices.add(("column", column))
            return self._emit(equation, column.picked, first)
        if not takes and ("column", column) in self.choices and self._is_zero(equation.invars[1]):
            return self._emit(equation, column.placed, first)
        return None
