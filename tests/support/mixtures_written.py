"""Mixtures of experts as people write them: by gathers, scatters, intervals of sorted rows, switches and loops."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from support.mixtures import E, K, at, biased, combine, expert, hidden, route

C = 8
"""Slots of each expert."""


def everyone(p: Any, x: Any) -> Any:
    """What every expert computes for every token, [T, E, D]."""
    return jnp.einsum("tef,efd->ted", hidden(p, x), p["down"])


# ---------------------------------------------------------------------- the experts' results are picked


def picked_along_an_axis(p, x):
    weights, chosen = route(p, x)
    y = jnp.take_along_axis(everyone(p, x), chosen[..., None], axis=1)
    return jnp.sum(y * weights[..., None], 1)


def picked_by_two_indices(p, x):
    weights, chosen = route(p, x)
    y = everyone(p, x)[jnp.arange(x.shape[0])[:, None], chosen]
    return jnp.einsum("tkd,tk->td", y, weights)


def picked_from_a_stack(p, x):
    weights, chosen = route(p, x)
    y = jnp.stack([expert(at(p, e), x) for e in range(E)], 1)
    return jnp.sum(jnp.take_along_axis(y, chosen[..., None], 1) * weights[..., None], 1)


def picked_token_by_token(p, x):
    weights, chosen = route(p, x)
    y = jax.vmap(lambda y, i: y[i])(everyone(p, x), chosen)
    return jnp.sum(y * weights[..., None], 1)


def the_best_is_picked(p, x):
    probabilities = jax.nn.softmax(x @ p["router"])
    best = jnp.argmax(probabilities, -1)
    y = jax.vmap(biased, (0, None))(at(p, slice(None)), x)
    return y[best, jnp.arange(x.shape[0])] * jnp.max(probabilities, -1)[:, None]


# ---------------------------------------------------------------------- the experts' matrices are gathered


def gathered_matrices(p, x):
    weights, chosen = route(p, x)
    gate, up, down = (p[name][chosen] for name in ("gate", "up", "down"))
    h = jax.nn.silu(jnp.einsum("td,tkdf->tkf", x, gate)) * jnp.einsum("td,tkdf->tkf", x, up)
    return jnp.einsum("tkf,tkfd,tk->td", h, down, weights)


def gathered_with_biases(p, x):
    weights, chosen = route(p, x)
    h = jax.nn.gelu(jnp.einsum("td,tkdf->tkf", x, jnp.take(p["gate"], chosen, axis=0)) + p["gate_bias"][chosen])
    y = jnp.einsum("tkf,tkfd->tkd", h, jnp.take(p["down"], chosen, axis=0)) + p["down_bias"][chosen]
    return jnp.sum(y * weights[..., None], 1)


def gathered_for_the_best(p, x):
    best = jnp.argmax(x @ p["router"], -1)
    h = jax.nn.relu(jnp.einsum("td,tdf->tf", x, p["gate"][best]))
    return jnp.einsum("tf,tfd->td", h, p["down"][best])


def gathered_token_by_token(p, x):
    def one(x, weights, chosen):
        def own(i):
            return expert(at(p, i), x)

        return jnp.sum(jax.vmap(own)(chosen) * weights[:, None], 0)

    return jax.vmap(one)(x, *route(p, x))


def gathered_choice_by_choice(p, x):
    weights, chosen = route(p, x)
    out = jnp.zeros_like(x)
    for k in range(K):
        q = at(p, chosen[:, k])
        h = jax.nn.silu(jnp.einsum("td,tdf->tf", x, q["gate"])) * jnp.einsum("td,tdf->tf", x, q["up"])
        out += weights[:, k, None] * jnp.einsum("tf,tfd->td", h, q["down"])
    return out


# ---------------------------------------------------------------------- intervals of sorted rows


def sorted_rows(p, x):
    """(rows by expert, the way back, rows of each expert, weights)."""
    weights, chosen = route(p, x)
    order = jnp.argsort(chosen.ravel())
    counts = jnp.sum(jax.nn.one_hot(chosen, E, dtype=jnp.int32), (0, 1))
    return jnp.repeat(x, K, 0)[order], jnp.argsort(order), counts, weights


def collected(y, back, weights):
    return jnp.einsum("tkd,tk->td", y[back].reshape(*weights.shape, -1), weights)


def rows_in_intervals(p, x):
    rows, back, counts, weights = sorted_rows(p, x)
    ends = jnp.cumsum(counts)
    starts = jnp.concatenate([jnp.array([0]), ends[:-1]])
    y = jax.vmap(expert, (0, None))(at(p, slice(None)), rows)
    position = jnp.arange(rows.shape[0])
    masks = (position[None] >= starts[:, None]) & (position[None] < ends[:, None])
    return collected(jnp.sum(y * masks[..., None], 0), back, weights)


def rows_in_intervals_repeated(p, x):
    rows, back, counts, weights = sorted_rows(p, x)
    ends = jnp.cumsum(counts)
    starts = ends - counts
    h = jnp.repeat(rows[None], E, 0)
    h = jax.nn.gelu(jnp.einsum("ecd,edf->ecf", h, p["gate"])) * jnp.einsum("ecd,edf->ecf", h, p["up"])
    y = jnp.einsum("ecf,efd->ecd", h, p["down"])
    position = jnp.arange(rows.shape[0])
    inside = jnp.logical_and(starts[:, None] <= position, position < ends[:, None])
    return collected(jnp.where(inside[..., None], y, 0).sum(0), back, weights)


def segments_in_a_loop(p, x):
    rows, back, counts, weights = sorted_rows(p, x)
    ends = jnp.cumsum(counts)

    def step(e, out):
        position = jnp.arange(rows.shape[0])
        mine = (position >= ends[e] - counts[e]) & (position < ends[e])
        return out + jnp.where(mine[:, None], expert(at(p, e), rows), 0)

    return collected(lax.fori_loop(0, E, step, jnp.zeros_like(rows)), back, weights)


def segments_in_a_scan(p, x):
    rows, back, counts, weights = sorted_rows(p, x)
    position = jnp.arange(rows.shape[0])

    def step(carry, q):
        start, out = carry
        q, count = q
        mine = (position >= start) & (position < start + count)
        return (start + count, jnp.where(mine[:, None], expert(q, rows), out)), None

    start = (jnp.int32(0), jnp.zeros_like(rows))
    return collected(lax.scan(step, start, (at(p, slice(None)), counts))[0][1], back, weights)


def sorted_numbers(p, x):
    """Each row's own expert, by the sorted numbers of experts."""
    weights, chosen = route(p, x)
    order = jnp.argsort(chosen.ravel())
    rows, own = jnp.repeat(x, K, 0)[order], chosen.ravel()[order]
    y = jnp.zeros_like(rows)
    for e in range(E):
        y = jnp.where((own == e)[:, None], expert(at(p, e), rows), y)
    return collected(y, jnp.argsort(order), weights)


# ---------------------------------------------------------------------- switches


def switched_token_by_token(p, x):
    branches = [lambda x, e=e: expert(at(p, e), x) for e in range(E)]
    best = jnp.argmax(x @ p["router"], -1)
    return jax.vmap(lambda x, e: lax.switch(e, branches, x))(x, best)


def switched_with_weights(p, x):
    weights, chosen = route(p, x)
    branches = [lambda x, e=e: expert(at(p, e), x) for e in range(E)]
    one = jax.vmap(lambda x, e: lax.switch(e, branches, x), (None, 0))
    return jnp.sum(jax.vmap(one)(x, chosen) * weights[..., None], 1)


def selected_one_after_the_other(p, x):
    best = jnp.argmax(x @ p["router"], -1)[:, None]
    return jnp.select([best == e for e in range(E)], [biased(at(p, e), x) for e in range(E)])


def where_after_where(p, x):
    best, out = jnp.argmax(x @ p["router"], -1)[:, None], jnp.zeros_like(x)
    for e in range(E):
        out = jnp.where(best == e, expert(at(p, e), x), out)
    return out


# ---------------------------------------------------------------------- loops over experts


def fori_loop(p, x):
    c = combine(p, x)
    return lax.fori_loop(0, E, lambda e, out: out + c[:, e][:, None] * expert(at(p, e), x), jnp.zeros_like(x))


def fori_loop_that_compares(p, x):
    weights, chosen = route(p, x)

    def step(e, out):
        own = jnp.sum(jnp.where(chosen == e, weights, 0), -1, keepdims=True)
        return out + own * biased(at(p, e), x)

    return lax.fori_loop(0, E, step, jnp.zeros_like(x))


def scan_with_columns(p, x):
    def step(out, q):
        q, column = q
        return out + column[:, None] * expert(q, x), None

    return lax.scan(step, jnp.zeros_like(x), (at(p, slice(None)), combine(p, x).T))[0]


def scan_by_number(p, x):
    c = combine(p, x)

    def step(out, e):
        return out + jnp.take(c, e, axis=1)[:, None] * expert(at(p, e), x), None

    return lax.scan(step, jnp.zeros_like(x), jnp.arange(E))[0]


def map_and_sum(p, x):
    y = lax.map(lambda q: q[1][:, None] * expert(q[0], x), (at(p, slice(None)), combine(p, x).T))
    return jnp.sum(y, 0)


def map_by_number(p, x):
    c = combine(p, x)
    return jnp.sum(lax.map(lambda e: c[:, e][:, None] * biased(at(p, e), x), jnp.arange(E)), 0)


# ---------------------------------------------------------------------- slots, by scatter and gather


def slot_numbers(p, x):
    """(weights, experts, slots), each [T, K]; first choices come first."""
    weights, chosen = route(p, x)
    flat = chosen.T.ravel()
    mine = jax.nn.one_hot(flat, E, dtype=jnp.int32)
    place = (jnp.cumsum(mine, 0) * mine - 1).max(-1)
    return weights, chosen, place.reshape(K, -1).T


def in_slots(p, slots):
    h = jax.nn.silu(jnp.einsum("ecd,edf->ecf", slots, p["gate"])) * jnp.einsum("ecd,edf->ecf", slots, p["up"])
    return jnp.einsum("ecf,efd->ecd", h, p["down"])


def scattered_to_slots(p, x):
    weights, chosen, place = slot_numbers(p, x)
    slots = jnp.zeros((E, C, x.shape[-1]), x.dtype).at[chosen.ravel(), place.ravel()].add(jnp.repeat(x, K, 0))
    y = in_slots(p, slots)[chosen, place]
    y = y * ((chosen < E) & (place < C))[..., None]
    return jnp.einsum("tkd,tk->td", y, weights)


def set_in_slots(p, x):
    weights, chosen, place = slot_numbers(p, x)
    slots = jnp.zeros((E, C, x.shape[-1]), x.dtype).at[chosen, place].set(x[:, None], mode="drop")
    y = in_slots(p, slots).at[chosen, place].get(mode="fill", fill_value=0)
    return jnp.sum(y * weights[..., None], 1)


def weights_in_slots(p, x):
    weights, chosen, place = slot_numbers(p, x)
    weights = weights * (place < C)
    slots = jnp.zeros((E, C, x.shape[-1]), x.dtype).at[chosen, place].add(jnp.repeat(x[:, None], K, 1))
    return jnp.einsum("tkd,tk->td", in_slots(p, slots)[chosen, place], weights)


def slots_by_sorting(p, x):
    """Slots of sorted rows: the position minus where the expert's rows begin."""
    weights, chosen = route(p, x)
    order = jnp.argsort(chosen.ravel())
    own = chosen.ravel()[order]
    counts = jnp.bincount(own, length=E)
    place = jnp.arange(own.size) - (jnp.cumsum(counts) - counts)[own]
    token = order // K
    slots = jnp.zeros((E, C, x.shape[-1]), x.dtype).at[own, place].set(x[token], mode="drop")
    y = in_slots(p, slots).at[own, place].get(mode="fill", fill_value=0)
    return jnp.zeros_like(x).at[token].add(y * weights.ravel()[order][:, None])


def tokens_of_each_expert(p, x):
    """For each expert the numbers of its tokens, as many as there are tokens at most."""
    weights, chosen = route(p, x)
    out = jnp.zeros_like(x)
    for e in range(E):
        own = jnp.sum(jnp.where(chosen == e, weights, 0), -1)
        (token,) = jnp.nonzero(jnp.any(chosen == e, -1), size=x.shape[0], fill_value=x.shape[0])
        y = expert(at(p, e), x.at[token].get(mode="fill", fill_value=0))
        out = out.at[token].add(y * own.at[token].get(mode="fill", fill_value=0)[:, None], mode="drop")
    return out


# ---------------------------------------------------------------------- experts choose tokens


def experts_choose_by_einsum(p, x):
    gates = jax.nn.softmax(x @ p["router"])
    weights, token = lax.top_k(gates.T, C // 2)
    dispatch = jax.nn.one_hot(token, x.shape[0])
    y = in_slots(p, jnp.einsum("ect,td->ecd", dispatch, x))
    return jnp.einsum("ect,ec,ecd->td", dispatch, weights, y)


def experts_choose_by_gather(p, x):
    gates = jax.nn.softmax(x @ p["router"])
    weights, token = lax.top_k(gates.T, C // 2)
    y = in_slots(p, x[token]) * weights[..., None]
    return jnp.zeros_like(x).at[token].add(y)


def experts_choose_in_a_row(p, x):
    """Negative indices are counted from the end after the tokens of all experts were put in a row."""
    gates = jax.nn.softmax(x @ p["router"])
    weights, token = lax.top_k(gates.T, C // 2)
    y = in_slots(p, x[token]) * weights[..., None]
    return jnp.zeros_like(x).at[token.reshape(-1)].add(y.reshape(-1, x.shape[-1]))


def experts_choose_in_vmoe(p, x):
    gates = jax.nn.softmax(x @ p["router"])
    dispatch = jax.nn.one_hot(lax.top_k(gates.T, C // 2)[1], x.shape[0], axis=0, dtype=jnp.bool_)
    slots = jnp.einsum("sec,sd->ecd", dispatch, x)
    return jnp.einsum("sec,ecd->sd", jnp.einsum("se,sec->sec", gates, dispatch), in_slots(p, slots))


def experts_choose_by_gather_and_einsum(p, x):
    gates = jax.nn.softmax(x @ p["router"])
    weights, token = lax.top_k(gates.T, C // 2)
    put_back = jax.nn.one_hot(token, x.shape[0]) * weights[..., None]
    return jnp.einsum("ecd,ect->td", in_slots(p, x[token]), put_back)


# ---------------------------------------------------------------------- ragged products


def ragged(p, x):
    rows, back, counts, weights = sorted_rows(p, x)
    h = jax.nn.silu(lax.ragged_dot(rows, p["gate"], counts)) * lax.ragged_dot(rows, p["up"], counts)
    return collected(lax.ragged_dot(h, p["down"], counts), back, weights)


def ragged_added(p, x):
    weights, chosen = route(p, x)
    order = jnp.argsort(chosen.ravel())
    counts = jnp.bincount(chosen.ravel(), length=E).astype(jnp.int32)
    y = lax.ragged_dot(jax.nn.gelu(lax.ragged_dot(x[order // K], p["gate"], counts)), p["down"], counts)
    return jnp.zeros_like(x).at[order // K].add(y * weights.ravel()[order][:, None])


KINDS = {
    "picked": [picked_along_an_axis, picked_by_two_indices, picked_from_a_stack, picked_token_by_token,
               the_best_is_picked],
    "gathered": [gathered_matrices, gathered_with_biases, gathered_for_the_best, gathered_token_by_token,
                 gathered_choice_by_choice],
    "intervals": [rows_in_intervals, rows_in_intervals_repeated, segments_in_a_loop, segments_in_a_scan,
                  sorted_numbers],
    "switches": [switched_token_by_token, switched_with_weights, selected_one_after_the_other, where_after_where],
    "loops": [fori_loop, fori_loop_that_compares, scan_with_columns, scan_by_number, map_and_sum, map_by_number],
    "slots": [scattered_to_slots, set_in_slots, weights_in_slots, slots_by_sorting, tokens_of_each_expert],
    "expert choice": [experts_choose_by_einsum, experts_choose_by_gather, experts_choose_in_a_row,
                      experts_choose_in_vmoe, experts_choose_by_gather_and_einsum],
    "ragged": [ragged, ragged_added],
}  # fmt: skip
SITES = {ragged: 3, ragged_added: 2, gathered_choice_by_choice: 2}
"""How many sites a program has, where it is not one."""
