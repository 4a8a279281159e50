"""Computes products of decays over all segments of a chunk, and their derivative, by multiplication alone.

Quotients of running products and differences of logarithms lose digits, or are not finite, where a decay is small,
zero or negative.  A product of many numbers near one is carried as its difference from one: rounded factor by factor,
its error would grow with the length of the segment.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["segment_products", "segment_products_transposed"]

_NEAR_ONE = 0.5
"""Distance from one within which a product is carried as its difference from one."""


def segment_products(decay: jax.Array) -> jax.Array:
    """Returns the products of the decays of each segment of a chunk.

    Args:
      decay: [C, ...], the decay of each step.

    Returns:
      [C, C + 1, ...]: element (t, s) is ``decay[s] * ... * decay[t]``: the factor from before step s to after step t.
      It is 1 for s = t + 1, an empty segment, and 0 for larger s.
    """
    count, rest = decay.shape[0], decay.shape[1:]
    places = jnp.arange(count + 1).reshape(-1, *(1 for _ in rest))

    def row(
        before: tuple[jax.Array, jax.Array], given: tuple[jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        product, excess = before
        factor, step = given
        begins = places == step + 1
        product, excess = _times(product, excess, factor)
        product = jnp.where(begins, jnp.ones_like(product), product)
        excess = jnp.where(begins, jnp.zeros_like(excess), excess)
        return (product, excess), product

    first = jnp.broadcast_to((places == 0).astype(decay.dtype), (count + 1, *rest))
    _, rows = lax.scan(row, (first, first - 1), (decay, jnp.arange(count)))
    return rows


def _times(product: jax.Array, excess: jax.Array, factor: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Multiplies ``product``, which is ``1 + excess``, by a factor."""
    more = factor - 1
    excess = more + excess + excess * more
    near = jnp.abs(excess) < _NEAR_ONE
    product = jnp.where(near, 1 + excess, product * factor)
    return product, jnp.where(near, excess, product - 1)


def segment_products_transposed(decay: jax.Array, products: jax.Array, cotangent: jax.Array) -> jax.Array:
    """Returns the cotangent [C, ...] of the decays, from that of :func:`segment_products`, without division.

    With ``Q[r, s] = sum over t >= r of cotangent[t, s] * decay[r + 1] * ... * decay[t]``, the cotangent of ``decay[r]``
    is the sum over s <= r of ``Q[r, s] * products[r - 1, s]``.
    """
    places = jnp.arange(products.shape[1]).reshape(-1, *(1 for _ in decay.shape[1:]))
    first = (places == 0).astype(products.dtype)
    earlier = jnp.concatenate([jnp.broadcast_to(first, products[:1].shape[1:])[None], products[:-1]])

    def row(after: jax.Array, given: tuple[jax.Array, jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        factor, before, own, step = given
        summed = own + after
        return jnp.where(places <= step, factor * summed, 0), jnp.sum(jnp.where(places <= step, summed * before, 0), 0)

    steps = jnp.arange(decay.shape[0])
    _, found = lax.scan(row, jnp.zeros_like(products[0]), (decay, earlier, cotangent, steps), reverse=True)
    return found
