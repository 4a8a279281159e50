"""Computes a recurrence as the program does: the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax

from autopallas.kernels.recurrence.block_sizes import BlockSizes
from autopallas.kernels.recurrence.spec import RecurrenceSpec
from autopallas.kernels.recurrence.xla import backward as _backward
from autopallas.numerics.classes import Numerics
from autopallas.sites.device import Device
from autopallas.sites.operation import Supported, Unsupported

if TYPE_CHECKING:
    from autopallas.kernels.recurrence.site import RecurrenceSite

__all__ = ["NUMERICS", "backward", "forward", "supports"]

NUMERICS: Numerics = "tolerance"
"""How its results relate to the original's."""


def supports(spec: RecurrenceSpec, device: Device) -> Supported | Unsupported:
    """Returns that it can compute any."""
    return Supported()


def forward(site: RecurrenceSite, block_sizes: BlockSizes | None, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the last carried values and the stacked results."""
    return site.loop.run(operands)


def backward(
    site: RecurrenceSite,
    block_sizes: BlockSizes | None,
    operands: Sequence[jax.Array],
    cotangents: Sequence[jax.Array],
    active: Sequence[int],
) -> tuple[jax.Array, ...]:
    """Returns the cotangents of the operands at the positions ``active``."""
    return _backward(site, BlockSizes("scan", "scan", 1), operands, cotangents, active)
