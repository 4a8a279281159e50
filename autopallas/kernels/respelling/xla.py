"""What is written instead, as an implementation."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from autopallas.kernels.respelling.kinds import kind_named
from autopallas.kernels.respelling.spec import RespellingSpec
from autopallas.numerics.classes import Numerics
from autopallas.sites.device import Device
from autopallas.sites.operation import Supported
from autopallas.sites.spec import BlockSizes

__all__ = ["TILES", "forward", "numerics", "supports"]

TILES = False


def supports(spec: RespellingSpec, device: Device) -> Supported:
    """Returns that every respelling is supported everywhere: it is plain JAX."""
    return Supported()


def numerics(spec: RespellingSpec) -> Numerics:
    """Returns what the kind states."""
    return kind_named(spec.kind).numerics_of(spec)


def forward(spec: RespellingSpec, block_sizes: BlockSizes | None, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Computes the results; there are no block sizes."""
    return kind_named(spec.kind).respelt(spec, *operands)
