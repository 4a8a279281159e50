"""Programs by which readers of the code showed it to be wrong, each by what was wrong with it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.nn import log_softmax, logsumexp, softmax

from recognition.catalogue import array
from recognition.compare import compare
from recognition.losses import picked

T, D, V = 4, 8, 12
LABELS = jnp.arange(T) * 5 % V


def arguments():
    return array(T, D, seed=1), array(D, V, seed=2)


def total_of_squares(x, w):
    z = x @ w
    p = softmax(z)
    return -picked(log_softmax(z), LABELS).mean() * (p * p).sum()


def logarithm_of_everything(x, w):
    e = jnp.exp(x @ w)
    return jnp.log(e.sum()) + jnp.log(e.sum(-1)).sum()


def logarithm_of_a_contraction(x, w):
    e = jnp.exp(x @ w)
    return jnp.log(jnp.einsum("tv,tv->", e, jnp.ones_like(e))) + jnp.log(e.sum(-1)).sum()


def numbers_of_rows_in_a_contraction(x, w):
    z = x @ w
    return jnp.einsum("tv,t->", z, logsumexp(z, -1))


def reciprocals_in_a_contraction(x, w):
    z = x @ w
    return jnp.einsum("tv,t->", z, jnp.exp(-logsumexp(z, -1)))


def printed_on_the_way(x, w):
    z = x @ w
    jax.debug.callback(lambda _: None, z[0, 0])
    return -picked(log_softmax(z[:-1]), LABELS[1:]).mean()


def a_checkpoint_within_one(x, w):
    def model(x, w):
        return jax.checkpoint(lambda h, w: h @ w)(jnp.tanh(x), w)

    return -picked(log_softmax(jax.checkpoint(model)(x, w)), LABELS).mean()


PROGRAMS = [
    total_of_squares,
    logarithm_of_everything,
    logarithm_of_a_contraction,
    numbers_of_rows_in_a_contraction,
    reciprocals_in_a_contraction,
    printed_on_the_way,
    a_checkpoint_within_one,
]


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("program", PROGRAMS)
def test_losses_that_couple_rows_or_have_something_between(program, within):
    function = jax.value_and_grad(program, (0, 1)) if within else program
    compared = compare(function, arguments(), gradients=not within)
    assert compared.complaints == []


def test_a_selection_moves_no_further_than_to_the_logits():
    weights = array(80, D, D, seed=3) * 0.2

    def loss(x, w):
        for layer in weights:
            x = jnp.exp(-((x @ layer) ** 2))
        return -picked(log_softmax((x @ w)[:-1]), LABELS[1:]).mean()

    compared = compare(loss, arguments(), gradients=False)
    assert compared.complaints == []
    assert compared.counts("cross_entropy") == 1


def test_many_selections_of_the_same_logits_are_left_alone():
    def loss(x, w):
        z = jnp.tanh(x @ w)
        return sum(logsumexp(lax.dynamic_slice_in_dim(z, n % T, 1, 0)) for n in range(40))

    compared = compare(loss, arguments(), gradients=False)
    assert compared.complaints == []
