"""Gradients of one of two arguments that are the same array: of a value's uses the program has the cotangent of one
alone, and a kernel gives the sum of all."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from support.catalogue import array
from support.checks import replaced
from support.compare import compare

X, Y, BIAS, SCALE = array(6, 8, seed=1), array(6, 8, seed=2), array(6, 6, seed=3), array(8, seed=4)
STEPS, DECAY = array(16, 4, seed=5) * 0.5, jax.nn.sigmoid(array(16, seed=6))


def norm(rows, squared):
    return rows * lax.rsqrt(jnp.mean(squared * squared, -1, keepdims=True) + 1e-6) * SCALE


def centred(rows, squared):
    moved = squared - squared.mean(-1, keepdims=True)
    return (rows - rows.mean(-1, keepdims=True)) * lax.rsqrt((moved * moved).mean(-1, keepdims=True) + 1e-5) * SCALE


def gated(gate, value):
    return (jax.nn.silu(Y @ gate) * (Y @ value)) @ value


def biased(inner, outer):
    return jax.nn.softmax(2 * jnp.tanh(X @ Y.T + inner) + outer) @ Y


def bounded(factor, bound):
    return jax.nn.softmax(factor[0] * jnp.tanh(X @ Y.T / bound[0])) @ Y


def blocks(first, second):
    return jax.nn.softmax(jnp.concatenate([first @ X.T, second @ Y.T], -1)) @ jnp.concatenate([Y, X])


def recurrence(keys, removed, steps=STEPS, decay=DECAY):
    def step(state, given):
        query, key, gone, value, rate = given
        state = state + rate * key[:, None] * (value - gone @ state)
        return state, query @ state

    return lax.scan(step, jnp.zeros((4, 4)), (steps, keys, removed, steps[::-1], decay))[1]


PROGRAMS = {
    "norm": (norm, X),
    "centred norm": (centred, X),
    "gated MLP": (gated, array(8, 8, seed=7)),
    "bias of attention": (biased, BIAS),
    "factor of scores": (bounded, SCALE),
    "queries of blocks": (blocks, X),
    "recurrence": (recurrence, STEPS),
}


@pytest.mark.parametrize("wanted", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_cotangents_of_uses_of_one_array_are_told_apart(name, wanted):
    function, given = PROGRAMS[name]

    def gradients(x):
        return jax.grad(lambda *both: jnp.sum(jnp.sin(function(*both))), wanted)(x, x)

    assert compare(gradients, [given], gradients=False).complaints == []


@pytest.mark.parametrize("name", ["gated MLP", "recurrence"])
def test_the_gradient_of_all_uses_is_a_site(name):
    function, given = PROGRAMS[name]
    compared = compare(jax.grad(lambda x: jnp.sum(jnp.sin(function(x, x)))), [given], gradients=False)
    assert compared.complaints == []
    assert sum(compared.report.counts().values()) > 0


def test_equal_cotangents_are_counted():
    """Both factors of a square have the same cotangent, which the program adds once: the second one is a constant."""

    def function(rows, factor, other):
        return rows * lax.rsqrt(jnp.mean(factor * other, -1, keepdims=True) + 1e-6) * SCALE

    def gradient(x):
        return jax.grad(lambda y: jnp.sum(jnp.sin(function(y, y, x))))(x)

    assert compare(gradient, [X], gradients=False).complaints == []


def test_scores_that_are_added_to_themselves():
    """The same product is computed twice, and the gradient of the queries comes in two equal parts."""

    def function(x):
        return jax.nn.softmax(x @ Y.T + x @ Y.T) @ Y

    gradient = jax.grad(lambda x: jnp.sum(jnp.sin(function(x))))
    assert compare(gradient, [X], gradients=False).complaints == []


@pytest.mark.parametrize("maximum_first", [False, True])
def test_scores_that_are_written_again_for_a_maximum_without_a_gradient(maximum_first):
    """Only one of the two products has a gradient, which is that of the queries."""

    def function(x, keys):
        if maximum_first:
            maximum = lax.stop_gradient((x @ keys.T).max(-1, keepdims=True))
            e = jnp.exp(x @ keys.T)
        else:
            e = jnp.exp(x @ keys.T)
            maximum = lax.stop_gradient((x @ keys.T).max(-1, keepdims=True))
        return e / jnp.exp(maximum) / (e.sum(-1, keepdims=True) / jnp.exp(maximum) + 0.1) @ Y

    gradient = jax.grad(lambda x, keys: jnp.sum(jnp.sin(function(x, keys))), (0, 1))
    compared = compare(gradient, [X, Y], gradients=False)
    assert compared.complaints == []
    assert replaced(compared.report) == ["forward+backward"], compared.reasons()


def test_scores_that_are_added_to_themselves_and_written_again_for_a_maximum():
    def function(x):
        maximum = lax.stop_gradient((x @ Y.T).max(-1, keepdims=True))
        return jax.nn.softmax(x @ Y.T + x @ Y.T - maximum) @ Y

    gradient = jax.grad(lambda x: jnp.sum(jnp.sin(function(x))))
    assert compare(gradient, [X], gradients=False).complaints == []


@pytest.mark.parametrize("second", [(0, 1), (0, 2), (1, 3)])
def test_two_backwards_of_one_result_with_gradients_of_other_arguments(second):
    """What the second one lacks, the values or the bias say, is all that the first one has."""

    def function(queries, keys, values, bias):
        return jax.nn.softmax(queries @ keys.T + jnp.tanh(bias)) @ values

    def gradients(*given):
        first = jax.grad(lambda *given: jnp.sum(jnp.sin(function(*given))), (0, 1, 2, 3))(*given)
        return first, jax.grad(lambda *given: jnp.sum(function(*given) ** 2), second)(*given)

    compared = compare(gradients, [X, Y, Y + 1, BIAS], gradients=False)
    assert compared.complaints == []
    assert replaced(compared.report) == ["forward+backward"], compared.reasons()


def test_two_backwards_of_which_one_has_the_gradient_of_one_use():
    """A bias that is read twice: one gradient is that of both uses, the other one that of the first."""

    def gradients(x):
        whole = jax.grad(lambda x: jnp.sum(jnp.sin(biased(x, x))))(x)
        return whole, jax.grad(lambda *both: jnp.sum(biased(*both) ** 2))(x, x)

    assert compare(gradients, [BIAS], gradients=False).complaints == []
