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
from autopallas.sharding.call_shardings import Shardings, has_explicit_shardings, on_several_devices
from autopallas.sites.device import Device

__all__ = ["Extent", "limit_of", "obstacle_to", "wanted_extent"]

Extent: TypeAlias = Literal["everywhere", "stacks", "fast stacks", ""]
"""Where less is kept: everywhere, in the stacks between scans, in those of them that take longer than what is computed
again for them, or nowhere."""


def wanted_extent(
    program: ClosedJaxpr, options: Options, graph: Graph, device: Device, shardings: Shardings | None
) -> Extent:
    """Returns where less is to be kept for a backward: everywhere where less memory is wanted, or where that is named;
    else in the stacks between scans, if there are some.

    A TPU's compiler computes elementwise values again by itself, but for what scans stack.  Where arrays are spread
    over devices, no number of one of them tells when to compute.  Without being asked to, nothing is computed again but
    on one CPU, where it was measured how long that takes.
    """
    if not looks_for(options.ops, REMATERIALISATION):
        return ""
    if options.objective == "memory" or REMATERIALISATION in (options.ops or ()):
        return "stacks" if device.platform == "tpu" or _is_spread(program, shardings) else "everywhere"
    scans = (sum(e.primitive.name == "scan" for e in body.equations) for body in graph.root.walk())
    if device.platform != "cpu" or not any(count > 1 for count in scans):
        return ""
    return "" if _is_spread(program, shardings) else "fast stacks"


def limit_of(device: Device) -> str:
    """Returns why nothing is computed again but in the stacks between scans."""
    if device.platform == "tpu":
        return "elsewhere the TPU's compiler computes elementwise values again itself"
    return "elsewhere nothing is computed again where arrays are spread over several devices"


def _is_spread(program: ClosedJaxpr, shardings: Shardings | None) -> bool:
    return shardings is not None or on_several_devices(program)


def obstacle_to(program: ClosedJaxpr, options: Options, device: Device) -> str:
    """Returns why nothing is computed again, though that is asked for; an empty string if nothing is in the way."""
    if device.platform not in ("cpu", "gpu", "tpu"):
        return f"nothing is known of {device.platform}"
    if has_explicit_shardings(program):
        return "types tell how arrays are spread over several devices"
    if not allows(options.numerics, "reordered"):
        return "a compiler may round what is computed again otherwise, and results have to be identical"
    if names_places(options):
        return "places are denied, and what is computed again stands at many"
    return "" if options.fuel is None else "the number of sites is limited"
