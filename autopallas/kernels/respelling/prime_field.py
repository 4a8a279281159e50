"""Evaluates equations along one axis with integers modulo a prime, at several points at once.

Arrays are [points, steps].
Two polynomials that agree at random points of a large prime field are the same (Schwartz and Zippel).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopallas.graph import Graph, Node
from autopallas.graph.loop_slices import uniform

__all__ = ["PRIME", "computed", "gradient", "scanned", "whole"]

Array = np.ndarray

PRIME = 2**31 - 1
_KEPT = frozenset(
    {"broadcast_in_dim", "copy", "copy_p", "expand_dims", "reduce_sum", "reshape", "squeeze", "transpose"}
)
"""What gives the numbers along the axis as they are; of a sum over other axes, those of one of its terms."""


def whole(graph: Graph, number: int) -> int | None:
    """Returns the whole number that a value is in each of its elements, or None."""
    found = uniform(graph, number)
    if found is None or np.imag(found):
        return None
    real = float(np.real(found))
    return int(real) if real.is_integer() and abs(real) < 2**20 else None


def computed(node: Node, axis: int | None, given: Sequence[Array]) -> list[Array] | None:
    """Returns the results of a node along an axis, in the field.

    Args:
      node: the node.
      axis: the axis along which it moves what it is given; None where there is one number, which it does not move.
      given: its operands along that axis, [points, steps].
    """
    name, params = node.name, node.params
    if name in ("mul", "dot_general"):
        return [given[0] * given[1] % PRIME]
    if name in ("add", "add_any"):
        return [(given[0] + given[1]) % PRIME]
    if name == "sub":
        return [(given[0] - given[1]) % PRIME]
    if name == "neg":
        return [-given[0] % PRIME]
    if name in _KEPT or axis is None:
        return [given[0]]
    if name == "concatenate":
        return [np.concatenate(given, -1)]
    if name == "split":
        return list(np.split(given[0], np.cumsum([int(n) for n in params["sizes"]])[:-1], -1))
    if name == "slice":
        by = 1 if params["strides"] is None else int(params["strides"][axis])
        return [given[0][:, int(params["start_indices"][axis]) : int(params["limit_indices"][axis]) : by]]
    if name == "pad":
        low, high, inside = (int(x) for x in params["padding_config"][axis])
        x, fill = given[0], given[1][:1, :1]
        points, size = x.shape
        size += max(0, size - 1) * inside
        begin, end = max(0, low), max(0, low) + size + max(0, high)
        spread = np.full((points, end), fill)
        spread[:, begin : begin + size : inside + 1] = x
        return [spread[:, max(0, -low) : end - max(0, -high)]]
    return None


def scanned(decay: Array, given: Array) -> Array:
    """Returns h with ``h[t] = decay[t] h[t-1] + given[t]`` in the field, [points, steps]."""
    found = []
    for of_point in zip(decay.tolist(), given.tolist(), strict=True):
        state = 0
        for a, b in zip(*of_point, strict=True):
            state = (a * state + b) % PRIME
            found.append(state)
    return np.asarray(found, np.int64).reshape(decay.shape)


def gradient(decay: Array, cotangent: Array) -> Array:
    """Returns g with ``g[t] = cotangent[t] + decay[t+1] g[t+1]`` in the field, [points, steps]."""
    following = np.concatenate([decay[:, 1:], np.zeros_like(decay[:, :1])], -1)
    return scanned(following[:, ::-1], cotangent[:, ::-1])[:, ::-1]
