"""The original equations in float32, which a search compares with where the originals round their sums to 16 bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from autopallas.kernels.respelling import reference
from autopallas.kernels.respelling.kinds import kind_named
from autopallas.kernels.respelling.reference import TILES, supports
from autopallas.kernels.respelling.spec import ArrayType, RespellingSpec
from autopallas.numerics.casts import is_floating
from autopallas.sites.spec import BlockSizes

__all__ = ["TILES", "forward", "supports"]


def forward(spec: RespellingSpec, block_sizes: BlockSizes | None, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Computes the results in the dtypes that the original has; there are no block sizes."""
    kind = kind_named(spec.kind)
    if not kind.may_round_sums:
        return reference.forward(spec, block_sizes, operands)
    wide = replace(spec, operands=tuple(map(_wide, spec.operands)), results=tuple(map(_wide, spec.results)))
    found = kind.original(wide, *(x.astype(_wide((x.shape, x.dtype))[1]) for x in operands))
    return [x.astype(dtype) for x, (_, dtype) in zip(found, spec.results, strict=True)]


def _wide(array: ArrayType) -> ArrayType:
    shape, dtype = array
    return shape, jnp.promote_types(dtype, jnp.float32) if is_floating(dtype) else dtype
