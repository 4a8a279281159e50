"""Moves values that are put among zeros on, behind the products that end the backward."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import GatherScatterMode

from autopallas.compat import JaxprEqn, Literal, Var
from autopallas.graph.flatten import Body
from autopallas.graph.rewritten_body import Atom
from autopallas.graph.rows import (
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
from autopallas.graph.selected_rows import RESHAPES, SelectedRows, Spread
from autopallas.numerics.casts import counts_exactly

__all__ = ["SpreadRows"]

_LEFT_OUT = "what the loss leaves out, rows of activations and of logits, is finite"
"""Assumption made where the zeros around a gradient are multiplied."""
_LINEAR = frozenset({"neg", "convert_element_type", "copy", "mul", "div", "add", "add_any", "sub", "select_n"})
_REPEATS = frozenset({"broadcast_in_dim", "convert_element_type", "pvary", "pcast"})
"""Primitives that turn a zero into a zero."""


class SpreadRows(SelectedRows):
    """Rows of values in one body, and values that are such rows among zeros.

    Args:
      body: the body.
      choices: which rows were selected, of all bodies.
      assume_finite: whether 0 times anything may be taken for 0.
      divided: whether arrays are spread over several devices.
    """

    def __init__(self, body: Body, choices: set[tuple[Hashable, ...]], assume_finite: bool, divided: bool):
        super().__init__(body, divided)
        self.choices, self.assume_finite = choices, assume_finite

    def _over(self, equation: JaxprEqn) -> Atom | None:
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

    def _put(self, equation: JaxprEqn) -> Spread | None:
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
            low, _, interior = map(int, config[axis])  # numpy's, where something else padded
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
        return Spread(core, replace(rows, fill=None))

    def _put_labels(self, equation: JaxprEqn) -> Spread | None:
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
        return Spread(core, replace(rows, fill=None))

    def _is_zero(self, atom: Atom) -> bool:
        for _ in range(4):
            if isinstance(atom, Literal):
                return not atom.aval.shape and not bool(atom.val)
            equation = self.definitions.get(atom)
            if equation is None or equation.primitive.name not in _REPEATS:
                return False
            atom = equation.invars[0]
        return False

    def _on_spread(self, equation: JaxprEqn) -> Spread | None:
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
            return Spread(self._bind(equation, atoms), rows, assumed)
        shape = result.aval.shape
        if len(operands) != 1:
            return None
        further = self._forward(equation, rows)
        if further is None:
            return None
        layout = layout_of(equation, rows, further.shape(shape), further)
        return Spread(self._emit(equation, layout, first.core), further, assumed)

    def _rolled_back(self, equation: JaxprEqn, given: Sequence[Spread | None]) -> Spread | None:
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
        return None if found is None or rows.more else Spread(found[0], replace(rows, size=whole))

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
        if name not in RESHAPES:
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
            self.assumed[new] = _LEFT_OUT
        if result is None:
            return new
        self.spread[equation.outvars[0]] = Spread(new, result, assumed)
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
                self.assumed[core] = _LEFT_OUT
            return core
        kept = [d for d in range(len(equation.invars[0].aval.shape)) if d not in axes]
        further = rows.among({d: kept.index(d) for d in rows.axes})
        if further is not None:
            self.spread[equation.outvars[0]] = Spread(core, further, own.assumed)
        return None
