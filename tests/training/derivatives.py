"""Derivatives of one attention, or of a few, without loops: every way to ask for them, and what is differentiated."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.nn import softmax
from support.catalogue import array

from training.catalogue import B, D, H, S, T, attend, deep, layer, loss_of, qkv, step, wave

loss = loss_of(attend)

# --- Every way to ask for a derivative -------------------------------------------------------------------------------


@step()
def grad(q, k, v):
    return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)


@step()
def value_and_grad(q, k, v):
    return jax.value_and_grad(loss, argnums=(0, 1, 2))(q, k, v)


@step()
def value_and_grad_with_the_result_as_aux(q, k, v):
    def with_aux(q, k, v):
        out = attend(q, k, v)
        return jnp.sum(jnp.sin(out)), {"out": out, "norm": jnp.sum(out**2)}

    return jax.value_and_grad(with_aux, argnums=(0, 1, 2), has_aux=True)(q, k, v)


@step()
def vjp(q, k, v):
    out, pull = jax.vjp(attend, q, k, v)
    return out, pull(wave(out))


@step()
def vjp_pulled_twice(q, k, v):
    out, pull = jax.vjp(attend, q, k, v)
    return out, pull(wave(out)), pull(jnp.sin(out))


@step()
def vjp_pulled_for_many_cotangents(q, k, v):
    out, pull = jax.vjp(attend, q, k, v)
    return jax.vmap(pull)(jnp.stack([wave(out), jnp.sin(out)]))


@step()
def linearize_and_transpose(q, k, v):
    out, push = jax.linearize(attend, q, k, v)
    return jax.linear_transpose(push, q, k, v)(wave(out))


@step()
def linearize(q, k, v):
    out, push = jax.linearize(attend, q, k, v)
    return out, push(wave(q), wave(k), wave(v))


@step()
def jvp(q, k, v):
    return jax.jvp(attend, (q, k, v), (wave(q), wave(k), wave(v)))


@step()
def grad_through_jit(q, k, v):
    return jax.grad(loss_of(jax.jit(attend)), argnums=(0, 1, 2))(q, k, v)


@step()
def jit_of_value_and_grad(q, k, v):
    return jax.jit(jax.value_and_grad(jax.jit(loss), argnums=(0, 1, 2)))(q, k, v)


@step()
def grad_of_vmap(q, k, v):
    return jax.grad(loss_of(jax.vmap(jax.vmap(attend))), argnums=(0, 1, 2))(q, k, v)


@step()
def per_example_gradients(q, k, v):
    return jax.vmap(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)


@step()
def per_example_gradients_of_shared_keys(q, k, v):
    return jax.vmap(jax.grad(loss, argnums=(0, 1, 2)), in_axes=(0, None, None))(q, k[0], v[0])


@step()
def per_head_and_example_value_and_gradients(q, k, v):
    return jax.vmap(jax.vmap(jax.value_and_grad(loss, argnums=(0, 1, 2))))(q, k, v)


@step()
def grad_in_a_branch(q, k, v):
    return lax.cond(jnp.sum(q) < 1e6, jax.grad(loss, argnums=(0, 1, 2)), lambda q, k, v: (q, k, v), q, k, v)


@step()
def grad_in_a_loop(q, k, v):
    def update(_, qkv):
        return tuple(x - 0.1 * g for x, g in zip(qkv, jax.grad(loss, argnums=(0, 1, 2))(*qkv), strict=True))

    return lax.fori_loop(0, 3, update, (q, k, v))


# --- Which derivatives -----------------------------------------------------------------------------------------------


@step()
def of_the_queries_only(q, k, v):
    return jax.value_and_grad(loss)(q, k, v)


@step()
def of_the_keys_only(q, k, v):
    return jax.grad(loss, argnums=1)(q, k, v)


@step()
def of_the_values_only(q, k, v):
    return jax.value_and_grad(loss, argnums=2)(q, k, v)


@step()
def of_queries_and_values(q, k, v):
    return jax.grad(loss, argnums=(0, 2))(q, k, v)


@step(lambda: [array(B, H, T, D)], sizes=(T, T))
def queries_keys_and_values_are_one(x):
    return jax.value_and_grad(lambda x: loss(x, x, x))(x)


@step(lambda: [array(B, H, T, D)], sizes=(T, T))
def queries_keys_and_values_are_one_without_a_mask(x):
    return jax.grad(loss_of(lambda x: softmax(x @ x.mT) @ x))(x)


@step()
def keys_are_values(q, k, v):
    return jax.grad(loss_of(lambda q, k: attend(q, k, k)), argnums=(0, 1))(q, k)


@step()
def constant_cotangents(q, k, v):
    return jax.grad(lambda *a: jnp.sum(attend(*a)), argnums=(0, 1, 2))(q, k, v)


@step()
def cotangents_of_a_mean(q, k, v):
    return jax.value_and_grad(lambda *a: jnp.mean(attend(*a)) * 3, argnums=(0, 1, 2))(q, k, v)


@step()
def several_losses_of_one_result(q, k, v):
    def losses(q, k, v):
        out = attend(q, k, v)
        return jnp.sum(jnp.sin(out)) + jnp.mean(out**2) + jnp.sum(out[:, :, 0])

    return jax.value_and_grad(losses, argnums=(0, 1, 2))(q, k, v)


@step()
def two_gradients_of_one_result(q, k, v):
    first = jax.grad(loss, argnums=(0, 1, 2))(q, k, v)
    return first, jax.grad(lambda *a: jnp.sum(attend(*a) ** 2), argnums=(0, 1))(q, k, v)


@step()
def a_jacobian_of_two_losses(q, k, v):
    def losses(q, k, v):
        out = attend(q, k, v)
        return jnp.stack([jnp.sum(jnp.sin(out)), jnp.sum(out**2)])

    return jax.jacrev(losses, argnums=(0, 1, 2))(q, k, v)


@step(sites=2)
def two_attentions_and_a_loss_of_each(q, k, v):
    def losses(q, k, v):
        return loss(q, k, v) + jnp.sum(attend(q * 0.5, k, v) ** 2)

    return jax.value_and_grad(losses, argnums=(0, 1, 2))(q, k, v)


@step()
def keys_are_stopped(q, k, v):
    return jax.grad(lambda q, k, v: loss(q, lax.stop_gradient(k), v), argnums=(0, 1, 2))(q, k, v)


@step()
def one_branch_is_stopped(q, k, v):
    def both(q, k, v):
        out = attend(q, k, v)
        return jnp.sum(out * jnp.sin(lax.stop_gradient(out)))

    return jax.value_and_grad(both, argnums=(0, 1, 2))(q, k, v)


@step(deep, sites=2)
def unrolled_layers_with_tied_weights(w, x):
    return jax.value_and_grad(loss_of(lambda w, x: layer(layer(x, w[0]), w[0])))(w, x)


@step(deep, sites=5)
def unrolled_layers(w, x):
    def model(w, x):
        for one in w:
            x = layer(x, one)
        return x

    return jax.value_and_grad(loss_of(model), argnums=(0, 1))(w, x)


@step(deep, sites=3)
def unrolled_layers_each_in_a_jit(w, x):
    one = jax.jit(layer)
    return jax.value_and_grad(loss_of(lambda w, x: one(one(one(x, w[0]), w[1]), w[2])))(w, x)


@step(lambda: [array(4, 8, 8, scale=0.4), array(B, T, 8, seed=1), array(B, S, 8, seed=2)])
def cross_attention_with_its_projections(w, x, context):
    def model(w, x):
        split = lambda y: jnp.swapaxes(y.reshape(*y.shape[:2], 2, 4), 1, 2)  # noqa: E731
        out = attend(split(x @ w[0]), split(context @ w[1]), split(context @ w[2]))
        return jnp.swapaxes(out, 1, 2).reshape(x.shape) @ w[3]

    return jax.value_and_grad(loss_of(model), argnums=(0, 1))(w, x)


# --- Side inputs with gradients --------------------------------------------------------------------------------------


def biased(q, k, v, bias):
    return softmax(q @ k.mT * 0.5 + bias) @ v


biased_gradients = jax.value_and_grad(loss_of(biased), argnums=(0, 1, 2, 3))


@step(lambda: [*qkv(), array(T, S)], sizes=None)
def bias_of_queries_and_keys(q, k, v, bias):
    return biased_gradients(q, k, v, bias)


@step(lambda: [*qkv(), array(1, H, T, S)], sizes=None)
def bias_per_head(q, k, v, bias):
    return biased_gradients(q, k, v, bias)


@step(lambda: [*qkv(), array(B, H, T, S)], sizes=None)
def bias_per_example_and_head(q, k, v, bias):
    return biased_gradients(q, k, v, bias)


@step(lambda: [*qkv(), array(S)])
def bias_per_key(q, k, v, bias):
    return biased_gradients(q, k, v, bias)


@step(lambda: [*qkv(), array(T, S)], sizes=None)
def bias_without_a_gradient(q, k, v, bias):
    return jax.grad(loss_of(biased), argnums=(0, 1, 2))(q, k, v, bias)


@step(lambda: [*qkv(), array(T, S)], sizes=None)
def bias_and_nothing_else(q, k, v, bias):
    return jax.grad(loss_of(biased), argnums=3)(q, k, v, bias)


@step(lambda: [*qkv(), jnp.asarray([0.5, 0.2, 0.1])])
def learned_alibi_slopes(q, k, v, slopes):
    distance = jnp.arange(S)[None, :] - jnp.arange(T)[:, None]

    def model(q, k, v, slopes):
        return biased(q, k, v, slopes[:, None, None] * -jnp.abs(distance))

    return jax.value_and_grad(loss_of(model), argnums=(0, 1, 2, 3))(q, k, v, slopes)


@step(lambda: [*qkv(), array(6, H)], sizes=None)
def t5_table(q, k, v, table):
    bucket = jnp.clip(jnp.arange(S)[None, :] - jnp.arange(T)[:, None], -3, 2) + 3

    def model(q, k, v, table):
        return biased(q, k, v, jnp.transpose(table[bucket], (2, 0, 1)))

    return jax.value_and_grad(loss_of(model), argnums=(0, 1, 2, 3))(q, k, v, table)


@step(lambda: [*qkv(), jnp.float32(0.7)])
def learned_temperature(q, k, v, temperature):
    model = lambda q, k, v, t: softmax(q @ k.mT * t) @ v  # noqa: E731
    return jax.value_and_grad(loss_of(model), argnums=(0, 1, 2, 3))(q, k, v, temperature)


@step(lambda: [*qkv(), jnp.asarray([0.7, 0.4, 0.2])])
def learned_temperature_per_head(q, k, v, temperature):
    model = lambda q, k, v, t: softmax(q @ k.mT * t[:, None, None]) @ v  # noqa: E731
    return jax.value_and_grad(loss_of(model), argnums=(0, 1, 2, 3))(q, k, v, temperature)


@step(lambda: [*qkv(), array(H)])
def sinks(q, k, v, sink):
    def model(q, k, v, sink):
        s = q @ k.mT * 0.5
        column = jnp.broadcast_to(sink[:, None, None], (*s.shape[:-1], 1))
        return softmax(jnp.concatenate([s, column], -1))[..., :-1] @ v

    return jax.value_and_grad(loss_of(model), argnums=(0, 1, 2, 3))(q, k, v, sink)


@step(lambda: [*qkv(), array(H)])
def sinks_without_a_gradient(q, k, v, sink):
    def model(q, k, v, sink):
        s = q @ k.mT * 0.5
        column = jnp.broadcast_to(sink[:, None, None], (*s.shape[:-1], 1))
        return softmax(jnp.concatenate([s, column], -1))[..., :-1] @ v

    return jax.value_and_grad(loss_of(model), argnums=(0, 1, 2))(q, k, v, sink)


# --- What the attention computes -------------------------------------------------------------------------------------


@step()
def soft_cap(q, k, v):
    model = lambda q, k, v: softmax(2 * jnp.tanh(q @ k.mT * 0.25)) @ v  # noqa: E731
    return jax.value_and_grad(loss_of(model), argnums=(0, 1, 2))(q, k, v)


@step()
def scores_through_a_rectifier(q, k, v):
    model = lambda q, k, v: softmax(jax.nn.relu(q @ k.mT) ** 2 * 0.1) @ v  # noqa: E731
    return jax.value_and_grad(loss_of(model), argnums=(0, 1, 2))(q.at[:, :, 2].set(0), k, v)


@step()
def checkpoint_of_scores_through_a_rectifier(q, k, v):
    model = jax.checkpoint(lambda q, k, v: softmax(jax.nn.relu(q @ k.mT)) @ v)
    return jax.value_and_grad(loss_of(model), argnums=(0, 1, 2))(q.at[:, :, 2].set(0), k, v)


@step(lambda: [*qkv(), jnp.asarray([[0] * 4 + [1] * 3] * B), jnp.asarray([[0] * 6 + [1] * 5] * B)])
def segment_ids(q, k, v, own, other):
    def model(q, k, v):
        same = (own[:, :, None] == other[:, None, :])[:, None]
        return softmax(jnp.where(same, q @ k.mT * 0.5, -1e9)) @ v

    return jax.value_and_grad(loss_of(model), argnums=(0, 1, 2))(q, k, v)


@step()
def window(q, k, v):
    def model(q, k, v):
        near = jnp.abs(jnp.arange(S) - jnp.arange(T)[:, None]) < 3
        return softmax(jnp.where(near, q @ k.mT * 0.5, -jnp.inf)) @ v

    return jax.value_and_grad(loss_of(model), argnums=(0, 1, 2))(q, k, v)


@step()
def numpy_mask(q, k, v):
    mask = np.tri(T, S, S - T, dtype=bool)
    model = lambda q, k, v: softmax(jnp.where(mask, q @ k.mT * 0.5, -jnp.inf)) @ v  # noqa: E731
    return jax.value_and_grad(loss_of(model), argnums=(0, 1, 2))(q, k, v)


@step()
def softmax_by_hand(q, k, v):
    def model(q, k, v):
        s = jnp.einsum("bhtd,bhsd->bhts", q, k) / D**0.5
        e = jnp.exp(s - s.max(-1, keepdims=True))
        return jnp.einsum("bhts,bhsd->bhtd", e / e.sum(-1, keepdims=True), v)

    return jax.value_and_grad(loss_of(model), argnums=(0, 1, 2))(q, k, v)


@step()
def divided_after_the_second_product(q, k, v):
    def model(q, k, v):
        e = jnp.exp(q @ k.mT * 0.5)
        return (e @ v) / e.sum(-1, keepdims=True)

    return jax.value_and_grad(loss_of(model), argnums=(0, 1, 2))(q, k, v)


@step()
def by_log_softmax(q, k, v):
    model = lambda q, k, v: jnp.exp(jax.nn.log_softmax(q @ k.mT * 0.5)) @ v  # noqa: E731
    return jax.value_and_grad(loss_of(model), argnums=(0, 1, 2))(q, k, v)


@step(lambda: [array(B, 2 * H, T, D), *qkv()[1:]])
def groups_of_heads_by_repeat(q, k, v):
    def model(q, k, v):
        return attend(q, jnp.repeat(k, 2, axis=1), jnp.repeat(v, 2, axis=1))

    return jax.value_and_grad(loss_of(model), argnums=(0, 1, 2))(q, k, v)


@step(lambda: [array(B, 2 * H, T, D), *qkv()[1:]])
def groups_of_heads_by_reshape(q, k, v):
    def model(q, k, v):
        scores = jnp.einsum("bhgtd,bhsd->bhgts", q.reshape(B, H, 2, T, D), k) * 0.5
        return jnp.einsum("bhgts,bhsd->bhgtd", softmax(scores), v).reshape(q.shape)

    return jax.value_and_grad(loss_of(model), argnums=(0, 1, 2))(q, k, v)


@step(lambda: [array(B, 2 * H, T, D), *qkv()[1:]])
def groups_of_heads_by_broadcast(q, k, v):
    def model(q, k, v):
        wide = lambda x: jnp.broadcast_to(x[:, :, None], (B, H, 2, S, D)).reshape(B, 2 * H, S, D)  # noqa: E731
        return attend(q, wide(k), wide(v))

    return jax.value_and_grad(loss_of(model), argnums=(0, 1, 2))(q, k, v)


@step(lambda: [array(B, H, T, D), array(B, 1, S, D, seed=1), array(B, 1, S, D, seed=2)])
def one_head_of_keys(q, k, v):
    return jax.value_and_grad(loss, argnums=(0, 1, 2))(q, k, v)


@step(lambda: qkv(jnp.bfloat16))
def bfloat16_with_softmax_in_float32(q, k, v):
    def model(q, k, v):
        s = jnp.einsum("bhtd,bhsd->bhts", q, k, preferred_element_type=jnp.float32) * 0.5
        return jnp.einsum("bhts,bhsd->bhtd", softmax(s).astype(q.dtype), v)

    return jax.value_and_grad(loss_of(model), argnums=(0, 1, 2))(q, k, v)


@step(lambda: qkv(jnp.bfloat16))
def bfloat16_with_scores_cast_up(q, k, v):
    def model(q, k, v):
        return softmax((q @ k.mT).astype(jnp.float32) * 0.5).astype(q.dtype) @ v

    return jax.value_and_grad(loss_of(model), argnums=(0, 1, 2))(q, k, v)


@step(lambda: qkv(jnp.bfloat16))
def bfloat16_throughout(q, k, v):
    return jax.value_and_grad(loss, argnums=(0, 1, 2))(q, k, v)


@step()
def with_the_result_of_jax_nn(q, k, v):
    def model(q, k, v):
        q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
        return jax.nn.dot_product_attention(q, k, v, scale=0.5)

    return jax.value_and_grad(loss_of(model), argnums=(0, 1, 2))(q, k, v)
