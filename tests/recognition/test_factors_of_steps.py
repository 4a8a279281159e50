"""Linear attention whose scores are multiplied, or divided, by arrays of one number for each query or for each key."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compare import compare, with_gradients

import autopallas

B, T, H, N, P = 2, 70, 3, 8, 6


def weighted(s, v):
    return jnp.einsum("bhts,bshp->bthp", s, v)


def scores(q, k):
    return jnp.einsum("bthn,bshn->bhts", q, k)


def causal():
    return jnp.tril(jnp.ones((T, T), bool))


def decays(logs):
    sums = jnp.cumsum(logs, -1)
    return jnp.exp(jnp.where(causal(), sums[..., :, None] - sums[..., None, :], -jnp.inf))


def powers():
    t, s = jnp.arange(T)[:, None], jnp.arange(T)[None]
    return jnp.where(t >= s, (1 - 2.0 ** (-5 - jnp.arange(H)))[:, None, None] ** (t - s), 0)


def of_keys(q, k, v, logs, f):
    return weighted(scores(q, k) * decays(logs) * f[:, :, None], v)


def of_queries(q, k, v, logs, f):
    return weighted(scores(q, k) * decays(logs) * f[..., None], v)


def of_both(q, k, v, logs, f):
    return weighted(scores(q, k) * (decays(logs) * f[..., None]) * jnp.sin(f)[:, :, None], v)


def divided_queries(q, k, v, logs, f):
    return weighted(scores(q, k) * decays(logs) / (1 + f**2)[..., None], v)


def divided_keys(q, k, v, logs, f):
    return weighted(scores(q, k) / (1 + f**2)[:, :, None] * decays(logs), v)


def without_decays(q, k, v, logs, f):
    return weighted(jnp.where(causal(), scores(q, k) * f[:, :, None], 0), v)


def exponentials_of_keys(q, k, v, logs, f):
    return weighted(scores(q, k) * causal() * jnp.exp(f)[:, :, None], v)


def of_one_head_for_all(q, k, v, logs, f):
    return weighted(scores(q, k) * decays(logs) * f[:1, :1, :, None], v)


def of_each_head(q, k, v, logs, f):
    return weighted(scores(q, k) * decays(logs) * f[0, :, :1, None], v)


def steps_that_are_the_decays_too(q, k, v, logs, f):
    """As state-space models have it, whose steps have a width."""
    width = jax.nn.softplus(f.swapaxes(1, 2)).swapaxes(1, 2)
    return weighted(scores(q, k)[:, :1] * decays(-width) * width[:, :, None], v)


def rows_of_decays_that_sum_to_one(q, k, v, logs, f):
    """As retention has it; the decays are no arguments."""
    d = powers()
    return weighted(scores(q, k) * (d / jnp.sqrt(d.sum(-1, keepdims=True))), v)


def normalised_too(q, k, v, logs, f):
    s = scores(jnp.abs(q), jnp.abs(k)) * decays(logs) * jnp.exp(f)[:, :, None]
    return weighted(s / (s.sum(-1, keepdims=True) + 1e-6), v)


def divided_by_the_absolute_value_of_sums(q, k, v, logs, f):
    """As the matrix LSTM has it, with gates of sigmoids."""
    s = scores(jnp.abs(q), -0.1 * jnp.abs(k)) * decays(logs) * jax.nn.sigmoid(f)[:, :, None]
    return weighted(s / jnp.maximum(jnp.abs(s.sum(-1, keepdims=True)), 1), v)


FOUND = [
    of_keys, of_queries, of_both, divided_queries, divided_keys, without_decays, exponentials_of_keys,
    of_one_head_for_all, of_each_head, steps_that_are_the_decays_too, rows_of_decays_that_sum_to_one, normalised_too,
    divided_by_the_absolute_value_of_sums,
]  # fmt: skip


def operands(dtype="float32", scale=1.0):
    random = np.random.default_rng(0)
    arrays = [random.standard_normal((B, T, H, width)) for width in (N, N, P)]
    logs, factors = -random.uniform(0, 0.5, (B, H, T)), scale * random.standard_normal((B, H, T))
    return (*(jnp.asarray(x, dtype) for x in arrays), jnp.asarray(logs, "float32"), jnp.asarray(factors, dtype))


@pytest.mark.parametrize("program", FOUND, ids=lambda f: f.__name__)
def test_they_are_found_and_right_in_value_and_gradient(program):
    arguments = operands()
    outcome = compare(program, arguments)
    assert outcome.complaints == []
    assert outcome.counts("linear_attention") == 1
    whole = with_gradients(program, arguments)
    report = autopallas.explain(autopallas.optimize(whole), *arguments)
    sites = [(site.op, site.direction) for site in report.sites if site.op == "linear_attention"]
    assert sites == [("linear_attention", "forward+backward")]
    assert compare(whole, arguments, gradients=False).complaints == []


@pytest.mark.parametrize("divided", [False, True], ids=["decays", "decays and factors"])
@pytest.mark.parametrize("wrapped", [lambda f: f, jax.checkpoint], ids=["plain", "checkpointed"])
def test_layers_share_decays_that_are_no_arguments(divided, wrapped):
    """They are made of numbers in the source alone, before the loop."""

    def layers(q, k, v):
        d = powers()
        d = d / jnp.sqrt(d.sum(-1, keepdims=True)) if divided else d

        def layer(v, w):
            return jnp.tanh(weighted(scores(q * w, k) * d, v)), None

        return jax.lax.scan(wrapped(layer), v, jnp.arange(1.0, 3) / T)[0]

    arguments = operands()[:3]
    outcome = compare(layers, arguments)
    assert outcome.complaints == []
    assert outcome.counts("linear_attention") == 1
    whole = compare(with_gradients(layers, arguments), arguments, gradients=False)
    assert whole.complaints == []
    sites = [(site.direction, site.verdict) for site in whole.report.sites if site.op == "linear_attention"]
    assert sites == [("forward+backward", "applied")]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("program", [of_keys, divided_queries], ids=lambda f: f.__name__)
def test_sixteen_bits(program, dtype):
    outcome = compare(program, operands(dtype))
    assert outcome.complaints == []
    assert outcome.counts("linear_attention") == 1


@pytest.mark.parametrize("scale", [1e-6, 30.0, 1e6])
@pytest.mark.parametrize("program", [of_both, divided_keys], ids=lambda f: f.__name__)
def test_small_and_large_factors(program, scale):
    assert compare(program, operands(scale=scale)).complaints == []


def test_it_is_assumed_that_factors_are_finite():
    report = autopallas.explain(autopallas.optimize(of_both), *operands())
    assert any("factors of their steps" in text for site in report.sites for text in site.assumptions)


def divided_by_sums_of_absolute_values(q, k, v, logs, f):
    s = scores(q, k) * powers()
    return weighted(s / jnp.maximum(jnp.abs(s).sum(-1, keepdims=True), 1), v)


def divided_by_the_greatest(q, k, v, logs, f):
    s = scores(q, k) * decays(logs)
    return weighted(s / (1 + jnp.max(jnp.abs(s), -1, keepdims=True)), v)


def times_the_sum(q, k, v, logs, f):
    s = scores(q, k) * decays(logs)
    return weighted(s * s.sum(-1, keepdims=True), v)


def times_themselves(q, k, v, logs, f):
    s = scores(q, k) * decays(logs)
    return weighted(s * s, v)


def of_pairs(q, k, v, logs, f):
    return weighted(scores(q, k) * decays(logs) * (f[..., None] + f[:, :, None]), v)


def divided_by_pairs(q, k, v, logs, f):
    return weighted(scores(q, k) * decays(logs) / (1 + (f[..., None] * f[:, :, None]) ** 2), v)


def exponents_of_keys(q, k, v, logs, f):
    """A gate of each key's own in the exponent."""
    sums = jnp.cumsum(logs, -1)
    exponents = sums[..., :, None] - sums[..., None, :] + f[:, :, None]
    return weighted(scores(q, k) * jnp.exp(jnp.where(causal(), exponents, -jnp.inf)), v)


def stabilised_by_the_greatest_exponent(q, k, v, logs, f):
    """As an extended LSTM has it."""
    sums = jnp.cumsum(logs, -1)
    exponents = jnp.where(causal(), sums[..., :, None] - sums[..., None, :] + f[:, :, None], -jnp.inf)
    greatest = exponents.max(-1, keepdims=True)
    s = scores(q, k) * jnp.exp(exponents - greatest)
    return weighted(s / (jnp.maximum(jnp.abs(s.sum(-1, keepdims=True)), jnp.exp(-greatest)) + 1e-6), v)


def exponentials_far_from_one(q, k, v, logs, f):
    """Each is at the end of what a float holds; only their products are near one."""
    sums = jnp.cumsum(logs, -1)
    rows, columns = jnp.exp(5 * sums), jnp.exp(-5 * sums + 0.1 * f)
    return weighted(scores(q, k) * jnp.where(causal(), rows[..., None] * columns[:, :, None], 0), v)


def means_over_the_steps(q, k, v, logs, f):
    """Nothing is masked."""
    return weighted(scores(q, k) * f[:, :, None] / T, v)


REFUSED = [
    divided_by_sums_of_absolute_values, divided_by_the_greatest, times_the_sum, times_themselves, of_pairs,
    divided_by_pairs, exponents_of_keys, stabilised_by_the_greatest_exponent, exponentials_far_from_one,
]  # fmt: skip


@pytest.mark.parametrize("program", [*REFUSED, means_over_the_steps], ids=lambda f: f.__name__)
def test_what_looks_alike_is_left_alone_and_said(program):
    outcome = compare(program, operands())
    assert outcome.complaints == []
    assert outcome.counts("linear_attention") == 0
    said = [miss.reason for miss in outcome.report.near_misses if miss.op == "linear_attention"]
    assert len(said) == (program in REFUSED)
