"""Cross-entropy for Mosaic GPU: tiles of logits that never leave the registers of a Hopper GPU.

One kernel gives all statistics in one pass: for each tile of logits one number per row, merged outside as in online
softmax (Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867).  Products, and gradients of the statistics, go
part by part over the vocabulary: XLA recomputes the part's logits and multiplies its gradient with x and the weight, in
three matrix products of the vendor's library, so that no more than a part of the logits is ever in memory.

Letters: N rows (tokens), D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from autopallas.kernels.cross_entropy import xla
from autopallas.kernels.cross_entropy.block_sizes import BlockSizes
from autopallas.kernels.cross_entropy.spec import CrossEntropySpec, SideSpec, Statistic
from autopallas.kernels.cross_entropy.statistics import finite, required
from autopallas.kernels.cross_entropy.tiles import Operands
from autopallas.kernels.gpu import reason_against, rounded
from autopallas.kernels.implementation import Device, Supported, Unsupported

__all__ = ["backward", "candidates", "forward", "supports"]

Array: TypeAlias = jax.Array

_ALIGNED = 64


def supports(spec: CrossEntropySpec, device: Device) -> Supported | Unsupported:
    """bfloat16 or float16 on H100s, programs that Mosaic GPU has, and side inputs that vary over rows at most."""
    programs = [s.program for s in spec.statistics]
    held = [spec.logit_dtype, *(s.dtype for s in spec.sides)]
    if (answer := reason_against(device, [spec.row_dtype, spec.weight_dtype], programs, held)) is not None:
        return answer
    if not spec.statistics:
        return Unsupported("it asks for no statistic; products alone are left to xla")
    if any(side.varies[1] for side in spec.sides):
        return Unsupported("a side input varies over the vocabulary, as a bias does")
    if spec.row_dtype.name == "float16" and len(required(spec.statistics)) > 3:
        return Unsupported("of float16 with more than three statistics the compiler makes a kernel whose wgmma waits")
    return Supported()


def candidates(spec: CrossEntropySpec, device: Device) -> tuple[BlockSizes, ...]:
    """What a search should try, best guess first: parts of the vocabulary, for products and gradients."""
    sizes = (BlockSizes(2**20, part).fitted(spec) for part in (8192, 16384, 4096))
    return tuple(dict.fromkeys(sizes))


def forward(
    spec: CrossEntropySpec, block_sizes: BlockSizes, x: Array, w: Array, sides: Sequence[Array] = ()
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Statistics and products.  Arguments and results as in ``xla.forward``."""
    found = _statistics(spec, x, w, sides)
    if not spec.products:
        return found, ()
    finished = Operands.of(spec, x, w, sides).finished(spec, (0, spec.rows), found)
    more = tuple(SideSpec(f.dtype, (f.shape[0] != 1, False)) for f in finished)
    # The programs of products read the finished values behind the side inputs, of which they are then some.
    rest = replace(spec, statistics=(), finish=(), sides=(*spec.sides, *more))
    _, products = xla.forward(rest, block_sizes.fitted(spec), x, w, (*sides, *finished))
    return found, products


def backward(
    spec: CrossEntropySpec,
    block_sizes: BlockSizes,
    x: Array,
    w: Array,
    sides: Sequence[Array],
    statistics: Sequence[Array],
    cotangents: Sequence[Any],
    wanted: Sequence[bool],
) -> tuple[Array | None, Array | None, tuple[Array | None, ...]]:
    """Gradients of the statistics.  Arguments and results as in ``xla.backward``."""
    return xla.backward(spec, block_sizes.fitted(spec), x, w, sides, statistics, cotangents, wanted)


def _statistics(spec: CrossEntropySpec, x: Array, w: Array, sides: Sequence[Array]) -> tuple[Array, ...]:
    """The spec's statistics, [N] each."""
    from autopallas.kernels.cross_entropy.gpu_statistics import ROWS, Plan, statistics_call

    needed = required(spec.statistics)
    labels = Operands.of(spec, x, w, sides).labels
    plan = Plan.of(spec, min(256, spec.vocabulary), len(needed))
    rows = rounded(spec.rows, ROWS)
    x = _padded(x, (rows, rounded(spec.hidden, _ALIGNED)))
    w = _padded(w, tuple(rounded(n, _ALIGNED) for n in w.shape))
    vectors = [_padded(a[:, 0], (rows if a.shape[0] != 1 else 1,)) for a in (*sides, *labels.values())]
    kernel = statistics_call(spec, plan, needed, tuple(labels), rows, w.shape[0 if spec.vocabulary_major else 1])
    parts = dict(zip(needed, kernel(x, w, *vectors), strict=True))
    return tuple(_merged(s, parts)[: spec.rows] for s in spec.statistics)


def _merged(statistic: Statistic, parts: dict[Statistic, Array]) -> Array:
    """A statistic of all columns, [N], from those of each tile of them, [tiles, N]."""
    part, kind = parts[statistic], statistic.kind
    if kind in ("sum", "pick"):
        return jnp.sum(part, axis=0)
    maxima = parts[Statistic("max", statistic.program)]
    greatest = jnp.max(maxima, axis=0)
    if kind == "max":
        return greatest
    if kind == "exp_sum":
        # A tile's sum is shifted by its own greatest value, or by 0 where that is not finite.
        return jnp.sum(part * jnp.exp(finite(maxima) - finite(greatest)), axis=0)
    here = (maxima == greatest) | ((greatest != greatest) & (maxima != maxima))
    if kind == "ties":
        return jnp.sum(jnp.where(maxima == greatest, part, 0), axis=0)
    return jnp.min(jnp.where(here, part, jnp.iinfo(jnp.int32).max), axis=0)


def _padded(array: Array, shape: Sequence[int]) -> Array:
    """With zeros behind each axis; the array itself where there is nothing to add."""
    added = [(0, new - old) for old, new in zip(array.shape, shape, strict=True)]
    return jnp.pad(array, added) if any(n for _, n in added) else array
