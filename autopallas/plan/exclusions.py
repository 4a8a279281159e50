"""Leaves chosen sites as they are, to measure what each is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from autopallas.patterns.match import Match
from autopallas.plan.decision import Decision
from autopallas.trace_context import TraceContext

__all__ = ["Place", "leaving_out", "without_left_out"]

Place: TypeAlias = tuple[str, str]
"""(operation, location): sites of one place are left out together."""

leaving_out: TraceContext[frozenset[Place]] = TraceContext(frozenset())
"""The places at which nothing is replaced.  Part of the trace key."""


def without_left_out(matches: Sequence[Match], decisions: list[Decision]) -> list[Decision]:
    """Keeps the originals of applied sites at the places of :data:`leaving_out`."""
    places = leaving_out.value
    if not places:
        return decisions
    reason = "left out to measure what it is worth"
    return [
        replace(decision, verdict="kept", reason=reason)
        if decision.verdict == "applied" and (match.op, match.location) in places
        else decision
        for match, decision in zip(matches, decisions, strict=True)
    ]
