"""Keeps the originals of loops of which only the form is replaced, where sites within their steps gain more."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import TypeAlias

from autopallas import jaxprs
from autopallas.compat import JaxprEqn
from autopallas.graph import Graph
from autopallas.graph.prices import price
from autopallas.patterns.match import Match
from autopallas.plan.decision import Decision

__all__ = ["loops_around", "with_faster_steps"]

Planned: TypeAlias = tuple[Match, Decision]


def with_faster_steps(graph: Graph, pairs: list[Planned]) -> list[Planned]:
    """Keeps the originals of applied loops whose replacement computes the same steps (``keeps_steps`` of a site), and
    within which other applied sites gain more together, which it would leave out.

    A gain is what was measured, and 1 without evidence; what sites within the steps gain together depends on their part
    of what the steps compute.  Under the objective "memory" such loops stay, which need less of it.
    """
    loops = {id(m): (m, d) for m, d in pairs if d.verdict == "applied" and getattr(m.site, "keeps_steps", False)}
    if not loops or graph.objective == "memory":
        return pairs
    own = {id(node.equation): key for key, (match, _) in loops.items() for node in match.equations}
    inside: dict[int, list[Planned]] = defaultdict(list)
    for match, decision in pairs:
        if decision.verdict != "applied" or id(match) in loops:
            continue
        around = {own.get(id(node.equation)) for node in match.equations}
        keys = {own[key] for key in loops_around(graph, match) if key in own}
        for key in keys | ({*around} if len(around) == 1 else set()):
            if key is not None:
                inside[key].append((match, decision))
    slow = {
        key
        for key, (match, decision) in loops.items()
        if key in inside and _gain_within(match, inside[key]) > _gain(decision)
    }
    reason = "what is replaced within its steps gains more"
    return [(m, replace(d, verdict="kept", reason=reason) if id(m) in slow else d) for m, d in pairs]


def loops_around(graph: Graph, match: Match) -> set[int]:
    """Returns the identities of the equations that hold the bodies in which a site is computed, backward included."""
    nodes = (graph.definitions.get(number) for number in match.replaced)
    bodies = {*match.sources, *(node.body for node in nodes if node is not None)}
    found: set[int] = set()
    for body in bodies:
        while body in graph.holders:
            body, position = graph.holders[body]
            found.add(id(body.equations[position]))
    return found


def _gain(decision: Decision) -> float:
    return 1.0 if decision.evidence is None else decision.evidence.speedup


def _gain_within(loop: Match, sites: Iterable[Planned]) -> float:
    """Returns how many times as fast the steps of a loop are with the sites within them.

    What an equation usually takes is what a site takes: the program's own takes as much longer as was measured.
    """
    after = sum(_work(node.equation) for node in loop.equations)
    more: dict[int, float] = {}
    for match, decision in sites:
        more.update((id(node.equation), _work(node.equation) * (_gain(decision) - 1)) for node in match.equations)
    return (after + sum(more.values())) / after if after else 1.0


def _work(equation: JaxprEqn) -> float:
    """Returns how long an equation takes, where a product of two numbers takes 1; a loop's are those of one step."""
    bodies = [jaxprs.open_jaxpr(body)[0] for _, _, body in jaxprs.bodies(equation)]
    if bodies:
        return sum(_work(inner) for body in bodies for inner in body.eqns)
    size = max((int(getattr(v.aval, "size", 0)) for v in (*equation.outvars, *equation.invars)), default=0)
    if equation.primitive.name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        summed = 1
        for axis in contracted:
            summed *= int(equation.invars[0].aval.shape[axis])
        return float(int(equation.outvars[0].aval.size) * summed)
    return float(price(equation) * size)
