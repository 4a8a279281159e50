"""Computes integers that a program knows while it is traced: what follows from literals and the numbers of steps.

Arrays have the steps of a loop as their first axis, in the order of its slices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from autopallas import jaxprs
from autopallas.compat import JaxprAtom, JaxprEqn, Literal, Var

__all__ = ["Array", "is_small_integer", "known_result", "of_steps"]

Array = np.ndarray

_MOST_ELEMENTS = 2**22
_ELEMENTWISE: Mapping[str, Callable[..., Array]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative, "max": np.maximum, "min": np.minimum,
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip
_SAME_ELEMENTS = frozenset({"squeeze", "expand_dims", "copy", "copy_p", "stop_gradient"})


def is_small_integer(aval: object, steps: int = 1) -> bool:
    """Returns whether a value is of integers or booleans, and small enough to be known."""
    dtype, size = getattr(aval, "dtype", None), getattr(aval, "size", None)
    return size is not None and getattr(dtype, "kind", "") in "iub" and steps * int(size) <= _MOST_ELEMENTS


def known_result(equation: JaxprEqn, given: Sequence[Array]) -> Array | None:
    """Returns the result of an equation of integers for all steps, or None if it is not known how to compute it.

    Args:
      equation: any equation.
      given: its operands, with the steps in front.
    """
    if len(equation.outvars) != 1 or not given:
        return None
    name, aval = equation.primitive.name, equation.outvars[0].aval
    steps = given[0].shape[0]
    if not is_small_integer(aval, steps):
        return None
    shape = (steps, *aval.shape)
    found: Array | None = None
    if name in _ELEMENTWISE:
        found = _ELEMENTWISE[name](*_of_one_rank(given))
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
    added = {e.outvars[0]: e for e in equations if e.primitive.name == "add" and e.outvars[0] in after}
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
            by = [] if equation is None else [a for a in equation.invars if a is not variable]
            if len(by) == 1 and isinstance(by[0], Literal) and array.ndim == 0 and array.dtype.kind in "iu":
                known[variable] = (array + number.astype(array.dtype) * np.asarray(by[0].val, array.dtype)).astype(
                    array.dtype
                )
    for equation in equations:
        values = [_value(atom, known, length) for atom in equation.invars]
        if values and all(value is not None for value in values) and not jaxprs.bodies(equation):
            found = known_result(equation, [value for value in values if value is not None])
            if found is not None:
                known[equation.outvars[0]] = found
    return known


def _value(atom: JaxprAtom, known: Mapping[Var, Array], length: int) -> Array | None:
    if isinstance(atom, Var):
        return known.get(atom)
    if not is_small_integer(atom.aval):
        return None
    value = np.asarray(atom.val, atom.aval.dtype)
    return np.broadcast_to(value, (length, *value.shape))
