"""Computes one chunk of one head inside a TPU kernel: :mod:`.chunk_kinds` with the products of decays that it reads.

Letters: C steps of a chunk, K heads of a block, N rows and P columns of a state. A chunk of one head is [C, ...], which
:func:`~.chunk_kinds.stepped` takes too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from autopallas.kernels.recurrence.products import times

__all__ = ["HeadChunk", "cotangent_of_decays", "head_chunks", "product"]

Array: TypeAlias = jax.Array


def product(a: Array, b: Array, axes: tuple[int, int]) -> Array:
    """Returns the sum over one axis of each of two matrices of float32, in all of its digits."""
    found: Array = lax.dot_general(
        a,
        b,
        (((axes[0],), (axes[1],)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return found


class HeadChunk(NamedTuple):
    """The products of the decays of one head's chunk.

    Attributes:
      between: [C, C], at (t, s) for s < t: from after step s to before step t; else 0.
      decay: [C, 1], of each step.
      from_start: [C, 1], from the beginning of the chunk to before each step.
      to_end: [C, 1], from after each step to the end of the chunk.
      total: [1, 1], of all steps.
    """

    between: Array
    decay: Array
    from_start: Array
    to_end: Array
    total: Array

    def scores(self, before: bool, query: Array, key: Array) -> Array:
        """Returns how much of each step's value each query reads, [C, C]."""
        return product(query, key, (1, 1)) * self.weights(before)

    def weights(self, before: bool) -> Array:
        """Returns the factors from each step to the state that y reads, [C, C]."""
        if before:
            return self.between
        t, s = _places(self.between.shape[0])
        return jnp.where(t == s, 1.0, self.decay * self.between)

    def entering(self, before: bool, query: Array, state: Array) -> Array:
        """Returns what queries read of the state before the chunk, [C, P]."""
        factor = self.from_start if before else self.decay * self.from_start
        return factor * product(query, state, (1, 0))

    def passed(self, state: Array) -> Array:
        """Returns what is left of the state before the chunk at its end."""
        return self.total * state

    def added(self, key: Array, value: Array) -> Array:
        """Returns what is added to the state by the end of the chunk."""
        return product(key, self.to_end * value, (0, 0))


def head_chunks(decay: Array, excess: Array | None) -> Iterator[HeadChunk]:
    """Yields the products of decays of each of K heads, so that those of one are held at a time.

    Steps in the first and in the second half of one block of 2, 4, 8, ... steps are joined by the product to its middle
    and the one from there: see :func:`~.products.halved_products`, which is the same for rows of a state.

    Args:
      decay: [K, C], of a chunk; C is a power of two.
      excess: what it exceeds one by, where that is known more exactly.
    """
    heads, steps = decay.shape
    step = lax.broadcasted_iota(jnp.int32, decay.shape, 1)
    one, zero = jnp.ones_like(decay), jnp.zeros_like(decay)
    before = after = one, zero  # of the block so far: from its beginning to each step, and from that to its end
    total = decay, decay - 1 if excess is None else excess
    levels = []
    for size in _sizes(steps):
        late = (step & size) > 0
        levels.append(jnp.where(late, before[0], after[0]))
        factor, further = (jnp.where(late, jnp.roll(x, size, 1), jnp.roll(x, -size, 1)) for x in total)
        before = times(*before, jnp.where(late, factor, one), jnp.where(late, further, zero))
        after = times(*after, jnp.where(late, one, factor), jnp.where(late, zero, further))
        total = times(*total, factor, further)
    rows = [*levels, decay, before[0], after[0], total[0]]
    columns = jnp.swapaxes(jnp.concatenate(rows, 0), 0, 1)
    for head in range(heads):
        own = [columns[:, i * heads + head : i * heads + head + 1] for i in range(len(rows))]
        between = _joined([level[head : head + 1] for level in levels], own[: len(levels)])
        yield HeadChunk(between, *own[len(levels) : -1], own[-1][:1])


def _joined(first: Sequence[Array], second: Sequence[Array]) -> Array:
    """Returns the products from after each step to before each later one, of those to and from the middles of blocks
    of 2, 4, 8, ... steps: rows [1, C] and columns [C, 1]."""
    t, s = _places(first[0].shape[1] if first else 1)
    found = jnp.zeros(t.shape, jnp.float32)
    for size, to_middle, from_middle in zip(_sizes(t.shape[0]), first, second, strict=True):
        found = jnp.where((t ^ s) >= size, from_middle * to_middle, found)
    return jnp.where(t > s, found, 0.0)


def cotangent_of_decays(own: HeadChunk, cotangent: HeadChunk) -> Array:
    """Returns the cotangent [1, C] of the decays from that of their products.

    A segment that holds step r is the one up to r, times the decay of r, times the one after r.
    """
    between, _, from_start, to_end, _ = own
    dbetween, ddecay, dfrom_start, dto_end, dtotal = cotangent
    t, s = _places(between.shape[0])
    is_same = t == s

    def row(column: Array) -> Array:
        return jnp.sum(jnp.where(is_same, column, 0.0), 0, keepdims=True)

    through = product(dbetween, between, (1, 1)) + dfrom_start * row(from_start)
    later = jnp.sum(between * through, 0, keepdims=True)
    ends = jnp.sum(between * row(dto_end), 1, keepdims=True) + dtotal * from_start
    return later + row(ddecay + to_end * ends)


def _places(count: int) -> tuple[Array, Array]:
    """Returns the row and the column of each element of a matrix [C, C]."""
    shape = count, count
    return lax.broadcasted_iota(jnp.int32, shape, 0), lax.broadcasted_iota(jnp.int32, shape, 1)


def _sizes(count: int) -> list[int]:
    return [1 << level for level in range((count - 1).bit_length())]
