"""Programs that the generator of random programs has found, each by what was wrong with it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
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


def test_probabilities_too_small_for_float32_in_a_loss_that_widens_its_logits():
    """exp(-200) is 0 in float32 and has a logarithm in float64."""
    with jax.enable_x64(True):
        x, w = (jnp.asarray(a, jnp.float32) for a in (array(5, 4, seed=1) * 100, array(4, 11, seed=2)))
        labels = jnp.arange(5) * 2

        def loss(x, w):
            z = x @ w
            shifted = (z - z.max(-1, keepdims=True)).astype(jnp.float64)
            p = jnp.exp(shifted) / jnp.exp(shifted).sum(-1, keepdims=True)
            return -jnp.take_along_axis(jnp.log(p), labels[:, None], -1).mean()

        step = jax.value_and_grad(loss, (0, 1))
        optimized = optimized_like_a_user(step)
        given, expected = jax.jit(optimized)(x, w), compiled(step)(x, w)
        assert optimized.report().counts()["cross_entropy"] == 1
        z = x @ w
        picked = jnp.take_along_axis(z, labels[:, None], -1)
        assert float(jnp.max(jnp.max(z, -1, keepdims=True) - picked)) > 110
        for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fill", [-1e30, -1e9, -np.inf])
@pytest.mark.parametrize("added", [False, True])
def test_a_logarithm_that_a_fill_swallows(fill, added):
    """In a row of nothing but -1e30, ``exp(s - logsumexp(s))`` is 1 everywhere, in float64 too."""
    q, k, v = (array(5, 4, seed=n) for n in range(3))
    shown = jnp.arange(5)[None] + 3 <= jnp.arange(5)[:, None]

    def attend(q, k, v):
        scores = q @ k.T
        scores = scores + jnp.where(shown, 0.0, fill) if added else jnp.where(shown, scores, fill)
        return jnp.exp(scores - jax.nn.logsumexp(scores, -1, keepdims=True)) @ v

    compared = compare(attend, (q, k, v))
    assert compared.complaints == []
    assert compared.counts() == 1, compared.reasons()


@pytest.mark.parametrize("offset", [1000.0, 1.0])
def test_a_cast_far_from_zero_acts(offset):
    """bfloat16 holds every fourth whole number at 1,000: what is left of the logits is no longer theirs."""
    x, w = array(5, 4, seed=1), array(4, 11, seed=2)
    labels = jnp.arange(5) * 2

    def loss(x, w):
        z = x @ w
        z = (z - z.max(-1, keepdims=True) + offset).astype(jnp.bfloat16).astype(jnp.float32)
        return (jax.nn.logsumexp(z, -1) - jnp.take_along_axis(z, labels[:, None], -1)[:, 0]).mean()

    optimized = optimized_like_a_user(loss)
    given, expected = float(jax.jit(optimized)(x, w)), float(compiled(loss)(x, w))
    assert optimized.report().counts()["cross_entropy"] == (offset < 100)
    assert abs(given - expected) < 1e-2


def test_a_maximum_beyond_the_range_of_float16_is_assumed_away():
    q, k, v = (array(5, 4, seed=n) for n in range(3))
    shown = jnp.arange(5)[:, None] > 1

    def attend(q, k, v):
        scores = jnp.where(shown, q @ k.T, -1e9)
        e = jnp.exp(scores - scores.max(-1, keepdims=True).astype(jnp.float16))
        return (e / e.sum(-1, keepdims=True)) @ v

    optimized = optimized_like_a_user(attend)
    given, expected = (compiled(f)(q, k, v) for f in (optimized, attend))
    np.testing.assert_allclose(given[2:], expected[2:], atol=1e-3)
    (site,) = optimized.report().sites
    assert site.assumptions
    strict = optimized_like_a_user(attend, assume_finite=False)
    np.testing.assert_array_equal(np.isnan(compiled(strict)(q, k, v)), np.isnan(expected))
