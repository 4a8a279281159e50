"""Streaming cross-entropy in plain JAX: no N x V array exists, unless one tile is asked to be all of it.

Tiles of logits are computed block by block of the vocabulary, and statistics kept up to date as in online softmax
(Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867).  Products recompute the tiles, except where one tile
spans the vocabulary: then the gradients are formed from the logits that gave the statistics.

A tile is [r, c].  There is no padding: a block that does not divide its axis leaves a last, shorter block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import jax

from autopallas.compat import PyTree
from autopallas.kernels.cross_entropy.block_sizes import BlockSizes
from autopallas.kernels.cross_entropy.gradients import Pull
from autopallas.kernels.cross_entropy.kept_logits import keeps, of_logits, shaped, statistics_and_products, values
from autopallas.kernels.cross_entropy.operands import Gradients, Operands, Residuals, Results
from autopallas.kernels.cross_entropy.spec import CrossEntropySpec
from autopallas.kernels.cross_entropy.statistics import stream
from autopallas.kernels.cross_entropy.tile_products import Target, contracted
from autopallas.kernels.cross_entropy.tiles import Block, Tile, TileOperands, cut_rows, even_block, running_block
from autopallas.numerics.classes import Numerics
from autopallas.sites.device import Device
from autopallas.sites.operation import Supported, Unsupported
from autopallas.sites.spec import Sizes

__all__ = ["GAINS_ON", "NUMERICS", "backward", "forward", "running_sizes", "supports"]

NUMERICS: Numerics = "tolerance"
"""How its results relate to the original's."""

GAINS_ON = {"gpu": ("memory",)}
"""What it gains by platform, if that is not everything: on an H100 and an H200 it had 0.74 to 0.98 of the original's
speed (V 32,000 and 128,256, bfloat16)."""

Array: TypeAlias = jax.Array


def supports(spec: CrossEntropySpec, device: Device) -> Supported | Unsupported:
    """Everything a specification can say, on every platform."""
    return Supported()


def running_sizes(spec: CrossEntropySpec, block_sizes: BlockSizes, device: Device) -> Sizes:
    """Returns the sizes of the tiles that are computed, forward and backward."""
    rows = even_block if keeps(spec, block_sizes) and device.platform != "gpu" else running_block
    return {
        "rows_block": rows(block_sizes.rows_block, spec.rows),
        "vocabulary_block": running_block(block_sizes.vocabulary_block, spec.vocabulary),
    }


def forward(spec: CrossEntropySpec, block_sizes: BlockSizes, operands: Operands) -> Results:
    """Statistics and products come from tiles of logits, one after the other."""
    spec = _computed(spec)
    with jax.named_scope("autopallas_cross_entropy_xla"):
        arrays = TileOperands.of(spec, operands)
        targets = tuple(Target.of_product(p) for p in spec.products)
        programs = tuple(p.program for p in spec.products)
        if not programs:
            return Results(stream(spec, block_sizes, arrays))
        if keeps(spec, block_sizes):
            return statistics_and_products(spec, block_sizes, arrays, of_logits(spec, arrays))
        statistics = stream(spec, block_sizes, arrays) if spec.statistics else ()
        finished = arrays.finished(spec, (0, spec.rows), statistics)

        def make(tile: Tile, rows: Block, columns: Block) -> tuple[Array, ...]:
            return values(tile._replace(sides=(*tile.sides, *cut_rows(finished, rows))), programs)

        return Results(statistics, shaped(spec, contracted(spec, block_sizes, arrays, targets, make)))


def _computed(spec: CrossEntropySpec) -> CrossEntropySpec:
    """What is computed: on CPUs without the roundings that XLA leaves out, and with those that it would leave out in
    one place and not in another."""
    return (spec.unrounded() if Device.current().platform == "cpu" else spec).honoured()


def backward(
    spec: CrossEntropySpec,
    block_sizes: BlockSizes,
    operands: Operands,
    residuals: Residuals,
    cotangents: Sequence[Array | None],
    wanted: Sequence[bool],
) -> Gradients:
    """The gradients of the statistics come from tiles of logits, which are computed again."""
    rounded, spec = spec, _computed(spec)
    targets = Target.of_gradients(spec, wanted)
    heads = Target.of_heads(spec, wanted)
    floating = [position - 2 for position in (*targets, *heads) if position >= 2]
    if not targets and not heads:
        return Gradients.at({}, len(spec.sides))
    with jax.named_scope("autopallas_cross_entropy_xla_backward"):
        arrays = TileOperands.of(spec, operands)
        pull = Pull.of(
            spec, arrays.labels, residuals.statistics, cotangents, lambda other: stream(other, block_sizes, arrays)
        )

        def make(tile: Tile, rows: Block, columns: Block) -> tuple[Array, ...]:
            dscore, dsides = pull.tile(tile, rows, floating)
            alone = len(floating) - len(heads)
            # A gradient of logits has their dtype, whatever reads them.
            own = (dside.astype(rounded.sides[n - 2].dtype) for dside, n in zip(dsides[alone:], heads, strict=True))
            of_heads = (dside for dside in own for _ in range(2))
            dscore = dscore.astype(rounded.logit_dtype)
            return (*((dscore,) * (len(targets) - alone)), *dsides[:alone], *of_heads)

        every = (*targets.values(), *(target for pair in heads.values() for target in pair))
        results = contracted(spec, block_sizes, arrays, every, make)
    found: dict[int, PyTree] = dict(zip(targets, results, strict=False))
    of_heads = results[len(targets) :]
    found |= dict(zip(heads, zip(of_heads[::2], of_heads[1::2], strict=True), strict=True))
    return Gradients.at(found, len(spec.sides))
