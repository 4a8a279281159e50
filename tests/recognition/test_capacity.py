"""Tokens dispatched to slots of experts, with a capacity: found where each slot is proved to hold one token at most."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from support.checks import arrays, right
from support.compare import compare, compiled, optimized_like_a_user
from support.mixtures import D, E, F, P, X

import autopallas
from recognition import capacities
from recognition.capacities import ARGUMENTS, LOOK_ALIKES, ONE, REORDERED, TWO, C, first, per_expert

OP = "grouped_matmul"
switch = ONE["per expert"]


def step(function):
    """Results, loss and gradients, a loss that tells all results apart."""

    def loss(p, x):
        y = function(p, x)
        wave = jnp.arange(y.size, dtype=jnp.float32).reshape(y.shape)
        return jnp.sum(jnp.sin(y.astype(jnp.float32) + wave)), y

    return lambda p, x: jax.value_and_grad(loss, (0, 1), has_aux=True)(p, x)


def found(function, arguments=ARGUMENTS, dtype="float32"):
    """The sites of a program that is right with each of these arguments."""
    optimized = optimized_like_a_user(function)
    run = compiled(lambda *a: optimized(*a))
    for args in arguments:
        right(run(*args), function, args, dtype)
    report = optimized.report()
    assert not report.failures
    assert not [miss.reason for miss in report.near_misses if miss.op == OP]
    return [site for site in report.sites if site.op == OP and site.verdict == "applied"]


def refused(function, args=(P, X), **options):
    """Why a program keeps its mixtures."""
    report = autopallas.explain(optimized_like_a_user(function, **options), *args)
    assert report.counts()[OP] == 0
    return [miss.reason for miss in report.near_misses if miss.op == OP]


TRAINED = ["flat place", "sequences", "weight of its own", "boolean weights", "in a row", "summed"]
TRAINED += ["places summed, scattered"]


@pytest.mark.parametrize("name", TRAINED)
def test_a_train_step_is_found_and_exact(name):
    (site,) = found(step((ONE | TWO)[name]))
    assert site.direction == "forward+backward"
    assert site.implementation == "xla"
    assert site.spec["choices"] == (1 if name in ONE else 2)
    assert site.spec["slots"] in (2, C)
    assert "capacities.py" in site.location
    assert any("assume_finite" in text for text in site.assumptions)


@pytest.mark.parametrize("name", [name for name in [*ONE, *TWO] if name not in TRAINED])
def test_a_forward_pass_is_found_and_exact(name):
    (site,) = found((ONE | TWO)[name])
    assert site.direction == "forward"
    assert site.spec["choices"] == (1 if name in ONE else 2)


def test_one_dispatch_for_two_layers():
    assert [site.direction for site in found(two_layers, [(P, X)])] == ["forward"] * 2


@pytest.mark.parametrize("name", ["sequences", "boolean weights"])
def test_no_slots_are_left(name):
    function = step((ONE | TWO)[name])
    program = jax.make_jaxpr(lambda *a: optimized_like_a_user(function)(*a))(P, X)
    shapes = [tuple(sorted(getattr(aval, "shape", ()))) for _, aval in arrays(program)]
    slots = 2 * 2 if name == "sequences" else C
    wanted = {tuple(sorted((E, slots, n))) for n in (D, F)} | {tuple(sorted((E, 2, 2, n))) for n in (D, F)}
    assert not wanted & set(shapes)


def layers(function):
    def scanned(p, x):
        q = jax.tree.map(lambda a: jnp.stack([a, a[::-1] if a.shape[0] == E else a]), p)
        return jax.lax.scan(lambda x, q: (x + function(q, x), None), x, q)[0]

    return scanned


def two_layers(p, x):
    """The second one dispatches as the first."""
    g = capacities.gates(p, x)
    dispatch = per_expert(jax.nn.one_hot(jnp.argmax(g, -1), E))
    combine = dispatch * jnp.max(g, -1)[:, None, None]
    x = x + capacities.mixed(p, x, dispatch, combine)
    return x + capacities.mixed(p | {"down": p["down"] * 2}, jnp.tanh(x), dispatch, combine)


def balanced(p, x):
    """A loss and a count of what was dropped read the routing, too."""
    g = capacities.gates(p, x)
    mine = jax.nn.one_hot(jnp.argmax(g, -1), E)
    dispatch = per_expert(mine)
    y = capacities.mixed(p, x, dispatch, dispatch * jnp.max(g, -1)[:, None, None])
    return y + jnp.sum(jnp.mean(mine, 0) * jnp.mean(g, 0)) + jnp.sum(dispatch)


@pytest.mark.parametrize(
    "function",
    [layers(jax.checkpoint(ONE["flat place"])), balanced],
    ids=["scan and remat", "read elsewhere"],
)
def test_in_models(function):
    assert [site.direction for site in found(step(function), [(P, X)])] == ["forward+backward"]


def test_narrow_numbers():
    """The routing in float32, as it has to be; all else in bfloat16."""

    def function(p, x):
        g = jax.nn.softmax(x.astype(jnp.float32) @ p["router"].astype(jnp.float32))
        mine = jax.nn.one_hot(jnp.argmax(g, -1), E)
        dispatch = per_expert(mine)
        return capacities.mixed(p, x, dispatch, dispatch * jnp.max(g, -1)[:, None, None])

    args = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (P, X))
    assert [site.direction for site in found(step(function), [args], "bfloat16")] == ["forward+backward"]


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_a_look_alike_is_left_alone_with_a_reason(name):
    reasons = refused(LOOK_ALIKES[name])
    assert reasons
    assert all("with a capacity" in reason for reason in reasons[:1])


@pytest.mark.parametrize("name", REORDERED)
def test_slots_that_change_places_are_left_alone(name):
    refused(REORDERED[name])


def test_what_may_be_infinite_keeps_the_original():
    assert any("assume_finite is off" in reason for reason in refused(switch, assume_finite=False))


def test_slots_that_are_also_returned_keep_the_original():
    def function(p, x):
        g = capacities.gates(p, x)
        dispatch = per_expert(jax.nn.one_hot(jnp.argmax(g, -1), E))
        y = capacities.experts(p, jnp.einsum("td,tec->ecd", x, dispatch))
        return jnp.einsum("ecd,tec->td", y, dispatch), y

    assert any("also returned" in reason for reason in refused(function))


def test_without_evidence_the_original_stays():
    """What was measured against experts that compute every token says nothing of slots."""
    report = autopallas.explain(autopallas.optimize(first(per_expert)), P, X)
    (site,) = (site for site in report.sites if site.op == OP)
    assert site.verdict == "kept"
    assert "nothing was measured" in site.reason


def test_the_router_of_a_mixture_that_is_a_near_miss_is_no_loss():
    experts, slots = 4, 5

    def mixture(x, router, first, second):
        probabilities = jax.nn.softmax(x @ router, -1)
        chosen = jax.nn.one_hot(jnp.argmax(probabilities, -1), experts, dtype=jnp.int32)
        position = jnp.cumsum(chosen, 0) * chosen - 1
        kept = position < slots
        places = jax.nn.one_hot(jnp.where(kept, position, -1), slots, dtype=x.dtype)
        dispatched = (chosen * kept)[..., None] * places
        h = jax.nn.relu(jnp.einsum("nec,nd,edf->ecf", dispatched, x, first))
        weight = jnp.max(probabilities, -1)[:, None, None]
        return jnp.einsum("nec,ecf,efd->nd", dispatched * weight, h, second)

    shapes = (9, 8), (8, experts), (experts, 8, 6), (experts, 6, 8)
    args = [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]
    compared = compare(mixture, args, gradients=False)
    assert compared.complaints == []
    assert compared.counts("cross_entropy") == 0
