"""Tells where less is to be kept for a backward, and what is in the way of it."""

from __future__ import annotations

from typing import Literal, TypeAlias

from autopallas.compat import ClosedJaxpr
from autopallas.environment import REMATERIALISATION
from autopallas.graph import Graph
from autopallas.numerics.classes import allows
from autopallas.options import Options
from autopallas.patterns.selection import looks_for
from autopallas.plan.allowed_places import names_places
from autopallas.sharding.call_shardings import Shardings, on_several_devices
from autopallas.sites.device import Device

__all__ = ["Extent", "obstacle_to", "wanted_extent"]

Extent: TypeAlias = Literal["everywhere", "stacks", ""]
"""Where less is kept: everywhere, in the stacks between scans, or nowhere."""


def wanted_extent(options: Options, graph: Graph) -> Extent:
    """Returns where less is to be kept for a backward: everywhere where less memory is wanted, or where that is named;
    else in the stacks between scans, if there are some."""
    if not looks_for(options.ops, REMATERIALISATION):
        return ""
    if options.objective == "memory" or REMATERIALISATION in (options.ops or ()):
        return "everywhere"
    scans = (sum(e.primitive.name == "scan" for e in body.equations) for body in graph.root.walk())
    return "stacks" if any(count > 1 for count in scans) else ""


def obstacle_to(program: ClosedJaxpr, options: Options, device: Device, shardings: Shardings | None) -> str:
    """Returns why nothing is computed again, though that is asked for; an empty string if nothing is in the way."""
    if device.platform != "cpu":
        return f"it was not measured on {device.platform}"
    if shardings is not None or on_several_devices(program):
        return "arrays are spread over several devices"
    if not allows(options.numerics, "reordered"):
        return "a compiler may round what is computed again otherwise, and results have to be identical"
    if names_places(options):
        return "places are denied, and what is computed again stands at many"
    return "" if options.fuel is None else "the number of sites is limited"
