"""Whether a recognised site is replaced, by which implementation, with which block sizes, and on what evidence."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax

from autopallas.errors import UnsupportedError
from autopallas.kernels.implementation import Device, Operation, Unsupported
from autopallas.kernels.run import kernel_forward
from autopallas.options import Options
from autopallas.patterns.match import Match

__all__ = ["Decision", "plan"]

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


def plan(matches: Sequence[Match], device: Device, options: Options) -> list[Decision]:
    """A decision for each match.  Equal sites share theirs; at most ``options.fuel`` are applied.

    Raises:
      UnsupportedError: the options name a single implementation, which does not support some site.
    """
    known: dict[Any, Decision] = {}
    decisions: list[Decision] = []
    applied = 0
    for match in matches:
        key = (match.op, match.site, match.direction)
        if key not in known:
            known[key] = _decide(match, device, options)
        decision = known[key]
        if decision.verdict == "applied":
            applied += 1
            if options.fuel is not None and applied > options.fuel:
                decision = replace(decision, verdict="kept", reason=f"the fuel of {options.fuel} is used up")
        decisions.append(decision)
    return decisions


def _decide(match: Match, device: Device, options: Options) -> Decision:
    """The first requested implementation that supports the site and can be traced for it, judged."""
    operation: Operation = match.site.operation
    wanted = options.implementation_for(operation.name)
    attempts: list[tuple[str, str, str]] = []
    for name, answer in operation.candidates(match.spec, device, wanted):
        if isinstance(answer, Unsupported):
            attempts.append((name, "supports", answer.reason))
            continue
        decision = _judge(operation, name, match.spec, match.direction, device, options, tuple(attempts))
        if decision.verdict == "kept":
            return decision
        try:
            _check_types(match, decision)
        except Exception as error:
            if options.strict or isinstance(wanted, str):
                raise
            attempts.append((name, "trace", f"{type(error).__name__}: {error}"))
            continue
        return decision
    why = "; ".join(f"{name}: {reason}" for name, _, reason in attempts)
    if isinstance(wanted, str):
        raise UnsupportedError(f"{operation.name} was to run on {wanted} only: {why}. The site: {match.spec}")
    return Decision("kept", f"no implementation can compute it ({why})", device.platform, attempts=tuple(attempts))


def _check_types(match: Match, decision: Decision) -> None:
    """Traces the kernel: it must give what the original gives."""
    kernel = kernel_forward(match.site, decision.implementation or "", decision.block_sizes)
    results, residuals = jax.eval_shape(kernel, *map(_shape, match.original.in_avals))
    for given, wanted in zip(
        (*results, *residuals), (*match.original.out_avals, *match.site.residual_types()), strict=True
    ):
        if (given.shape, given.dtype) != (wanted.shape, wanted.dtype):
            raise TypeError(f"the kernel gives {given.dtype}{given.shape}, the original {wanted.dtype}{wanted.shape}")


def _shape(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


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
