"""Recurrences are found in any spelling and computed as exactly as by the program; other loops are left alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compare import compare, optimized_like_a_user, with_gradients

import autopallas
from autopallas.graph import Graph, flatten
from autopallas.patterns.recurrence import find
from tests.recognition.recurrences import FOUND, REFUSED, T, gated, receptance, retention, state_space

ONLY = {"ops": ("recurrence",)}


@pytest.mark.parametrize("name", FOUND)
def test_a_spelling_is_found_and_right_with_gradients_taken_outside(name):
    case = FOUND[name]
    outcome = compare(case.function, case.arguments, **ONLY)
    assert outcome.complaints == []
    (site,) = outcome.report.sites
    assert (site.op, site.verdict, site.spec["decay"]) == ("recurrence", "applied", case.decay)


@pytest.mark.parametrize("name", FOUND)
def test_its_backward_is_found_in_a_program_that_holds_it(name):
    case = FOUND[name]
    step = with_gradients(case.function, case.arguments)
    outcome = compare(step, case.arguments, gradients=False, **ONLY)
    assert outcome.complaints == []
    found = [(site.op, site.direction, site.verdict) for site in outcome.report.sites]
    assert found == [("recurrence", "forward+backward", "applied")] * case.trained
    program = jax.make_jaxpr(optimized_like_a_user(step, **ONLY))(*case.arguments)
    assert [e.primitive.name for e in flatten(program).equations].count("scan") == 0


@pytest.mark.parametrize("name", REFUSED)
def test_another_loop_is_left_alone_with_a_reason(name):
    case = REFUSED[name]
    for function in (case.function, with_gradients(case.function, case.arguments)):
        report = autopallas.explain(optimized_like_a_user(function, **ONLY), *case.arguments)
        assert [site.op for site in report.sites] == []
        assert not report.failures
        reasons = [miss.reason for miss in report.near_misses]
        assert all(case.reason in reason for reason in reasons)
        assert len(reasons) == bool(case.reason) or function is not case.function


def layer(name):
    """A residual layer around one spelling, from and to [T, B, 12]."""
    function, given = FOUND[name].function, FOUND[name].arguments
    widths = [a.shape[2:] for a in given if a.shape[:2] == given[0].shape[:2]]
    sizes = [int(np.prod(w)) for w in widths]

    def run(x, weights, rest):
        projected = jnp.split(x @ weights[0], np.cumsum(sizes)[:-1], -1)
        arrays = [p.reshape(*x.shape[:2], *w) for p, w in zip(projected, widths, strict=True)]
        y = function(*arrays, *rest)
        return x + jnp.tanh(y.reshape(*x.shape[:2], -1) @ weights[1])

    random = np.random.default_rng(1)
    y = jax.eval_shape(function, *given)
    out = int(np.prod(y.shape[2:]))
    weights = [jnp.asarray(random.standard_normal(s) * 0.2, jnp.float32) for s in ((12, sum(sizes)), (out, 12))]
    return run, weights, given[len(widths) :]


@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("name", ["retention", "state_space", "gated", "receptance"])
def test_layers_in_a_scan_are_trained_in_chunks(name, checkpointed):
    run, weights, rest = layer(name)
    stacked = jax.tree.map(lambda w: jnp.stack([w, 0.5 * w]), weights)

    def loss(x, stacked, *rest):
        body = lambda x, w: (run(x, w, rest), None)  # noqa: E731
        return jnp.mean(jax.lax.scan(jax.checkpoint(body) if checkpointed else body, x, stacked)[0] ** 2)

    x = jnp.asarray(np.random.default_rng(2).standard_normal((T, 2, 12)), jnp.float32)
    step = jax.value_and_grad(loss, argnums=tuple(range(2 + len(rest))))
    outcome = compare(step, (x, stacked, *rest), gradients=False, **ONLY)
    assert outcome.complaints == []
    assert [(s.direction, s.verdict) for s in outcome.report.sites] == [("forward+backward", "applied")]


def test_equal_layers_share_their_site():
    run, weights, rest = layer("state_space")

    def loss(x, weights, *rest):
        for own in weights:
            x = run(x, own, rest)
        return jnp.mean(x**2)

    x = jnp.ones((T, 2, 12), jnp.float32)
    program = jax.make_jaxpr(jax.value_and_grad(loss, 1))(x, [weights] * 3, *rest)
    matches, misses = find(Graph(flatten(program)))
    assert not misses
    assert len(matches) == 3
    assert len({match.site for match in matches}) == 1


@pytest.mark.parametrize("last", [False, True], ids=["both", "last"])
def test_the_last_state_may_be_a_result(last):
    *given, gate, state = FOUND["state_kept"].arguments

    def run(q, k, v, gate, state):
        def step(state, own):
            q, k, v, gate = own
            state = jax.nn.sigmoid(gate)[..., None, None] * state + k[..., None] * v[..., None, :]
            return state, jnp.einsum("bhn,bhnp->bhp", q, state)

        found = jax.lax.scan(step, state, (q, k, v, gate))
        return found[0] if last else found

    arguments = (*given, gate, state)
    outcome = compare(run, arguments, **ONLY)
    assert outcome.complaints == []
    assert len(outcome.report.sites) == 1


def test_two_cotangents_keep_the_loop_and_say_so():
    *given, gate, state = FOUND["state_kept"].arguments

    def run(q, k, v, gate, state):
        def step(state, own):
            q, k, v, gate = own
            state = jax.nn.sigmoid(gate)[..., None, None] * state + k[..., None] * v[..., None, :]
            return state, jnp.einsum("bhn,bhnp->bhp", q, state)

        return jax.lax.scan(step, state, (q, k, v, gate))

    arguments = (*given, gate, state)
    outcome = compare(with_gradients(run, arguments), arguments, gradients=False, **ONLY)
    assert outcome.complaints == []
    assert ["cotangents of several results" in reason for reason in outcome.reasons()] == [True]


def test_a_state_that_something_else_needs_is_no_matrix():
    def run(q, k, v, decay):
        def step(state, own):
            q, k, v = own
            state = decay[:, None, None] * state + k[..., :, None] * v[..., None, :]
            return state, (jnp.einsum("bhn,bhnp->bhp", q, state), jnp.tanh(state))

        return jax.lax.scan(step, jnp.zeros((2, 3, 8, 9)), (q, k, v))[1]

    report = autopallas.explain(optimized_like_a_user(run, **ONLY), *FOUND["retention"].arguments)
    assert [(site.verdict, site.spec["decay"]) for site in report.sites] == [("kept", "elementwise")]
    assert "best form" in report.sites[0].reason


def test_infinities_are_assumed_away_only_where_that_is_allowed():
    (site,) = autopallas.explain(optimized_like_a_user(retention, **ONLY), *FOUND["retention"].arguments).sites
    assert any("finite" in assumption for assumption in site.assumptions)
    careful = optimized_like_a_user(retention, assume_finite=False, **ONLY)
    report = autopallas.explain(careful, *FOUND["retention"].arguments)
    assert [site.verdict for site in report.sites] == ["kept"]


@pytest.mark.parametrize("mapped", [(0, 0, 0, None), (0, None, 0, 0)])
def test_sites_can_be_mapped_and_differentiated(mapped):
    given = FOUND["retention"].arguments
    batched = tuple(jnp.stack([a, 0.5 * a]) if axis == 0 else a for a, axis in zip(given, mapped, strict=True))
    optimized = optimized_like_a_user(retention, **ONLY)

    def gradient(function):
        return jax.grad(lambda *a: jnp.sum(jnp.sin(function(*a))), argnums=(0, 1, 2, 3))

    for form in (lambda f: f, gradient):
        ours, theirs = (jax.vmap(form(f), mapped)(*batched) for f in (optimized, retention))
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)
    assert {s.verdict for s in optimized.report().sites} == {"applied"}


@pytest.mark.parametrize("function", [retention, state_space, gated, receptance])
def test_16_bit_programs_are_computed_in_float32_inside(function):
    given = tuple(a.astype(jnp.bfloat16) for a in FOUND[function.__name__].arguments)
    run = lambda *a: function(*a).astype(jnp.bfloat16)  # noqa: E731
    outcome = compare(run, given, gradients=False, **ONLY)
    assert outcome.complaints == []
    assert len(outcome.report.sites) == 1
