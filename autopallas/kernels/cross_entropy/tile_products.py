"""Products of values on tiles: dots with the weight or with x, and sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from autopallas.kernels.cross_entropy.block_sizes import BlockSizes
from autopallas.kernels.cross_entropy.spec import CrossEntropySpec, Product
from autopallas.kernels.cross_entropy.tiles import Block, Rows, Tile, TileOperands, cut, dot, on_gpu, over, stored
from autopallas.kernels.even_blocks import Part

__all__ = ["Target", "added", "contracted"]

Array: TypeAlias = jax.Array
_PART = 2**20
"""Elements of a product with the vocabulary's length that are computed before they are added."""


@dataclass(frozen=True, slots=True)
class Target:
    """What becomes of the values on tiles: a dot with the weight (rows) or with x (columns), or a sum (side)."""

    kind: str
    dtype: DTypeLike
    varies: tuple[bool, bool] = (False, True)
    head: int = 0
    """Of which of the spec's heads weight and x are."""

    @staticmethod
    def of_product(product: Product) -> Target:
        if product.kind in ("column_sum", "values"):
            return Target("side", product.dtype, (product.kind == "values", True))
        return Target(product.kind, product.dtype, head=product.head)

    @staticmethod
    def of_gradients(spec: CrossEntropySpec, wanted: Sequence[bool]) -> dict[int, Target]:
        """Returns the gradients that are wanted of (x, w, *sides) and exist, by the position of the operand.

        Those of a further head's logits are no target: theirs are in :meth:`of_heads`.
        """
        targets = {0: Target("rows", spec.row_dtype), 1: Target("columns", spec.weight_dtype)}
        for position, side in enumerate(spec.sides, 2):
            if side.differentiable and side.head is None:
                targets[position] = Target("side", side.dtype, side.varies)
        return {position: target for position, target in targets.items() if wanted[position]}

    @staticmethod
    def of_heads(spec: CrossEntropySpec, wanted: Sequence[bool]) -> dict[int, tuple[Target, Target]]:
        """Returns the gradients that are wanted of activations and weights of further heads, by the position of the
        operand."""
        positions = [position for position, side in enumerate(spec.sides, 2) if side.head is not None]
        return {
            position: (
                Target("rows", head.row_dtype, head=number),
                Target("columns", head.weight_dtype, head=number),
            )
            for number, (position, head) in enumerate(zip(positions, spec.heads[1:], strict=True), 1)
            if wanted[position]
        }

    def shape(self, spec: CrossEntropySpec, rows: int, columns: int) -> tuple[int, ...]:
        """Of the result for so many rows and columns."""
        head = spec.heads[self.head]
        if self.kind == "rows":
            return rows, head.hidden
        if self.kind == "columns":
            return (columns, head.hidden) if head.vocabulary_major else (head.hidden, columns)
        return (rows if self.varies[0] else 1), (columns if self.varies[1] else 1)

    def rows_axis(self) -> int | None:
        """Returns the axis of the result that rows are along, None where it sums over rows."""
        return 0 if self.kind == "rows" or (self.kind == "side" and self.varies[0]) else None

    def columns_axis(self, operands: TileOperands) -> int | None:
        if self.kind == "columns":
            return operands.heads[self.head].vocabulary_axis
        return 1 if self.kind == "side" and self.varies[1] else None

    def contribution(self, spec: CrossEntropySpec, value: Array, x: Sequence[Rows], w: Sequence[Array]) -> Array:
        """Returns what one tile contributes, in the accumulation dtype.

        The value has the dtype in which the original's product reads it: a gradient of logits that of the logits.
        """
        vocabulary_major = spec.heads[self.head].vocabulary_major
        if self.kind == "rows":
            return dot(spec, value, w[self.head], (1, 0 if vocabulary_major else 1))
        if self.kind == "columns":
            if not vocabulary_major:
                return dot(spec, x[self.head].transposed, value, (1, 0))
            return dot(spec, value, x[self.head].x, (0, 0))
        axes = tuple(axis for axis, varies in enumerate(self.varies) if not varies)
        return jnp.sum(value.astype(spec.accumulation_dtype), axis=axes, keepdims=True)

    def result(self, found: Array) -> Array:
        return found.astype(self.dtype)


def contracted(
    spec: CrossEntropySpec,
    sizes: BlockSizes,
    operands: TileOperands,
    targets: Sequence[Target],
    make: Callable[[Tile, Block, Block], tuple[Array, ...]],
    multiple: int = 1,
) -> tuple[Array, ...]:
    """The targets of the values that ``make`` gives for each tile.  The vocabulary is outside.

    A result with a vocabulary axis is complete when all rows have passed, so that only part of it is ever accumulated.
    Blocks of the vocabulary begin at a multiple of ``multiple``, as its block size is one.
    """
    one_block = sizes.vocabulary_block >= spec.vocabulary

    def empty(target: Target) -> Array:
        complete = one_block or target.columns_axis(operands) is not None
        return jnp.zeros(
            target.shape(spec, spec.rows, spec.vocabulary), target.dtype if complete else spec.accumulation_dtype
        )

    def columns(block: Block, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        w = operands.columns(block)
        found = _past_rows(spec, sizes, operands, targets, make, w, block)

        def merged(target: Target, total: Array, part: Array) -> Array:
            axis = target.columns_axis(operands)
            if axis is not None:
                return stored(total, part, block, axis)
            return part.astype(total.dtype) if one_block else total + part

        return tuple(merged(*each) for each in zip(targets, carry, found, strict=True))

    start = tuple(map(empty, targets))
    found = over(spec.vocabulary, sizes.vocabulary_block, columns, start, multiple)
    return tuple(target.result(array) for target, array in zip(targets, found, strict=True))


def _past_rows(
    spec: CrossEntropySpec,
    sizes: BlockSizes,
    operands: TileOperands,
    targets: Sequence[Target],
    make: Callable[[Tile, Block, Block], tuple[Array, ...]],
    w: Sequence[Array],
    block: Block,
) -> tuple[Array, ...]:
    """The targets for one block of the vocabulary, with all rows."""

    def values(part: Block, x: Sequence[Rows]) -> tuple[Array, ...]:
        return make(operands.tile(spec, x, w, part, block), part, block)

    if sizes.rows_block >= spec.rows:
        every: Block = (0, spec.rows)
        x = operands.rows(every)
        return tuple(t.contribution(spec, v, x, w) for t, v in zip(targets, values(every, x), strict=True))

    def rows(part: Block, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        x = operands.rows(part)
        return tuple(
            added(spec, target, total, value, x, w, Part(*part))
            for target, total, value in zip(targets, carry, values(part, x), strict=True)
        )

    start = tuple(jnp.zeros(t.shape(spec, spec.rows, block[1]), spec.accumulation_dtype) for t in targets)
    return over(spec.rows, sizes.rows_block, rows, start)


def added(
    spec: CrossEntropySpec,
    target: Target,
    total: Array,
    value: Array,
    x: Sequence[Rows],
    w: Sequence[Array],
    part: Part,
) -> Array:
    """``total`` with what the tile of some rows contributes, which is 0 for those that another block has too.

    A sum over rows that has the vocabulary's length grows part by part: each part of the product is added while it is
    still in a cache, and the whole of the product never exists.  A GPU's products add to what is there.
    """
    axis = target.rows_axis()
    if axis is not None:
        found = target.contribution(spec, value, x, w)
        found = found if part.first is None else cut(total, part.window, axis) + found.astype(total.dtype)
        return stored(total, found, part.window, axis)
    if target.kind != "columns" or on_gpu():
        return total + target.contribution(spec, value, x, w)
    head = spec.heads[target.head]
    axis = 0 if head.vocabulary_major else 1

    def columns(block: Block, total: Array) -> Array:
        found = target.contribution(spec, cut(value, block, 1), x, w)
        return stored(total, cut(total, block, axis) + found, block, axis)

    length = value.shape[1]
    return over(length, min(length, max(1, _PART // head.hidden)), columns, total)
