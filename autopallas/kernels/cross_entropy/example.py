"""Inputs to measure a cross-entropy on, such as it meets in use: logits of order one, labels in the vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from autopallas.compat import Shaped
from autopallas.kernels.cross_entropy.site import CrossEntropySite
from autopallas.kernels.cross_entropy.spec import CrossEntropySpec, Head, SideSpec
from autopallas.kernels.example import harmless, normal
from autopallas.numerics.casts import is_floating
from autopallas.sites.index_notation import Operand, fill

__all__ = ["example", "operands", "plain", "program"]

Array: TypeAlias = np.ndarray


def example(spec: CrossEntropySpec, key: int = 0) -> tuple[Array, Array, tuple[Array | tuple[Array, Array], ...]]:
    """These are (x, w, sides) as of ``operands.Operands``; others for another ``key``."""
    random = np.random.default_rng(key)
    x, w = _head(random, spec.heads[0], spec)
    return x, w, tuple(_side(random, side, spec) for side in spec.sides)


def _head(random: np.random.Generator, head: Head, spec: CrossEntropySpec) -> tuple[Array, Array]:
    x = normal(random, (spec.rows, head.hidden), head.row_dtype)
    shape = (spec.vocabulary, head.hidden) if head.vocabulary_major else (head.hidden, spec.vocabulary)
    return x, normal(random, shape, head.weight_dtype, 1 / math.sqrt(head.hidden))


def _side(random: np.random.Generator, side: SideSpec, spec: CrossEntropySpec) -> Array | tuple[Array, Array]:
    if side.head is not None:
        return _head(random, side.head, spec)
    over_rows, over_vocabulary = side.varies
    shape = (spec.rows if over_rows else 1, spec.vocabulary if over_vocabulary else 1)
    if is_floating(side.dtype):
        return normal(random, shape, side.dtype) if over_vocabulary else random.random(shape).astype(side.dtype)
    if side.dtype == np.bool_:
        return np.asarray(random.random(shape) < 0.9)
    if over_vocabulary:
        return np.broadcast_to(np.arange(spec.vocabulary), shape).astype(side.dtype)
    return random.integers(0, spec.vocabulary, shape).astype(side.dtype)


def operands(site: CrossEntropySite, types: Sequence[Shaped], key: int = 0) -> list[Array]:
    """Returns the same for a site: one array per operand, of the given shapes and dtypes."""
    x, w, sides = example(site.spec, key)
    filled = harmless(np.random.default_rng(key), types)
    batch = site.batch_labels
    of_heads = [(x, w), *(side for side in sides if isinstance(side, tuple))]
    for head, (x, w) in zip(site.heads, of_heads, strict=True):
        fill(head.rows, x[None], filled, site.sizes, (batch, site.row_labels, head.hidden_labels))
        fill(head.weight, w[None], filled, site.sizes, (batch, *site.weight_groups(head)))
    for source, side in zip(site.sides, sides, strict=True):
        if isinstance(source, Operand) and not isinstance(side, tuple):
            fill(source, side[None], filled, site.sizes, (batch, site.row_labels, site.vocabulary_labels))
    return filled


def plain(x: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross-entropy as people write it."""
    logits = (x @ w).astype(jnp.float32)
    picked = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def program() -> tuple[Callable[..., jax.Array], tuple[jax.ShapeDtypeStruct, ...]]:
    """Returns a loss as people write it, and the types of activations, weights and labels."""
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2048, 512), (512, 32768))]
    return plain, (*shapes, jax.ShapeDtypeStruct((2048,), jnp.int32))
