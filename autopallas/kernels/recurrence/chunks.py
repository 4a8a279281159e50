"""Computes linear recurrences with matrix states chunk by chunk, in matrix products, forward and backward.

    S[t] = a[t] * S[t-1] + k[t] (x) v[t],    y[t] = q[t] . S[t]  or  q[t] . S[t-1]

Letters: T steps, C steps of a chunk, G groups, H heads of a group, J heads that keys and queries have (H, or 1 where
heads share them), N rows of a state (summed over in y), P columns.

Of the states only those at the beginnings of chunks are kept for the backward, which computes the others again.
"""

from __future__ import annotations

import functools
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from autopallas.kernels.recurrence.products import halved_products, segment_products

__all__ = ["Recurrence", "chunked"]

Array: TypeAlias = jax.Array
_einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)


class Recurrence(NamedTuple):
    """The arrays of a recurrence, in its accumulation dtype.

    Attributes:
      decay: [T, G, H], or [T, G, H, N] where each row of the state has its own.
      key, query: [T, G, J, N].
      value: [T, G, H, P].
      initial: [G, H, N, P].
      excess: the decay minus one, where that is known more exactly than from the rounded decay. It has no derivative of
        its own: that of the decay stands for both.
    """

    decay: Array
    key: Array
    value: Array
    query: Array
    initial: Array
    excess: Array | None = None


def chunked(given: Recurrence, chunk: int, before: bool) -> tuple[Array, Array]:
    """Returns (y [T, G, H, P], the last state [G, H, N, P]).

    Args:
      given: the arrays.
      chunk: the number of steps of a chunk, a power of two.
      before: whether y[t] reads the state before step t, and not after it.
    """
    steps = given.value.shape[0]
    chunk = min(chunk, 1 << (steps - 1).bit_length())
    missing = -steps % chunk
    if missing:  # steps that change nothing
        given = given._replace(
            decay=_lengthened(given.decay, missing, 1),
            key=_lengthened(given.key, missing, 0),
            value=_lengthened(given.value, missing, 0),
            query=_lengthened(given.query, missing, 0),
            excess=None if given.excess is None else _lengthened(given.excess, missing, 0),
        )
    if given.decay.ndim == 4:
        heads = given.value.shape[2]
        shape = (*given.key.shape[:2], heads, given.key.shape[3])
        given = given._replace(key=jnp.broadcast_to(given.key, shape), query=jnp.broadcast_to(given.query, shape))
    split = {n: _split(x, chunk) for n in _OF_STEPS if (x := getattr(given, n)) is not None}
    y, last = _chunked(before, given._replace(**split))
    y = jnp.moveaxis(y, 3, 1)
    return y.reshape(-1, *y.shape[2:])[:steps], last


_OF_STEPS = ("decay", "key", "value", "query", "excess")


def _lengthened(x: Array, count: int, value: float) -> Array:
    return jnp.pad(x, ((0, count), *((0, 0) for _ in x.shape[1:])), constant_values=value)


def _split(x: Array, chunk: int) -> Array:
    """Returns [T / C, G, H, C, ...] of [T, G, H, ...]."""
    return jnp.moveaxis(x.reshape(x.shape[0] // chunk, chunk, *x.shape[1:]), 1, 3)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(before: bool, given: Recurrence) -> tuple[Array, Array]:
    """Computes the same with arrays whose steps are split into chunks: [T / C, G, H, C, ...]."""
    kind = _Channels if given.decay.ndim == 5 else _Heads
    last, y = lax.scan(
        lambda state, own: kind.step(before, state, own),
        given.initial,
        (kind.prepared(given.decay, given.excess), *given[1:4]),
    )
    return y, last


def _forward(before: bool, given: Recurrence) -> tuple[tuple[Array, Array], Recurrence]:
    return _chunked(before, given), given


def _backward(before: bool, given: Recurrence, cotangents: tuple[Array, Array]) -> tuple[Recurrence]:
    dy, dlast = cotangents
    kind = _Channels if given.decay.ndim == 5 else _Heads
    decays = kind.prepared(given.decay, given.excess)

    def enter(state: Array, own: tuple[_Decays, Array, Array]) -> tuple[Array, Array]:
        return kind.advance(state, *own), state

    _, states = lax.scan(enter, given.initial, (decays, given.key, given.value))
    dinitial, found = lax.scan(
        lambda dstate, own: kind.step_transposed(before, dstate, *own),
        dlast,
        (decays, *given[1:4], states, dy),
        reverse=True,
    )
    return (Recurrence(*found, dinitial, None if given.excess is None else jnp.zeros_like(given.excess)),)


_chunked.defvjp(_forward, _backward)

_Decays: TypeAlias = tuple[Array, Array | None]
"""What the products of a chunk's decays are computed from: the decays and what they exceed one by, or the products."""
_Gradients: TypeAlias = tuple[Array, Array, Array, Array]
"""Cotangents of decay, key, value and query of one chunk."""


class _Heads:
    """One chunk where all rows of a state have one decay.  Arrays are [G, H|J, C, ...], states [G, H, N, P].

    The products of decays over all segments, [G, H, C, C + 1], come from :meth:`prepared`, for all chunks at once.
    """

    @staticmethod
    def prepared(decay: Array, excess: Array | None) -> _Decays:
        """Returns the segment products [T / C, G, H, C, C + 1] of [T / C, G, H, C]."""
        further = None if excess is None else jnp.moveaxis(excess, 3, 0)
        return jnp.moveaxis(segment_products(jnp.moveaxis(decay, 3, 0), further), (0, 1), (3, 4)), None

    @staticmethod
    def advance(state: Array, decays: _Decays, key: Array, value: Array) -> Array:
        """Returns the state after the chunk."""
        products, _ = decays
        weighted = value * products[..., -1, 1:, None]
        added = _einsum("gjsn,ghsp->ghnp" if key.shape[1] == 1 else "ghsn,ghsp->ghnp", key, weighted)
        return products[..., -1, :1, None] * state + added

    @classmethod
    def step(cls, before: bool, state: Array, own: tuple[_Decays, Array, Array, Array]) -> tuple[Array, Array]:
        """Returns (the state after the chunk, y)."""
        (products, _), key, value, query = own
        seen = cls._seen(before, products)
        scores = _einsum("gjtn,gjsn->gjts", query, key)
        y = _einsum("ghts,ghsp->ghtp", scores * seen[..., 1:], value)
        y += seen[..., :1] * cls._of_rows(query, state)
        return cls.advance(state, own[0], key, value), y

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

    @classmethod
    def step_transposed(
        cls, before: bool, dstate: Array, decays: _Decays, key: Array, value: Array, query: Array, state: Array,
        dy: Array,
    ) -> tuple[Array, _Gradients]:  # fmt: skip
        """Returns (the cotangent of the state before the chunk, those of the arrays)."""
        products, _ = decays
        shared = key.shape[1] == 1
        seen = cls._seen(before, products)
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
        dseen = jnp.concatenate([jnp.sum(dy * cls._of_rows(query, state), -1, keepdims=True), dweights * scores], -1)
        dproducts = jnp.concatenate([dseen[..., 1:, :], jnp.zeros_like(dseen[..., :1, :])], -2) if before else dseen
        dends = jnp.concatenate([jnp.sum(state * dstate, (-2, -1))[..., None], jnp.sum(value * dadded, -1)], -1)
        dproducts = dproducts.at[..., -1, :].add(dends)
        return dbefore, (cls._of_decays(products, dproducts), dkey, dvalue, dquery)

    @staticmethod
    def _of_decays(products: Array, cotangent: Array) -> Array:
        """Returns the cotangent of the decays [G, H, C] from that of their segment products, in one matrix product.

        A segment from before step s to after step t that holds step r is the segment up to r, times the decay of r,
        times the segment after r.
        """
        first = jnp.zeros_like(products[..., :1, :]).at[..., 0].set(1)
        until = jnp.concatenate([first, products[..., :-1, :]], -2)
        count = products.shape[-2]
        held = jnp.tril(jnp.ones((count, count), products.dtype))  # a segment to t holds step r for r <= t
        beside = _einsum("ghts,ghrs->ghtr", jnp.tril(cotangent), until)
        return jnp.sum(products[..., 1:] * held * beside, -2)


class _Channels:
    """One chunk where each row of a state has its own decay.  Arrays are [G, H, C, ...], states [G, H, N, P].

    The segments from one half of a block of steps to the other are those to the middle times those from it, so their
    scores are one matrix product of scaled queries and keys; within the halves, the same again.
    """

    @staticmethod
    def prepared(decay: Array, excess: Array | None) -> _Decays:
        """Returns the decays and what they exceed one by: a chunk's products are computed where they are needed."""
        return decay, excess

    @classmethod
    def advance(cls, state: Array, decays: _Decays, key: Array, value: Array) -> Array:
        """Returns the state after the chunk."""
        decay, excess = decays
        _, ends, total = halved_products(decay, False, excess)
        return total[..., None] * state + _einsum("ghsn,ghsp->ghnp", key * ends.to_middle, value)

    @classmethod
    def step(cls, before: bool, state: Array, own: tuple[_Decays, Array, Array, Array]) -> tuple[Array, Array]:
        """Returns (the state after the chunk, y)."""
        (decay, excess), key, value, query = own
        levels, ends, total = halved_products(decay, before, excess)
        own_steps = jnp.zeros_like(query[..., :1]) if before else jnp.sum(query * key, -1, keepdims=True)
        scores = own_steps[..., None]  # [G, H, C, 1, 1], of blocks of one step
        for level in levels:
            half = level.to_middle.shape[-2]
            early, late = _parted(key, half)[0], _parted(query, half)[1]
            across = _products(late * level.from_middle, early * level.to_middle)
            pairs = scores.reshape(*scores.shape[:2], -1, 2 * half, half)
            first, second = lax.split(pairs, (half, half), axis=3)
            upper = jnp.concatenate([first, jnp.zeros_like(first)], -1)
            scores = jnp.concatenate([upper, jnp.concatenate([across, second], -1)], -2)
        y = _einsum("ghts,ghsp->ghtp", scores[:, :, 0], value)
        y += _einsum("ghtn,ghnp->ghtp", query * ends.from_middle, state)
        added = _einsum("ghsn,ghsp->ghnp", key * ends.to_middle, value)
        return total[..., None] * state + added, y

    @classmethod
    def step_transposed(
        cls, before: bool, dstate: Array, decays: _Decays, key: Array, value: Array, query: Array, state: Array,
        dy: Array,
    ) -> tuple[Array, _Gradients]:  # fmt: skip
        """Returns (the cotangent of the state before the chunk, those of the arrays)."""
        decay, excess = decays

        def step(state: Array, decay: Array, *own: Array) -> tuple[Array, Array]:
            key, value, query = own
            return cls.step(before, state, ((decay, excess), key, value, query))

        _, pull = jax.vjp(step, state, decay, key, value, query)
        dbefore, *found = pull((dstate, dy))
        ddecay, dkey, dvalue, dquery = found
        return dbefore, (ddecay, dkey, dvalue, dquery)


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
