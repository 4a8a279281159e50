"""Respelling of sums over a short last axis and others: what is found, what is left alone, and what it computes."""

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
from autopallas.graph import Graph, flatten
from autopallas.kernels.respelling.tuned_block_sizes import TABLE
from autopallas.patterns import find


def two_passes(x):
    """[batch, height, width, group, channel]"""
    centred = x - x.mean((1, 2, 4), keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean((1, 2, 4), keepdims=True) + 1e-5)


def one_pass(x):
    mean, square = x.mean((1, 2, 4)), (x * x).mean((1, 2, 4))
    scale = jax.lax.rsqrt(jnp.maximum(square - mean * mean, 0.0) + 1e-5)
    return (x - mean[:, None, None, :, None]) * scale[:, None, None, :, None]


def group_norm(x, scale, shift, statistics, groups=4):
    normalised = statistics(x.reshape(*x.shape[:-1], groups, -1)).reshape(x.shape)
    return normalised * scale + shift


@pytest.mark.parametrize("statistics", [two_passes, one_pass])
@pytest.mark.parametrize("offset", [0.0, 3.0])
@pytest.mark.parametrize("shape", [(2, 5, 3, 12), (1, 1, 7, 8)])
def test_group_norms_and_their_gradients(shape, offset, statistics):
    x, scale, shift = random(*shape) + offset, random(shape[-1], seed=1), random(shape[-1], seed=2)

    def step(x, scale, shift):
        loss = lambda *given: jnp.sum(jnp.sin(group_norm(*given, statistics)))  # noqa: E731
        return jax.value_and_grad(loss, argnums=(0, 1, 2))(x, scale, shift)

    assert found(step, x, scale, shift).count("reduction") >= 2
    compared = compare(step, (x, scale, shift), ops="reduction")
    assert compared.complaints == []
    assert compared.report.counts()["respelling"] >= 2


def test_sums_far_from_zero_are_as_exact_as_the_original():
    """Over many sums: a difference of such sums, as in a variance by one pass, enlarges single errors of both."""
    function = lambda x: jnp.sum(x, (1, 2, 4))  # noqa: E731
    respelt = autopallas.optimize(function, objective="always", ops="reduction", strict=True)
    errors = []
    for seed in range(20):
        x = random(2, 5, 3, 4, 3, seed=seed) + 30.0
        exact = np.asarray(x, np.float64).sum((1, 2, 4))
        errors.append([np.asarray(f(x), np.float64) - exact for f in (respelt, function)])
    own, original = np.sqrt(np.mean(np.square(np.array(errors)), axis=(0, 2, 3)))
    assert own <= original


@settings(max_examples=examples(25), deadline=None)
@given(st.data())
def test_sums_at_random(data):
    shape = data.draw(st.lists(st.sampled_from([1, 2, 3, 5]), min_size=2, max_size=5))
    axes = data.draw(st.lists(st.integers(0, len(shape) - 1), min_size=1, unique=True))
    keep = data.draw(st.booleans())
    x = random(*shape, seed=len(axes))
    compared = compare(lambda x: jnp.sum(x, tuple(axes), keepdims=keep), (x,), ops="reduction")
    assert compared.complaints == []


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((4, 6, 8), (2,)),  # one stage
        ((4, 6, 8), (0, 1)),  # one stage, on vectors
        ((4, 6, 8), (0, 1, 2)),  # nothing stays
        ((4, 1, 8), (0, 2)),  # nothing stays between
        ((1, 6, 8), (0, 2)),  # nothing is added up before
        ((4, 6, 65), (0, 2)),  # the last axis fills vectors
        ((4, 6, 0), (0, 2)),
    ],
)
def test_other_sums_are_left_alone(shape, axes):
    assert found(lambda x: jnp.sum(x, axes), jnp.ones(shape)) == []


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int32, jnp.complex64])
def test_other_dtypes_are_left_alone(dtype):
    function = lambda x: jax.lax.reduce_sum_p.bind(x, axes=(0, 2), out_sharding=None)  # noqa: E731
    assert found(function, jnp.ones((4, 6, 8), dtype)) == []


def test_special_values_stay_where_they_are():
    x = random(3, 4, 5, 6, 2)
    x = x.at[0, 1, 2, 3, 1].set(jnp.inf).at[1, 0, 0, 0, 0].set(jnp.nan).at[2, 1, 1, 1, 0].set(-jnp.inf)
    x = x.at[2, 2, 1, 1, 1].set(jnp.inf)
    function = lambda x: jnp.sum(x, (1, 2, 4))  # noqa: E731
    given = autopallas.optimize(function, objective="always", ops="reduction", strict=True)(x)
    wanted = np.asarray(function(x))
    assert np.isfinite(wanted).sum() == wanted.size - 3
    np.testing.assert_allclose(given, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_under_vmap(axis):
    x = random(3, 4, 5, 6, 2)
    function = jax.vmap(lambda x: jnp.sum(x, (0, 3)), axis)
    compared = compare(function, (x,), ops="reduction")
    assert compared.complaints == []
    assert compared.report.counts()["respelling"] == 1


def test_axes_that_are_integers_of_numpy_are_the_same_site():
    """Derivatives that JAX writes have such axes; caches and lockfiles know a site by its text."""
    by = lambda integer: lambda x: jax.lax.reduce_sum_p.bind(x, axes=(integer(0), integer(2)), out_sharding=None)  # noqa: E731
    ((one,), _), ((other,), _) = (
        find(Graph(flatten(jax.make_jaxpr(by(integer))(jnp.ones((8, 64, 4))))), ("respelling",), True)
        for integer in (int, np.int64)
    )
    assert str(one.spec) == str(other.spec)
    assert one.spec.to_dict() == other.spec.to_dict()


def test_each_key_was_measured_with_each_line_of_jax():
    """No row that gains less than four times holds for another line, so that without one of its own a site stays."""
    lines = {}
    for key, row in TABLE.files.read("cpu"):
        if key[-1].startswith("reduction, "):
            lines.setdefault((key, row.extensions), set()).add(row.versions[:8])
    assert lines
    assert set(map(frozenset, lines.values())) == {frozenset({"jax 0.10", "jax 0.12"})}
