"""Mixtures whose tokens are brought to slots of experts by scatters, and back by gathers, in further ways."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from support.mixtures import E, K, T, route
from support.mixtures_written import C, in_slots, slot_numbers


def brought(x, chosen, place, mode="drop", slots=C):
    """Tokens in their slots, [E, slots, D]."""
    rows = jnp.repeat(x[:, None], K, 1)
    return jnp.zeros((E, slots, x.shape[-1]), x.dtype).at[chosen, place].add(rows, mode=mode)


def weighted(y, weights):
    return jnp.einsum("tkd,tk->td", y, weights)


def of_slots(places, mode="fill", fill=0, slots=C, brings="drop"):
    """Slots by other numbers than those of the tokens of an expert."""

    def function(p, x):
        weights, chosen, place = slot_numbers(p, x)
        chosen, place = places(chosen, place)
        y = in_slots(p, brought(x, chosen, place, brings, slots))
        options = {"fill_value": fill} if mode == "fill" else {}
        return weighted(y.at[chosen, place].get(mode=mode, **options), weights)

    return function


def as_it_is(chosen, place):
    return chosen, place


def flat(p, x):
    """One index, of all slots."""
    weights, chosen, place = slot_numbers(p, x)
    index = jnp.where(place < C, chosen * C + place, E * C).ravel()
    rows = jnp.zeros((E * C, x.shape[-1]), x.dtype).at[index].set(jnp.repeat(x, K, 0), mode="drop")
    y = in_slots(p, rows.reshape(E, C, -1)).reshape(E * C, -1)
    return weighted(y.at[index].get(mode="fill", fill_value=0).reshape(T, K, -1), weights)


def one_more(first=False, mode="promise_in_bounds", shift=0, row=None):
    """What was dropped reads a row that stands beside the slots."""

    def function(p, x):
        weights, chosen, place = slot_numbers(p, x)
        index = jnp.where(place < C - 3, chosen * (C - 3) + place, E * (C - 3)).ravel()
        rows = jnp.zeros((E * (C - 3) + 1, x.shape[-1]), x.dtype).at[index].set(jnp.repeat(x, K, 0))
        y = in_slots(p, rows[:-1].reshape(E, C - 3, -1)).reshape(E * (C - 3), -1)
        other = jnp.zeros_like(y[:1]) if row is None else row(p, x)[None]
        y = jnp.concatenate([other, y] if first else [y, other])
        y = y.at[(index + 1) % y.shape[0] if first else index + shift].get(mode=mode)
        return weighted(y.reshape(T, K, -1), weights)

    return function


def shared_expert(p, x):
    return jnp.tanh(jnp.mean(x, 0) @ p["gate"][0] @ p["down"][1])


ONE_MORE = {
    "after": one_more(),
    "before": one_more(True),
    "clipped": one_more(mode="clip", shift=3),
    "clipped below": one_more(mode="clip", shift=-90),
    "promised": one_more(shift=4),
    "promised below": one_more(shift=-80),
    "filled": one_more(mode="fill"),
    "before, filled": one_more(True, "fill"),
    "of all tokens": one_more(row=shared_expert),
    "before, of all tokens": one_more(True, row=shared_expert),
}  # fmt: skip


def slots_first(p, x):
    weights, chosen, place = slot_numbers(p, x)
    rows = jnp.zeros((C, E, x.shape[-1]), x.dtype).at[place, chosen].set(x[:, None], mode="drop")
    h = jax.nn.gelu(jnp.einsum("ced,edf->cef", rows, p["gate"]) + p["gate_bias"])
    y = jnp.einsum("cef,efd->dce", h, p["down"]) + p["down_bias"].T[:, None]
    return jnp.einsum("dtk,tk->td", y[:, jnp.minimum(place, C - 1), chosen], weights * (place < C))


def rows_by_token_numbers(p, x):
    """Slots hold numbers of tokens, by which rows are gathered."""
    weights, chosen, place = slot_numbers(p, x)
    token = jnp.full((E, C), T, jnp.int32).at[chosen, place].set(jnp.arange(T)[:, None], mode="drop")
    rows = jnp.concatenate([x, jnp.zeros_like(x[:1])])[token]
    return weighted(in_slots(p, rows).at[chosen, place].get(mode="fill", fill_value=0), weights)


def normalised_slots(p, x):
    weights, chosen, place = slot_numbers(p, x)
    rows = brought(x, chosen, place)
    rows = rows * jax.lax.rsqrt(jnp.mean(rows * rows, -1, keepdims=True) + 1e-5)
    return weighted(in_slots(p, rows)[chosen, jnp.minimum(place, C - 1)], weights * (place < C))


def weighted_slots(p, x):
    """Weights are brought to slots too; empty ones are masked."""
    weights, chosen, place = slot_numbers(p, x)
    own = jnp.zeros((E, C), x.dtype).at[chosen, place].set(weights, mode="drop")
    y = in_slots(p, brought(x, chosen, place)) * own[..., None]
    y = jnp.where((own > 0)[..., None], y, 0)
    return jnp.sum(y.at[chosen, place].get(mode="fill", fill_value=0), 1)


def a_bias_of_each_slot(p, x):
    weights, chosen, place = slot_numbers(p, x)
    y = in_slots(p, brought(x, chosen, place) + jnp.arange(C)[:, None]) * jnp.linspace(0, 1, C)[:, None]
    return weighted(y.at[chosen, place].get(mode="fill", fill_value=0), weights)


def best_alone(p, x):
    best = jnp.argmax(x @ p["router"], -1)
    mine = jax.nn.one_hot(best, E, dtype=jnp.int32)
    place = jnp.sum(jnp.cumsum(mine, 0) * mine, -1) - 1
    rows = jnp.zeros((E, 4, x.shape[-1]), x.dtype).at[best, place].set(x, mode="drop")
    h = jax.nn.relu(jnp.einsum("ecd,edf->ecf", rows, p["gate"]) + p["gate_bias"][:, None])
    y = jnp.einsum("ecf,efd->ecd", h, p["down"])[best, jnp.clip(place, 0, 3)]
    gate = jnp.max(jax.nn.softmax(x @ p["router"]), -1)
    return jnp.where((place < 4)[:, None], y * gate[:, None], x)


def sequences(p, x):
    """Slots of their own for each of three sequences."""

    def one(x):
        weights, chosen = route(p, x)
        mine = jax.nn.one_hot(chosen.ravel(), E, dtype=jnp.int32)
        place = jnp.sum((jnp.cumsum(mine, 0) - 1) * mine, -1).reshape(chosen.shape)
        y = in_slots(p, brought(x, chosen, place, slots=3))
        return weighted(y.at[chosen, place].get(mode="fill", fill_value=0), weights)

    return jax.vmap(one)(x.reshape(3, 4, -1)).reshape(x.shape)


def grouped(p, x):
    """The same, written with an axis of sequences."""
    weights, chosen = route(p, x)
    weights, chosen = (a.reshape(3, 4, K) for a in (weights, chosen))
    mine = jax.nn.one_hot(chosen.reshape(3, 4 * K), E, dtype=jnp.int32)
    place = jnp.sum((jnp.cumsum(mine, 1) - 1) * mine, -1).reshape(chosen.shape)
    g = jnp.arange(3)[:, None, None]
    rows = jnp.zeros((3, E, 3, x.shape[-1]), x.dtype).at[g, chosen, place].set(x.reshape(3, 4, 1, -1), mode="drop")
    h = jax.nn.silu(jnp.einsum("gecd,edf->gecf", rows, p["gate"])) * jnp.einsum("gecd,edf->gecf", rows, p["up"])
    y = jnp.einsum("gecf,efd->gecd", h, p["down"]).at[g, chosen, place].get(mode="fill", fill_value=0)
    return jnp.einsum("gtkd,gtk->gtd", y, weights).reshape(x.shape)


def filled_with_nan(p, x):
    weights, chosen, place = slot_numbers(p, x)
    y = in_slots(p, brought(x, chosen, place, slots=4))
    y = y.at[chosen, place].get(mode="fill")
    return jnp.sum(jnp.where((place < 4)[..., None], y * weights[..., None], 0), 1)


WAYS = [flat, slots_first, rows_by_token_numbers, normalised_slots, weighted_slots, a_bias_of_each_slot,
        best_alone, sequences, grouped, filled_with_nan]  # fmt: skip

PLACES = {
    "few slots": of_slots(as_it_is, slots=3),
    "few slots, clipped": of_slots(as_it_is, "clip", slots=3),
    "few slots, filled": of_slots(as_it_is, fill=1.5, slots=3),
    "few slots, promised": of_slots(as_it_is, "promise_in_bounds", slots=3),
    "few slots, clipped on both ways": of_slots(as_it_is, "clip", slots=3, brings="clip"),
    "shared by tokens": of_slots(lambda e, c: (e, c // 2)),
    "shared by all": of_slots(lambda e, c: (e, 0 * c)),
    "wrapped around": of_slots(lambda e, c: (e, c % 3), slots=3),
    "one too far": of_slots(lambda e, c: (e, c + 1), slots=4),
    "one too few": of_slots(lambda e, c: (e, c - 1), slots=4),
    "three too few": of_slots(lambda e, c: (e, c - 3), slots=2),
    "counted in int8": of_slots(lambda e, c: (e, (c * 50).astype(jnp.int8))),
    "counted in bfloat16": of_slots(lambda e, c: (e, ((c + 300).astype(jnp.bfloat16) - 300).astype(jnp.int32))),
    "counted in uint8": of_slots(lambda e, c: (e.astype(jnp.uint8), c.astype(jnp.uint8)), slots=3),
    "other experts": of_slots(lambda e, c: (e[::-1], c)),
    "experts out of range": of_slots(lambda e, c: (e + 2, c)),
    "experts out of range, clipped": of_slots(lambda e, c: (e - 2, c), "clip"),
    "experts out of range, promised": of_slots(lambda e, c: (2 * e - 9, c), "promise_in_bounds"),
    "any place": of_slots(lambda e, c: (e, jnp.arange(T)[:, None] * 5 % C + 0 * c)),
}  # fmt: skip
"""Numbers of slots that no mixture should have, or that drop tokens; what is computed is the same."""


def read_by(places):
    """Rows are read from other places than they were brought to."""

    def function(p, x):
        weights, chosen, place = slot_numbers(p, x)
        y = in_slots(p, brought(x, chosen, place))
        return weighted(y[places(chosen, place)], weights * (place < C))

    return function


def mixed(change):
    def function(p, x):
        weights, chosen, place = slot_numbers(p, x)
        before, after = change
        y = after(in_slots(p, before(brought(x, chosen, place))))
        return weighted(y.at[chosen, place].get(mode="fill", fill_value=0), weights)

    return function


def same(slots):
    return slots


ELSEWHERE = {
    "the token before": read_by(lambda e, c: (jnp.roll(e, 1, 0), jnp.roll(c, 1, 0))),
    "another expert": read_by(lambda e, c: ((e + 1) % E, c)),
    "a slot of nobody": read_by(lambda e, c: (e, C - 1 - c)),
    "slots added up": mixed((lambda s: s + jnp.sum(s, 1, keepdims=True), same)),
    "slots turned around before": mixed((lambda s: s[:, ::-1], same)),
}
"""Rows that no token was brought to, or that hold others; what is computed is the same."""

MIXED = {
    "softmax over slots": mixed((same, lambda y: jax.nn.softmax(y, 1))),
    "normalised over slots": mixed((same, lambda y: y / jnp.sqrt(jnp.mean(y * y, 1, keepdims=True) + 1))),
    "running sum of slots": mixed((same, lambda y: jnp.cumsum(y, 1))),
    "added up over experts": mixed((same, lambda y: y + jnp.sum(y, 0, keepdims=True))),
    "slots turned around": mixed((same, lambda y: y[:, ::-1])),
    "the next slot": mixed((same, lambda y: jnp.roll(y, 1, 1))),
    "experts turned around": mixed((same, lambda y: y[::-1])),
    "sorted": mixed((same, lambda y: jnp.sort(y, 1))),
}
"""What is computed for a slot depends on others."""
