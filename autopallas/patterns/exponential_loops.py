"""Finds loops that stack exponentials of sums for their backward, where products of matrices can be in their place."""

from __future__ import annotations

from autopallas import array_types, compat, jaxprs
from autopallas.faults import contained
from autopallas.graph import Graph, Node
from autopallas.graph.edit import surviving
from autopallas.kernels.respelling.exponential_sums import may_sum
from autopallas.kernels.respelling.kinds.summed_exponentials import LEAST_STEPS, is_worth_it
from autopallas.kernels.respelling.kinds.summed_exponentials_gradient import KIND, plan_of_backward
from autopallas.kernels.respelling.operation import OPERATION
from autopallas.patterns.loop_pairs import LoopPair, bytes_of, check, checkpointed, pairs, site
from autopallas.patterns.match import Match, Mismatch

__all__ = ["find"]

_LEAST_BYTES = 2**24
"""Smallest size of what is stacked for the backward, all steps together.  Less stays in a cache, and where numbers lie
too far apart for products, computing each step again takes longer: with 9 MB train steps had 0.81 to 0.94 of the speed,
with 34 MB and more 2.4 times (AVX-512, JAX 0.10.2)."""
_LEAST_GAIN = 2
"""How many times as much a step stacks as it is given by the step before."""


def find(graph: Graph) -> list[Match]:
    """Finds every such loop with its backward."""
    if "exp" not in graph.primitives:
        return []
    alive = surviving(graph)
    found = []
    least = 0 if KIND.name in graph.named else _LEAST_BYTES
    for pair in pairs(graph, alive, frozenset[Node](), least, _may_sum):
        location = jaxprs.location(pair.forward.equation)
        with contained(location, OPERATION.name, "recognition"):
            match = _match(graph, pair, alive, location)
            if match is not None:
                found.append(match)
    return found


def _may_sum(node: Node) -> bool:
    return int(node.params["length"]) >= LEAST_STEPS and may_sum(node.params["jaxpr"])


def _match(graph: Graph, pair: LoopPair, alive: frozenset[int], location: str) -> Match | None:
    forward = pair.forward
    length = int(forward.params["length"])
    constants, carried = compat.scan_parts(forward.equation)
    states = length * sum(bytes_of(graph, n) for n in forward.inputs[constants : constants + carried])
    if array_types.varying_axes([graph.avals[n] for node in (forward, pair.backward) for n in node.inputs]):
        return None  # casts between such types hold in the body of a shard_map alone
    if sum(bytes_of(graph, n) for n in pair.residuals) < _LEAST_GAIN * states:
        return None
    try:
        check(graph, pair)
    except Mismatch:
        return None
    scan = checkpointed(graph, pair, 1, alive)
    plan = plan_of_backward(scan)
    if plan is None or not (KIND.name in graph.named or is_worth_it(plan)):
        return None
    return site(graph, pair, scan, KIND, location)
