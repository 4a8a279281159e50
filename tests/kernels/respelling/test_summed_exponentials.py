"""Respelling of loops that sum exponentials of sums: what is found, what is left alone, what it computes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.nn import logsumexp
from support.compare import compare
from support.respellings import found, random, sites

import autopallas
from autopallas.autotune.trial import Difference, Trial
from autopallas.kernels.respelling.exponential_products import is_sure
from autopallas.kernels.respelling.indexed_loops import loop_in
from autopallas.kernels.respelling.kinds import summed_exponentials, summed_exponentials_gradient

FORWARD, GRADIENT = summed_exponentials.KIND.name, summed_exponentials_gradient.KIND.name
OPS = [FORWARD, GRADIENT]
T, B, S = 7, 3, 11


def arguments(*lead, steps=T, states=S):
    """x [T, ..., S] and w [S, S]."""
    return random(steps, *lead, states), random(states, states, seed=1)


def scanned(step, **options):
    """A loop whose steps give what they carry."""

    def function(x, w):
        def one(state, x):
            state = step(state, x, w)
            return state, state

        return lax.scan(one, x[0], x[1:], **options)

    return function


def markov(a, x, w):
    return logsumexp(a[..., :, None] + w, axis=-2) + x


def emission_inside(a, x, w):
    return logsumexp(a[..., :, None] + w + x[..., None, :], -2)


def transposed(a, x, w):
    return logsumexp(a[..., None, :] + w, axis=-1) + x


def kept_dimensions(a, x, w):
    return (logsumexp(w.T + a[..., None, :], -1, keepdims=True) + x[..., None])[..., 0]


def by_hand(a, x, w):
    """Neither guards the maximum nor keeps it out of the derivative."""
    scores = a[..., :, None] + w
    largest = scores.max(-2, keepdims=True)
    return jnp.log(jnp.exp(scores - largest).sum(-2)) + largest.squeeze(-2) + x


def stopped(a, x, w):
    scores = w - 2 * a[..., :, None]
    largest = lax.stop_gradient(scores.max(-2, keepdims=True))
    return x - (jnp.log(jnp.sum(jnp.exp(scores - largest), -2, keepdims=True)) + largest)[..., 0, :] / 2


def of_logarithms(a, x, w):
    return logsumexp(jax.nn.log_softmax(a)[..., :, None] + jax.nn.log_softmax(w), axis=-2) + x


def scaled(a, x, w):
    """The temperature is a number that the program computes."""
    temperature = 1 + jnp.square(w[0, 0])
    return temperature * logsumexp((a[..., :, None] - w + 1.0) / temperature, axis=-2) + x


def weights_alone(a, x, w):
    """A softmax whose logarithm nothing reads."""
    return jnp.sum(jax.nn.softmax(a[..., :, None] + w, -2) * x[..., :, None], -2)


def twice(a, x, w):
    """The second sum is over what the first gives, with the same matrix."""
    b = -logsumexp(a[..., None, :] - w, axis=-1)
    return x - logsumexp(b[..., :, None] - w, axis=-2)


def by_examples(a, x, w):
    """Zeros in the place of maxima that are not finite are repeated twice."""
    for _ in range(a.ndim - 1):
        return jax.vmap(by_examples, (0, 0, None))(a, x, w)
    return logsumexp(a[:, None] + w, axis=0) + x


def three_arrays(a, x, w):
    """A term of the step's own on both sides of the matrix."""
    return logsumexp(jnp.sin(a)[..., :, None] + w + jnp.cos(x)[..., None, :] - 0.5 * x[..., :, None], axis=-2)


def beside(a, x, w):
    """The largest sums leave the step too, as for a decoder."""
    scores = a[..., :, None] + w
    return logsumexp(scores, -2) + 0.1 * jnp.max(jnp.sin(scores), -2) + x


STEPS = [
    markov, emission_inside, transposed, kept_dimensions, by_hand, stopped, of_logarithms, scaled, weights_alone, twice,
    three_arrays, by_examples, beside,
]  # fmt: skip


@pytest.mark.parametrize("lead", [(), (S,)], ids=["vector", "square"])
@pytest.mark.parametrize("step", STEPS, ids=[step.__name__ for step in STEPS])
def test_any_spelling_is_found_and_right(step, lead):
    compared = compare(scanned(step), arguments(*lead), ops=OPS)
    assert compared.complaints == []
    assert compared.counts("respelling") >= 1


LOOPS = {"reverse": {"reverse": True}, "unrolled": {"unroll": 3}}


@pytest.mark.parametrize("name", LOOPS)
def test_any_loop_is_found(name):
    compared = compare(scanned(markov, **LOOPS[name]), arguments(B), ops=OPS)
    assert compared.complaints == []
    assert compared.counts("respelling") >= 1


def test_gradients_within_the_program():
    """The loop and its backward are one site, whose exponentials are never stacked."""

    def step(x, w):
        return jax.value_and_grad(lambda *own: jnp.sin(scanned(markov)(*own)[1]).sum(), (0, 1))(x, w)

    compared = compare(step, arguments(B), gradients=False, ops=OPS)
    assert compared.complaints == []
    assert found(step, *arguments(256, states=64)).count(GRADIENT) == 1
    assert GRADIENT not in found(step, *arguments(B, states=64))  # what is stacked stays in a cache


def test_gradients_of_steps_under_a_checkpoint():
    def step(x, w):
        return jax.grad(lambda *own: jnp.sin(scanned(jax.checkpoint(markov))(*own)[1]).sum(), (0, 1))(x, w)

    compared = compare(step, arguments(B), gradients=False, ops=OPS)
    assert compared.complaints == []
    assert compared.counts("respelling") >= 1


def test_gradients_in_a_loop_over_layers():
    def loss(x, w):
        def layer(x, _):
            return scanned(markov)(x, w)[1] - x[1:].mean(), None

        return sum(jnp.sin(layer(x[i:], None)[0]).sum() for i in range(2))

    compared = compare(jax.grad(loss, (0, 1)), arguments(B, steps=9), gradients=False, ops=OPS)
    assert compared.complaints == []
    assert compared.counts("respelling") >= 2


def test_loops_without_slices():
    """Sinkhorn's loop carries two potentials; its matrix is the same in all steps."""

    def potentials(costs):
        def step(_, carried):
            f = -logsumexp(carried[1][None] - costs, axis=1)
            return f, -logsumexp(f[:, None] - costs, axis=0)

        return lax.fori_loop(0, 6, step, (jnp.zeros(S), jnp.zeros(S + 2)))

    compared = compare(potentials, (random(S, S + 2),), ops=OPS)
    assert compared.complaints == []
    assert compared.counts("respelling") >= 1


def test_examples_of_vmap():
    def one(x, w):
        return jax.vmap(scanned(markov), (1, None))(x, w)

    assert compare(one, arguments(B), ops=OPS).complaints == []


def test_an_optimized_function_under_vmap():
    x, w = arguments(B)
    optimized = autopallas.optimize(scanned(markov), objective="always", ops=OPS)
    np.testing.assert_allclose(
        jax.vmap(optimized, (1, None))(x, w)[1], jax.vmap(scanned(markov), (1, None))(x, w)[1], rtol=1e-5, atol=1e-5
    )


def test_a_search_allows_gradients_of_loops_their_own_tolerance():
    """Values and gradients are results of one computation where both loops are measured."""

    def step(x, w):
        return jax.value_and_grad(lambda x, w: jnp.sin(scanned(markov)(x, w)[0]).sum(), (0, 1))(x, w)

    (match,) = (site for site in sites(step, *arguments(256, states=64)) if site.spec.kind == GRADIENT)
    trial = Trial.abstract(match.measured)
    count = len(match.measured.results)
    faults = [trial.fault([Difference(2e-5 * (i == place), 0.0) for i in range(count)], None) for place in range(count)]
    values = match.measured.own_results
    assert 0 < values < count
    assert [fault is None for fault in faults] == [place >= values for place in range(count)]


# ---------------------------------------------------------------------- numbers at the ends


INFINITE = np.where(np.tri(S, k=-1), -np.inf, 0)
ENDS = {
    "infinite outside": lambda x, w: (x.at[2, 1, 2].set(jnp.inf), w),
    "minus infinity outside": lambda x, w: (x.at[2, 1, 2].set(-jnp.inf), w),
    "left to right": lambda x, w: (x.at[0, :, 1:].set(-jnp.inf), w + INFINITE),
    "a state that none reaches": lambda x, w: (x, w.at[:, 2].set(-jnp.inf)),
    "a state that reaches none": lambda x, w: (x, w.at[2].set(-jnp.inf)),
    "nothing is reached": lambda x, w: (x.at[0].set(-jnp.inf), w),
    "infinite": lambda x, w: (x.at[0, 1, 2].set(jnp.inf), w),
    "infinite in the matrix": lambda x, w: (x, w.at[1, 2].set(jnp.inf)),
    "no number": lambda x, w: (x.at[2, 1, 2].set(jnp.nan), w),
    "a fill": lambda x, w: (x, w.at[:, 2].set(-1e4).at[3].set(-1e4)),
    "far off": lambda x, w: (x + 1e4, w - 1e4),
    "apart": lambda x, w: (x.at[0].set(jnp.arange(S) * 200.0), w + 200.0 * (S - jnp.arange(S))[:, None]),
    "opposite": lambda x, w: (x.at[:, :, 0].add(300.0), w.at[0].add(-300.0)),
    "nearly opposite": lambda x, w: (x.at[:, :, 0].add(40.0), w.at[0].add(-40.0)),
    "large": lambda x, w: (100 * x, 100 * w),
}


def train_step(step):
    def function(x, w):
        loss, gradients = jax.value_and_grad(lambda *own: jnp.sin(scanned(step)(*own)[1] / 99).sum(), (0, 1))(x, w)
        return loss, gradients, scanned(step)(x, w)

    return function


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize(
    "step", [markov, emission_inside, stopped, weights_alone], ids=["guarded", "inside", "by hand", "softmax"]
)
def test_numbers_at_the_ends(step, name):
    compared = compare(train_step(step), ENDS[name](*arguments(B)), gradients=False, ops=OPS)
    assert compared.complaints == []
    assert compared.counts("respelling") >= 1


def test_products_that_cannot_be_trusted_are_computed_as_written():
    """The largest numbers of both arrays meet nowhere, so that each product of their exponentials is 0."""
    x, w = ENDS["opposite"](*arguments(B))
    shifted = jnp.exp(x[0] - x[0].max(-1, keepdims=True)) @ jnp.exp(w - w.max(0))
    assert float(shifted.max()) < 1e-30
    optimized = autopallas.optimize(scanned(markov), objective="always", ops=OPS, strict=True)
    np.testing.assert_allclose(optimized(x, w)[1], scanned(markov)(x, w)[1], rtol=1e-6)


def test_loops_of_numbers_that_lie_far_apart_are_run_as_written():
    """As with costs divided by a small temperature: steps would compute products, and what is written beside them."""

    def are_products(x, w):
        (spec,) = (site.spec for site in sites(scanned(markov), x, w) if site.spec.kind == FORWARD)
        return bool(is_sure(summed_exponentials._plan(loop_in(spec)), [w]))

    x, w = arguments(B, states=64)
    assert are_products(x, w)
    assert are_products(100 * x, w + 1e4)
    assert not are_products(x, 10 * w)
    assert not are_products(x, jnp.where(w < 0, -jnp.inf, w))
    for scale in (1, 10):
        function = jax.value_and_grad(lambda x, w: jnp.sin(scanned(markov)(x, w)[1]).sum(), (0, 1))
        assert compare(function, (x, scale * w), gradients=False, ops=OPS).complaints == []
        assert compare(scanned(markov), (x, scale * w), ops=OPS).complaints == []


# ---------------------------------------------------------------------- what is left alone


def returns_sum(a, x, w):
    scores = a[..., :, None] + w
    return jnp.exp(scores - lax.stop_gradient(scores.max(-2, keepdims=True))).sum(-2) + x


def returns_maximum(a, x, w):
    scores = a[..., :, None] + w
    largest = scores.max(-2)
    return jnp.log(jnp.exp(scores - largest[..., None, :]).sum(-2)) + 2 * largest + x


def adds_epsilon(a, x, w):
    scores = a[..., :, None] + w
    largest = scores.max(-2)
    return jnp.log(1e-3 + jnp.exp(scores - largest[..., None, :]).sum(-2)) + largest + x


def other_axis(a, x, w):
    """The maximum is one over the other axis."""
    scores = a[..., :, None] + w
    return jnp.log(jnp.exp(scores - scores.max(-1, keepdims=True)).sum(-2)) + scores.max(-1) + x


def sum_over_another_axis(a, x, w):
    scores = a[..., :, None] + w
    return jnp.log(jnp.exp(scores - scores.max(-2, keepdims=True)).sum(-1)) + scores.max(-2) + x


def exchanged(a, x, w):
    """The logarithm is added to the maximum of another column."""
    scores = a[..., :, None] + w
    largest = scores.max(-2)
    return jnp.log(jnp.exp(scores - largest[..., None, :]).sum(-2)) + largest[..., ::-1] + x


def square_root(a, x, w):
    scores = a[..., :, None] + w
    largest = scores.max(-2)
    return jnp.sqrt(jnp.exp(scores - largest[..., None, :]).sum(-2)) + largest + x


def product_of_states(a, x, w):
    return logsumexp(a[..., :, None] * w, axis=-2) + x


def of_two_states(a, x, w):
    """No term lacks an axis."""
    return logsumexp(jnp.sin(a[..., :, None] + w), axis=-2) + x


LEFT = [
    returns_sum, returns_maximum, adds_epsilon, other_axis, sum_over_another_axis, exchanged, square_root,
    product_of_states, of_two_states,
]  # fmt: skip


@pytest.mark.parametrize("step", LEFT, ids=[step.__name__ for step in LEFT])
@pytest.mark.parametrize("lead", [(), (S,)], ids=["vector", "square"])
def test_anything_else_is_left_alone(step, lead):
    compared = compare(scanned(step), arguments(*lead), ops=OPS)
    assert compared.complaints == []
    assert compared.counts("respelling") == 0


def test_numbers_of_16_bits_are_left_alone():
    x, w = (a.astype(jnp.bfloat16) for a in arguments(B))
    optimized = autopallas.optimize(scanned(markov), objective="always", ops=OPS)
    optimized(x, w)
    assert optimized.report().counts()["respelling"] == 0


def test_exponentials_that_something_else_reads_are_stacked():
    """A second gradient reads what the first one stacks, so that it has to exist."""

    def function(x, w):
        _, pull = jax.vjp(lambda *own: scanned(markov)(*own)[1], x, w)
        return pull(jnp.ones_like(x[1:])), pull(jnp.cos(x[1:]))

    assert compare(function, arguments(B), gradients=False, ops=OPS).complaints == []


@pytest.mark.parametrize(("states", "wanted"), [(64, 1), (32, 0)])
def test_few_exponentials_are_not_looked_for(states, wanted):
    types = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((T, states), (states, states))]
    assert found(scanned(markov), *types).count(FORWARD) == wanted


def test_large_sums_of_a_loop_are_looked_for_in_linear_time():
    """Exponents that are added up in many ways are read a bounded number of times."""

    def doubled(a, x, w):
        scores = a[..., :, None] + w
        for _ in range(40):
            scores = scores + scores
        return logsumexp(scores, -2) + x

    assert found(scanned(doubled), *arguments(B, states=64)).count(FORWARD) == 0
