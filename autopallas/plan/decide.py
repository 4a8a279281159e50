"""Whether a recognised site is replaced, by which implementation, with which block sizes, and on what evidence."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from autopallas.errors import UnsupportedError
from autopallas.kernels.implementation import Device, Operation, Unsupported
from autopallas.options import Options

__all__ = ["Decision", "decide"]

_SIMULATED_MARGIN = 1.3
"""A simulated gain counts only above this."""
_MEMORY_SLOWDOWN = 1.3
"""Under objective "memory", the most time that a replacement may cost relative to the original."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of one site on one platform."""

    verdict: Literal["applied", "kept"]
    reason: str
    platform: str
    implementation: str | None = None
    block_sizes: Any = None
    block_sizes_from: Literal["explicit", "cache", "table", "autotune", "nearest", "default"] | None = None
    evidence: Any = None
    """The row of a table or of the cache that the verdict rests on, or None."""
    attempts: tuple[tuple[str, str, str], ...] = ()
    """(implementation, stage, error) of those that were asked before and cannot."""


def decide(operation: Operation, spec: Any, direction: str, device: Device, options: Options) -> Decision:
    """The decision for a site with this spec.

    Raises:
      UnsupportedError: the options name a single implementation, which does not support the spec.
    """
    wanted = options.implementation_for(operation.name)
    attempts: list[tuple[str, str, str]] = []
    for name, answer in operation.candidates(spec, device, wanted):
        if isinstance(answer, Unsupported):
            attempts.append((name, "supports", answer.reason))
            continue
        return _judge(operation, name, spec, direction, device, options, tuple(attempts))
    why = "; ".join(f"{name}: {reason}" for name, _, reason in attempts)
    if isinstance(wanted, str):
        raise UnsupportedError(f"{operation.name} was to run on {wanted} only: {why}. The site: {spec}")
    return Decision("kept", f"no implementation supports it ({why})", device.platform, attempts=tuple(attempts))


def _judge(
    operation: Operation,
    name: str,
    spec: Any,
    direction: str,
    device: Device,
    options: Options,
    attempts: Sequence[tuple[str, str, str]],
) -> Decision:
    """Go or no-go for one supported implementation."""
    tuned = importlib.import_module(f"autopallas.kernels.{operation.name}.tuned_block_sizes")
    found = tuned.find(spec, device, name, direction)
    sizes = tuned.infer_block_sizes(spec, device, name, direction)
    origin: Literal["table", "nearest", "default"] = "default" if found is None else found.source
    row = None if found is None else found.row
    exact = found is not None and found.source == "table"

    def decision(verdict: Literal["applied", "kept"], reason: str) -> Decision:
        return Decision(verdict, reason, device.platform, name, sizes, origin, row, tuple(attempts))

    if options.implementation_for(operation.name) is not None:
        return decision("applied", "the implementation was asked for by name")
    if options.objective == "always":
        return decision("applied", 'objective "always" asks for no evidence')
    if row is None or not exact:
        return decision("kept", "nothing was measured for this device, dtype and size, so the original stays")
    if row.evidence == "estimated":
        return decision("kept", "there is only an estimate for this device, dtype and size, so the original stays")
    time = row.original_us / row.kernel_us
    memory = row.original_bytes / max(row.kernel_bytes, 1)
    figures = f"{row.evidence}: {time:.2f}x the original's speed, {1 / memory:.2f}x its temporary memory"
    if options.objective == "memory":
        gains = memory > 1 and time * _MEMORY_SLOWDOWN >= 1
        return decision("applied" if gains else "kept", figures)
    margin = _SIMULATED_MARGIN if row.evidence == "simulated" else 1.0
    return decision("applied" if time > margin else "kept", figures)
