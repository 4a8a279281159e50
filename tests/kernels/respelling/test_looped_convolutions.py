"""Respelling of convolutions in loops: what is found, what is left alone, and what it computes."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.compare import compare
from support.respellings import found, random

import autopallas
from autopallas.graph import Graph, flatten
from autopallas.kernels.respelling.kinds.looped_convolution import KIND
from autopallas.patterns import find

NAME = "looped_convolution"
IMAGES = "NHWC", "HWIO", "NHWC"
STEPS = 3


def kinds(function, *arguments):
    """What is found where nothing else is looked for: of convolutions of volumes most belong to another kind."""
    graph = Graph(flatten(jax.make_jaxpr(function)(*arguments)))
    return [site.spec.kind for site in find(graph, (NAME,), True)[0]]


def convolve(x, w, numbers=IMAGES, strides=(1, 1), padding="SAME", **params):
    return lax.conv_general_dilated(x, w, strides, padding, dimension_numbers=numbers, **params)


def looped(function):
    return lambda *arrays: lax.map(lambda each: function(*each), arrays)


def agree(function, *arguments, count=1, gradients=True):
    assert kinds(function, *arguments) == [NAME] * count
    compared = compare(function, arguments, gradients=gradients, ops=NAME)
    assert compared.complaints == []
    assert compared.report.counts()["respelling"] >= count
    return compared


ORDERS = {1: ("NCW", "WNC", "CNW"), 2: ("NCHW", "CNHW", "HWNC", "NHCW"), 3: ("NCDHW", "DNHWC")}
WEIGHTS = {1: ("OIW", "WOI"), 2: ("OIHW", "HWOI", "IHWO"), 3: ("OIDHW", "DHWOI")}


@pytest.mark.parametrize(
    "numbers",
    [(x, w, out) for n in ORDERS for x, w, out in itertools.product(ORDERS[n], WEIGHTS[n], ORDERS[n][:2])],
    ids=str,
)
def test_every_order_of_axes(numbers):
    image, window = ({"N": 2, "C": 5, "O": 4, "I": 5, "D": 6, "H": 7, "W": 9}, {"D": 2, "H": 3, "W": 3})
    x = random(STEPS, *(image[letter] for letter in numbers[0]))
    w = random(STEPS, *({**image, **window}[letter] for letter in numbers[1]))
    axes = len(numbers[0]) - 2
    run = looped(lambda x, w: convolve(x, w, numbers, (1, 2, 1)[:axes]))
    np.testing.assert_allclose(
        autopallas.optimize(run, objective="always", strict=True, ops=NAME)(x, w), run(x, w), rtol=2e-5, atol=2e-5
    )  # sums of up to 90 products in another order
    agree(run, x, w)


def test_volumes_belong_to_the_kind_that_computes_their_planes():
    x, w = random(STEPS, 2, 5, 6, 7, 9), random(STEPS, 4, 5, 2, 3, 3)
    run = looped(lambda x, w: convolve(x, w, ("NCDHW", "OIDHW", "NCDHW"), (1, 2, 1)))
    assert found(run, x, w) == ["convolution_of_volumes"]
    agree(run, x, w)


@pytest.mark.parametrize("strides", [(1, 1), (2, 1), (3, 2)])
@pytest.mark.parametrize("padding", ["SAME", "VALID", ((2, 0), (0, 3)), ((0, -1), (0, -2))], ids=str)
@pytest.mark.parametrize("dilation", [(1, 1), (2, 1)])
def test_gradients_in_a_train_step(strides, padding, dilation):
    """The gradients of images and weights are convolutions whose operands changed places."""
    x, w = random(STEPS, 2, 11, 10, 3), random(3, 2, 3, 4)

    def step(w, x):
        loss = lambda w, x: jnp.sin(convolve(x, w, IMAGES, strides, padding, rhs_dilation=dilation)).sum()  # noqa: E731
        value, (dw, dx) = jax.value_and_grad(loss, (0, 1))(w, x)
        return w - 0.01 * dw, (value, dx)

    run = lambda w, x: lax.scan(step, w, x)  # noqa: E731
    count = len(kinds(run, w, x))
    assert count == 2 or (count == 1 and max(strides) > 1), "what strides leave out of an image, its gradient cuts off"
    agree(run, w, x, count=count, gradients=False)


@pytest.mark.parametrize("padding", [((-1, 1), (0, -2)), ((-2, 0), (-1, -1)), ((1, -3), (2, 0))], ids=str)
@pytest.mark.parametrize("strides", [(1, 1), (2, 1)])
def test_rows_that_padding_leaves_out(padding, strides):
    """Handed to the library as they are, such paddings read beside the array (JAX 0.10)."""
    x, w = random(STEPS, 2, 3, 11, 10), random(STEPS, 4, 3, 3, 2)
    run = looped(lambda x, w: convolve(x, w, ("NCHW", "OIHW", "NCHW"), strides, padding))
    np.testing.assert_allclose(
        autopallas.optimize(run, objective="always", strict=True, ops=NAME)(x, w), run(x, w), rtol=2e-5, atol=2e-5
    )
    agree(run, x, w)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=str)
@pytest.mark.parametrize("order", ["first", "last"])
def test_sixteen_bits(dtype, order):
    """Sums are rounded to 16 bits once, also those over many elements of a weight's gradient."""
    numbers, shapes = {
        "first": (("NCHW", "OIHW", "NCHW"), ((4, 8, 24, 24), (8, 8, 3, 3))),
        "last": (IMAGES, ((4, 24, 24, 8), (3, 3, 8, 8))),
    }[order]
    x, w = random(STEPS, *shapes[0]).astype(dtype), (0.1 * random(*shapes[1])).astype(dtype)

    def step(w, x):
        loss = lambda w, x: jnp.sum(convolve(x, w, numbers).astype(jnp.float32) ** 2)  # noqa: E731
        return w, (loss(w, x), *jax.grad(loss, (0, 1))(w, x))

    run = lambda w, x: lax.scan(step, w, x)  # noqa: E731
    agree(run, w, x, count=len(kinds(run, w, x)), gradients=False)
    exact = run(w.astype(jnp.float32), x.astype(jnp.float32))[1][1:]
    ours = autopallas.optimize(run, objective="always", strict=True, ops=NAME)(w, x)[1][1:]
    assert kinds(run, w, x)
    for found_, wanted in zip(ours, exact, strict=True):
        largest = float(jnp.abs(wanted).max())
        tolerance = 3 * float(jnp.finfo(dtype).eps) * largest  # of the result, the convolution and its cotangent
        np.testing.assert_allclose(found_.astype(jnp.float32), wanted, rtol=0, atol=tolerance)


def test_inserted_zeros_between_elements():
    x, w = random(STEPS, 2, 3, 6, 5), random(STEPS, 4, 3, 3, 2)
    run = looped(lambda x, w: convolve(x, w, ("NCHW", "OIHW", "NCHW"), (1, 1), ((2, 2), (1, 1)), lhs_dilation=(2, 3)))
    agree(run, x, w)


@pytest.mark.parametrize("steps", ["while", "fori", "cond", "remat", "nested"])
def test_every_loop_and_branch(steps):
    x, w = random(2, 3, 8, 8), random(3, 3, 3, 3)
    layer = lambda x: jnp.tanh(convolve(x, w, ("NCHW", "OIHW", "NCHW")))  # noqa: E731
    run = {
        "while": lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, layer(c[1])), (0, x))[1],
        "fori": lambda x: lax.fori_loop(0, 3, lambda _, c: layer(c), x),
        "cond": lambda x: lax.cond(x.sum() > 0, layer, lambda x: x, x),
        "remat": lambda x: lax.scan(jax.checkpoint(lambda c, _: (layer(c), None)), x, None, length=3)[0],
        "nested": lambda x: lax.scan(lambda c, _: (jax.jit(layer)(jax.vmap(jnp.sin)(c)), None), x, None, length=3)[0],
    }[steps]
    agree(run, x, gradients=steps != "while")


def test_under_vmap():
    x, w = random(STEPS, 2, 3, 8, 8), random(5, 4, 3, 3, 3)
    run = looped(lambda x: jax.vmap(lambda w: convolve(x, w, ("NCHW", "OIHW", "NCHW")))(w))
    agree(run, x)


def test_what_is_left_alone():
    def alone(x, w, numbers=("NCHW", "OIHW", "NCHW"), loop=looped, **params):
        run = lambda x, w: convolve(x, w, numbers, **params)  # noqa: E731
        return kinds(loop(run) if loop else run, x, w) == []

    x, w = random(STEPS, 2, 4, 7, 7), random(STEPS, 6, 4, 3, 3)
    assert not alone(x, w)
    assert alone(x[0], w[0], loop=None), "the compiler orders these axes itself"
    assert alone(random(STEPS, 2, 7, 7, 4), random(STEPS, 3, 3, 4, 6), IMAGES), "they are in order"
    assert alone(x, w[:, :, :2], feature_group_count=2)
    assert alone(x, w, precision="highest")
    assert alone(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), preferred_element_type=jnp.float32), "of two dtypes"
    assert alone(x[:, :0], w)
    assert alone(x, w, padding=((-1, 2), (0, 0)), lhs_dilation=(2, 1)), "what is left out are inserted zeros in part"


def test_zeros_around_images_are_assumed_to_meet_finite_weights():
    """In a loop the compiler skips them, and the library multiplies them."""
    x, w = random(STEPS, 2, 3, 6, 6), random(STEPS, 4, 3, 3, 3).at[:, 0, 0, 0, 0].set(jnp.inf)
    for padding, assumed in (("SAME", True), ("VALID", False)):
        run = looped(lambda x, w, padding=padding: convolve(x, w, ("NCHW", "OIHW", "NCHW"), padding=padding))
        ours = autopallas.optimize(run, objective="always", strict=True, ops=NAME, assume_finite=False)
        np.testing.assert_allclose(ours(x, w), run(x, w), rtol=2e-5, atol=2e-5)
        assert ours.report().counts() == ({} if assumed else {"respelling": 1})


@pytest.mark.parametrize(
    ("examples", "channels", "results", "few"),
    [(4, 16, 16, False), (4, 1, 16, False), (1, 8, 8, False), (16, 16, 1, True), (1, 1, 16, True)],
)
def test_gradients_of_weights_of_few_channels_have_evidence_of_their_own(examples, channels, results, few):
    """Weights of recurrent convolutions have few channels and examples, and are none of the stencils that lose."""
    x, w = random(2, examples, 16, 16, channels), random(3, 3, channels, results)
    step = looped(lambda x: jax.grad(lambda w: jnp.sum(jnp.sin(convolve(x, w))))(w))
    sites = find(Graph(flatten(jax.make_jaxpr(step)(x))), ("looped_convolution",), True)[0]
    (feature,) = [KIND.feature(site.spec) for site in sites]
    assert ("few channels" in feature) == few
