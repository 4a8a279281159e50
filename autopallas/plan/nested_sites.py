"""Leaves out sites that lie within each other: one of them is applied, and which one is known once all are planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from autopallas import jaxprs
from autopallas.custom.operation import pattern_of
from autopallas.graph import Graph
from autopallas.graph.edit import surviving
from autopallas.patterns.match import Match
from autopallas.patterns.site_order import circle
from autopallas.plan.decision import Decision
from autopallas.plan.faster_steps import loops_around, with_faster_steps

__all__ = ["without_nested"]

Planned: TypeAlias = tuple[Match, Decision]


def without_nested(
    graph: Graph, matches: Sequence[Match], decisions: Sequence[Decision]
) -> tuple[list[Match], list[Decision]]:
    """Drops sites, with their decisions, that lie within another applied site; the outer one stays.  Of those that come
    last, what holds a value that another applied site gives is dropped too, and what waits for one that waits for
    it."""
    pairs = list(zip(matches, decisions, strict=True))
    custom = [pair for pair in pairs if pattern_of(pair[0].site) is not None]
    last = [pair for pair in pairs if pair[0].site.operation.priority < 0]
    if not custom and not last:
        return list(matches), list(decisions)

    def outside(some: list[Planned], others: list[Planned]) -> list[Planned]:
        applied = [match for match, decision in others if decision.verdict == "applied"]
        if not applied or not some:
            return some
        reads = {number: read for match in applied for number, read in match.reads.items()}
        still = surviving(graph, reads, reads) | set(reads)
        return [pair for pair in some if not still.isdisjoint(pair[0].results)]

    special = {id(pair) for pair in (*custom, *last)}
    others = [pair for pair in pairs if id(pair) not in special]
    custom = outside(custom, others)
    left = [*custom, *outside(others, custom)]
    given = {number for match, decision in left if decision.verdict == "applied" for number in match.reads}
    last = with_faster_steps(graph, [pair for pair in outside(last, left) if not pair[0].holds_any(given)])
    last = _outermost(_beside_steps(last))
    left += _around_no_other(graph, last, left)
    left = _in_some_order(graph, left)
    return [match for match, _ in left], [decision for _, decision in left]


def _beside_steps(pairs: list[Planned]) -> list[Planned]:
    """Keeps the originals of applied sites that lie partly within steps that another applied site computes, and partly
    outside of these: both would compute what they share."""
    taken: dict[int, Match] = {}
    kept: set[int] = set()
    for match, decision in sorted(pairs, key=lambda pair: -len(pair[0].equations)):
        if decision.verdict != "applied":
            continue
        within = [taken.get(id(node)) for node in match.equations]
        around = {id(other) for other in within if other is not None}
        if around and (len(around) > 1 or None in within):
            kept.add(id(match))
        elif not around and getattr(match.site, "keeps_steps", False):
            taken.update((id(node), match) for node in match.equations)
    reason = "it lies partly within equal steps that are replaced"
    return [(m, replace(d, verdict="kept", reason=reason) if id(m) in kept else d) for m, d in pairs]


def _outermost(pairs: list[Planned]) -> list[Planned]:
    """Drops sites all of whose equations belong to another applied site with more of them."""
    within: set[int] = set()
    left: set[int] = set()
    for match, decision in sorted(pairs, key=lambda pair: -len(pair[0].equations)):
        own = set(map(id, match.equations))
        if not own or not own <= within:
            left.add(id(match))
            within |= own if decision.verdict == "applied" else set()
    return [pair for pair in pairs if id(pair[0]) in left]


def _in_some_order(graph: Graph, pairs: list[Planned]) -> list[Planned]:
    """Drops, of applied sites that wait for each other, those that come last: where one gives what another site gives
    too, only that other one's order was known before."""
    while around := circle(graph, [match for match, decision in pairs if decision.verdict == "applied"]):
        late = [match for match in around if match.site.operation.priority < 0]
        if not late:
            return pairs
        pairs = [pair for pair in pairs if pair[0] is not late[-1]]
    return pairs


def _around_no_other(graph: Graph, last: list[Planned], others: list[Planned]) -> list[Planned]:
    """Drops, of sites that come last, loops around other applied sites, and then what lies within the loops left."""
    loops = {
        id(node.equation): match
        for match, decision in last
        if decision.verdict == "applied"
        for node in match.equations
        if jaxprs.bodies(node.equation)
    }
    if not loops:
        return last
    inside = [loops_around(graph, match) for match, decision in others if decision.verdict == "applied"]
    around = {id(loops[key]) for keys in inside for key in keys if key in loops}
    left = {key for key, match in loops.items() if id(match) not in around}
    return [pair for pair in last if id(pair[0]) not in around and left.isdisjoint(loops_around(graph, pair[0]))]
