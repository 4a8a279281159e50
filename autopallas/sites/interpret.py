"""Where a Pallas kernel may run, and whether it is interpreted."""

from __future__ import annotations

from contextlib import AbstractContextManager

from autopallas import compat, environment
from autopallas.sites.device import Device
from autopallas.sites.operation import Unsupported

__all__ = ["interpretation", "mode", "refusal", "settled"]

mode: compat.TraceContext[object] = compat.trace_context(None)
"""How kernels are interpreted inside ``with mode(...)``: True, or the parameters of a platform's own interpreter.
None leaves it to the environment.  Part of the trace key; for tests."""


def interpretation() -> object:
    """The ``interpret`` argument of a ``pallas_call``: True only if ``AUTOPALLAS_INTERPRET=1`` asks for it."""
    return bool(environment.read().interpret) if mode.value is None else mode.value


def settled() -> AbstractContextManager[None]:
    """A context in which the answer of the environment is part of the trace key."""
    return mode(interpretation())


def refusal(platform: str, device: Device) -> Unsupported | None:
    """Why a kernel for ``platform`` cannot run on ``device``; None where it can, be it interpreted."""
    if device.platform == platform or interpretation():
        return None
    return Unsupported(
        f"it is a {platform.upper()} kernel; on {device.platform} it runs with AUTOPALLAS_INTERPRET=1 only"
    )
