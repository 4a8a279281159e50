"""Statistics and products from the same logits, which are kept for some rows at a time and the whole vocabulary.

Each logit is computed once, as by Liger Kernel (Hsu et al. 2024, https://arxiv.org/abs/2410.10989): the products need
what the whole row's statistics give, and so all logits of a row at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopallas.kernels.cross_entropy.block_sizes import BlockSizes
from autopallas.kernels.cross_entropy.operands import Results
from autopallas.kernels.cross_entropy.spec import CrossEntropySpec
from autopallas.kernels.cross_entropy.statistics import advanced, initial, required
from autopallas.kernels.cross_entropy.tile_products import Target, added
from autopallas.kernels.cross_entropy.tiles import (
    Block,
    Rows,
    Tile,
    TileOperands,
    cut,
    cut_row,
    on_gpu,
    over,
    over_rows,
    stored,
)
from autopallas.kernels.even_blocks import Part
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
    shares = tuple(_shares(spec, target) for target in targets)

    def rows(block: Part, carry: tuple[Arrays, tuple[Arrays, ...]]) -> tuple[Arrays, tuple[Arrays, ...]]:
        part = block.window
        statistics, products = carry
        x = operands.rows(part)
        tile = operands.tile(spec, x, weights, part, columns)
        score, own = found(tile, part)
        if on_gpu():
            # Then nothing else reads the logits, and what is multiplied is written over them.
            score, own = lax.optimization_barrier((score, own))
        finished = operands.finished(spec, part, own)
        made = values_in_place(tile._replace(score=score, sides=(*tile.sides, *finished)), programs)
        if block.first is not None:  # each row counts once
            made = tuple(jnp.where(tile.query < block.first, 0, value) for value in made)
        return (
            tuple(stored(s, f, part, 0) for s, f in zip(statistics, own, strict=True)),
            tuple(
                tuple(
                    added(spec, t, total, v, _cut(t, x, h), weights, block) for h, total in zip(of, totals, strict=True)
                )
                for t, of, totals, v in zip(targets, shares, products, made, strict=True)
            ),
        )

    def empty(target: Target, of: Sequence[Block | None]) -> Arrays:
        complete = target.rows_axis() is not None
        shape = target.shape(spec, spec.rows, spec.vocabulary)
        axis = _hidden_axis(spec, target)
        shapes = (shape if h is None else (*shape[:axis], h[1], *shape[axis + 1 :]) for h in of)
        return tuple(jnp.zeros(shape, target.dtype if complete else dtype) for shape in shapes)

    start = (initial(spec.statistics, spec.rows, dtype), tuple(map(empty, targets, shares)))
    statistics, products = over_rows(spec.rows, sizes.rows_block, rows, start, multiple)
    return Results(statistics, shaped(spec, [_joined(spec, t, p) for t, p in zip(targets, products, strict=True)]))


_ALIGNED = 64
"""What a share of the hidden size is a multiple of."""


def _shares(spec: CrossEntropySpec, target: Target) -> tuple[Block | None, ...]:
    """The blocks of the hidden size whose sums are arrays of their own; None for all of it.

    Half of a weight's gradient takes in float32 what the whole takes in 16 bits.  So on a GPU the sums are two arrays,
    of which the compiler has one where the result will be, until that is written.
    """
    if target.kind != "columns" or not on_gpu():
        return (None,)
    hidden, narrow = spec.heads[target.head].hidden, np.dtype(target.dtype).itemsize
    first = hidden // 2 // _ALIGNED * _ALIGNED
    if not first or 2 * narrow != spec.accumulation_dtype.itemsize:
        return (None,)
    return (0, first), (first, hidden - first)


def _hidden_axis(spec: CrossEntropySpec, target: Target) -> int:
    """The axis of a weight's gradient that is along the hidden size."""
    return 1 if spec.heads[target.head].vocabulary_major else 0


def _cut(target: Target, x: Sequence[Rows], share: Block | None) -> Sequence[Rows]:
    """The activations of each head, those that a target reads with a share of the hidden size."""
    if share is None:
        return x
    own = x[target.head]
    return (*x[: target.head], Rows(cut(own.x, share, 1), cut(own.transposed, share, 0)), *x[target.head + 1 :])


def _joined(spec: CrossEntropySpec, target: Target, sums: Arrays) -> Array:
    """The result of a target whose sums are these arrays.

    The first is rounded before anything else reads the others, so that its memory is free when the result is written.
    """
    if len(sums) == 1:
        return target.result(sums[0])
    first, others = lax.optimization_barrier((target.result(sums[0]), sums[1:]))
    rounded = (first, *(target.result(each) for each in others))
    return jnp.concatenate(rounded, axis=_hidden_axis(spec, target))


def shaped(spec: CrossEntropySpec, products: Sequence[Array]) -> Arrays:
    """Returns the spec's products, of what the targets gave."""
    return tuple(x[0] if p.kind == "column_sum" else x for x, p in zip(products, spec.products, strict=True))


_PIECES = 8
"""Pieces of a tile's rows whose values are written over the logits one after the other."""


def values_in_place(tile: Tile, programs: Sequence[ElementwiseProgram]) -> Arrays:
    """Returns the same as :func:`values`; on a GPU, where one program has all of them, written over the logits.

    The compiler writes over an array that it reads where that is updated piece by piece, and for all of it at once
    only where the array has a result's place.
    """
    different, rows = {*programs}, tile.score.shape[0]
    if not on_gpu() or len(different) > 1 or programs[0].dtype != tile.score.dtype or rows < _PIECES:
        return values(tile, programs)

    def piece(part: Block, array: Array) -> Array:
        sides = tuple(cut_row(side, part) for side in tile.sides)
        own = tile._replace(score=cut(array, part, 0), query=cut_row(tile.query, part), sides=sides)
        return stored(array, own.value(programs[0]), part, 0)

    return (over(rows, rows // _PIECES, piece, tile.score),) * len(programs)


def values(tile: Tile, programs: Sequence[ElementwiseProgram]) -> Arrays:
    """Returns the values of programs on a tile, each program's once."""
    known = {program: tile.value(program) for program in dict.fromkeys(programs)}
    return tuple(known[program] for program in programs)
