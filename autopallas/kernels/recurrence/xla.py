"""Computes recurrences in plain JAX, in the form that the block sizes name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax

from autopallas.kernels.recurrence.block_sizes import BlockSizes, Form
from autopallas.kernels.recurrence.forms import in_chunks, without_products
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
        return Unsupported("the loop is its best form: its state is no matrix, and it has no products to take out")
    return Supported()


def forward(site: RecurrenceSite, block_sizes: BlockSizes, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the last carried values and the stacked results."""
    return _run(site, block_sizes.forward, block_sizes.chunk, operands)


def backward(
    site: RecurrenceSite,
    block_sizes: BlockSizes,
    operands: Sequence[jax.Array],
    cotangents: Sequence[jax.Array],
    active: Sequence[int],
) -> tuple[jax.Array, ...]:
    """Returns the cotangents of the operands at the positions ``active``."""

    def varied(*chosen: jax.Array) -> list[jax.Array]:
        filled = list(operands)
        for position, x in zip(active, chosen, strict=True):
            filled[position] = x
        return site.chosen(filled, _run(site, block_sizes.backward, block_sizes.chunk, filled))

    _, pull = jax.vjp(varied, *(operands[position] for position in active))
    return tuple(pull(list(cotangents)))


def _run(site: RecurrenceSite, form: Form, chunk: int, operands: Sequence[jax.Array]) -> list[jax.Array]:
    match form:
        case "scan":
            return site.loop.run(operands)
        case "hoisted":
            return without_products(site.loop, site.known, operands)
        case "chunked":
            dtype = site.spec.accumulation_dtype
            return in_chunks(site.loop, site.known, site.states, dict(site.sizes), dtype, chunk, operands)
