"""Losses that take the sigmoid of each logit are near misses, in any spelling; what only resembles one is nothing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.nn import log_sigmoid, one_hot, sigmoid, softplus
from support.catalogue import array
from support.compare import compare

B, T, D, V = 3, 7, 8, 5
LABELS = one_hot(jnp.arange(B * T).reshape(B, T) * 3 % V, V)
PAIRS = 2 * jnp.eye(B * T) - 1


def of_pairs(x, w):
    a = x.reshape(B * T, D)
    b = jnp.tanh(a @ (w @ w.T))
    return -log_sigmoid(PAIRS * (a @ b.T * 3.0 - 10)).sum(-1).mean()


def of_pairs_in_two_parts(x, w):
    a = x.reshape(B * T, D)
    b = jnp.tanh(a @ (w @ w.T))
    z = jnp.concatenate([a @ b.T, a @ jnp.roll(b, 1, 0).T], -1) - 10
    signs = jnp.concatenate([PAIRS, -jnp.ones_like(PAIRS)], -1)
    return -log_sigmoid(signs * z).sum(-1).mean()


def of_both_signs(x, w):
    z = x @ w
    return (-LABELS * log_sigmoid(z) - (1 - LABELS) * log_sigmoid(-z)).mean()


def by_hand(x, w):
    z = x @ w
    return (jnp.maximum(z, 0) - z * LABELS + jnp.log1p(jnp.exp(-jnp.abs(z)))).sum(-1).mean()


def of_probabilities(x, w):
    p = jnp.clip(sigmoid(x @ w), 1e-6, 1 - 1e-6)
    return -(LABELS * jnp.log(p) + (1 - LABELS) * jnp.log(1 - p)).mean()


def with_a_mask(x, w):
    z = x @ w
    kept = LABELS.argmax(-1, keepdims=True) > 1
    return jnp.where(kept, softplus(z) - LABELS * z, 0).sum() / kept.sum()


LOSSES = [of_pairs, of_pairs_in_two_parts, of_both_signs, by_hand, of_probabilities, with_a_mask]


@pytest.mark.parametrize("transform", ["forward", "gradient", "checkpoint", "examples"])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_of_sigmoids_is_a_near_miss(loss, transform):
    args = array(B, T, D, seed=1), array(D, V, seed=2)
    run = {
        "forward": loss,
        "gradient": jax.value_and_grad(loss, (0, 1)),
        "checkpoint": jax.value_and_grad(jax.checkpoint(loss), (0, 1)),
        "examples": jax.vmap(jax.value_and_grad(loss, 1), (0, None)),
    }[transform]
    if transform == "examples":
        args = jnp.stack([args[0], args[0] / 2]), args[1]
    compared = compare(run, args, gradients=False)
    assert compared.complaints == []
    assert compared.counts("cross_entropy") == 0
    misses = [miss for miss in compared.report.near_misses if miss.op == "cross_entropy"]
    assert ["the loss takes the sigmoid of each logit" in miss.reason for miss in misses] == [True]
    assert loss.__name__ in misses[0].location
    assert "jax.lax.map" in misses[0].advice


def divergence_from_a_normal(x, w):
    z = x @ w
    scale = softplus(z) + 1e-4
    return 0.5 * (z**2 + scale**2 - jnp.log(scale**2) - 1).sum()


def activation(x, w):
    return softplus(x @ w) @ w.T


def activation_that_is_pooled(x, w):
    z = x @ w
    return (z * jnp.tanh(softplus(z))).mean((0, 1))


def discriminator(x, w):
    return softplus(-(x @ w[:, :1])).mean()


def decay(x, w):
    return jnp.exp(jnp.cumsum(log_sigmoid(x @ w), 1)) @ w.T


def gradient_of_step_sizes(x, w):
    """Step sizes of a state-space model, whose rates all rows share: in their gradient they are added up."""

    def run(x, w, rates):
        step = softplus(x @ w)
        return jnp.sin(jnp.exp(-step[..., None] * jnp.exp(rates)) + step[..., None]).sum()

    return jax.grad(run, (0, 1, 2))(x, w, jnp.ones((V, 3)))


LOOK_ALIKES = [
    divergence_from_a_normal,
    activation,
    activation_that_is_pooled,
    discriminator,
    decay,
    gradient_of_step_sizes,
]


@pytest.mark.parametrize("function", LOOK_ALIKES)
def test_what_is_no_loss_of_sigmoids_is_no_near_miss(function):
    compared = compare(function, (array(B, T, D, seed=1), array(D, V, seed=2)))
    assert compared.complaints == []
    assert not [miss for miss in compared.report.near_misses if miss.op == "cross_entropy"]


def test_a_softmax_beside_a_loss_of_sigmoids_is_still_found():
    def loss(x, w, u):
        z = x @ u
        picked = (z * LABELS).sum(-1)
        return by_hand(x, w) + (jax.nn.logsumexp(z, -1) - picked).mean()

    args = array(B, T, D, seed=1), array(D, V, seed=2), array(D, V, seed=3)
    compared = compare(jax.value_and_grad(loss, (0, 1, 2)), args, gradients=False)
    assert compared.complaints == []
    assert compared.counts("cross_entropy") == 1
    assert len([miss for miss in compared.report.near_misses if miss.op == "cross_entropy"]) == 1
