"""Respelling of the gradients of max pooling and min pooling: which element a window picks, and what it is given."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from support.compare import compare
from support.respellings import found, random
from support.tiers import examples

import autopallas


def pooling(window, strides, padding="VALID", largest=True):
    start, step = (-np.inf, lax.max) if largest else (np.inf, lax.min)
    return lambda x: lax.reduce_window(x, np.asarray(start, x.dtype), step, window, strides, padding)


def gradient(pool):
    return lambda cotangent, x: jax.vjp(pool, x)[1](cotangent)[0]


def whole(shape, seed=1):
    """Numbers whose sums are exact."""
    return jnp.asarray(np.random.default_rng(seed).integers(-9, 9, shape), jnp.float32)


def same(pool, x):
    cotangent = whole(jax.eval_shape(pool, x).shape)
    run = gradient(pool)
    assert found(run, cotangent, x) == ["pooling_gradient"]
    respelt = autopallas.optimize(run, objective="always", ops="pooling_gradient", strict=True)
    np.testing.assert_array_equal(jax.jit(respelt)(cotangent, x), jax.jit(run)(cotangent, x))
    assert respelt.report().counts() == {"respelling": 1}


WINDOWS = [
    ((1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
    ((1, 3, 3, 1), (1, 2, 2, 1), "SAME"),
    ((1, 3, 3, 1), (1, 1, 1, 1), "SAME"),
    ((1, 2, 2, 1), (1, 3, 3, 1), "VALID"),
    ((2, 1, 1, 3), (1, 1, 1, 2), "VALID"),
    ((1, 3, 2, 1), (1, 2, 1, 1), [(0, 0), (2, 1), (0, 1), (0, 0)]),
]


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("values", [(0.0, -0.0, 1.0, 2.0), (1.0, np.inf, -np.inf), (0.0, 1.0, np.nan, np.inf)])
@pytest.mark.parametrize(("window", "strides", "padding"), WINDOWS)
def test_of_equal_elements_the_same_one_is_picked_and_nans_are_compared_alike(
    window, strides, padding, values, largest
):
    x = jnp.asarray(np.random.default_rng(0).choice(values, (2, 7, 6, 5)), jnp.float32)
    same(pooling(window, strides, padding, largest), x)


@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_windows_at_random(data):
    rank = data.draw(st.integers(1, 4))
    numbers = st.lists(st.integers(1, 3), min_size=rank, max_size=rank)
    window, strides = data.draw(numbers), data.draw(numbers)
    shape = data.draw(st.lists(st.integers(3, 7), min_size=rank, max_size=rank))
    padding = [(data.draw(st.integers(0, size)), data.draw(st.integers(0, size))) for size in window]
    pool, x = pooling(window, strides, padding), whole(shape, seed=0).clip(-2, 2)
    if 1 < np.prod(window) <= 64:
        same(pool, x)
    elif np.prod(window) > 64:  # too many slices
        assert found(gradient(pool), whole(jax.eval_shape(pool, x).shape), x) == []


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(("window", "strides", "padding"), WINDOWS)
def test_train_steps_through_a_pooling(dtype, window, strides, padding):
    x, w = random(2, 7, 6, 5, dtype=dtype), random(5, 5, seed=1, dtype=dtype)
    step = jax.value_and_grad(
        lambda x, w: jnp.sin(pooling(window, strides, padding)(x @ w)).astype("float32").sum(), (0, 1)
    )
    compared = compare(step, (x, w), gradients=False, ops="pooling_gradient")
    assert compared.complaints == []
    assert compared.counts("respelling") == 1


def test_under_vmap_and_in_a_scan():
    pool = pooling((2, 2), (2, 2))
    step = jax.grad(lambda x: (pool(x) ** 2).sum())

    def run(xs):
        return jax.vmap(step)(xs), lax.scan(lambda total, x: (total + step(x), None), xs[0], xs)[0]

    xs = random(3, 6, 8)
    respelt = autopallas.optimize(run, objective="always", ops="pooling_gradient", strict=True)
    for a, b in zip(respelt(xs), run(xs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert respelt.report().counts() == {"respelling": 2}


def test_second_derivatives_are_those_of_the_original():
    pool = pooling((1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    step = jax.grad(lambda x: (pool(x) ** 3).sum())
    respelt = autopallas.optimize(step, objective="always", ops="pooling_gradient", strict=True)
    x = random(1, 6, 6, 2)
    for derive in (
        lambda f: jax.jvp(f, (x,), (jnp.cos(x),)),
        lambda f: jax.grad(lambda x: jnp.sin(f(x)).sum())(x),
    ):
        for a, b in zip(jax.tree.leaves(derive(respelt)), jax.tree.leaves(derive(step)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_other_windows_are_left_alone():
    for window, strides, shape in (((1, 1), (2, 2), (6, 6)), ((9, 9), (1, 1), (12, 12)), ((2, 2), (2, 2), (0, 6))):
        pool = pooling(window, strides)
        x = random(*shape)
        assert "pooling_gradient" not in found(gradient(pool), pool(x), x)
