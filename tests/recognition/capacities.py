"""Mixtures that dispatch tokens to slots of their experts, with a capacity, as people write them; and look-alikes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from support.mixtures import D, E, P, T, X

one_hot = jax.nn.one_hot
C = 4
"""Slots of each expert."""


def experts(p, slots):
    """[..., E, C, D]."""
    h = jnp.einsum("...ecd,edf->...ecf", slots, p["gate"]) + p["gate_bias"][:, None]
    return jnp.einsum("...ecf,efd->...ecd", jax.nn.gelu(h), p["down"]) + p["down_bias"][:, None]


def gates(p, x):
    return jax.nn.softmax(x @ p["router"])


def mixed(p, x, dispatch, combine):
    slots = jnp.einsum("...td,...tec->...ecd", x, dispatch.astype(x.dtype))
    return jnp.einsum("...ecd,...tec->...td", experts(p, slots), combine.astype(x.dtype))


def first(dispatch_of, weight=None):
    """A mixture in which tokens choose one expert, with a dispatch that is made of the mask of that."""

    def function(p, x):
        g = gates(p, x)
        mine = one_hot(jnp.argmax(g, -1), E)
        dispatch = dispatch_of(mine)
        combine = weight(dispatch, g, mine) if weight else dispatch * jnp.sum(g * mine, -1)[:, None, None]
        return mixed(p, x, dispatch, combine)

    return function


def placed(place, capacity=C):
    return one_hot(place.astype(jnp.int32), capacity)


# ---------------------------------------------------------------------- one expert for each token


def per_expert(m):
    return m[..., None] * placed(jnp.cumsum(m, 0) * m - 1)


def without_mask(m):
    return placed(jnp.cumsum(m, 0) * m - 1)


def flat_place(m):
    place = jnp.sum((jnp.cumsum(m, 0) - 1) * m, -1)
    return m[..., None] * placed(place)[:, None]


def exclusive(m):
    return m[..., None] * placed(jnp.cumsum(m, 0) - m)


def trimmed(m):
    place = jnp.cumsum(m, 0) * m
    return (m * (place <= C))[..., None] * placed(place - 1)


def integers(m):
    i = m.astype(jnp.int32)
    return placed(jnp.cumsum(i, 0) * i - 1)


def backwards(m):
    return m[..., None] * placed(lax.cumsum(m, 0, reverse=True) - 1)


def selected(m):
    return placed(jnp.where(m > 0, jnp.cumsum(m, 0) - 1, -1))


def by_hand(m):
    place = (jnp.cumsum(m, 0) - 1).astype(jnp.int32)
    return jnp.where((place[..., None] == jnp.arange(C)) & (m > 0)[..., None], 1.0, 0.0)


def behind_the_first(m):
    """The slot 0 of a longer axis is for nobody."""
    return placed(jnp.cumsum(m, 0) * m, C + 1)[..., 1:]


def dispatched_where_above_zero(p, x, gates=gates):
    """The weights alone tell which tokens are in which slots."""
    g = gates(p, x)
    mine = one_hot(jnp.argmax(g, -1), E)
    place = jnp.cumsum(mine, 0) * mine
    mine = mine * (place <= C)
    slot = placed(jnp.sum((place - 1) * mine, -1))
    combine = jnp.sum(g * mine, -1)[:, None, None] * mine[..., None] * slot[:, None]
    return mixed(p, x, combine > 0, combine)


def sequences(p, x):
    x = x.reshape(2, T // 2, D)
    g = gates(p, x)
    mine = one_hot(jnp.argmax(g, -1), E)
    dispatch = mine[..., None] * placed(jnp.cumsum(mine, 1) * mine - 1, 2)
    slots = jnp.einsum("bsm,bsec->ebcm", x, dispatch)
    h = jax.nn.silu(jnp.einsum("ebcm,emf->ebcf", slots, p["gate"])) * jnp.einsum("ebcm,emf->ebcf", slots, p["up"])
    combine = dispatch * jnp.max(g, -1)[..., None, None]
    return jnp.einsum("ebcm,bsec->bsm", jnp.einsum("ebcf,efm->ebcm", h, p["down"]), combine)


def mapped(p, x):
    return jax.vmap(lambda x: first(per_expert)(p, x))(x.reshape(2, T // 2, D))


# ---------------------------------------------------------------------- two experts for each token


def two_by_boolean_weights(p, x, behind=True, further=0):
    """The second choices stand behind all first ones; tokens are dispatched where they have a weight."""
    g = gates(p, x)
    first = one_hot(jnp.argmax(g, -1), E)
    second = one_hot(jnp.argmax(jnp.where(first > 0, -jnp.inf, g), -1), E)
    places = [jnp.cumsum(first, 0) - 1, jnp.cumsum(second, 0) - 1]
    places[1] += jnp.sum(first, 0, keepdims=True) if behind else 0
    kept = [mask * (place < C) for mask, place in zip((first, second), places, strict=True)]
    weights = [jnp.einsum("te,te->t", g, mask) for mask in kept]
    total = jnp.maximum(weights[0] + weights[1], 1e-9)
    combine = 0
    for mask, place, weight, skipped in zip(kept, places, weights, (0, further), strict=True):
        slot = placed(jnp.sum(place * mask, 1), C + skipped)[:, skipped:]
        combine = combine + jnp.einsum("te,tc->tec", (weight / total)[:, None] * mask, slot)
    return mixed(p, x, combine.astype(bool), combine)


def two_in_groups(p, x, counted="kept", others_of=lambda g, first: g * (1 - first), there=lambda w: w.astype(bool)):
    """The second choices stand behind those first ones that were ``kept``."""
    x = x.reshape(2, T // 2, D)
    g = gates(p, x)
    chosen = jnp.argmax(g, -1)
    first = one_hot(chosen, E)
    weight = jnp.einsum("gse,gse->gs", g, first)
    others = others_of(g, first)
    next_chosen = jnp.argmax(others, -1)
    second = one_hot(next_chosen, E)
    next_weight = jnp.einsum("gse,gse->gs", others, second)
    total = weight + next_weight + 1e-9

    place = (jnp.cumsum(first, -2) - first) * first
    everyone = jnp.sum(first, -2)
    first = first * (place < C)
    before = {"kept": jnp.sum(first, -2), "all": everyone, "none": 0 * everyone}[counted]
    is_kept = jnp.sum(first, -1)
    next_place = (jnp.cumsum(second, -2) - second + before[:, None]) * second
    second = second * (next_place < C)
    next_is_kept = jnp.sum(second, -1)

    def part(weight, is_kept, chosen, place):
        slot = placed(jnp.sum(place, -1))
        return jnp.einsum("gs,gs,gse,gsc->gsec", weight / total, is_kept, one_hot(chosen, E), slot)

    combine = part(weight, is_kept, chosen, place) + part(next_weight, next_is_kept, next_chosen, next_place)
    return mixed(p, x, there(combine), combine)


def choices_in_a_row(p, x):
    """All first choices are counted, and then all second ones, in one running count."""
    x = x.reshape(2, T // 2, D)
    g = gates(p, x)
    chosen = jnp.swapaxes(lax.top_k(g, 2)[1], 1, 2).reshape(2, -1)
    mask = one_hot(chosen, E, dtype=jnp.int32)
    place = jnp.cumsum(mask, 1) * mask - 1.0
    place = jnp.max(place.reshape(2, 2, T // 2, E).swapaxes(1, 2), 2)
    dispatch = one_hot(place.astype(jnp.int32), C, dtype=jnp.bool_)
    return mixed(p, x, dispatch, jnp.einsum("gte,gtec->gtec", g, dispatch))


def choices_summed(p, x, count="all in a row", dispatch_of=None, combine_of=None, normed=True, capacity=C):
    """Each choice of each token is dispatched by itself, and a token's choices are added up."""
    weights, chosen = lax.top_k(gates(p, x), 2)
    weights = weights / weights.sum(-1, keepdims=True) if normed else weights
    mask = one_hot(chosen, E, dtype=jnp.int32)  # [T, 2, E]
    if count == "all in a row":
        place = jnp.cumsum(mask.reshape(-1, E), 0).reshape(T, 2, E) * mask - 1
    elif count == "first choices first":
        flat = mask.swapaxes(0, 1).reshape(-1, E)
        place = (jnp.cumsum(flat, 0) - flat).reshape(2, T, E).swapaxes(0, 1)
    elif count == "each choice from nothing":
        place = jnp.cumsum(mask, 0) * mask - 1
    else:
        place = jnp.cumsum(mask, 1) * mask - 1
    kept = (mask * (place < capacity) * (place >= 0)).astype(x.dtype)
    slot = one_hot(jnp.sum(place * mask, -1), capacity)
    dispatch_of = dispatch_of or (lambda kept, slot: jnp.einsum("tke,tkc->tec", kept, slot))
    combine_of = combine_of or (lambda w, kept, slot: jnp.einsum("tk,tke,tkc->tec", w, kept, slot))
    return mixed(p, x, dispatch_of(kept, slot), combine_of(weights, kept, slot))


def choices_summed_place_by_place(p, x):
    weights, chosen = lax.top_k(gates(p, x), 2)
    mask = one_hot(chosen, E)
    place = (jnp.cumsum(mask.reshape(-1, E), 0) - 1).reshape(T, 2, E)
    each = mask[..., None] * placed(place)
    return mixed(p, x, each.sum(1) > 0, (weights[..., None, None] * each).sum(1))


def places_summed(p, x, chosen_of=lambda g: lax.top_k(g, 2)[1], scattered=False):
    """A token's places are added up: it has one with an expert, since its choices differ."""
    x = x.reshape(2, T // 2, D)
    g = gates(p, x)
    chosen = chosen_of(g)
    weights = jnp.take_along_axis(g, chosen, -1)
    mask = one_hot(chosen, E, dtype=jnp.int32)  # [2, T / 2, 2, E]
    count = jnp.cumsum(mask.reshape(2, -1, E), 1).reshape(mask.shape)
    mask = mask * (count <= C)
    there, place = mask.sum(2), (mask * count).sum(2)
    if scattered:
        at = jnp.arange(2)[:, None, None], jnp.arange(T // 2)[:, None], chosen
        weights = jnp.zeros_like(g).at[at].set(weights) * there
    else:
        weights = (weights[..., None] * mask).sum(2)
    dispatch = (there[..., None] * one_hot(place, C + 1, dtype=jnp.int32))[..., 1:]
    return mixed(p, x, dispatch, weights[..., None] * dispatch)


def twice(g):
    """The expert that a token chooses, and the one that it would choose by other numbers, perhaps the same."""
    return jnp.stack([jnp.argmax(g, -1), jnp.argmax(jnp.sin(5 * g), -1)], -1)


def sum_of(kept, slot):
    return (kept[..., None] * slot[:, :, None]).sum(1)


ONE = {
    "per expert": first(per_expert), "without mask": first(without_mask), "flat place": first(flat_place),
    "exclusive": first(exclusive), "trimmed": first(trimmed), "integers": first(integers),
    "backwards": first(backwards), "selected": first(selected), "by hand": first(by_hand),
    "behind the first": first(behind_the_first), "above zero": dispatched_where_above_zero,
    "sequences": sequences, "mapped": mapped,
    "weight per expert": first(per_expert, weight=lambda d, g, m: d * g[..., None]),
    "weight of its own": first(per_expert, weight=lambda d, g, m: jnp.where(d > 0, (g * m)[..., None], 0.0)),
}  # fmt: skip
"""Tokens choose one expert."""

TWO = {
    "boolean weights": two_by_boolean_weights, "in groups": two_in_groups,
    "in groups, all counted": lambda p, x: two_in_groups(p, x, "all"), "in a row": choices_in_a_row,
    "in groups, above zero": lambda p, x: two_in_groups(p, x, there=lambda w: w > 0),
    "summed": choices_summed,
    "summed, first choices first": lambda p, x: choices_summed(p, x, "first choices first"),
    "summed elementwise": lambda p, x: choices_summed(p, x, dispatch_of=sum_of, normed=False),
    "summed place by place": choices_summed_place_by_place,
    "places summed": places_summed, "places summed, scattered": lambda p, x: places_summed(p, x, scattered=True),
}  # fmt: skip
"""They choose two."""


# ---------------------------------------------------------------------- look-alikes


def by(place_of):
    return first(lambda m: m[..., None] * placed(place_of(m)))


def other_mask(m):
    """Counted for other tokens than are dispatched."""
    return m[..., None] * placed(jnp.cumsum(jnp.roll(m, 1, 0), 0) - 1)


def anybody_there(m):
    """Tokens are in the slots of all experts' counts."""
    place = (jnp.cumsum(m, 0) - 1).astype(jnp.int32)
    there = jnp.sum((place[:, :, None] == jnp.arange(C)).astype(m.dtype), 1) > 0
    return (there[:, None] & (m[..., None] > 0)).astype(m.dtype)


def through_slots(change):
    """Something is done to what experts give, or are given, that slots do not have each for itself."""

    def function(p, x):
        g = gates(p, x)
        dispatch = per_expert(one_hot(jnp.argmax(g, -1), E))
        given, taken = change
        y = taken(experts(p, given(jnp.einsum("td,tec->ecd", x, dispatch))))
        return jnp.einsum("ecd,tec->td", y, dispatch * jnp.max(g, -1)[:, None, None])

    return function


def as_it_is(slots):
    return slots


LOOK_ALIKES = {
    "another axis": by(lambda m: jnp.cumsum(m, 1) - 1),
    "rows are not counted": by(lambda m: jnp.broadcast_to(jnp.arange(T)[:, None] % 3, (T, E))),
    "not masked": first(lambda m: placed(jnp.cumsum(m, 0) - 1)),
    "masked with slot 0": first(lambda m: placed(jnp.cumsum(m, 0) * m)),
    "half a slot": first(lambda m: placed(jnp.cumsum(m, 0) * m - 0.5)),
    "a third, three times": by(lambda m: (jnp.cumsum(m, 0) - 1) * (1 / 3) * 3),
    "halved": by(lambda m: (jnp.cumsum(m, 0) - 1) / 2),
    "rounded": by(lambda m: jnp.round((jnp.cumsum(m, 0) - 1) * 0.5)),
    "clipped": by(lambda m: jnp.minimum(jnp.cumsum(m, 0) - 1, C - 1)),
    "around a large number": by(lambda m: (jnp.cumsum(m, 0) + 2.0**25) - (2.0**25 + 1)),
    "counted in bfloat16": by(lambda m: jnp.cumsum(m.astype(jnp.bfloat16), 0) - 1),
    "compared in bfloat16": first(
        lambda m: m[..., None] * (jnp.bfloat16(jnp.cumsum(m, 0) - 1)[..., None] == jnp.arange(C, dtype=jnp.bfloat16))
    ),
    "counted in bytes": by(lambda m: jnp.cumsum(m.astype(jnp.int8), 0) - 1),
    "counted twice": by(lambda m: 2 * jnp.cumsum(m, 0) - jnp.cumsum(m, 0)[::-1]),
    "no mask of ones": first(lambda m: m[..., None] * placed(jnp.cumsum(0.5 * m, 0))),
    "plus where it stands": by(lambda m: jnp.cumsum(m, 0) - jnp.arange(T)[:, None]),
    "other mask": first(other_mask),
    "two masks": first(lambda m: per_expert(m) + per_expert(jnp.roll(m, 1, 1))),
    "two masks at once": first(lambda m: ((per_expert(m) + per_expert(1 - m)) > 0).astype(m.dtype)),
    "anybody there": first(anybody_there),
    "doubled": first(lambda m: 2.0 * per_expert(m)),
    "second choices in front": lambda p, x: two_by_boolean_weights(p, x, behind=False),
    "second choices one further in front": lambda p, x: two_by_boolean_weights(p, x, further=1),
    "second choices in front, in groups": lambda p, x: two_in_groups(p, x, "none"),
    "weights that a larger part leaves, above zero": lambda p, x: two_in_groups(
        p, x, others_of=lambda g, first: g * (1 - 2 * first) - 0.1, there=lambda w: w > 0
    ),
    "weights less a part of them, above zero": lambda p, x: two_in_groups(
        p, x, others_of=lambda g, first: g * (0.5 - first), there=lambda w: w > 0
    ),
    "each choice counted from nothing": lambda p, x: choices_summed(p, x, "each choice from nothing"),
    "places of one expert chosen twice": lambda p, x: places_summed(p, x, twice),
    "choices counted by token": lambda p, x: choices_summed(p, x, "by token"),
    "one choice's expert, the other's slot": lambda p, x: choices_summed(
        p, x, dispatch_of=lambda kept, slot: sum_of(kept, slot[:, ::-1])
    ),
    "the weights of the other choice's slot": lambda p, x: choices_summed(
        p, x, combine_of=lambda w, kept, slot: sum_of(kept * w[..., None], slot[:, ::-1])
    ),
    "weights of choices less a constant": lambda p, x: choices_summed(
        p, x, combine_of=lambda w, kept, slot: sum_of(w[..., None] * kept - 0.1, slot)
    ),
    "choices subtracted": lambda p, x: choices_summed(
        p, x, dispatch_of=lambda kept, slot: jnp.einsum("tke,tkc->tec", kept * jnp.array([1, -1])[:, None], slot)
    ),
    "weights everywhere": first(per_expert, weight=lambda d, g, m: jnp.broadcast_to(m[..., None], d.shape)),
    "weights of either sign above zero": lambda p, x: dispatched_where_above_zero(
        p, x, lambda p, x: jnp.tanh(x @ p["router"]) - 0.9
    ),
    "bias of a slot": through_slots((as_it_is, lambda y: y * jnp.arange(1.0, 1 + C)[:, None])),
    "softmax over slots": through_slots((as_it_is, lambda y: jax.nn.softmax(y, 1))),
    "slots added up": through_slots((lambda s: s + jnp.sum(s, 1, keepdims=True), as_it_is)),
}  # fmt: skip
"""Left alone, with a reason."""

REORDERED = {
    "another's slot": first(per_expert, weight=lambda d, g, m: jnp.roll(d, 1, 0)),
    "the next slot": through_slots((lambda s: jnp.roll(s, 1, 1), as_it_is)),
    "slots turned around": through_slots((lambda s: s[:, ::-1], as_it_is)),
    "experts turned around": through_slots((lambda s: s[::-1], as_it_is)),
}
"""Left alone: no mixture is seen in them."""


def crowded(p):
    """All tokens choose the same experts, the others are empty."""
    return p | {"router": jnp.zeros_like(p["router"])}


ARGUMENTS = ((P, X), (crowded(P), X))
