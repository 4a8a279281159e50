"""Respelling of convolutions of volumes: what is found, what is left alone, and what it computes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from support.compare import compare
from support.respellings import LAYOUTS, agrees, found, layer_operands
from support.tiers import examples

import autopallas

NAME = "convolution_of_volumes"
LAST = LAYOUTS[3][0]


def convolve(x, w, numbers=LAST, strides=(1, 1, 1), padding="SAME", spread=(1, 1, 1), reach=(1, 1, 1), **params):
    return lax.conv_general_dilated(x, w, strides, padding, spread, reach, numbers, **params)


def operands(numbers=LAST, size=(6, 7, 5), window=(3, 3, 2), channels=3, results=4):
    return layer_operands(numbers, size, window, channels, results)


def agree(run, x, w, count=1):
    agrees(NAME, run, (x, w), count)


@pytest.mark.parametrize("numbers", [*LAYOUTS[3], ("CNDWH", "IODHW", "NHWDC")], ids=str)
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"strides": (2, 1, 3)},
        {"reach": (2, 2, 1)},
        {"spread": (2, 2, 2), "padding": [(2, 1), (1, 2), (1, 1)]},
        {"spread": (3, 1, 2), "padding": [(0, 4), (0, 0), (3, 0)], "reach": (2, 1, 1)},
        {"padding": [(-1, 2), (0, -2), (-1, -1)]},
    ],
    ids=str,
)
def test_every_way_to_read(numbers, how):
    agree(lambda x, w: convolve(x, w, numbers, **how), *operands(numbers))


@pytest.mark.parametrize("run", [convolve, lambda x, w: lax.conv_transpose(x, w, (2, 3, 2), "SAME")])
def test_train_steps(run):
    """The gradient of a volume is such a convolution, and that of a weight one of another kind."""
    step = jax.value_and_grad(lambda x, w: jnp.sin(run(x, w)).sum(), (0, 1))
    x, w = operands(window=(2, 3, 2))
    kinds = found(step, x, w)
    assert (kinds.count(NAME), kinds.count("weight_gradient")) == (2, 1)
    compared = compare(step, (x, w), gradients=False)
    assert compared.complaints == []


def test_in_loops_and_under_vmap():
    x, w = operands()
    many = jnp.stack([x, -x, 2 * x])
    looped = lambda x, w: lax.map(lambda each: convolve(each, w), x)  # noqa: E731
    for run in (looped, jax.vmap(convolve, (0, None)), jax.vmap(autopallas.optimize(convolve), (0, None))):
        own = autopallas.optimize(run, objective="always", strict=True, ops=NAME)
        np.testing.assert_allclose(own(many, w), looped(many, w), rtol=2e-5, atol=2e-5)  # sums of 54 products
        assert own.report().counts()["respelling"] == 1


SIZES = st.tuples(*(st.integers(1, 6),) * 3)
WINDOWS = st.tuples(*(st.integers(1, 3),) * 3)
SIDES = st.tuples(*(st.tuples(st.integers(-1, 3), st.integers(-1, 3)),) * 3)


@settings(max_examples=examples(30), deadline=None)
@given(SIZES, WINDOWS, WINDOWS, WINDOWS, SIDES, st.booleans())
def test_sizes_drawn_at_random(size, window, steps, reach, padding, spread):
    how = {"spread" if spread else "strides": steps, "reach": reach, "padding": list(padding)}
    x, w = operands(size=size, window=window)
    run = lambda x, w: convolve(x, w, **how)  # noqa: E731
    try:
        wanted = run(x.astype(jnp.float32), w)
    except ValueError:
        return  # nothing is left of the volume
    if found(run, x, w) == [NAME]:
        own = autopallas.optimize(run, objective="always", strict=True, ops=NAME)
        np.testing.assert_allclose(own(x, w), wanted, rtol=2e-5, atol=2e-5)  # sums of up to 81 products


@pytest.mark.parametrize(
    "run",
    [
        lambda x, w: convolve(x, w[:1]),  # planes that are apart already
        lambda x, w: convolve(jnp.tile(x, 2), w, feature_group_count=2),
        lambda x, w: convolve(x, w, precision="highest"),
        lambda x, w: convolve(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)),
        lambda x, w: convolve(x, w, strides=(2, 1, 1), spread=(2, 1, 1), padding=[(1, 1)] * 3),
        lambda x, w: convolve(x[0], w[0], LAYOUTS[2][0], (1, 1), spread=(1, 1), reach=(1, 1)),
        lambda x, w: convolve(x, jnp.tile(w, (3, 1, 1, 1, 1))),  # a deep window
    ],
)
def test_what_is_left_alone(run):
    assert NAME not in found(run, *operands())


def test_inserted_zeros_assume_that_operands_are_finite():
    x, w = operands()
    for padding, count in (("SAME", 0), ("VALID", 1)):
        run = lambda x, w, padding=padding: convolve(x, w, padding=padding)  # noqa: E731
        own = autopallas.optimize(run, objective="always", ops=NAME, assume_finite=False)
        own(x, w)
        assert own.report().counts()["respelling"] == count


def test_default_options_respell_a_layer_on_cpus():
    """The compiler has no library for what lies between inserted zeros."""
    x = jax.ShapeDtypeStruct((1, 16, 16, 16, 32), jnp.float32)
    w = jax.ShapeDtypeStruct((3, 3, 3, 32, 32), jnp.float32)
    report = autopallas.explain(lambda x, w: lax.conv_transpose(x, w, (2, 2, 2), "SAME"), x, w)
    assert [site.kind for site in report.sites] == [NAME]
