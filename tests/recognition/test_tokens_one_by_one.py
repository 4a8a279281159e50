"""Mixtures that go through their tokens in a loop, or select among experts in a chain, are named."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from support.compare import optimized_like_a_user
from support.mixtures import E, K, P, X, at, expert, route


def matrices_of_each_token(p, x, over):
    weights, chosen = route(p, x)

    def one(token):
        x, w, c = token
        h = jax.nn.silu(jnp.einsum("d,kdf->kf", x, p["gate"][c])) * jnp.einsum("d,kdf->kf", x, p["up"][c])
        return jnp.einsum("kf,kfd,k->d", h, p["down"][c], w)

    return over(one, (x, weights, chosen))


def matrices_that_a_step_chooses(p, x, over):
    def one(x):
        (w,), (c,) = route(p, x[None])
        return sum(w[k] * (jax.nn.relu(x @ p["up"][c[k]]) @ p["down"][c[k]]) for k in range(K))

    return over(one, x)


def stacks_that_a_step_chooses(p, x, over):
    def one(x):
        (w,), (c,) = route(p, x[None])
        h = jax.nn.silu(jnp.einsum("d,kdf->kf", x, p["gate"][c])) * jnp.einsum("d,kdf->kf", x, p["up"][c])
        return jnp.einsum("kf,kfd,k->d", h, p["down"][c], w)

    return over(one, x)


def branch_of_each_token(p, x, over):
    weights, chosen = route(p, x)
    branches = [lambda x, e=e: expert(at(p, e), x[None])[0] for e in range(E)]

    def one(token):
        x, w, c = token
        return sum(w[k] * lax.switch(c[k], branches, x) for k in range(K))

    return over(one, (x, weights, chosen))


def intervals(p, x, both_ends):
    weights, chosen = route(p, x)
    order = jnp.argsort(chosen.reshape(-1))
    ends = jnp.cumsum(jnp.bincount(chosen.reshape(-1), length=E))
    rows, row = x[order // K], jnp.arange(order.size)[:, None]
    if both_ends:
        starts = jnp.concatenate([jnp.zeros(1, ends.dtype), ends[:-1]])
        inside = [(starts[e] <= row) & (row < ends[e]) for e in range(E)]
        y = sum(jnp.where(inside[e], expert(at(p, e), rows), 0) for e in range(E))
    else:
        y = expert(at(p, E - 1), rows)
        for e in reversed(range(E - 1)):
            y = jnp.where(row < ends[e], expert(at(p, e), rows), y)
    out = jnp.zeros_like(y).at[order].set(y).reshape(*chosen.shape, -1)
    return jnp.sum(out * weights[..., None], 1)


def report(function, backward):
    loss = jax.value_and_grad(lambda p, x: jnp.sin(function(p, x)).mean())
    optimized = optimized_like_a_user(loss if backward else function)
    jax.jit(optimized).lower(P, X)
    return optimized.report()


def mapped(one, tokens):
    return jax.vmap(one)(tokens)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "train step"])
@pytest.mark.parametrize(
    "function",
    [matrices_of_each_token, matrices_that_a_step_chooses, stacks_that_a_step_chooses, branch_of_each_token],
)
def test_a_loop_over_tokens_is_named_and_the_advice_is_right(function, backward):
    found = report(lambda p, x: function(p, x, lax.map), backward)
    assert found.counts()["grouped_matmul"] == 0
    (miss,) = [miss for miss in found.near_misses if miss.op == "grouped_matmul"]
    assert "one by one" in miss.reason
    assert "jax.vmap" in miss.advice
    assert __file__ in miss.location
    assert report(lambda p, x: function(p, x, mapped), backward).counts()["grouped_matmul"] >= 1


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "train step"])
def test_a_chain_of_selections_is_named_and_the_advice_is_right(backward):
    found = report(lambda p, x: intervals(p, x, both_ends=False), backward)
    assert found.counts()["grouped_matmul"] == 0
    (miss,) = [miss for miss in found.near_misses if miss.op == "grouped_matmul"]
    assert "chain" in miss.reason
    assert "both ends" in miss.advice
    found = report(lambda p, x: intervals(p, x, both_ends=True), backward)
    assert found.counts()["grouped_matmul"] == 1
    assert found.near_misses == ()


def test_tokens_that_follow_from_those_before_are_not_named():
    """There is nothing to compute at once, so that the advice would be wrong."""

    def generated(p, x):
        def one(x, _):
            (w,), (c,) = route(p, x[None])
            return x + w[0] * (jax.nn.relu(x @ p["up"][c[0]]) @ p["down"][c[0]]), None

        return lax.scan(one, x[0], None, length=3)[0]

    assert report(generated, backward=False).near_misses == ()


def test_layers_that_choose_for_one_token_are_not_named():
    def layers(p, x):
        def layer(x, p):
            (w,), (c,) = route(p, x[None])
            return x + w[0] * (jax.nn.relu(x @ p["up"][c[0]]) @ p["down"][c[0]]), None

        return lax.scan(layer, x[0], jax.tree.map(lambda w: jnp.stack([w, w / 2]), p))[0]

    assert report(layers, backward=False).near_misses == ()


def test_layers_that_a_loop_picks_are_no_experts():
    """The number of a layer is counted, or is given: no choice among experts."""

    def layers(w, x, numbers):
        return lax.scan(lambda x, n: (jnp.tanh(x @ w[n]), jnp.argmax(x, -1)), x, numbers)

    optimized = optimized_like_a_user(layers)
    jax.jit(optimized).lower(jnp.ones((4, 8, 8)), jnp.ones((3, 8)), jnp.arange(4))
    assert optimized.report().near_misses == ()


def test_selections_among_something_else_are_no_chain():
    def pieces(w, x):
        row = jnp.arange(x.shape[0])[:, None]
        return jnp.where(row < 2, x @ w[0], jnp.where(row < 4, x * 2, jnp.where(row < 5, x @ w[1], x)))

    optimized = optimized_like_a_user(pieces)
    jax.jit(optimized).lower(jnp.ones((4, 8, 8)), jnp.ones((6, 8)))
    assert optimized.report().near_misses == ()
