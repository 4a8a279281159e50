"""From a match and a decision to a record of the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autopallas.report.records import Site
from autopallas.tuning.encoding import encoded

__all__ = ["describe"]


def describe(matches: Sequence[Any], decisions: Sequence[Any]) -> tuple[Site, ...]:
    """The records of all sites: everything as text and numbers.  Equal sites share theirs but for the place."""
    known: dict[Any, Site] = {}
    records = []
    for match, decision in zip(matches, decisions, strict=True):
        key = (match.site, match.direction, decision)
        if key not in known:
            known[key] = _describe(match, decision)
        records.append(replace(known[key], location=match.location, path=" > ".join(match.body.path)))
    return tuple(records)


def _describe(match: Any, decision: Any) -> Site:
    spec = match.spec
    sizes = decision.block_sizes
    return Site(
        op=match.op,
        location=match.location,
        path=" > ".join(match.body.path),
        direction=match.direction,
        verdict=decision.verdict,
        reason=decision.reason,
        implementation=decision.implementation,
        block_sizes=None if sizes is None else sizes.to_dict(),
        block_sizes_from=decision.block_sizes_from,
        measured=None if decision.evidence is None else _row(decision.evidence),
        attempts=decision.attempts,
        assumptions=spec.assumptions(),
        spec=_spec(spec, sizes),
        spec_line=str(spec),
        encoded=encoded(match),
        original=str(match.original),
        replacement=_replacement(match, decision) if decision.verdict == "applied" else "",
    )


def _spec(spec: Any, sizes: Any) -> dict[str, Any]:
    """The fields of a specification, and the picture of its tiles where the operation has one."""
    fields: dict[str, Any] = spec.to_dict()
    if sizes is not None and hasattr(sizes, "query_block") and hasattr(spec, "tiles"):
        fields["tiles"] = spec.tiles(sizes)
    return fields


def _row(row: Any) -> dict[str, Any]:
    return {
        "kernel_us": row.kernel_us,
        "original_us": row.original_us,
        "kernel_bytes": row.kernel_bytes,
        "original_bytes": row.original_bytes,
        "evidence": row.evidence,
        "date": row.date,
        "versions": row.versions,
    }


def _replacement(match: Any, decision: Any) -> str:
    """The call that stands in the program instead, and the program that the kernel evaluates on its tiles."""
    operands = ", ".join(a.str_short() for a in match.original.in_avals)
    results = ", ".join(a.str_short() for a in match.original.out_avals)
    sizes = ", ".join(f"{name}={value}" for name, value in decision.block_sizes.to_dict().items())
    call = f"{match.op}.{decision.implementation}[{sizes}] ({operands}) -> ({results})"
    return f"{call}\n{match.spec.programs()}".rstrip()
