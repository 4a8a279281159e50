"""Gradients of examples: under ``vmap`` of a gradient, each example has gradients of its own of what all share."""

from __future__ import annotations

import corpus
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.catalogue import array
from support.compare import compare, optimized_like_a_user

import autopallas

E, B, T, D, F, N, H = 3, 2, 5, 16, 12, 2, 8


def rms(x, scale):
    return x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * scale


def layer_norm(x, scale, shift):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-5) * scale + shift


def heads(x):
    return x.reshape(*x.shape[:-1], N, H)


def gated(activation):
    def program(p, x):
        h = rms(x, p[0])
        return x + (activation(h @ p[1]) * (h @ p[2])) @ p[3]

    return program, (1 + array(D, seed=1) / 9, array(D, F, seed=2), array(D, F, seed=3), array(F, D, seed=4))


def biased(p, x):
    q, k, v = (heads(y) for y in jnp.split(layer_norm(x, p[1], p[2]) @ p[0], 3, -1))
    scores = jnp.einsum("bqnh,bknh->bnqk", q, k) / 3 + p[3][None]
    return jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(scores), v)


def probed(p, x):
    k, v = (heads(y) for y in jnp.split(x @ p[0], 2, -1))
    weights = jax.nn.softmax(jnp.einsum("nh,bknh->bnk", heads(p[1]), k))
    return jnp.einsum("bnk,bknh->bnh", weights, v)


PROGRAMS = {
    "silu": (*gated(jax.nn.silu), {"rms_norm": 1, "gated_mlp": 1}),
    "relu": (*gated(jax.nn.relu), {"rms_norm": 1, "gated_mlp": 1}),
    "gelu": (*gated(jax.nn.gelu), {"rms_norm": 1, "gated_mlp": 1}),
    "bias": (
        biased,
        (array(D, 3 * D, seed=5), 1 + array(D, seed=6) / 9, array(D, seed=7), array(N, T, T, seed=8)),
        {"attention": 1, "layer_norm": 1},
    ),
    "probe": (probed, (array(D, 2 * D, seed=9), array(D, seed=10)), {"attention": 1}),
}


def sites(report):
    return {site.op: site.direction for site in report.sites if site.op != "respelling"}


@pytest.mark.parametrize("name", PROGRAMS)
def test_sites_of_shared_parameters_are_found_with_their_backward(name):
    program, parameters, wanted = PROGRAMS[name]

    def loss(p, x):
        return jnp.sum(jnp.sin(program(p, x)))

    step = jax.vmap(jax.grad(loss, (0, 1)), (None, 0))
    compared = compare(step, (parameters, array(E, B, T, D, seed=11)), gradients=False)
    assert compared.complaints == []
    assert {op: compared.counts(op) for op in wanted} == wanted
    assert sites(compared.report) == dict.fromkeys(wanted, "forward+backward")


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("rows", [2, 5])
def test_queries_of_examples_attend_to_shared_keys(rows, masked):
    def loss(w, x):
        scores = x @ w[0]
        if masked:
            scores = jnp.where(jnp.arange(rows)[:, None] >= jnp.arange(F), scores, -jnp.inf)
        return jnp.sum(jnp.sin(jax.nn.softmax(scores) @ w[1].T))

    weights = array(D, F, seed=15), array(D, F, seed=16)
    step = jax.vmap(jax.grad(loss, (0, 1)), (None, 0))
    compared = compare(step, (weights, array(E, rows, D, seed=17)), gradients=False)
    assert compared.complaints == []
    assert sites(compared.report) == {"attention": "forward+backward"}


def test_the_number_of_an_example_hides_shared_keys():
    def loss(w, x):
        visible = lax.axis_index("examples") >= jnp.arange(F) - 9
        return jnp.sum(jnp.sin(jax.nn.softmax(jnp.where(visible, x @ w, -jnp.inf)) @ w.T))

    step = jax.vmap(jax.grad(loss, (0, 1)), (None, 0), axis_name="examples")
    compared = compare(step, (array(D, F, seed=18), array(E, 2, D, seed=19)), gradients=False)
    assert compared.complaints == []


@pytest.mark.parametrize("axis", [1, 2])
def test_examples_along_another_axis(axis):
    program, parameters, _ = PROGRAMS["silu"]

    def loss(p, x):
        return jnp.sum(jnp.sin(program(p, x)))

    step = jax.vmap(jax.grad(loss), (None, axis))
    compared = compare(step, (parameters, array(4, E, 6, D, seed=12)), gradients=False)
    assert compared.complaints == []
    assert compared.counts("gated_mlp") == compared.counts("rms_norm") == 1


def test_gradients_are_clipped_and_added_up_in_a_loop():
    program, parameters, wanted = PROGRAMS["silu"]

    def loss(p, x):
        return jnp.sum(jnp.sin(program(p, x)))

    def clipped(p, x):
        gradients = jax.grad(loss)(p, x)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in gradients))
        return [g / jnp.maximum(norm, 1) for g in gradients]

    def step(p, xs):
        def microbatch(total, x):
            gradients = jax.vmap(clipped, (None, 0))(p, x)
            return [t + g.sum(0) for t, g in zip(total, gradients, strict=True)], None

        return lax.scan(microbatch, [jnp.zeros_like(a) for a in p], xs)[0]

    compared = compare(step, (parameters, array(2, E, B, T, D, seed=13)), gradients=False)
    assert compared.complaints == []
    assert sites(compared.report) == dict.fromkeys(wanted, "forward+backward")


def test_a_gradient_of_examples_around_the_optimized_function():
    program, parameters, _ = PROGRAMS["bias"]
    optimized = optimized_like_a_user(program)

    def loss(f):
        return lambda p, x: jnp.sum(jnp.sin(f(p, x)))

    x = array(E, B, T, D, seed=14)
    given, wanted = (jax.vmap(jax.grad(loss(f)), (None, 0))(parameters, x) for f in (optimized, program))
    for a, b in zip(given, wanted, strict=True):
        assert jnp.max(jnp.abs(a - b)) < 1e-4 * jnp.max(jnp.abs(b))


def test_the_train_step_of_examples_of_the_corpus():
    pytest.importorskip("optax")
    (case,) = [case for case in corpus.cases() if "lm_perexample" in case.name]
    step, args = case.build()
    optimized = optimized_like_a_user(step)
    jax.jit(lambda *a: optimized(*a)).lower(*args)
    counts = optimized.report().counts()
    assert counts["attention"] == case.count("attention")
    assert counts["rms_norm"] == case.count("rms")
    assert counts["gated_mlp"] == case.count("glu")


def loss_of_a_row(p, x, y):
    """The loss of rows [1, D] of one example, whose gradients sum nothing."""
    return -jnp.take_along_axis(jax.nn.log_softmax(jnp.tanh(x @ p[0]) @ p[1] + p[2]), y[:, None], -1).mean()


ROW = (array(D, F, seed=1), array(F, 4 * D, seed=2), array(4 * D, seed=3))


@pytest.mark.parametrize("biased", [True, False])
def test_losses_of_examples_of_one_row(biased):
    x, y = array(8, D, seed=4), jnp.arange(8) * 5 % (4 * D)

    def example(p, x, y):
        return loss_of_a_row(p if biased else (*p[:2], 0.0), x[None], y[None])

    def step(p, x, y):
        values, gradients = jax.vmap(jax.value_and_grad(example), (None, 0, 0))(p, x, y)
        norms = jax.vmap(lambda g: jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in g)))(gradients)
        return values, gradients, norms

    compared = compare(step, (ROW, x, y), gradients=False)
    assert compared.counts("cross_entropy") == 1, compared.reasons()
    assert compared.complaints == []


@pytest.mark.parametrize("read", [lambda z: z.sum(1), lambda z: (2 * z).sum(1) ** 2, lambda z: z.max(1)])
def test_logits_of_one_row_that_are_read_too_are_no_gradient(read):
    def program(p, x, y):
        z = x[:, None] @ p[1]
        return -jnp.take_along_axis(jax.nn.log_softmax(z), y[:, None, None], -1).mean(), read(z)

    compared = compare(program, (ROW, array(8, F, seed=4), jnp.arange(8) * 5 % (4 * D)), gradients=False)
    assert compared.counts("cross_entropy") == 0, compared.reasons()
    assert compared.complaints == []


def test_functions_whose_derivatives_call_them_are_read():
    """As the one of ``logaddexp`` does."""

    def joined(q, keys, values):
        scores = [q @ k.T for k in keys]
        sums = [jax.nn.logsumexp(s, -1, keepdims=True) for s in scores]
        whole = jnp.logaddexp(jnp.logaddexp(sums[0], sums[1]), sums[2])
        parts = (jnp.exp(n - whole) * (jax.nn.softmax(s) @ v) for n, s, v in zip(sums, scores, values, strict=True))
        return jnp.sum(jnp.sin(sum(parts)))

    random = np.random.default_rng(0)
    q, *others = (jnp.asarray(random.standard_normal((8, 8)), jnp.float32) for _ in range(7))
    arguments = jnp.stack([q, -q]), others[:3], others[3:]
    step = jax.vmap(jax.grad(joined, (0, 1, 2)), (0, None, None))
    found = autopallas.optimize(step, objective="always", strict=True)(*arguments)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(jax.jit(step)(*arguments)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


# --- Models with parameters of their own that share their data -------------------------------------------------------


def one_head(p, x):
    return jax.nn.softmax((x @ p[0]) @ (x @ p[1]).mT / 4) @ (x @ p[2])


def several_heads(p, x):
    q, k, v = (jnp.einsum("btd,dnh->btnh", x, w.reshape(D, N, H)) for w in p[:3])
    scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)), jnp.einsum("bqnh,bknh->bnqk", q, k), -1e9)
    return x + jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(scores), v).reshape(B, T, D)


def keys_that_are_values(p, x):
    q, k = x @ p[0], x @ p[1]
    return jax.nn.softmax(q @ k.mT / 4) @ k


def a_bias_of_each(p, x):
    return jax.nn.softmax((x @ p[0]) @ (x @ p[1]).mT + p[3]) @ (x @ p[2])


@pytest.mark.parametrize("program", [one_head, several_heads, keys_that_are_values, a_bias_of_each])
def test_models_that_share_their_data_have_their_own_gradients(program):
    """JAX puts the axis of models elsewhere in their gradients than in queries, keys and values."""

    def loss(p, x):
        return jnp.sum(jnp.sin(program(p, x)))

    parameters = (*(array(E, D, D, seed=i) / 4 for i in range(3)), array(E, T, T, seed=4))
    step = jax.vmap(jax.value_and_grad(loss), (0, None))
    compared = compare(step, (parameters, array(B, T, D, seed=5)), gradients=False)
    assert compared.complaints == []
    assert sites(compared.report) == {"attention": "forward+backward"}


@pytest.mark.parametrize("tokens", [None, 0], ids=["shared tokens", "tokens of each seed"])
@pytest.mark.parametrize("program", [one_head, several_heads, keys_that_are_values])
def test_models_of_several_seeds_have_their_own_gradients(program, tokens):
    """Two axes of models, of which JAX puts each elsewhere."""

    def loss(p, x):
        return jnp.sum(jnp.sin(program(p, x)))

    parameters = tuple(array(2, E, D, D, seed=i) / 4 for i in range(3))
    x = array(B, T, D, seed=5) if tokens is None else array(2, B, T, D, seed=5)
    step = jax.vmap(jax.vmap(jax.value_and_grad(loss), (0, None)), (0, tokens))
    compared = compare(step, (parameters, x), gradients=False)
    assert compared.complaints == []
    assert sites(compared.report) == {"attention": "forward+backward"}


def test_models_that_share_values_too_have_their_own_gradients():
    """What has no gradient needs no axis of models."""

    def loss(p, v, x):
        return jnp.sum(jnp.sin(jax.nn.softmax((x @ p[0]) @ (x @ p[1]).mT / 4) @ (x @ v)))

    arguments = tuple(array(E, D, D, seed=i) / 4 for i in range(2)), array(D, D, seed=3) / 4, array(T, D, seed=5)
    compared = compare(jax.vmap(jax.value_and_grad(loss), (0, None, None)), arguments, gradients=False)
    assert compared.complaints == []
    assert sites(compared.report) == {"attention": "forward+backward"}


@pytest.mark.parametrize("given_back", [0, (1, 2, 0), (2, 0, 1)])
def test_examples_along_other_axes_of_each_operand(given_back):
    def loss(q, k, v):
        return jnp.sum(jnp.sin(jax.nn.softmax(q @ k.T / 4) @ v))

    step = jax.vmap(jax.grad(loss, (0, 1, 2)), (1, 2, 0), given_back)
    arguments = array(T, E, D, seed=1), array(T, D, E, seed=2), array(E, T, H, seed=3)
    compared = compare(step, arguments, gradients=False)
    assert compared.complaints == []
    assert sites(compared.report) == {"attention": "forward+backward"}
