"""Respelling of matrix products that are written by broadcasting: what is found, and what it computes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compare import compare
from support.respellings import found, random

import autopallas
from autopallas import compat
from autopallas.autotune.trial import Trial
from autopallas.graph import Graph, flatten
from autopallas.options import resolve
from autopallas.patterns import find
from autopallas.plan.decision import Decision
from autopallas.plan.neighbours import without_lonely

X, Y = random(150, 20), random(140, 20, seed=1)


def products(x, y):
    return (x[:, None] * y[None]).sum(-1)


def cosines(x, y):
    def scaled(x):
        return x / jnp.sqrt(jnp.maximum(jnp.sum(jnp.square(x), -1, keepdims=True), 1e-6))

    return jnp.sum(scaled(x[:, None]) * scaled(y[None]), -1)


def mapped(x, y):
    return jax.vmap(jax.vmap(lambda a, b: jnp.sum(a * b), (None, 0)), (0, None))(x, y)


def turned(x, y):
    return (y.T[:, None] * x.T[:, :, None]).sum(0)


def of_two_axes(x, y):
    return (x.reshape(150, 1, 4, 5) * y.reshape(1, 140, 4, 5)).sum((2, 3))


def gram(x, y):
    return products(x, x)[:, :140]


def gradients(function):
    def run(x, y):
        return jax.value_and_grad(lambda x, y: jnp.sin(function(x, y) / 100).mean(), (0, 1))(x, y)

    return run


@pytest.mark.parametrize("function", [products, cosines, mapped, turned, of_two_axes, gram], ids=lambda f: f.__name__)
@pytest.mark.parametrize("offset", [0.0, 3.0])
def test_a_product_and_its_gradients_are_matrix_products(function, offset):
    compared = compare(gradients(function), (X + offset, Y + offset), ops="broadcast_product")
    assert compared.complaints == []
    short = function is turned  # its own sums are of 20 columns each, which are another kind's
    assert compared.report.counts() == {"respelling": 2 if short else 3}


def test_double_precision_keeps_its_digits():
    with jax.enable_x64(True):
        x, y = X.astype("float64"), Y.astype("float64")
        run = autopallas.optimize(gradients(products), objective="always", ops="broadcast_product", strict=True)
        for a, b in zip(jax.tree.leaves(run(x, y)), jax.tree.leaves(gradients(products)(x, y)), strict=True):
            assert a.dtype == b.dtype == "float64"
            np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-14)


def test_infinities_and_nans_stay_in_their_rows():
    x = X.at[3, 2].set(jnp.nan).at[4, 0].set(jnp.inf)

    def step(x, y):
        return products(x, y), (x[:, None] * y[None] ** 2).sum(-1), (x[:, None] * jnp.sin(y[None])).sum(-1)

    run = autopallas.optimize(step, objective="always", ops="broadcast_product", strict=True)
    given, wanted = run(x, Y), jax.jit(step)(x, Y)
    assert run.report().counts() == {"respelling": 3}
    for a, b in zip(given, wanted, strict=True):
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
        np.testing.assert_array_equal(np.isinf(a), np.isinf(b))


def test_a_gradient_that_is_taken_around_it_is_right():
    run = autopallas.optimize(gradients(products), objective="always", ops="broadcast_product", strict=True)

    def loss(run):
        return jax.grad(lambda x: sum(jnp.cos(leaf).sum() for leaf in jax.tree.leaves(run(x, Y))))(X)

    np.testing.assert_allclose(loss(run), loss(gradients(products)), rtol=1e-4, atol=1e-4)


OTHERS = {
    "one product, whose operands nothing else reads": products,
    "products with vectors": lambda x, y: gradients(lambda x, y: (x[:, None] * y[0]).sum(-1))(x, y),
    "batches": lambda x, y: gradients(lambda x, y: (x.reshape(5, 30, 1, 20) * y.reshape(5, 1, 28, 20)).sum(-1))(x, y),
    "a sum over what one factor lacks": lambda x, y: gradients(lambda x, y: (x[:, None] * y[None]).sum(0))(x, y)[0],
    "all pairs in one factor": lambda x, y: (x[:, None] * jnp.tanh(x[:, None] + y[None])).sum(-1),
    "halves": lambda x, y: gradients(products)(x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)),
    "sums of up to 128 columns or 8 numbers next to each other": lambda x, y: gradients(products)(
        x[:90, :8], y[:90, :8]
    ),
    "few numbers": lambda x, y: gradients(products)(x[:10], y[:10]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_left_alone(name):
    assert "broadcast_product" not in found(OTHERS[name], X, Y)


def test_a_product_that_something_else_reads_stays():
    def step(x, y):
        wide = x[:, None] * y[None]
        return wide.sum(-1), jnp.tanh(wide), jnp.sin(x[:, None] + y[None])

    assert "broadcast_product" not in found(step, X, Y)


def test_a_search_measures_what_a_program_with_others_pays():
    """Alone, the compiler makes a matrix product of the equations, so that they would tell of no gain."""
    program = Graph(flatten(jax.make_jaxpr(gradients(products))(X, Y)))
    for match in find(program, ("broadcast_product",), True)[0]:
        trial = Trial.of(match)
        alone = jax.jit(compat.jaxpr_as_fun(match.original)).lower(*trial.arguments[0][0]).compile()
        measured = jax.jit(trial.original()).lower(*trial.arguments).compile()
        every = 150 * 140 * 20 * 4
        assert alone.memory_analysis().temp_size_in_bytes < every <= measured.memory_analysis().temp_size_in_bytes
        kernel = trial.kernel("xla", None)
        np.testing.assert_allclose(trial.original()(*trial.arguments)[0], kernel(*trial.arguments)[0], 1e-4, 1e-5)


def matches_of(function, *arrays):
    return find(Graph(flatten(jax.make_jaxpr(function)(*arrays))), ("broadcast_product",), True)[0]


def test_products_know_which_sums_read_the_same_factors():
    """With 64 rows in x the gradient of y is a sum of few numbers, which is another kind's, and a neighbour too."""
    three = matches_of(gradients(products), X, Y)
    results = {number for match in three for number in match.results}
    assert len(results) == len(three) == 3
    assert all(set(match.neighbours) == results - set(match.results) for match in three)
    two = matches_of(gradients(products), X[:64], Y)
    assert [len(match.neighbours) for match in two] == [2, 2]


@pytest.mark.parametrize(
    ("applied", "objective", "left"),
    [
        ([True, True, True], "time", [True, True, True]),
        ([True, True, False], "time", [True, True, False]),
        ([False, True, True], "time", [False, True, True]),
        ([True, False, False], "time", [False, False, False]),
        ([False, False, True], "time", [False, False, False]),
        ([True, False, False], "memory", [False, False, False]),
        ([True, False, False], "always", [True, False, False]),
    ],
)
def test_a_product_stays_where_two_that_share_its_factors_do(applied, objective, left):
    """Respelt alone, the product had 0.14 of the program's speed, and each of the two gradients saves nothing."""
    decisions = [
        Decision("applied" if one else "kept", "measured: 40.00x the original's speed", "cpu", "xla") for one in applied
    ]
    found = without_lonely(matches_of(gradients(products), X, Y), decisions, resolve({"objective": objective}))
    assert [one.verdict == "applied" for one in found] == left
    dropped = [now.reason for was, now in zip(decisions, found, strict=True) if now is not was]
    assert all("2 equations that read the same operand stay" in reason for reason in dropped)
