"""Computes products of decays over the segments of a chunk, by multiplication alone.

Quotients of running products and differences of logarithms lose digits, or are not finite, where a decay is small,
zero or negative.  A product of many numbers near one is carried as its difference from one: rounded factor by factor,
its error would grow with the length of the segment.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

__all__ = ["HalvedProducts", "halved_products", "pairs", "pairs_of", "segment_products", "times"]

Array: TypeAlias = jax.Array
_Level: TypeAlias = tuple[Array, Array]

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


class HalvedProducts(NamedTuple):
    """The products of the decays of a chunk's segments, each split at the middle of a block.

    Step s of a chunk and a later step t are in the first and the second half of one block of 2, 4, 8, ... steps; the
    segment between them is the one from s to the block's middle and the one from there to t.

    Attributes:
      levels: [L, ..., C, N], for each of those sizes: of a step in the first half of its block, the product from after
        it to the middle; of one in the second half, from the middle to before it.
      from_start: [..., C, N], from the beginning of the chunk to before each step.
      to_end: [..., C, N], from after each step to the end of the chunk.
      total: [..., N], of all decays.
    """

    levels: Array
    from_start: Array
    to_end: Array
    total: Array


def halved_products(decay: Array, excess: Array | None = None) -> HalvedProducts:
    """Splits the segments of a chunk at the middles of blocks of 2, 4, 8, ... steps.

    The sizes are the steps of one loop, and every array has the shape of the decays: XLA compiles one size alone.

    Args:
      decay: [..., C, N], the decays of a chunk; C is a power of two.
      excess: the difference of the decays from one, where that is known more exactly than from them. It has no
        derivative: that of the decay stands for both.
    """
    return _halved(decay, decay - 1 if excess is None else excess)


@jax.custom_vjp
def _halved(decay: Array, excess: Array) -> HalvedProducts:
    return _halved_forward(decay, excess)[0]


def _halved_forward(decay: Array, excess: Array) -> tuple[HalvedProducts, tuple[Array, Array]]:
    """Returns the products, and for the backward, of each size of blocks, the products to the middles and the blocks'.

    The loop carries, of each step, the products of its block: before it, after it, and all.
    """
    steps = decay.shape[-2]
    one, zero = jnp.ones_like(decay), jnp.zeros_like(decay)

    def longer(found: tuple[Array, Array], size: tuple[Array, Array]) -> tuple[tuple[Array, Array], _Level]:
        late, other_half = size
        product, excess = found
        factor, further = _of_steps(product[2], other_half), _of_steps(excess[2], other_half)
        concerned = jnp.stack([late, ~late, late | ~late]).reshape(3, *(1 for _ in decay.shape[:-2]), steps, 1)
        longer = times(product, excess, jnp.where(concerned, factor, 1), jnp.where(concerned, further, 0))
        return longer, (jnp.where(late, product[0], product[1]), product[2])

    first = jnp.stack([one, one, decay]), jnp.stack([zero, zero, excess])
    (found, _), levels = lax.scan(longer, first, _halves(steps))
    before, after, total = found
    return HalvedProducts(levels[0], before, after, total[..., 0, :]), levels


def _halved_backward(levels: _Level, cotangents: HalvedProducts) -> tuple[Array, Array]:
    """Returns the cotangent of the decays, and none of what they exceed one by."""

    def shorter(found: tuple[Array, Array, Array], size: tuple[Array, ...]) -> tuple[tuple[Array, Array, Array], None]:
        dbefore, dafter, dtotal = found
        late, other_half, own, total, down = size
        other, dboth = _of_steps(total, other_half), jnp.where(late, dbefore, dafter)
        down += dboth * other
        dother = dboth * own + dtotal * total
        dtotal = dtotal * other + _of_steps(dother, other_half)
        return (jnp.where(late, down, dbefore), jnp.where(late, dafter, down), dtotal), None

    is_first = np.arange(cotangents.to_end.shape[-2])[:, None] == 0
    last = jnp.where(is_first, cotangents.total[..., None, :], 0)
    sizes = (*_halves(last.shape[-2]), *levels, cotangents.levels)
    found, _ = lax.scan(shorter, (cotangents.from_start, cotangents.to_end, last), sizes, reverse=True)
    return found[2], jnp.zeros_like(found[2])


_halved.defvjp(_halved_forward, _halved_backward)


def _halves(count: int) -> tuple[Array, Array]:
    """Returns for each size of blocks which steps are in the second half [L, C, 1], and their places in the other."""
    sizes = np.array([1 << level for level in range((count - 1).bit_length())], np.int32)[:, None]
    steps = np.arange(count, dtype=np.int32)
    return jnp.asarray((steps & sizes > 0)[..., None]), jnp.asarray(steps ^ sizes)


def pairs(count: int) -> Array:
    """Returns [L, C, C]: whether t is in the second half of a block of 2, 4, 8, ... steps, and s in its first half."""
    t, s = np.arange(count)[:, None], np.arange(count)
    sizes = np.array([1 << level for level in range((count - 1).bit_length())], int)[:, None, None]
    return jnp.asarray((t & sizes > 0) & (s & sizes == 0) & (t // (2 * sizes) == s // (2 * sizes)))


def pairs_of(count: int, level: int) -> Array:
    """Returns [C, C], the same for blocks of one size: the highest bit in which t and s differ is that of the level."""
    t, s = (lax.broadcasted_iota(jnp.int32, (count, count), axis) for axis in (0, 1))
    return ((t ^ s) >> level == 1) & (t > s)


def _of_steps(x: Array, places: Array) -> Array:
    return x.at[..., places, :].get(mode="promise_in_bounds", unique_indices=True)
