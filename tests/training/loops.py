"""Derivatives of models: loops over layers, checkpoints, microbatches; the gradient asked for outside of them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from support.catalogue import array

from training.catalogue import T, W, attend, deep, layer, loss_of, qkv, step

POLICIES = jax.checkpoint_policies


def gradients(model):
    return jax.value_and_grad(loss_of(model), argnums=(0, 1))


def over_layers(body, **options):
    """A model: a scan of ``body`` over the layers."""
    return lambda w, x: lax.scan(lambda x, w: (body(x, w), None), x, w, **options)[0]


def batches():
    weights, _ = deep()
    return [weights, array(3, 2, T, W, seed=9)]


# --- Scan over layers ------------------------------------------------------------------------------------------------


@step(deep)
def scan(w, x):
    return gradients(over_layers(layer))(w, x)


@step(deep)
def scan_in_reverse(w, x):
    return gradients(over_layers(layer, reverse=True))(w, x)


@step(deep)
def scan_unrolled_completely(w, x):
    return gradients(over_layers(layer, unroll=True))(w, x)


@step(deep)
def scan_unrolled_in_part(w, x):
    return gradients(over_layers(layer, unroll=2))(w, x)


@step(deep)
def scan_of_a_jit(w, x):
    return gradients(over_layers(jax.jit(layer)))(w, x)


@step(deep)
def scan_that_stacks_its_results(w, x):
    def model(w, x):
        last, norms = lax.scan(lambda x, w: (layer(x, w), jnp.sum(x**2)), x, w)
        return last * jnp.sum(jnp.sin(norms))

    return gradients(model)(w, x)


@step(deep, sites=2)
def scan_of_two_attentions(w, x):
    return gradients(over_layers(lambda x, w: layer(layer(x, w), w)))(w, x)


@step(deep, sites=2)
def two_scans(w, x):
    return gradients(lambda w, x: over_layers(layer)(w, over_layers(layer)(w, x)))(w, x)


@step(deep)
def scan_with_keys_and_values_from_outside(w, x):
    """Cross attention: keys and values are constants of the loop."""

    def model(w, x):
        k, v = x @ w[0, 0], x @ w[0, 1]
        return lax.scan(lambda x, w: (x + attend(x @ w[2], k, v), None), x, w)[0]

    return gradients(model)(w, x)


@step(deep, sizes=None)
def scan_with_an_additive_mask(w, x):
    mask = jnp.where(jnp.tri(T, dtype=bool), 0.0, -1e9)

    def body(x, w):
        return x + jax.nn.softmax((x @ w[0]) @ (x @ w[1]).mT * 0.3 + mask) @ (x @ w[2])

    return gradients(over_layers(body))(w, x)


@step(deep)
def scan_with_distances_as_a_bias(w, x):
    def body(x, w):
        distance = jnp.abs(jnp.arange(T)[:, None] - jnp.arange(T)).astype(x.dtype)
        return x + jax.nn.softmax((x @ w[0]) @ (x @ w[1]).mT * 0.3 - 0.1 * distance) @ (x @ w[2])

    return gradients(over_layers(body))(w, x)


@step(deep)
def scan_with_a_mask_of_a_carried_number(w, x):
    """The backward loop reads the mask; a kernel the number, which is another one in each step."""

    def body(carry, w):
        x, window = carry
        near = jnp.arange(T) + window >= jnp.arange(T)[:, None]
        scores = jnp.where(near, (x @ w[0]) @ (x @ w[1]).mT * 0.3, -1e9)
        return (x + jax.nn.softmax(scores) @ (x @ w[2]), window + 1), None

    return gradients(lambda w, x: lax.scan(body, (x, 1), w)[0][0])(w, x)


@step()
def fori_loop(q, k, v):
    model = lambda q, k, v: lax.fori_loop(0, 3, lambda _, q: q + attend(q, k, v), q)  # noqa: E731
    return jax.value_and_grad(loss_of(model), argnums=(0, 1, 2))(q, k, v)


@step()
def one_example_after_the_other(q, k, v):
    model = lambda q, k, v: lax.map(lambda x: attend(*x), (q, k, v))  # noqa: E731
    return jax.value_and_grad(loss_of(model), argnums=(0, 1, 2))(q, k, v)


# --- Checkpoints -----------------------------------------------------------------------------------------------------


def named(x, w):
    def attention(q, k, v):
        return checkpoint_name(attend(q, k, v), "out")

    return checkpoint_name(layer(x, w, attention), "layer")


def named_probabilities(x, w):
    def attention(q, k, v):
        return checkpoint_name(jax.nn.softmax(checkpoint_name(q @ k.mT, "scores")), "probabilities") @ v

    return layer(x, w, attention)


def unrolled(body):
    return lambda w, x: functools.reduce(body, w[:2], x)


def checkpointed(**options):
    return jax.checkpoint(layer, **options)


@step(deep, sites=2)
def checkpoint(w, x):
    return gradients(unrolled(checkpointed()))(w, x)


@step(deep, sites=2)
def checkpoint_without_cse_prevention(w, x):
    return gradients(unrolled(checkpointed(prevent_cse=False)))(w, x)


@step(deep, sites=2)
def checkpoint_of_the_whole_model(w, x):
    return gradients(jax.checkpoint(unrolled(layer)))(w, x)


@step(deep, sites=2)
def checkpoint_within_a_checkpoint(w, x):
    return gradients(jax.checkpoint(unrolled(checkpointed())))(w, x)


@step()
def checkpoint_of_the_attention_alone(q, k, v):
    return jax.value_and_grad(loss_of(jax.checkpoint(attend)), argnums=(0, 1, 2))(q, k, v)


@step(deep, sites=2)
def checkpoint_that_saves_dots(w, x):
    return gradients(unrolled(checkpointed(policy=POLICIES.dots_saveable)))(w, x)


@step(deep, sites=2)
def checkpoint_that_saves_dots_without_batch_axes(w, x):
    return gradients(unrolled(checkpointed(policy=POLICIES.dots_with_no_batch_dims_saveable)))(w, x)


@step(deep, sites=2)
def checkpoint_that_saves_everything(w, x):
    return gradients(unrolled(checkpointed(policy=POLICIES.everything_saveable)))(w, x)


@step(deep, sites=2)
def checkpoint_that_saves_nothing(w, x):
    return gradients(unrolled(checkpointed(policy=POLICIES.nothing_saveable)))(w, x)


@step(deep, sites=2)
def checkpoint_that_saves_the_result_by_name(w, x):
    return gradients(unrolled(jax.checkpoint(named, policy=POLICIES.save_only_these_names("out"))))(w, x)


@step(deep, sites=2)
def checkpoint_that_saves_the_layer_by_name(w, x):
    return gradients(unrolled(jax.checkpoint(named, policy=POLICIES.save_only_these_names("layer"))))(w, x)


@step(deep, sites=2)
def checkpoint_that_saves_the_probabilities_by_name(w, x):
    policy = POLICIES.save_only_these_names("probabilities", "scores")
    return gradients(unrolled(jax.checkpoint(named_probabilities, policy=policy)))(w, x)


@step(deep, sites=2)
def checkpoint_that_saves_anything_but_the_probabilities(w, x):
    policy = POLICIES.save_anything_except_these_names("probabilities", "scores")
    return gradients(unrolled(jax.checkpoint(named_probabilities, policy=policy)))(w, x)


@step(deep)
def scan_of_checkpoints(w, x):
    return gradients(over_layers(checkpointed()))(w, x)


@step(deep)
def scan_of_checkpoints_without_cse_prevention(w, x):
    return gradients(over_layers(checkpointed(prevent_cse=False)))(w, x)


@step(deep)
def scan_of_checkpoints_that_save_dots(w, x):
    return gradients(over_layers(checkpointed(policy=POLICIES.dots_saveable, prevent_cse=False)))(w, x)


@step(deep)
def scan_of_checkpoints_that_save_dots_without_batch_axes(w, x):
    return gradients(over_layers(checkpointed(policy=POLICIES.dots_with_no_batch_dims_saveable)))(w, x)


@step(deep)
def scan_of_checkpoints_that_save_everything(w, x):
    return gradients(over_layers(checkpointed(policy=POLICIES.everything_saveable)))(w, x)


@step(deep)
def scan_of_checkpoints_that_save_the_result_by_name(w, x):
    return gradients(over_layers(jax.checkpoint(named, policy=POLICIES.save_only_these_names("out"))))(w, x)


@step(deep)
def checkpoint_of_a_scan(w, x):
    return gradients(jax.checkpoint(over_layers(layer)))(w, x)


@step(deep)
def checkpoint_of_a_scan_with_a_mask_of_a_carried_number(w, x):
    def body(carry, w):
        x, window = carry
        near = jnp.arange(T) + window >= jnp.arange(T)[:, None]
        scores = jnp.where(near, (x @ w[0]) @ (x @ w[1]).mT * 0.3, -1e9)
        return (x + jax.nn.softmax(scores) @ (x @ w[2]), window + 1), None

    return gradients(jax.checkpoint(lambda w, x: lax.scan(body, (x, 1), w)[0][0]))(w, x)


@step(batches, sizes=(T, T))
def checkpoint_of_loops_of_loops(w, xs):
    def model(w, xs):
        one = lambda total, x: (total + jnp.sum(jnp.sin(over_layers(layer)(w, x))), None)  # noqa: E731
        return lax.scan(one, 0.0, xs)[0]

    return jax.value_and_grad(jax.checkpoint(model), argnums=(0, 1))(w, xs)


@step(batches, sizes=None)
def loops_of_loops_with_branches_that_do_the_same_with_other_weights(w, xs):
    """The weights of the branch are chosen outside of the loops: then both branches are one site."""

    def model(w, xs):
        body = lambda x, w: lax.cond(jnp.sum(w) > 0, layer, lambda x, w: layer(x, -w), x, w)  # noqa: E731
        one = lambda total, x: (total + jnp.sum(jnp.sin(over_layers(body)(w, x))), None)  # noqa: E731
        return lax.scan(one, 0.0, xs)[0]

    return jax.value_and_grad(model, argnums=(0, 1))(w, xs)


@step(deep, sites=2)
def two_loops_that_start_alike_and_differ(w, x):
    """The second goes on in another way: what it carries is something else, though both start with the same."""

    def model(w, x):
        one = over_layers(layer)(w, x)
        return one + over_layers(lambda x, w: layer(x * 0.5, w))(w, x)

    return gradients(model)(w, x)


@step(deep)
def scan_of_checkpoints_unrolled_in_part(w, x):
    return gradients(over_layers(checkpointed(), unroll=2))(w, x)


# --- Loops around loops ----------------------------------------------------------------------------------------------


def accumulated(model):
    """The mean gradient over microbatches: the derivative is asked for inside the outer loop."""

    def run(w, xs):
        def body(carry, x):
            return jax.tree.map(jnp.add, carry, jax.value_and_grad(loss_of(model))(w, x)), None

        return lax.scan(body, (jnp.zeros(()), jnp.zeros_like(w)), xs)[0]

    return run


@step(batches, sizes=(T, T), sites=2)
def microbatches_of_unrolled_layers(w, xs):
    return accumulated(unrolled(layer))(w, xs)


@step(batches, sizes=(T, T))
def microbatches_around_a_scan(w, xs):
    return accumulated(over_layers(layer))(w, xs)


@step(batches, sizes=(T, T))
def microbatches_around_a_scan_of_checkpoints(w, xs):
    return accumulated(over_layers(checkpointed()))(w, xs)


@step(batches, sizes=(T, T))
def grad_outside_two_loops(w, xs):
    def model(w, xs):
        def total(carry, x):
            return carry + jnp.sum(jnp.sin(over_layers(layer)(w, x))), None

        return lax.scan(total, 0.0, xs)[0]

    return jax.value_and_grad(model, argnums=(0, 1))(w, xs)


@step(batches, sizes=(T, T))
def grad_outside_a_loop_of_checkpointed_loops(w, xs):
    def model(w, xs):
        one = jax.checkpoint(lambda w, x: jnp.sum(jnp.sin(over_layers(checkpointed())(w, x))))
        return lax.scan(lambda carry, x: (carry + one(w, x), None), 0.0, xs)[0]

    return jax.value_and_grad(model, argnums=(0, 1))(w, xs)


@step(lambda: [array(2, 2, 4, W, W, seed=7, scale=0.4), array(2, T, W, seed=8)], sizes=(T, T))
def scan_of_groups_of_layers(w, x):
    """Sixteen layers in four groups of four, and only the groups' inputs are kept: the square root of the memory."""
    group = jax.checkpoint(lambda x, w: lax.scan(lambda x, w: (layer(x, w), None), x, w)[0])
    return gradients(over_layers(group))(w, x)


@step(batches, sizes=(T, T))
def per_example_gradients_of_a_scan(w, xs):
    return jax.vmap(jax.value_and_grad(loss_of(over_layers(layer))), in_axes=(None, 0))(w, xs)


@step(batches, sizes=(T, T), sites=2)
def per_example_gradients_of_layers(w, xs):
    return jax.vmap(jax.value_and_grad(loss_of(unrolled(layer))), in_axes=(None, 0))(w, xs)


@step(lambda: qkv(), sizes=(T, 11))
def grad_of_a_map_over_heads(q, k, v):
    q, k, v = (jnp.swapaxes(x, 0, 1) for x in (q, k, v))
    return jax.grad(lambda *a: jnp.sum(jnp.sin(lax.map(lambda x: attend(*x), a))), argnums=(0, 1, 2))(q, k, v)
