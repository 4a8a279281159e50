"""Respelling of the gradients of the weights of ordinary convolutions: what is found, and what it computes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from support.compare import compare
from support.respellings import found, random
from support.tiers import examples

import autopallas
from autopallas.graph import Graph, flatten
from autopallas.kernels.respelling.kinds import kind_named
from autopallas.patterns import find

LAYOUTS = {
    1: (("NWC", "WIO", "NWC"), ("NCW", "OIW", "NCW"), ("WNC", "IOW", "CWN")),
    2: (("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW"), ("HWNC", "IHWO", "CHNW")),
    3: (("NDHWC", "DHWIO", "NDHWC"), ("NCDHW", "OIDHW", "NCDHW")),
}


def operands(numbers, before, after, size, kernel, dtype=jnp.float32, seed=0):
    rank = len(numbers[0]) - 2
    sizes = dict(zip("DHW"[-rank:], (size + 1, size, size - 1)[:rank], strict=True)) | {"N": 2, "C": before}
    weights = dict.fromkeys("DHW", kernel) | {"I": before, "O": after}
    x = random(*(sizes[letter] for letter in numbers[0]), dtype=dtype, seed=seed)
    return x, random(*(weights[letter] for letter in numbers[1]), seed=seed + 1, dtype=dtype)


@pytest.mark.parametrize(("size", "channels", "wide"), [(4, 64, True), (14, 64, False), (28, 32, False)])
def test_evidence_of_large_results_is_their_own(size, channels, wide):
    """Behind the last layers of a network weights are large, and products that are put together cost memory."""
    numbers = ("NHWC", "HWIO", "NHWC")
    run = lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)  # noqa: E731
    x, w = jnp.ones((2, size, size, channels)), jnp.ones((3, 3, channels, channels))
    graph = Graph(flatten(jax.make_jaxpr(step_of(run))(x, w)))
    (match,) = find(graph, ("weight_gradient",), True)[0]
    feature = kind_named("weight_gradient").feature(match.spec)
    assert feature == f"9 taps, plain, channels last{', large result' if wide else ''}"


def step_of(convolve):
    return jax.value_and_grad(lambda x, w: jnp.sin(convolve(x, w).astype("float32")).sum(), (0, 1))


def check(convolve, x, w, count=1):
    step = step_of(convolve)
    compared = compare(step, (x, w), gradients=False, ops="weight_gradient")
    assert compared.complaints == []
    assert compared.counts("respelling") == count
    assert found(step, x, w).count("weight_gradient") == count


EVERY = [(numbers, rank) for rank, layouts in LAYOUTS.items() for numbers in layouts]
FEW_AND_MANY = [(numbers, channels) for numbers, rank in EVERY for channels in ([3, 20] if rank == 2 else [20])]


@pytest.mark.parametrize(("numbers", "before"), FEW_AND_MANY)
@pytest.mark.parametrize(
    ("kernel", "stride", "padding"),
    [
        (1, 1, "SAME"),
        (1, 1, [(1, 2)]),
        (1, 2, "VALID"),
        (2, 1, "SAME"),
        (2, 3, "VALID"),
        (2, 2, [(1, 2)]),
    ],
)
def test_gradients_of_weights(numbers, before, kernel, stride, padding):
    rank = len(numbers[0]) - 2
    padding = padding * rank if isinstance(padding, list) else padding
    run = lambda x, w: lax.conv_general_dilated(x, w, (stride,) * rank, padding, dimension_numbers=numbers)  # noqa: E731
    check(run, *operands(numbers, before, 18, 6, kernel))


@pytest.mark.parametrize(("numbers", "after"), FEW_AND_MANY)
@pytest.mark.parametrize(("kernel", "stride", "padding"), [(2, 2, "SAME"), (3, 2, "VALID"), (2, 3, "SAME")])
def test_gradients_of_the_weights_of_transposed_convolutions(numbers, after, kernel, stride, padding):
    rank = len(numbers[0]) - 2
    run = lambda x, w: lax.conv_transpose(x, w, (stride,) * rank, padding, dimension_numbers=numbers)  # noqa: E731
    check(run, *operands(numbers, 18, after, 4, kernel))


@pytest.mark.parametrize("numbers", LAYOUTS[2])
@pytest.mark.parametrize("before", [3, 20])
def test_many_positions_that_lie_apart(numbers, before):
    run = lambda x, w: lax.conv_general_dilated(x, w, (9, 9), "VALID", dimension_numbers=numbers)  # noqa: E731
    check(run, *operands(numbers, before, 18, 28, 9))


@pytest.mark.parametrize("numbers", LAYOUTS[2])
@pytest.mark.parametrize("before", [3, 20])
@pytest.mark.parametrize(("kernel", "stride", "dilation"), [(3, 1, 1), (2, 2, 1), (3, 1, 2)])
def test_products_of_bfloat16_are_such_as_the_compiler_can_run(numbers, before, kernel, stride, dilation):
    """Those whose result is transposed it takes, on processors that multiply bfloat16, and then fails to run."""

    def run(x, w):
        return lax.conv_general_dilated(x, w, (stride,) * 2, [(1, 1)] * 2, (dilation,) * 2, dimension_numbers=numbers)

    check(run, *operands(numbers, before, 18, 6, kernel, dtype=jnp.bfloat16))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(("kernel", "stride"), [(1, 1), (3, 1), (2, 2)])
def test_narrow_gradients_are_summed_in_float32(dtype, kernel, stride):
    numbers = LAYOUTS[2][0]
    run = lambda x, w: lax.conv_general_dilated(x, w, (stride,) * 2, "SAME", dimension_numbers=numbers)  # noqa: E731
    check(run, *operands(numbers, 20, 18, 9, kernel, dtype))


@settings(max_examples=examples(30), deadline=None)
@given(st.data())
def test_convolutions_at_random(data):
    draw = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    rank = draw(1, 2)
    numbers = data.draw(st.sampled_from(LAYOUTS[rank]))
    spread = [draw(1, 2) for _ in range(rank)]
    strides = [1 if max(spread) > 1 else draw(1, 3) for _ in range(rank)]
    padding = [(draw(-1, 3), draw(-1, 3)) for _ in range(rank)]
    x, w = operands(numbers, data.draw(st.sampled_from([2, 17])), 5, draw(4, 7), draw(1, 3))

    def run(x, w):
        return lax.conv_general_dilated(x, w, strides, padding, spread, dimension_numbers=numbers)

    def step(x, w):
        """Leaves x out: with dilation, XLA gives another gradient of it in each run (JAX 0.10.2)."""
        return jax.value_and_grad(lambda w: jnp.sin(run(x, w)).sum())(w)

    compared = compare(step, (x, w), gradients=False, ops="weight_gradient")
    assert compared.complaints == []


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("value", [jnp.inf, -jnp.inf, jnp.nan])
@pytest.mark.parametrize("stride", [1, 2])
def test_what_is_not_finite_meets_the_zeros_of_the_padding(place, value, stride):
    numbers = LAYOUTS[2][0]
    run = lambda x, w: lax.conv_general_dilated(x, w, (stride,) * 2, "SAME", dimension_numbers=numbers)  # noqa: E731
    x, w = operands(numbers, 20, 18, 7, 3)
    given = [x, run(x, w)]
    given[place] = given[place].at[(0,) * 4].set(value)
    gradient = lambda x, y: jax.linear_transpose(lambda w: run(x, w), w)(y)[0]  # noqa: E731
    assert found(gradient, *given) == ["weight_gradient"]
    own = autopallas.optimize(gradient, objective="always", assume_finite=False, strict=True)
    a, b = jax.jit(gradient)(*given), jax.jit(own)(*given)
    assert own.report().counts() == {"respelling": 1}
    np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
    np.testing.assert_array_equal(np.isinf(a), np.isinf(b))


def test_transposed_convolutions_are_assumed_to_be_finite():
    run = lambda x, w: lax.conv_transpose(x, w, (2, 2), "SAME")  # noqa: E731
    x, w = operands(LAYOUTS[2][0], 18, 20, 4, 2)
    own = autopallas.optimize(step_of(run), objective="always", ops="weight_gradient")
    own(x, w)
    (site,) = own.report().sites
    assert any("finite" in text for text in site.assumptions)
    strict = autopallas.optimize(step_of(run), objective="always", ops="weight_gradient", assume_finite=False)
    strict(x, w)
    assert not strict.report().sites


@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (2, 2)])
def test_padding_that_the_original_skips_is_assumed_to_meet_what_is_finite(kernel, stride):
    numbers = LAYOUTS[2][0]
    around = ((stride, 0),) * 2
    run = lambda x, w: lax.conv_general_dilated(x, w, (stride,) * 2, around, dimension_numbers=numbers)  # noqa: E731
    with jax.enable_x64(True):
        x, w = operands(numbers, 3, 4, 6, kernel, dtype=jnp.float64)
        gradient = lambda x, y: jax.linear_transpose(lambda w: run(x, w), w)(y)[0]  # noqa: E731
        y = run(x, w).at[:, 0].set(jnp.inf)
        own = autopallas.optimize(gradient, objective="always")
        own(x, y)
        (site,) = own.report().sites
        assert any("finite" in text for text in site.assumptions)
        strict = autopallas.optimize(gradient, objective="always", assume_finite=False)
        np.testing.assert_array_equal(strict(x, y), jax.jit(gradient)(x, y))
        assert not strict.report().sites


def test_other_convolutions_are_left_alone():
    numbers = LAYOUTS[2][0]

    def convolution(**options):
        return lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers, **options)

    x, w = operands(numbers, 4, 4, 8, 3)
    assert found(convolution(), x, w) == []
    dilated = step_of(convolution(rhs_dilation=(2, 2)))
    exact = step_of(convolution(precision=lax.Precision.HIGHEST))
    for step in (dilated, exact):
        assert "weight_gradient" not in found(step, x, w)
    wide = step_of(convolution())
    assert "weight_gradient" not in found(wide, *operands(numbers, 4, 4, 20, 9))
    grouped = step_of(convolution(feature_group_count=2))
    assert "weight_gradient" not in found(grouped, x, w[:, :, :2])


@pytest.mark.parametrize("numbers", LAYOUTS[2])
@pytest.mark.parametrize("before", [3, 20])
def test_sums_that_are_exact_are_equal(numbers, before):
    x, w = operands(numbers, before, 18, 7, 3)
    for run in (
        lambda x, w: lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=numbers),
        lambda x, w: lax.conv_transpose(x, w, (2, 2), "SAME", dimension_numbers=numbers),
    ):
        gradient = lambda x, y, run=run: jax.linear_transpose(lambda w: run(x, w), w)(y)[0]  # noqa: E731
        given = jnp.round(3 * x), jnp.round(3 * run(x, w))
        own = autopallas.optimize(gradient, objective="always", ops="weight_gradient", strict=True)
        np.testing.assert_array_equal(own(*given), gradient(*given))
        assert own.report().counts() == {"respelling": 1}


@pytest.mark.parametrize(("numbers", "rank"), EVERY)
def test_what_positions_of_a_kernel_read_is_put_together_axis_by_axis(numbers, rank):
    """XLA's CPU compiler takes the longer, the more parts one concatenation has."""
    x, w = operands(numbers, 3, 5, 9, 4)
    run = lambda w: lax.conv_general_dilated(x, w, (2,) * rank, "SAME", dimension_numbers=numbers).sum()  # noqa: E731
    function = autopallas.optimize(jax.grad(run), objective="always", ops="weight_gradient")
    text = function.lower(w).as_text()
    parts = [line.count("tensor<") - 1 for line in text.splitlines() if "stablehlo.concatenate" in line]
    assert function.report().counts()["respelling"] == 1
    assert parts == [4] * rank


def test_rows_of_pointwise_weights_are_read_as_they_stand():
    """XLA would turn what comes first, and compute both operands anew for the product."""
    numbers = LAYOUTS[2][0]
    x, w = operands(numbers, 20, 24, 9, 1)
    run = lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)  # noqa: E731

    def step(x, w, y):
        y_own, pull = jax.vjp(run, jnp.maximum(x, 0.5), w)
        return y_own, pull(jnp.minimum(y, 0.25))

    given = (x, w, random(*run(x, w).shape, seed=2))
    own = autopallas.optimize(step, objective="always", ops="weight_gradient")
    text = own.lower(*given).compile().as_text()
    assert own.report().counts()["respelling"] == 1
    assert [text.count(f" {name}(") for name in ("maximum", "minimum")] == [1, 1]
    for result, wanted in zip(jax.tree.leaves(own(*given)), jax.tree.leaves(step(*given)), strict=True):
        np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-5 * float(jnp.abs(wanted).max()))


@pytest.mark.parametrize(("stride", "kernel", "products"), [(1, 2, 4), (1, 3, 1), (2, 4, 1)])
@pytest.mark.parametrize("transposed", [False, True])
def test_products_of_many_positions_stand_in_a_loop(stride, kernel, products, transposed):
    """What each position reads is a kernel of its own to compile, since each begins at another place."""
    numbers = LAYOUTS[2][0]
    x, w = operands(numbers, 20, 24, 9, kernel)
    convolve = lax.conv_transpose if transposed else lax.conv_general_dilated
    run = lambda w: convolve(x, w, (stride,) * 2, "SAME", dimension_numbers=numbers).sum()  # noqa: E731
    function = autopallas.optimize(jax.grad(run), objective="always", ops="weight_gradient")
    text = function.lower(w).as_text()
    assert function.report().counts()["respelling"] == 1
    assert text.count("stablehlo.dot_general") == products
    wanted = jax.jit(jax.grad(run))(w)
    np.testing.assert_allclose(function(w), wanted, rtol=1e-5, atol=1e-5 * float(jnp.abs(wanted).max()))
