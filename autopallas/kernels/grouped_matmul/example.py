"""Inputs to measure a grouped matmul on, such as it meets in use: groups of unequal sizes that add up to all rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from autopallas.compat import Shaped
from autopallas.kernels.example import harmless, normal
from autopallas.kernels.grouped_matmul.site import GroupedMatmulSite
from autopallas.kernels.grouped_matmul.spec import GroupedMatmulSpec
from autopallas.sites.index_notation import fill

__all__ = ["example", "operands", "program", "ragged_dot"]

Array: TypeAlias = np.ndarray


def example(spec: GroupedMatmulSpec, key: int = 0) -> tuple[Array, Array, Array]:
    """These are (first, second, group_sizes) as of ``operands.Operands``, of one batch; others for another ``key``."""
    random = np.random.default_rng(key)
    first = normal(random, (1, *spec.first_shape()), spec.first_dtype)
    scale = 1.0 if spec.use == "drhs" else 1 / math.sqrt(spec.contracting)
    second = normal(random, (1, *spec.second_shape()), spec.second_dtype, scale)
    sizes = random.multinomial(spec.rows, random.dirichlet(np.full(spec.groups, 2.0)))
    return first, second, sizes.astype(np.int32)[None]


def operands(site: GroupedMatmulSite, types: Sequence[Shaped], key: int = 0) -> list[Array]:
    """Returns the same for a site: one array per operand, of the given shapes and dtypes."""
    filled = harmless(np.random.default_rng(key), types)
    axes = (*site.axes[:2], (site.batch_labels, site.group_labels))
    sources = (site.first, site.second, site.group_sizes)
    for source, array, groups in zip(sources, example(site.spec, key), axes, strict=True):
        fill(source, array, filled, site.sizes, groups)
    return filled


def ragged_dot(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """A mixture's expert layer as people write it."""
    return jax.lax.ragged_dot(lhs, rhs, group_sizes)


def program() -> tuple[Callable[..., jax.Array], tuple[jax.ShapeDtypeStruct, ...]]:
    """Returns a grouped matmul as people write it, and the types of rows, matrices and group sizes."""
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((4096, 512), (8, 512, 1024))]
    return ragged_dot, (*shapes, jax.ShapeDtypeStruct((8,), jnp.int32))
