"""Computes integers that a program knows while it is traced: what follows from literals and the numbers of steps.

Arrays of a loop have its steps as their first axis, in the order of its slices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from autopallas import compat, jaxprs
from autopallas.compat import JaxprAtom, JaxprEqn, Literal, Var
from autopallas.graph.flatten import flatten
from autopallas.numerics.casts import kind_of

if TYPE_CHECKING:
    from autopallas.graph.equation_keys import Node
    from autopallas.graph.numbering import Graph

__all__ = ["Array", "KnownIntegers", "known_array", "of_steps"]

Array = np.ndarray

_MOST_ELEMENTS = 2**22
_DEEPEST = 64
"""Longest chain of equations by which an integer is known."""
_ELEMENTWISE: Mapping[str, Callable[..., Array]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative, "max": np.maximum, "min": np.minimum,
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip
_SAME_ELEMENTS = frozenset({"squeeze", "expand_dims", "copy", "copy_p", "stop_gradient"}) | jaxprs.VARYING


def _is_small_integer(aval: object, steps: int = 1) -> bool:
    """Returns whether a value is of integers or booleans, and small enough to be known."""
    dtype, size = getattr(aval, "dtype", None), getattr(aval, "size", None)
    return size is not None and kind_of(dtype) in "iub" and steps * int(size) <= _MOST_ELEMENTS


def _known_result(equation: JaxprEqn, given: Sequence[Array]) -> Array | None:
    """Returns the result of an equation of integers for all steps, or None if it is not known how to compute it.

    Args:
      equation: any equation.
      given: its operands, with the steps in front.
    """
    if len(equation.outvars) != 1 or not given:
        return None
    name, aval = equation.primitive.name, equation.outvars[0].aval
    steps = given[0].shape[0]
    if not _is_small_integer(aval, steps):
        return None
    shape = (steps, *aval.shape)
    found: Array | None = None
    if name in _ELEMENTWISE:
        found = _ELEMENTWISE[name](*_of_one_rank(given))
    elif name == "rem" and kind_of(aval.dtype) in "iu" and np.all(given[1] > 0):  # with the sign of what is divided
        found = np.fmod(*_of_one_rank(given))
    elif name == "not" and aval.dtype == np.bool_:
        found = np.logical_not(given[0])
    elif name == "select_n" and len(given) == 3 and given[0].dtype == np.bool_:
        which, no, yes = _of_one_rank(given)
        found = np.where(which, yes, no)
    elif name == "clamp":
        low, x, high = _of_one_rank(given)
        found = np.minimum(np.maximum(x, low), high)
    elif name == "convert_element_type":
        found = given[0].astype(aval.dtype)
    elif name == "broadcast_in_dim" and len(given) == 1:
        sizes = [1] * len(aval.shape)
        for axis, size in zip(equation.params["broadcast_dimensions"], given[0].shape[1:], strict=True):
            sizes[int(axis)] = size
        found = np.broadcast_to(given[0].reshape(steps, *sizes), shape)
    elif name in _SAME_ELEMENTS or (name == "reshape" and len(given) == 1 and equation.params["dimensions"] is None):
        found = given[0].reshape(shape)
    elif name == "dynamic_slice" and given[0].ndim == 2:  # of a vector
        (size,) = equation.params["slice_sizes"]
        first = np.clip(given[1].astype(np.int64), 0, given[0].shape[1] - int(size))
        found = np.take_along_axis(given[0], first[:, None] + np.arange(int(size)), 1)
    elif name == "concatenate":
        found = np.concatenate(given, int(equation.params["dimension"]) + 1)
    if found is None or found.shape != shape or found.dtype != aval.dtype:
        return None
    return found


def _of_one_rank(given: Sequence[Array]) -> list[Array]:
    """Returns operands of which some may be scalars, which hold for all elements."""
    rank = max(x.ndim for x in given)
    return [x.reshape(*x.shape, *(1,) * (rank - x.ndim)) if x.ndim == 1 else x for x in given]


def of_steps(
    equations: Sequence[JaxprEqn],
    inputs: Sequence[Var],
    outputs: Sequence[JaxprAtom],
    parts: tuple[int, int],
    given: Sequence[Array | None],
    length: int,
    reverse: bool,
) -> dict[Var, Array]:
    """Returns what is known of a loop's variables, for all steps.

    Args:
      equations: the step's.
      inputs: the step's: constants, carried values, slices.
      outputs: the step's: carried values, results.
      parts: how many constants and carried values there are.
      given: what is known of the loop's operands: constants, first carried values, arrays to be sliced.
      length: the number of steps.
      reverse: whether the last slices come first.
    """
    constants, carried = parts
    number = np.arange(length)[::-1] if reverse else np.arange(length)
    known: dict[Var, Array] = {}
    after = {v: i for i, v in enumerate(outputs[:carried]) if isinstance(v, Var)}
    added = {e.outvars[0]: e for e in equations if e.primitive.name in ("add", "sub") and e.outvars[0] in after}
    for position, (variable, array) in enumerate(zip(inputs, given, strict=True)):
        if array is None:
            continue
        if position >= constants + carried:
            known[variable] = array
        elif position < constants or outputs[position - constants] is variable:
            known[variable] = np.broadcast_to(array, (length, *array.shape))
        else:
            result = outputs[position - constants]
            equation = added.get(result) if isinstance(result, Var) else None
            by = None if equation is None else _added(equation, variable)
            if by is not None and array.ndim == 0 and array.dtype.kind in "iu":
                known[variable] = (array + number.astype(array.dtype) * by).astype(array.dtype)
    for equation in equations:
        values = [_value(atom, known, length) for atom in equation.invars]
        if values and all(value is not None for value in values) and not jaxprs.bodies(equation):
            found = _known_result(equation, [value for value in values if value is not None])
            if found is not None:
                known[equation.outvars[0]] = found
    return known


def _added(equation: JaxprEqn, variable: Var) -> Array | None:
    """Returns the literal that a sum or difference adds to a variable."""
    minus = equation.primitive.name == "sub"
    others = [a for a in equation.invars if a is not variable]
    if len(others) != 1 or not isinstance(others[0], Literal) or (minus and equation.invars[0] is not variable):
        return None
    by = np.asarray(others[0].val, others[0].aval.dtype)
    return np.negative(by) if minus else by


def _value(atom: JaxprAtom, known: Mapping[Var, Array], length: int) -> Array | None:
    if isinstance(atom, Var):
        return known.get(atom)
    if not _is_small_integer(atom.aval):
        return None
    value = np.asarray(atom.val, atom.aval.dtype)
    return np.broadcast_to(value, (length, *value.shape))


def _counted(equation: JaxprEqn) -> Array:
    aval, axis = equation.outvars[0].aval, int(equation.params["dimension"])
    column = np.arange(aval.shape[axis], dtype=aval.dtype).reshape(-1, *(1,) * (len(aval.shape) - axis - 1))
    return np.broadcast_to(column, aval.shape)


def known_array(atom: JaxprAtom, definitions: Mapping[Var, JaxprEqn], known: dict[Var, Array | None]) -> Array | None:
    """Returns an integer array that one body knows, whose values have some ``definitions``; None if it is not known, or
    large.

    ``known`` has the body's constants; each array that is looked at is added.
    """
    if isinstance(atom, Literal):
        return np.asarray(atom.val, atom.aval.dtype) if _is_small_integer(atom.aval) else None
    todo = [atom]
    while todo:
        variable = todo[-1]
        equation = definitions.get(variable)
        if variable not in known and _is_small_integer(variable.aval) and equation is not None:
            ready = len(equation.outvars) == 1 and not jaxprs.bodies(equation) and len(todo) <= _DEEPEST
            left = [a for a in equation.invars if isinstance(a, Var) and a not in known] if ready else []
            if left:
                todo.append(left[0])
                continue
            known[variable] = _from_known(equation, known) if ready else None
        known.setdefault(variable, None)
        todo.pop()
    return known[atom]


def _from_known(equation: JaxprEqn, known: Mapping[Var, Array | None]) -> Array | None:
    """Returns the result of an equation whose operands were looked at."""
    if equation.primitive.name == "iota":
        return _counted(equation)
    given = [known[a] if isinstance(a, Var) else np.asarray(a.val, a.aval.dtype) for a in equation.invars]
    arrays = [array[None] for array in given if array is not None]
    found = _known_result(equation, arrays) if len(arrays) == len(given) else None
    return None if found is None else found[0]


class KnownIntegers:
    """The integer arrays that a program knows while it is traced, by their numbers; each is computed once."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self._found: dict[int, Array | None] = {}

    def of(self, number: int, deep: int = 0) -> Array | None:
        """Returns an integer array, or None if it is not known, or large."""
        if number not in self._found:
            small = _is_small_integer(self.graph.avals[number]) and deep <= _DEEPEST
            self._found[number] = self._computed(number, deep + 1) if small else None
        return self._found[number]

    def _computed(self, number: int, deep: int) -> Array | None:
        graph = self.graph
        if number in graph.literals:
            return np.asarray(graph.literals[number], graph.dtype(number))
        if number in graph.constants:
            value = graph.constants[number]
            return None if compat.is_tracer(value) else np.asarray(value)
        node = graph.definitions.get(number)
        if node is None:
            return None
        if node.name == "iota":
            return _counted(node.equation)
        if node.name != "scan" and (len(node.outputs) != 1 or jaxprs.bodies(node.equation)):
            return None
        given = [self.of(n, deep) for n in node.inputs]
        if node.name == "scan":
            return _stacked(node, number, given)
        arrays = [x[None] for x in given if x is not None]
        found = _known_result(node.equation, arrays) if len(arrays) == len(given) else None
        return None if found is None else found[0]


def _stacked(node: Node, number: int, given: Sequence[Array | None]) -> Array | None:
    """Returns the integers that a loop stacks, from what is known of its operands."""
    equation = node.equation
    parts = compat.scan_parts(equation)
    position = node.outputs.index(number)
    if position < parts[1]:
        return None
    body = flatten(equation.params["jaxpr"])
    length, reverse = int(equation.params["length"]), bool(equation.params["reverse"])
    steps = of_steps(body.equations, body.invars, body.outvars, parts, given, length, reverse)
    result = body.outvars[position]
    return steps.get(result) if isinstance(result, Var) else None
