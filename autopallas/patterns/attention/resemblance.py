"""Tells what is nearly an attention from what has an exponential between two products and nothing else of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set

from autopallas.graph import Graph, Node
from autopallas.patterns.forward import LAYOUT

__all__ = ["EXPONENTIALS", "KEEPS", "Normalised"]

EXPONENTIALS = frozenset({"exp", "exp2", "pow"})
KEEPS = LAYOUT | frozenset(
    """mul div select_n convert_element_type reduce_precision integer_pow square sqrt neg name optimization_barrier
    stop_gradient concatenate stack slice split unstack gather dynamic_slice sort cumsum pure_callback
    sharding_constraint copy pvary pcast reshard""".split()
)
"""Operations that give masked, scaled or moved exponentials of exponentials."""
_ACROSS_DEVICES = frozenset({"psum", "psum_invariant", "all_reduce"})


class Normalised:
    """Knows which values a sum of exponentials of products enters, as a softmax's normaliser enters its probabilities.

    What has an exponential between two products without one is a flow's scale, a loss's bounded logarithm, or what
    light a ray has left: no attention, nor nearly one. All values are looked at once, when one is asked for first.
    """

    def __init__(
        self,
        graph: Graph,
        reach: Sequence[tuple[bool, bool]],
        through: Set[str],
        holds_softmax: Callable[[Node], bool],
    ):
        self._graph, self._reach, self._through, self._holds_softmax = graph, reach, through, holds_softmax
        self._known: bytearray | None = None

    def __contains__(self, number: int) -> bool:
        if self._known is None:
            self._known = self._looked_up()
        return bool(self._known[number])

    def _looked_up(self) -> bytearray:
        graph, reach = self._graph, self._reach
        exponential, summed = bytearray(len(graph.avals)), bytearray(len(graph.avals))
        for node in graph.nodes:
            name, inputs = node.name, node.inputs
            through = name in self._through or name in _ACROSS_DEVICES or name == "dot_general"
            holds = through and any(summed[i] for i in inputs)
            if name in EXPONENTIALS:
                of = any(reach[output][1] for output in node.outputs)
            elif self._holds_softmax(node):
                of = holds = any(reach[output][1] for output in node.outputs)
            elif name in ("reduce_sum", "dot_general"):
                of = False
                holds |= any(exponential[i] for i in inputs) and (name == "reduce_sum" or self._sums(node))
            else:
                of = name in KEEPS and any(exponential[i] for i in inputs)
            if of or holds:
                for output in node.outputs:
                    exponential[output], summed[output] = of, holds
        return summed

    def _sums(self, node: Node) -> bool:
        """Returns whether a contraction multiplies by one number everywhere, which is how sums are spelled too."""
        graph = self._graph
        for number in node.inputs:
            at: int | None = number
            while at is not None and (filled := graph.definitions.get(at)) is not None:
                at = filled.inputs[0] if filled.name in LAYOUT else None
            if at is not None and at in graph.literals:
                return True
        return False
