"""Losses that read the same element of each row of logits: a slice of one column, which is a label like any other."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.nn import log_softmax, logsumexp, softmax
from support.catalogue import array, registry
from support.compare import compare

B, T, D, V, K = 2, 6, 5, 9, 4


def arguments(dtype=jnp.float32):
    return [array(B, T, D, dtype=dtype, seed=1), array(D, V, dtype=dtype, seed=2)]


FOUND, found = registry()


@found
def first(x, w):
    return -log_softmax(x @ w)[..., 0].mean()


@found
def last(x, w):
    z = x @ w
    return (logsumexp(z, -1) - z[..., -1]).mean()


@found
def of_two_words(x, w):
    z = x @ w * 0.5
    return (logsumexp(z, -1) - jnp.logaddexp(z[..., 2], z[..., 3])).mean()


@found
def kept_as_an_axis(x, w):
    z = x @ w
    return ((logsumexp(z, -1, keepdims=True) - z[..., 4:5]) ** 2).mean()


@found
def beside_labels(x, w):
    logs = log_softmax(x @ w)
    labels = jnp.arange(B * T).reshape(B, T, 1) % V
    return -(jnp.take_along_axis(logs, labels, -1)[..., 0] + 0.5 * logs[..., 1]).mean()


@found
def of_the_last_rows(x, w):
    return -log_softmax((x @ w)[:, -2:])[..., 3].mean()


@found
def along_the_first_axis(x, w):
    z = jnp.einsum("dv,btd->vbt", w, x)
    return (logsumexp(z, 0) - z[2]).mean()


@found
def checkpointed(x, w):
    return jax.checkpoint(first)(x, w)


@found
def each_example(x, w):
    def example(x):
        z = x @ w
        return (logsumexp(z, -1) - z[:, 1]).sum()

    return jax.vmap(example)(x).mean()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", FOUND)
def test_is_found_and_right(name, dtype):
    for function in (FOUND[name], jax.value_and_grad(FOUND[name], (0, 1))):
        compared = compare(function, arguments(dtype), gradients=False)
        assert compared.complaints == []
        assert compared.counts("cross_entropy") == 1, compared.reasons()


def test_candidates_of_each_row_the_first_of_which_is_right():
    def loss(x, candidates):
        z = jnp.einsum("btd,btkd->btk", x, candidates) / 0.1
        return -log_softmax(z)[..., 0].mean()

    args = [array(B, T, D, seed=1), array(B, T, K, D, seed=2)]
    compared = compare(loss, args)
    assert compared.complaints == []
    assert compared.counts("cross_entropy") == 1


@pytest.mark.parametrize("infinity", [jnp.inf, -jnp.inf, jnp.nan])
def test_other_elements_may_be_infinite(infinity):
    def loss(x, w):
        z = (x @ w).at[..., 5].set(infinity)
        return logsumexp(z, -1), z[..., 0]

    assert compare(loss, arguments(), gradients=False).complaints == []


# --- What looks alike ------------------------------------------------------------------------------------------------


def rows(x, w):
    """The first rows, which are rows of activations."""
    return logsumexp((x @ w)[:, 0], -1).mean()


def gates(x, w):
    return (jnp.exp(x @ w)[..., 0] * x[..., 0]).sum()


def probabilities(x, w):
    p = softmax(x @ w)
    return p[..., 0], p


def steps(x, w):
    def step(total, x):
        p = softmax(x @ w)
        return total + p[..., 0], p[..., 1:]

    return lax.scan(step, jnp.zeros(B), x.swapaxes(0, 1))


@pytest.mark.parametrize("function", [rows, gates, probabilities, steps])
def test_what_looks_alike_is_right(function):
    assert compare(function, arguments()).complaints == []
    assert compare(gates, arguments(), gradients=False).counts("cross_entropy") == 0


def addressed(key, memory, strength):
    """One query for each example reads a memory, whose weights are needed later too."""
    z = jnp.einsum("bd,bkd->bk", key, memory)
    z /= jnp.linalg.norm(key, axis=-1, keepdims=True) * jnp.linalg.norm(memory, axis=-1) + 1e-6
    weights = softmax(jax.nn.softplus(strength) * z)
    return jnp.einsum("bk,bkd->bd", weights, memory), weights


def test_a_memory_that_one_query_reads_is_no_loss():
    args = [array(B, D, seed=1), array(B, K, D, seed=2), array(B, 1, seed=3)]
    compared = compare(addressed, args)
    assert compared.complaints == []
    assert compared.counts("cross_entropy") == 0
