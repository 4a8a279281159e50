"""What the pages' commands name: a user's model."""

import jax
import jax.numpy as jnp


def attend(q, k, v):
    return jax.nn.softmax(q @ k.T / 8.0) @ v


def train_step(parameters, x):
    return jax.grad(lambda p: jnp.sum(attend(x @ p["w"], x, x) ** 2))(parameters)
