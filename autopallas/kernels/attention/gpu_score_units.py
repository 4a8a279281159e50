"""Chooses units in which gradients of scores fit float16, for the GPU kernels of attention.

A program that has these gradients in float32 multiplies them, on a GPU, with TF32's 10 bits of fraction.  wgmma takes
bfloat16, which has 7, or float16, which has 10 and whose range is small.  So they are computed in a unit, a power of
two, that is found from what bounds them: with p at most 1, p (dp - delta) is at most twice the norm of the row's
cotangent times the greatest norm of a value that the row sees.  What a row sums, for dq, has a unit for each row, and
what a key sums, for dk, one for each key, by the rows that see it.

Letters: B batch, K key heads, G query heads per key head, T query length, S key length.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopallas.kernels.attention.gpu_layout import padded
from autopallas.kernels.attention.schedule import edges
from autopallas.kernels.attention.spec import AttentionSpec
from autopallas.kernels.attention.tiles import FULL, PARTIAL, tile_map
from autopallas.sites.elementwise import Constant, ElementwiseProgram, Score

__all__ = ["Units", "fit", "halves", "norm", "slope", "unit_of"]

Array: TypeAlias = jax.Array
F16, F32 = np.dtype(np.float16), np.dtype(np.float32)

_LARGEST = 15
"""Exponent of the bound in its unit; float16 has numbers up to 2**16."""
_SLACK = 2.05
"""The greatest |dp - delta| by the product of the norms, with what rounding to bfloat16 adds to these."""
_MOST = 120
"""Greatest exponent of a unit, so that it and its inverse are normal numbers of float32."""


def fit(spec: AttentionSpec) -> bool:
    """Returns whether gradients of scores, which the program has in float32, are multiplied in float16.

    Their bound has to be known: that of the score program's derivative, and which values a row sees, which positions
    alone have to decide.
    """
    if spec.query_dtype != jnp.bfloat16 or spec.reads_score_gradients != F32 or spec.score_precision is not None:
        return False
    if spec.sides or spec.sink is not None or spec.weights or spec.inner_weights or spec.statistics is not None:
        return False
    return slope(spec.score) is not None and all(_seen(spec, flipped) is not None for flipped in (False, True))


def slope(program: ElementwiseProgram) -> float | None:
    """Returns a bound of the program's derivative with respect to the score, None if none is known."""
    found: list[float] = [float(isinstance(i, Score)) for i in program.inputs]
    for instruction in program.instructions:
        own, name = [found[n] for n in instruction.arguments], instruction.primitive.name
        if not any(own) or name in _STEPS:
            found.append(0.0)
        elif name in _NO_STEEPER:
            found.append(max(own))
        elif name in ("add", "sub"):
            found.append(sum(own))
        elif name in ("mul", "div"):
            factors = [_constant(program, n) for n in instruction.arguments]
            if name == "mul" and factors[0] is not None:
                own, factors = own[::-1], factors[::-1]
            if not factors[1]:
                return None
            found.append(own[0] * factors[1] if name == "mul" else own[0] / factors[1])
        else:
            return None
    bound = found[program.result]
    return bound if 0 < bound < float("inf") else None


_STEPS = frozenset("eq ge gt le lt ne".split())
_NO_STEEPER = frozenset("abs convert_element_type max min neg select_n tanh".split())


def _constant(program: ElementwiseProgram, number: int) -> float | None:
    """Returns the size of a program's constant, None for other values."""
    if number >= len(program.inputs):
        return None
    given = program.inputs[number]
    return abs(float(given.value)) if isinstance(given, Constant) else None


class Units(NamedTuple):
    """The units of both kernels: of each row [B, K, G, T], and of each key [B, K, S]."""

    rows: Array
    keys: Array

    @staticmethod
    def of(spec: AttentionSpec, norms: Array, value: Array) -> Units:
        """Returns those for norms of the rows' cotangents [B, K, G, T], and for values [B, K, S, Dv]."""
        steepest = slope(spec.score)
        assert steepest is not None
        # Delta has a row's greatest value in it, whatever the value of the key at hand.
        values = _greatest_seen(spec, _finite(norm(value)), flipped=False)
        bounds = _finite(norms) * np.float32(_SLACK * steepest) * values[:, :, None]
        return Units(_power(bounds), _power(_greatest_seen(spec, jnp.max(bounds, axis=2), flipped=True)))


def norm(x: Array) -> Array:
    """Returns a bound of the norm of each vector along the last axis, in float32, that is as finite as its numbers."""
    return jnp.max(jnp.abs(x.astype(F32)), axis=-1) * np.float32(np.sqrt(x.shape[-1]))


def halves(operand: Array) -> tuple[Array, Array]:
    """Returns [B, K, ..., D] in float16, and its units [B, K], which bring each head's greatest number to its range.

    What is 2**-32 of that or more has all bits that bfloat16 has.
    """
    wide, inner = operand.astype(F32), tuple(range(2, operand.ndim))
    # In one step, XLA would write down the sizes in float32 first.
    by_position = lax.optimization_barrier(jnp.max(_finite(jnp.abs(wide)), axis=-1))
    scale = _power(jnp.max(by_position, axis=inner[:-1]))
    return (wide * jnp.expand_dims(scale, inner)).astype(F16), scale


def _finite(x: Array) -> Array:
    """Returns sizes with 0 for those of infinities and NaNs: what meets these is none in any unit."""
    return jnp.where(x < jnp.inf, x, 0.0)


def _power(bound: Array) -> Array:
    """Returns the greatest power of two that keeps what is at most this in float16's range; 1 for a bound of 0."""
    exponent = jnp.clip(jnp.floor(_LARGEST - jnp.log2(bound)), -_MOST, _MOST)
    bits = lax.shift_left(exponent.astype(jnp.int32) + 127, jnp.int32(23))
    return jnp.where(bound > 0, lax.bitcast_convert_type(bits, F32), 1.0)


_LEAST_BLOCK, _MOST_BLOCKS = 16, 512
"""Positions of which what they see is found together, at least; such blocks along an axis, at most."""
_MOST_PARTIAL = 4
"""Blocks of which a position sees a part; each costs a comparison for each pair of positions."""


class _Seen(NamedTuple):
    """What blocks of positions at home see of those of the other axis.

    Attributes:
      block: positions in a block.
      full: whether a block sees all of another, [home blocks, away blocks].
      partial: numbers of the blocks of which it sees a part, [home blocks, n]; the first one where there are fewer.
    """

    block: int
    full: np.ndarray
    partial: np.ndarray

    def blocks_of(self, array: Array) -> Array:
        """Cuts the last axis of an array, of positions of the other axis, into blocks."""
        count = self.full.shape[1]
        return padded(array, self.block * count).reshape(*array.shape[:-1], count, self.block)


def _block_of(spec: AttentionSpec) -> int:
    """Returns a size of blocks with which pairs of blocks, and pairs of positions in partial ones, are few."""
    block, longest = _LEAST_BLOCK, max(spec.query_length, spec.key_length)
    while block**3 < longest or block * _MOST_BLOCKS < longest:
        block *= 2
    return block


@cache
def _seen(spec: AttentionSpec, flipped: bool) -> _Seen | None:
    """Returns what is seen; None where too many blocks are seen in part."""
    block = _block_of(spec)
    states = tile_map(spec, edges(spec.query_length, block), edges(spec.key_length, block))
    partial = (states.T if flipped else states) == PARTIAL
    most = int(np.max(np.sum(partial, axis=1)))
    if most > _MOST_PARTIAL or (most and spec.live is None):
        return None
    order = np.argsort(~partial, axis=1, kind="stable")[:, :most]
    found = _Seen(block, (states.T if flipped else states) == FULL, order)
    # A row without a live key may see those that are hidden from the others.
    if not flipped and most and not _every_row_sees(spec, found):
        return None
    return found


def _every_row_sees(spec: AttentionSpec, seen: _Seen) -> bool:
    """Returns whether each row has a live key."""
    some = np.flatnonzero(~np.any(seen.full, axis=1))
    with jax.ensure_compile_time_eval():
        row, key, live = _lives(spec, some, seen.partial[some], seen.block, flipped=False)
        sees = np.any(np.asarray(live & (key < spec.key_length)), axis=(1, 3))
    return bool(np.all(sees | (row[:, 0, :, 0] >= spec.query_length)))


def _lives(
    spec: AttentionSpec, home: np.ndarray, away: np.ndarray, block: int, flipped: bool
) -> tuple[np.ndarray, np.ndarray, Array]:
    """Returns positions of blocks at home [h] and of others [h, n], and which are live, each [h, n|1, b|1, b|1]."""
    assert spec.live is not None
    here = home.astype(np.int32)[:, None, None, None] * block + np.arange(block, dtype=np.int32)[:, None]
    there = away.astype(np.int32)[:, :, None, None] * block + np.arange(block, dtype=np.int32)
    query, key = (jnp.asarray(x) for x in ((there, here) if flipped else (here, there)))
    return here, there, spec.live.evaluate(None, query, key, ())


def _greatest_seen(spec: AttentionSpec, away: Array, flipped: bool) -> Array:
    """Returns, for each position at home, the greatest of the numbers [B, K, T or S] of those that it sees."""
    seen, length = _seen(spec, flipped), spec.key_length if flipped else spec.query_length
    assert seen is not None
    blocks = seen.blocks_of(away)
    found = jnp.max(jnp.where(seen.full, jnp.max(blocks, axis=-1)[..., None, :], 0), axis=-1)[..., None]
    if seen.partial.size:
        *_, live = _lives(spec, np.arange(len(seen.full)), seen.partial, seen.block, flipped)
        part = jnp.where(live, blocks[..., seen.partial, :][..., None, :], 0)
        found = jnp.maximum(found, jnp.max(part, axis=(-3, -1)))
    found = jnp.broadcast_to(found, (*found.shape[:-1], seen.block))
    return found.reshape(*found.shape[:-2], -1)[..., :length]


def unit_of(dout: Array, value: Array) -> Array:
    """Returns a power of two that brings gradients of scores into the middle of float16's range.

    The gradient of a probability is at most the product of the norms of its row's cotangent and of its key's value.
    """
    norms = (jnp.sqrt(jnp.max(jnp.sum(jnp.square(x.astype(F32)), axis=-1))) for x in (dout, value))
    of_dout, of_value = norms
    exponent = jnp.minimum(_MIDDLE - jnp.log2(of_dout * of_value), _LARGEST_COTANGENT - jnp.log2(of_dout))
    return jnp.where(jnp.isfinite(exponent), jnp.exp2(jnp.floor(exponent)), 1.0)


_MIDDLE, _LARGEST_COTANGENT = 6, 14
"""Greatest exponents of a probability's gradient and of a cotangent; float16 has numbers from 2**-24 to 2**16."""
