"""Loops and mixtures whose scatters do more than replace, and a site that would read its own results."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.catalogue import array
from support.compare import compiled, optimized_like_a_user
from support.mixtures import E, P, X
from support.mixtures_written import C, in_slots, slot_numbers

from recognition import slots_written


def same(function, *args):
    optimized = optimized_like_a_user(function)
    given, expected = compiled(optimized)(*args), compiled(function)(*args)
    for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    return optimized.report()


@pytest.mark.parametrize("summed", [False, True])
def test_what_a_scatter_applies_tells_it_from_others(summed):
    """``scatter`` is the primitive of ``.at[].set`` and of ``.at[].apply``, which has zeros for updates."""
    q, k, v = (array(5, 4, seed=n) for n in range(3))

    def attend(q, k, bias):
        return jax.nn.softmax(q @ k.T / 2 + bias) @ v

    def loop(q, k):
        def step(sums, e):
            one = jnp.zeros((3, 5)).at[e].apply(lambda x: x + 3)
            other = jnp.zeros((3, 5)).at[e].apply(lambda x: x - 7)
            sums = sums[0] + one, sums[1] + other
            a, b = sums if summed else (one, other)
            return sums, (attend(q, k, jnp.arange(5) * a[0]), attend(k, q, jnp.arange(5) * b[0]))

        zeros = jnp.zeros((3, 5))
        return lax.scan(step, (zeros, zeros), jnp.arange(3))[1]

    assert same(loop, q, k).counts()["attention"] == 2


def test_counts_that_a_function_was_applied_to_may_be_negative():
    x, gate, down, router = array(12, 8, seed=0), array(4, 8, 10, seed=1), array(4, 10, 8, seed=2), array(8, 4, seed=3)

    def intervals(x, gate, down, router):
        counts = jnp.zeros(4, jnp.int32).at[jnp.argmax(x @ router, -1)].add(1)
        counts = counts.at[x[0, :1].astype(jnp.int32) % 4].apply(lambda n: n - 9)
        positions = jnp.arange(12)

        def step(carry, expert):
            start, out = carry
            gate, down, count = expert
            inside = ((start <= positions) & (positions < start + count))[:, None]
            return (start + count, jnp.where(inside, jax.nn.silu(x @ gate) @ down, out)), None

        return lax.scan(step, (0, jnp.zeros_like(x)), (gate, down, counts))[0][1]

    assert same(intervals, x, gate, down, router).counts()["grouped_matmul"] == 0


def test_a_site_that_would_read_its_own_results_is_left_alone():
    stacked = jax.tree.map(lambda a: jnp.stack([a, a[::-1] * 0.9, a * 1.1]), P)

    def mixture(p, x):
        weights, chosen, slots = slot_numbers(p, x)
        count = jnp.zeros((E, C)).at[chosen, slots].add(1.0, mode="drop")
        y = in_slots(p, slots_written.brought(x, chosen, slots)) + count[..., None] * p["down_bias"][:, None]
        return slots_written.weighted(y.at[chosen, slots].get(mode="fill", fill_value=0), weights)

    def loss(p, x):
        return jnp.sin(jax.vmap(mixture, (0, None))(p, x)).sum()

    same(jax.grad(loss, (0, 1)), stacked, X)


def _by_carried_keys(a, x, key):
    def step(carried, own):
        state, key = carried
        key, other = jax.random.split(key)
        return (own[0] * state + own[1] * jax.random.uniform(other), key), state

    return lax.scan(step, (jnp.zeros(4), key), (a, x))[1]


def _by_indices(a, x, key):
    def step(i, carried):
        y, key = carried
        return y.at[i].set(a[i] * y[i - 1] + x[i] * jax.random.uniform(key)), jax.random.split(key)[1]

    return lax.fori_loop(0, len(x), step, (jnp.zeros_like(x), key))[0]


def _by_counting(a, x, key):
    def step(carried):
        i, state, key = carried
        return i + 1, state * a[i] + x[i] * jax.random.uniform(key), jax.random.split(key)[0]

    return lax.while_loop(lambda carried: carried[0] < len(x), step, (0, jnp.zeros(4), key))[1]


def _of_keys(a, x, key):
    keys = jax.random.split(key, len(x))

    def step(i, carried):
        y, keys = carried
        return y.at[i].set(a[i] * y[i - 1] + x[i]), keys.at[i].set(jax.random.fold_in(keys[i], i))

    y, keys = lax.fori_loop(0, len(x), step, (jnp.zeros_like(x), keys))
    return y * jax.random.normal(keys[3])


@pytest.mark.parametrize("derivative", [False, True])
@pytest.mark.parametrize("program", [_by_carried_keys, _by_indices, _by_counting, _of_keys])
def test_loops_that_carry_random_keys(program, derivative):
    """Keys have a type of their own, of which NumPy knows nothing."""
    if derivative and program is _by_counting:
        pytest.skip("a while loop has no gradient")
    function = jax.grad(lambda *x: jnp.sin(program(*x)).sum(), (0, 1)) if derivative else program
    same(function, array(20, 4, seed=1), array(20, 4, seed=2), jax.random.key(0))
