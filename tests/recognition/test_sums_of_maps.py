"""Sums of softmaxes times the same values, as of differential attention: one site, and right. Look-alikes are none."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.nn import softmax
from support.catalogue import array
from support.compare import compare, compiled, optimized_like_a_user, with_gradients

import autopallas
from autopallas.sites.encoding import encoded, saved_site

B, H, T, D = 2, 2, 6, 4
CAUSAL = jnp.tril(jnp.ones((T, T), bool))


def maps(dtype=jnp.float32):
    """Queries and keys of two maps, values, and a number."""
    first = [array(B, H, T, D, seed=i).astype(dtype) for i in range(4)]
    return *first, array(B, H, T, 2 * D, seed=4).astype(dtype), jnp.asarray(0.3, dtype)


def probabilities(q, k, mask=CAUSAL):
    return softmax(jnp.where(mask, q @ k.mT * 0.5, -jnp.inf))


def difference(q1, k1, q2, k2, v, c):
    return (probabilities(q1, k1) - c * probabilities(q2, k2)) @ v


def negated_and_added(q1, k1, q2, k2, v, c):
    return (-c * probabilities(q2, k2) + probabilities(q1, k1)) @ v


def mean(q1, k1, q2, k2, v, c):
    return 0.5 * (probabilities(q1, k1) + probabilities(q2, k2)) @ v


def sum_of_three(q1, k1, q2, k2, v, c):
    return sum([probabilities(q1, k1), probabilities(q2, k2) / 2, -c * probabilities(q1, k2)]) @ v


def number_of_each_row(q1, k1, q2, k2, v, c):
    gate = jax.nn.sigmoid(q1.sum(-1, keepdims=True))
    return (gate * probabilities(q1, k1) + (1 - gate) * probabilities(q2, k2)) @ v


def same_keys(q1, k1, q2, k2, v, c):
    return (probabilities(q1, k1) - c * probabilities(q2, k1)) @ v


def other_masks(q1, k1, q2, k2, v, c):
    return (probabilities(q1, k1) - c * probabilities(q2, k2, CAUSAL.T)) @ v


def biases(q1, k1, q2, k2, v, c):
    bias = jnp.sin(jnp.arange(T) * c)
    return (softmax(q1 @ k1.mT + bias) - softmax(q2 @ k2.mT + bias)) @ v


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "program", [difference, negated_and_added, mean, sum_of_three, number_of_each_row, same_keys, other_masks, biases]
)
def test_a_sum_of_maps_is_one_site(program, dtype):
    compared = compare(program, maps(dtype))
    assert compared.complaints == []
    assert compared.counts() == 1, compared.reasons()
    assert compared.reasons() == []
    step = with_gradients(program, maps(dtype))
    compared = compare(step, maps(dtype), gradients=False)
    assert compared.complaints == []
    assert [site.direction for site in compared.report.sites if site.op == "attention"] == ["forward+backward"]


def layer(x, weights, pairs):
    """A layer of differential attention, whose maps are heads in pairs, or halves of heads."""
    q, k, v, c = weights
    c = jnp.exp(jnp.sum(c[0] * c[1])) - jnp.exp(jnp.sum(c[2] * c[3])) + 0.8
    if pairs:
        q, k = ((x @ w).reshape(*x.shape[:2], 2 * H, D).transpose(0, 2, 1, 3) for w in (q, k))
        v = (x @ v).reshape(*x.shape[:2], H, 2 * D).transpose(0, 2, 1, 3)
        p = softmax(q @ k.mT + jnp.triu(jnp.full((T, T), -jnp.inf), 1)).reshape(-1, H, 2, T, T)
        y = (p[:, :, 0] - c * p[:, :, 1]) @ v
        return x + y.transpose(0, 2, 1, 3).reshape(x.shape)
    q, k = (jnp.split((x @ w).reshape(*x.shape[:2], H, 2 * D), 2, -1) for w in (q, k))
    v = (x @ v).reshape(*x.shape[:2], H, 2 * D)
    first, second = (
        softmax(jnp.where(CAUSAL, jnp.einsum("bthd,bshd->bhts", q, k), -1e30)) for q, k in zip(q, k, strict=True)
    )
    return x + jnp.einsum("bhts,bshd->bthd", first - c * second, v).reshape(x.shape)


def layers(x, weights, pairs, form):
    step = lambda x, w: (layer(x, w, pairs), None)  # noqa: E731
    if form == "mapped":
        return jax.vmap(lambda x: layer(x[None], jax.tree.map(lambda w: w[0], weights), pairs)[0])(x)
    return lax.scan(jax.checkpoint(step) if form == "checkpoint" else step, x, weights)[0]


@pytest.mark.parametrize("pairs", [True, False], ids=["pairs of heads", "halves of heads"])
@pytest.mark.parametrize("form", ["scan", "checkpoint", "mapped"])
def test_layers_of_differential_attention(form, pairs):
    width = 2 * H * D
    weights = [array(3, width, width, seed=i) * 0.3 for i in range(3)] + [array(3, 4, D, seed=3) * 0.3]
    args = array(B, T, width), weights

    def step(x, weights):
        loss = lambda x, weights: jnp.mean(jnp.sin(layers(x, weights, pairs, form)))  # noqa: E731
        return jax.value_and_grad(loss, (0, 1))(x, weights)

    compared = compare(step, args, gradients=False)
    assert compared.complaints == []
    assert compared.counts() == 1, compared.reasons()
    assert compared.reasons() == []


def test_transforms_around_a_sum_of_maps():
    compared = compare(lambda *a: jax.vmap(difference, (0, None, 0, 0, 0, None))(*a), maps())
    assert compared.complaints == []
    assert compared.counts() == 1
    optimized = optimized_like_a_user(difference)
    axes = (0, None, 0, 0, 0, None)
    given = compiled(jax.vmap(jax.grad(lambda *a: optimized(*a).sum(), (0, 1, 4, 5)), axes))(*maps())
    expected = compiled(jax.vmap(jax.grad(lambda *a: difference(*a).sum(), (0, 1, 4, 5)), axes))(*maps())
    for a, b in zip(given, expected, strict=True):
        assert jnp.allclose(a, b, atol=1e-5)


def test_a_sum_of_maps_is_saved_as_data_and_needs_evidence_of_its_own():
    report = autopallas.explain(autopallas.optimize(difference, objective="time"), *maps())
    (site,) = report.sites
    assert site.verdict == "kept"
    assert "sum of 2 maps" in site.spec_line
    assert site.encoded is not None
    saved = saved_site("attention", "forward", site.encoded)
    assert encoded(saved) == site.encoded
    assert saved.spec.maps == 2


def map_and_identity(q1, k1, q2, k2, v, c):
    return (probabilities(q1, k1) + c * jnp.eye(T)) @ v


def divided_by_its_sum(q1, k1, q2, k2, v, c):
    p = probabilities(q1, k1) - c * probabilities(q2, k2)
    return p / (p.sum(-1, keepdims=True) + 2) @ v


def rectified(q1, k1, q2, k2, v, c):
    return jax.nn.relu(probabilities(q1, k1) - c * probabilities(q2, k2)) @ v


def number_of_the_other_scores(q1, k1, q2, k2, v, c):
    p = probabilities(q2, k2)
    return (probabilities(q1, k1) - jnp.max(p, -1, keepdims=True) * p) @ v


def weights_of_the_other_map(q1, k1, q2, k2, v, c):
    p = probabilities(q2, k2)
    return (probabilities(q1, k1) * p - c * p) @ v


def other_scores(q1, k1, q2, k2, v, c):
    return (probabilities(q1, k1) - c * softmax(jnp.tanh(q2 @ k2.mT))) @ v


def sum_of_exponentials(q1, k1, q2, k2, v, c):
    return (probabilities(q1, k1) - c * jnp.exp(q2 @ k2.mT)) @ v


def along_the_queries(q1, k1, q2, k2, v, c):
    return (probabilities(q1, k1) - c * probabilities(q2, k2).mT) @ v


@pytest.mark.parametrize(
    "program",
    [
        map_and_identity,
        divided_by_its_sum,
        rectified,
        number_of_the_other_scores,
        weights_of_the_other_map,
        other_scores,
        sum_of_exponentials,
        along_the_queries,
    ],
)
def test_what_only_looks_like_a_sum_of_maps_is_left_alone_and_named(program):
    optimized = optimized_like_a_user(program)
    given = compiled(with_gradients(optimized, maps()))(*maps())
    report = optimized.report()
    assert report.counts()["attention"] == 0
    assert any(miss.op == "attention" for miss in report.near_misses)
    for a, b in zip(
        jax.tree.leaves(given), jax.tree.leaves(compiled(with_gradients(program, maps()))(*maps())), strict=True
    ):
        assert jnp.array_equal(a, b)


def test_maps_that_something_else_reads_are_kept():
    def program(q1, k1, q2, k2, v, c):
        p = probabilities(q1, k1) - c * probabilities(q2, k2)
        return p @ v, p.max()

    optimized = optimized_like_a_user(program)
    optimized(*maps())
    assert optimized.report().counts()["attention"] == 0
    assert "also used by reduce_max" in optimized.report().near_misses[0].reason


@pytest.mark.parametrize("masked", ["where", "not"])
@pytest.mark.parametrize("backward", [False, True])
def test_pairs_of_heads_without_a_bias_stay_the_heads_of_one_product(masked, backward):
    def program(q, k, v):
        scores = jnp.einsum("bthd,bshd->bhts", q, k) * D**-0.5
        p = softmax(jnp.where(CAUSAL, scores, -jnp.inf) if masked == "where" else scores).reshape(B, H, 2, T, T)
        return jnp.einsum("bhts,bshd->bthd", p[:, :, 0] - 0.3 * p[:, :, 1], v)

    def step(*args):
        return jax.grad(lambda *args: jnp.sum(jnp.sin(program(*args))), (0, 1, 2))(*args)

    args = array(B, T, 2 * H, D, seed=1), array(B, T, 2 * H, D, seed=2), array(B, T, H, 2 * D, seed=3)
    compared = compare(step if backward else program, args, gradients=False)
    assert compared.complaints == []
    assert compared.counts() == 1, compared.reasons()
