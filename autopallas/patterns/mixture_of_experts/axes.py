"""Finds the axes along which a value differs by something that a program compared, scattered or normalised before.

One pass over a program finds them for every value, as one bit per axis. It may mark too many axes, but never too few:
values without a mark need not be walked through to find a choice of experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopallas.graph import Graph, Node, Ref
from autopallas.graph.custom_rules import ELEMENTWISE, is_elementwise_call
from autopallas.graph.labels import Atom, Dimension
from autopallas.numerics.casts import counts_exactly, kind_of
from autopallas.patterns.expressions import Scope

__all__ = [
    "EVERYTHING", "choice_axes", "counted_from_zero", "narrow_positions", "passed_on", "position_of", "positions_along",
]  # fmt: skip

_COPIES = frozenset(
    """copy copy_p name sharding_constraint optimization_barrier pvary pcast layout_constraint reshard""".split()
)
_CASTS = frozenset({"convert_element_type", "reduce_precision"})
_KEEPS_AXES = frozenset({"slice", "concatenate", "split", "tile"})
_REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_or", "reduce_and", "reduce_prod"})
_ORDERED = frozenset({"lt", "le", "gt", "ge"})
_FIXED = (
    ELEMENTWISE | _COPIES | _KEEPS_AXES | {"iota", "transpose", "broadcast_in_dim", "reshape", "squeeze", "expand_dims"}
)
_SOURCES = frozenset({"iota", "scatter", "scatter-add"})
"""Operations where marked axes begin; all others pass on those of their operands."""
EVERYTHING = -1
"""All axes."""


def choice_axes(graph: Graph) -> Sequence[int]:
    """Returns, per value, the axes along which it may be that of one expert among all.

    Such axes begin where a value is compared with positions along them, where something is scattered to places along
    them, or where positions are compared with bounds that differ along them. They pass through everything that a walk
    over labels reads through.

    Positions that are compared with positions, or scattered to, are no choice: the tokens of a program have such
    positions.
    """
    if "choices" not in graph.notes:
        positions = [0] * len(graph.avals)
        found = [0] * len(graph.avals)
        fixed = bytearray(len(graph.avals))
        """Whether a value is made of positions and literals alone."""
        for number in graph.literals:
            fixed[number] = True
        for node in graph.nodes:
            inputs, name = node.inputs, node.name
            constant, told = name in _FIXED, name in _SOURCES
            for i in inputs:
                constant = constant and bool(fixed[i])
                told = told or bool(found[i] or positions[i])
            if constant:
                for output in node.outputs:
                    fixed[output] = True
            if not told:  # for most nodes there is nothing to pass on
                continue
            own = [found[i] for i in inputs]
            counted = [positions[i] for i in inputs]
            for output in node.outputs:
                if name == "iota":
                    positions[output] = 1 << int(node.params["dimension"])
                elif any(counted) and (name in _CASTS or name not in ELEMENTWISE):
                    positions[output] = passed_on(graph, node, output, counted)
                bits = passed_on(graph, node, output, own) if any(own) else 0
                if name == "gather" and own[0] and fixed[inputs[1]]:  # a slice for each position is layout
                    bits = EVERYTHING
                if name == "eq" and any(counted) and not all(counted):
                    bits |= passed_on(graph, node, output, counted)
                elif name in ("scatter", "scatter-add"):
                    bits = _scattered(graph, node, fixed)
                elif name in _ORDERED and any(counted) and not all(counted) and kind_of(graph.dtype(inputs[0])) in "iu":
                    # Perhaps rows in an interval of each expert: along the axes on which bounds differ.
                    bound = inputs[counted.index(0)]
                    differs = 0 if fixed[bound] else (1 << len(graph.shape(bound))) - 1
                    bits |= passed_on(graph, node, output, [differs if i == bound else 0 for i in inputs])
                found[output] = bits
        graph.notes["choices"] = found
    return graph.notes["choices"]  # type: ignore[return-value]


def positions_along(scope: Scope, ref: Ref) -> tuple[int, tuple[Atom, ...], int] | None:
    """Returns (first, labels, size of the axis) if a value counts up along an axis, in types that hold each of the
    numbers."""
    found, narrow = _counted(scope, ref)
    return found if narrow is None else None


def narrow_positions(scope: Scope, ref: Ref) -> tuple[tuple[Atom, ...], str] | None:
    """Returns (labels, type) if a value counts up along an axis in a type that does not hold each of the numbers."""
    found, narrow = _counted(scope, ref)
    return None if found is None or narrow is None else (found[1], narrow)


def _counted(scope: Scope, ref: Ref) -> tuple[tuple[int, tuple[Atom, ...], int] | None, str | None]:
    """Returns how a value counts up along an axis, and the first type that does not hold each of the numbers."""
    space, graph = scope.space, scope.graph
    ref = space.canonical(ref)
    dtypes = [graph.dtype(ref.value)]
    while scope.name(ref) == "convert_element_type":
        (inner,) = space.operands(ref) or (ref,)
        if inner.value == ref.value:
            return None, None
        ref = inner
        dtypes.append(graph.dtype(ref.value))
    node = scope.node(ref)
    if node is None or node.name != "iota":
        return None, None
    axis = node.params["dimension"]
    size = graph.shape(ref.value)[axis]
    narrow = next((dtype.name for dtype in dtypes if not counts_exactly(dtype, size - 1)), None)
    offset, atoms = ref.view[axis]
    return (offset, space.resolve(atoms), size), narrow


def counted_from_zero(scope: Scope, ref: Ref) -> Ref:
    """Returns the index behind ``where(index < 0, index + size, index)``, by which negative indices count from the end;
    any other value as it is."""
    ref = scope.space.canonical(ref)
    operands = scope.space.operands(ref) if scope.name(ref) == "select_n" else None
    if operands is None or len(operands) != 3 or scope.name(operands[0]) != "lt":
        return ref
    compared, zero = scope.space.operands(operands[0]) or (None, None)
    if compared is None or zero is None or scope.number(zero) != 0 or not scope.space.same(compared, operands[1]):
        return ref
    return scope.space.canonical(operands[1])


def position_of(scope: Scope, ref: Ref) -> Dimension | None:
    """Returns the dimension of a view along which a value is the position, if it is one."""
    ref = counted_from_zero(scope, ref)  # positions are not negative
    node = scope.node(ref)
    if node is None or node.name != "iota" or positions_along(scope, ref) is None:
        return None
    return ref.view[node.params["dimension"]]


def _scattered(graph: Graph, node: Node, fixed: Sequence[int]) -> int:
    """Returns the axes along which elements are scattered, each to places of its own."""
    numbers = node.params["dimension_numbers"]
    if numbers.update_window_dims:
        return 0
    targets = [int(d) for d in numbers.scatter_dims_to_operand_dims]
    indices = graph.definitions.get(node.inputs[1])
    parts = indices.inputs if indices is not None and indices.name == "concatenate" else ()
    if len(parts) != len(targets):
        return sum(1 << d for d in targets)
    return sum(1 << d for d, part in zip(targets, parts, strict=True) if not fixed[part])


def passed_on(graph: Graph, node: Node, output: int, axes: Sequence[int]) -> int:
    """Returns the axes of a result that come from the ``axes`` of the operands; none where labels are not read
    through."""
    if not any(axes):
        return 0
    name = node.name
    if name in ELEMENTWISE or is_elementwise_call(node.equation):
        found = 0
        for mask, i in zip(axes, node.inputs, strict=True):
            if mask:
                found |= mask if graph.avals[i].shape else EVERYTHING
        return found
    if name in _COPIES:
        return axes[node.outputs.index(output)]
    if name in _KEEPS_AXES:
        return _any(axes)
    shape = graph.avals[node.inputs[0]].shape
    if name in _REDUCTIONS:
        return _moved(axes[0], [d for d in range(len(shape)) if d not in node.params["axes"]])
    if name == "transpose":
        return _moved(axes[0], node.params["permutation"])
    if name == "dot_general":
        (left, right), batch = node.params["dimension_numbers"]
        other = graph.avals[node.inputs[1]].shape
        found = 0
        place = len(batch[0])
        for i, (d, e) in enumerate(zip(*batch, strict=True)):
            found |= (axes[0] >> int(d) & 1 | axes[1] >> int(e) & 1) << i
        for own, ndim, gone, shared in ((axes[0], len(shape), left, batch[0]), (axes[1], len(other), right, batch[1])):
            for d in range(ndim):
                if d not in gone and d not in shared:
                    found |= (own >> d & 1) << place
                    place += 1
        return found
    if name == "broadcast_in_dim":
        targets = node.params["broadcast_dimensions"]
        if not shape:
            return EVERYTHING
        return sum([(axes[0] >> d & 1) << int(target) for d, target in enumerate(targets)])
    if name in ("reshape", "squeeze", "expand_dims"):
        return _reshaped(axes[0], shape, graph.avals[output].shape)
    if name in ("stack", "unstack"):
        return EVERYTHING
    return 0


def _any(axes: Sequence[int]) -> int:
    found = 0
    for mask in axes:
        found |= mask
    return found


def _moved(axes: int, order: Sequence[int]) -> int:
    """Returns the axes of a value whose dimensions are those of ``order``, in that order."""
    found = 0
    for i, d in enumerate(order):
        found |= (axes >> int(d) & 1) << i
    return found


def _reshaped(axes: int, before: Sequence[int], after: Sequence[int]) -> int:
    """Returns the axes after a reshape: an axis that is split, or merged with others, marks the whole group."""
    if 0 in before:
        return EVERYTHING
    found = first = last = 0  # how far ``before`` and ``after`` were matched, with equal numbers of elements
    for d in range(len(before)):
        size = math.prod(before[first : d + 1])
        end = last
        while end < len(after) and math.prod(after[last:end]) < size:
            end += 1
        if math.prod(after[last:end]) != size:
            continue
        if axes >> first & (1 << d + 1 - first) - 1:
            found |= (1 << end) - (1 << last)
        first, last = d + 1, end
    return found
