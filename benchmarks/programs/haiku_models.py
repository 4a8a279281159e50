"""Models of Haiku."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.programs.program import Built, Program, images, labels, tokens, train_step

__all__ = ["PROGRAMS"]

_PACKAGES = ("dm-haiku", "optax")


def _transformer(batch: int, length: int) -> Built:
    """A language model of Haiku's attention, with the loss of its transformer example."""
    import haiku as hk

    width, vocabulary = 512, 8192

    def model(ids: jax.Array) -> jax.Array:
        causal = jnp.tril(jnp.ones((1, 1, length, length)))
        x = hk.Embed(vocabulary, width)(ids) + hk.get_parameter("position", (length, width), init=jnp.zeros)
        for _ in range(2):
            y = hk.LayerNorm(-1, True, True)(x)
            x = x + hk.MultiHeadAttention(8, 64, w_init=hk.initializers.VarianceScaling(1.0))(y, y, y, causal)
            y = jax.nn.gelu(hk.Linear(4 * width)(hk.LayerNorm(-1, True, True)(x)))
            x = x + hk.Linear(width)(y)
        return hk.Linear(vocabulary)(hk.LayerNorm(-1, True, True)(x))

    transformed = hk.without_apply_rng(hk.transform(model))
    ids = tokens(batch, length, vocabulary)

    def loss(parameters: Any, ids: jax.Array, following: jax.Array) -> jax.Array:
        logits = transformed.apply(parameters, ids)
        log_likelihood = jax.nn.one_hot(following, vocabulary) * jax.nn.log_softmax(logits)
        return -jnp.sum(log_likelihood) / following.size

    return train_step(loss), (transformed.init(jax.random.key(0), ids), ids, jnp.roll(ids, -1, 1))


def _mobilenet(batch: int, size: int) -> Built:
    import haiku as hk
    import optax

    transformed = hk.without_apply_rng(hk.transform_with_state(lambda x: hk.nets.MobileNetV1(num_classes=100)(x, True)))
    pixels, wanted = images(batch, size, size, 3), labels(batch, 100)
    parameters, state = transformed.init(jax.random.key(0), pixels)

    def loss(parameters: Any, state: Any, pixels: jax.Array, wanted: jax.Array) -> jax.Array:
        logits, _ = transformed.apply(parameters, state, pixels)
        return optax.softmax_cross_entropy_with_integer_labels(logits, wanted).mean()

    return train_step(loss), (parameters, state, pixels, wanted)


def _gated_unit(batch: int, length: int, width: int) -> Built:
    """A gated recurrent unit that follows a series."""
    import haiku as hk

    def model(x: jax.Array) -> jax.Array:
        core = hk.GRU(width)
        states, _ = hk.dynamic_unroll(core, x, core.initial_state(x.shape[1]))
        return hk.Linear(x.shape[-1])(states)

    transformed = hk.without_apply_rng(hk.transform(model))
    x = images(length, batch, width)

    def loss(parameters: Any, x: jax.Array, following: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(transformed.apply(parameters, x) - following))

    return train_step(loss), (transformed.init(jax.random.key(0), x), x, jnp.roll(x, -1, 0))


PROGRAMS = (
    Program("Haiku transformer train B1 T1024 f32", _PACKAGES, functools.partial(_transformer, 1, 1024)),
    Program("Haiku GRU train B8 T128 f32", _PACKAGES, functools.partial(_gated_unit, 8, 128, 256)),
    Program("Haiku MobileNetV1 train B4 96x96 f32", _PACKAGES, functools.partial(_mobilenet, 4, 96)),
)
