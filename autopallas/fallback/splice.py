"""Splices the sites that can be spliced; a site that cannot be keeps its original, without affecting the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopallas import jaxprs
from autopallas.compat import ClosedJaxpr
from autopallas.errors import one_line
from autopallas.fallback.bisect import bisect_failures
from autopallas.fallback.warn import warn_not_used
from autopallas.graph import Graph
from autopallas.patterns import Match
from autopallas.plan.decision import Decision
from autopallas.rewrite.sites import splice

__all__ = ["splice_what_can_be"]


def splice_what_can_be(
    program: ClosedJaxpr, graph: Graph, matches: Sequence[Match], decisions: list[Decision], strict: bool
) -> tuple[ClosedJaxpr, list[Decision]]:
    """Returns the program with the applied sites replaced where possible, and the decisions that hold for it."""
    applied = [number for number, decision in enumerate(decisions) if decision.verdict == "applied"]
    errors: dict[int, str] = {}

    def some(chosen: Sequence[int]) -> list[Decision]:
        result = list(decisions)
        for number in applied:
            if number not in chosen:
                own, text = decisions[number], errors.get(number, "")
                attempts = (*own.attempts, (own.implementation or "", "rewrite", text))
                reason = f"it could not be replaced: {text}"
                result[number] = replace(own, verdict="kept", reason=reason, attempts=attempts)
        return result

    def fails(chosen: Sequence[int]) -> bool:
        try:
            splice(graph, matches, some(chosen))
        except Exception as error:
            errors.update(dict.fromkeys(chosen, one_line(error)))
            return True
        return False

    left = applied
    while left:
        kept = some(left)
        try:
            result = splice(graph, matches, kept)
        except Exception as error:
            if strict:
                raise
            errors.update(dict.fromkeys(left, one_line(error)))
        else:
            return jaxprs.with_weak_types(result, program), kept
        for number in (found := bisect_failures(left, fails)):
            match, name = matches[number], decisions[number].implementation or ""
            warn_not_used(match.op, match.location, name, "rewrite", errors[number])
        left = [number for number in left if number not in found]
    return program, some([])
