"""Losses with rows of which nothing is left, and with indices that are out of range: what a fresh reader got wrong."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.catalogue import array
from support.compare import compiled, optimized_like_a_user

X, W = array(7, 3, seed=0), array(3, 5, seed=1)
SHOWN = (jnp.arange(35).reshape(7, 5) % 3 != 0).at[2].set(False)
"""Of row 2 nothing is shown."""
VALID = jnp.arange(7) != 2
LABELS = jnp.array([1, 4, 2, 0, 3, 1, 2])


def agree(function, *args, count=1):
    """Value and gradients are the original's, NaN and infinity by place."""
    whole = lambda x, w: jnp.sin(function(x, w)).sum()  # noqa: E731
    for one in (function, jax.value_and_grad(whole, (0, 1))):
        optimized = optimized_like_a_user(one)
        given, expected = compiled(optimized)(*args), compiled(one)(*args)
        for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * np.nanmax(np.abs(np.where(np.isinf(b), 0, b))))
        if one is function and count:
            assert optimized.report().counts()["cross_entropy"] == count


@pytest.mark.parametrize("indices", [[0, 1, 7], [0, -8, 3], [6, 6, 2]])
@pytest.mark.parametrize("mode", [None, "promise_in_bounds", "clip", "fill"])
def test_a_row_that_is_out_of_range_gives_no_gradient_to_another(indices, mode):
    chosen, labels = jnp.array(indices), LABELS[:3]

    def loss(x, w):
        z = x @ w + 0.1
        log_p = jax.nn.log_softmax(z[chosen] if mode is None else z.at[chosen].get(mode=mode))
        return -jnp.take_along_axis(log_p, labels[:, None], 1)[:, 0]

    agree(loss, X, W, count=None)


def masked_log_p(x, w):
    return jax.nn.log_softmax(jnp.where(SHOWN, x @ w, -jnp.inf))


ONE_HOT = jax.nn.one_hot(LABELS, 5)
LOSSES = {
    "where": lambda x, w: jnp.where(SHOWN, masked_log_p(x, w), 0).sum(1),
    "bias": lambda x, w: jnp.where(SHOWN, jax.nn.log_softmax(x @ w + jnp.where(SHOWN, 0, -jnp.inf)), 0).sum(1),
    "one-hot": lambda x, w: jnp.where(VALID[:, None], masked_log_p(x, w) * jnp.where(SHOWN, ONE_HOT, 0), 0).sum(1),
    "labels": lambda x, w: jnp.where(
        VALID[:, None] & SHOWN & (LABELS[:, None] == jnp.arange(5)), masked_log_p(x, w), 0
    ).sum(1),
    "mean": lambda x, w: jnp.where(VALID[:, None] & SHOWN, masked_log_p(x, w), 0).mean(1),
    "scaled": lambda x, w: jnp.where(SHOWN, (x @ w) / jnp.where(SHOWN, jnp.exp(x @ w), 0).sum(1, keepdims=True), 0).sum(
        1
    ),
    "again": lambda x, w: jax.nn.logsumexp(jnp.where(SHOWN, masked_log_p(x, w), -jnp.inf), axis=1),
}


@pytest.mark.parametrize("name", LOSSES)
def test_where_nothing_is_shown_numbers_of_the_row_do_not_count(name):
    given, expected = compiled(optimized_like_a_user(LOSSES[name]))(X, W), compiled(LOSSES[name])(X, W)
    np.testing.assert_allclose(given, expected, rtol=2e-5, atol=1e-5)


def test_a_row_that_is_padding_may_hold_anything():
    x = X.at[2].set(jnp.nan)
    agree(lambda x, w: jnp.where(VALID[:, None], jax.nn.log_softmax(x @ w) * ONE_HOT, 0).sum(1), x, W)


@pytest.mark.parametrize("normalised", ["maximum", "logsumexp"])
def test_a_masked_difference_that_is_normalised_again(normalised):
    def entropy(x, w):
        z = jnp.where(SHOWN, x @ w, -jnp.inf)
        d = jnp.where(SHOWN, z - lax.stop_gradient(z.max(1, keepdims=True)), -jnp.inf)
        return jax.nn.logsumexp(d, axis=1) if normalised == "logsumexp" else jnp.exp(d).sum(1) + jnp.exp(d.max(1))

    given, expected = compiled(optimized_like_a_user(entropy))(X, W), compiled(entropy)(X, W)
    np.testing.assert_allclose(given, expected, rtol=2e-5, atol=1e-6)
