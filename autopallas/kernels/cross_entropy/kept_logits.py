"""Statistics and products from the same logits, which are kept for some rows at a time and the whole vocabulary.

Each logit is computed once, as by Liger Kernel (Hsu et al. 2024, https://arxiv.org/abs/2410.10989): the products need
what the whole row's statistics give, and so all logits of a row at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from autopallas.kernels.cross_entropy.block_sizes import BlockSizes
from autopallas.kernels.cross_entropy.operands import Results
from autopallas.kernels.cross_entropy.spec import CrossEntropySpec
from autopallas.kernels.cross_entropy.statistics import advanced, initial, required
from autopallas.kernels.cross_entropy.tile_products import Target, added
from autopallas.kernels.cross_entropy.tiles import Block, Tile, TileOperands, cut_row, on_gpu, over, stored
from autopallas.sites.elementwise import ElementwiseProgram

__all__ = ["keeps", "of_logits", "shaped", "statistics_and_products", "values"]

Array: TypeAlias = jax.Array
Arrays: TypeAlias = tuple[Array, ...]
Found: TypeAlias = Callable[[Tile, Block], tuple[Array, Arrays]]
"""``found(tile, rows)`` gives the logits of some rows, and the statistics of these."""


def keeps(spec: CrossEntropySpec, sizes: BlockSizes) -> bool:
    """Whether logits are kept: rows stream past the whole weight, and statistics and products see the same logits."""
    return bool(spec.statistics and spec.products) and sizes.vocabulary_block >= spec.vocabulary


def of_logits(spec: CrossEntropySpec, operands: TileOperands) -> Found:
    """The statistics are taken of the tile's own logits."""
    needed = required(spec.statistics)
    dtype = spec.accumulation_dtype

    def found(tile: Tile, rows: Block) -> tuple[Array, Arrays]:
        labels = {n: cut_row(label, rows) for n, label in operands.labels.items()}
        own = advanced(needed, initial(needed, rows[1], dtype), tile, labels, dtype)
        known = dict(zip(needed, own, strict=True))
        return tile.score, tuple(known[s] for s in spec.statistics)

    return found


def statistics_and_products(
    spec: CrossEntropySpec, sizes: BlockSizes, operands: TileOperands, found: Found, multiple: int = 1
) -> Results:
    """Both, a block of rows after the other.

    Args:
      spec: has statistics and products.
      sizes: whose block of rows is taken; their number is a multiple of ``multiple``.
      operands: what the tiles are cut from.
      found: gives logits and statistics.
    """
    dtype = spec.accumulation_dtype
    columns = (0, spec.vocabulary)
    weights = operands.columns(columns)
    targets = tuple(Target.of_product(p) for p in spec.products)
    programs = tuple(p.program for p in spec.products)

    def rows(part: Block, carry: tuple[Arrays, Arrays]) -> tuple[Arrays, Arrays]:
        statistics, products = carry
        x = operands.rows(part)
        tile = operands.tile(spec, x, weights, part, columns)
        score, own = found(tile, part)
        if on_gpu():
            # Then nothing else reads the logits, and what is multiplied is written over them.
            score, own = lax.optimization_barrier((score, own))
        finished = operands.finished(spec, part, own)
        made = values(tile._replace(score=score, sides=(*tile.sides, *finished)), programs)
        return (
            tuple(stored(s, f, part, 0) for s, f in zip(statistics, own, strict=True)),
            tuple(
                added(spec, t, total, v, x, weights, part) for t, total, v in zip(targets, products, made, strict=True)
            ),
        )

    def empty(target: Target) -> Array:
        complete = target.rows_axis() is not None
        return jnp.zeros(target.shape(spec, spec.rows, spec.vocabulary), target.dtype if complete else dtype)

    start = (initial(spec.statistics, spec.rows, dtype), tuple(map(empty, targets)))
    statistics, products = over(spec.rows, sizes.rows_block, rows, start, multiple)
    return Results(statistics, shaped(spec, [t.result(p) for t, p in zip(targets, products, strict=True)]))


def shaped(spec: CrossEntropySpec, products: Sequence[Array]) -> Arrays:
    """The spec's products, of what the targets gave."""
    return tuple(x[0] if p.kind == "column_sum" else x for x, p in zip(products, spec.products, strict=True))


def values(tile: Tile, programs: Sequence[ElementwiseProgram]) -> Arrays:
    """The values of programs on a tile, each program's once."""
    known = {program: tile.value(program) for program in dict.fromkeys(programs)}
    return tuple(known[program] for program in programs)
