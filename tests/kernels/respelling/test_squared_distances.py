"""Squared distances between all pairs, multiplied out on request: against float64, and left alone where nobody asks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.respellings import found, random

import autopallas
from autopallas.graph import Graph, flatten
from autopallas.patterns import find

X, Y, W = random(50, 7), random(40, 7, seed=1), jnp.abs(random(7, seed=2))


def optimized(function):
    return autopallas.optimize(function, objective="always", strict=True, ops="squared_distances")


def distances(x, y):
    return ((x[:, None] - y[None]) ** 2).sum(-1)


SPELLINGS = {
    "subtracted": distances,
    "vmapped": lambda x, y: jax.vmap(jax.vmap(lambda a, b: jnp.sum((a - b) ** 2), (None, 0)), (0, None))(x, y),
    "square": lambda x, y: jnp.square(x[:, None, :] - y).sum(2),
    "multiplied": lambda x, y: jnp.einsum("ijd->ij", (x[:, None] - y) * (x[:, None] - y)),
    "columns": lambda x, y: jnp.square(x.T[:, :, None] - y.T[:, None]).sum(0),
    "turned": lambda x, y: ((y[None] - x[:, None]) ** 2).sum(-1),
    "weighted": lambda x, y: (W * (x[:, None] - y[None]) ** 2).sum(-1),
    "batched": lambda x, y: ((x.reshape(5, 10, 1, 7) - y.reshape(5, 1, 8, 7)) ** 2).sum(-1),
    "doubled": lambda x, y: (2 * (x[:, None] - y[None]) ** 2 + (x[:, None] - y[None]) ** 2).sum(-1),
}


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_every_spelling_is_one_site(name, offset):
    x, y = X + offset, Y + offset
    run = optimized(SPELLINGS[name])
    given = run(x, y)
    assert run.report().counts() == {"respelling": 1}
    with jax.enable_x64(True):
        wanted = SPELLINGS[name](*(jnp.asarray(np.asarray(a, np.float64)) for a in (x, y)))
    # The terms are squares of the numbers themselves, and rounded as such.
    size = 3 * max(1.0, float(jnp.max(W))) * float((x * x).sum(-1).max() + (y * y).sum(-1).max())
    assert np.abs(np.asarray(given, np.float64) - wanted).max() <= 8 * np.finfo(np.float32).eps * size


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gradients_are_sums_of_products_too(dtype):
    def loss(x, y):
        return (jnp.exp(-distances(x, y) / 10) * jnp.arange(40)).sum()

    with jax.enable_x64(dtype == "float64"):
        run = optimized(jax.value_and_grad(loss, (0, 1)))
        given = run(X.astype(dtype), Y.astype(dtype))
    assert run.report().counts() == {"respelling": 3}
    with jax.enable_x64(True):
        wanted = jax.value_and_grad(loss, (0, 1))(X.astype(float), Y.astype(float))
        bound = 1e-12 if dtype == "float64" else 2e-6  # a few roundings of sums of 40 and of 7 terms
        for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(wanted), strict=True):
            assert a.dtype == dtype
            assert float(jnp.abs(a - b).max() / jnp.abs(b).max()) <= bound


def test_no_distance_is_negative():
    x = 100 + random(64, 5) / 100
    run = optimized(lambda x: jnp.sqrt(distances(x, x)))
    assert not bool(jnp.isnan(run(x)).any())
    assert run.report().counts() == {"respelling": 1}


def test_infinities_and_nans_stay_in_their_rows():
    x = X.at[3, 2].set(jnp.nan).at[4].set(jnp.inf)
    given = optimized(distances)(x, Y)
    assert bool(jnp.isnan(given[3]).all())
    assert not bool(jnp.isfinite(given[4]).any())
    assert bool(jnp.isfinite(jnp.delete(given, jnp.array([3, 4]), 0)).all())


def test_infinities_that_are_not_assumed_away_keep_the_original():
    x = X.at[4, 2].set(jnp.inf)
    assert autopallas.explain(optimized(distances), x, Y).sites[0].assumptions
    run = autopallas.optimize(distances, objective="always", ops="squared_distances", assume_finite=False)
    assert bool((run(x, Y)[4] == jnp.inf).all())
    assert run.report().counts() == {}


def named(function, *arguments):
    program = Graph(flatten(jax.make_jaxpr(function)(*arguments)))
    return [match.spec.kind for match in find(program, ("squared_distances",), True)[0]]


OTHERS = {
    "pairs of equal rows": lambda x, y: ((x[:40] - y) ** 2).sum(-1),
    "statistics": lambda x, y: ((x - x.mean(0)) ** 2).sum(-1),
    "absolute": lambda x, y: jnp.abs(x[:, None] - y[None]).sum(-1),
    "third powers": lambda x, y: ((x[:, None] - y[None]) ** 3).sum(-1),
    "all differences": lambda x, y: (((x[:, None] - y[None]) + random(50, 40, 7)) ** 2).sum(-1),
    "other functions": lambda x, y: (jnp.tanh(x[:, None] - y[None]) ** 2).sum(-1),
    "halves": lambda x, y: ((x[:, None].astype(jnp.bfloat16) - y[None].astype(jnp.bfloat16)) ** 2).sum(-1),
    "no rows": lambda x, y: distances(x[:0], y),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_left_alone(name):
    assert named(OTHERS[name], X, Y) == []


def test_nothing_is_done_unless_it_is_named():
    assert named(distances, X, Y) == ["squared_distances"]
    assert "squared_distances" not in found(distances, X, Y)
    run = autopallas.optimize(distances, objective="always", ops="-short_sum")
    np.testing.assert_array_equal(run(X, Y), jax.jit(distances)(X, Y))
    assert run.report().counts() == {}
    both = autopallas.explain(
        autopallas.optimize(distances, objective="always", ops=["respelling", "squared_distances"]), X, Y
    )
    assert both.counts() == {"respelling": 1}
    exact = autopallas.optimize(distances, objective="always", ops="squared_distances", numerics="reordered")
    assert autopallas.explain(exact, X, Y).counts() == {}


def test_reading_is_bounded():
    def squares(x, y):
        d = x[:, None] - y[None]
        for _ in range(60):
            d = d * d
        return d.sum(-1)

    assert named(squares, X, Y) == []
