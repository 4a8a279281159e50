"""Computes products of decays over the segments of a chunk, by multiplication alone.

Quotients of running products and differences of logarithms lose digits, or are not finite, where a decay is small,
zero or negative.  A product of many numbers near one is carried as its difference from one: rounded factor by factor,
its error would grow with the length of the segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

__all__ = [
    "HalvedProducts",
    "SegmentCotangents",
    "Segments",
    "constant_pairs_of",
    "halved_products",
    "pairs",
    "pairs_of",
    "products_to_end",
    "segment_products",
    "times",
]

Array: TypeAlias = jax.Array
_Product: TypeAlias = tuple[Array, Array]
"""A product, and what it exceeds one by."""
_Level: TypeAlias = tuple[Array, Array]
"""Of one size of blocks: the products to the middles, and those of the halves."""

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


class Segments(NamedTuple):
    """Products of the decays of blocks of steps, at each step, beside what each product exceeds one by.

    Attributes:
      before: from the beginning of the step's block to before the step.
      after: from after the step to the end of its block.
      total: of all steps of its block.
    """

    before: _Product
    after: _Product
    total: _Product

    @staticmethod
    def of_steps(decay: Array, excess: Array) -> Segments:
        """Returns those of blocks of one step."""
        empty = jnp.ones_like(decay), jnp.zeros_like(decay)
        return Segments(empty, empty, (decay, excess))

    def joined(self, late: Array, other_half: Callable[[Array], Array]) -> tuple[Segments, Array]:
        """Returns the products of blocks twice as long, and those between each step and the middle of its block.

        Args:
          late: whether a step is in the second half of its block.
          other_half: gives each step what its counterpart in the other half of its block has.
        """
        other = _each(other_half, self.total)
        level = jnp.where(late, self.before[0], self.after[0])
        before = times(*self.before, *_only(late, other))
        after = times(*self.after, *_only(~late, other))
        return Segments(before, after, times(*self.total, *other)), level


def _each(function: Callable[[Array], Array], product: _Product) -> _Product:
    return function(product[0]), function(product[1])


def _only(steps: Array, factor: _Product) -> _Product:
    """Returns the factor at some steps, and one at the others."""
    product, excess = factor
    return jnp.where(steps, product, jnp.ones_like(product)), jnp.where(steps, excess, jnp.zeros_like(excess))


class SegmentCotangents(NamedTuple):
    """Cotangents of :class:`Segments`, at each step."""

    before: Array
    after: Array
    total: Array

    def halved(
        self, late: Array, other_half: Callable[[Array], Array], level: Array, total: Array, dlevel: Array
    ) -> SegmentCotangents:
        """Returns the cotangents of the products of blocks half as long.

        Args:
          late, other_half: as :meth:`Segments.joined` has them.
          level: the products between each step and the middle of its block, which that gave.
          total: of all steps of the halves.
          dlevel: the cotangent of ``level``.
        """
        other, dboth = other_half(total), jnp.where(late, self.before, self.after)
        shorter = dlevel + dboth * other
        dother = dboth * level + self.total * total
        dtotal = self.total * other + other_half(dother)
        return SegmentCotangents(jnp.where(late, shorter, self.before), jnp.where(late, self.after, shorter), dtotal)


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


def halved_products(decay: Array, excess: Array | None = None, unrolled: bool = False) -> HalvedProducts:
    """Splits the segments of a chunk at the middles of blocks of 2, 4, 8, ... steps.

    Every array has the shape of the decays.  The sizes are the steps of one loop, so that XLA compiles one size alone;
    or they stand one after the other, which takes fewer passes over small arrays.

    Args:
      decay: [..., C, N], the decays of a chunk; C is a power of two.
      excess: the difference of the decays from one, where that is known more exactly than from them. It has no
        derivative: that of the decay stands for both.
      unrolled: whether the sizes stand one after the other.
    """
    return _halved(unrolled, decay, decay - 1 if excess is None else excess)


def products_to_end(decay: Array, excess: Array | None = None) -> tuple[Array, Array]:
    """Returns ``to_end`` and ``total`` of :func:`halved_products` alone: less for XLA to compile."""

    def longer(found: tuple[_Product, _Product], size: tuple[Array, Array]) -> tuple[tuple[_Product, _Product], None]:
        (after, total), (late, places) = found, size
        other = _each(partial(_of_steps, places=places), total)
        return (times(*after, *_only(~late, other)), times(*total, *other)), None

    first = Segments.of_steps(decay, decay - 1 if excess is None else excess)
    (after, total), _ = lax.scan(longer, (first.after, first.total), _halves(decay.shape[-2]))
    return after[0], total[0][..., 0, :]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _halved(unrolled: bool, decay: Array, excess: Array) -> HalvedProducts:
    return _halved_forward(unrolled, decay, excess)[0]


def _halved_forward(unrolled: bool, decay: Array, excess: Array) -> tuple[HalvedProducts, tuple[Array, Array]]:
    """Returns the products, and for the backward those to the middles and of the halves of blocks of each size."""

    def longer(found: Segments, size: tuple[Array, Array]) -> tuple[Segments, _Level]:
        late, other_half = size
        joined, level = found.joined(late, partial(_of_steps, places=other_half))
        return joined, (level, found.total[0])

    found = Segments.of_steps(decay, excess)
    levels: _Level
    if unrolled:
        parts = []
        for late, other_half in _each_halves(decay.shape[-2]):
            total = found.total[0]
            found, level = found.joined(late, other_half)
            parts.append((level, total))
        of_levels, totals = zip(*parts, strict=True)
        levels = jnp.stack(of_levels), jnp.stack(totals)
    else:
        found, levels = lax.scan(longer, found, _halves(decay.shape[-2]))
    return HalvedProducts(levels[0], found.before[0], found.after[0], found.total[0][..., 0, :]), levels


def _halved_backward(unrolled: bool, levels: _Level, cotangents: HalvedProducts) -> tuple[Array, Array]:
    """Returns the cotangent of the decays, and none of what they exceed one by."""

    def shorter(found: SegmentCotangents, size: tuple[Array, ...]) -> tuple[SegmentCotangents, None]:
        late, other_half, level, total, dlevel = size
        return found.halved(late, partial(_of_steps, places=other_half), level, total, dlevel), None

    is_first = np.arange(cotangents.to_end.shape[-2])[:, None] == 0
    total = jnp.where(is_first, cotangents.total[..., None, :], 0)
    found = SegmentCotangents(cotangents.from_start, cotangents.to_end, total)
    if unrolled:
        each = [*zip(_each_halves(total.shape[-2]), *levels, cotangents.levels, strict=True)]
        for (late, other_half), *own in reversed(each):
            found = found.halved(late, other_half, *own)
    else:
        found, _ = lax.scan(shorter, found, (*_halves(total.shape[-2]), *levels, cotangents.levels), reverse=True)
    return found.total, jnp.zeros_like(found.total)


_halved.defvjp(_halved_forward, _halved_backward)


def _halves(count: int) -> tuple[Array, Array]:
    """Returns for each size of blocks which steps are in the second half [L, C, 1], and their places in the other."""
    sizes = np.array([1 << level for level in range((count - 1).bit_length())], np.int32)[:, None]
    steps = np.arange(count, dtype=np.int32)
    return jnp.asarray((steps & sizes > 0)[..., None]), jnp.asarray(steps ^ sizes)


def _each_halves(count: int) -> Iterator[tuple[Array, Callable[[Array], Array]]]:
    """Yields the same for one size after the other, with a function for the places."""
    steps = np.arange(count)[:, None]
    for size in (1 << level for level in range((count - 1).bit_length())):
        yield jnp.asarray(steps & size > 0), partial(_other_halves, size=size)


def _other_halves(x: Array, size: int) -> Array:
    """Returns for each step of [..., C, N] what its counterpart in the other half of a block of twice the size has."""
    return jnp.flip(x.reshape(*x.shape[:-2], -1, 2, size, x.shape[-1]), -3).reshape(x.shape)


def pairs(count: int) -> Array:
    """Returns [L, C, C]: :func:`pairs_of` blocks of all sizes, as a constant."""
    return jnp.asarray(_known_pairs(count))


def constant_pairs_of(count: int, level: int) -> Array:
    """Returns :func:`pairs_of` as a constant: on CPUs XLA spends up to two thirds of a site's compilation on what
    computes it."""
    return jnp.asarray(_known_pairs(count)[level])


def pairs_of(count: int, level: int) -> Array:
    """Returns [C, C]: whether step t is in the second half of a block of 2, 4, 8, ... steps and s in its first half,
    which is where the highest bit in which they differ is that of the level.

    It is computed, as within kernels of Pallas, which take no constants.
    """
    t, s = (lax.broadcasted_iota(jnp.int32, (count, count), axis) for axis in (0, 1))
    return ((t ^ s) >> level == 1) & (t > s)


def _known_pairs(count: int) -> np.ndarray:
    t, s = np.indices((count, count))
    levels = np.arange((count - 1).bit_length())[:, None, None]
    found: np.ndarray = ((t ^ s) >> levels == 1) & (t > s)
    return found


def _of_steps(x: Array, places: Array) -> Array:
    return x.at[..., places, :].get(mode="promise_in_bounds", unique_indices=True)
