"""Attentions of which the rows are multiplied by more than one over their sums: with an epsilon or a floor."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.catalogue import ODD, bhtd
from support.compare import compare, compiled, optimized_like_a_user, with_gradients


def attend(q, k, v, epsilon=0.3, stopped=True):
    s = q @ k.mT
    m = s.max(-1, keepdims=True)
    e = jnp.exp(s - (lax.stop_gradient(m) if stopped else m))
    return (e / (e.sum(-1, keepdims=True) + epsilon)) @ v


def arguments():
    return bhtd(ODD, jnp.float32)


@pytest.mark.parametrize("epsilon", [1e-9, 1e-6, 0.3])
def test_a_train_step_is_replaced_in_both_directions(epsilon):
    step = with_gradients(lambda *a: attend(*a, epsilon), arguments())
    compared = compare(step, arguments(), gradients=False)
    assert compared.complaints == []
    assert [site.direction for site in compared.report.sites] == ["forward+backward"]


def test_a_train_step_through_the_maximum_stays():
    """Ties divide its gradient, so that it needs all scores."""
    step = with_gradients(lambda *a: attend(*a, stopped=False), arguments())
    compared = compare(step, arguments(), gradients=False)
    assert compared.complaints == []
    assert compared.counts() == 0
    assert "runs through the maximum" in compared.reasons()[0]


def test_the_gradient_through_the_maximum_is_the_originals():
    def tied(q, k, v):
        return attend(jnp.round(q * 0.5), jnp.round(k * 0.5), v, 1.0, stopped=False)

    def gradient(function):
        return compiled(jax.grad(lambda *a: jnp.sum(jnp.sin(function(*a) * 3)), argnums=2))

    optimized = optimized_like_a_user(tied)
    np.testing.assert_allclose(gradient(optimized)(*arguments()), gradient(tied)(*arguments()), atol=1e-5)
    assert optimized.report().counts()["attention"] == 1


def test_rows_without_any_key_give_zero_and_no_gradient():
    mask = np.arange(ODD.keys) < np.arange(ODD.queries)[:, None]

    def masked(q, k, v):
        s = jnp.where(mask, q @ k.mT, -jnp.inf)
        m = lax.stop_gradient(s.max(-1, keepdims=True))
        e = jnp.exp(s - jnp.where(m == -jnp.inf, 0, m))
        return (e @ v) / (e.sum(-1, keepdims=True) + 1e-6)

    optimized = optimized_like_a_user(masked)
    (out, (dq, dk, dv)) = compiled(with_gradients(optimized, arguments()))(*arguments())
    assert optimized.report().counts()["attention"] == 1
    assert np.all(np.asarray(out)[:, :, 0] == 0)
    assert np.all(np.asarray(dq)[:, :, 0] == 0)
    assert np.all(np.isfinite(dk))
    assert np.all(np.isfinite(dv))


def test_under_vmap_of_a_gradient():
    gradient = lambda f: jax.vmap(jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a))), argnums=(0, 1, 2)))  # noqa: E731
    optimized = optimized_like_a_user(attend)
    found, wanted = (compiled(gradient(f))(*arguments()) for f in (optimized, attend))
    assert optimized.report().counts()["attention"] == 1
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_a_scan_over_layers_with_the_gradient_outside():
    def model(x, w):
        layer = lambda x, w: (x + attend(x @ w[0], x @ w[1], x @ w[2]), None)  # noqa: E731
        return lax.scan(layer, x, w)[0]

    random = np.random.default_rng(0)
    x, w = (jnp.asarray(random.standard_normal(s) * 0.5, jnp.float32) for s in ((2, 6, 4), (3, 3, 4, 4)))
    compared = compare(with_gradients(model, (x, w)), (x, w), gradients=False)
    assert compared.complaints == []
    directions = [site.direction for site in compared.report.sites if site.op == "attention"]
    assert directions == ["forward+backward"]


def test_second_derivatives_and_forward_mode_are_the_originals():
    def penalty(function):
        return jax.grad(lambda *a: jnp.sum(jax.grad(lambda *b: jnp.sum(jnp.sin(function(*b))))(*a) ** 2), argnums=1)

    optimized = optimized_like_a_user(attend)
    np.testing.assert_allclose(
        compiled(penalty(optimized))(*arguments()), compiled(penalty(attend))(*arguments()), rtol=2e-4, atol=2e-4
    )
    moved = [jax.jvp(f, arguments(), arguments())[1] for f in (compiled(optimized), compiled(attend))]
    np.testing.assert_allclose(*moved, atol=1e-4)


def test_the_report_names_the_class():
    optimized = optimized_like_a_user(attend)
    optimized.eval_shape(*arguments())
    assert "row program" in optimized.report().sites[0].spec_line


def test_rows_that_are_no_numbers_become_zero_where_they_are_guarded():
    def guarded(q, k, v):
        p = jax.nn.softmax(q @ k.mT)
        return jnp.where(jnp.isnan(p), 0, p) @ v

    q, k, v = arguments()
    q = q.at[0, 0, 2].set(jnp.nan).at[1, 1, 3].set(jnp.inf)
    optimized = optimized_like_a_user(guarded)
    found, wanted = optimized(q, k, v), guarded(q, k, v)
    assert optimized.report().counts()["attention"] == 1
    assert np.all(np.asarray(wanted)[0, 0, 2] == 0)
    np.testing.assert_allclose(found, wanted, atol=1e-5)
