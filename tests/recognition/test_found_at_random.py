"""Programs that the generator of random programs has found, each by what was wrong with it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import autopallas
from recognition.catalogue import ODD, array, bhtd
from recognition.compare import compare, compiled, measured, optimized_like_a_user
from recognition.oracle import evaluate


@pytest.mark.parametrize("size", [1, 400])
def test_rows_without_keys_give_no_gradient_of_the_values(size):
    """With large scores the backward takes maxima and sums anew, and those of such a row are -inf and 0."""
    q, k, v = bhtd(ODD, jnp.float32)
    shown = (jnp.arange(q.shape[-2]) < 4)[:, None] & (jnp.arange(k.shape[-2]) < 6)

    def attend(q, k, v):
        return jax.nn.softmax(q @ k.mT * size, where=shown) @ v

    for gradients in (True, False):
        compared = compare(attend, (q, k, v), gradients)
        assert compared.complaints == []
        assert compared.counts() == 1, compared.reasons()


@pytest.mark.parametrize("values_first", [False, True])
def test_a_second_contraction_that_is_written_as_a_sum(values_first):
    q, k, v = (array(2, n, 5, seed=n) for n in (4, 6, 6))

    def attend(q, k, v):
        p, values = jax.nn.softmax(q @ k.mT)[..., None], v[:, None]
        return (values * p if values_first else p * values).sum(2)

    compared = compare(attend, (q, k, v))
    assert compared.complaints == []
    assert compared.counts() == 1, compared.reasons()


def test_a_factor_of_the_keys_in_both_branches_of_a_condition():
    """What the backward reads is not what the forward of the other branch reads: a site whose gradients are right, or
    none, and no exception."""
    weights = tuple(array(2, 4, 4, seed=n) for n in range(4))
    factor, table = array(5, seed=8), array(7, 4, seed=9)

    def loss(weights, factor, table, which):
        def layer(h, w):
            wq, wk, wv, wo = w
            q, k, v = ((h @ x).reshape(5, 2, 2) for x in (wq, wk, wv))
            p = jax.nn.softmax(jnp.einsum("tnd,snd->nts", q, k), -1) * factor
            return h + jnp.einsum("nts,sne->tne", p, v).reshape(5, 4) @ wo

        def model(tokens):
            first, second = ([w[i] for w in weights] for i in (0, 1))
            return layer(layer(table[tokens], first), second)

        return jnp.sin(jax.lax.cond(which, model, model, jnp.arange(5))).sum()

    gradient = jax.grad(loss, (0, 1, 2))
    for which in (True, False):
        arguments = weights, factor, table, jnp.array(which)
        optimized = optimized_like_a_user(gradient)
        given = compiled(optimized)(*arguments)
        true = evaluate(jax.make_jaxpr(gradient)(*arguments), *jax.tree.leaves(arguments))
        for error, _ in measured(given, jax.tree.unflatten(jax.tree.structure(given), true)):
            assert error < 5e-5
        assert autopallas.explain(optimized, *arguments).failures == ()
