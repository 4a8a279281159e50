"""Respelling of transposed convolutions: what is found, what is left alone, and what it computes."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from support.compare import compare
from support.respellings import LAYOUTS, agrees, found, layer_operands, random, sites
from support.tiers import examples

import autopallas
from autopallas.kernels.respelling.kinds.transposed_convolution import KIND

NAME = "transposed_convolution"
LAST = LAYOUTS[2][0]


def convolve(x, w, numbers=LAST, spread=(2, 2), padding=((1, 2), (1, 2)), **params):
    return lax.conv_general_dilated(x, w, (1,) * len(spread), padding, spread, None, numbers, **params)


def operands(numbers=LAST, size=(6, 5), window=(3, 4), channels=3, results=5):
    return layer_operands(numbers, size, window, channels, results)


def agree(run, x, w, count=1):
    agrees(NAME, run, (x, w), count)


@pytest.mark.parametrize("numbers", [*LAYOUTS[2], ("CNWH", "IOHW", "NWHC")], ids=str)
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"spread": (3, 1), "padding": [(0, 4), (0, 0)]},
        {"spread": (4, 3), "padding": [(3, 3), (2, 2)]},  # some phases read zeros alone
        {"padding": [(2, 1), (0, 0)]},
        {"padding": [(-1, 2), (3, -2)]},
        {"padding": [(9, 1), (0, 11)]},  # results that read only padding
    ],
    ids=str,
)
def test_every_way_to_read(numbers, how):
    agree(lambda x, w: convolve(x, w, numbers, **how), *operands(numbers))


@pytest.mark.parametrize(("window", "stride"), [*itertools.product((2, 3, 4, 5, 7, 8), (2, 3, 4))])
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_layers_over_one_axis(window, stride, padding):
    x, w = random(2, 9, 3), random(window, 3, 5, seed=1)
    agree(lambda x, w: lax.conv_transpose(x, w, (stride,), padding), x, w, window > stride)


@pytest.mark.parametrize("window", [2, 3, 5])
def test_gradients_of_images_of_strided_convolutions(window):
    numbers = LAYOUTS[2][1]
    run = lambda x, w: lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=numbers)  # noqa: E731
    step = jax.value_and_grad(lambda x, w: jnp.sin(run(x, w)).sum(), (0, 1))
    x, w = operands(numbers, size=(12, 11), window=(window, window), channels=6)
    kinds = found(step, x, w)
    assert (kinds.count(NAME), kinds.count("weight_gradient")) == (window > 2, 1)
    compared = compare(step, (x, w), gradients=False)
    assert compared.complaints == []


def test_train_steps_of_layers():
    """The gradient of its weights is of another kind, and that of its image an ordinary strided convolution."""
    step = jax.value_and_grad(lambda x, w: jnp.sin(lax.conv_transpose(x, w, (2, 2), "SAME")).sum(), (0, 1))
    x, w = operands()
    kinds = found(step, x, w)
    assert (kinds.count(NAME), kinds.count("weight_gradient")) == (1, 1)
    compared = compare(step, (x, w), gradients=False)
    assert compared.complaints == []


def test_in_loops_and_under_vmap():
    x, w = operands()
    many = jnp.stack([x, -x, 2 * x])
    looped = lambda x, w: lax.map(lambda each: convolve(each, w), x)  # noqa: E731
    for run in (looped, jax.vmap(convolve, (0, None)), jax.vmap(autopallas.optimize(convolve), (0, None))):
        own = autopallas.optimize(run, objective="always", strict=True, ops=NAME)
        np.testing.assert_allclose(own(many, w), looped(many, w), rtol=2e-5, atol=2e-5)  # sums of 36 products
        assert own.report().counts()["respelling"] == 1


SIZES = st.tuples(st.integers(1, 6), st.integers(1, 6))
WINDOWS = st.tuples(st.integers(1, 5), st.integers(1, 5))
SIDES = st.tuples(st.integers(-1, 5), st.integers(-1, 5))


@settings(max_examples=examples(40), deadline=None)
@given(SIZES, WINDOWS, WINDOWS, SIDES, SIDES)
def test_sizes_drawn_at_random(size, window, spread, rows, columns):
    x, w = operands(size=size, window=window)
    run = lambda x, w: convolve(x, w, spread=spread, padding=(rows, columns))  # noqa: E731
    try:
        wanted = run(x, w)
    except ValueError:
        return  # nothing is left of the image
    if found(run, x, w) == [NAME]:
        own = autopallas.optimize(run, objective="always", strict=True, ops=NAME)
        np.testing.assert_allclose(own(x, w), wanted, rtol=2e-5, atol=2e-5)  # sums of up to 75 products


@pytest.mark.parametrize(
    "run",
    [
        lambda x, w: convolve(x, w, spread=(1, 1)),
        lambda x, w: convolve(x, w, spread=(3, 4)),  # each result is one product
        lambda x, w: convolve(x, w[..., :4]),
        lambda x, w: convolve(jnp.tile(x, 40), jnp.tile(w, (1, 1, 40, 8))),
        lambda x, w: convolve(jnp.tile(x, 2), jnp.tile(w, 2), feature_group_count=2),
        lambda x, w: convolve(x, w, precision="highest"),
        lambda x, w: convolve(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)),
        lambda x, w: lax.conv_general_dilated(x, w, (2, 1), [(2, 2)] * 2, (2, 2), None, LAST),
        lambda x, w: lax.conv_general_dilated(x, w, (1, 1), [(2, 2)] * 2, (2, 2), (2, 2), LAST),
        lambda x, w: convolve(x[:, :1, :1], jnp.tile(w, (2, 1, 1, 1)), padding=((5, 5), (3, 3))),  # a large window
    ],
)
def test_what_is_left_alone(run):
    assert NAME not in found(run, *operands())


def test_infinities_and_nans_of_the_image_reach_what_reads_them():
    """Of an infinite weight times an inserted zero, which is NaN, nothing is kept: that weights are finite is told."""
    x, w = operands()
    x = x.at[0, 2, 3, 1].set(jnp.inf).at[1, 0, 0, 0].set(jnp.nan)
    own = autopallas.optimize(convolve, objective="always", strict=True, ops=NAME)
    wanted, given = np.asarray(convolve(x, w)), np.asarray(own(x, w))
    np.testing.assert_array_equal(np.isfinite(given), np.isfinite(wanted))
    careful = autopallas.optimize(convolve, objective="always", ops=NAME, assume_finite=False)
    careful(x, w)
    assert careful.report().counts()["respelling"] == 0


def test_few_channels_along_one_axis_have_evidence_of_their_own():
    """Rows of 64 channels and 32 results do not hold for 32 and 16, which lost by them."""

    def feature(channels, results):
        def run(x, w):
            return lax.conv_transpose(x, w, (2,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))

        (site,) = sites(run, random(8, 64, channels), random(4, channels, results))
        return KIND.feature(site.spec)

    assert feature(64, 32) == feature(32, 32) == "one axis, apart 2, reach 2"
    assert feature(32, 16) == "one axis, apart 2, reach 2, few channels"
