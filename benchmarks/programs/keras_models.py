"""Models of keras.applications, and its own layers of attention and of loops, on JAX."""

from __future__ import annotations

import functools
import os
from typing import Any

import jax

from benchmarks.programs.program import Built, Program, images, labels, train_step

__all__ = ["PROGRAMS"]


def _keras() -> Any:
    os.environ.setdefault("KERAS_BACKEND", "jax")
    import keras

    return keras


def _step(model: Any, *batch: jax.Array) -> Built:
    keras = _keras()
    fixed = [v.value for v in model.non_trainable_variables]
    measure = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def loss(parameters: Any, fixed: Any, x: jax.Array, wanted: jax.Array) -> jax.Array:
        logits, _ = model.stateless_call(parameters, fixed, x, training=True)
        return measure(wanted, logits)

    return train_step(loss), ([v.value for v in model.trainable_variables], fixed, *batch)


def _application(name: str, batch: int, size: int, **options: Any) -> Built:
    keras = _keras()
    model = getattr(keras.applications, name)(
        input_shape=(size, size, 3), weights=None, classes=100, classifier_activation=None, **options
    )
    return _step(model, images(batch, size, size, 3), labels(batch, 100))


def _transformer(batch: int, length: int) -> Built:
    keras = _keras()
    layers, width = keras.layers, 256
    given = keras.Input((length, width))
    x = given
    for _ in range(2):
        y = layers.LayerNormalization(epsilon=1e-6)(x)
        x = layers.Add()([x, layers.MultiHeadAttention(num_heads=4, key_dim=64)(y, y)])
        y = layers.Dense(1024, activation="gelu")(layers.LayerNormalization(epsilon=1e-6)(x))
        x = layers.Add()([x, layers.Dense(width)(y)])
    logits = layers.Dense(100)(layers.GlobalAveragePooling1D()(x))
    return _step(keras.Model(given, logits), images(batch, length, width), labels(batch, 100))


def _moving_images(batch: int, length: int, size: int) -> Built:
    keras = _keras()
    layers = keras.layers
    given = keras.Input((length, size, size, 1))
    x = layers.ConvLSTM2D(16, 3, padding="same", return_sequences=True)(given)
    x = layers.ConvLSTM2D(16, 3, padding="same")(layers.BatchNormalization()(x))
    logits = layers.Dense(100)(layers.GlobalAveragePooling2D()(x))
    return _step(keras.Model(given, logits), images(batch, length, size, size, 1), labels(batch, 100))


def _program(name: str, build: Any, *arguments: Any, **options: Any) -> Program:
    return Program(name, ("keras",), functools.partial(build, *arguments, **options))


PROGRAMS = (
    _program("keras MobileNet train B4 96x96 f32", _application, "MobileNet", 4, 96),
    _program("keras MobileNetV2 train B4 96x96 f32", _application, "MobileNetV2", 4, 96),
    _program(
        "keras ConvNeXtTiny train B1 128x128 f32", _application, "ConvNeXtTiny", 1, 128, include_preprocessing=False
    ),
    _program("keras EfficientNetB0 train B4 96x96 f32", _application, "EfficientNetB0", 4, 96),
    _program("keras transformer train B4 T512 f32", _transformer, 4, 512),
    _program("keras ConvLSTM2D train B4 T10 32x32 f32", _moving_images, 4, 10, 32),
)
