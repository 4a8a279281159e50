"""Finds which axes of values are the same axis, where some values lack axes that others have.

A scan that is written for one example and mapped over a batch may have decays that all examples share.  Then its
equations repeat them for the batch, and its gradient adds up over the batch.  Along the steps such equations compute,
for each position on the other axes, the same polynomial, or sums of it over positions.  So it is enough to evaluate it
at one position, once it is known which axes are one, and that each result is linear in sums over the same axes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autopallas.graph import Graph, Node
from autopallas.kernels.respelling.prime_field import whole

__all__ = ["LAYOUTS", "STEPS", "Lanes", "Layout", "Pairs", "axes_moved", "laid_alike", "lanes_of"]

Layout = tuple[int, ...]
"""For each axis of an array the axis of a scan's result, or -1 for an axis of size 1."""

LAYOUTS = frozenset({"broadcast_in_dim", "dot_general", "expand_dims", "reduce_sum", "reshape", "squeeze", "transpose"})
"""What moves, adds or sums other axes than that of the steps."""

_Axis = tuple[int, int]
"""A value, and one of its axes."""
STEPS: _Axis = (-1, 0)
"""Stands for the axes of the steps."""
_Pair = tuple[int, int]
"""The place of an operand's axis, and that of the result's."""
_NONE: frozenset[int] = frozenset()
Read = Callable[[Node], Sequence["tuple[int, int] | None"]]
"""Returns, for each operand of a node, the value that it is and the axis of its steps, -1 where it has one step; None
for literals, zeros, and what a pad or a concatenation fills with."""


@dataclass(frozen=True)
class Lanes:
    """Axes of the values by which a result is computed.

    Attributes:
      same: the number that stands for all axes that are the same as one.
      summed: the axes over which the result is a sum.
    """

    same: Callable[[_Axis], int]
    summed: frozenset[int]


def _axes(shape: Sequence[int]) -> list[int]:
    return [d for d, size in enumerate(shape) if size != 1]


def laid_alike(shape: Sequence[int], layout: Layout, whole_shape: Sequence[int]) -> bool:
    """Returns whether an array has the axes of a scan's result, in the same order."""
    return tuple(shape) == tuple(whole_shape) and all(own in (-1, d) for d, own in enumerate(layout))


def _pairs(graph: Graph, node: Node) -> list[list[_Pair]] | None:
    """Returns, for each operand of a node, which of its axes are which axes of the results; sizes of 1 are left out.

    None where an axis is neither an axis of a result nor summed over.
    """
    name, params = node.name, node.params
    (out, *_) = node.outputs
    shape, shapes = graph.shape(out), [graph.shape(n) for n in node.inputs]
    if name == "broadcast_in_dim":
        placed = [int(d) for d in params["broadcast_dimensions"]]
        return [[(i, d) for i, d in enumerate(placed) if shapes[0][i] != 1]]
    if name == "transpose":
        return [[(int(i), d) for d, i in enumerate(params["permutation"]) if shape[d] != 1]]
    if name in ("reshape", "squeeze", "expand_dims"):
        own, ours = _axes(shapes[0]), _axes(shape)
        if params.get("dimensions") is not None and name == "reshape":
            return None
        alike = [shapes[0][i] for i in own] == [shape[d] for d in ours]
        return [list(zip(own, ours, strict=True))] if alike else None
    if name == "reduce_sum":
        kept = [i for i in range(len(shapes[0])) if i not in params["axes"]]
        return [[(i, d) for d, i in enumerate(kept) if shape[d] != 1]]
    if name == "dot_general":
        (left, right), (left_batch, right_batch) = params["dimension_numbers"]
        places: list[list[_Pair]] = [[], []]
        count = len(left_batch)
        for side, (batch, contracted) in enumerate(((left_batch, left), (right_batch, right))):
            free = [i for i in range(len(shapes[side])) if i not in batch and i not in contracted]
            places[side] = [(int(i), d) for d, i in enumerate(batch)]
            places[side] += [(i, count + d) for d, i in enumerate(free)]
            count += len(free) if not side else 0
        return [[(i, d) for i, d in own if shape[d] != 1] for own in places]
    return [[(d, d) for d in _axes(own) if len(own) == len(shape) and shape[d] != 1] for own in shapes]


class Pairs:
    """Which axes of operands are which axes of results, per node, each looked at once.

    Args:
      graph: the program.
    """

    def __init__(self, graph: Graph):
        self._graph = graph
        self._known: dict[int, list[list[_Pair]] | None] = {}

    def of(self, node: Node) -> list[list[_Pair]] | None:
        """Returns, for each operand of a node, its axes of which the size is not 1, each with that of the results, or
        with -1; None where :func:`axes_moved` returns None."""
        number = node.outputs[0]
        if number not in self._known:
            found = _pairs(self._graph, node)
            if found is not None:
                axes = [_axes(self._graph.shape(n)) for n in node.inputs]
                placed = [dict(own) for own in found]
                found = [[(i, own.get(i, -1)) for i in at] for at, own in zip(axes, placed, strict=True)]
            self._known[number] = found
        return self._known[number]


def axes_moved(graph: Graph, node: Node, moved: Mapping[int, int]) -> tuple[int, tuple[int, ...]] | None:
    """Returns the axis along which the steps stand in the result of one of ``LAYOUTS``, and those in its operands.

    Args:
      graph: the program.
      node: the node.
      moved: by value, the axis of its steps, of which there are two or more.

    Returns:
      The axes; None where the node sums over the steps, or splits them, or an operand lacks them.
    """
    pairs = _pairs(graph, node)
    if pairs is None:
        return None
    known = {dict(own).get(moved[n]) for n, own in zip(node.inputs, pairs, strict=True) if n in moved}
    if len(known) != 1 or None in known:
        return None
    (axis,) = known
    assert axis is not None
    read = [next((i for i, d in own if d == axis), None) for own in pairs]
    sizes = {None if i is None else graph.shape(n)[i] for n, i in zip(node.inputs, read, strict=True)}
    found = tuple(i for i in read if i is not None)
    return (axis, found) if len(sizes) == 1 and len(found) == len(read) else None


class _Same:
    """Sets of axes that are the same, each with a number that stands for it."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._parents = [0]
        self._first = {STEPS[0]: 0}
        """Per value, the place of its first axis among the parents."""

    def first(self, n: int) -> int:
        """Returns the place of a value's first axis; those of the others follow."""
        found = self._first.get(n)
        if found is None:
            parents = self._parents
            found = self._first[n] = len(parents)
            parents += range(found, found + len(self._graph.avals[n].shape))
        return found

    def root(self, place: int) -> int:
        """Returns the number that stands for all axes that are the same as the one at a place."""
        parents = self._parents
        while (above := parents[place]) != place:
            parents[place] = parents[above]
            place = above
        return place

    def __call__(self, axis: _Axis) -> int:
        return self.root(self.first(axis[0]) + axis[1])

    def join(self, one: int, other: int) -> None:
        """Makes the axes at two places the same."""
        parents = self._parents
        while (above := parents[one]) != one:
            parents[one] = one = parents[above]
        while (above := parents[other]) != other:
            parents[other] = other = parents[above]
        if one < other:
            parents[other] = one
        else:
            parents[one] = other


def lanes_of(
    graph: Graph,
    number: int,
    axis: int,
    nodes: Sequence[Node],
    read: Read,
    pairs: Pairs,
    added: int | None = None,
) -> Lanes | None:
    """Finds which axes are the same, among those of a result and of the values by which it is computed.

    Args:
      graph: the program.
      number: the result.
      axis: the axis of its steps.
      nodes: what computes it, in order.
      read: what the nodes read.
      pairs: which axes of that are axes of their results.
      added: a value that is added to the result and summed over nothing.

    Returns:
      The axes; None where a value has one axis twice, or is not linear in sums over the same axes.
    """
    same = _Same(graph)
    steps = same.first(STEPS[0])
    same.join(same.first(number) + axis, steps)
    summed: dict[int, list[int]] = {}
    reads = [read(node) for node in nodes]
    for node, operands in zip(nodes, reads, strict=True):
        of_operands = pairs.of(node)
        if of_operands is None:
            return None
        outputs = [same.first(out) for out in node.outputs]
        for operand, own in zip(operands, of_operands, strict=True):
            if operand is None:
                continue
            n, at = operand
            first = same.first(n)
            for i, d in own:
                if i == at:
                    same.join(first + i, steps)
                elif d < 0:
                    summed.setdefault(node.outputs[0], []).append(first + i)
                else:
                    for out in outputs:
                        same.join(first + i, out + d)
        if node.name == "dot_general" and (one := operands[0]) is not None and (other := operands[1]) is not None:
            for i, j in zip(*node.params["dimension_numbers"][0], strict=True):
                same.join(same.first(one[0]) + int(i), same.first(other[0]) + int(j))
    return _checked(graph, number, nodes, same, summed, reads, added)


def _checked(
    graph: Graph,
    number: int,
    nodes: Sequence[Node],
    same: _Same,
    summed_here: Mapping[int, Sequence[int]],
    reads: Sequence[Sequence[tuple[int, int] | None]],
    added: int | None,
) -> Lanes | None:
    """Returns the lanes of a result if each value has each axis once, and is linear in sums over the same axes."""
    summed: dict[int, frozenset[int]] = {}
    beside, alone = {added}, {added}  # what is computed from the added value, and from nothing else

    seen: set[int] = set()

    def own(n: int) -> set[int] | None:
        axes, first = _axes(graph.shape(n)), same.first(n)
        found = {same.root(first + d) for d in axes}
        return found if len(found) == len(axes) else None

    if not summed_here and added is None:  # then nothing but this is left to ask
        values = {operand[0] for operands in reads for operand in operands if operand is not None}
        values.update(out for node in nodes for out in node.outputs)
        return None if any(own(n) is None for n in values) else Lanes(same, _NONE)
    for node, operands in zip(nodes, reads, strict=True):
        inputs = [operand[0] for operand in operands if operand is not None]
        for n in inputs:
            if n not in seen and own(n) is None:
                return None
            seen.add(n)
        sums = [summed.get(n, _NONE) for n in inputs]
        here = frozenset(map(same.root, summed_here[node.outputs[0]])) if node.outputs[0] in summed_here else _NONE
        with_added = not beside.isdisjoint(inputs)
        if node.name in ("mul", "dot_general"):
            alike = sum(map(bool, sums)) < 2 and not (with_added and any(sums))
        else:
            alike = len({over for n, over in zip(inputs, sums, strict=True) if n not in alone}) < 2
        if with_added and here:
            return None
        if with_added:
            beside.update(node.outputs)
        if alone.issuperset(inputs):
            alone.update(node.outputs)
        over = _NONE.union(*sums)
        if not alike or over and _adds_numbers(graph, node, inputs) or not over.isdisjoint(here):
            return None
        for out in node.outputs:
            axes = own(out)
            if axes is None or not axes.isdisjoint(over | here):
                return None
            seen.add(out)
            summed[out] = over | here
    return Lanes(same, summed.get(number, frozenset()))


def _adds_numbers(graph: Graph, node: Node, read: Sequence[int]) -> bool:
    """Returns whether a node puts numbers other than zero beside what it reads, or adds them."""
    return node.name != "mul" and any(n not in read and whole(graph, n) != 0 for n in node.inputs)
