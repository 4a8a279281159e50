"""Convolutions from one channel to one: what is found alone and in loops, and what it computes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.compare import compare
from support.respellings import found, random

import autopallas

FIRST, LAST = ("NCHW", "OIHW", "NCHW"), ("NHWC", "HWIO", "NHWC")
NAME = "convolution"


def convolve(x, w, numbers=FIRST, strides=(1, 1), padding="SAME", **params):
    return lax.conv_general_dilated(x, w, strides, padding, dimension_numbers=numbers, **params)


def image(numbers, *sizes, batch=2):
    own = {"N": batch, "C": 1, **dict(zip("HW", sizes, strict=True))}
    return random(*(own[letter] for letter in numbers[0]))


def window(numbers, *sizes):
    own = {"O": 1, "I": 1, **dict(zip("HW", sizes, strict=True))}
    return random(*(own[letter] for letter in numbers[1]))


def agree(function, *arguments, names=(NAME,), **options):
    assert [kind for kind in found(function, *arguments) if kind in names]
    compared = compare(function, arguments, ops=list(names), **options)
    assert compared.complaints == []
    assert compared.counts("respelling") > 0
    return compared


@pytest.mark.parametrize("numbers", [FIRST, LAST, ("HWNC", "IHWO", "CHNW")], ids=str)
@pytest.mark.parametrize("size", [(2, 2), (3, 3), (1, 5), (6, 7), (11, 3)], ids=str)
@pytest.mark.parametrize(
    ("strides", "padding", "dilation"),
    [
        ((1, 1), "SAME", (1, 1)),
        ((2, 1), "VALID", (1, 1)),
        ((1, 1), ((3, 0), (-1, 2)), (1, 1)),
        ((1, 1), "SAME", (1, 2)),
    ],
    ids=str,
)
def test_windows_over_one_channel(numbers, size, strides, padding, dilation):
    x, w = image(numbers, 17, 15), window(numbers, *size)
    agree(lambda x, w: convolve(x, w, numbers, strides, padding, rhs_dilation=dilation), x, w)


@pytest.mark.parametrize("taps", [2, 25, 26, 50, 101])
def test_filters_of_signals(taps):
    """More taps than 25 stand in a loop, whose steps have 25 each."""
    x, w = random(3, 300), random(taps)
    agree(lambda x, w: jax.vmap(lambda x: jnp.convolve(x, w, mode="same"))(x), x, w)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32], ids=str)
def test_sums_are_rounded_once(dtype):
    x, w = image(FIRST, 20, 20).astype(dtype), window(FIRST, 7, 7).astype(dtype)
    ours = autopallas.optimize(convolve, objective="always", strict=True, ops=NAME)(x, w)
    exact = convolve(x.astype(jnp.float32), w.astype(jnp.float32))
    tolerance = float(jnp.finfo(dtype).eps) * float(jnp.abs(exact).max())
    np.testing.assert_allclose(ours.astype(jnp.float32), exact, rtol=0, atol=tolerance)


def test_a_blurred_image_and_its_gradient():
    """The gradient of a strided window is a convolution of an image with zeros between its elements."""
    x, w = image(FIRST, 16, 16), window(FIRST, 5, 5)
    step = jax.value_and_grad(lambda x: (jnp.tanh(convolve(x, w, strides=(2, 2))) ** 2).sum())
    agree(step, x, gradients=False)


def looped(function):
    return lambda x, w: lax.fori_loop(0, 3, lambda _, x: 0.1 * function(x, w), x)


def test_stencils_in_loops():
    """With the channels first XLA fuses a stencil with what is around it; with the channels last it calls its library,
    which is slow at it; and large windows are slow both ways."""
    for numbers, size, expected in ((FIRST, 3, False), (FIRST, 7, True), (LAST, 3, True), (LAST, 7, True)):
        x, w = image(numbers, 16, 16), window(numbers, size, size)
        run = looped(lambda x, w, numbers=numbers: convolve(x, w, numbers))
        assert (NAME in found(run, x, w)) == expected
        if expected:
            agree(run, x, w)


@pytest.mark.parametrize("numbers", [FIRST, LAST], ids=str)
@pytest.mark.parametrize("loop", [True, False])
def test_zeros_around_images_that_the_compiler_skips_are_assumed_to_meet_finite_weights(numbers, loop):
    x, w = image(numbers, 16, 16), window(numbers, 7, 7)
    w = w.at[(0,) * 4].set(jnp.inf)
    convolution = lambda x, w: convolve(x, w, numbers)  # noqa: E731
    run = (lambda x, w: lax.map(lambda x: convolution(x, w), jnp.stack([x, x]))) if loop else convolution
    ours = autopallas.optimize(run, objective="always", strict=True, ops=NAME, assume_finite=False)
    np.testing.assert_allclose(ours(x, w), jax.jit(run)(x, w), rtol=2e-5, atol=2e-5)
    assert ours.report().counts() == ({} if loop and numbers == FIRST else {"respelling": 1})


@pytest.mark.parametrize(("size", "channels"), [(96, 1), (256, 1), (64, 2), (300, 4)])
def test_a_stencil_in_a_loop_is_not_handed_to_the_library(size, channels):
    """It takes up to 50 times as long there as the sums that the compiler writes."""
    x, w = jnp.ones((1, channels, size, size)), jnp.ones((channels, channels, 3, 3))
    report = autopallas.explain(looped(convolve), x, w)
    assert [site.kind for site in report.sites] == ["looped_convolution"]
    assert report.counts() == {}


def test_more_channels_and_sums_are_left_alone():
    assert found(convolve, image(FIRST, 9, 9), random(2, 1, 3, 3)) == []
    assert found(convolve, random(2, 3, 9, 9), random(1, 3, 3, 3)) == []
    assert found(convolve, image(FIRST, 9, 9), random(1, 1, 1, 1)) == []
