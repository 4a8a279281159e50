"""Positions of extrema, with equal elements and NaNs."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.respellings import optimized, same_bits, sites
from support.tiers import examples

from autopallas.kernels.respelling.kinds import kind_named


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(
        st.sampled_from([0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan")]), min_size=1, max_size=9
    ),
    st.sampled_from(["float32", "bfloat16", "float16"]),
    st.booleans(),
)
def test_the_first_extremum_or_the_first_nan(values, dtype, largest):
    x = jnp.asarray(values, dtype)
    run = jnp.argmax if largest else jnp.argmin
    assert int(optimized(run)(x)) == int(run(x))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("function", [jnp.argmax, jnp.argmin])
def test_the_first_nan_is_the_extremum_of_three_axes(function, dtype):
    """Of three axes and more, XLA's maxima of float32 numbers on CPUs leave NaNs out."""
    draw = np.random.default_rng(0)
    x = draw.choice([np.nan, np.inf, -np.inf, 0, 1, 2], (2, 40, 64), p=[0.02, 0.02, 0.02, 0.3, 0.34, 0.3])
    x = jnp.asarray(x, dtype)
    for axis in range(3):
        run = optimized(lambda x, axis=axis: function(x, axis), numerics="identical")
        same_bits(run(x), function(x, axis))
        assert run.report().counts() == {"respelling": 1}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32, jnp.uint8, jnp.int8])
@pytest.mark.parametrize(("shape", "axis"), [((5, 7), 0), ((5, 7), 1), ((3, 1, 4), 1), ((8,), 0), ((0, 3), 1)])
@pytest.mark.parametrize("function", [jnp.argmax, jnp.argmin])
def test_positions_of_extrema(dtype, shape, axis, function):
    x = jnp.asarray(np.random.default_rng(0).integers(0, 4, shape), dtype)
    same_bits(optimized(lambda x: function(x, axis))(x), function(x, axis))
    assert len(sites(lambda x: function(x, axis), x)) == (0 not in shape)


def test_rows_of_long_axes_hold_for_none_that_is_shorter():
    """40 rows of 100,000, and 64 of 17,000, took twice as long with JAX 0.10."""
    shapes = (24, 100), (40, 100), (64, 100), (40, 15_000), (64, 17_000), (40, 100_000)
    forms = [sites(lambda x: jnp.argmax(x, 0), jnp.ones(shape))[0].site.form for shape in shapes]
    assert [kind_named("argmax").feature(form) for form in forms] == [
        "floats, short other axis",
        "floats, middle other axis",
        "floats, long other axis",
        "floats, short other axis",
        "floats, long other axis of wide rows",
        "floats, short other axis of wide rows",
    ]


def test_positions_beyond_what_a_float_counts():
    x = jnp.zeros(2**24 + 5, jnp.int8).at[2**24 + 3].set(1)
    assert int(optimized(jnp.argmax)(x)) == 2**24 + 3
