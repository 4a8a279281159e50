"""Computes one chunk of one head inside a TPU kernel: :mod:`.chunk_kinds` with the products of decays that it reads.

Letters: C steps of a chunk, K heads of a block, N rows and P columns of a state. A chunk of one head is [C, ...], which
:func:`~.chunk_kinds.stepped` takes too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from autopallas.kernels.recurrence.products import SegmentCotangents, Segments
from autopallas.kernels.tpu import dot

__all__ = ["ChannelChunk", "HeadChunk", "channel_chunk", "head_chunks", "product"]

Array: TypeAlias = jax.Array


def product(a: Array, b: Array, axes: tuple[int, int]) -> Array:
    """Returns the sum over one axis of each of two matrices of float32, in all of its digits."""
    return dot(a, b, axes, "HIGHEST")


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

    def of_decays(self, cotangent: HeadChunk) -> Array:
        """Returns the cotangent [1, C] of the decays from that of their products.

        A segment that holds step r is the one up to r, times the decay of r, times the one after r.
        """
        dbetween, ddecay, dfrom_start, dto_end, dtotal = cotangent
        t, s = _places(self.between.shape[0])

        def row(column: Array) -> Array:
            return jnp.sum(jnp.where(t == s, column, 0.0), 0, keepdims=True)

        through = product(dbetween, self.between, (1, 1)) + dfrom_start * row(self.from_start)
        later = jnp.sum(self.between * through, 0, keepdims=True)
        ends = jnp.sum(self.between * row(dto_end), 1, keepdims=True) + dtotal * self.from_start
        return later + row(ddecay + self.to_end * ends)


def head_chunks(decay: Array, excess: Array | None) -> Iterator[HeadChunk]:
    """Yields the products of decays of each of K heads, so that those of one are held at a time.

    Args:
      decay: [K, C], of a chunk; C is a power of two.
      excess: what it exceeds one by, where that is known more exactly.
    """
    heads = decay.shape[0]
    segments, levels, _ = _halved(decay, excess, 1)
    rows = [*levels, decay, segments.before[0], segments.after[0], segments.total[0]]
    columns = jnp.swapaxes(jnp.concatenate(rows, 0), 0, 1)
    for head in range(heads):
        own = [columns[:, i * heads + head : i * heads + head + 1] for i in range(len(rows))]
        first = [level[head : head + 1] for level in levels]
        between = _joined(first, own[: len(first)], decay.shape[1])
        of_step, from_start, to_end, total = own[len(first) :]
        yield HeadChunk(between, of_step, from_start, to_end, total[:1])


def _joined(first: Sequence[Array], second: Sequence[Array], count: int) -> Array:
    """Returns the products from after each step to before each later one, of those to and from the middles of blocks
    of 2, 4, 8, ... steps: rows [1, C] and columns [C, 1]."""
    t, s = _places(count)
    found = jnp.zeros(t.shape, jnp.float32)
    for size, to_middle, from_middle in zip(_sizes(count), first, second, strict=True):
        found = jnp.where((t ^ s) >= size, from_middle * to_middle, found)
    return jnp.where(t > s, found, 0.0)


class ChannelChunk(NamedTuple):
    """The products of the decays of one head's chunk where each row of the state has its own.

    Attributes:
      decay: [C, N], of each step.
      from_start: [C, N], from the beginning of the chunk to before each step.
      to_end: [C, N], from after each step to the end of the chunk.
      total: [1, N], of all steps.
      levels: [C, N] for blocks of 2, 4, 8, ... steps: from after each step of the first half to the middle, and from
        there to before each of the second half.
      totals: [C, N] for the same: of all steps of half a block, at each of its steps.
    """

    decay: Array
    from_start: Array
    to_end: Array
    total: Array
    levels: tuple[Array, ...]
    totals: tuple[Array, ...]

    def scores(self, before: bool, query: Array, key: Array) -> Array:
        """Returns how much of each step's value each query reads, [C, C]."""
        t, s = _places(query.shape[0])
        read = self._decayed(before, query)
        found = jnp.zeros(t.shape, jnp.float32)
        for size, level in zip(_sizes(query.shape[0]), self.levels, strict=True):
            found = jnp.where((t ^ s) >= size, product(read * level, key * level, (1, 1)), found)
        found = jnp.where(t > s, found, 0.0)
        return found if before else jnp.where(t == s, jnp.sum(query * key, 1, keepdims=True), found)

    def entering(self, before: bool, query: Array, state: Array) -> Array:
        """Returns what queries read of the state before the chunk, [C, P]."""
        return product(self._decayed(before, query) * self.from_start, state, (1, 0))

    def passed(self, state: Array) -> Array:
        """Returns what is left of the state before the chunk at its end."""
        row, column = _places(state.shape[0])
        return jnp.sum(jnp.where(row == column, self.total, 0.0), 1, keepdims=True) * state

    def added(self, key: Array, value: Array) -> Array:
        """Returns what is added to the state by the end of the chunk."""
        return product(key * self.to_end, value, (0, 0))

    def _decayed(self, before: bool, query: Array) -> Array:
        """Returns queries of the states before their steps: a state after a step has decayed once more."""
        return query if before else query * self.decay

    def of_decays(self, cotangent: ChannelChunk) -> Array:
        """Returns the cotangent [C, N] of the decays from that of their products, from the longest blocks down."""
        step = lax.broadcasted_iota(jnp.int32, self.decay.shape, 0)
        of_chunk = jnp.where(step == 0, cotangent.total, 0.0)
        found = SegmentCotangents(cotangent.from_start, cotangent.to_end, of_chunk)
        sizes = list(zip(_sizes(len(step)), self.levels, self.totals, cotangent.levels, strict=True))
        for size, level, total, dlevel in reversed(sizes):
            late = (step & size) > 0
            found = found.halved(late, partial(_exchanged, size=size, late=late, axis=0), level, total, dlevel)
        return cotangent.decay + found.total


def channel_chunk(decay: Array, excess: Array | None) -> ChannelChunk:
    """Returns the products of the decays [C, N] of one head's chunk."""
    segments, levels, totals = _halved(decay, excess, 0)
    return ChannelChunk(decay, segments.before[0], segments.after[0], segments.total[0][:1], levels, totals)


def _halved(decay: Array, excess: Array | None, axis: int) -> tuple[Segments, tuple[Array, ...], tuple[Array, ...]]:
    """Returns the products of decays whose steps are along an axis: those of the whole chunk; and for blocks of 2, 4,
    8, ... steps, those between each step and the middle of its block, and of all steps of half a block."""
    step = lax.broadcasted_iota(jnp.int32, decay.shape, axis)
    found = Segments.of_steps(decay, decay - 1 if excess is None else excess)
    levels, totals = [], []
    for size in _sizes(decay.shape[axis]):
        late = (step & size) > 0
        totals.append(found.total[0])
        found, level = found.joined(late, partial(_exchanged, size=size, late=late, axis=axis))
        levels.append(level)
    return found, tuple(levels), tuple(totals)


def _exchanged(x: Array, size: int, late: Array, axis: int) -> Array:
    """Returns what each step's counterpart in the other half of its block has; ``late`` marks the second halves."""
    return jnp.where(late, jnp.roll(x, size, axis), jnp.roll(x, -size, axis))


def _places(count: int) -> tuple[Array, Array]:
    """Returns the row and the column of each element of a matrix [C, C]."""
    shape = count, count
    return lax.broadcasted_iota(jnp.int32, shape, 0), lax.broadcasted_iota(jnp.int32, shape, 1)


def _sizes(count: int) -> list[int]:
    return [1 << level for level in range((count - 1).bit_length())]
