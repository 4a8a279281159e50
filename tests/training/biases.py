"""Derivatives of loops over layers with a learned bias, which the forward loop reads and the backward loop does not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from support.catalogue import array

from training.catalogue import L, T, deep, layer, loss_of, step
from training.loops import over_layers


@step(lambda: [*deep(), array(L, T, T)], sizes=None)
def scan_with_a_learned_bias_per_layer(w, x, biases):
    def model(w, x, biases):
        def body(x, inputs):
            w, bias = inputs
            scores = (x @ w[0]) @ (x @ w[1]).mT * 0.3 + bias
            return x + jax.nn.softmax(scores) @ (x @ w[2]), None

        return lax.scan(body, x, (w, biases))[0]

    return jax.value_and_grad(loss_of(model), argnums=(0, 1, 2))(w, x, biases)


@step(lambda: [*deep(), array(T, T)], sizes=None)
def scan_with_a_learned_bias_for_all_layers(w, x, bias):
    def model(w, x, bias):
        def body(x, w):
            return x + jax.nn.softmax((x @ w[0]) @ (x @ w[1]).mT * 0.3 + bias) @ (x @ w[2])

        return over_layers(body)(w, x)

    return jax.value_and_grad(loss_of(model), argnums=(0, 1, 2))(w, x, bias)


def relative(table):
    """A bias [T, T] from a table [2 T - 1] of distances."""
    return table[jnp.arange(T) - jnp.arange(T)[:, None] + T - 1]


def biased(x, w, bias):
    return x + jnp.tanh(jax.nn.softmax((x @ w[0]) @ (x @ w[1]).mT * 0.3 + bias) @ (x @ w[2]))


def with_table(*shape):
    return lambda: [*deep(), array(*shape, 2 * T - 1, seed=9)]


def all_gradients(model):
    return jax.value_and_grad(loss_of(model), argnums=(0, 1, 2))


@step(with_table(), sizes=None)
def scan_with_one_table_of_distances_for_all_layers(w, x, table):
    def model(w, x, table):
        bias = relative(table)
        return over_layers(lambda x, w: biased(x, w, bias))(w, x)

    return all_gradients(model)(w, x, table)


@step(with_table(2), sizes=None)
def scan_with_a_bias_for_each_head(w, x, table):
    def model(w, x, table):
        bias = jax.vmap(relative)(table)

        def attention(q, k, v):
            return jax.nn.softmax((q @ k.mT) * 0.5 + bias) @ v

        return over_layers(lambda x, w: layer(x, w, attention))(w, x)

    return all_gradients(model)(w, x, table)


@step(with_table(L), sizes=None)
def scan_with_a_table_of_distances_in_each_layer(w, x, tables):
    def model(w, x, tables):
        return lax.scan(lambda x, given: (biased(x, given[0], relative(given[1])), None), x, (w, tables))[0]

    return all_gradients(model)(w, x, tables)


@step(with_table(), sizes=None)
def checkpointed_scan_with_a_table_of_distances(w, x, table):
    def model(w, x, table):
        bias = relative(table)
        return over_layers(jax.checkpoint(lambda x, w: biased(x, w, bias)))(w, x)

    return all_gradients(model)(w, x, table)


@step(with_table(), sizes=None)
def loop_of_loops_with_a_table_of_distances(w, x, table):
    def model(w, x, table):
        bias = relative(table)
        inner = over_layers(lambda x, w: biased(x, w, bias))
        return lax.scan(lambda x, scale: (inner(w * scale, x), None), x, jnp.array([0.9, 1.1]))[0]

    return all_gradients(model)(w, x, table)


@step(with_table(), sizes=None)
def microbatches_with_a_table_of_distances(w, x, table):
    def model(w, x, table):
        return over_layers(lambda x, w: biased(x, w, relative(table)))(w, x)

    def accumulate(total, batch):
        return jax.tree.map(jnp.add, total, all_gradients(model)(w, batch, table)[1][::2]), None

    return lax.scan(accumulate, (jnp.zeros_like(w), jnp.zeros_like(table)), x[:, None])[0]


@step(with_table(), sites=2, sizes=None)
def two_scans_with_one_table_of_distances(w, x, table):
    def model(w, x, table):
        run = over_layers(lambda x, w: biased(x, w, relative(table)))
        return run(w, run(w, x))

    return all_gradients(model)(w, x, table)


@step(deep, sizes=None)
def scan_with_a_bias_computed_in_the_body(w, x):
    def body(x, w):
        return biased(x, w, jnp.sin(x @ w[3]) @ jnp.sin(x).mT)

    return jax.value_and_grad(loss_of(over_layers(body)), argnums=(0, 1))(w, x)


@step(lambda: [*deep(), jnp.asarray([0.5, 0.2])], sizes=None)
def scan_with_learned_slopes_per_step(w, x, slopes):
    """Distances come from outside the loop: the bias is taken as it is, and so is its gradient."""

    def model(w, x, slopes):
        def attention(scale):
            distance = jnp.abs(jnp.arange(T)[None, :] - jnp.arange(T)[:, None])
            bias = (slopes * scale)[:, None, None] * -distance
            return lambda q, k, v: jax.nn.softmax((q @ k.mT) * 0.5 + bias) @ v

        return over_layers(lambda x, w: layer(x, w, attention(jnp.mean(w) + 1)))(w, x)

    return all_gradients(model)(w, x, slopes)
