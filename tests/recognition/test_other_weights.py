"""What is an attention but for its weights is named, and what only resembles that is not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from support.catalogue import array
from support.compare import compare, optimized_like_a_user

import autopallas

B, T, N, H, D = 2, 5, 3, 4, 12
X, W = array(B, T, D, seed=1), array(D, 3 * D, seed=2)


def heads(x, w):
    return (y.reshape(B, T, N, H) for y in jnp.split(x @ w, 3, -1))


def sigmoids(x, w):
    q, k, v = heads(x, w)
    return jnp.einsum("bnqk,bknh->bqnh", jax.nn.sigmoid(jnp.einsum("bqnh,bknh->bnqk", q, k) - 1.6), v)


def rectifiers(x, w):
    q, k, v = heads(jax.nn.silu(x), w)
    return jnp.einsum("bnqk,bknh->bqnh", jax.nn.relu(jnp.einsum("bqnh,bknh->bnqk", q, k)) / T, v)


def distances(x, w):
    q, k, v = heads(x, w)
    far = jnp.sum((q[:, :, None] - k[:, None]) ** 2, -1)
    return jnp.einsum("bqkn,bknh->bqnh", jax.nn.softmax(-far / 2, 2), v)


@pytest.mark.parametrize(
    "program, reason",
    [(sigmoids, "sigmoids of the scores"), (rectifiers, "rectified scores"), (distances, "squared differences")],
)
@pytest.mark.parametrize("backward", [False, True])
def test_other_weights_are_near_misses(program, reason, backward):
    def loss(x, w):
        return jnp.sum(jnp.sin(program(x, w)))

    compared = compare(jax.grad(loss, (0, 1)) if backward else program, (X, W), gradients=False)
    assert compared.complaints == []
    assert compared.counts() == 0
    (miss,) = [miss for miss in compared.report.near_misses if miss.op == "attention"]
    assert reason in miss.reason
    assert miss.advice


def test_rectified_scores_are_told_where_nothing_else_has_an_exponential_or_a_maximum():
    def attend(q, k, v):
        return jnp.einsum("bnqk,bknh->bqnh", jax.nn.relu(jnp.einsum("bqnh,bknh->bnqk", q, k)) / T, v)

    report = autopallas.explain(optimized_like_a_user(attend), *[jnp.ones((B, T, N, H))] * 3)
    assert ["rectified scores" in miss.reason for miss in report.near_misses if miss.op == "attention"] == [True]


def squared_rectifiers(q, k, v):
    return jnp.square(jax.nn.relu(jax.nn.silu(q) @ k.mT / 2)) @ v / T


@pytest.mark.parametrize(
    "program, reason",
    [
        (lambda q, k, v: jax.nn.sigmoid(q @ k.mT - 1.6) @ v, "sigmoids of the scores"),
        (squared_rectifiers, "rectified scores"),
    ],
)
def test_queries_keys_and_values_of_examples_and_heads_may_be_given(program, reason):
    compared = compare(program, [array(B, N, T, H, seed=i) for i in range(3)], gradients=False)
    assert compared.complaints == []
    (miss,) = [miss for miss in compared.report.near_misses if miss.op == "attention"]
    assert reason in miss.reason


def expanded_distances(x, w):
    q, k, v = heads(x, w)
    scores = 2 * jnp.einsum("bqnh,bknh->bnqk", q, k) - jnp.sum(k * k, -1).swapaxes(1, 2)[:, :, None]
    return jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(scores), v)


def test_distances_without_what_the_softmax_drops_are_attention():
    compared = compare(expanded_distances, (X, W))
    assert compared.complaints == []
    assert compared.counts() == 1


def experts(x, w):
    h = jnp.einsum("btd,edf->ebtf", x, w.reshape(3, D, D))
    return jnp.einsum("ebtf,efd->ebtd", jax.nn.sigmoid(h), w.reshape(3, D, D))


def models(x, w):
    first, second = w.reshape(3, D, D), jnp.stack([w[:, :D]] * 3)
    return jax.nn.relu(jnp.stack([x[0]] * 3) @ first) @ second


def gated_sequence(x, w):
    q, k, v = heads(x, w)
    return jax.nn.sigmoid(q) * jnp.einsum("bqnh,bknh->bnqk", jax.nn.relu(q), k).sum((1, 3))[..., None, None] * v


@pytest.mark.parametrize("program", [experts, models, gated_sequence])
def test_layers_of_several_models_and_gates_are_no_near_misses(program):
    compared = compare(program, (X, W), gradients=False)
    assert compared.complaints == []
    assert not [miss for miss in compared.report.near_misses if miss.op == "attention"]
