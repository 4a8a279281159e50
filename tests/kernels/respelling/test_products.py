"""Respelling of matrix products that are transposed: what is found, what is left alone, and what it computes."""

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
from support.respellings import found, random
from support.tiers import examples

import autopallas

DTYPES = [jnp.float32, jnp.bfloat16]


def check(function, *arguments, times=1):
    """The respelt function and its gradients are as near to float64 as the original's, or within the tolerance."""
    assert found(function, *arguments) == ["product"] * times
    compared = compare(function, arguments)
    assert compared.complaints == []
    assert compared.report.counts()["respelling"] == times


def contracted(first, second, summed):
    return lax.dot_general(first, second, (summed, ((), ())))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 10, 5), (1, 12, 5), (12, 5), (11, 5), (1, 1, 5), (2, 3, 4, 5)])
def test_gradients_of_weights(shape, dtype):
    x, weight, cotangent = random(*shape, dtype=dtype), random(5, 7, dtype=dtype), random(*shape[:-1], 7, dtype=dtype)
    check(lambda x, w, y: jax.vjp(lambda w: x @ w, w)[1](y)[0], x, weight, cotangent)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("before", list(itertools.permutations(range(3))))
@pytest.mark.parametrize(
    ("after", "exchanged"),
    [((2, 3, 0, 1), True), ((0, 1, 2, 3), False), ((1, 0, 3, 2), False), ((2, 0, 3, 1), False), ((3, 2, 0, 1), False)],
)
def test_exchanged_results(before, after, exchanged, dtype):
    first, second = random(*([3, 4, 5][axis] for axis in before), dtype=dtype), random(2, 4, 6, dtype=dtype)

    def function(first, second):
        product = contracted(first, second, ((before.index(1),), (1,)))
        turned = (0, 2, 1, 3)
        return jnp.transpose(jnp.transpose(product, turned), tuple(turned.index(axis) for axis in after))

    check(function, first, second, times=int(exchanged))


@settings(max_examples=examples(25), deadline=None)
@given(st.data())
def test_products_at_random(data):
    sizes = data.draw(st.lists(st.sampled_from([1, 1, 2, 3, 4]), min_size=3, max_size=5))
    letters = "abcde"[: len(sizes)]
    first = data.draw(st.lists(st.sampled_from(letters), min_size=1, unique=True))
    second = data.draw(st.lists(st.sampled_from(letters), min_size=1, unique=True))
    summed = [letter for letter in first if letter in second]
    free = [letter for letter in (*first, *second) if letter not in summed]
    order = data.draw(st.permutations(range(len(free))))
    dtype = data.draw(st.sampled_from(DTYPES))
    shapes = [[sizes[letters.index(letter)] for letter in own] for own in (first, second)]

    def function(x, y):
        product = contracted(x, y, ([first.index(s) for s in summed], [second.index(s) for s in summed]))
        return jnp.transpose(product, order) if list(order) != sorted(order) else product

    x, y = random(*shapes[0], dtype=dtype), random(*shapes[1], seed=1, dtype=dtype)
    kinds = found(function, x, y)
    assert set(kinds) <= {"product"}
    if kinds:
        check(function, x, y)


def test_what_is_left_alone():
    x, y = random(6, 4), random(6, 5)
    rows = ((0,), (0,))
    assert found(lambda x, y: contracted(x, y, rows), x, y) == [], "float32 is as fast as it is written"
    narrow, other = x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)
    assert found(lambda x, y: contracted(x, y, rows), narrow, other) == ["product"]
    assert found(lambda x, y: contracted(x, y, rows), narrow[:5], other[:5]) == [], "an odd number of rows"
    assert found(lambda x, y: x @ y.T, narrow, random(5, 4, dtype=jnp.bfloat16)) == [], "an operand is transposed"
    heads = random(2, 3, 4), random(4, 5, 6)
    assert found(lambda x, w: jnp.einsum("btd,dnh->bnth", x, w), *heads) == [], "axes of one operand"
    assert found(lambda x, y: contracted(x, y, rows).T.T, x, y) == [], "transposed twice"
    assert found(lambda x, y: contracted(x, y, rows).T, x.astype(jnp.float16), y.astype(jnp.float16)) == []
    assert found(lambda x, y: contracted(x, y, rows).T, x.astype(int), y.astype(int)) == []
    assert found(lambda x, y: contracted(x, y, rows).T, x[:0], y[:0]) == []
    assert found(lambda x, y: jnp.dot(x.T, y, precision="highest").T, x, y) == []

    def read_twice(x, y):
        product = contracted(x, y, rows)
        return product.T, product + 1

    assert found(read_twice, x, y) == []

    def returned_too(x, y):
        product = contracted(x, y, rows)
        return product.T, product

    assert found(returned_too, x, y) == []

    def before_a_loop(x, y):
        product = contracted(x, y, rows)
        return lax.scan(lambda carry, _: (carry + product.T, None), jnp.zeros((5, 4)), None, length=3)[0]

    assert found(before_a_loop, x, y) == [], "the loop would multiply in each step"
    assert found(lambda x, y: jnp.einsum("bti,bsi->tsb", x[None], x[None]), x, y) == [], "a shared axis"


def flat(arrays):
    return np.concatenate([np.ravel(array) for array in arrays])


def test_train_steps_are_found_and_equal():
    def loss(weights, x):
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return (x**2).sum()

    weights, x = [random(5, 7), random(7, 9)], random(2, 6, 5, seed=1)
    step = jax.grad(loss)
    assert found(step, weights, x) == ["product"] * 2
    optimized = autopallas.optimize(step, objective="always", strict=True)
    np.testing.assert_allclose(*map(flat, (optimized(weights, x), step(weights, x))), rtol=1e-5, atol=1e-5)
    assert optimized.report().counts()["respelling"] == 2
    examples = jax.vmap(optimized, in_axes=(None, 0))(weights, jnp.stack([x, 2 * x]))
    original = jax.vmap(step, in_axes=(None, 0))(weights, jnp.stack([x, 2 * x]))
    np.testing.assert_allclose(*map(flat, (examples, original)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "times"), [(jnp.float32, 0), (jnp.bfloat16, 1)])
def test_the_wider_operand_does_not_come_first_in_float32(dtype, times):
    """As in the gradient of a block's second layer: what computes the operand would be turned with it."""
    x, weight, y = random(3, 10, 9, dtype=dtype), random(9, 7, dtype=dtype), random(3, 10, 7, dtype=dtype)
    assert found(lambda x, w, y: jax.vjp(lambda w: x @ w, w)[1](y)[0], x, weight, y) == ["product"] * times


def test_a_kind_that_is_left_out_takes_no_equation_from_another_one():
    """The transpose of a product with a one-hot matrix is a sum by index, and a product whose result is transposed."""

    def gradient(ids, cotangent):
        picked = jax.nn.one_hot(ids, 64, dtype=cotangent.dtype)
        return jax.lax.dot_general(picked, cotangent, (((0,), (0,)), ((), ()))).T

    given = jnp.arange(512) % 64, jnp.ones((512, 64))

    def kinds(**options):
        report = autopallas.explain(autopallas.optimize(gradient, objective="always", **options), *given)
        return [site.kind for site in report.sites]

    assert kinds() == ["one_hot"]
    assert kinds(ops="-one_hot") == ["product"]
    assert kinds(ops="product") == ["product"]
