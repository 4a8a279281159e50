"""Loops of sums of exponentials give what the program gives where numbers are not finite, small, or large."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.respellings import random

import autopallas

STEPS, BATCH, STATES = 8, 4, 32
X, A = np.asarray(random(STEPS, BATCH, STATES)), np.asarray(random(STATES, STATES, seed=1))


def optimized(function):
    kinds = ["summed_exponentials", "summed_exponentials_gradient"]
    return autopallas.optimize(function, objective="always", strict=True, ops=kinds)


def sites(run):
    return sum("summed_exponentials" in site.kind for site in run.report().sites)


def numbers(results):
    return [np.asarray(x, np.float64) for x in jax.tree.leaves(results)]


def check(function, *operands, expected=1, bound=2e-5):
    """Compares with the program itself where numbers are not finite, and with float64 where they are."""
    run = optimized(function)
    given, plain = numbers(run(*operands)), numbers(jax.jit(function)(*operands))
    assert sites(run) == expected
    with jax.enable_x64(True):
        wanted = numbers(jax.jit(lambda *a: function(*a))(*(np.asarray(a, np.float64) for a in operands)))
    for own, written, exact in zip(given, plain, wanted, strict=True):
        finite = np.isfinite(written)
        np.testing.assert_array_equal(np.where(finite, 0, own), np.where(finite, 0, written))
        assert np.isfinite(own[finite]).all()
        finite &= np.isfinite(exact)
        own, written, exact = own[finite], written[finite], exact[finite]
        allowed = max(bound * np.abs(exact).max(initial=0), 10 * np.abs(written - exact).max(initial=0))
        assert np.abs(own - exact).max(initial=0) <= allowed


def loop(step):
    return lambda x, *rest: lax.scan(lambda state, x: step(state, x, *rest), x[0], x[1:])


def gradient(function, *positions):
    return jax.grad(lambda *a: sum(jnp.sin(x).sum() for x in jax.tree.leaves(function(*a))), positions)


@loop
def guarded(state, x, a):
    return jax.nn.logsumexp(state[:, :, None] + a + x[:, None], axis=1), None


@loop
def unguarded(state, x, a):
    exponent = state[:, :, None] + a + x[:, None]
    largest = exponent.max(1)
    return jnp.log(jnp.exp(exponent - largest[:, None]).sum(1)) + largest, None


@loop
def signs(state, x, a):
    exponent = state[:, :, None] + a
    largest = lax.stop_gradient(exponent.max(1))
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    total = jnp.exp(exponent - largest[:, None]).sum(1)
    return jnp.where(total > 0, jnp.log(total) + largest, -100) + x, (jnp.sign(total), total <= 0, total == 0)


@loop
def returned_signs(state, x, a):
    result, sign = jax.nn.logsumexp(state[:, :, None] + a, axis=1, return_sign=True)
    return result + x, sign


@pytest.mark.parametrize("value", [-np.inf, np.inf, np.nan])
@pytest.mark.parametrize("function", [guarded, unguarded, gradient(guarded, 0, 1)])
def test_what_is_the_same_for_all_summands_may_be_not_finite(function, value):
    x, row, first, a = X.copy(), X.copy(), X.copy(), A.copy()
    x[3, 1, 2] = first[3, 1, 2] = row[3, 1] = value
    first[0, :, :5] = a[:, 3] = -np.inf
    for operands in ((x, A), (row, A), (first, A), (x, a)):
        check(function, *operands)


@pytest.mark.parametrize("value", [-np.inf, np.inf, np.nan])
@pytest.mark.parametrize("function", [signs, returned_signs])
def test_signs_are_those_of_sums_that_are_zero_or_not_finite(function, value):
    a = A.copy()
    a[:, 3] = value
    check(function, X, a)


def test_scalars_that_all_steps_compute_alike_are_known():
    def step(state, x, a, t):
        scale = 2 * jnp.exp(t)
        return jax.nn.logsumexp((state[:, :, None] + a) * scale, axis=1) / scale + x, None

    check(loop(step), X, A, np.float32(0.2))


def test_all_results_of_an_equation_are_known():
    def step(state, x, a):
        first, second = lax.sort((a, a.T), num_keys=1)
        return jax.nn.logsumexp(state[:, None] + first, axis=0) + x, second[0]

    check(loop(step), X[:, 0], A)


def test_differences_from_numbers_that_are_written_out():
    def step(state, x, a):
        return jax.nn.logsumexp(state[:, :, None] + a, axis=1) + x, jnp.exp(1 - jnp.exp(0.5 - state).mean())

    check(loop(step), X, A)
    check(gradient(loop(step), 0, 1), X, A)


def test_zero_in_the_place_of_a_logarithm_is_not_moved():
    def step(state, x, a, chosen):
        exponent = state[:, :, None] + a
        largest = exponent.max(1)
        logarithm = jnp.log(jnp.exp(exponent - largest[:, None]).sum(1))
        zero = jnp.zeros_like(logarithm)
        return lax.select(jnp.broadcast_to(chosen > 0, zero.shape), logarithm, zero) + largest + x, None

    check(loop(step), X, A, np.arange(STATES, dtype=np.float32) % 2, expected=0)


def sums(state, x, a):
    exponent = state[:, :, None] + a
    largest = exponent.max(1)
    exponentials = jnp.exp(exponent - largest[:, None])
    total = exponentials.sum(1)
    return jnp.log(total) + largest + x, exponentials, total


@pytest.mark.parametrize("value", [-1e30, np.inf, np.nan])
def test_large_factors_of_exponentials_that_are_zero(value):
    def step(state, x, a, weights):
        after, exponentials, total = sums(state, x, a)
        return after, (exponentials * weights[:, None]).sum(1) / total

    # The largest numbers of the state and of the transitions meet at no element: the sum is exp(-42).
    x, a, weights = np.full_like(X, -60), np.full_like(A, -42), np.ones(STATES, np.float32)
    x[0, :, 0], x[0, :, 4], a[0], a[4], weights[4] = -42, 0, 0, -1e4, value
    check(loop(step), x, a, weights)


def test_logarithms_of_small_exponentials_are_left_alone():
    def entropy(state, x, a):
        after, exponentials, total = sums(state, x, a)
        p = exponentials / total[:, None]
        return after, -(p * jnp.log(p)).sum(1)

    x, a = np.zeros_like(X), np.zeros_like(A)
    x[0, :, 1:], a[0] = -95, -40
    check(loop(entropy), x, a, expected=0)


@pytest.mark.parametrize("is_carried", [False, True])
def test_logarithms_of_some_of_the_exponentials_are_left_alone(is_carried):
    def step(state, x, a):
        exponent = (jnp.log(state) if is_carried else state)[:, :, None] + a
        exponentials = jnp.exp(exponent - exponent.max((1, 2), keepdims=True))
        p = exponentials.sum(1) / exponentials.sum((1, 2))[:, None]
        state = p * jnp.exp(x) if is_carried else jnp.log(p) + x
        return state, state

    check(loop(step), np.abs(X) + 0.1 if is_carried else X, A, expected=0)


@pytest.mark.parametrize("offset", [0, 1e5])
def test_gradients_with_small_sums_and_large_numbers_are_exact(offset):
    def likelihood(x, a):
        def step(state, x, a):
            return jax.nn.logsumexp(state[:, :, None] + a, axis=1) + x, None

        return jax.nn.logsumexp(loop(step)(x, a)[0], axis=-1)

    x, a = X + np.float32(offset), A.copy()
    x[0, :, 1:] -= 300
    a[0] -= 300
    run = optimized(jax.grad(lambda x, a: likelihood(x, a).sum(), (0, 1)))
    given, _ = numbers(run(x, a))
    assert sites(run) == 1
    # In each step the probabilities of all states sum to 1.
    assert np.abs(given.sum(-1) - 1).max() <= 1e-5
