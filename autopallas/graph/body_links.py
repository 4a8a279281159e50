"""Which values of one jaxpr body can be passed into another (loop constants, stacked slices, branch results)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from autopallas import jaxprs
from autopallas.compat import Literal
from autopallas.graph.flatten import Body
from autopallas.graph.numbering import Graph

__all__ = ["homes_of", "is_at_hand", "linked", "may_be_given"]

_GIVING = jaxprs.CHECKPOINTS | {"scan"}
"""Equations whose bodies can be given values of the bodies around them."""


def linked(graph: Graph, source: Body, target: Body) -> bool:
    """Returns whether values of one body can be passed into a later one.

    A step of a scan can get values from the same step of a scan of that length, a device from a shard_map over the same
    mesh, and a branch from the same branch of an equal cond.  Equations that lie in such bodies themselves count too.
    """
    if source is target:
        return True
    if source not in graph.holders or target not in graph.holders:
        return False
    (outer, i), (other, j) = graph.holders[source], graph.holders[target]
    first, second = outer.equations[i], other.equations[j]
    if first.primitive is not second.primitive or (outer is other and i >= j):
        return False
    match first.primitive.name:
        case "scan":
            alike = first.params["length"] == second.params["length"]
        case "shard_map":
            checked = first.params["check_vma"] == second.params["check_vma"]
            alike = checked and graph.frames[source] == graph.frames[target]
        case "cond":
            alike = _branch(graph, source) == _branch(graph, target)
        case _:
            alike = False
    return alike and linked(graph, outer, other)


def is_at_hand(graph: Graph, number: int, home: Body, body: Body) -> bool:
    """Returns whether a body has a variable for a value, or can be given that of a body before it."""
    if number in graph.positions[body]:
        return True
    return number in graph.positions[home] and linked(graph, home, body)


def homes_of(graph: Graph, cotangent: int, gradients: Sequence[int]) -> list[Body]:
    """Returns the bodies that have a cotangent and compute gradients from it: more than one where two branches do the
    same."""

    def computed(body: Body, number: int) -> bool:
        place = graph.positions[body].get(number)
        return place is not None and place[0] >= 0

    return [body for body in graph.bodies_with(cotangent) if all(computed(body, number) for number in gradients)]


def may_be_given(graph: Graph, number: int, body: Body, home: Body | None = None) -> bool:
    """Returns whether a body has a variable for a value, or can be given that of a body around it, which may have that
    of a ``home`` before it."""
    while number not in graph.positions[body] and (home is None or not is_at_hand(graph, number, home, body)):
        if body not in graph.holders:
            return False
        outer, position = graph.holders[body]
        if outer.equations[position].primitive.name not in _GIVING:
            return False
        if number in graph.positions[outer] and graph.positions[outer][number][0] >= position:
            return False
        body = outer
    return True


def _branch(graph: Graph, body: Body) -> Hashable:
    """Returns the number of a cond's predicate, the number of its branches, and which of them a body is."""
    outer, i = graph.holders[body]
    decides, bodies = outer.equations[i].invars[0], [child.body for child in outer.children[i]]
    number = graph.find_literal(decides) if isinstance(decides, Literal) else graph.numbers[outer][decides]
    return number, len(bodies), bodies.index(body)
