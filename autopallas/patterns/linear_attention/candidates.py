"""Finds the contractions that may end a linear attention, so that most programs have no need of what reads one."""

from __future__ import annotations

import numpy as np

from autopallas.graph import Graph, Node
from autopallas.graph.labels import is_product
from autopallas.patterns.forward import COPIES, LAYOUT
from autopallas.patterns.linear_attention.masks import COMPARISONS

__all__ = ["candidates"]

_CONTRACTIONS = frozenset({"dot_general", "reduce_sum"})
_COUNTS = LAYOUT | {"add", "sub", "convert_element_type"}
_MOVES = COPIES | {"slice", "split", "concatenate", "stack", "unstack", "not"}
_SCALES = frozenset({"mul", "div", "neg", "select_n"})
_WEIGHTS = COPIES | {"add", "sub", "exp", "exp2", "pow", "abs", "max", "cumsum"}
"""Equations by which masks and decays are computed of masks."""


def candidates(graph: Graph) -> list[Node]:
    """Returns the contractions, and quotients of these, that read running sums or masked products, in one pass over the
    program.  A mask compares positions here, or is part of the program's text."""
    positions = {number for number, array in graph.constants.items() if np.ndim(array) > 0}
    masks = {number for number in positions if np.ndim(graph.constants[number]) > 1}
    weights = {*masks}  # masks, and decays that are computed of them
    numbers: set[int] = set()  # arrays that repeat one
    products: set[int] = set()
    reached: set[int] = set()
    results: set[int] = set()
    found: list[Node] = []
    for node in graph.nodes:
        name, given = node.name, [n for n in node.inputs if n not in graph.literals and n not in numbers]
        scales = name in _SCALES or is_product(node)
        moves = name in _MOVES or scales
        contracts = name in _CONTRACTIONS and not scales
        if given and (name in COMPARISONS and positions.issuperset(given) or moves and masks.issuperset(given)):
            masks.update(node.outputs)
            weights.update(node.outputs)
        elif name == "iota" or (given and name in _COUNTS and positions.issuperset(given)):
            positions.update(node.outputs)
        elif not given and name in COPIES:
            numbers.update(node.outputs)
        elif name == "cumsum":
            reached.update(node.outputs)
        elif not reached.isdisjoint(given):
            if contracts:
                found.append(node)
                results.update(node.outputs)
            elif moves:
                reached.update(node.outputs)
        elif not results.isdisjoint(given) and name == "div":
            found.append(node)
        elif not products.isdisjoint(given) and scales and not weights.isdisjoint(given):
            reached.update(node.outputs)
        if contracts or (moves and not products.isdisjoint(given)):
            products.update(node.outputs)
        if (name in _WEIGHTS or moves) and not weights.isdisjoint(given):
            weights.update(node.outputs)
        if name in COPIES and not results.isdisjoint(given):
            results.update(node.outputs)
    return found
