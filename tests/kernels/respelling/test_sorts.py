"""Sorts by one key, which carry other arrays along."""

from __future__ import annotations

import re

import jax
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


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("run", [lax.sort, lax.sort_key_val], ids=["alone", "carrying"])
def test_the_sorted_axis_stands_last(run, axis):
    """Along others the CPU compiler copies one element after the other: a sort of integers took 1.5 times as long as
    the original."""
    x = jnp.round(random(7, 9, 8) * 4)
    places = jnp.arange(x.size).reshape(x.shape)
    given = (x,) if run is lax.sort else (x, places)
    function = lambda *given: run(*given, dimension=axis)  # noqa: E731
    jax.tree.map(np.testing.assert_array_equal, optimized(function)(*given), function(*given))
    text = jax.jit(optimized(function)).lower(*given).as_text()
    assert re.findall(r"stablehlo\.sort.*dimension = (\d)", text) == ["2"]


EXTREMES = [0, 1, 2, 100, -1, -(2**31), 2**31 - 1, 2**32 - 1, 2**31]


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint32, jnp.int16, jnp.uint8])
def test_what_integers_carry_along(dtype):
    keys = np.random.default_rng(2).choice(np.array(EXTREMES, np.int64), (6, 40)).astype(np.dtype(dtype))
    x, places = jnp.asarray(keys), lax.broadcasted_iota(jnp.int32, keys.shape, 1)
    run = lambda x, p: lax.sort((x, p, p * 0.5), num_keys=1)  # noqa: E731
    same_bits(optimized(run)(x, places), run(x, places))
    same_bits(optimized(jnp.argsort)(x), jnp.argsort(x))
    assert len(sites(jnp.argsort, x)) == 1


def test_permutations_are_those_of_the_original():
    key = jax.random.key(3)
    for run in (lambda k: jax.random.permutation(k, 1000), lambda k: jax.random.choice(k, 500, (20,), replace=False)):
        np.testing.assert_array_equal(optimized(run)(key), run(key))
        assert len(sites(run, key)) >= 1
