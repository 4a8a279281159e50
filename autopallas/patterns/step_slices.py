"""Tells slices of one array, one for each step, at places that are equally far apart."""

from __future__ import annotations

from collections.abc import Sequence

from autopallas.graph import Graph

__all__ = ["slices_of"]


def slices_of(graph: Graph, numbers: Sequence[int]) -> tuple[int, int, int, int, bool] | None:
    """Returns (array, axis, first place, distance, whether the axis is kept) of slices of one array, at places that are
    equally far apart; None of other values."""
    found = [_slice(graph, number) for number in numbers[:2]]
    if found[0] is None or found[1] is None:
        return None
    array, axis, first, keeps = found[0]
    apart = found[1][2] - first
    if not apart:
        return None
    for k, number in enumerate(numbers):
        if _slice(graph, number) != (array, axis, first + k * apart, keeps):
            return None
    return array, axis, first, apart, keeps


def _slice(graph: Graph, number: int) -> tuple[int, int, int, bool] | None:
    """Returns (array, axis, place, whether the axis is kept) of a slice one place wide."""
    node = graph.definitions.get(number)
    if node is None:
        return None
    if node.name == "unstack":
        return node.inputs[0], int(node.params["axis"]), node.outputs.index(number), False
    squeezed: tuple[int, ...] = ()
    if node.name == "squeeze":
        squeezed = tuple(int(d) for d in node.params["dimensions"])
        node = graph.definitions.get(node.inputs[0])
    if node is None or node.name != "slice" or any(int(s) != 1 for s in node.params["strides"] or ()):
        return None
    shape = graph.shape(node.inputs[0])
    starts, limits = node.params["start_indices"], node.params["limit_indices"]
    cut = [d for d, size in enumerate(shape) if (int(starts[d]), int(limits[d])) != (0, size)]
    if len(cut) != 1 or int(limits[cut[0]]) - int(starts[cut[0]]) != 1 or squeezed not in ((), (cut[0],)):
        return None
    return node.inputs[0], cut[0], int(starts[cut[0]]), not squeezed
