"""What one device does of a site that several compute in parts: that is what is measured and probed."""

from __future__ import annotations

from typing import Any

import jax

from autopallas.kernels.placed import PlacedSite
from autopallas.tuning.encoding import SavedSite

__all__ = ["alone"]


def alone(match: Any) -> Any:
    """A match, or of a placed one the part of one device, as much like a match as searches and probes need."""
    if not isinstance(match.site, PlacedSite):
        return match
    first, *then = map(_part, match.passes)
    return SavedSite(
        first.op, first.site, first.direction, first.original, first.backwards, match.location, tuple(then)
    )


def _part(part: Any) -> SavedSite:
    site: Any = part.site.alone
    reference = site.operation.implementation("reference")
    types = part.site.local(part.original.in_avals)
    original = jax.make_jaxpr(lambda *arrays: site.forward(reference, None, arrays)[0])(*types)
    return SavedSite(part.op, site, part.direction, original, part.backwards, part.location)
