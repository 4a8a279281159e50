"""Reads gathers that pick one element of an axis, and scatters that put one back, as index notation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopallas.graph import Node, Ref
from autopallas.graph.labels import Atom, Dimension, View
from autopallas.numerics.casts import counts_exactly
from autopallas.patterns.advice import LOSS_PER_ROW, ONE_LABEL
from autopallas.patterns.expressions import Scope
from autopallas.patterns.match import Mismatch
from autopallas.sites.elementwise import Axis

__all__ = ["Pick", "picked", "placed"]


@dataclass(frozen=True, slots=True)
class Pick:
    """One element of an axis per row.

    Attributes:
      label: its position along the axis, an integer per row.
      view: tells which row each element belongs to, of the gather's result or of the scatter's updates.
      along: "key", or "query" where it is one element per column.
      mode: what becomes of a label out of range: "fill" (a gather gives the fill value, a scatter drops it), "clip" or
        "promise" (labels are promised to be in range; as JAX documents, a gather clips one that is not, and a scatter
        drops it).
    """

    label: Ref
    view: View
    mode: str
    along: Axis = "key"


def picked(scope: Scope, operand: Ref, gather: Node, axis: Sequence[Atom]) -> Pick:
    """Reads a gather node whose operand is seen as ``operand`` as a pick along ``axis``.

    Raises:
      Mismatch: it is not one.
    """
    numbers, sizes = gather.params["dimension_numbers"], gather.params["slice_sizes"]
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    shape = scope.graph.shape(gather.inputs[0])
    single = (*gone, *numbers.start_index_map)
    if any(sizes[d] != (1 if d in single else n) for d, n in enumerate(shape)):
        raise Mismatch("a part of each row is gathered from the logits", advice=ONE_LABEL)
    window = [d for d in range(len(shape)) if d not in gone]
    rank = len(scope.graph.shape(gather.outputs[0]))
    return _pick(
        scope,
        operand,
        gather.inputs[1],
        components=dict(zip(numbers.start_index_map, range(len(shape)), strict=False)),
        batching=dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)),
        window=dict(zip(numbers.offset_dims, window, strict=True)),
        rank=rank,
        axis=axis,
        mode=_mode(gather.params["mode"]),
    )


def placed(scope: Scope, result: Ref, scatter: Node, axis: Sequence[Atom]) -> Pick:
    """Reads a scatter-add node into zeros, whose result is seen as ``result``, as one element per row along ``axis``.

    Raises:
      Mismatch: it is not so.
    """
    numbers = scatter.params["dimension_numbers"]
    if scope.number(scope.space.canonical(scope.space.full(scatter.inputs[0]))) != 0:
        raise Mismatch("something is added to the logits' gradient by index", advice=LOSS_PER_ROW)
    shape = scope.graph.shape(scatter.outputs[0])
    gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    window = [d for d in range(len(shape)) if d not in gone]
    updates = scope.graph.shape(scatter.inputs[2])
    indexed = numbers.scatter_dims_to_operand_dims
    pairs = zip(numbers.update_window_dims, window, strict=True)
    if any(updates[u] != (1 if d in indexed else shape[d]) for u, d in pairs):
        raise Mismatch("a part of each row is scattered into the logits' gradient", advice=LOSS_PER_ROW)
    return _pick(
        scope,
        result,
        scatter.inputs[1],
        components=dict(zip(numbers.scatter_dims_to_operand_dims, range(len(shape)), strict=False)),
        batching=dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)),
        window=dict(zip(numbers.update_window_dims, window, strict=True)),
        rank=len(updates),
        axis=axis,
        mode=_mode(scatter.params["mode"]),
    )


def _pick(
    scope: Scope,
    operand: Ref,
    indices: int,
    components: dict[int, int],
    batching: dict[int, int],
    window: dict[int, int],
    rank: int,
    axis: Sequence[Atom],
    mode: str,
) -> Pick:
    """Builds a pick.

    ``components`` and ``batching`` map a dimension of the operand to a component of the index and to a dimension of the
    indices. ``window`` maps a dimension of the result to a dimension of the operand.
    """
    space, graph = scope.space, scope.graph
    shape = graph.shape(indices)
    last = len(shape) - 1
    wanted = space.resolve(axis)
    along: int | None = None
    labels: dict[int, Dimension] = {}  # per dimension of the indices
    for d, i in batching.items():
        labels[i] = operand.view[d]
    for d, component in components.items():
        own = space.resolve(operand.view[d][1])
        if own == wanted and operand.view[d][0] == 0 and own:
            along = component
            continue
        where = _counted(scope, indices, component)
        if where is None or shape[where] != space.extent(own) or operand.view[d][0] != 0:
            if own:
                raise Mismatch(
                    "the logits are gathered at rows that are not known to be all rows in order", advice=ONE_LABEL
                )
            continue  # an axis of size 1
        labels[where] = operand.view[d]
    if along is None:
        raise Mismatch("the logits are gathered along another axis than the vocabulary", advice=ONE_LABEL)
    for i in range(last):
        if i not in labels:
            if shape[i] != 1:
                raise Mismatch("several labels are gathered per row", advice=ONE_LABEL)
            labels[i] = (0, ())
    outer = iter(range(last))
    rest = {o: (0, ()) if d in components else operand.view[d] for o, d in window.items()}
    view = tuple(rest[o] if o in rest else labels[next(outer)] for o in range(rank))
    label = Ref(indices, (*(labels[i] for i in range(last)), (along, ())))
    return Pick(label, view, mode)


def _mode(mode: object) -> str:
    name = str(getattr(mode, "name", mode)).lower()
    for known in ("fill", "clip", "promise"):
        if known in name:
            return known
    raise Mismatch(
        f"an index has the mode {mode}",
        advice="Index with jnp.take_along_axis, or with x[i], in the default mode or in one of fill, clip and "
        "promise_in_bounds.",
    )


def _counted(scope: Scope, indices: int, component: int) -> int | None:
    """Returns the dimension of the indices along which a component counts positions, if there is one."""
    space, shape = scope.space, scope.graph.shape(indices)
    for i, n in enumerate(shape[:-1]):
        atoms = space.fresh(n)
        if not atoms:
            continue
        view = tuple((0, atoms) if j == i else (0, space.fresh(m)) for j, m in enumerate(shape[:-1]))
        if is_position(scope, Ref(indices, (*view, (component, ()))), atoms):
            return i
    return None


def is_position(scope: Scope, ref: Ref, atoms: Sequence[Atom]) -> bool:
    """Returns whether a value is 0, 1, 2, ... along an axis, also where negative indices would count from the end."""
    space = scope.space
    ref = space.canonical(ref)
    node = scope.node(ref)
    if node is None:
        constant = scope.captured(ref)
        along = [dimension for dimension in space.view(ref.view) if dimension != (0, ())]
        return (
            constant is not None
            and along == [(0, space.resolve(atoms))]
            and np.array_equal(np.ravel(constant), np.arange(constant.size))
        )
    counted = counts_exactly(scope.graph.dtype(ref.value), space.extent(atoms) - 1)
    if node.name == "iota":
        offset, own = ref.view[node.params["dimension"]]
        return counted and offset == 0 and space.resolve(own) == space.resolve(atoms)
    operands = space.operands(ref)
    if operands is None:
        return False
    if node.name == "convert_element_type":
        return counted and is_position(scope, operands[0], atoms)
    if node.name == "select_n" and len(operands) == 3 and is_position(scope, operands[1], atoms):
        test, sides = scope.node(operands[0]), space.operands(operands[0])
        known = scope.captured(operands[0])
        return (known is not None and not known.any()) or (
            test is not None
            and test.name == "lt"
            and sides is not None
            and scope.number(sides[1]) == 0
            and is_position(scope, sides[0], atoms)
        )
    return False
