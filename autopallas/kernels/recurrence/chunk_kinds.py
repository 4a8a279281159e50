"""Computes one chunk of a recurrence, by the kind of its decay.

Letters: T steps, C steps of a chunk, G groups, H heads of a group, J heads that keys and queries have (H, or 1 where
heads share them), N rows of a state (summed over in y), P columns.  Arrays of one chunk are [G, H|J, C, ...], states
[G, H, N, P].  Where heads share no keys, the axes G and H may be one axis of both: XLA's time to compile a kernel on
CPUs grows with the axes, and equal slices of equal shapes are one kernel.
"""

from __future__ import annotations

import functools
from typing import NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopallas.kernels.recurrence.products import (
    HalvedProducts,
    halved_products,
    pairs,
    products_to_end,
    segment_products,
)

__all__ = ["Channels", "Chunk", "Decays", "Form", "Heads", "Kind", "Operands", "differentiated"]

Array: TypeAlias = jax.Array
_einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)

Decays: TypeAlias = tuple[Array, Array | None]
"""What the products of a chunk's decays are computed from: the decays and what they exceed one by, or the products."""


class Operands(NamedTuple):
    """What a chunk is computed from beside its decays; the cotangents of it.

    Attributes:
      key, query: [G, J, C, N].
      value: [G, H, C, P].
      probe, write: [G, H, C, N], of the delta rule alone.
    """

    key: Array
    value: Array
    query: Array
    probe: Array | None = None
    write: Array | None = None


class Form(Protocol):
    """How a chunk is computed."""

    def prepared(self, decay: Array, excess: Array | None) -> Decays:
        """Returns the decays of all chunks, in the form that the chunks need."""

    def advance(self, state: Array, decays: Decays, operands: Operands) -> Array:
        """Returns the state after the chunk."""

    def step(self, before: bool, state: Array, own: tuple[Decays, Operands]) -> tuple[Array, Array]:
        """Returns (the state after the chunk, y [G, H, C, P])."""

    def step_transposed(
        self, before: bool, dstate: Array, decays: Decays, operands: Operands, state: Array, dy: Array
    ) -> tuple[Array, tuple[Array, Operands]]:
        """Returns (the cotangent of the state before the chunk, those of the decays and of the operands)."""


class Chunk(Protocol):
    """One chunk, and the parts that it is computed of."""

    def scores(self, before: bool, query: Array, key: Array) -> Array:
        """Returns how much of each step's value each query reads, [G, H, C, C]."""

    def entering(self, before: bool, query: Array, state: Array) -> Array:
        """Returns what queries read of the state before the chunk, [G, H, C, P]."""

    def passed(self, state: Array) -> Array:
        """Returns what is left of the state before the chunk at its end."""

    def added(self, key: Array, value: Array) -> Array:
        """Returns what is added to the state by the end of the chunk."""


class Kind(Form, Protocol):
    """How a chunk is computed where its decay is of some kind."""

    def chunk(self, decays: Decays) -> Chunk:
        """Returns the chunk with some decays."""

    def of_decays(self, decays: Decays, cotangent: Array) -> Array:
        """Returns the cotangent of the decays [G, H, C, ...] from that of the first of ``decays``."""


class _HeadsChunk(NamedTuple):
    """A chunk with the segment products [G, H, C, C + 1]."""

    products: Array

    def scores(self, before: bool, query: Array, key: Array) -> Array:
        return _einsum("...tn,...sn->...ts", query, key) * self.seen(before)[..., 1:]

    def entering(self, before: bool, query: Array, state: Array) -> Array:
        return self.seen(before)[..., :1] * _of_rows(query, state)

    def passed(self, state: Array) -> Array:
        return self.products[..., -1, :1, None] * state

    def added(self, key: Array, value: Array) -> Array:
        weighted = value * self.products[..., -1, 1:, None]
        return _einsum("gjsn,ghsp->ghnp" if _is_shared(key, value) else "...sn,...sp->...np", key, weighted)

    def seen(self, before: bool) -> Array:
        """Returns the factors from each step, and from before the chunk, to the state that y reads."""
        if not before:
            return self.products
        first = jnp.zeros_like(self.products[..., :1, :]).at[..., 0].set(1)
        return jnp.concatenate([first, self.products[..., :-1, :]], -2)


def _is_shared(key: Array, value: Array) -> bool:
    """Returns whether all heads share a key, or a query; the values may be states."""
    return key.ndim == 4 and key.shape[1] < value.shape[1]


def _of_rows(query: Array, state: Array) -> Array:
    return _einsum("gjtn,ghnp->ghtp" if _is_shared(query, state) else "...tn,...np->...tp", query, state)


class Heads:
    """One chunk where all rows of a state have one decay.

    The products of decays over all segments, [G, H, C, C + 1], come from :meth:`prepared`, for all chunks at once.
    """

    def prepared(self, decay: Array, excess: Array | None) -> Decays:
        """Returns the segment products [T / C, G, H, C, C + 1] of [T / C, G, H, C], or without H."""
        further = None if excess is None else jnp.moveaxis(excess, -1, 0)
        return jnp.moveaxis(segment_products(jnp.moveaxis(decay, -1, 0), further), (0, 1), (-2, -1)), None

    def chunk(self, decays: Decays) -> _HeadsChunk:
        return _HeadsChunk(decays[0])

    def advance(self, state: Array, decays: Decays, operands: Operands) -> Array:
        return advanced(self.chunk(decays), state, operands)

    def step(self, before: bool, state: Array, own: tuple[Decays, Operands]) -> tuple[Array, Array]:
        return stepped(self.chunk(own[0]), before, state, own[1])

    def step_transposed(
        self, before: bool, dstate: Array, decays: Decays, operands: Operands, state: Array, dy: Array
    ) -> tuple[Array, tuple[Array, Operands]]:
        products, _ = decays
        key, value, query = operands[:3]
        shared = _is_shared(key, value)
        seen = self.chunk(decays).seen(before)
        scores = _einsum("...tn,...sn->...ts", query, key)
        dweights = _einsum("...tp,...sp->...ts", dy, value)
        dscores = dweights * seen[..., 1:]
        into = dy * seen[..., :1]
        last = products[..., -1, 1:, None]
        dvalue = _einsum("...ts,...tp->...sp", scores * seen[..., 1:], dy)
        dadded = _einsum("gjsn,ghnp->ghsp" if shared else "...sn,...np->...sp", key, dstate)
        dvalue += last * dadded
        if shared:
            dquery = _einsum("ghts,gjsn->gjtn", dscores, key) + _einsum("ghtp,ghnp->gtn", into, state)[:, None]
            dkey = _einsum("ghts,gjtn->gjsn", dscores, query) + _einsum("ghsp,ghnp->gsn", value * last, dstate)[:, None]
            dbefore = _einsum("gjtn,ghtp->ghnp", query, into)
        else:
            dquery = _einsum("...ts,...sn->...tn", dscores, key) + _einsum("...tp,...np->...tn", into, state)
            dkey = _einsum("...ts,...tn->...sn", dscores, query) + _einsum("...sp,...np->...sn", value * last, dstate)
            dbefore = _einsum("...tn,...tp->...np", query, into)
        dbefore += products[..., -1, :1, None] * dstate
        of_rows = _of_rows(query, state)
        dseen = jnp.concatenate([jnp.sum(dy * of_rows, -1, keepdims=True), dweights * scores], -1)
        dproducts = jnp.concatenate([dseen[..., 1:, :], jnp.zeros_like(dseen[..., :1, :])], -2) if before else dseen
        dends = jnp.concatenate([jnp.sum(state * dstate, (-2, -1))[..., None], jnp.sum(value * dadded, -1)], -1)
        dproducts = dproducts.at[..., -1, :].add(dends)
        return dbefore, (self.of_decays(decays, dproducts), Operands(dkey, dvalue, dquery))

    def of_decays(self, decays: Decays, cotangent: Array) -> Array:
        """Returns the cotangent of the decays [G, H, C] from that of their segment products, in one matrix product.

        A segment from before step s to after step t that holds step r is the segment up to r, times the decay of r,
        times the segment after r.
        """
        products, _ = decays
        first = jnp.zeros_like(products[..., :1, :]).at[..., 0].set(1)
        until = jnp.concatenate([first, products[..., :-1, :]], -2)
        count = products.shape[-2]
        held = jnp.tril(jnp.ones((count, count), products.dtype))  # a segment to t holds step r for r <= t
        beside = _einsum("...ts,...rs->...tr", jnp.tril(cotangent), until)
        return jnp.sum(products[..., 1:] * held * beside, -2)


class _ChannelsChunk(NamedTuple):
    """A chunk with the decays [G, H, C, N] and the products of its segments, split at the middles of blocks."""

    decay: Array
    products: HalvedProducts

    def scores(self, before: bool, query: Array, key: Array) -> Array:
        count = query.shape[-2]
        own_steps = jnp.zeros((*query.shape[:-1], count), query.dtype)
        if not before:
            own_steps = jnp.where(np.eye(count, dtype=bool), jnp.sum(query * key, -1, keepdims=True), own_steps)
        return _scores(own_steps, self.products.levels, self._decayed(before, query), key)

    def entering(self, before: bool, query: Array, state: Array) -> Array:
        read = self._decayed(before, query) * self.products.from_start
        return _einsum("...tn,...np->...tp", read, state)

    def passed(self, state: Array) -> Array:
        return self.products.total[..., None] * state

    def added(self, key: Array, value: Array) -> Array:
        return _einsum("...sn,...sp->...np", key * self.products.to_end, value)

    def _decayed(self, before: bool, query: Array) -> Array:
        """Returns queries of the states before their steps: a state after a step has decayed once more."""
        return query if before else query * self.decay


@jax.custom_vjp
def _scores(own_steps: Array, levels: Array, query: Array, key: Array) -> Array:
    """Adds to the scores [G, H, C, C] of steps with themselves those of pairs of steps in both halves of a block, for
    all sizes of blocks."""

    def add(found: Array, size: tuple[Array, Array]) -> tuple[Array, None]:
        weights, own = size
        across = _einsum("...tn,...sn->...ts", query * weights, key * weights)
        return found + jnp.where(own, across, jnp.zeros_like(across)), None

    return lax.scan(add, own_steps, (levels, pairs(query.shape[-2])))[0]


def _scores_forward(
    own_steps: Array, levels: Array, query: Array, key: Array
) -> tuple[Array, tuple[Array, Array, Array]]:
    return _scores(own_steps, levels, query, key), (levels, query, key)


def _scores_backward(given: tuple[Array, Array, Array], cotangent: Array) -> tuple[Array, Array, Array, Array]:
    levels, query, key = given

    def add(found: tuple[Array, Array], size: tuple[Array, Array]) -> tuple[tuple[Array, Array], Array]:
        weights, own = size
        across = jnp.where(own, cotangent, jnp.zeros_like(cotangent))
        of_query = _einsum("...ts,...sn->...tn", across, key * weights)
        of_key = _einsum("...ts,...tn->...sn", across, query * weights)
        return (found[0] + of_query * weights, found[1] + of_key * weights), of_query * query + of_key * key

    nothing = jnp.zeros_like(query), jnp.zeros_like(key)
    found, of_levels = lax.scan(add, nothing, (levels, pairs(query.shape[-2])))
    return cotangent, of_levels, *found


_scores.defvjp(_scores_forward, _scores_backward)


class Channels:
    """One chunk where each row of a state has its own decay; keys and queries have all heads.

    The segments from one half of a block of steps to the other are those to the middle times those from it, so their
    scores are one matrix product of scaled queries and keys; within the halves, the same again.
    """

    def prepared(self, decay: Array, excess: Array | None) -> Decays:
        """Returns the decays and what they exceed one by: a chunk's products are computed where they are needed."""
        return decay, excess

    def chunk(self, decays: Decays) -> _ChannelsChunk:
        return _ChannelsChunk(decays[0], halved_products(*decays))

    def advance(self, state: Array, decays: Decays, operands: Operands) -> Array:
        to_end, total = products_to_end(*decays)
        return total[..., None] * state + _einsum("...sn,...sp->...np", operands.key * to_end, operands.value)

    def step(self, before: bool, state: Array, own: tuple[Decays, Operands]) -> tuple[Array, Array]:
        return stepped(self.chunk(own[0]), before, state, own[1])

    def step_transposed(
        self, before: bool, dstate: Array, decays: Decays, operands: Operands, state: Array, dy: Array
    ) -> tuple[Array, tuple[Array, Operands]]:
        return differentiated(self, before, dstate, decays, operands, state, dy)

    def of_decays(self, decays: Decays, cotangent: Array) -> Array:
        return cotangent


def advanced(chunk: Chunk, state: Array, operands: Operands) -> Array:
    """Returns the state after a chunk."""
    return chunk.passed(state) + chunk.added(operands.key, operands.value)


def stepped(chunk: Chunk, before: bool, state: Array, operands: Operands) -> tuple[Array, Array]:
    """Returns (the state after a chunk, y [G, H, C, P])."""
    y = _einsum("...ts,...sp->...tp", chunk.scores(before, operands.query, operands.key), operands.value)
    return advanced(chunk, state, operands), y + chunk.entering(before, operands.query, state)


def differentiated(
    form: Form, before: bool, dstate: Array, decays: Decays, operands: Operands, state: Array, dy: Array
) -> tuple[Array, tuple[Array, Operands]]:
    """Returns the cotangents of :meth:`Form.step_transposed`, of the first of ``decays``, by JAX."""
    first, second = decays
    _, pull = jax.vjp(
        lambda state, first, own: form.step(before, state, ((first, second), own)), state, first, operands
    )
    dbefore, dfirst, found = pull((dstate, dy))
    return dbefore, (dfirst, found)
