"""Recognises what a loop reads and writes at its own step: the slice of an array at the step's number.

An array that a loop reads at its step's number equals one that it reads slice by slice, and a sum to which each step
adds at its own number equals what a loop stacks.  JAX turns one into the other when it moves loop-invariant parts of a
loop out of an enclosing loop.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax import lax
from jax.lax import GatherScatterMode

from autopallas import compat, jaxprs
from autopallas.compat import ArrayFunction, Dtype, JaxprEqn, Literal, Var
from autopallas.graph.flatten import Body
from autopallas.numerics.casts import counts_exactly, kind_of

if TYPE_CHECKING:
    from autopallas.graph.equation_keys import Node
    from autopallas.graph.numbering import Graph

__all__ = [
    "counters",
    "counting",
    "folded",
    "is_zero",
    "placed",
    "repeated",
    "selects",
    "slice_read",
    "summed_slices",
    "uniform",
]

_REPEATS = frozenset({"broadcast_in_dim", "reshape", "squeeze", "expand_dims"})
_CLIPPED = frozenset({GatherScatterMode.CLIP, GatherScatterMode.PROMISE_IN_BOUNDS})
_MOST = 8
"""Largest number of layout operations to look through."""


def counters(graph: Graph, equation: JaxprEqn, body: Body, starts: Sequence[int | None]) -> list[int]:
    """Returns which of the values that a scan carries are the number of the step: 0, 1, ..."""
    if equation.params["reverse"]:
        return []
    constants, carried = compat.scan_parts(equation)
    found = []
    for i in range(carried):
        carry, after, start = body.invars[constants + i], body.outvars[i], starts[i]
        dtype = getattr(carry.aval, "dtype", None)
        if start not in graph.literals or carry.aval.shape or dtype is None or kind_of(dtype) not in "iu":
            continue
        position = body.defined.get(after) if isinstance(after, Var) else None
        if position is None or graph.literals[start] != 0 or body.equations[position].primitive.name != "add":
            continue
        steps = [a for a in body.equations[position].invars if a is not carry]
        by_one = len(steps) == 1 and isinstance(steps[0], Literal) and int(steps[0].val) == 1
        if by_one and counts_exactly(dtype, int(equation.params["length"])):
            found.append(i)
    return found


def counting(graph: Graph, dtype: Dtype, length: int) -> JaxprEqn:
    """Returns the equation that gives the numbers of all steps."""
    return _written(graph, lambda: lax.iota(dtype, length), ("counting", dtype, length))


def repeated(graph: Graph, number: int, length: int) -> tuple[int, JaxprEqn] | None:
    """Returns (counter, equation) if a value repeats the number of the step; the equation computes what a loop stacks
    from the numbers of all steps."""
    counter, shape = _plain(graph, number), graph.shape(number)
    if counter == number or counter not in graph.counters:
        return None
    dtype = graph.dtype(counter)
    steps = jax.ShapeDtypeStruct((length,), dtype)
    repeat: ArrayFunction = lambda i: lax.broadcast_in_dim(i, (length, *shape), (0,))  # noqa: E731
    return counter, _written(graph, repeat, ("repeated", dtype, length, shape), steps)


def _written(graph: Graph, function: ArrayFunction, key: Hashable, *types: jax.ShapeDtypeStruct) -> JaxprEqn:
    """Returns the last equation of a function, which is traced once for each graph and key: each loop of a model asks
    for the same ones."""
    if key not in graph.written:
        program, _ = jaxprs.open_jaxpr(compat.make_jaxpr(function, *types))
        graph.written[key] = program.eqns[-1]
    return graph.written[key]


def folded(graph: Graph, equation: JaxprEqn, operands: Sequence[int]) -> int | bool | None:
    """Returns the number of the value that a selection always selects, or the constant result of a comparison, or None.

    JAX tests whether each index is negative, and if so counts from the end.
    """
    name = equation.primitive.name
    if name == "lt" and operands[1] in graph.literals and equation.outvars[0].aval.shape == ():
        other = graph.literals[operands[1]]
        if other.dtype.kind not in "iu":
            return None
        if operands[0] in graph.literals:
            return bool(graph.literals[operands[0]] < other)
        return False if operands[0] in graph.counters and other <= 0 else None
    return selects(graph, equation, operands)


def selects(graph: Graph, equation: JaxprEqn, operands: Sequence[int | None]) -> int | None:
    """Returns the number of the value that a selection always selects, or None; others may be unknown."""
    if equation.primitive.name != "select_n" or operands[0] not in graph.literals:
        return None
    literal = graph.literals[operands[0]]
    which = int(literal) if literal.ndim == 0 else -1
    return operands[1 + which] if 0 <= which < len(operands) - 1 else None


def slice_read(graph: Graph, equation: JaxprEqn, operands: Sequence[int]) -> tuple[int, int] | None:
    """Returns (array, counter) if a value is the slice of an array along its first axis at the step's number."""
    name = equation.primitive.name
    if name == "gather":
        return _gathered(graph, equation, operands)
    if name not in ("squeeze", "reshape"):
        return None
    node = graph.definitions.get(operands[0])
    if node is None or node.name != "dynamic_slice":
        return None
    source, *starts = node.inputs
    shape = graph.shape(source)
    if not shape or tuple(equation.outvars[0].aval.shape) != shape[1:] or tuple(node.params["slice_sizes"]) != (
        1, *shape[1:]
    ):  # fmt: skip
        return None
    if name == "squeeze" and [int(d) % len(shape) for d in equation.params["dimensions"]] != [0]:
        return None
    return (source, starts[0]) if _counts(graph, starts[0], shape[0]) else None


def _gathered(graph: Graph, equation: JaxprEqn, operands: Sequence[int]) -> tuple[int, int] | None:
    source, params = operands[0], equation.params
    shape, dimensions = graph.shape(source), params["dimension_numbers"]
    places = _scalars(graph, operands[1])
    if places is None or not shape or tuple(equation.outvars[0].aval.shape) != shape[1:]:
        return None
    if tuple(dimensions.start_index_map) != (0,) or tuple(dimensions.collapsed_slice_dims) != (0,):
        return None
    if dimensions.operand_batching_dims or tuple(params["slice_sizes"]) != (1, *shape[1:]):
        return None
    return (source, places[0]) if _counts(graph, places[0], shape[0]) else None


def placed(graph: Graph, equation: JaxprEqn, operands: Sequence[int]) -> tuple[int, int, int] | None:
    """Returns (counter, value, axis) if an array is zero except for the value, its slice at the step's number."""
    name = jaxprs.operation_name(equation)
    if name == "dynamic_update_slice":
        whole, update, *starts = operands
        window = list(range(len(graph.shape(whole))))
        kept, moved = window, dict(enumerate(starts))
        clips = True
    elif name in ("scatter", "scatter-add"):
        whole, indices, update = operands
        dimensions = equation.params["dimension_numbers"]
        scalars = _scalars(graph, indices)
        inserted = {int(d) for d in dimensions.inserted_window_dims}
        if scalars is None or dimensions.operand_batching_dims:
            return None
        window = [int(d) for d in dimensions.update_window_dims]
        kept = [d for d in range(len(graph.shape(whole))) if d not in inserted]
        targets = [int(d) for d in dimensions.scatter_dims_to_operand_dims]
        moved = dict(zip(targets, scalars, strict=True))
        clips = equation.params["mode"] in _CLIPPED
    else:
        return None
    shape, sizes = graph.shape(whole), graph.shape(update)
    axes = [d for d, start in moved.items() if _counts(graph, start, shape[d])]
    if len(axes) != 1 or window != list(range(len(sizes))) or len(kept) != len(sizes) or not is_zero(graph, whole):
        return None
    (axis,) = axes
    others = [d for d in moved if d != axis]
    if not clips and any(not is_zero(graph, moved[d]) for d in others):
        return None
    size = dict(zip(kept, sizes, strict=True))
    if any(size.get(d, 1) != shape[d] for d in range(len(shape)) if d != axis) or size.get(axis, 1) != 1:
        return None
    value = update if axis not in size else _without(graph, update, axis)
    return None if value is None else (moved[axis], value, axis)


def summed_slices(graph: Graph, start: int, within: int, after: int) -> tuple[int, int, int] | None:
    """Returns (counter, value, axis) if a loop carries a sum, zero at the start, and each step adds a value to the
    sum's slice at the step's number."""
    node = graph.definitions.get(after)
    if node is None or node.name not in ("add", "add_any") or within not in node.inputs or not is_zero(graph, start):
        return None
    others = [i for i in node.inputs if i != within]
    if len(others) != 1 or len(node.inputs) != 2:
        return None
    added = graph.definitions.get(others[0])
    return None if added is None else placed(graph, added.equation, added.inputs)


def _counts(graph: Graph, number: int, length: int) -> bool:
    """Returns whether a value is the number of the step of a loop with so many steps."""
    return number in graph.counters and graph.counters[number][0] == length


def is_zero(graph: Graph, number: int) -> bool:
    """Returns whether a value is zero in each of its elements."""
    number = _plain(graph, number)
    return number in graph.literals and not np.any(graph.literals[number])


def uniform(graph: Graph, number: int) -> np.generic | None:
    """Returns the number that is known to be each element of a value, or None."""
    literal = graph.literals.get(_plain(graph, number))
    if literal is None or not np.size(literal):
        return None
    elements = np.asarray(literal).reshape(-1)
    first: np.generic = elements[0]
    return first if elements.size == 1 or np.all(elements == first) else None


def _plain(graph: Graph, number: int) -> int:
    """Returns a value without its layout operations."""
    for _ in range(_MOST):
        node = graph.definitions.get(number)
        if node is None or node.name not in _REPEATS or len(node.inputs) != 1:
            break
        number = node.inputs[0]
    return number


def _scalars(graph: Graph, number: int) -> list[int] | None:
    """Returns the scalars that a vector consists of."""
    if len(graph.shape(number)) != 1:
        return None
    node: Node | None = graph.definitions.get(number)
    parts = node.inputs if node is not None and node.name == "concatenate" else (number,)
    if any(graph.shape(part) != (1,) for part in parts):
        return None
    scalars = [_plain(graph, part) for part in parts]
    return scalars if all(graph.shape(scalar) == () for scalar in scalars) else None


def _without(graph: Graph, number: int, axis: int) -> int | None:
    """Returns the value that another one copies with an additional axis of size 1, or None."""
    node = graph.definitions.get(number)
    if node is None or node.name not in ("broadcast_in_dim", "reshape", "expand_dims") or len(node.inputs) != 1:
        return None
    shape = graph.shape(number)
    if graph.shape(node.inputs[0]) != (*shape[:axis], *shape[axis + 1 :]):
        return None
    if node.name == "broadcast_in_dim":
        kept = [d for d in range(len(shape)) if d != axis]
        if [int(d) for d in node.params["broadcast_dimensions"]] != kept:
            return None
    return node.inputs[0]
