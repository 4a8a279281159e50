"""Trains a small transformer in Haiku with optax."""

from functools import partial

import haiku as hk
import jax
import jax.numpy as jnp
import optax


def forward(tokens):
    x = hk.Embed(48, 32)(tokens)
    mask = jnp.tril(jnp.ones((1, 1, tokens.shape[1], tokens.shape[1])))
    for _ in range(2):
        normal = hk.LayerNorm(-1, True, True)(x)
        x = x + hk.MultiHeadAttention(4, 8, w_init=hk.initializers.VarianceScaling(1.0), model_size=32)(
            normal, normal, normal, mask=mask
        )
        x = x + hk.Linear(32)(jax.nn.gelu(hk.Linear(64)(hk.LayerNorm(-1, True, True)(x))))
    return hk.Linear(48)(x)


network = hk.without_apply_rng(hk.transform(forward))
optimizer = optax.adam(1e-3)


def loss(parameters, tokens):
    logits = network.apply(parameters, tokens[:, :-1])
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * jax.nn.one_hot(tokens[:, 1:], 48), axis=-1))


@partial(jax.jit, donate_argnums=(0, 1))
def update(parameters, state, tokens):
    value, gradients = jax.value_and_grad(loss)(parameters, tokens)
    updates, state = optimizer.update(gradients, state)
    return optax.apply_updates(parameters, updates), state, value


tokens = jax.random.randint(jax.random.key(1), (2, 17), 0, 48)
parameters = network.init(jax.random.key(0), tokens[:, :-1])
state = optimizer.init(parameters)
for _ in range(3):
    parameters, state, value = update(parameters, state, tokens)
    print(f"loss {value:.4f}")
