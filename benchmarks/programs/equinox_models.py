"""Models that jaxonmodels writes with Equinox."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.programs.program import Built, Program, images, tokens, train_step

__all__ = ["PROGRAMS"]

_PACKAGES = ("jaxonmodels", "equinox", "optax")


def _vit(batch: int) -> Built:
    import equinox as eqx
    from jaxonmodels.models.vit import VisionTransformer

    model = VisionTransformer(224, 16, 384, 2, 6, 256, key=jax.random.key(0), dtype=jnp.float32)
    arrays, rest = eqx.partition(model, eqx.is_inexact_array)

    def forward(arrays: Any, pixels: jax.Array) -> Any:
        return jax.vmap(lambda x: eqx.combine(arrays, rest)(x, inference=True))(pixels)

    return forward, (arrays, images(batch, 3, 224, 224))


def _mamba(length: int) -> Built:
    import equinox as eqx
    import optax
    from jaxonmodels.models.mamba import Mamba

    model = Mamba(128, 4096, 2, key=jax.random.key(0))
    arrays, rest = eqx.partition(model, eqx.is_inexact_array)
    ids = tokens(1, length, 4096)[0]

    def loss(arrays: Any, ids: jax.Array, following: jax.Array) -> jax.Array:
        logits = eqx.combine(arrays, rest)(ids)
        return optax.softmax_cross_entropy_with_integer_labels(logits, following).mean()

    return train_step(loss), (arrays, ids, jnp.roll(ids, -1))


def _program(name: str, build: Any, *arguments: Any) -> Program:
    return Program(name, _PACKAGES, functools.partial(build, *arguments))


PROGRAMS = (
    _program("jaxonmodels ViT forward B4 T197 f32", _vit, 4),
    _program("jaxonmodels Mamba train T256 f32", _mamba, 256),
)
