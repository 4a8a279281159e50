"""Layers of flax, put together as its guides do, and a model that is written with it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.programs.program import Built, Program, images, labels, tokens, train_step

__all__ = ["PROGRAMS"]


def _encoder(length: int, dtype: Any, batch: int = 1, width: int = 512, layers: int = 2, train: bool = False) -> Built:
    from flax import nnx

    rngs = nnx.Rngs(0)

    class Block(nnx.Module):
        def __init__(self) -> None:
            self.first, self.second = (nnx.LayerNorm(width, rngs=rngs, dtype=dtype) for _ in range(2))
            self.attend = nnx.MultiHeadAttention(8, width, dtype=dtype, decode=False, rngs=rngs)
            self.up, self.down = (
                nnx.Linear(*sizes, dtype=dtype, rngs=rngs) for sizes in ((width, 4 * width), (4 * width, width))
            )

        def __call__(self, x: jax.Array) -> jax.Array:
            x = x + self.attend(self.first(x))
            return x + self.down(jax.nn.gelu(self.up(self.second(x))))

    blocks = [Block() for _ in range(layers)]
    definitions, states = zip(*map(nnx.split, blocks), strict=True)

    def forward(states: Any, x: jax.Array) -> jax.Array:
        for definition, state in zip(definitions, states, strict=True):
            x = nnx.merge(definition, state)(x)
        return x

    def loss(states: Any, x: jax.Array, wanted: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(forward(states, x) - wanted).astype(jnp.float32))

    x = images(batch, length, width).astype(dtype)
    return (train_step(loss), (states, x, x)) if train else (forward, (states, x))


def _mixture(batch: int, length: int) -> Built:
    from nano_moe.config import NanoMoEConfig
    from nano_moe.train import create_train_state, train_step

    config = NanoMoEConfig(
        vocab_size=4096, n_layers=2, n_heads=4, d_model=256, d_ff=1024, n_experts=8, block_size=length, dropout_rate=0.0
    )
    state = create_train_state(jax.random.key(0), config)
    ids = tokens(batch, length, config.vocab_size)

    def step(state: Any, ids: jax.Array, following: jax.Array) -> Any:
        return train_step(state, ids, following, config)

    return step, (state, ids, jnp.roll(ids, -1, 1))


def _classifier(steps: int, batch: int, size: int) -> Built:
    """Train steps in a loop, as where an epoch is one call."""
    import optax
    from flax import linen as nn

    class Classifier(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            for features in (16, 32):
                x = nn.avg_pool(nn.relu(nn.Conv(features, (3, 3))(x)), (2, 2), (2, 2))
            return nn.Dense(10)(nn.relu(nn.Dense(128)(x.reshape(x.shape[0], -1))))

    model, optimizer = Classifier(), optax.adam(1e-3)
    batches = images(steps, batch, size, size, 1), labels(steps * batch, 10).reshape(steps, batch)

    def loss(parameters: Any, x: jax.Array, wanted: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(parameters, x), wanted).mean()

    def step(state: Any, given: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
        parameters, moments = state
        value, gradients = jax.value_and_grad(loss)(parameters, *given)
        updates, moments = optimizer.update(gradients, moments)
        return (optax.apply_updates(parameters, updates), moments), value

    def epoch(state: Any, batches: Any) -> Any:
        return jax.lax.scan(step, state, batches)

    parameters = model.init(jax.random.key(0), batches[0][0])
    return epoch, ((parameters, optimizer.init(parameters)), batches)


def _recurrent(batch: int, length: int, width: int) -> Built:
    """A language model of two LSTMs."""
    import optax
    from flax import linen as nn

    vocabulary = 1024

    class Model(nn.Module):
        @nn.compact
        def __call__(self, ids: jax.Array) -> jax.Array:
            x = nn.Embed(vocabulary, width)(ids)
            for _ in range(2):
                x = nn.RNN(nn.LSTMCell(width))(x)
            return nn.Dense(vocabulary)(x)

    model, ids = Model(), tokens(batch, length, vocabulary)

    def loss(parameters: Any, ids: jax.Array, following: jax.Array) -> jax.Array:
        logits = model.apply(parameters, ids)
        return optax.softmax_cross_entropy_with_integer_labels(logits, following).mean()

    return train_step(loss), (model.init(jax.random.key(0), ids), ids, jnp.roll(ids, -1, 1))


PROGRAMS = (
    Program("flax encoder forward B1 T4096 f32", ("flax",), functools.partial(_encoder, 4096, jnp.float32)),
    Program("flax encoder forward B1 T2048 bf16", ("flax",), functools.partial(_encoder, 2048, jnp.bfloat16)),
    Program(
        "flax encoder train B8 T2048 bf16", ("flax",),
        functools.partial(_encoder, 2048, jnp.bfloat16, 8, 1024, 4, True), "gpu",
        functools.partial(_encoder, 16, jnp.bfloat16, 2, 64, 1, True),
    ),
    Program(
        "flax classifier train 8 steps in a loop B32 28x28 f32", ("flax", "optax"),
        functools.partial(_classifier, 8, 32, 28),
    ),
    Program("flax LSTM train B8 T128 f32", ("flax", "optax"), functools.partial(_recurrent, 8, 128, 256)),
    Program(
        "nano-moe mixture train B4 T256 f32", ("nano-moe-jax", "flax", "optax"), functools.partial(_mixture, 4, 256)
    ),
)  # fmt: skip
