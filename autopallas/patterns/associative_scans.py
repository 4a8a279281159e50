"""Finds associative scans that no kind of respelling knows, such as one whose states are reset: near misses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from autopallas import jaxprs
from autopallas.compat import is_transposed
from autopallas.graph import Graph, Node
from autopallas.graph.edit import surviving
from autopallas.kernels.respelling.doubling import scans_of
from autopallas.kernels.respelling.operation import OPERATION
from autopallas.patterns.advice import SCANNED, SCANNED_LOGARITHMS
from autopallas.patterns.logarithms_of_sums import is_logaddexp
from autopallas.patterns.match import NearMiss

__all__ = ["unknown_scans"]

_LEVELS = 3
"""Fewest levels of a tree that is called a scan: that of eight steps has so many."""
_REASON = "this associative scan, or its gradient, is not shown to be h[t] = a[t] h[t-1] + b[t]"
_LOGARITHMS = "this associative scan adds up exponentials of what it scans, as the gradient of cumlogsumexp does"


def unknown_scans(graph: Graph) -> Iterator[NearMiss]:
    """Yields a near miss for each place in the source at which steps are put between others on several levels, as only
    an associative scan does, and of which no scan is known."""
    levels: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for node in graph.nodes:
        if node.name == "pad" and not node.body.transposed:
            size = _between(graph, node)
            if size is not None and not is_transposed(node.equation):
                levels[jaxprs.location(node.equation)][size].append(node.outputs[0])
    candidates = {place: own for place, own in levels.items() if len(own) >= _LEVELS}
    if not candidates:
        return
    alive = surviving(graph)
    known = {jaxprs.location(graph.definitions[number].equation) for number in scans_of(graph)}
    added = {
        jaxprs.location(n.equation) for n in graph.nodes if n.name == "custom_jvp_call" and is_logaddexp(n.equation)
    }
    for place, own in candidates.items():
        last = [number for number in own[max(own)] if number in alive]  # a program may read one of several results
        if place not in known and last:
            reason, advice = (_LOGARITHMS, SCANNED_LOGARITHMS) if place in added else (_REASON, SCANNED)
            yield NearMiss(OPERATION.name, place, reason, last[-1], advice)


def _between(graph: Graph, node: Node) -> int | None:
    """Returns the size of the axis along which a pad puts one step between any two; None for other pads."""
    inside = [axis for axis, (_, _, between) in enumerate(node.params["padding_config"]) if int(between)]
    if len(inside) != 1 or int(node.params["padding_config"][inside[0]][2]) != 1:
        return None
    return graph.shape(node.outputs[0])[inside[0]]
