"""Sorts by one floating key, which carry other arrays along."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.compare import compare
from support.respellings import optimized, random, same_bits, sites

SPECIAL = [0.0, 1.5, -1.5, float("inf"), float("-inf"), float("nan"), -float("nan"), 1e-40, -1e-40, 3e38, -3e38, 1.5]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_values_are_sorted_with_nans_last(dtype):
    x = jnp.asarray(np.random.default_rng(0).choice(np.array(SPECIAL, np.float32), (20, 13)), dtype)
    for axis in (0, 1):
        wanted = jnp.asarray(np.sort(np.asarray(x, np.float32), axis), dtype)  # JAX takes subnormal bfloat16 for equal
        found = optimized(lambda x, axis=axis: jnp.sort(x, axis))(x)
        np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(wanted, np.float32))
    assert len(sites(jnp.sort, x)) == 1


@pytest.mark.parametrize("stable", [True, False])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_further_operands_follow_and_equal_ones_stay_in_order(stable, dtype):
    """-0.0 equals 0.0, and every NaN every other."""
    x = jnp.asarray(np.random.default_rng(1).choice(np.array([*SPECIAL, -0.0], np.float32), (6, 40)), dtype)
    places = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    run = lambda x, p: lax.sort((x, p, -p), is_stable=stable, num_keys=1)  # noqa: E731
    if stable:
        same_bits(optimized(run)(x, places), run(x, places))
        same_bits(optimized(jnp.argsort)(x), jnp.argsort(x))
    keys, found, negative = optimized(run)(x, places)
    taken = np.take_along_axis(np.asarray(x, np.float32), np.asarray(found), 1)
    np.testing.assert_array_equal(taken, np.asarray(keys, np.float32))
    np.testing.assert_array_equal(found, -negative)


def test_minus_zero_stands_beside_zero():
    x = jnp.asarray([0.0, -0.0, 1.0, -1.0, -0.0, 0.0])
    np.testing.assert_array_equal(optimized(jnp.sort)(x), jnp.sort(x))


def test_other_sorts_are_left_alone():
    x = random(4, 8)
    assert sites(lambda x: lax.sort((x, x), num_keys=2), x) == []
    assert sites(jnp.sort, jnp.arange(8)) == []
    assert sites(jnp.sort, x.astype(jnp.complex64)) == []


@pytest.mark.parametrize(
    "function", [jnp.median, lambda x: jnp.quantile(x, 0.3, axis=-1), lambda x: jnp.percentile(x, 90)]
)
def test_what_sorts_inside(function):
    x = random(5, 31)
    found = compare(function, (x,), gradients=False)
    assert found.complaints == []
    assert found.counts("respelling") == 1
