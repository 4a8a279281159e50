"""Cumulative sums, products, extrema and logarithms of sums, along any axis."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.compare import compare
from support.respellings import optimized, random, same_bits, sites


@pytest.mark.parametrize(
    "run",
    [
        lambda x: lax.cumprod(x, axis=0),
        lambda x: lax.cumsum(x, axis=0),
        lambda x: lax.reduce_window(x, np.asarray(-jnp.inf, x.dtype), lax.max, (2, 1), (2, 1), "VALID"),
    ],
    ids=["cumprod", "cumsum", "reduce_window_max"],
)
def test_numbers_that_overflow_on_the_way_and_windows_with_a_nan_are_assumed_away(run):
    own = optimized(run)
    own(random(64, 128))
    (site,) = own.report().sites
    assert any("overflows" in text or "NaN" in text for text in site.assumptions)
    strict = optimized(run, assume_finite=False)
    rows = np.ones((64, 128), np.float32)
    rows[:4, 0], rows[4, 1] = [1e30, 1e30, 1e-30, 1e-30], np.nan
    rows[3, 2], rows[34:36, 2] = 3e38, [3e38, -3e38]
    np.testing.assert_array_equal(strict(rows), jax.jit(run)(rows))
    assert not strict.report().sites


@pytest.mark.parametrize("name", ["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("shape", "axis"), [((5, 7), 0), ((5, 7), 1), ((3, 4, 5), 1), ((9,), 0), ((2, 1), 0)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint8])
def test_cumulative_operations(name, reverse, shape, axis, dtype):
    floating = jnp.issubdtype(dtype, jnp.floating)
    if name == "cumlogsumexp" and not floating:
        pytest.skip("JAX has no logarithm of integers")
    x = (
        random(*shape, dtype=dtype)
        if floating
        else jnp.asarray(np.arange(np.prod(shape)).reshape(shape) % 5 + 1, dtype)
    )

    def run(x):
        return getattr(lax, name)(x, axis=axis, reverse=reverse)

    if not floating or name in ("cummax", "cummin"):
        same_bits(jax.jit(optimized(run))(x), jax.jit(run)(x))
        assert len(sites(run, x)) == 1
    else:
        found = compare(run, (x,), gradients=name != "cumprod")
        assert found.complaints == []
        assert found.counts("respelling") > 0


@pytest.mark.parametrize("name", ["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"])
def test_cumulative_operations_of_what_is_not_finite(name):
    values = [0.0, -0.0, 1.5, jnp.inf, -jnp.inf, jnp.nan, 2.0, -3e38, 3e38, 1e-40]
    x = jnp.asarray(list(itertools.permutations(values, 3)), jnp.float32).T

    def run(x):
        return getattr(lax, name)(x, axis=0)

    a, b = np.asarray(jax.jit(run)(x)), np.asarray(jax.jit(optimized(run))(x))
    np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
    np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("offset", [0.0, 1.0, 1e4])
def test_a_long_sum_is_no_less_exact_than_the_original(offset):
    """Added one by one without what rounding lost, 50,000 numbers of one sign are off by 1e-4."""
    x = random(50_000, 2) + offset
    found = compare(lambda x: jnp.cumsum(x, 0), (x,), gradients=False)
    assert found.complaints == []
    assert found.counts("respelling") == 1
    assert found.errors["value"][0][0] < 1e-6


@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize("numbers", ["random", "rising", "falling"])
def test_logarithms_of_long_sums_of_exponentials(numbers, offset):
    """Beside the logarithm of a long sum a term vanishes: carried as such, it is off by 1.5 at 1e4."""
    x = {"random": random(50_000), "rising": jnp.linspace(0, 99, 50_000), "falling": jnp.linspace(99, 0, 50_000)}
    found = compare(lambda x: lax.cumlogsumexp(x), (x[numbers] + offset,), gradients=False)
    assert found.complaints == []
    assert found.counts("respelling") == 1


def test_long_products_of_floats_are_left_alone():
    assert sites(lambda x: lax.cumprod(x, axis=0), random(2000, 3)) == []
    assert len(sites(lambda x: lax.cumprod(x, axis=0), jnp.ones((2000, 3), jnp.int32))) == 1
