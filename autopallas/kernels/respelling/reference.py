"""The original equations, as an implementation."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from autopallas.kernels.respelling.kinds import kind_named
from autopallas.kernels.respelling.spec import RespellingSpec
from autopallas.numerics.classes import Numerics
from autopallas.sites.device import Device
from autopallas.sites.operation import Supported
from autopallas.sites.spec import BlockSizes

__all__ = ["NUMERICS", "TILES", "forward", "supports"]

NUMERICS: Numerics = "identical"
"""How its results relate to the original's."""

TILES = False


def supports(spec: RespellingSpec, device: Device) -> Supported:
    """Returns that every respelling is supported everywhere: it is plain JAX."""
    return Supported()


def forward(spec: RespellingSpec, block_sizes: BlockSizes | None, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Computes the results; there are no block sizes."""
    return kind_named(spec.kind).original(spec, *operands)
