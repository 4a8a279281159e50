"""Runs a loop chunk by chunk: a loop over chunks of steps, and a shorter chunk where they do not divide the steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["Arrays", "Chunk", "by_chunks"]

Arrays: TypeAlias = list[jax.Array]
Chunk: TypeAlias = Callable[[Arrays, tuple[Arrays, ...], int], tuple[Arrays, Arrays]]
"""Maps what is carried, the slices of a chunk, and its number of steps to what is carried on, and results."""


def by_chunks(
    chunk: Chunk,
    first: Arrays,
    slices: tuple[Arrays, ...],
    starts: Sequence[jax.Array],
    length: int,
    size: int,
    *,
    reverse: bool,
    backward: bool,
) -> tuple[Arrays, Arrays]:
    """Runs all chunks, from the first one or backward.

    Args:
      chunk: computes one.
      first: what is carried at the beginning.
      slices: arrays of slices; ``chunk`` is given its own.
      starts: arrays of which each chunk is given one element, after its slices.
      length: the number of steps.
      size: the number of steps of a chunk; the last one, in the loop's order, may have fewer.
      reverse: whether the last slices come first in the loop.
      backward: whether the last chunk comes first.

    Returns:
      What is carried at the end, and the results of all chunks along the first axis.
    """
    full, rest = divmod(length, size)
    first_whole, first_of_last = (rest, 0) if reverse else (0, full * size)
    own, of_last = _apart(starts, rest > 0, reverse)

    def shorter(carried: Arrays) -> tuple[Arrays, Arrays]:
        parts = [[x[first_of_last : first_of_last + rest] for x in arrays] for arrays in slices]
        return chunk(carried, (*parts, [x[0] for x in of_last]), rest)

    def of_folded(carried: Arrays, given: tuple[Arrays, ...]) -> tuple[Arrays, Arrays]:
        return chunk(carried, given, size)

    def of_whole(carried: Arrays, given: tuple[jax.Array, Arrays]) -> tuple[Arrays, Arrays]:
        number, start = given
        begin = first_whole + number * size
        parts = [[lax.dynamic_slice_in_dim(x, begin, size) for x in arrays] for arrays in slices]
        return chunk(carried, (*parts, start), size)

    from_last, last = reverse != backward, list[jax.Array]()
    if not rest:
        folded = ([x.reshape(full, size, *x.shape[1:]) for x in arrays] for arrays in slices)
        ends, found = lax.scan(of_folded, first, (*folded, own), full, reverse=from_last)
        return ends, [_merged(x) for x in found]
    if backward:
        first, last = shorter(first)
    ends, found = lax.scan(of_whole, first, (jnp.arange(full), own), full, reverse=from_last)
    if not backward:
        ends, last = shorter(ends)
    pairs = zip(map(_merged, found), last, strict=True)
    return ends, [jnp.concatenate((b, a) if reverse else (a, b)) for a, b in pairs]


def _apart(starts: Sequence[jax.Array], has_shorter: bool, reverse: bool) -> tuple[Arrays, Arrays]:
    """Splits arrays with an element for each chunk into those of whole chunks, and that of a shorter last one."""
    if not has_shorter:
        return list(starts), []
    if reverse:  # its last steps read the first slices
        return [x[1:] for x in starts], [x[:1] for x in starts]
    return [x[:-1] for x in starts], [x[-1:] for x in starts]


def _merged(x: jax.Array) -> jax.Array:
    """Returns an array without the axis of chunks."""
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
