"""Finds the sums that may be over experts, so that most programs have no need of the modules that read them."""

from __future__ import annotations

from collections.abc import Sequence

from autopallas import compat
from autopallas.graph import Graph, Node
from autopallas.graph.custom_rules import ELEMENTWISE, is_elementwise_call
from autopallas.graph.labels import is_product
from autopallas.numerics.casts import is_floating
from autopallas.patterns.mixture_of_experts.axes import EVERYTHING, passed_on

__all__ = ["MOVES", "PLAIN", "candidates"]

PLAIN = ELEMENTWISE | frozenset(
    """reshape transpose broadcast_in_dim squeeze expand_dims slice split concatenate stack unstack copy name
    optimization_barrier reduce_sum reduce_max reduce_or custom_jvp_call dot_general""".split()
)
MOVES = frozenset("reshape transpose broadcast_in_dim squeeze expand_dims convert_element_type copy".split())
_SUMS = frozenset({"dot_general", "reduce_sum", "add", "select_n"})
_ANCHORS = _SUMS | {"scan", "gather", "scatter", "scatter-add"}
"""Operations that may be the sum, or pick what experts compute."""
_STARTS = frozenset({"eq", "ge", "le", "and", "scatter", "scatter-add", "exp", "logistic"})


def candidates(graph: Graph, alive: frozenset[int]) -> list[Node]:
    """Returns the nodes that may sum over experts products and compared, scattered or normalised values."""
    weighs = bytearray(len(graph.avals))
    product = bytearray(len(graph.avals))
    gathered = bytearray(len(graph.avals))
    """Whether a value is gathered, apart from layout and casts."""
    along = [0] * len(graph.avals)
    """Per value, a bit for each axis along which it may differ by something compared, scattered or normalised."""
    found: list[Node] = []
    avals = graph.avals
    for node in graph.nodes:
        name, inputs = node.name, node.inputs
        weighed = multiplied = False
        for i in inputs:
            weighed = weighed or bool(weighs[i])
            multiplied = multiplied or bool(product[i])
        if name in _ANCHORS and (name == "scan" or node.outputs[0] in alive):
            if name == "scan":  # possibly a loop over experts
                chosen = not alive.isdisjoint(node.outputs)
            elif name in ("add", "select_n"):
                chosen = multiplied and (weighed or len(inputs) > 3)
            else:
                sums = weighed and multiplied and _sums_along(node, [along[i] for i in inputs])
                chosen = sums or _may_pick(graph, node, product, gathered)
            if chosen and not node.body.transposed and not compat.is_transposed(node.equation):
                found.append(node)
        starts = name in _STARTS
        through = starts or weighed and (name == "scan" or name in PLAIN)
        multiplied = multiplied or name == "scan" or name == "dot_general" and not is_product(node)
        moves = name == "gather" or name in MOVES and gathered[inputs[0]]
        plain = not starts and name in ELEMENTWISE
        for output in node.outputs:
            weighs[output], product[output], gathered[output] = through, multiplied, moves
            if through and plain:  # what passed_on gives
                bits = 0
                for i in inputs:
                    if along[i]:
                        bits |= along[i] if avals[i].shape else EVERYTHING
                along[output] = bits
            elif through:
                whole = starts or name == "scan" or name == "custom_jvp_call" and not is_elementwise_call(node.equation)
                along[output] = -1 if whole else passed_on(graph, node, output, [along[i] for i in inputs])
    return found


def _may_pick(graph: Graph, node: Node, product: Sequence[int], gathered: Sequence[int]) -> bool:
    """Returns whether a node may pick what experts compute, or add it to tokens, or multiply with gathered matrices."""
    if not node.outputs or not is_floating(graph.dtype(node.outputs[0])):
        return False
    if node.name in ("scatter", "scatter-add"):
        return bool(product[node.inputs[2]])
    if node.name == "gather":
        return bool(product[node.inputs[0]])
    if node.name != "dot_general" or is_product(node):
        return False
    return any(gathered[i] and len(graph.shape(i)) > 2 for i in node.inputs)


def _sums_along(node: Node, axes: Sequence[int]) -> bool:
    """Returns whether a node sums along one of the ``axes`` of its operands."""
    if node.name == "reduce_sum":
        return any(axes[0] >> int(d) & 1 for d in node.params["axes"])
    if node.name != "dot_general":
        return False
    contracted = node.params["dimension_numbers"][0]
    return any(mask >> int(d) & 1 for mask, dimensions in zip(axes, contracted, strict=True) for d in dimensions)
