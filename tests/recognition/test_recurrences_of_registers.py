"""Recurrences whose carried array is a register that moves on, or holds several states: near misses, and said so."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax, nn
from support.catalogue import array
from support.compare import compare

T, B = 32, 3


def two_registers(x, w):
    """A digital filter of inputs and outputs, whose newest numbers come first."""

    def step(carried, now):
        inputs, outputs = carried
        inputs = jnp.concatenate([now[None], inputs[:-1]])
        result = w @ inputs - 0.3 * w[:3] @ outputs
        return (inputs, jnp.concatenate([result[None], outputs[:-1]])), result

    return lax.scan(step, (jnp.zeros((4, B)), jnp.zeros((3, B))), x)[1]


def rolled(x, w):
    def step(outputs, now):
        result = now + 0.3 * jnp.tensordot(w, outputs, 1)
        return jnp.roll(outputs, 1, 0).at[0].set(result), result

    return lax.scan(step, jnp.zeros((4, B)), x)[1]


def level_and_trend(x, w):
    fast, slow = nn.sigmoid(w[0]), nn.sigmoid(w[1])

    def step(carried, now):
        level = fast * now + (1 - fast) * (carried[0] + carried[1])
        trend = slow * (level - carried[0]) + (1 - slow) * carried[1]
        return jnp.stack([level, trend]), level + trend

    return lax.scan(step, jnp.stack([x[0], x[1] - x[0]]), x)[1]


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("function", [two_registers, rolled, level_and_trend])
def test_a_recurrence_of_a_register_is_a_near_miss(function, trained):
    args = array(T, B, seed=1), array(4, seed=2)
    run = jax.value_and_grad(lambda *a: jnp.sin(function(*a)).sum(), (0, 1)) if trained else function
    compared = compare(run, args, gradients=False)
    assert compared.complaints == []
    assert compared.counts("recurrence") == 0
    misses = [miss for miss in compared.report.near_misses if miss.op == "recurrence"]
    assert ["slice of the carried value" in miss.reason for miss in misses] == [True]


def test_a_filter_without_feedback_is_no_recurrence():
    def function(x, w):
        def step(inputs, now):
            inputs = jnp.concatenate([now[None], inputs[:-1]])
            return inputs, w @ inputs

        return lax.scan(step, jnp.zeros((4, B)), x)[1]

    compared = compare(function, (array(T, B, seed=1), array(4, seed=2)))
    assert compared.complaints == []
    assert not [miss for miss in compared.report.near_misses if miss.op == "recurrence"]


def test_a_cache_that_is_written_and_attended_to_is_no_recurrence():
    def function(x, w):
        def step(cache, given):
            place, now = given
            cache = lax.dynamic_update_slice_in_dim(cache, now[None], place, 0)
            weights = nn.softmax(jnp.where(jnp.arange(T) <= place, cache @ now, -jnp.inf))
            return cache, weights @ cache * w[0]

        return lax.scan(step, jnp.zeros((T, B)), (jnp.arange(T), x))[1]

    compared = compare(function, (array(T, B, seed=1), array(4, seed=2)))
    assert compared.complaints == []
    assert not [miss for miss in compared.report.near_misses if miss.op == "recurrence"]
