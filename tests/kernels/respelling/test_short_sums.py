"""Respelling of sums of a few numbers each: what is found, what is left alone, and what it computes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.compare import compare
from support.respellings import found, random
from support.tiers import examples

import autopallas
from autopallas.kernels.respelling.short_sums import short_sum, short_sums


def distances(x, y):
    return jnp.sqrt(jnp.sum((x - y) ** 2, -1) + 1e-3)


def rigid_energy(x, y):
    return jnp.mean(distances(x, y) ** 1.5)


def combined_experts(x, y):
    """[token, expert, width]"""
    gates = jax.nn.softmax(y[..., :1], 1)
    return jnp.sum(jnp.sin(jnp.sum(x * gates, 1)))


def mean_over_batch(x, y):
    return jnp.mean(jnp.tanh(x + y), 0) ** 2


@pytest.mark.parametrize("offset", [0.0, 3.0])
@pytest.mark.parametrize(
    ("function", "shape", "sums"),
    [
        (rigid_energy, (2, 1001, 3), 1),
        (distances, (700, 7), 1),
        (combined_experts, (129, 4, 33), 1),
        (mean_over_batch, (5, 31, 33), 1),
    ],
)
def test_values_and_gradients(function, shape, sums, offset):
    x, y = random(*shape) + offset, random(*shape, seed=1)

    def step(x, y):
        value, pull = jax.vjp(function, x, y)
        return value, pull(jnp.ones_like(value))

    assert found(step, x, y).count("short_sum") >= sums
    compared = compare(step, (x, y), ops="short_sum")
    assert compared.complaints == []
    assert compared.report.counts()["respelling"] >= sums


def test_sums_far_from_zero_are_as_exact_as_the_originals():
    """Over many sums, in the mean, and within twice its error: the library adds up in parts."""
    function = lambda x: jnp.sum(x, 1)  # noqa: E731
    respelt = autopallas.optimize(function, objective="always", ops="short_sum", strict=True)
    errors = []
    for seed in range(10):
        x = random(64, 16, 8, seed=seed) + 30.0
        exact = np.asarray(x, np.float64).sum(1)
        errors.append([np.asarray(f(x), np.float64) - exact for f in (respelt, jax.jit(function))])
    own, original = np.sqrt(np.mean(np.square(np.array(errors)), axis=(0, 2, 3)))
    assert own <= 2 * original


@settings(max_examples=examples(25), deadline=None)
@given(st.data())
def test_sums_at_random(data):
    shape = data.draw(st.lists(st.sampled_from([1, 2, 3, 16, 65]), min_size=2, max_size=4))
    axes = data.draw(st.lists(st.integers(0, len(shape) - 1), min_size=1, unique=True))
    keep = data.draw(st.booleans())
    x = random(*shape, seed=len(axes))
    compared = compare(lambda x: jnp.sum(x, tuple(axes), keepdims=keep), (x,), ops="short_sum")
    assert compared.complaints == []


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((600, 9), (1,)),  # long rows
        ((129, 600), (0,)),  # long columns
        ((3, 600, 4), (0, 2)),  # others stand between
        ((16, 64, 8), (0, 1, 2)),  # one sum
        ((4095, 1), (1,)),  # nothing is added
        ((64, 4), (1,)),  # few numbers altogether
        ((600, 0), (1,)),
    ],
)
def test_other_sums_are_left_alone(shape, axes):
    assert "short_sum" not in found(lambda x: jnp.sum(x, axes), jnp.ones(shape))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.int32, jnp.complex64])
def test_other_dtypes_are_left_alone(dtype):
    function = lambda x: jax.lax.reduce_sum_p.bind(x, axes=(1,), out_sharding=None)  # noqa: E731
    assert found(function, jnp.ones((2000, 4), dtype)) == []


def test_bfloat16_is_summed_in_float32():
    x = random(2000, 4).astype(jnp.bfloat16)
    compared = compare(lambda x: jnp.sum(x, 1), (x,), ops="short_sum")
    assert compared.complaints == []
    assert compared.report.counts()["respelling"] == 1


def test_special_values_are_those_of_the_original():
    x = random(2000, 3).at[0, 1].set(jnp.inf).at[1, 0].set(jnp.nan).at[2, 1].set(-jnp.inf)
    x = x.at[3].set(jnp.array([jnp.inf, -jnp.inf, 0.0])).at[4].set(-0.0).at[5].set(3e38).at[6].set(1e-42)
    function = lambda x: jnp.sum(x, 1)  # noqa: E731
    respelt = autopallas.optimize(function, objective="always", ops="short_sum", strict=True)(x)
    wanted = jax.jit(function)(x)
    np.testing.assert_allclose(respelt, wanted, rtol=1e-6, atol=1e-6)
    assert np.isnan(np.asarray(wanted)).sum() == 2
    assert np.isinf(np.asarray(wanted)).sum() == 3


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_under_vmap(axis):
    x = random(5, 16, 65)
    function = jax.vmap(lambda x: jnp.sum(x, 0), axis, axis % 2)
    compared = compare(function, (x,), ops="short_sum")
    assert compared.complaints == []


def test_in_a_loop_and_a_checkpoint():
    @jax.checkpoint
    def step(state, x):
        state = 0.5 * state + x * jnp.sum(state * x, -1, keepdims=True)
        return state, jnp.sum(state, 0)

    def loss(x):
        return jnp.sum(jax.lax.scan(step, jnp.ones(x.shape[1:]), x)[1] ** 2)

    x = random(3, 1500, 3) / 3
    compared = compare(jax.value_and_grad(loss), (x,), ops="short_sum")
    assert compared.complaints == []
    assert compared.report.counts()["respelling"] >= 2


@pytest.mark.parametrize(
    ("shape", "axes", "sizes"),
    [
        ((5, 6, 7), (1,), (5, 6, 7)),
        ((5, 3, 2), (1, 2), (5, 6, 1)),
        ((5, 1, 7), (0, 1), (1, 5, 7)),
        ((5, 1, 7), (1,), None),
        ((5, 6, 7), (0, 2), None),
        ((5, 1, 7), (0, 2), None),
    ],
)
def test_sizes_of_short_sums(shape, axes, sizes):
    assert short_sums(shape, axes) == sizes
    if sizes is not None:
        x = jnp.arange(float(np.prod(shape))).reshape(shape)
        np.testing.assert_array_equal(short_sum(x, axes), x.sum(axes))


def test_squared_distances_on_request_come_first():
    x, y = random(40, 3), random(50, 3, seed=1)
    distances = lambda x, y: jnp.sum((x[:, None] - y[None]) ** 2, -1)  # noqa: E731
    for ops in ("squared_distances", ["respelling", "squared_distances"]):
        report = autopallas.explain(autopallas.optimize(distances, ops=ops, objective="always"), x, y)
        assert [site.kind for site in report.sites] == ["squared_distances"]
    assert found(distances, x, y) == ["short_sum"]


def test_products_that_others_read_are_not_computed_anew():
    """The library reads what was written once; a loop of the program would compute the products a second time."""
    x, y, z = random(32, 16, 16), random(32, 16, 16, seed=1), random(8192, 8)

    def over_two_axes(x, y):
        product = x * y
        return product.sum(0), product.sum(2)

    assert found(over_two_axes, x, y) == []
    assert found(lambda x, y: (x * y).sum(0), x, y) == ["short_sum"]
    assert found(lambda x, y: jnp.exp(x * y).sum(1), x, y) == ["short_sum"]
    assert found(jax.nn.softmax, z) == ["short_sum"]  # exponentials are computed once in any case
    gradient = jax.grad(lambda x: jnp.sin(jax.nn.softmax(x, 1)).sum())
    assert found(gradient, random(16, 8, 1024)).count("short_sum") == 1  # of the two sums the forward's


def test_differences_that_others_read_are_summed_along_rows():
    """Rows gain more than it takes to compute a difference again."""

    def forces(x):
        difference = x[:, None] - x[None]
        return (difference / jnp.sum(difference**2, -1, keepdims=True)).sum(1)

    assert "short_sum" in found(forces, random(64, 3))
