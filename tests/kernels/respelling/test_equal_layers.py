"""Scans and loops of equal layers are looked at once, and what is carried over is what each would have given."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autopallas.graph import Graph, flatten
from autopallas.kernels.respelling import carried_proofs, doubling, indexed_loops, scan_proofs
from autopallas.patterns import find

T, D = 9, 3


def usual(left, right):
    return left[0] * right[0], right[0] * left[1] + right[1]


def scanned(a, b, combine=usual, **options):
    return lax.associative_scan(combine, (a, b), **options)


def doubled(a, b, by=1):
    """The same by shifts of all steps; another value where these do not begin with one."""
    while by < T:
        ones, zeros = jnp.ones((by, D)), jnp.zeros((by, D))
        b = b + a * jnp.concatenate([zeros, b[:-by]])
        a = a * jnp.concatenate([ones, a[:-by]])
        by *= 2
    return b


LAYERS = {
    "scan": lambda a, b, x: scanned(a, b)[1],
    "reversed": lambda a, b, x: scanned(a, b, reverse=True)[1],
    "both results": lambda a, b, x: jnp.sin(scanned(a, b)[0]) + scanned(a, b)[1],
    "products": lambda a, b, x: lax.cumprod(a) + b,
    "doubled": lambda a, b, x: doubled(a, b),
    "the state added": lambda a, b, x: scanned(a, b + x)[1] + x,
    "scans one after the other": lambda a, b, x: scanned(a, scanned(a, b)[1])[1],
    "the decay read elsewhere": lambda a, b, x: scanned(a, b)[1] * a,
    "the decays of one step": lambda a, b, x: scanned(jnp.broadcast_to(a[:1], a.shape), b)[1],
    "another function": lambda a, b, x: scanned(a, b, lambda p, q: (p[0] * q[0], q[0] * p[1] - q[1]))[1],
    "other shifts": lambda a, b, x: doubled(a, b, 2),
    "inner values read": lambda a, b, x: scanned(a, b)[1] + lax.slice_in_dim(a * b, 1, T, 2).sum(),
}


def stacked(layers, shared=False):
    """The gradients of a program of layers, each with arrays of its own, or all with the same decays."""

    def loss(weights, x):
        for layer, (a, b) in zip(layers, weights, strict=True):
            x = jnp.cos(layer(jnp.tanh(weights[0][0] if shared else a), b * x, x))
        return jnp.sum(x)

    ones = jnp.ones((T, D))
    return jax.make_jaxpr(jax.grad(loss, (0, 1)))([(ones, ones)] * len(layers), ones)


def scans(program):
    return dict(doubling.scans_of(Graph(flatten(program))))


@pytest.fixture
def lanes(monkeypatch):
    """Counts the scans and gradients whose axes are looked at; ``alone`` makes each be looked at by itself."""

    class Lanes:
        count = 0

        def alone(self):
            monkeypatch.setattr(carried_proofs.CarriedProofs, "_related", lambda *_: None)

    counting, lanes_of = Lanes(), scan_proofs.lanes_of

    def counted(*arguments):
        counting.count += 1
        return lanes_of(*arguments)

    monkeypatch.setattr(scan_proofs, "lanes_of", counted)
    return counting


@pytest.mark.parametrize("name", LAYERS)
def test_scans_of_equal_layers_are_what_each_of_them_is(name, lanes):
    program = stacked([LAYERS[name]] * 4)
    carried = scans(program)
    few, lanes.count = lanes.count, 0
    lanes.alone()
    assert carried == scans(program)
    assert few < lanes.count or not lanes.count


@pytest.mark.parametrize("name", ["scan", "doubled", "products"])
def test_a_deep_model_takes_no_more_proofs_than_a_shallow_one(name, lanes):
    scans(stacked([LAYERS[name]] * 3))
    few, lanes.count = lanes.count, 0
    scans(stacked([LAYERS[name]] * 8))
    assert lanes.count == few


@pytest.mark.parametrize("seed", range(20))
def test_scans_of_layers_that_differ_are_told_apart(seed, lanes):
    chosen = random.Random(seed)
    kinds = [chosen.choice([*LAYERS.values()]) for _ in range(3)]
    program = stacked([chosen.choice(kinds) for _ in range(6)], shared=chosen.random() < 0.3)
    carried = scans(program)
    lanes.alone()
    assert carried == scans(program)


def written(a, x, by=1.0):
    """A loop that reads ``x[i]`` and sets rows of its result."""

    def step(i, carried):
        state, results = carried
        state = a * state + by * x[i]
        return state, results.at[i].set(state)

    return lax.fori_loop(0, T, step, (jnp.zeros(D), jnp.zeros((T, D))))[1]


def test_indexed_loops_of_equal_layers_are_planned_once(monkeypatch):
    plans = []

    def counted(*arguments):
        plans.append(arguments)
        return IndexedArrays(*arguments)

    IndexedArrays = indexed_loops.IndexedArrays
    monkeypatch.setattr(indexed_loops, "IndexedArrays", counted)

    def looked_at(factors):
        def loss(weights, x):
            for a, by in zip(weights, factors, strict=True):
                x = jnp.cos(written(a, x, by))
            return jnp.sum(x)

        plans.clear()
        program = jax.make_jaxpr(jax.grad(loss, (0, 1)))([jnp.ones(D)] * len(factors), jnp.ones((T, D)))
        sites = find(Graph(flatten(program)), ("indexed_loop",), True)[0]
        loops = [dict(site.spec.parameters)["loop"] for site in sites]
        assert len(loops) == 2 * len(factors)  # forward and backward of each layer
        assert len({loop.key for loop in loops}) == 2 * len({*factors})
        return len(plans)

    assert looked_at([1.0] * 6) == looked_at([1.0] * 2) < looked_at([1.0, 2.0])
