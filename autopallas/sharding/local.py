"""Extracts one device's part of a sharded site, which is what is measured and probed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autopallas import compat
from autopallas.sites.encoding import SavedSite
from autopallas.sites.sharded_site import ShardedSite
from autopallas.sites.workload import SiteWorkload, to_measure

__all__ = ["local_match"]


def local_match(match: SiteWorkload) -> SiteWorkload:
    """Returns a match as it is, or one device's part of a sharded match, in the form that searches and probes need."""
    if not isinstance(match.site, ShardedSite):
        return to_measure(match)
    first, *then = map(_part, match.passes)
    return SavedSite(
        first.op, first.site, first.direction, first.original, first.backwards, match.location, tuple(then)
    )


def _part(part: SiteWorkload) -> SavedSite:
    sharded = part.site
    assert isinstance(sharded, ShardedSite)
    site = sharded.standalone
    reference = site.operation.implementation("reference")
    types = sharded.local(part.original.in_avals)
    original = compat.make_jaxpr(lambda *arrays: site.forward(reference, None, arrays)[0], *types)
    backwards: list[Any] = list(part.backwards)
    if sharded.prelude is not None:
        given = sharded.given_types(part.original.in_avals)
        moved = [sharded.moved([i for i, _ in backward.gradients], given) for backward in backwards]
        pairs = zip(backwards, moved, strict=True)
        backwards = [replace(backward, gradients=tuple((i, -1) for i in own)) for backward, own in pairs]
    return SavedSite(part.op, site, part.direction, original, tuple(backwards), part.location)
