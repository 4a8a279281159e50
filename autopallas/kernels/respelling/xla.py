"""What is written instead, as an implementation."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from autopallas.kernels.respelling.kinds import kind_named
from autopallas.kernels.respelling.spec import RespellingSpec
from autopallas.numerics.classes import Numerics
from autopallas.sites.device import Device
from autopallas.sites.operation import Supported, Unsupported
from autopallas.sites.spec import BlockSizes

__all__ = ["TILES", "forward", "gains", "numerics", "supports"]

TILES = False


def supports(spec: RespellingSpec, device: Device) -> Supported | Unsupported:
    """Returns that every respelling is supported, since it is plain JAX, but for kinds that are of use elsewhere."""
    platforms = kind_named(spec.kind).platforms
    if platforms and device.platform not in platforms:
        return Unsupported(f"{spec.kind} is written for {', '.join(platforms)}")
    return Supported()


def gains(spec: RespellingSpec) -> tuple[str, ...]:
    """Returns the objectives for which a first step may wait for a measurement."""
    return ("time", "memory") if kind_named(spec.kind).is_searched_quickly else ()


def numerics(spec: RespellingSpec) -> Numerics:
    """Returns what the kind states."""
    return kind_named(spec.kind).numerics_of(spec)


def forward(spec: RespellingSpec, block_sizes: BlockSizes | None, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Computes the results; there are no block sizes."""
    return kind_named(spec.kind).respelt(spec, *operands)
