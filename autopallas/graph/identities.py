"""Recognises identity matrices times a number: that number where two of an array's indices are equal, and else zero."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from autopallas import compat
from autopallas.compat import ShapedArray
from autopallas.graph.loop_slices import is_zero, uniform
from autopallas.numerics.casts import kind_of

if TYPE_CHECKING:
    from autopallas.graph.numbering import Graph

__all__ = ["Identity", "identity", "may_be_identity"]

_MOST = 12
"""Largest number of equations to look through."""
_MOST_ELEMENTS = 2**20
_UNCHANGED = frozenset({"copy", "copy_p", "name", "optimization_barrier", "convert_element_type"})
_RESHAPED = frozenset({"reshape", "squeeze", "expand_dims"})


@dataclass(frozen=True, slots=True)
class Identity:
    """The two dimensions of which an array is the identity matrix, the same along all others, and what it is times."""

    axes: tuple[int, int]
    scale: float = 1.0


def may_be_identity(aval: ShapedArray) -> bool:
    """Returns whether two dimensions of an array have the same size, above 1."""
    sizes = [n for n in aval.shape if isinstance(n, int) and n > 1]
    return len(set(sizes)) < len(sizes)


def identity(graph: Graph, number: int, most: int = _MOST) -> Identity | None:
    """Returns what identity matrix a value is, times a number that is not zero, or None."""
    if number in graph.constants:
        return _of_array(graph, number)
    node = graph.definitions.get(number)
    if node is None or len(node.outputs) != 1 or most <= 0 or not may_be_identity(graph.avals[number]):
        return None
    if node.name == "eq":
        return _of_indices(graph, number, most)
    if node.name in ("mul", "div") and len(node.inputs) == 2:
        return _scaled(graph, number, most)
    found = identity(graph, node.inputs[0], most - 1) if node.inputs else None
    if found is None:
        return None
    if node.name == "neg":
        return replace(found, scale=-found.scale)
    if node.name == "select_n" and len(node.inputs) == 3:
        _, no, yes = node.inputs
        value = uniform(graph, yes)
        return replace(found, scale=float(value)) if value and np.isfinite(value) and is_zero(graph, no) else None
    if node.name == "transpose":
        where = [int(i) for i in node.params["permutation"]]
        first, second = sorted(map(where.index, found.axes))
        return replace(found, axes=(first, second))
    if node.name == "convert_element_type" and found.scale != 1:
        return None
    one, other = (_after(graph, number, axis) for axis in found.axes)
    return None if one is None or other is None else replace(found, axes=(one, other))


def _of_indices(graph: Graph, number: int, most: int) -> Identity | None:
    """Returns the identity matrix that is where two indices are equal."""
    first, second = (_index_axis(graph, n, most) for n in graph.definitions[number].inputs)
    if first is None or second is None or first == second:
        return None
    shape = graph.shape(number)
    return Identity((min(first, second), max(first, second))) if shape[first] == shape[second] else None


def _scaled(graph: Graph, number: int, most: int) -> Identity | None:
    """Returns an identity matrix times a number, or divided by one, that is neither tiny nor huge in any dtype."""
    node = graph.definitions[number]
    kind = kind_of(graph.dtype(number))
    for own, by in (node.inputs, node.inputs[::-1]) if node.name == "mul" else (node.inputs,):
        value = uniform(graph, by)
        if value is None or kind not in "fV" or not 1e-30 < abs(float(value)) < 1e30:
            continue
        found = identity(graph, own, most - 1)
        if found is not None:
            factor = float(value)
            return replace(found, scale=found.scale * factor if node.name == "mul" else found.scale / factor)
    return None


def _index_axis(graph: Graph, number: int, most: int) -> int | None:
    """Returns the dimension of which a value is the index, or None."""
    node = graph.definitions.get(number)
    if node is None or len(node.outputs) != 1 or most <= 0 or kind_of(graph.dtype(number)) not in "iu":
        return None
    if node.name == "iota":
        axis = int(node.params["dimension"])
        return axis if graph.shape(number)[axis] <= np.iinfo(np.dtype(str(graph.dtype(number)))).max else None
    if node.name in ("add", "sub"):
        left, right = node.inputs
        if right in graph.literals and not np.any(graph.literals[right]):
            return _index_axis(graph, left, most - 1)
        return None
    if node.name == "convert_element_type":
        info = np.iinfo(np.dtype(str(graph.dtype(number))))
        if max(graph.shape(number), default=0) > info.max:
            return None
    found = _index_axis(graph, node.inputs[0], most - 1) if node.inputs else None
    return None if found is None else _after(graph, number, found)


def _after(graph: Graph, number: int, axis: int) -> int | None:
    """Returns where the dimension of an operand is after an equation that repeats it or looks at it in another way."""
    node = graph.definitions[number]
    if len(node.inputs) != 1:
        return None
    before, after = graph.shape(node.inputs[0]), graph.shape(number)
    if node.name in _UNCHANGED:
        return axis
    if node.name == "broadcast_in_dim":
        place = int(node.params["broadcast_dimensions"][axis])
        return place if after[place] == before[axis] else None
    if node.name in _RESHAPED and [n for n in before if n != 1] == [n for n in after if n != 1] and before[axis] != 1:
        kept = [i for i, n in enumerate(after) if n != 1]
        return kept[sum(n != 1 for n in before[:axis])]
    return None


def _of_array(graph: Graph, number: int) -> Identity | None:
    """Returns a captured array whose last two dimensions are those of an identity matrix."""
    shape, value = graph.shape(number), graph.constants[number]
    if len(shape) < 2 or shape[-1] != shape[-2] or shape[-1] < 2 or np.prod(shape) > _MOST_ELEMENTS:
        return None
    if compat.is_tracer(value) or kind_of(graph.dtype(number)) not in "biufV":
        return None
    same = np.array_equal(np.asarray(value), np.broadcast_to(np.eye(shape[-1]), shape))
    return Identity((len(shape) - 2, len(shape) - 1)) if same else None
