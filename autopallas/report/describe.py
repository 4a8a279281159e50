"""Turns a match and a decision into a record of the report."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from autopallas.compat import ClosedJaxpr
from autopallas.faults import contained
from autopallas.numerics.classes import Numerics
from autopallas.report.records import Site, in_order
from autopallas.sites.device import Device
from autopallas.sites.encoding import encoded
from autopallas.sites.spec import BlockSizes, SiteSpec, Sizes, kind_of

if TYPE_CHECKING:
    from autopallas.patterns.match import Match
    from autopallas.plan.decision import Decision
    from autopallas.tuning.row import Row

__all__ = ["Describer"]


class Describer:
    """Makes the records of sites, as text and numbers.  Equal sites share a record, except for the place."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Site] = {}
        self._originals: dict[Hashable, ClosedJaxpr] = {}

    def accountable(self, matches: Sequence[Match], decisions: Sequence[Decision]) -> list[Decision]:
        """Returns the decisions, but keeps the original of each site that the report cannot describe."""
        result = []
        for match, decision in zip(matches, decisions, strict=True):
            if decision.verdict == "applied":
                with contained(match.location, match.op, "report") as attempt:
                    self._described(match, decision)
                if attempt.error:
                    reason = f"it could not be described: {attempt.error}"
                    decision = replace(decision, verdict="kept", reason=reason)
            result.append(decision)
        return result

    def records(self, matches: Sequence[Match], decisions: Sequence[Decision]) -> tuple[Site, ...]:
        """Returns the records of all sites; for one that cannot be described, only its place and its outcome."""
        return tuple(map(self._record_or_less, matches, decisions))

    def originals(self, matches: Sequence[Match], decisions: Sequence[Decision]) -> tuple[ClosedJaxpr | None, ...]:
        """Returns the equations that were found at each site, equal ones of equal sites; None for a site that cannot be
        described."""
        return tuple(map(self._original, matches, decisions))

    def _original(self, match: Match, decision: Decision) -> ClosedJaxpr | None:
        with contained(match.location, match.op, "report"):
            return self._originals.get(_key(match, decision))
        return None

    def _record_or_less(self, match: Match, decision: Decision) -> Site:
        with contained(match.location, match.op, "report"):
            return self._record(match, decision)
        return _outcome(match, decision)

    def _record(self, match: Match, decision: Decision) -> Site:
        return replace(self._described(match, decision), location=match.location, path=" > ".join(match.body.path))

    def _described(self, match: Match, decision: Decision) -> Site:
        """Returns the record of an equal site, perhaps of one at another place."""
        key = _key(match, decision)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = _describe(match, decision)
            self._originals[key] = match.original
        return found


def _key(match: Match, decision: Decision) -> Hashable:
    """Returns what equal sites have in common."""
    return match.site, match.direction, match.assumptions, decision


def _outcome(match: Match, decision: Decision) -> Site:
    """Returns a site's place and its outcome, which is known of every site."""
    return Site(
        op=match.op,
        location=match.location,
        path=" > ".join(match.body.path),
        direction=match.direction,
        verdict=decision.verdict,
        reason=decision.reason,
        implementation=decision.implementation,
        numerics=_numerics(match, decision),
        block_sizes_from=decision.block_sizes_from,
        attempts=in_order(decision.attempts),
        kind=kind_of(match.spec),
    )


def _numerics(match: Match, decision: Decision) -> Numerics | None:
    name = decision.implementation
    return None if name is None else match.site.operation.numerics(name, match.spec)


def _describe(match: Match, decision: Decision) -> Site:
    spec = match.spec
    sizes = _block_sizes(match, decision)
    running = None if sizes is None else _running_sizes(match, decision, sizes)
    return replace(
        _outcome(match, decision),
        block_sizes=None if sizes is None else sizes.to_dict(),
        running_sizes=running,
        measured=None if decision.evidence is None else _row(decision.evidence),
        assumptions=(*match.assumptions, *spec.assumptions()),
        checks=_checks(spec, decision),
        spec=_spec(spec, running or {}, decision.implementation),
        spec_line=str(spec),
        encoded=encoded(match),
        replacement=_replacement(match, decision) if decision.verdict == "applied" else "",
    )


def _block_sizes(match: Match, decision: Decision) -> BlockSizes | None:
    """Returns the block sizes that were chosen, or None if the implementation reads none."""
    name = decision.implementation
    return decision.block_sizes if name is None or match.site.operation.reads_block_sizes(name) else None


def _running_sizes(match: Match, decision: Decision, sizes: BlockSizes) -> Sizes:
    """Returns the sizes with which a replaced site computes; those that were chosen where its original is kept."""
    name = decision.implementation
    if name is None or decision.verdict != "applied":
        return sizes.to_dict()
    device = Device.current()
    if decision.kind or device.platform != decision.platform:
        device = Device(decision.platform, decision.kind)
    return match.site.operation.running_sizes(name, match.spec, sizes, device)


def _spec(spec: SiteSpec, running: Sizes, implementation: str | None) -> dict[str, object]:
    """Returns the fields of a spec, and the picture of its tiles if the operation has one."""
    fields: dict[str, object] = spec.to_dict()
    if "query_block" in running and hasattr(spec, "tiles"):
        fields["tiles"] = spec.tiles(running["query_block"], running["key_block"], implementation)
    return fields


def _checks(spec: SiteSpec, decision: Decision) -> tuple[str, ...]:
    """Returns what a replacement finds out when it runs, if its operation declares that."""
    said: tuple[str, ...] = spec.checks(decision.implementation) if hasattr(spec, "checks") else ()
    return said if decision.verdict == "applied" else ()


def _row(row: Row[object]) -> dict[str, object]:
    return {
        "kernel_us": row.kernel_us,
        "original_us": row.original_us,
        "kernel_bytes": row.kernel_bytes,
        "original_bytes": row.original_bytes,
        "evidence": row.evidence,
        "date": row.date,
        "versions": row.versions,
    }


def _replacement(match: Match, decision: Decision) -> str:
    """Returns the call that stands in the program instead, and the program that the kernel evaluates on its tiles."""
    operands = ", ".join(a.str_short() for a in match.original.in_avals)
    results = ", ".join(a.str_short() for a in match.original.out_avals)
    assert decision.block_sizes is not None
    running = _running_sizes(match, decision, decision.block_sizes)
    sizes = ", ".join(f"{name}={value}" for name, value in running.items())
    call = f"{match.op}.{decision.implementation}[{sizes}] ({operands}) -> ({results})"
    return f"{call}\n{match.spec.programs()}".rstrip()
