"""Computes products of decays over the segments of a chunk, by multiplication alone.

Quotients of running products and differences of logarithms lose digits, or are not finite, where a decay is small,
zero or negative.  A product of many numbers near one is carried as its difference from one: rounded factor by factor,
its error would grow with the length of the segment.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["Halves", "halved_products", "segment_products", "times"]

Array: TypeAlias = jax.Array

_NEAR_ONE = 0.5
"""Distance from one within which a product is carried as its difference from one."""


def segment_products(decay: Array, excess: Array | None = None) -> Array:
    """Returns the products of the decays of each segment of a chunk.

    Args:
      decay: [C, ...], the decay of each step.
      excess: its difference from one, where that is known more exactly than from the decay.

    Returns:
      [C, C + 1, ...]: element (t, s) is ``decay[s] * ... * decay[t]``: the factor from before step s to after step t.
      It is 1 for s = t + 1, an empty segment, and 0 for larger s.
    """
    count, rest = decay.shape[0], decay.shape[1:]
    places = jnp.arange(count + 1).reshape(-1, *(1 for _ in rest))

    def row(before: tuple[Array, Array], given: tuple[Array, Array, Array]) -> tuple[tuple[Array, Array], Array]:
        product, excess = before
        factor, further, step = given
        begins = places == step + 1
        product, excess = times(product, excess, factor, further)
        product = jnp.where(begins, jnp.ones_like(product), product)
        excess = jnp.where(begins, jnp.zeros_like(excess), excess)
        return (product, excess), product

    first = jnp.broadcast_to((places == 0).astype(decay.dtype), (count + 1, *rest))
    excess = decay - 1 if excess is None else excess
    _, rows = lax.scan(row, (first, first - 1), (decay, excess, jnp.arange(count)))
    return rows


@jax.custom_jvp
def times(product: Array, excess: Array, factor: Array, further: Array) -> tuple[Array, Array]:
    """Multiplies ``product``, which is ``1 + excess``, by ``factor``, which is ``1 + further``."""
    summed = further + excess + excess * further
    near = jnp.abs(summed) < _NEAR_ONE
    exact = jnp.where(near, 1 + summed, product * factor)
    return exact, jnp.where(near, summed, exact - 1)


@times.defjvp
def _(given: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """The derivative of the product; an excess is only another form of it, and has none."""
    product, _, factor, _ = given
    found = times(*given)
    return found, (product * tangents[2] + factor * tangents[0], jnp.zeros_like(found[1]))


class Halves(NamedTuple):
    """The factors of the segments that begin in the first half of a block and end in its second half.

    Attributes:
      to_middle: [..., B, C, N], from after each step of a first half to the middle of its block.
      from_middle: [..., B, C, N], from the middle to each step of the second half.
    """

    to_middle: Array
    from_middle: Array


def halved_products(decay: Array, before: bool, excess: Array | None = None) -> tuple[list[Halves], Halves, Array]:
    """Splits the segments of a chunk at the middles of blocks of 2, 4, 8, ... steps: each is a product of two parts.

    Args:
      decay: [..., C, N], the decays of a chunk; C is a power of two.
      before: whether segments end before the last step that they are for, and not after it.
      excess: the difference of the decays from one, where that is known more exactly than from them.

    Returns:
      (those of the blocks of 2, 4, ..., C steps; those of a middle at the end and at the beginning of the chunk; the
      product of all decays [..., N]).
    """
    one = jnp.ones_like(decay)[..., None, :]  # blocks of one step
    own = decay[..., None, :]
    total = _Product(own, own - 1 if excess is None else excess[..., None, :])
    reach = _Product(one, one - 1) if before else total
    rest = _Product(one, one - 1)
    levels: list[Halves] = []
    while total.product.shape[-3] > 1:
        (first, second), (near, far), (early, late) = total.halves(), reach.halves(), rest.halves()
        levels.append(Halves(early.product, far.product))
        reach = near.joined(far.times(first))
        rest = early.times(second).joined(late)
        total = first.times(second)
    return levels, Halves(rest.product[..., 0, :, :], reach.product[..., 0, :, :]), total.product[..., 0, 0, :]


class _Product(NamedTuple):
    """Products of the decays of segments in each block, [..., blocks, steps, N], and their differences from one."""

    product: Array
    excess: Array

    def halves(self) -> tuple[_Product, _Product]:
        """Returns the first and the second of each two blocks."""
        parts = (_halves(self.product), _halves(self.excess))
        return _Product(parts[0][0], parts[1][0]), _Product(parts[0][1], parts[1][1])

    def times(self, other: _Product) -> _Product:
        return _Product(*times(*self, *other))

    def joined(self, other: _Product) -> _Product:
        """Returns blocks of twice the length."""
        return _Product(*(jnp.concatenate(pair, -2) for pair in zip(self, other, strict=True)))


def _halves(x: Array) -> tuple[Array, Array]:
    """Returns the first and the second of each two blocks of [..., blocks, steps, N]."""
    pairs = x.reshape(*x.shape[:-3], x.shape[-3] // 2, 2 * x.shape[-2], x.shape[-1])
    first, second = lax.split(pairs, (x.shape[-2], x.shape[-2]), axis=x.ndim - 2)
    return first, second
