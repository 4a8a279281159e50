"""Computes one chunk of a recurrence whose steps correct the state along one row: the delta rule.

    S[t] = a[t] * S[t-1] + u[t] (x) (w[t] . S[t-1]) + k[t] (x) v[t]

What a step reads, ``x[t] = w[t] . S[t-1]``, is what the chunk began with, and what the steps before it have added:
``x = x0 + L x + M v``, where L holds the scores of w with u and M those of w with k, of earlier steps alone. So x is
the solution of a triangular system. What is left are the chunk's products with u and x beside those with k and v; or,
where u is k, with ``x + v`` in place of v.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from autopallas.kernels.recurrence.chunk_kinds import Chunk, Decays, Kind, Operands, differentiated
from autopallas.kernels.recurrence.products import constant_pairs_of, pairs_of

__all__ = ["Corrected", "corrected_advance", "corrected_step"]

Array: TypeAlias = jax.Array
PairsOf: TypeAlias = Callable[[int, int], Array]
"""Gives the pairs of steps in both halves of a block, as :func:`~.products.pairs_of` does."""


class Corrected(NamedTuple):
    """A chunk whose decay is of the given kind."""

    kind: Kind

    def prepared(self, decay: Array, excess: Array | None) -> Decays:
        return self.kind.prepared(decay, excess)

    def advance(self, state: Array, decays: Decays, operands: Operands) -> Array:
        return corrected_advance(self.kind.chunk(decays), state, operands, constant_pairs_of)

    def step(self, before: bool, state: Array, own: tuple[Decays, Operands]) -> tuple[Array, Array]:
        return corrected_step(self.kind.chunk(own[0]), before, state, own[1], constant_pairs_of)

    def step_transposed(
        self, before: bool, dstate: Array, decays: Decays, operands: Operands, state: Array, dy: Array
    ) -> tuple[Array, tuple[Array, Operands]]:
        dbefore, (dfirst, found) = differentiated(self, before, dstate, decays, operands, state, dy)
        return dbefore, (self.kind.of_decays(decays, dfirst), found)


def corrected_advance(chunk: Chunk, state: Array, operands: Operands, pairs: PairsOf = pairs_of) -> Array:
    """Returns the state after a chunk."""
    found = chunk.passed(state)
    for key, value in _written(chunk, state, operands, pairs):
        found += chunk.added(key, value)
    return found


def corrected_step(
    chunk: Chunk, before: bool, state: Array, operands: Operands, pairs: PairsOf = pairs_of
) -> tuple[Array, Array]:
    """Returns (the state after a chunk, y [G, H, C, P])."""
    query = operands.query
    after, y = chunk.passed(state), chunk.entering(before, query, state)
    for key, value in _written(chunk, state, operands, pairs):
        after += chunk.added(key, value)
        y += _product(chunk.scores(before, query, key), value)
    return after, y


def _written(chunk: Chunk, state: Array, operands: Operands, pairs: PairsOf) -> list[tuple[Array, Array]]:
    """Returns the keys and values of what the steps of a chunk add to the state."""
    key, value, _, probe, write = operands
    assert probe is not None
    read = chunk.entering(True, probe, state)
    scores = chunk.scores(True, probe, key)
    if write is None:
        return [(key, _solved(pairs, scores, read + value))]
    read += _product(scores, value)
    return [(key, value), (write, _solved(pairs, chunk.scores(True, probe, write), read))]


def _product(scores: Array, value: Array) -> Array:
    return jnp.einsum("...ts,...sp->...tp", scores, value, precision=lax.Precision.HIGHEST)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _solved(pairs: PairsOf, scores: Array, given: Array) -> Array:
    """Returns x of ``x = scores x + given``, where the scores [G, H, C, C] are of earlier steps alone."""
    return _refined(scores, _inverse(pairs, scores), given)


def _solved_forward(pairs: PairsOf, scores: Array, given: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    inverse = _inverse(pairs, scores)
    found = _refined(scores, inverse, given)
    return found, (scores, inverse, found)


def _solved_backward(pairs: PairsOf, saved: tuple[Array, Array, Array], cotangent: Array) -> tuple[Array, Array]:
    scores, inverse, found = saved
    of_given = _refined(jnp.swapaxes(scores, -1, -2), jnp.swapaxes(inverse, -1, -2), cotangent)
    return jnp.tril(_product(of_given, jnp.swapaxes(found, -1, -2)), -1), of_given


_solved.defvjp(_solved_forward, _solved_backward)


def _refined(scores: Array, inverse: Array, given: Array) -> Array:
    """Returns the solution by an inverse, corrected by what it leaves: as exact as by substitution, step by step."""
    found = _product(inverse, given)
    return found + _product(inverse, given - found + _product(scores, found))


def _inverse(pairs: PairsOf, scores: Array) -> Array:
    """Returns the inverse of the identity minus the scores [G, H, C, C]; C is a power of two.

    The inverse of two blocks on the diagonal gives that of both together: where ``scores`` leads from the first to the
    second, the inverse is the second's, times these scores, times the first's. A sum of powers of the scores would be
    the same number, but its terms may be far larger than the sum. JAX's ``triangular_solve`` is none of this: on CPUs
    it calls a library with threads of its own, which may wait for those of XLA without end.
    """
    found = jnp.broadcast_to(jnp.eye(scores.shape[-1], dtype=scores.dtype), scores.shape)
    count = scores.shape[-1]
    for level in range((count - 1).bit_length()):
        between = jnp.where(pairs(count, level), scores, jnp.zeros_like(scores))
        found += between if level == 0 else _product(found, _product(between, found))
    return found
