"""Reads the program that JAX's derivative makes of a scatter whose indices may occur twice.

The writes are numbered from 1.  The numbers are scattered into zeros, so that an element has the number of the write
that comes last, or 0.  Elements with a number are taken as 0, and to these the last write of each is added, the others
as 0.  So the elements without a number are those that are not written to, and what is added up is what a scatter gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from autopallas import jaxprs
from autopallas.compat import JaxprEqn, Literal
from autopallas.graph.rewritten_body import Atom
from autopallas.numerics.casts import counts_exactly, kind_of

__all__ = ["NumberedWrites"]

_SPREADS = frozenset({"broadcast_in_dim", "reshape"})
_MOST_SPREADS = 8


class NumberedWrites:
    """Recognises such writes by the equations that define values.

    Args:
      definition: gives the equation that computes a value, in this body or in one around it; None for others.
      same: tells whether two values are one.
    """

    def __init__(self, definition: Callable[[Atom], JaxprEqn | None], same: Callable[[Atom, Atom], bool]):
        self._defined, self._equal = definition, same

    def _definition(self, atom: Atom) -> JaxprEqn | None:
        return self._defined(self._plain(atom))

    def _same(self, a: Atom, b: Atom) -> bool:
        return self._equal(self._plain(a), self._plain(b))

    def _plain(self, atom: Atom) -> Atom:
        """Returns what is cast to vary over the axes of a mesh."""
        for _ in range(_MOST_SPREADS):
            equation = self._defined(atom)
            if equation is None or equation.primitive.name not in jaxprs.VARYING:
                break
            (atom,) = equation.invars
        return atom

    def unwritten(self, atom: Atom) -> JaxprEqn | None:
        """Returns the scatter of numbers from whose result a mask of the elements without a number is computed."""
        equation = self._definition(atom)
        if equation is None or equation.primitive.name != "eq":
            return None
        for numbers, zero in (equation.invars, equation.invars[::-1]):
            scatter = self._definition(numbers)
            if scatter is not None and scatter.primitive.name == "scatter" and self._full_of(zero, 0):
                return scatter if self._numbers(scatter) else None
        return None

    def kept(self, equation: JaxprEqn) -> tuple[JaxprEqn, int, Atom, Atom] | None:
        """Returns the scatter of numbers, the axis along which these are told apart, the zero and the array, where an
        equation takes the elements without a number and zero elsewhere."""
        if equation.primitive.name != "select_n" or len(equation.invars) != 3:
            return None
        mask, zero, taken = equation.invars
        if not self._full_of(zero, 0):
            return None
        for axis in range(len(equation.outvars[0].aval.shape)):
            source, place = self._unspread(mask, axis)
            scatter = None if place is None else self.unwritten(source)
            if scatter is not None and list(scatter.params["dimension_numbers"].inserted_window_dims) == [place]:
                return scatter, axis, zero, taken
        return None

    def write(self, equation: JaxprEqn) -> tuple[Atom, Atom] | None:
        """Returns the array into which a ``scatter-add`` writes, and what it writes, where it is such a program's last
        equation; None for any other."""
        dimensions = equation.params["dimension_numbers"]
        along = [int(i) for i in dimensions.scatter_dims_to_operand_dims]
        masked, indices, updates = equation.invars
        counted = _counted_axes(equation)
        if len(along) != 1 or list(dimensions.inserted_window_dims) != along or len(counted) != 1:
            return None
        update, place = self._unspread(updates, counted[0])
        kept, last = self._chosen(masked), self._chosen(update)
        if kept is None or last is None or place is None:
            return None
        (mask, axis), (here, place) = self._unspread(kept[0], along[0]), self._unspread(last[0], place)
        if axis is None:
            return None
        scatter, written = self.unwritten(mask), self._definition(here)
        if scatter is None or written is None or written.primitive.name != "eq":
            return None
        if not self._same(indices, scatter.invars[1]) or equation.params["mode"] != scatter.params["mode"]:
            return None
        if list(scatter.params["dimension_numbers"].scatter_dims_to_operand_dims) != [axis]:
            return None
        if equation.outvars[0].aval.shape[along[0]] != scatter.outvars[0].aval.shape[axis]:
            return None
        if _counted_axes(scatter) != [place]:
            return None
        for numbers, read in (written.invars, written.invars[::-1]):
            if self._same(numbers, scatter.invars[2]) and self._reads_back(read, scatter):
                return kept[1], last[1]
        return None

    def _chosen(self, atom: Atom) -> tuple[Atom, Atom] | None:
        """Returns a mask and the array that is taken where it holds, if zero is taken elsewhere."""
        equation = self._definition(atom)
        if equation is None or equation.primitive.name != "select_n" or len(equation.invars) != 3:
            return None
        mask, zero, taken = equation.invars
        return (mask, taken) if self._full_of(zero, 0) else None

    def _numbers(self, scatter: JaxprEqn) -> bool:
        """Returns whether a scatter writes numbers from 1 on into zeros, along one axis, to each index its own."""
        zeros, _, numbers = scatter.invars
        dimensions = scatter.params["dimension_numbers"]
        whole, updates = zeros.aval.shape, numbers.aval.shape
        window = [int(i) for i in dimensions.update_window_dims]
        along = [int(i) for i in dimensions.scatter_dims_to_operand_dims]
        inserted = [int(i) for i in dimensions.inserted_window_dims]
        if kind_of(zeros.aval.dtype) not in "iu" or not self._full_of(zeros, 0) or inserted != along or len(along) != 1:
            return False
        if tuple(dimensions.operand_batching_dims) or scatter.params["update_jaxpr"] is not None:
            return False
        if [updates[i] for i in window] != [n for i, n in enumerate(whole) if i != along[0]]:
            return False
        counted = [1 if i in window else n for i, n in enumerate(updates)]
        return self._counts(numbers, counted)

    def _counts(self, numbers: Atom, counted: list[int]) -> bool:
        """Returns whether an array holds 1, 2, 3, ... along the axes that are larger than 1 in a shape, and is the same
        along the others."""
        total = self._definition(numbers)
        if total is None or total.primitive.name != "add" or not counts_exactly(numbers.aval.dtype, math.prod(counted)):
            return False
        for ones, count in (total.invars, total.invars[::-1]):
            if not self._full_of(ones, 1):
                continue
            if list(count.aval.shape) not in (counted, list(numbers.aval.shape)):
                continue
            if list(count.aval.shape) != counted:
                spread = self._definition(count)
                if spread is None or spread.primitive.name != "broadcast_in_dim":
                    continue
                if list(spread.params["broadcast_dimensions"]) != [*range(len(counted))]:
                    continue
                (count,) = spread.invars
                if list(count.aval.shape) != counted:
                    continue
            iota = self._definition(count)
            if iota is not None and iota.primitive.name == "reshape":
                iota = self._definition(iota.invars[0])
            if iota is not None and iota.primitive.name == "iota" and len(iota.outvars[0].aval.shape) == 1:
                return True
        return False

    def _reads_back(self, atom: Atom, scatter: JaxprEqn) -> bool:
        """Returns whether a value is gathered from scattered numbers by the indices by which they were scattered."""
        gather = self._definition(atom)
        if gather is None or gather.primitive.name != "gather":
            return False
        (result,), (operand, indices) = scatter.outvars, gather.invars
        own, other, mode = (
            gather.params["dimension_numbers"],
            scatter.params["dimension_numbers"],
            gather.params["mode"],
        )
        (along,) = other.scatter_dims_to_operand_dims
        sizes = [1 if i == along else n for i, n in enumerate(result.aval.shape)]
        return (
            self._same(operand, result)
            and self._same(indices, scatter.invars[1])
            and tuple(own.offset_dims) == tuple(other.update_window_dims)
            and tuple(own.collapsed_slice_dims) == tuple(other.inserted_window_dims)
            and tuple(own.start_index_map) == tuple(other.scatter_dims_to_operand_dims)
            and not tuple(own.operand_batching_dims)
            and list(gather.params["slice_sizes"]) == sizes
            and (mode.name != "FILL_OR_DROP" or scatter.params["mode"].name == "FILL_OR_DROP")
        )

    def _unspread(self, atom: Atom, axis: int) -> tuple[Atom, int | None]:
        """Returns the value that is repeated along axes that ``vmap`` added, and which of its axes one of those that it
        has afterwards is."""
        place: int | None = axis
        for _ in range(_MOST_SPREADS):
            equation = self._definition(atom)
            if equation is None or equation.primitive.name != "broadcast_in_dim" or place is None:
                break
            source, dimensions = equation.invars[0], [int(i) for i in equation.params["broadcast_dimensions"]]
            place = dimensions.index(place) if place in dimensions else None
            if place is not None and source.aval.shape[place] != equation.outvars[0].aval.shape[axis]:
                place = None
            axis = axis if place is None else place
            atom = source
        return atom, place

    def _full_of(self, atom: Atom, number: int) -> bool:
        """Returns whether all elements of an array are one number, by literals and what spreads them."""
        for _ in range(_MOST_SPREADS):
            if isinstance(atom, Literal):
                return bool(np.all(np.asarray(atom.val) == number))
            equation = self._definition(atom)
            if equation is None or equation.primitive.name not in _SPREADS:
                return False
            (atom,) = equation.invars
        return False


def _counted_axes(scatter: JaxprEqn) -> list[int]:
    """Returns the axes of what a scatter writes along which it has an index for each element."""
    window = [int(i) for i in scatter.params["dimension_numbers"].update_window_dims]
    return [axis for axis in range(len(scatter.invars[2].aval.shape)) if axis not in window]
