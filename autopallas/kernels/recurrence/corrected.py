"""Computes one chunk of a recurrence whose steps correct the state along one row: the delta rule.

    S[t] = a[t] * S[t-1] + u[t] (x) (w[t] . S[t-1]) + k[t] (x) v[t]

What a step reads, ``x[t] = w[t] . S[t-1]``, is what the chunk began with, and what the steps before it have added:
``x = x0 + L x + M v``, where L holds the scores of w with u and M those of w with k, of earlier steps alone. So x is
the solution of a triangular system. What is left are the chunk's products with u and x beside those with k and v; or,
where u is k, with ``x + v`` in place of v.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from autopallas.kernels.recurrence.chunk_kinds import Decays, Kind, Operands

__all__ = ["Corrected"]

Array: TypeAlias = jax.Array


class Corrected(NamedTuple):
    """A chunk whose decay is of the given kind."""

    kind: Kind

    def prepared(self, decay: Array, excess: Array | None) -> Decays:
        return self.kind.prepared(decay, excess)

    def advance(self, state: Array, decays: Decays, operands: Operands) -> Array:
        kind = self.kind
        found = kind.passed(state, decays)
        for key, value in self._written(state, decays, operands):
            found += kind.added(decays, key, value)
        return found

    def step(self, before: bool, state: Array, own: tuple[Decays, Operands]) -> tuple[Array, Array]:
        decays, operands = own
        kind, query = self.kind, operands.query
        after, y = kind.passed(state, decays), kind.entering(before, decays, query, state)
        for key, value in self._written(state, decays, operands):
            after += kind.added(decays, key, value)
            y += _product(kind.scores(before, decays, query, key), value)
        return after, y

    def step_transposed(
        self, before: bool, dstate: Array, decays: Decays, operands: Operands, state: Array, dy: Array
    ) -> tuple[Array, tuple[Array, Operands]]:
        first, second = decays
        _, pull = jax.vjp(
            lambda state, first, own: self.step(before, state, ((first, second), own)), state, first, operands
        )
        dbefore, dfirst, found = pull((dstate, dy))
        return dbefore, (self.kind.of_decays(decays, dfirst), found)

    def _written(self, state: Array, decays: Decays, operands: Operands) -> list[tuple[Array, Array]]:
        """Returns the keys and values of what the steps add to the state."""
        kind, (key, value, _, probe, write) = self.kind, operands
        assert probe is not None
        read = kind.entering(True, decays, probe, state)
        scores = kind.scores(True, decays, probe, key)
        if write is None:
            return [(key, _solved(scores, read + value))]
        read += _product(scores, value)
        return [(key, value), (write, _solved(kind.scores(True, decays, probe, write), read))]


def _product(scores: Array, value: Array) -> Array:
    return jnp.einsum("ghts,ghsp->ghtp", scores, value, precision=lax.Precision.HIGHEST)


@jax.custom_vjp
def _solved(scores: Array, given: Array) -> Array:
    """Returns x of ``x = scores x + given``, where the scores [G, H, C, C] are of earlier steps alone."""
    return _refined(scores, _inverse(scores), given)


def _solved_forward(scores: Array, given: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    inverse = _inverse(scores)
    found = _refined(scores, inverse, given)
    return found, (scores, inverse, found)


def _solved_backward(saved: tuple[Array, Array, Array], cotangent: Array) -> tuple[Array, Array]:
    scores, inverse, found = saved
    of_given = _refined(jnp.swapaxes(scores, -1, -2), jnp.swapaxes(inverse, -1, -2), cotangent)
    return jnp.tril(_product(of_given, jnp.swapaxes(found, -1, -2)), -1), of_given


_solved.defvjp(_solved_forward, _solved_backward)


def _refined(scores: Array, inverse: Array, given: Array) -> Array:
    """Returns the solution by an inverse, corrected by what it leaves: as exact as by substitution, step by step."""
    found = _product(inverse, given)
    return found + _product(inverse, given - found + _product(scores, found))


def _inverse(scores: Array) -> Array:
    """Returns the inverse of the identity minus the scores [G, H, C, C]; C is a power of two.

    The inverse of two blocks on the diagonal gives that of both together: where ``scores`` leads from the first to the
    second, the inverse is the second's, times these scores, times the first's. A sum of powers of the scores would be
    the same number, but its terms may be far larger than the sum. JAX's ``triangular_solve`` is none of this: on CPUs
    it calls a library with threads of its own, which may wait for those of XLA without end.
    """
    batch, count = scores.shape[:-2], scores.shape[-1]
    found = jnp.ones((*batch, count, 1, 1), scores.dtype)
    size = 1
    while size < count:
        blocks = scores.reshape(*batch, count // (2 * size), 2 * size, count // (2 * size), 2 * size)
        own = jnp.moveaxis(jnp.diagonal(blocks, axis1=-4, axis2=-2), -1, -3)[..., size:, :size]
        first, second = found[..., 0::2, :, :], found[..., 1::2, :, :]
        across = _small_product(second, _small_product(own, first))
        upper = jnp.concatenate([first, jnp.zeros_like(first)], -1)
        found = jnp.concatenate([upper, jnp.concatenate([across, second], -1)], -2)
        size *= 2
    return found[..., 0, :, :]


_FEW = 4
"""Largest number of rows for which a sum of products is faster than a matrix product."""


def _small_product(a: Array, b: Array) -> Array:
    if a.shape[-1] <= _FEW:
        return jnp.sum(a[..., :, :, None] * b[..., None, :, :], -2)
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)
