"""Derivatives of conditionals: the gradient is asked for outside, and residuals pass from branch to branch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from support.catalogue import array

from training.catalogue import S, T, attend, deep, layer, loss_of, qkv, step
from training.loops import gradients, over_layers

ARGNUMS = (0, 1, 2)


def positive(x):
    return jnp.sum(x) > -1e6


def branched(q, k, v):
    return lax.cond(positive(q), attend, lambda q, k, v: q * jnp.sum(v), q, k, v)


@step()
def grad_of_a_branch(q, k, v):
    return jax.grad(loss_of(branched), ARGNUMS)(q, k, v)


@step()
def grad_of_a_branch_that_is_not_taken(q, k, v):
    model = lambda *a: lax.cond(positive(q), lambda q, k, v: q * jnp.sum(v), attend, *a)  # noqa: E731
    return jax.value_and_grad(loss_of(model), ARGNUMS)(q, k, v)


@step(sites=2)
def grad_of_two_branches_of_three(q, k, v):
    """Each branch takes what the others take and gives something for what they give."""

    def model(which, q, k, v):
        branches = [attend, lambda q, k, v: attend(q, k * 2, v - 1), lambda q, k, v: jnp.cos(q)]
        return lax.switch(which, branches, q, k, v)

    def twice(q, k, v):
        return model(1, q, k, v) + 2 * model(jnp.where(positive(q), 2, 0), q, k, v)

    return jax.value_and_grad(loss_of(twice), ARGNUMS)(q, k, v)


@step(deep)
def grad_of_branches_in_a_scan(w, x):
    def body(x, w):
        return lax.cond(jnp.sum(w) > 0, layer, lambda x, w: x + jnp.tanh(x @ w[0]), x, w)

    return gradients(over_layers(body))(w, x)


@step(deep)
def grad_of_a_scan_in_a_branch(w, x):
    def model(w, x):
        return lax.cond(positive(x), over_layers(layer), lambda w, x: x + jnp.sum(w), w, x)

    return gradients(model)(w, x)


@step(deep)
def grad_of_a_checkpoint_in_a_branch(w, x):
    def model(w, x):
        return lax.cond(positive(x), over_layers(jax.checkpoint(layer)), lambda w, x: x + jnp.sum(w), w, x)

    return gradients(model)(w, x)


@step()
def grad_of_a_branch_in_a_branch(q, k, v):
    def model(q, k, v):
        return lax.cond(positive(v), lambda *a: branched(*a) + 1, lambda q, k, v: q, q, k, v)

    return jax.value_and_grad(loss_of(model), ARGNUMS)(q, k, v)


@step(lambda: [*qkv(), array(T, S)], sizes=None)
def grad_of_a_learned_bias_in_a_branch(q, k, v, bias):
    def model(q, k, v, bias):
        attention = lambda q, k, v: jax.nn.softmax(q @ k.mT * 0.5 + bias) @ v  # noqa: E731
        return lax.cond(positive(q), attention, lambda q, k, v: jnp.sin(q), q, k, v)

    return jax.value_and_grad(loss_of(model), (0, 1, 2, 3))(q, k, v, bias)


@step(lambda: [array(4), array(S, 4, seed=1), array(S, 4, seed=2)], sizes=None)
def grad_of_a_single_query_in_a_branch(q, k, v):
    attention = lambda q, k, v: jax.nn.softmax(q @ k.T) @ v  # noqa: E731
    model = lambda *a: lax.cond(positive(q), attention, lambda q, k, v: q, *a)  # noqa: E731
    return jax.value_and_grad(loss_of(model), ARGNUMS)(q, k, v)


@step(deep, sites=2)
def grad_of_two_branches_that_decide_differently(w, x):
    """What one gives the other may not take: it may be of another branch."""

    def model(w, x):
        one = lax.cond(jnp.sum(x) > 0, layer, lambda x, w: x, x, w[0])
        return lax.cond(jnp.sum(x) < 0, layer, lambda x, w: x, one, w[0])

    return gradients(model)(w, x)
