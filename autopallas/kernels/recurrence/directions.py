"""Computes a site forward and backward, in the forms that the block sizes name: what all implementations share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax

from autopallas.kernels.recurrence.block_sizes import BlockSizes, Form
from autopallas.kernels.recurrence.chunks import OfChunks
from autopallas.kernels.recurrence.forms import in_chunks, without_products

if TYPE_CHECKING:
    from autopallas.kernels.recurrence.site import RecurrenceSite

__all__ = ["backward", "forward"]


def forward(
    of_chunks: OfChunks, site: RecurrenceSite, block_sizes: BlockSizes, operands: Sequence[jax.Array]
) -> list[jax.Array]:
    """Returns the last carried values and the stacked results."""
    return _run(of_chunks, site, block_sizes.forward, block_sizes.chunk, operands)


def backward(
    of_chunks: OfChunks,
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
        return site.chosen(filled, _run(of_chunks, site, block_sizes.backward, block_sizes.chunk, filled))

    _, pull = jax.vjp(varied, *(operands[position] for position in active))
    return tuple(pull(list(cotangents)))


def _run(
    of_chunks: OfChunks, site: RecurrenceSite, form: Form, chunk: int, operands: Sequence[jax.Array]
) -> list[jax.Array]:
    match form:
        case "scan":
            return site.loop.run(operands)
        case "hoisted":
            return without_products(site.loop, site.known, operands)
        case "chunked":
            dtype = site.spec.accumulation_dtype
            return in_chunks(site.loop, site.known, site.states, dict(site.sizes), dtype, chunk, of_chunks, operands)
