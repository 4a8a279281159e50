"""Mixtures of experts in which every expert computes every token, in the spellings that people use."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

T, D, F, E, K = 12, 8, 10, 4, 2
"""Tokens, model width, hidden width, experts, experts of each token."""


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape) * 0.5, jnp.float32)


X = normal(0, T, D)
P = {
    "router": normal(1, D, E), "gate": normal(2, E, D, F), "up": normal(3, E, D, F), "down": normal(4, E, F, D),
    "gate_bias": normal(5, E, F), "down_bias": normal(6, E, D),
}  # fmt: skip
SPLIT = [{name: P[name][e] for name in P if name != "router"} for e in range(E)]
"""The experts in arrays of their own."""


def route(p: Any, x: Any) -> tuple[Any, Any]:
    """Weights and numbers of the K best experts, [..., K]."""
    weights, chosen = lax.top_k(jax.nn.softmax(x @ p["router"]), K)
    return weights / weights.sum(-1, keepdims=True), chosen


def combine(p: Any, x: Any) -> Any:
    """The weight of each expert, [..., E]: zero but for K."""
    weights, chosen = route(p, x)
    return jnp.sum(jax.nn.one_hot(chosen, E) * weights[..., None], -2)


def hidden(p: Any, x: Any) -> Any:
    """[T, E, F]."""
    return jax.nn.silu(jnp.einsum("td,edf->tef", x, p["gate"])) * jnp.einsum("td,edf->tef", x, p["up"])


def expert(p: Any, x: Any) -> Any:
    """One expert with a gate."""
    return (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]


def biased(p: Any, x: Any) -> Any:
    """One expert with biases."""
    return jax.nn.relu(x @ p["gate"] + p["gate_bias"]) @ p["down"] + p["down_bias"]


def at(p: Any, e: Any) -> Any:
    return {name: p[name][e] for name in p if name != "router"}


# ---------------------------------------------------------------------- as one contraction


def one_einsum(p, x):
    return jnp.einsum("tef,efd,te->td", hidden(p, x), p["down"], combine(p, x))


def weighted_before_the_last_product(p, x):
    return jnp.einsum("tef,efd->td", hidden(p, x) * combine(p, x)[..., None], p["down"])


def sum_after_a_product(p, x):
    y = jnp.einsum("tef,efd->ted", jax.nn.gelu(jnp.einsum("td,edf->tef", x, p["gate"])), p["down"])
    return jnp.sum(y * combine(p, x)[..., None], 1)


def biases_and_relu(p, x):
    h = jax.nn.relu(jnp.einsum("td,edf->etf", x, p["gate"]) + p["gate_bias"][:, None])
    y = jnp.einsum("etf,efd->etd", h, p["down"]) + p["down_bias"][:, None]
    return jnp.einsum("etd,te->td", y, combine(p, x))


def weights_by_einsum(p, x):
    weights, chosen = route(p, x)
    c = jnp.einsum("tk,tke->te", weights, jax.nn.one_hot(chosen, E))
    return jnp.einsum("tef,efd,te->td", hidden(p, x), p["down"], c)


def scattered_weights(p, x):
    weights, chosen = route(p, x)
    c = jnp.zeros((T, E)).at[jnp.arange(T)[:, None], chosen].set(weights)
    return jnp.einsum("ted,te->td", jax.vmap(biased, (0, None), 1)(at(p, slice(None)), x), c)


def masked_probabilities(p, x):
    probabilities = jax.nn.softmax(x @ p["router"])
    _, chosen = lax.top_k(probabilities, K)
    c = jnp.where(jax.nn.one_hot(chosen, E).sum(1) > 0, probabilities, 0.0)
    return jnp.einsum("tef,efd,te->td", hidden(p, x), p["down"], c / c.sum(-1, keepdims=True))


def two_choices(p, x):
    probabilities = jax.nn.softmax(x @ p["router"])
    first = jax.nn.one_hot(jnp.argmax(probabilities, -1), E)
    second = jax.nn.one_hot(jnp.argmax(probabilities * (1 - first), -1), E)
    c = probabilities * first + probabilities * second
    return jnp.einsum("tef,efd,te->td", hidden(p, x), p["down"], c / jnp.sum(c, -1, keepdims=True))


def the_best_alone(p, x):
    probabilities = jax.nn.softmax(x @ p["router"])
    y = jnp.einsum("tef,efd->ted", hidden(p, x), p["down"])
    mine = jnp.argmax(probabilities, -1)[:, None] == jnp.arange(E)
    return jnp.sum(jnp.where(mine[..., None], y, 0), 1) * jnp.max(probabilities, -1)[:, None]


def masked_tokens(p, x):
    mine = jax.nn.one_hot(route(p, x)[1][:, 0], E)
    y = jnp.einsum("ted,edf->tef", x[:, None] * mine[..., None], p["gate"])
    return jnp.sum(jnp.einsum("tef,efd->ted", jax.nn.relu(y), p["down"]), 1)


def mapped_over_experts(p, x):
    y = jax.vmap(expert, (0, None))(at(p, slice(None)), x)
    return jnp.einsum("etd,te->td", y, combine(p, x))


def sequences(p, x):
    x = x.reshape(3, 4, D)
    h = jax.nn.silu(jnp.einsum("bsd,edf->bsef", x, p["gate"]))
    return jnp.einsum("bsed,bse->bsd", jnp.einsum("bsef,efd->bsed", h, p["down"]), combine(p, x))


def one_choice_for_a_sequence(p, x):
    x = x.reshape(3, 4, D)
    mine = jax.nn.one_hot(jnp.argmax(x.mean(1) @ p["router"], -1), E)
    h = jax.nn.silu(jnp.einsum("bsd,edf->bsef", x, p["gate"]))
    return jnp.einsum("bsed,be->bsd", jnp.einsum("bsef,efd->bsed", h, p["down"]), mine)


def mapped_over_examples(p, x):
    return jax.vmap(lambda x: one_einsum(p, x))(x.reshape(3, 4, D))


# ---------------------------------------------------------------------- one expert after the other


def loop_with_columns_of_weights(p, x):
    c, out = combine(p, x), jnp.zeros_like(x)
    for e in range(E):
        out = out + c[:, e : e + 1] * expert(at(p, e), x)
    return out


def loop_that_compares(p, x):
    (weights, chosen), out = route(p, x), jnp.zeros_like(x)
    for e in range(E):
        out += jnp.sum(jnp.where(chosen == e, weights, 0), -1)[:, None] * biased(at(p, e), x)
    return out


def sum_of_a_list(p, x):
    chosen = route(p, x)[1][:, :1]
    own = [jax.tree.map(lambda a: a * 1.5, at(p, e)) for e in range(E)]
    return sum(jnp.where(chosen == e, expert(q, x), 0) for e, q in enumerate(own))


def stacked_list(p, x):
    return jnp.einsum("etd,te->td", jnp.stack([expert(at(p, e), x) for e in range(E)]), combine(p, x))


def stacked_inside(p, x):
    y = jnp.stack([biased(at(p, e), x) for e in range(E)], 1)
    return jnp.sum(y * combine(p, x)[..., None], 1)


ONE_SITE = [
    one_einsum, weighted_before_the_last_product, sum_after_a_product, biases_and_relu, weights_by_einsum,
    scattered_weights, masked_probabilities, two_choices, the_best_alone, masked_tokens, mapped_over_experts, sequences,
    one_choice_for_a_sequence, mapped_over_examples, loop_with_columns_of_weights, loop_that_compares, sum_of_a_list,
    stacked_list, stacked_inside,
]  # fmt: skip
"""Found with their backward too, where the program holds it."""


def scan_that_adds(p, x):
    weights, chosen = route(p, x)

    def body(out, q):
        q, e = q
        return out + jnp.sum(jnp.where(chosen == e, weights, 0), -1)[:, None] * expert(q, x), None

    return lax.scan(body, jnp.zeros_like(x), (at(p, slice(None)), jnp.arange(E)))[0]


def scan_that_stacks(p, x):
    return jnp.einsum("etd,te->td", lax.map(lambda q: expert(q, x), at(p, slice(None))), combine(p, x))


IN_LOOPS = [scan_that_adds, scan_that_stacks]
"""One expert after the other in a loop of the program."""
