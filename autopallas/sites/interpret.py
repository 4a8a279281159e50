"""Tells where a Pallas kernel may run, and whether it is interpreted."""

from __future__ import annotations

from contextlib import AbstractContextManager

from autopallas import environment
from autopallas.sites.device import Device
from autopallas.sites.operation import Unsupported
from autopallas.trace_context import TraceContext

__all__ = ["interpretation", "mode", "refusal", "settled"]

mode: TraceContext[object] = TraceContext(None)
"""How kernels are interpreted inside ``with mode(...)``: True, or the parameters of a platform's own interpreter.
None leaves it to the environment.  Part of the trace key; for tests."""


def interpretation() -> object:
    """Returns the ``interpret`` argument of a ``pallas_call``: that of :data:`mode`, else ``AUTOPALLAS_INTERPRET``."""
    return bool(environment.read().interpret) if mode.value is None else mode.value


def settled() -> AbstractContextManager[None]:
    """Returns a context that makes the environment's answer a part of the trace key."""
    return mode(interpretation())


def refusal(platform: str, device: Device) -> Unsupported | None:
    """Returns why a kernel for ``platform`` cannot run on ``device``; None where it can, also if interpreted."""
    if device.platform == platform or interpretation():
        return None
    return Unsupported(
        f"it is a {platform.upper()} kernel; on {device.platform} it runs with AUTOPALLAS_INTERPRET=1 only"
    )
