"""Computes recurrences in plain JAX, in the form that the block sizes name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax

from autopallas.kernels.recurrence import directions
from autopallas.kernels.recurrence.block_sizes import BlockSizes
from autopallas.kernels.recurrence.chunks import by_scans
from autopallas.kernels.recurrence.spec import RecurrenceSpec
from autopallas.numerics.classes import Numerics
from autopallas.sites.device import Device
from autopallas.sites.operation import Supported, Unsupported

if TYPE_CHECKING:
    from autopallas.kernels.recurrence.site import RecurrenceSite

__all__ = ["NUMERICS", "backward", "forward", "supports"]

NUMERICS: Numerics = "tolerance"
"""How its results relate to the original's."""


def supports(spec: RecurrenceSpec, device: Device) -> Supported | Unsupported:
    """Returns whether there is a form that may be better than the loop."""
    if not spec.is_matrix and not spec.products:
        return Unsupported("the loop is its best form: no products compute several steps at once or can be taken out")
    return Supported()


def forward(site: RecurrenceSite, block_sizes: BlockSizes, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the last carried values and the stacked results."""
    return directions.forward(by_scans, site, block_sizes, operands)


def backward(
    site: RecurrenceSite,
    block_sizes: BlockSizes,
    operands: Sequence[jax.Array],
    cotangents: Sequence[jax.Array],
    active: Sequence[int],
) -> tuple[jax.Array, ...]:
    """Returns the cotangents of the operands at the positions ``active``."""
    return directions.backward(by_scans, site, block_sizes, operands, cotangents, active)
