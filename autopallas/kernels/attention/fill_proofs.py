"""Decides, before any score is computed, which rows' hidden keys add nothing (see :mod:`.fills`).

A kernel that lists its tiles before it starts cannot wait for the maxima of its rows.  But no product of a query and a
key is below minus the product of the greatest norms.  If the score program does not decrease with the score, what it
gives for that is a bound of each score, and the greatest bound among a row's keys is one of the row's maximum.  Keys
that positions show, as far as is known while tracing, are tried for that; results do not depend on which these are.

What side inputs hide, beside positions or alone, is found by two such bounds of each score: what the program gives for
minus the product of the greatest norms, and for that product itself.  A tile in which the second is low throughout is
left out if in each of its rows the first is great enough for some key.  Both are reduced to tiles as they are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from autopallas.kernels.attention.dynamic_tiles import by_units
from autopallas.kernels.attention.fills import (
    LOW,
    greatest_product,
    hides_by_sides,
    least_beside,
    skips,
    tile_states,
    usual,
)
from autopallas.kernels.attention.operands import Operands
from autopallas.kernels.attention.spec import AttentionSpec
from autopallas.kernels.attention.tiles import FULL, PARTIAL

__all__ = ["Proof"]

Array: TypeAlias = jax.Array

_LEAST_BLOCK, _MOST_BLOCKS = 64, 256
"""Rows of a block whose keys to try are found together, and the number of blocks along an axis."""


class Proof(NamedTuple):
    """What is known of the scores of an attention before they are computed.

    Attributes:
      spec, sides: the attention, and its side inputs.
      usual: whether hidden keys add nothing to a row whose maximum is great enough, a boolean scalar.
      lowest: a bound below which no product of a query and a key is.
      unseen: where side inputs may hide keys, the tiles of 64 rows and keys that add nothing, [B|1, rows, keys].
    """

    spec: AttentionSpec
    sides: Sequence[Array]
    usual: Array
    lowest: Array
    unseen: Array | None

    @staticmethod
    def of(
        spec: AttentionSpec, operands: Operands, dout: Array | None = None, numbers: Sequence[Array] = ()
    ) -> Proof | None:
        """Returns what is known; None if there are no hidden tiles, or nothing can be shown of them.

        Args:
          spec: the attention.
          operands: its operands.
          dout: in a backward, the result's cotangent.
          numbers: what else weights of 0 are multiplied with.
        """
        by_sides = hides_by_sides(spec)
        if not by_sides and (spec.fill is None or not skips(spec, "pallas_gpu")):
            return None
        finite = jnp.asarray(True)
        for x in numbers:
            finite &= jnp.all(jnp.isfinite(x))
        greatest = greatest_product(spec, operands)
        unseen = None
        if by_sides:
            unseen = _unseen(spec, operands.sides, greatest) & finite & usual(spec, operands, dout, bounds=False)
        return Proof(spec, operands.sides, finite & usual(spec, operands, dout), -greatest, unseen)

    def rows(self, least: float) -> Array:
        """Returns for which rows it is certain that their maximum is at least ``least`` and that hidden keys add
        nothing then, [B|1, T]."""
        spec = self.spec
        keys, block = _tried(spec)
        # Of rows beyond the end of a last block that is shorter, the last one takes the place.
        row = np.minimum(np.arange(len(keys) * block), spec.query_length - 1).astype(np.int32).reshape(-1, block, 1)
        key = keys[:, None, :]

        def part(x: Array) -> Array:
            """Returns the numbers of a side input for these rows and keys, [B|1, K|1, G|1, blocks, rows, keys]."""
            at = (row if x.shape[3] > 1 else np.zeros((1, 1, 1), np.int32)), (key if x.shape[4] > 1 else 0)
            found: Array = x.at[..., at[0], at[1]].get(mode="promise_in_bounds")
            return found

        read = set(spec.score.sides)
        sides = [part(x) if n in read else jnp.zeros((), x.dtype) for n, x in enumerate(self.sides)]
        score = self.lowest.astype(spec.score_dtype)
        bound = spec.score.evaluate(score, jnp.asarray(row), jnp.asarray(key), sides)
        great = jnp.any(
            jnp.broadcast_to(bound >= np.float32(least), (*bound.shape[:-2], block, keys.shape[1])), axis=-1
        )
        great = jnp.all(great.reshape(-1, 1, 1, len(keys), block) if great.ndim < 5 else great, axis=(1, 2))
        great = jnp.broadcast_to(great, (len(great), len(keys), block)).reshape(len(great), -1)
        return great[:, : spec.query_length] & self.usual

    def blocks(self, least: float, size: int) -> Array:
        """Returns the same for blocks of so many rows, [B|1, blocks]."""
        rows = self.rows(least)
        missing = -rows.shape[1] % size
        rows = jnp.pad(rows, [(0, 0), (0, missing)], constant_values=True)
        return jnp.all(rows.reshape(len(rows), -1, size), axis=-1)


def _unseen(spec: AttentionSpec, sides: Sequence[Array], greatest: Array) -> Array:
    """Returns which tiles add nothing, if what their weights are multiplied with is finite, [B|1, rows, keys].

    Args:
      spec: the attention.
      sides: its side inputs.
      greatest: a bound on the size of the products of queries and keys.
    """
    wide = spec.accumulation_dtype

    def decide(t: Array, s: Array, given: Sequence[Array]) -> Array:
        exists = s < spec.key_length

        def bound(product: Array, otherwise: float) -> Array:
            """Returns the greatest of a row's bounds in each tile; a NaN, which shows nothing, is ``otherwise``."""
            found = spec.score.evaluate(product.astype(spec.score_dtype), t, s, given).astype(wide)
            found = jnp.where(exists, jnp.where(jnp.isnan(found), otherwise, found), -jnp.inf)
            shape = ((1,) * (6 - found.ndim) + found.shape)[:3]
            return jnp.max(jnp.broadcast_to(found, (*shape, len(t), *s.shape)), axis=-1)

        high, low = bound(greatest, jnp.inf), bound(-greatest, -jnp.inf)
        hidden = high <= LOW
        of_hidden = jnp.max(jnp.where(hidden, high, -jnp.inf), axis=-1, keepdims=True)
        return hidden & (jnp.max(low, axis=-1, keepdims=True) >= least_beside(of_hidden))

    return by_units(spec, sides, spec.score.sides, decide)


@lru_cache(maxsize=256)
def _tried(spec: AttentionSpec) -> tuple[np.ndarray, int]:
    """Returns keys to try for each block of rows, [blocks, keys], and the number of rows of a block.

    One key of a tile that is shown throughout is enough; without such a tile, it is all keys of those shown in part.
    """
    block = max(_LEAST_BLOCK, -(-max(spec.query_length, spec.key_length) // _MOST_BLOCKS))
    rows, columns = (
        tuple((start, min(start + block, length)) for start in range(0, length, block))
        for length in (spec.query_length, spec.key_length)
    )
    found = []
    for states in tile_states(spec, rows, columns).states:
        full, partial = np.flatnonzero(states == FULL), np.flatnonzero(states == PARTIAL)
        if len(full):
            found.append(np.array([columns[full[0]][0]]))
        else:
            found.append(np.concatenate([[0], *(np.arange(*columns[n]) for n in partial)]).astype(int))
    keys = np.stack([np.pad(k, (0, max(map(len, found)) - len(k)), mode="edge") for k in found])
    return keys.astype(np.int32), block
