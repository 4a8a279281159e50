"""Computes products of matrices for each position of a window, in a loop where there are many.

XLA's CPU compiler hands a product to a library, and what is read for it is a kernel of its own.  Written one after the
other, the slices of all positions are as many kernels, since each has another place: those of 16 took 0.4 seconds
longer to compile than a loop, whose step reads at a place that is counted, and had 2.6 times the temporary memory (one
gradient of 4 x 4 x 128 x 64 weights; AVX-512, JAX 0.10.2, processor time, two runs beside other work).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from autopallas.compat import Dtype
from autopallas.sites.device import Device

__all__ = ["Place", "read", "stacked", "summed"]

Place: TypeAlias = Sequence[int | jax.Array]
"""An index along each axis of a window; traced in a loop."""

_MANY = 9
"""Positions from which a loop has fewer kernels: it has zeros beside the slice, and writes or adds what it computes."""


def stacked(sizes: Sequence[int], of: Callable[[Place], jax.Array], shape: Sequence[int], dtype: Dtype) -> jax.Array:
    """Returns ``of(place)`` for each position of a window, one after the other along a new first axis.

    Args:
      sizes: of the window.
      of: computes an array for a position, whose indices may be traced.
      shape, dtype: of such an array.
    """
    if not _in_a_loop(sizes):
        return jnp.stack([of(place) for place in itertools.product(*map(range, sizes))])
    count, each = math.prod(sizes), math.prod(shape)

    def write(place: Place, found: jax.Array) -> jax.Array:
        number: int | jax.Array = 0
        for index, size in zip(place, sizes, strict=True):
            number = number * size + index
        return lax.dynamic_update_slice(found, of(place).reshape(each), [number * each], allow_negative_indices=False)

    # Along one axis, which takes XLA less time to compile.
    return _after(sizes, write, jnp.zeros(count * each, dtype)).reshape(count, *shape)


def summed(sizes: Sequence[int], of: Callable[[Place], jax.Array], shape: Sequence[int], dtype: Dtype) -> jax.Array:
    """Returns the sum of ``of(place)`` over the positions of a window; arguments as of :func:`stacked`."""
    if not _in_a_loop(sizes):
        total = None
        for place in itertools.product(*map(range, sizes)):
            term = of(place)
            total = term if total is None else total + term
        assert total is not None
        return total
    return _after(sizes, lambda place, total: total + of(place), jnp.zeros(shape, dtype))


def read(x: jax.Array, starts: Place, counts: Sequence[int], steps: Sequence[int]) -> jax.Array:
    """Returns so many elements along each axis, ``steps`` apart, from ``starts`` on, which are not negative."""
    reach = [(count - 1) * step + 1 for count, step in zip(counts, steps, strict=True)]
    if all(isinstance(start, int) for start in starts):
        first = [int(start) for start in starts]
        return lax.slice(x, first, [a + n for a, n in zip(first, reach, strict=True)], steps)
    at = [jnp.asarray(start, jnp.int32) for start in starts]
    found = lax.dynamic_slice(x, at, reach, allow_negative_indices=False)
    return lax.slice(found, [0] * x.ndim, reach, steps) if max(steps) > 1 else found


def _in_a_loop(sizes: Sequence[int]) -> bool:
    return math.prod(sizes) >= _MANY and Device.current().platform == "cpu"


def _after(sizes: Sequence[int], body: Callable[[Place, jax.Array], jax.Array], carry: jax.Array) -> jax.Array:
    """Returns ``carry`` after ``body(place, .)`` for each position, in a loop for each axis: indices that are counted
    need no division, which is a kernel too."""

    def over(before: Place, carry: jax.Array) -> jax.Array:
        if len(before) == len(sizes):
            return body(before, carry)
        size = sizes[len(before)]
        if size == 1:
            return over([*before, 0], carry)
        done: jax.Array = lax.fori_loop(
            jnp.int32(0), jnp.int32(size), lambda n, carry: over([*before, n], carry), carry
        )
        return done

    return over([], carry)
