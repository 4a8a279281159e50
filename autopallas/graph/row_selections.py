"""Moves selections of rows of logits back to the activations.

A next-token loss takes ``(x @ w)[:, :-1]``: the logits of some rows.  Under a gradient, the selection's derivative puts
the gradient among zeros (``pad``) before the products that end the backward.  Both commute with the product:
``(x @ w)[rows]`` is ``x[rows] @ w``; if P puts rows among zeros, ``P(d) @ w.T`` is ``P(d @ w.T)`` and ``x.T @ P(d)`` is
``x[rows].T @ d``.  So a selection moves back through elementwise computations, casts, broadcasts and reductions over
other axes to the operand of the product, and a value that is put among zeros moves on behind the product.  What
remains is a loss over all the rows that there are, like any other.

The equations of a body change only if the body then has no more products than before.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import GatherScatterMode

from autopallas import array_types, compat, jaxprs
from autopallas.compat import ArrayFunction, JaxprEqn, Literal, Var
from autopallas.faults import contained
from autopallas.graph.custom_rules import ELEMENTWISE
from autopallas.graph.flatten import Body, Child, is_contraction
from autopallas.graph.keys import hashable, literal_key
from autopallas.graph.label_sets import gathered, label_set, scattered
from autopallas.graph.label_windows import Column, Window, summed_axes
from autopallas.graph.rows import (
    REDUCTIONS,
    SELECTIONS,
    Picked,
    Rows,
    groups,
    layout_of,
    picked,
    picked_from_several,
    picked_labels,
    piece,
    reshaped,
    rolled,
    selection,
    window,
)
from autopallas.numerics.casts import counts_exactly

__all__ = ["LEFT_OUT", "PROMISED", "move_selections"]

LEFT_OUT = "what the loss leaves out, rows of activations and of logits, is finite"
"""Assumption made where the zeros around a gradient are multiplied."""
PROMISED = "indices of rows are in range, as the gather promises (PROMISE_IN_BOUNDS), where gradients are taken"
"""Assumption about rows that a gather picks: it clips indices, and its derivative drops what was clipped."""

_RESHAPES = frozenset({"reshape", "squeeze", "expand_dims"})
_PUTS = frozenset({"pad", "dynamic_update_slice", "scatter-add", "rev"})
"""Primitives that put the gradient of a selection among zeros, or in the order of what it selected from."""
_LINEAR = frozenset({"neg", "convert_element_type", "copy", "mul", "div", "add", "add_any", "sub", "select_n"})
_THROUGH = ELEMENTWISE | _RESHAPES | {"broadcast_in_dim", "transpose"}
"""Primitives that a selection moves back through, besides reductions and products."""
_KEEPS_ROWS = _THROUGH | REDUCTIONS | SELECTIONS
"""Primitives whose rows are computed from rows."""
_REPEATS = frozenset({"broadcast_in_dim", "convert_element_type", "pvary", "pcast"})
"""Primitives that turn a zero into a zero."""
_MOST = 32
"""Largest number of selections to move in one body; a loss has a few."""
_DEEPEST = 128
"""Largest number of equations on one path through which a selection moves."""
_LARGEST = 2**31 - 1
"""Largest number of rows that an index of 32 bits counts."""

Atom = Var | Literal


@dataclass(frozen=True, slots=True)
class _Spread:
    """A value that is ``core`` at some rows and zero at the others; if ``assumed``, only where everything is finite."""

    core: Atom
    rows: Rows
    assumed: bool = False


def move_selections(root: Body, assume_finite: bool = True, divided: bool = False) -> Body:
    """Moves selections of rows before the products that give logits, in place, in every body.

    Args:
      root: the program.
      assume_finite: whether 0 times anything may be taken for 0.
      divided: whether arrays are spread over several devices.  Rows of several axes then stay where they are, since the
        merged axes would have to be gathered from all devices.
    """
    choices: set[tuple[Hashable, ...]] = set()
    for body in root.walk():
        if _may_select(body, choices):
            with contained("a selection of rows", "cross_entropy", "graph"):
                _Mover(body, choices, assume_finite, divided).run()
    return root


def _may_select(body: Body, choices: set[tuple[Hashable, ...]]) -> bool:
    names = {e.primitive.name for e in body.equations}
    selects = not names.isdisjoint(SELECTIONS) and not names.isdisjoint(("exp", "exp2"))
    puts = bool(choices) and not names.isdisjoint(_PUTS)
    return "dot_general" in names and (selects or puts)


def _sums_rows(equation: JaxprEqn) -> bool:
    """Returns whether an equation sums each row: not all rows to one, as the gradient of a bias does."""
    if equation.primitive.name != "reduce_sum":
        return False
    axes = sorted(equation.params["axes"])
    return len(axes) == 1 or axes != list(range(len(axes)))


class _Mover:
    """Moves the selections of one body.

    The original equations stay, for their other readers, with new ones among them; equations that nobody reads any more
    are left out at the end.
    """

    def __init__(self, body: Body, choices: set[tuple[Hashable, ...]], assume_finite: bool, divided: bool):
        self.body, self.choices, self.assume_finite, self.divided = body, choices, assume_finite, divided
        self.equations: list[JaxprEqn] = []
        self.definitions: dict[Var, JaxprEqn] = {}
        self.names: dict[Var, Atom] = {}
        """Atoms to read in place of variables."""
        self.logits: set[Var] = set()
        """Values computed from logits row by row."""
        self.spread: dict[Var, _Spread] = {}
        self.assumed: dict[Var, str] = {}
        self.scores: set[Var] = set()
        """``logits``, and what is computed from rows of logits that were selected."""
        self.pieces: dict[Var, tuple[Atom, Rows]] = {}
        """Slices of logits, by the variable that is read in their place."""
        self.within: dict[Var, Var] = {}
        """Whether each row is in range, by the merged indices of rows of several axes."""
        self._flat: dict[tuple[Var, Picked], Var] = {}
        self._selected: dict[tuple[Var, Rows], Atom] = {}
        self._traced: dict[Hashable, compat.ClosedJaxpr] = {}
        self._constants = dict(zip(body.constvars, body.consts, strict=True))
        self._integers: dict[Var, np.ndarray | None] = {
            variable: np.asarray(array)
            for variable, array in self._constants.items()
            if not compat.is_tracer(array) and jnp.issubdtype(array.dtype, jnp.integer)
        }
        self._own = self._flowing()

    def run(self) -> None:
        if not self.choices and not self._selects():
            return
        children: dict[int, list[Child]] = {}
        for position, equation in enumerate(self.body.equations):
            inputs = [self._named(a) for a in equation.invars]
            if any(map(operator.is_not, inputs, equation.invars)):
                equation = equation.replace(invars=inputs)
            new = self._in_place_of(equation)
            if new is not None:
                self.names[equation.outvars[0]] = new
            self._add(equation)
            if position in self.body.children:
                children[id(equation)] = self.body.children[position]
        if not self.names:
            return
        outvars = [self._named(a) for a in self.body.outvars]
        live = jaxprs.live_equations(self.equations, outvars)
        before = jaxprs.live_equations(self.body.equations, self.body.outvars)
        if sum(map(is_contraction, live)) <= sum(map(is_contraction, before)):
            self.body.replace(live, outvars, {i: children[id(e)] for i, e in enumerate(live) if id(e) in children})
            self.body.assumed.update(self.assumed)

    # ------------------------------------------------------------------ what flows where

    def _flowing(self) -> set[Var]:
        """Returns the results of products that flow element by element into an exponential that is summed so, as in a
        softmax.  Gates of recurrences are exponentials of products too, and their scans select many rows of these."""
        found: set[Var] = set()
        own: set[Var] = set()
        summed: set[Var] = set()
        layout = _THROUGH | SELECTIONS | {"concatenate"}
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
            if name in _KEEPS_ROWS and not scores.isdisjoint([a for a in equation.invars if isinstance(a, Var)]):
                if selection(equation) is not None:
                    return True
                if name == "gather" and any(f(equation) for f in (label_set, picked_from_several, picked_labels)):
                    return True
                scores.add(equation.outvars[0])
        return False

    def _named(self, atom: Atom) -> Atom:
        while isinstance(atom, Var) and atom in self.names:
            atom = self.names[atom]
        return atom

    def _add(self, equation: JaxprEqn) -> None:
        self.equations.append(equation)
        for variable in equation.outvars:
            self.definitions[variable] = equation
        if not equation.outvars:
            return
        name, result = equation.primitive.name, equation.outvars[0]
        if result in self._own:
            self.logits.add(result)
            self.scores.add(result)
        elif name in _KEEPS_ROWS:
            for known in (self.logits, self.scores):
                if any(isinstance(a, Var) and a in known for a in equation.invars):
                    known.add(result)

    def _emit(self, like: JaxprEqn, function: ArrayFunction, *atoms: Atom, known_by: Hashable = None) -> Var:
        """Emits equations for a function of some atoms; returns its result.

        Functions with equal ``known_by``, which tells one from others, are traced once for operands of some types.
        """
        key = None if known_by is None else (known_by, *(a.aval for a in atoms))
        made = self._traced.get(key)
        if made is None:
            made = compat.make_jaxpr(function, *(array_types.shape_of(a.aval) for a in atoms))
            if key is not None:
                self._traced[key] = made
        inner, consts = jaxprs.open_jaxpr(made)
        assert not consts
        names: dict[Var, Atom] = dict(zip(inner.invars, atoms, strict=True))
        for equation in inner.eqns:
            inner_outvars = equation.outvars
            inputs = [a if isinstance(a, Literal) else names[a] for a in equation.invars]
            avals = [a.aval for a in inputs]
            outputs = [Var(array_types.array_type(v.aval.shape, v.aval.dtype, avals, v.aval)) for v in equation.outvars]
            equation = equation.replace(invars=inputs, outvars=outputs, source_info=like.source_info, ctx=like.ctx)
            names.update(zip(inner_outvars, outputs, strict=True))
            moved = self._over_spread(equation)
            if moved is not None:
                names[inner_outvars[0]] = moved
            self._add(equation)
        (result,) = inner.outvars
        assert isinstance(result, Var)
        found = names[result]
        assert isinstance(found, Var)
        return found

    def _bind(self, like: JaxprEqn, atoms: Sequence[Atom], **params: object) -> Var:
        """Emits the equation ``like`` with other operands and parameters."""
        full = {**like.params, **params}
        varying = [a for a in atoms if not isinstance(a, Literal)]

        def function(*given: jax.Array) -> jax.Array:
            left = iter(given)
            result: jax.Array = like.primitive.bind(
                *(a.val if isinstance(a, Literal) else next(left) for a in atoms), **full
            )
            return result

        literals = tuple(literal_key(a) if isinstance(a, Literal) else None for a in atoms)
        return self._emit(like, function, *varying, known_by=(like.primitive, hashable(full), literals))

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
        if name == "concatenate":
            pieces = [self.pieces.get(a) if isinstance(a, Var) else None for a in equation.invars]
            found = rolled(pieces, equation.params["dimension"])
            if found is not None and found[0] in self.logits and self._comes_to_a_product(*found):
                return self._select(*found, equation)
            return None
        column = self._column(equation) if name in ("slice", "pad") else None
        if column is not None:
            return column
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
        return self._over_spread(equation)

    def _over_spread(self, equation: JaxprEqn) -> Atom | None:
        """Returns what to read in place of an equation's result, if an operand is a value among zeros that moves on."""
        name = equation.primitive.name
        if any(isinstance(a, Var) and a in self.spread for a in equation.invars):
            if name == "dot_general":
                return self._product_of_spread(equation)
            if name == "reduce_sum":
                return self._sum_of_spread(equation)
            moved = self._on_spread(equation)
            if moved is not None:
                self.spread[equation.outvars[0]] = moved
        return None

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

    def _counts(self, indices: Atom, components: Sequence[int]) -> bool:
        """Returns whether components of indices count one by one."""
        definition = self.definitions.get(indices) if isinstance(indices, Var) else None
        if definition is None or definition.primitive.name != "concatenate":
            return False
        last = len(indices.aval.shape) - 1
        if definition.params["dimension"] != last or any(a.aval.shape[last] != 1 for a in definition.invars):
            return False
        return all(self._is_count(definition.invars[component]) for component in components)

    def _is_count(self, atom: Atom) -> bool:
        for _ in range(_DEEPEST):
            definition = self.definitions.get(atom) if isinstance(atom, Var) else None
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

    def _merged(self, equation: JaxprEqn, picks: Picked | None) -> Rows | None:
        """Returns the rows of several axes that a gather picks, or that a scatter puts, as rows of one merged axis."""
        if picks is None or not picks.rows <= math.prod(picks.sizes) <= _LARGEST:
            return None
        if self.divided or any(array_types.explicit_sharding(a.aval) is not None for a in equation.invars):
            return None
        indices, mode, fill = equation.invars[1], equation.params["mode"], None
        assert isinstance(indices, Var)
        key = indices, picks
        if key not in self._flat:
            self._flat[key] = self._emit(equation, picks.flat, indices)
            self.within[self._flat[key]] = self._emit(equation, picks.within, indices)
        if "FILL" in str(mode).upper():
            own = equation.params.get("fill_value")
            mode, fill = GatherScatterMode.CLIP, math.nan if own is None else float(own)
        whole = (math.prod(picks.sizes),)
        return Rows(picks.axes[0], whole, 0, self._flat[key], picks.rows, mode=mode, fill=fill, merged=len(picks.sizes))

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
        window = Window.of(equation, self.definitions, self._integers) if wanted else None
        if window is None:
            return None
        if gathers and len(self.names) < _MOST:
            self.choices.add(("window", window))
            return self._emit(equation, window.gathered(equation), *equation.invars)
        if not gathers and ("window", window) in self.choices and self._is_zero(first):
            return self._emit(equation, window.scattered(equation), *equation.invars)
        return None

    def _column(self, equation: JaxprEqn) -> Atom | None:
        """Computes the same element of each row of logits, or the gradient of these, as those of labels."""
        first, takes = equation.invars[0], equation.primitive.name == "slice"
        column = Column.of(equation) if isinstance(first, Var) and (takes or self.choices) else None
        if column is None or {axis for shape, axis in self._summed if shape == column.shape} != {column.axis}:
            return None
        if takes and first in self.logits and len(self.names) < _MOST:
            self.choices.add(("column", column))
            return self._emit(equation, column.picked, first)
        if not takes and ("column", column) in self.choices and self._is_zero(equation.invars[1]):
            return self._emit(equation, column.placed, first)
        return None

    def _comes_to_a_product(self, variable: Var, rows: Rows) -> bool:
        """Returns whether a selection moves back to a product, through everything in between."""
        todo: list[tuple[Var, Rows]] = [(variable, rows)]
        seen = set(todo)
        found = False
        while todo:
            one, own = todo.pop()
            if one not in self.logits:
                continue
            if one in self._own:
                if self._mixes_operands(one, own) or self._cuts_batches(one, own):
                    return False
                found = True
                continue
            steps = self._steps(one, own)
            if steps is None or len(seen) > _DEEPEST:
                return False
            for atom, further in steps:
                if isinstance(atom, Var) and further is not None and (atom, further) not in seen:
                    seen.add((atom, further))
                    todo.append((atom, further))
        return found

    def _mixes_operands(self, logits: Var, rows: Rows) -> bool:
        """Returns whether rows of several axes are along an axis of each operand of the product that gives the logits:
        such as one label for each row, of the same rows of all examples."""
        equation = self.definitions[logits]
        if equation.primitive.name != "dot_general":
            return False
        contracting, batch = equation.params["dimension_numbers"]
        end = len(equation.invars[0].aval.shape) - len(contracting[0])
        return any(d >= end for d in rows.axes) and any(len(batch[0]) <= d < end for d in rows.axes)

    def _cuts_batches(self, logits: Var, rows: Rows) -> bool:
        """Returns whether rows are a part of an axis along which both operands of the product lie, such as every other
        head of an attention: those of activations are along an axis of one operand."""
        equation = self.definitions[logits]
        if equation.primitive.name != "dot_general" or len(rows.parts) == 1:
            return False
        batch = equation.params["dimension_numbers"][1][0]
        return any(d < len(batch) for d in rows.axes)

    def _steps(self, variable: Var, rows: Rows) -> list[tuple[Atom, Rows | None]] | None:
        """Returns the operands of a value's equation, each with its rows that the value's rows are computed from (None:
        the operand as it is); returns None if the value is not computed row by row."""
        equation = self.definitions[variable]
        name, operands = equation.primitive.name, equation.invars
        shape = variable.aval.shape
        if name in ELEMENTWISE:
            if not all(rows.fits(a.aval.shape, shape) for a in operands):
                return None
            return [(a, rows if rows.varies(a.aval.shape, shape) else None) for a in operands]
        if name in REDUCTIONS:
            axes = equation.params["axes"]
            kept = [d for d in range(len(operands[0].aval.shape)) if d not in axes]
            found = rows.among(kept)
            return None if found is None else [(operands[0], found)]
        if name == "broadcast_in_dim":
            targets, own = equation.params["broadcast_dimensions"], operands[0].aval.shape
            if len(operands) != 1:
                return None
            given = [d for d in rows.axes if d in targets and own[targets.index(d)] == shape[d]]
            if not given:  # all rows are the same
                return [(operands[0], None)]
            if len(given) != rows.merged:
                return None
            found = rows.among({d: targets.index(d) for d in rows.axes})
            return None if found is None else [(operands[0], found)]
        if name == "transpose" and len(rows.parts) == 1:
            found = rows.among(equation.params["permutation"])
            return None if found is None else [(operands[0], found)]
        if name in _RESHAPES and len(rows.parts) == 1:
            found = reshaped(operands[0].aval.shape, shape, rows)
            return None if found is None else [(operands[0], found)]
        return None

    def _select(self, atom: Atom, rows: Rows, like: JaxprEqn, depth: int = 0) -> Atom:
        """Computes the rows of a value from the rows of its operands."""
        if not isinstance(atom, Var):
            return self._emit(like, lambda: rows.select(jnp.asarray(atom.val)))
        key = atom, rows
        if key not in self._selected:
            self._selected[key] = self._selected_anew(atom, rows, like, depth)
        return self._selected[key]

    def _selected_anew(self, variable: Var, rows: Rows, like: JaxprEqn, depth: int) -> Atom:
        spread = self.spread.get(variable)
        if spread is not None and spread.rows == rows and not spread.assumed and rows.mode is None:
            return spread.core
        if variable in self.logits and depth < _DEEPEST:
            equation = self.definitions[variable]
            if is_contraction(equation):
                product = self._rows_of_product(equation, rows)
                if product is not None:
                    return product
            else:
                steps = self._steps(variable, rows)
                if steps is not None:
                    return self._again(equation, rows, steps, depth)
        definition = self.definitions.get(variable)
        if definition is not None and definition.primitive.name == "broadcast_in_dim":
            steps = self._steps(variable, rows)
            if steps is not None and steps[0][1] is None:  # all rows are the same, as for a bias
                return self._again(definition, rows, steps, depth)
        return self._taken(variable, rows, like)

    def _taken(self, atom: Atom, rows: Rows, like: JaxprEqn) -> Atom:
        """Takes the rows of a value from the value itself."""
        if isinstance(rows.start, int):
            return self._emit(like, rows.select, atom, known_by=("taken", rows))
        return self._emit(like, rows.select, atom, rows.start, known_by=("taken", _from_anywhere(rows)))

    def _filled(self, like: JaxprEqn, rows: Rows, atom: Atom, fill: float) -> Atom:
        """Replaces selected rows whose index is out of range by ``fill``."""
        assert isinstance(rows.start, Var)
        within = self.within.get(rows.start)
        if within is None:
            within = self.within[rows.start] = self._emit(like, rows.within, rows.start)
        known_by = "filled", _from_anywhere(rows), str(fill)
        return self._emit(like, lambda array, where: rows.filled(array, where, fill), atom, within, known_by=known_by)

    def _again(self, equation: JaxprEqn, rows: Rows, steps: Sequence[tuple[Atom, Rows | None]], depth: int) -> Atom:
        """Computes the rows of an equation's result from its operands' rows."""
        name, result = equation.primitive.name, equation.outvars[0]
        atoms = [a if own is None else self._select(a, own, equation, depth + 1) for a, own in steps]
        if name in ELEMENTWISE:
            for position, (atom, own) in enumerate(steps):
                if own is None:
                    atoms[position] = self._repeated(atom, rows, equation)
            return self._bind(equation, atoms)
        return self._emit(equation, layout_of(equation, steps[0][1], rows.shape(result.aval.shape), rows), *atoms)

    def _repeated(self, atom: Atom, rows: Rows, like: JaxprEqn) -> Atom:
        """Reshapes an operand that is the same for all rows to fit the merged rows."""
        return self._emit(like, rows.repeated, atom) if rows.merged > 1 and atom.aval.shape else atom

    def _rows_of_product(self, equation: JaxprEqn, rows: Rows) -> Atom | None:
        (contracting, batch), operands = equation.params["dimension_numbers"], equation.invars
        if rows.axis < len(batch[0]):
            if rows.more or rows.merged > 1:
                return None
            atoms = [self._taken(a, rows.at(batch[side][rows.axis]), equation) for side, a in enumerate(operands)]
            return self._product(equation, atoms)
        ranks = [len(a.aval.shape) for a in operands]
        free = [[d for d in range(ranks[s]) if d not in (*contracting[s], *batch[s])] for s in (0, 1)]
        position = rows.axis - len(batch[0])
        side = int(position >= len(free[0]))
        first = position - side * len(free[0])
        if first + rows.merged > len(free[side]):
            return None
        own = rows.among({d: free[side][first + i] for i, d in enumerate(rows.axes)})
        if own is None:
            return None
        atoms = list(operands)
        atoms[side] = self._taken(operands[side], own, equation)
        moved = [tuple(own.moved(d) if s == side else d for d in contracting[s]) for s in (0, 1)]
        pairs = [tuple(own.moved(d) if s == side else d for d in batch[s]) for s in (0, 1)]
        found = self._product(equation, atoms, dimension_numbers=(tuple(moved), tuple(pairs)))
        if rows.mode is GatherScatterMode.PROMISE_IN_BOUNDS:
            self.assumed[found] = PROMISED
        return found

    def _product(self, equation: JaxprEqn, atoms: Sequence[Atom], **params: object) -> Var:
        found = self._bind(equation, atoms, **params)
        self._own.add(found)
        self.logits.add(found)
        self.scores.add(found)
        return found

    # ------------------------------------------------------------------ what is put among zeros moves on

    def _put(self, equation: JaxprEqn) -> _Spread | None:
        """Returns what an equation puts among zeros, if it is the transpose of a selection of rows."""
        name, result = equation.primitive.name, equation.outvars[0]
        if not self.choices or not jnp.issubdtype(result.aval.dtype, jnp.floating):
            return None
        shape = result.aval.shape
        if name == "pad" and self._is_zero(equation.invars[1]):
            config = equation.params["padding_config"]
            changed = [d for d, c in enumerate(config) if c != (0, 0, 0)]
            if len(changed) != 1 or any(n < 0 for n in config[changed[0]]):
                return None
            (axis,) = changed
            low, _, interior = config[axis]
            size = equation.invars[0].aval.shape[axis]
            rows = Rows(axis, (shape[axis],), 0, low, size, interior + 1 if size > 1 else 1)
        elif name == "rev":
            found = selection(equation)
            if found is None:
                return None
            rows = found
        elif name == "dynamic_update_slice" and self._is_zero(equation.invars[0]):
            found = window(equation.invars[2:], shape, equation.invars[1].aval.shape)
            if found is None:
                return None
            rows = found
        elif name == "scatter-add" and self._is_zero(equation.invars[0]):
            numbers, updates = equation.params["dimension_numbers"], equation.invars[2].aval.shape
            (axis,) = numbers.inserted_window_dims if len(numbers.inserted_window_dims) == 1 else (-1,)
            own = numbers.update_window_dims, (axis,), numbers.scatter_dims_to_operand_dims
            batching = numbers.operand_batching_dims
            found = picked(equation.invars[1], own, batching, shape, updates, equation.params["mode"])
            if found is None:
                found = self._merged(equation, picked_from_several(equation))
            if found is None:
                return self._put_labels(equation)
            rows = found
        else:
            return None
        core = equation.invars[{"pad": 0, "rev": 0, "scatter-add": 2}.get(name, 1)]
        if rows.choice not in self.choices:
            return None
        if core.aval.shape != rows.shape(shape):
            core = self._emit(equation, lambda array: lax.reshape(array, rows.shape(shape)), core)
        # A gather clips indices that are promised to be in range; the scatter that is its transpose drops them.
        promised = rows.mode is GatherScatterMode.PROMISE_IN_BOUNDS
        if promised and isinstance(rows.start, Var):
            if not counts_exactly(rows.start.aval.dtype, rows.parts[rows.part] - 1):
                return None
        if rows.fill is not None or promised:
            core = self._filled(equation, rows, core, 0.0)
        return _Spread(core, replace(rows, fill=None))

    def _put_labels(self, equation: JaxprEqn) -> _Spread | None:
        """Returns single elements put among zeros, as rows of one element each."""
        picks, component = picked_labels(equation) or (None, 0)
        rows = self._merged(equation, picks)
        if picks is None or rows is None or rows.choice not in self.choices:
            return None
        mode, shape = equation.params["mode"], equation.outvars[0].aval.shape

        def put(indices: jax.Array, updates: jax.Array) -> jax.Array:
            labels = lax.reshape(lax.index_in_dim(indices, component, indices.ndim - 1), (rows.size, 1))
            numbers = lax.ScatterDimensionNumbers((), (1,), (1,), (0,), (0,))
            zeros = jnp.zeros((rows.size, shape[-1]), updates.dtype)
            return lax.scatter_add(zeros, labels, lax.reshape(updates, (rows.size,)), numbers, mode=mode)

        core: Atom = self._emit(equation, put, *equation.invars[1:])
        if rows.mode is GatherScatterMode.PROMISE_IN_BOUNDS or rows.fill is not None:
            core = self._filled(equation, rows, core, 0.0)
        return _Spread(core, replace(rows, fill=None))

    def _is_zero(self, atom: Atom) -> bool:
        for _ in range(4):
            if isinstance(atom, Literal):
                return not atom.aval.shape and not bool(atom.val)
            equation = self.definitions.get(atom)
            if equation is None or equation.primitive.name not in _REPEATS:
                return False
            atom = equation.invars[0]
        return False

    def _on_spread(self, equation: JaxprEqn) -> _Spread | None:
        """Returns the result of an equation as a value among zeros, if it is one."""
        name, operands, result = equation.primitive.name, equation.invars, equation.outvars[0]
        given = [self.spread.get(a) if isinstance(a, Var) else None for a in operands]
        first = next(s for s in given if s is not None)
        rows, assumed = first.rows, any(s.assumed for s in given if s is not None)
        if len(given) == 2 and (back := self._rolled_back(equation, given)) is not None:
            return back
        if any(s is not None and s.rows != rows for s in given):
            return None
        if name in _LINEAR:
            alone = sum(s is None for s in given)
            if name in ("add", "add_any", "sub") and alone:
                return None
            if name == "div" and given[1] is not None:
                return None
            if name == "select_n":
                if given[0] is not None or any(
                    s is None and not self._is_zero(a) for s, a in zip(given[1:], operands[1:], strict=True)
                ):
                    return None
            elif name in ("mul", "div") and not alone:
                return None
            elif name in ("mul", "div"):
                other = operands[next(i for i, s in enumerate(given) if s is None)]
                if not isinstance(other, Literal):
                    if not self.assume_finite:
                        return None
                    assumed = True
                elif not math.isfinite(other.val) or (name == "div" and not other.val):
                    return None
            whole = result.aval.shape
            if not all(rows.fits(a.aval.shape, whole) for a in operands):
                return None
            atoms: list[Atom] = []
            for atom, own in zip(operands, given, strict=True):
                if own is not None:
                    atoms.append(own.core)
                else:
                    varies = rows.varies(atom.aval.shape, whole)
                    atoms.append(self._select(atom, rows, equation) if varies else self._repeated(atom, rows, equation))
            return _Spread(self._bind(equation, atoms), rows, assumed)
        shape = result.aval.shape
        if len(operands) != 1:
            return None
        further = self._forward(equation, rows)
        if further is None:
            return None
        layout = layout_of(equation, rows, further.shape(shape), further)
        return _Spread(self._emit(equation, layout, first.core), further, assumed)

    def _rolled_back(self, equation: JaxprEqn, given: Sequence[_Spread | None]) -> _Spread | None:
        """Returns the sum of the two parts of one value, each among zeros, as the rolled value."""
        first, second = given
        if equation.primitive.name not in ("add", "add_any") or first is None or second is None:
            return None
        low, high = sorted((first, second), key=lambda s: s.rows.start != 0)
        rows, size, whole = high.rows, low.rows.size, high.rows.parts[high.rows.part]
        if rows.start != size or rows.mode is not None or rows.stride != 1 or size + rows.size != whole:
            return None
        if low.rows != replace(rows, start=0, size=size) or low.assumed or high.assumed:
            return None
        pieces = []
        for spread in (low, high):
            core = spread.core
            definition = self.definitions.get(core) if isinstance(core, Var) else None
            pieces.append(piece(definition, core) if definition is not None and isinstance(core, Var) else None)
        found = rolled(pieces, rows.axis)
        return None if found is None or rows.more else _Spread(found[0], replace(rows, size=whole))

    def _forward(self, equation: JaxprEqn, rows: Rows) -> Rows | None:
        """Returns the rows of a layout operation's result that correspond to those of its operand."""
        name, params = equation.primitive.name, equation.params
        before, after = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
        if name == "broadcast_in_dim":
            targets = params["broadcast_dimensions"]
            return rows.among(targets) if all(before[d] == after[targets[d]] for d in rows.axes) else None
        if len(rows.parts) > 1:
            return None
        if name == "transpose":
            permutation = tuple(params["permutation"])
            return rows.among({d: permutation.index(d) for d in rows.axes})
        if name not in _RESHAPES:
            return None
        if rows.merged > 1:
            return reshaped(after, before, rows)
        for axis in range(len(after)):  # the axis itself, or one into which it is merged with others
            for parts in groups(before, rows.axis):
                own = replace(rows, axis=axis, parts=parts[0], part=parts[1])
                if not own.more:
                    same = reshaped(before, after, own.at(axis)) if after[axis] == parts[0][0] else None
                    if same is not None and same == rows:
                        return own
                elif after[axis] == math.prod(own.parts) and math.prod(after[:axis]) == math.prod(before[: parts[2]]):
                    return own
        return reshaped(after, before, rows)

    def _product_of_spread(self, equation: JaxprEqn) -> Atom | None:
        """Computes a product with a value among zeros; the zeros may meet infinite factors."""
        (contracting, batch), operands = equation.params["dimension_numbers"], equation.invars
        side, spread = next((i, a) for i, a in enumerate(operands) if isinstance(a, Var) and a in self.spread)
        own = self.spread[spread]
        if not self.assume_finite and not own.rows.all:
            return None
        rows, other = own.rows, operands[1 - side]
        ranks = [len(a.aval.shape) for a in operands]
        free = [[d for d in range(ranks[s]) if d not in (*contracting[s], *batch[s])] for s in (0, 1)]
        atoms: list[Atom] = [own.core, other] if side == 0 else [other, own.core]
        result: Rows | None = None
        theirs = replace(rows, parts=(0,), part=0, axis=ranks[1 - side], merged=1)  # the other operand stays as it is
        if rows.axis in contracting[side] or rows.axis in batch[side]:
            axes = contracting if rows.axis in contracting[side] else batch
            if any(d not in axes[side] for d in rows.axes):
                return None
            found = rows.among({d: axes[1 - side][axes[side].index(d)] for d in rows.axes})
            if found is None or axes is batch and (rows.more or rows.merged > 1):
                return None
            theirs = found
            atoms[1 - side] = self._taken(other, theirs, equation)
            if axes is batch:
                result = rows.at(batch[side].index(rows.axis))
        else:
            if any(d not in free[side] for d in rows.axes):
                return None
            result = rows.at(len(batch[0]) + free[side].index(rows.axis) + (len(free[0]) if side else 0))

        left, right = (rows, theirs) if side == 0 else (theirs, rows)

        def dims(axes: tuple[Sequence[int], Sequence[int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
            return tuple(left.all_moved(axes[0])), tuple(right.all_moved(axes[1]))

        new = self._bind(equation, atoms, dimension_numbers=(dims(contracting), dims(batch)))
        assumed = own.assumed or not rows.all
        if assumed:
            self.assumed[new] = LEFT_OUT
        if result is None:
            return new
        self.spread[equation.outvars[0]] = _Spread(new, result, assumed)
        shape = equation.outvars[0].aval.shape
        if isinstance(result.start, int):
            return self._emit(equation, lambda core: result.put(core, shape), new)
        return self._emit(equation, lambda core, start: result.put(core, shape, start), new, result.start)

    def _sum_of_spread(self, equation: JaxprEqn) -> Atom | None:
        """Sums a value among zeros over the rows, or over other axes, which gives a value among zeros again."""
        operand = equation.invars[0]
        assert isinstance(operand, Var)
        own = self.spread[operand]
        rows, axes = own.rows, equation.params["axes"]
        if len({d in axes for d in rows.axes}) > 1:
            return None
        core = self._bind(equation, [own.core], axes=tuple(rows.all_moved(axes)))
        if rows.axis in axes:
            if own.assumed:
                self.assumed[core] = LEFT_OUT
            return core
        kept = [d for d in range(len(equation.invars[0].aval.shape)) if d not in axes]
        further = rows.among({d: kept.index(d) for d in rows.axes})
        if further is not None:
            self.spread[equation.outvars[0]] = _Spread(core, further, own.assumed)
        return None


def _from_anywhere(rows: Rows) -> Rows:
    """Returns rows without the variable that holds the first of them, as functions of that variable see them."""
    return rows if isinstance(rows.start, int) else replace(rows, start=-1)
