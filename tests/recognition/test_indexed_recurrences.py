"""Recurrences are found in loops that index arrays at a counter, with the backward that adds to whole gradients."""

from __future__ import annotations

import jax
import pytest
from support.compare import compare, optimized_like_a_user, with_gradients

import autopallas
from autopallas.graph import flatten
from tests.recognition.indexed_recurrences import FOUND, REFUSED, P, T, state_space_loop

ONLY = {"ops": ("recurrence",)}
LOOPS = {"scan", "while"}
COUNTED = ("until_the_data_say", "as_often_as_is_given")
"""Loops that have no backward: how often they run is known too late."""


@pytest.mark.parametrize("name", FOUND)
def test_an_indexing_loop_is_found_and_right_with_gradients_taken_outside(name):
    case = FOUND[name]
    outcome = compare(case.function, case.arguments, gradients=case.trained, **ONLY)
    assert outcome.complaints == []
    assert [(site.op, site.verdict) for site in outcome.report.sites] == [("recurrence", "applied")]


@pytest.mark.parametrize("name", [name for name, case in FOUND.items() if case.trained])
def test_its_backward_that_adds_slices_to_gradients_is_found(name):
    case = FOUND[name]
    step = with_gradients(case.function, case.arguments)
    outcome = compare(step, case.arguments, gradients=False, **ONLY)
    assert outcome.complaints == []
    assert [(site.direction, site.verdict) for site in outcome.report.sites] == [("forward+backward", "applied")]
    program = jax.make_jaxpr(optimized_like_a_user(step, **ONLY))(*case.arguments)
    assert LOOPS.isdisjoint(e.primitive.name for e in flatten(program).equations)


@pytest.mark.parametrize("name", REFUSED)
def test_a_loop_that_indexes_otherwise_is_left_alone_with_a_reason(name):
    case = REFUSED[name]
    trained = [] if name in COUNTED else [with_gradients(case.function, case.arguments)]
    for function in (case.function, *trained):
        report = autopallas.explain(optimized_like_a_user(function, **ONLY), *case.arguments)
        assert (report.sites, report.failures) == ((), ())
        assert [case.reason in miss.reason for miss in report.near_misses] == [True]


def test_where_a_recurrence_is_kept_its_indexing_backward_is_respelt():
    """A state that is read elementwise has no better form than its loop, which should still not add whole arrays."""

    def loss(decay, x):
        def step(i, carried):
            h, y = carried
            h = decay * h + x[i]
            return h, y.at[i].set(h)

        first = jax.numpy.zeros(x.shape[1:]), jax.numpy.zeros_like(x)
        return jax.numpy.tanh(jax.lax.fori_loop(0, x.shape[0], step, first)[1]).sum()

    step = autopallas.optimize(jax.grad(loss, (0, 1)), ops=("recurrence", "respelling"))
    arguments = jax.numpy.full(32, 0.9), jax.numpy.ones((512, 32))
    recurrence, *loops = autopallas.explain(step, *arguments).sites
    assert (recurrence.op, recurrence.verdict) == ("recurrence", "kept")
    (backward,) = [loop for loop in loops if "of 4 carried values" in str(loop.spec)]  # dh, dx and ddecay, beside i
    assert (backward.kind, backward.verdict) == ("indexed_loop", "applied")


@pytest.mark.parametrize("reversed_too", [False, True])
def test_a_filter_through_its_own_results_is_a_recurrence(reversed_too):
    """``y.at[i].set(a[i] * y[i - 1] + x[i])``, and returns: ``y.at[i].set(a[i] * y[i + 1] + x[i])`` from the last."""

    def run(gate, x):
        def step(n, y):
            i, before = (T - 1 - n, T - n) if reversed_too else (n + 1, n)
            return y.at[i].set(jax.nn.sigmoid(gate[i]) * y[before] + x[i])

        first = jax.numpy.zeros((T + 1, P)).at[T if reversed_too else 0].set(x[0])
        return jax.lax.fori_loop(0, T, step, first)

    arguments = jax.random.normal(jax.random.key(0), (T + 1,)), jax.random.normal(jax.random.key(1), (T + 1, P))
    for function, direction in ((run, "forward"), (with_gradients(run, arguments), "forward+backward")):
        outcome = compare(function, arguments, gradients=function is run, **ONLY)
        assert outcome.complaints == []
        assert [(site.direction, site.verdict) for site in outcome.report.sites] == [(direction, "kept")]


def test_a_recurrence_that_is_applied_goes_before_a_respelling_of_its_backward():
    case = FOUND["state_space_loop"]
    step = with_gradients(state_space_loop, case.arguments)
    outcome = compare(step, case.arguments, gradients=False, ops=("recurrence", "respelling"))
    assert outcome.complaints == []
    assert [(site.op, site.verdict) for site in outcome.report.sites] == [("recurrence", "applied")]


def test_loops_that_share_the_numbers_of_their_steps_are_paired_with_their_own_backwards():
    case = FOUND["state_space_loop"]

    def twice(gate, k, v, q):
        return state_space_loop(gate, k, state_space_loop(gate, k, v, q), q)

    outcome = compare(with_gradients(twice, case.arguments), case.arguments, gradients=False, **ONLY)
    assert outcome.complaints == []
    assert [(site.direction, site.verdict) for site in outcome.report.sites] == [("forward+backward", "applied")] * 2


def test_a_loop_that_a_checkpoint_computes_again_is_the_same_loop():
    """Its indices are selections, of which only one side is a number that the first loop had."""
    weights = 0.3 * jax.random.normal(jax.random.key(0), (2, 12, 29))

    @jax.checkpoint
    def layer(x, w):
        gate, k, v, q = (part for part in jax.numpy.split(x @ w, (1, 9, 21), -1))
        return x + jax.numpy.tanh(state_space_loop(gate[:, 0], k, v, q)), None

    def layers(x, weights):
        return jax.lax.scan(layer, x, weights)[0]

    arguments = FOUND["state_space_loop"].arguments[2], weights
    outcome = compare(with_gradients(layers, arguments), arguments, gradients=False, **ONLY)
    assert outcome.complaints == []
    assert [(site.direction, site.verdict) for site in outcome.report.sites] == [("forward+backward", "applied")]
