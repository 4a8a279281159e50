"""Computes rows of values from rows of what they are computed from, back to the products that give logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp
from jax.lax import GatherScatterMode

from autopallas import array_types
from autopallas.compat import JaxprEqn, Var
from autopallas.graph.custom_rules import ELEMENTWISE
from autopallas.graph.flatten import Body, is_contraction
from autopallas.graph.rewritten_body import Atom, RewrittenBody
from autopallas.graph.rows import REDUCTIONS, SELECTIONS, Picked, Rows, layout_of, reshaped

__all__ = ["DEEPEST", "KEEPS_ROWS", "PROMISED", "RESHAPES", "THROUGH", "SelectedRows", "Spread"]

PROMISED = "indices of rows are in range, as the gather promises (PROMISE_IN_BOUNDS), where gradients are taken"
"""Assumption about rows that a gather picks: it clips indices, and its derivative drops what was clipped."""

RESHAPES = frozenset({"reshape", "squeeze", "expand_dims"})
THROUGH = ELEMENTWISE | RESHAPES | {"broadcast_in_dim", "transpose"}
"""Primitives that a selection moves back through, besides reductions and products."""
KEEPS_ROWS = THROUGH | REDUCTIONS | SELECTIONS
"""Primitives whose rows are computed from rows."""
DEEPEST = 128
"""Largest number of equations on one path through which a selection moves."""
_LARGEST = 2**31 - 1
"""Largest number of rows that an index of 32 bits counts."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A value that is ``core`` at some rows and zero at the others; if ``assumed``, only where everything is finite."""

    core: Atom
    rows: Rows
    assumed: bool = False


class SelectedRows(RewrittenBody):
    """Rows of values in one body.

    Args:
      body: the body.
      divided: whether arrays are spread over several devices.
    """

    def __init__(self, body: Body, divided: bool):
        super().__init__(body)
        self.divided = divided
        self.logits: set[Var] = set()
        """Values computed from logits row by row."""
        self.scores: set[Var] = set()
        """``logits``, and what is computed from rows of logits that were selected."""
        self.spread: dict[Var, Spread] = {}
        self.assumed: dict[Var, str] = {}
        self.within: dict[Var, Var] = {}
        """Whether each row is in range, by the merged indices of rows of several axes."""
        self._own: set[Var] = set()
        """Results of the products that give logits."""
        self._flat: dict[tuple[Var, Picked], Var] = {}
        self._selected: dict[tuple[Var, Rows], Atom] = {}

    def _add(self, equation: JaxprEqn) -> None:
        super()._add(equation)
        if not equation.outvars:
            return
        name, result = equation.primitive.name, equation.outvars[0]
        if result in self._own:
            self.logits.add(result)
            self.scores.add(result)
        elif name in KEEPS_ROWS:
            for known in (self.logits, self.scores):
                if any(isinstance(a, Var) and a in known for a in equation.invars):
                    known.add(result)

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
            if steps is None or len(seen) > DEEPEST:
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
        if name in RESHAPES and len(rows.parts) == 1:
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
        if variable in self.logits and depth < DEEPEST:
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


def _from_anywhere(rows: Rows) -> Rows:
    """Returns rows without the variable that holds the first of them, as functions of that variable see them."""
    return rows if isinstance(rows.start, int) else replace(rows, start=-1)
