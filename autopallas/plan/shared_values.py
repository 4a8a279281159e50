"""Keeps the sites most of which would be computed twice, since a site that is kept reads values on the way.

A scan and its gradient are two sites, and the gradient reads what the scan computes within.  Where the gradient stays
as it is, so do these values, and a loop in the scan's place would only come on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopallas.graph import Node
from autopallas.patterns.match import Match
from autopallas.plan.decision import Decision

__all__ = ["without_shared_values"]

_ROUNDS = 8
"""How often it is asked what those need that are kept since the last time."""


def without_shared_values(matches: Sequence[Match], decisions: Sequence[Decision]) -> list[Decision]:
    """Returns the decisions, of which those are to keep the original more than half of whose equations stay, since
    another site of the same operation, which is kept, needs what they compute."""
    found = list(decisions)
    own = [{node: None for part in match.passes for node in part.equations} for match in matches]
    computing: dict[tuple[str, int], list[int]] = {}
    for i, (match, decision) in enumerate(zip(matches, found, strict=True)):
        if decision.verdict == "applied":
            for number in {n for node in own[i] for n in node.outputs}.difference(match.replaced):
                computing.setdefault((match.op, number), []).append(i)
    kept = [i for i, decision in enumerate(found) if decision.verdict == "kept"]
    needed: dict[int, set[int]] = {}
    for _ in range(_ROUNDS if computing else 0):
        readers: dict[int, int] = {}
        for reader in kept:
            for node in own[reader]:
                for number in node.inputs:
                    for i in computing.get((matches[reader].op, number), ()):
                        if node not in own[i] and found[i].verdict == "applied":
                            needed.setdefault(i, set()).add(number)
                            readers[i] = reader
        kept = [i for i in readers if 2 * _count(own[i], needed[i]) > len(own[i])]
        for i in kept:
            place = matches[readers[i]].location
            reason = f"most of what it computes is needed by the site at {place}, which is kept"
            found[i] = replace(found[i], verdict="kept", reason=reason, entry=None)
        if not kept:
            break
    return found


def _count(nodes: dict[Node, None], needed: set[int]) -> int:
    """Returns how many of some nodes, in order, compute values that are needed."""
    numbers, count = set(needed), 0
    for node in reversed(nodes):
        if not numbers.isdisjoint(node.outputs):
            numbers.update(node.inputs)
            count += 1
    return count
