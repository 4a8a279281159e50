"""Grouped convolutions and their gradients, over layouts, strides, dilation and padding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.compare import compare
from support.respellings import LAYOUTS, convolution, optimized, random, sites

from autopallas.kernels.respelling.kinds import kind_named


def operands(rank, layout, channels, groups, multiplier=1, size=6, window=3, dtype=jnp.float32):
    sizes = dict(zip("DHW"[-rank:], (size + 1, size, size - 1)[:rank], strict=True)) | {"N": 2, "C": channels}
    weights = dict.fromkeys("DHW", window) | {"I": channels // groups, "O": channels * multiplier}
    data, kernel, _ = LAYOUTS[rank][layout]
    return (
        random(*(sizes[letter] for letter in data), dtype=dtype),
        random(*(weights[letter] for letter in kernel), seed=1, dtype=dtype),
    )


@pytest.mark.parametrize(
    ("rank", "layout"), [(rank, layout) for rank, layouts in LAYOUTS.items() for layout in range(len(layouts))]
)
@pytest.mark.parametrize(("channels", "groups", "multiplier"), [(6, 6, 1), (4, 4, 2), (6, 3, 1), (6, 2, 2)])
@pytest.mark.parametrize(
    ("stride", "padding", "dilation", "base"),
    [
        (1, "SAME", 1, 1),
        (2, "VALID", 1, 1),
        (1, "SAME", 2, 1),
        (1, [(2, 0)], 1, 1),
        (1, [(-1, 3)], 1, 2),
        (3, "SAME", 1, 1),
    ],
)
def test_grouped_convolutions_and_their_gradients(
    rank, layout, channels, groups, multiplier, stride, padding, dilation, base
):
    padding = padding * rank if isinstance(padding, list) else padding
    x, w = operands(rank, layout, channels, groups, multiplier, window=2 if rank == 3 else 3)
    run = convolution(groups, LAYOUTS[rank][layout], stride, padding, dilation, base)
    loss = jax.value_and_grad(lambda x, w: (jnp.tanh(run(x, w)) ** 2).sum(), (0, 1))
    found = compare(loss, (x, w), gradients=False)
    assert found.complaints == []
    assert found.counts("respelling") == 3


@pytest.mark.parametrize(
    ("rank", "layout"), [(rank, layout) for rank in (1, 2) for layout in range(len(LAYOUTS[rank]))]
)
@pytest.mark.parametrize(("channels", "groups", "multiplier"), [(4, 4, 2), (6, 3, 1), (6, 2, 2)])
@pytest.mark.parametrize(
    ("stride", "padding", "dilation", "base"),
    [
        (1, "SAME", 1, 1),
        (2, "SAME", 1, 1),
        (1, "SAME", 2, 1),
        (1, [(15, 0)], 1, 1),
        (1, [(-1, 3)], 1, 2),
    ],
)
def test_gradients_of_grouped_weights_with_more_taps_are_convolutions_over_groups_of_features(
    rank, layout, channels, groups, multiplier, stride, padding, dilation, base
):
    padding = padding * rank if isinstance(padding, list) else padding
    x, w = operands(
        rank, layout, channels, groups, multiplier, size=25 if rank == 1 else 9, window=12 if rank == 1 else 4
    )
    run = convolution(groups, LAYOUTS[rank][layout], stride, padding, dilation, base)
    gradient = jax.grad(lambda x, w: (jnp.tanh(run(x, w)) ** 2).sum(), 1)
    found = compare(gradient, (x, w), gradients=False)
    assert found.complaints == []
    assert found.counts("respelling") == 2
    lowered = optimized(gradient, ops="convolution").lower(x, w).as_text()
    assert f"batch_group_count = {groups}" in jax.jit(gradient).lower(x, w).as_text()
    assert f"batch_group_count = {groups}" not in lowered


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_gradients_of_grouped_weights_are_summed_in_float32(dtype):
    x, w = operands(1, 0, 6, 3, size=25, window=12, dtype=dtype)
    run = convolution(3, LAYOUTS[1][0])
    found = compare(jax.grad(lambda x, w: (run(x, w) ** 2).sum(), 1), (x, w), gradients=False)
    assert found.complaints == []
    assert found.counts("respelling") == 2


def test_gradients_of_many_taps_are_found_whatever_their_number():
    """As of the positional convolution of a speech model, 128 taps over more positions than that."""
    x, w = random(1, 150, 8), random(128, 4, 8, seed=1)
    found = compare(jax.grad(lambda x, w: (convolution(2, LAYOUTS[1][0])(x, w) ** 2).sum(), 1), (x, w), gradients=False)
    assert found.complaints == []
    assert found.counts("respelling") == 1  # not the forward, which has no form


@pytest.mark.parametrize(("window", "products"), [(2, 4), (3, 1)])
def test_products_of_many_taps_stand_in_a_loop(window, products):
    """What each tap reads is a kernel of its own to compile, since each begins at another place."""
    x, w = operands(2, 0, 32, 2, size=9, window=window)
    run = convolution(2, LAYOUTS[2][0])
    y = run(x, w)
    for function, given in (
        (run, (x, w)),
        (lambda x, y: jax.linear_transpose(lambda w: run(x, w), w)(y)[0], (x, y)),
    ):
        own = optimized(function, ops="convolution")
        assert own.lower(*given).as_text().count("stablehlo.dot_general") == products
        np.testing.assert_allclose(own(*given), function(*given), rtol=1e-5, atol=1e-5 * float(jnp.abs(y).max()))


@pytest.mark.parametrize("stride", [1, 2])
def test_gradients_of_weights_read_what_others_pad(stride):
    """Each operand is padded once: a kernel more takes longer to compile than to run."""
    x, w = operands(2, 0, 32, 32, size=8)
    run = convolution(32, LAYOUTS[2][0], stride, [(1, 1)] * 2)

    def step(x, w, y):
        result, pull = jax.vjp(run, jnp.maximum(x, 0.5), w)
        return result, pull(jnp.minimum(y, 0.25))

    given = (x, w, random(*run(x, w).shape, seed=2))
    own = optimized(step, ops="convolution")
    text = own.lower(*given).compile().as_text()
    assert own.report().counts() == {"respelling": 3}
    assert [text.count(f" {name}(") for name in ("pad", "maximum", "minimum", "convolution")] == [2, 1, 1, 0]
    for found, wanted in zip(jax.tree.leaves(own(*given)), jax.tree.leaves(step(*given)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5 * float(jnp.abs(wanted).max()))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_convolutions_are_summed_in_float32(dtype):
    x, w = operands(2, 0, 6, 6, size=9, dtype=dtype)
    found = compare(convolution(6, LAYOUTS[2][0]), (x, w))
    assert found.complaints == []
    assert found.counts("respelling") > 0


def test_a_weight_gradient_is_summed_over_blocks_that_do_not_divide_the_window():
    """The window, of 1031 positions, is longer than one block."""
    run = convolution(40, LAYOUTS[1][0], padding=[(3, 0)])
    x, w = random(2, 1031, 40), random(4, 1, 40, seed=1)
    found = compare(jax.grad(lambda x, w: (run(x, w) ** 2).sum(), 1), (x, w), gradients=False)
    assert found.complaints == []
    assert found.counts("respelling") == 2


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("value", [jnp.inf, -jnp.inf, jnp.nan])
def test_what_is_not_finite_meets_the_zeros_of_the_padding(place, value):
    given = list(operands(2, 0, 4, 4))
    given[place] = given[place].at[(0,) * 4].set(value)
    run = convolution(4, LAYOUTS[2][0])
    a, b = jax.jit(run)(*given), jax.jit(optimized(run))(*given)
    np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
    np.testing.assert_array_equal(np.isinf(a), np.isinf(b))


FOUR_AXES = lax.ConvDimensionNumbers((0, 5, 1, 2, 3, 4), (5, 4, 0, 1, 2, 3), (0, 5, 1, 2, 3, 4))
"""Numbers of a convolution over four axes of space, with the channels last."""


@pytest.mark.parametrize(
    ("dtype", "rank", "padding", "assumed"),
    [("float64", 2, "SAME", 1), ("float64", 2, "VALID", 0), ("float32", 4, "SAME", 1), ("float32", 3, "SAME", 0)],
)
def test_padding_that_the_original_skips_is_assumed_to_meet_what_is_finite(dtype, rank, padding, assumed):
    numbers = LAYOUTS[rank][0] if rank in LAYOUTS else FOUR_AXES
    run = convolution(2, numbers, padding=padding)
    with jax.enable_x64(True):
        x, w = np.ones((1, *(4,) * rank, 2), dtype), np.ones((*(2,) * rank, 1, 2), dtype)
        w[-1] = np.inf
        own = optimized(run)
        own(x, w)
        (site,) = own.report().sites
        assert len(site.assumptions) == assumed
        strict = optimized(run, assume_finite=False)
        np.testing.assert_array_equal(strict(x, w), jax.jit(run)(x, w))
        assert len(strict.report().sites) == 1 - assumed


@pytest.mark.parametrize("stride", [1, 2])
def test_depthwise_convolutions_of_late_layers_sum_over_their_window(stride):
    """Images that are smaller than the window leave no products of matrices, and have the evidence of larger ones."""
    run = convolution(6, LAYOUTS[2][0], stride)
    x, w = random(2, 4, 3, 6), random(7, 7, 1, 6, seed=1)
    (site,) = sites(run, x, w)
    assert kind_named("convolution").feature(site.spec).startswith("depthwise, 64 taps of the window")
    assert "dot_general" not in str(jax.make_jaxpr(optimized(run))(x, w).jaxpr)
    found = compare(jax.value_and_grad(lambda x, w: (jnp.tanh(run(x, w)) ** 2).sum(), (0, 1)), (x, w), gradients=False)
    assert found.complaints == []
    assert found.counts("respelling") == 3


@pytest.mark.parametrize(
    ("rank", "layout", "size", "window", "stride"),
    [(2, 0, 20, 9, 1), (2, 1, 8, 9, 1), (2, 0, 24, 11, 2), (1, 0, 200, 90, 1)],
)
def test_depthwise_windows_of_many_taps_stand_in_loops(rank, layout, size, window, stride):
    """As of structural similarity over colours, or of large kernels: each equation stays short."""
    x, w = operands(rank, layout, 6, 6, size=size, window=window)
    run = convolution(6, LAYOUTS[rank][layout], stride)
    (site,) = sites(run, x, w)
    assert kind_named("convolution").feature(site.spec).startswith("depthwise, 4096 taps of the window")
    loss = jax.value_and_grad(lambda x, w: (jnp.tanh(run(x, w)) ** 2).sum(), (0, 1))
    assert len(str(jax.make_jaxpr(optimized(loss))(x, w).jaxpr)) < 60_000
    found = compare(loss, (x, w), gradients=False)
    assert found.complaints == []
    assert found.counts("respelling") == 3


def test_few_elements_have_evidence_of_their_own():
    def feature(*shape):
        (site,) = sites(convolution(shape[-1], LAYOUTS[2][0]), jnp.ones(shape), jnp.ones((3, 3, 1, shape[-1])))
        return kind_named("convolution").feature(site.spec)

    assert feature(1, 12, 12, 44).endswith("few elements")
    assert "elements" not in feature(1, 14, 14, 44)
    assert feature(1, 4, 4, 8).endswith("hardly any elements")


def test_groups_of_a_batch_have_evidence_of_their_own():
    """XLA computes windows over groups of features on vectors, and gradients with as few taps one group at a time."""
    x = jnp.ones((1, 24, 64))

    def features(function, w):
        return [kind_named("convolution").feature(site.spec) for site in sites(function, x, w)]

    forward, strided = convolution(2, LAYOUTS[1][0]), convolution(2, LAYOUTS[1][0], 4, [(0, 0)])
    (found,) = features(forward, jnp.ones((3, 32, 64)))
    assert found.startswith("grouped, few groups, 4 taps of the window, channels last, in fours")
    found = features(jax.grad(lambda x, w: (strided(x, w) ** 2).sum(), 1), jnp.ones((16, 32, 64)))
    of_batch = "grouped, few groups, 4 taps of the window, channels last, groups of a batch"
    assert any(feature.startswith(of_batch) for feature in found)


@pytest.mark.parametrize("of_batch", [False, True])
def test_products_have_the_precision_that_is_asked_for(of_batch):
    """On accelerators the usual one rounds what is multiplied to fewer bits."""
    groups = {"batch_group_count": 2} if of_batch else {"feature_group_count": 2}
    x, w = random(4, 8, 8, 6), random(3, 3, 6 if of_batch else 3, 8, seed=1)
    for precision in ("highest", ("high", "highest"), "default", None):

        def run(x, w, precision=precision):
            return lax.conv_general_dilated(
                x, w, (1, 1), "SAME", dimension_numbers=LAYOUTS[2][0], precision=precision, **groups
            )

        (wanted,) = (e.params["precision"] for e in jax.make_jaxpr(run)(x, w).eqns)
        (site,) = sites(run, x, w)
        kind = kind_named(site.spec.kind)
        program = jax.make_jaxpr(lambda x, w, kind=kind, site=site: kind.respelt(site.spec, x, w))(x, w)
        usual = (None, (lax.Precision.DEFAULT,) * 2)
        products = list(precisions(program.jaxpr))
        assert products
        assert all(asked == wanted or {asked, wanted} <= {*usual} for asked in products)
        assert compare(run, (x, w), gradients=False).complaints == []


def precisions(program):
    """Yields the precision of each product of matrices in a program."""
    for equation in program.eqns:
        if equation.primitive.name == "dot_general":
            yield equation.params["precision"]
        for inner in jax.tree.leaves(
            [v for v in equation.params.values() if hasattr(v, "eqns") or hasattr(v, "jaxpr")],
            is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr"),
        ):
            yield from precisions(inner if hasattr(inner, "eqns") else inner.jaxpr)


def test_other_convolutions_are_left_alone():
    numbers = LAYOUTS[2][0]
    plain = convolution(1, numbers), random(1, 8, 8, 4), random(3, 3, 4, 4)
    wide = convolution(4, numbers), random(1, 70, 70, 4), random(65, 65, 1, 4)
    empty = convolution(4, numbers), random(0, 8, 8, 4), random(3, 3, 1, 4)
    for run, *arrays in (plain, wide, empty):
        assert sites(run, *arrays) == []


def test_grouped_convolutions_with_channels_in_fours_have_evidence_of_their_own():
    """XLA computes these on vectors, and the others one by one."""

    def feature(channels):
        x, w = jnp.ones((1, 9, 32 * channels)), jnp.ones((3, channels, 32 * channels))
        (site,) = sites(lambda x, w: convolution(32, LAYOUTS[1][0])(x, w), x, w)
        return kind_named("convolution").feature(site.spec)

    assert feature(3) == feature(5) != feature(4) == feature(8)
