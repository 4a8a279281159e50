"""Several losses that read parts of one product, or of what several products give: each is found."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.nn import log_softmax, one_hot
from support.catalogue import array
from support.compare import compare

B, T, D, V, K = 2, 6, 5, 9, 3


def loss_of(logits):
    """The losses of several heads or books, whose logits are a list."""

    def loss(x, w):
        labels = jnp.arange(B * T).reshape(B, T, 1)
        picked = (jnp.take_along_axis(log_softmax(z), labels % z.shape[-1], -1) for z in logits(x, w))
        return -sum(one.mean() * (i + 1) for i, one in enumerate(picked))

    return loss


def along(axis, join):
    def logits(x, w):
        z = join([x @ w[:, i * V : (i + 1) * V] for i in range(K)], axis)
        return [jax.lax.index_in_dim(z, i, axis, keepdims=False) for i in range(K)]

    return logits


def joined(arrays, axis):
    return jnp.concatenate([jnp.expand_dims(one, axis) for one in arrays], axis)


def reshaped(x, w):
    z = (x @ w).reshape(B, T, K, V)
    return [z[:, :, i] for i in range(K)]


def divided(x, w):
    return jnp.split(x @ w, [4, 13], -1)


PARTS = {
    "stacked by rows": along(1, jnp.stack),
    "stacked by heads": along(2, jnp.stack),
    "joined": along(2, joined),
    "columns of a reshaped product": reshaped,
    "columns": divided,
}


@pytest.mark.parametrize("name", PARTS)
def test_losses_of_parts_are_found(name):
    compared = compare(loss_of(PARTS[name]), [array(B, T, D, seed=1), array(D, K * V, seed=2)])
    assert compared.complaints == []
    assert (compared.report.counts()["cross_entropy"], compared.report.near_misses) == (K, ())


@pytest.mark.parametrize("sizes", [(V, V, V), (4, 9, 14)])
def test_losses_with_a_product_each_are_found(sizes):
    def logits(x, w):
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return [x @ w[:, start : start + n] for start, n in zip(starts, sizes, strict=True)]

    compared = compare(loss_of(logits), [array(B, T, D, seed=1), array(D, K * V, seed=2)])
    assert compared.complaints == []
    assert (compared.report.counts()["cross_entropy"], compared.report.near_misses) == (K, ())


@pytest.mark.parametrize("gathers", [True, False])
def test_labels_that_a_product_with_one_hot_vectors_picks_are_told_to_be_gathered(gathers):
    labels = jnp.arange(B * 4).reshape(B, 4) % V

    def loss(x, w):
        logs = log_softmax(x @ w)
        if gathers:
            picked = jnp.take_along_axis(logs, jnp.broadcast_to(labels[:, None], (B, T, 4)), -1)
        else:
            picked = jnp.einsum("btv,bnv->btn", logs, one_hot(labels, V))
        return jnp.sin(picked).sum() + jnp.cos(logs[:, :, 0]).sum()

    compared = compare(loss, [array(B, T, D, seed=1), array(D, V, seed=2)])
    assert compared.complaints == []
    assert compared.report.counts()["cross_entropy"] == gathers
    told = [(miss.reason, miss.advice) for miss in compared.report.near_misses]
    assert all("a product of the forward" in reason and "take_along_axis" in advice for reason, advice in told)
    assert bool(told) != gathers


@pytest.mark.parametrize("clipped", [False, True])
def test_gradients_of_examples_that_are_rows_say_that_they_are_not_summed(clipped):
    def gradients(x, w):
        def loss(x, w, label):
            return -log_softmax(jnp.tanh(x) @ w)[label]

        found = jax.vmap(jax.grad(loss, 1), (0, None, 0))(x, w, jnp.arange(len(x)))
        norms = jnp.sqrt((found**2).sum((1, 2)))
        return jnp.einsum("n,ndv->dv", jnp.minimum(1, 0.1 / norms), found) if clipped else found

    compared = compare(gradients, [array(T, D, seed=1), array(D, V, seed=2)], gradients=False)
    assert compared.complaints == []
    (miss,) = compared.report.near_misses
    assert "not summed over rows" in miss.reason
    assert "nothing has to be changed" in miss.advice
