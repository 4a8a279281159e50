"""Computes one chunk of a recurrence, by the kind of its decay.

Letters: T steps, C steps of a chunk, G groups, H heads of a group, J heads that keys and queries have (H, or 1 where
heads share them), N rows of a state (summed over in y), P columns.  Arrays of one chunk are [G, H|J, C, ...], states
[G, H, N, P].
"""

from __future__ import annotations

import functools
from typing import NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from autopallas.kernels.recurrence.products import Halves, halved_products, segment_products

__all__ = ["Channels", "Decays", "Form", "Heads", "Kind", "Operands"]

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


class Kind(Form, Protocol):
    """How a chunk is computed where its decay is of some kind, and the parts that this is made of."""

    def scores(self, before: bool, decays: Decays, query: Array, key: Array) -> Array:
        """Returns how much of each step's value each query reads, [G, H, C, C]."""

    def entering(self, before: bool, decays: Decays, query: Array, state: Array) -> Array:
        """Returns what queries read of the state before the chunk, [G, H, C, P]."""

    def passed(self, state: Array, decays: Decays) -> Array:
        """Returns what is left of the state before the chunk at its end."""

    def added(self, decays: Decays, key: Array, value: Array) -> Array:
        """Returns what is added to the state by the end of the chunk."""

    def of_decays(self, decays: Decays, cotangent: Array) -> Array:
        """Returns the cotangent of the decays [G, H, C, ...] from that of the first of ``decays``."""


class Heads:
    """One chunk where all rows of a state have one decay.

    The products of decays over all segments, [G, H, C, C + 1], come from :meth:`prepared`, for all chunks at once.
    """

    def prepared(self, decay: Array, excess: Array | None) -> Decays:
        """Returns the segment products [T / C, G, H, C, C + 1] of [T / C, G, H, C]."""
        further = None if excess is None else jnp.moveaxis(excess, 3, 0)
        return jnp.moveaxis(segment_products(jnp.moveaxis(decay, 3, 0), further), (0, 1), (3, 4)), None

    def advance(self, state: Array, decays: Decays, operands: Operands) -> Array:
        return self.passed(state, decays) + self.added(decays, operands.key, operands.value)

    def passed(self, state: Array, decays: Decays) -> Array:
        return decays[0][..., -1, :1, None] * state

    def added(self, decays: Decays, key: Array, value: Array) -> Array:
        weighted = value * decays[0][..., -1, 1:, None]
        return _einsum("gjsn,ghsp->ghnp" if key.shape[1] == 1 else "ghsn,ghsp->ghnp", key, weighted)

    def scores(self, before: bool, decays: Decays, query: Array, key: Array) -> Array:
        return _einsum("gjtn,gjsn->gjts", query, key) * self._seen(before, decays[0])[..., 1:]

    def entering(self, before: bool, decays: Decays, query: Array, state: Array) -> Array:
        return self._seen(before, decays[0])[..., :1] * self._of_rows(query, state)

    def step(self, before: bool, state: Array, own: tuple[Decays, Operands]) -> tuple[Array, Array]:
        decays, operands = own
        y = _einsum("ghts,ghsp->ghtp", self.scores(before, decays, operands.query, operands.key), operands.value)
        y += self.entering(before, decays, operands.query, state)
        return self.advance(state, decays, operands), y

    @staticmethod
    def _seen(before: bool, products: Array) -> Array:
        """Returns the factors from each step, and from before the chunk, to the state that y reads."""
        if not before:
            return products
        first = jnp.zeros_like(products[..., :1, :]).at[..., 0].set(1)
        return jnp.concatenate([first, products[..., :-1, :]], -2)

    @staticmethod
    def _of_rows(query: Array, state: Array) -> Array:
        return _einsum("gjtn,ghnp->ghtp" if query.shape[1] == 1 else "ghtn,ghnp->ghtp", query, state)

    def step_transposed(
        self, before: bool, dstate: Array, decays: Decays, operands: Operands, state: Array, dy: Array
    ) -> tuple[Array, tuple[Array, Operands]]:
        products, _ = decays
        key, value, query = operands[:3]
        shared = key.shape[1] == 1
        seen = self._seen(before, products)
        scores = _einsum("gjtn,gjsn->gjts", query, key)
        dweights = _einsum("ghtp,ghsp->ghts", dy, value)
        dscores = dweights * seen[..., 1:]
        into = dy * seen[..., :1]
        last = products[..., -1, 1:, None]
        dvalue = _einsum("ghts,ghtp->ghsp", scores * seen[..., 1:], dy)
        dadded = _einsum("gjsn,ghnp->ghsp" if shared else "ghsn,ghnp->ghsp", key, dstate)
        dvalue += last * dadded
        if shared:
            dquery = _einsum("ghts,gjsn->gjtn", dscores, key) + _einsum("ghtp,ghnp->gtn", into, state)[:, None]
            dkey = _einsum("ghts,gjtn->gjsn", dscores, query) + _einsum("ghsp,ghnp->gsn", value * last, dstate)[:, None]
            dbefore = _einsum("gjtn,ghtp->ghnp", query, into)
        else:
            dquery = _einsum("ghts,ghsn->ghtn", dscores, key) + _einsum("ghtp,ghnp->ghtn", into, state)
            dkey = _einsum("ghts,ghtn->ghsn", dscores, query) + _einsum("ghsp,ghnp->ghsn", value * last, dstate)
            dbefore = _einsum("ghtn,ghtp->ghnp", query, into)
        dbefore += products[..., -1, :1, None] * dstate
        of_rows = self._of_rows(query, state)
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
        beside = _einsum("ghts,ghrs->ghtr", jnp.tril(cotangent), until)
        return jnp.sum(products[..., 1:] * held * beside, -2)


class Channels:
    """One chunk where each row of a state has its own decay; keys and queries have all heads.

    The segments from one half of a block of steps to the other are those to the middle times those from it, so their
    scores are one matrix product of scaled queries and keys; within the halves, the same again.
    """

    def prepared(self, decay: Array, excess: Array | None) -> Decays:
        """Returns the decays and what they exceed one by: a chunk's products are computed where they are needed."""
        return decay, excess

    def advance(self, state: Array, decays: Decays, operands: Operands) -> Array:
        return self.passed(state, decays) + self.added(decays, operands.key, operands.value)

    def passed(self, state: Array, decays: Decays) -> Array:
        return _halved(decays, False)[2][..., None] * state

    def added(self, decays: Decays, key: Array, value: Array) -> Array:
        return _einsum("ghsn,ghsp->ghnp", key * _halved(decays, False)[1].to_middle, value)

    def scores(self, before: bool, decays: Decays, query: Array, key: Array) -> Array:
        own_steps = jnp.zeros_like(query[..., :1]) if before else jnp.sum(query * key, -1, keepdims=True)
        scores = own_steps[..., None]  # [G, H, C, 1, 1], of blocks of one step
        for level in _halved(decays, before)[0]:
            half = level.to_middle.shape[-2]
            early, late = _parted(key, half)[0], _parted(query, half)[1]
            across = _products(late * level.from_middle, early * level.to_middle)
            pairs = scores.reshape(*scores.shape[:2], -1, 2 * half, half)
            first, second = lax.split(pairs, (half, half), axis=3)
            upper = jnp.concatenate([first, jnp.zeros_like(first)], -1)
            scores = jnp.concatenate([upper, jnp.concatenate([across, second], -1)], -2)
        return scores[:, :, 0]

    def entering(self, before: bool, decays: Decays, query: Array, state: Array) -> Array:
        return _einsum("ghtn,ghnp->ghtp", query * _halved(decays, before)[1].from_middle, state)

    def step(self, before: bool, state: Array, own: tuple[Decays, Operands]) -> tuple[Array, Array]:
        decays, operands = own
        y = _einsum("ghts,ghsp->ghtp", self.scores(before, decays, operands.query, operands.key), operands.value)
        y += self.entering(before, decays, operands.query, state)
        return self.advance(state, decays, operands), y

    def step_transposed(
        self, before: bool, dstate: Array, decays: Decays, operands: Operands, state: Array, dy: Array
    ) -> tuple[Array, tuple[Array, Operands]]:
        decay, excess = decays
        _, pull = jax.vjp(
            lambda state, decay, own: self.step(before, state, ((decay, excess), own)), state, decay, operands
        )
        dbefore, ddecay, found = pull((dstate, dy))
        return dbefore, (ddecay, found)

    def of_decays(self, decays: Decays, cotangent: Array) -> Array:
        return cotangent


def _halved(decays: Decays, before: bool) -> tuple[list[Halves], Halves, Array]:
    decay, excess = decays
    return halved_products(decay, before, excess)


def _parted(x: Array, half: int) -> tuple[Array, Array]:
    """Returns the first and the second halves of blocks of [G, H, C, N]."""
    blocks = x.reshape(*x.shape[:2], -1, 2 * half, x.shape[-1])
    first, second = lax.split(blocks, (half, half), axis=3)
    return first, second


_FEW = 4
"""Largest number of steps for which a sum of products is faster than a matrix product."""


def _products(query: Array, key: Array) -> Array:
    """Returns scores [..., T, S] of [..., T, N] and [..., S, N]."""
    if query.shape[-2] <= _FEW:
        return jnp.sum(query[..., :, None, :] * key[..., None, :, :], -1)
    return jnp.einsum("...tn,...sn->...ts", query, key, precision=lax.Precision.HIGHEST)
