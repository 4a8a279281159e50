"""Finds equal steps with products or sums that stand one after the other, as a Python loop over a recurrent cell, over
steps of gradient descent or over a solver writes them, and as JAX writes the backward of such steps.

What such steps are is proved by :mod:`autopallas.patterns.chain`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopallas import jaxprs
from autopallas.graph import Graph, Node
from autopallas.graph.custom_rules import ELEMENTWISE, is_elementwise_call
from autopallas.kernels.respelling.kind import Found
from autopallas.kernels.respelling.operation import OPERATION
from autopallas.patterns.chain import Chain, Given, Leaves, Longer, Refused
from autopallas.patterns.chain_site import site_of
from autopallas.patterns.equal_steps import by_body
from autopallas.patterns.match import NearMiss
from autopallas.patterns.step_periods import LEAST_STEPS, SHORTEST, blocks_of, runs

__all__ = ["find"]

_MOST_PASSES = 8
"""Most looks at a run for what depends on it by way of other equations."""

_MOVES = frozenset(
    """broadcast_in_dim concatenate copy expand_dims iota pad reshape rev slice split squeeze stack transpose
    unstack""".split()
)
_SUMS = frozenset({"argmax", "argmin", "reduce_max", "reduce_min", "reduce_prod", "reduce_sum"})
_MORE = frozenset({"dynamic_slice", "dynamic_update_slice", "gather"})
_PRODUCT = "dot_general"
_STEPS_HOLD = ELEMENTWISE | _MOVES | _SUMS | _MORE | {_PRODUCT}

_ADVICE = (
    "Compute what the steps read before the first of them, and what comes of them after the last; or write "
    "jax.lax.scan over the steps."
)


def find(graph: Graph) -> Iterator[tuple[Chain, Found] | NearMiss]:
    """Yields chains of equal steps, each with its site, and near misses."""

    def holds(node: Node) -> bool:
        return (node.name in _STEPS_HOLD or is_elementwise_call(node.equation)) and not node.equation.effects

    order: dict[int, int] = {}
    given: Given = {}
    for nodes in by_body(graph, holds):
        for run, period in runs(graph, nodes):
            if not any(node.name == _PRODUCT or node.name in _SUMS for node in run[:period]):
                continue
            order = order or {id(node): place for place, node in enumerate(graph.nodes)}
            try:
                chain, found = _chain(graph, run, period, order, given)
            except Refused as refused:
                if refused.reason:
                    yield NearMiss(
                        OPERATION.name, jaxprs.location(run[-1].equation), refused.reason, run[-1].outputs[0], _ADVICE
                    )
                continue
            yield chain, found


def _chain(graph: Graph, run: Sequence[Node], period: int, order: dict[int, int], given: Given) -> tuple[Chain, Found]:
    """Returns the chain of a run, and its site.

    Raises:
      Refused: it is none.
    """
    try:
        return _of_run(graph, run, period, order, given)
    except Leaves:
        pass
    less, length, other = _independent(graph, run, period, order)
    try:
        return _of_run(graph, less, length, order, given)
    except Refused:
        if other is not None and other.name not in _STEPS_HOLD and _shares_a_factor(run, period):
            raise Refused(
                f"between equal steps, one after the other, stands what no loop of them can hold: {other.name}"
            ) from None
        raise


def _of_run(graph: Graph, run: Sequence[Node], period: int, order: dict[int, int], given: Given) -> tuple[Chain, Found]:
    """Returns the chain of equations that repeat, and its site.

    Raises:
      Refused: it is none.
    """
    if not run or len(run) < LEAST_STEPS * period:
        raise Refused
    for _ in range(2):
        try:
            chain = Chain(graph, blocks_of(graph, run, period), order)
            return chain, site_of(chain, given)
        except Longer as longer:
            period *= longer.times
    raise Refused


def _shares_a_factor(run: Sequence[Node], period: int) -> bool:
    """Returns whether two steps multiply by the same array."""
    start = len(run) // period // 2 * period
    return any(
        node.name == _PRODUCT and any(a == b for a, b in zip(node.inputs, later.inputs, strict=True))
        for node, later in zip(run[start - period : start], run[start : start + period], strict=False)
    )


def _independent(
    graph: Graph, run: Sequence[Node], period: int, order: dict[int, int]
) -> tuple[Sequence[Node], int, Node | None]:
    """Returns the equations of a run without those positions of a step that read what others than the run compute of
    it, such as gradients of a whole array to which each step adds; the length of a step; and one of the others."""
    begin, end = order[id(run[0])], order[id(run[-1])]
    between = graph.nodes[begin : end + 1]
    definitions, literals, lowest = graph.definitions, graph.literals, run[0].outputs[0]
    between_steps: Node | None = None
    for _ in range(_MOST_PASSES):
        at = {id(node): place % period for place, node in enumerate(run)}
        made: set[int] = set()
        others: dict[int, Node] = {}
        left_out: set[int] = set()
        for node in between:
            position = at.get(id(node))
            read = next(
                (
                    others.get(n, node)
                    for n in node.inputs
                    if n in others or (n > lowest and n not in made and n not in definitions and n not in literals)
                ),
                None,
            )
            if position is not None and read is None and position not in left_out:
                made.update(node.outputs)
            elif position is not None or read is not None or any(n in made for n in node.inputs):
                if position is not None:
                    left_out.add(position)
                    between_steps = between_steps or read
                others.update(dict.fromkeys(node.outputs, read or node))
        graph.steps.spend(end - begin + 1)
        if not left_out:
            return run, period, between_steps
        run = [node for place, node in enumerate(run) if place % period not in left_out]
        period -= len(left_out)
        if period < SHORTEST or not run:
            break
    return [], period, between_steps
