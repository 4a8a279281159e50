"""Warns that an implementation is not used because it failed, or that one of a list was passed over."""

from __future__ import annotations

from collections.abc import Sequence

from autopallas.options import Options
from autopallas.patterns.match import Match
from autopallas.plan.decision import Decision
from autopallas.tuning.cache import WARNED

__all__ = ["warn_not_used", "warn_passed_over"]


def warn_not_used(op: str, location: str, implementation: str, stage: str, error: str) -> None:
    """Warns once for each site and reason."""
    WARNED.once(
        f"{op} {location} {implementation} {stage} {error}",
        f"autopallas does not use {implementation} for the {op} at {location}: {stage} failed with {error}",
    )


def warn_passed_over(matches: Sequence[Match], decisions: Sequence[Decision], options: Options) -> None:
    """Warns of the implementations in a user's list that cannot compute a site, once for each operation and reason.

    An implementation that the operation does not have was listed for others.
    """
    for match, decision in zip(matches, decisions, strict=True):
        if not isinstance(options.implementation_for(match.op), tuple):
            continue
        for name, stage, reason in decision.attempts:
            if stage == "supports" and match.site.operation.has(name):
                WARNED.once(
                    f"{match.op} {name} {reason}", f"autopallas does not use {name} for {match.op}, as listed: {reason}"
                )
