"""Cross-entropy for Mosaic GPU: tiles of logits that never leave the registers of a Hopper GPU.

One kernel gives all statistics in one pass: for each tile of logits one number per row, merged outside as in online
softmax (Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867).  Products, and gradients of the statistics, go
part by part over the vocabulary: another kernel recomputes the part's logits and stores what the programs make of them,
in the dtype of the product, and the vendor's library multiplies that with x and the weight.

Letters: N rows (tokens), D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from autopallas.kernels.cross_entropy import xla
from autopallas.kernels.cross_entropy.block_sizes import WHOLE, BlockSizes
from autopallas.kernels.cross_entropy.gradients import Pull
from autopallas.kernels.cross_entropy.kept_logits import keeps, statistics_and_products
from autopallas.kernels.cross_entropy.operands import Gradients, Operands, Residuals, Results
from autopallas.kernels.cross_entropy.spec import CrossEntropySpec, SideSpec, Statistic
from autopallas.kernels.cross_entropy.statistics import finite, required
from autopallas.kernels.cross_entropy.tile_products import Target, contracted
from autopallas.kernels.cross_entropy.tiles import Block, Tile, TileOperands, cut, cut_rows, running_block
from autopallas.kernels.gpu import reason_against, reason_against_programs, rounded
from autopallas.numerics.classes import Numerics
from autopallas.sites.device import Device
from autopallas.sites.elementwise import ElementwiseProgram, Index
from autopallas.sites.operation import Supported, Unsupported
from autopallas.sites.spec import Sizes

if TYPE_CHECKING:
    from autopallas.kernels.cross_entropy.gpu_logits import Vectors

__all__ = ["NUMERICS", "backward", "candidates", "forward", "running_sizes", "supports"]

NUMERICS: Numerics = "tolerance"
"""How its results relate to the original's."""

Array: TypeAlias = jax.Array

_FEWEST_ROWS, _MOST_ROWS = 256, 8192
"""Rows whose logits are kept: two tiles, so that two blocks load the weight together, to a few GB of logits."""
_WIDE = 1536
"""Hidden size from which on a product takes longer than the reading and writing that takes its place."""
_WIDEST = 256
"""Columns of a tile of logits at most; the last one of a part of the vocabulary may go on behind its end."""


def supports(spec: CrossEntropySpec, device: Device) -> Supported | Unsupported:
    """bfloat16 or float16 on H100s, programs that Mosaic GPU has, and side inputs that do not fill tiles.

    Products whose programs it lacks are left to XLA, part by part, if there are statistics.
    """
    if len(spec.heads) > 1:
        return Unsupported("it computes the logits of one head, and the loss reads those of several")
    if any(product.kind == "values" for product in spec.products):
        return Unsupported("the program asks for an array of the logits' size, such as the gradient of soft labels")
    programs = [s.program for s in spec.statistics] or [p.program for p in spec.products]
    held = [
        spec.logit_dtype,
        spec.accumulation_dtype,
        *(s.dtype for s in spec.sides),
        *(p.dtype for p in spec.products),
    ]
    answer = reason_against(device, [spec.row_dtype, spec.weight_dtype], programs, held)
    if answer is not None:
        return answer
    if any(all(side.varies) for side in spec.sides):
        return Unsupported("a side input varies over rows and vocabulary, as soft labels do")
    return Supported()


def candidates(spec: CrossEntropySpec, device: Device) -> tuple[BlockSizes, ...]:
    """Returns what a search should try, best guess first.

    Products and gradients compute the logits again for a part of the vocabulary; or where there are statistics too, a
    block of rows keeps them.  Those of as many rows as the hidden size take what half of the weight's gradient does in
    float32, of which the other half is where the result will be.  Beside its three products such a block reads and
    writes three times as many bytes as it has logits of 32 bits, which takes as long as the fourth product for
    D = 1,450.
    """
    again = [BlockSizes(WHOLE, part).fitted(spec) for part in (8192, 16384, 4096)]
    if not (spec.statistics and spec.products):
        return tuple(dict.fromkeys(again))
    rows = max(_FEWEST_ROWS, min(spec.hidden, _MOST_ROWS) // _FEWEST_ROWS * _FEWEST_ROWS)
    kept = [BlockSizes(min(n, spec.rows), WHOLE) for n in (rows, 2 * rows)]
    first, second = (kept, again) if spec.hidden >= _WIDE else (again, kept)
    return tuple(dict.fromkeys((first[0], second[0], first[1], second[1], *again)))


def running_sizes(spec: CrossEntropySpec, block_sizes: BlockSizes, device: Device) -> Sizes:
    """Of how many rows all logits are kept; or of all rows, for which part of the vocabulary the values are stored.

    The kernels' own tiles follow from the registers alone.
    """
    from autopallas.kernels.cross_entropy.gpu_logits import ALIGNED, ROWS

    if keeps(spec, block_sizes):
        rows = running_block(block_sizes.rows_block, spec.rows, ROWS if _exact(spec) else 1)
        return {"rows_block": rows, "vocabulary_block": spec.vocabulary}
    if reason_against_programs([p.program for p in spec.products]) is not None:
        return xla.running_sizes(spec, block_sizes.fitted(spec), device)
    columns = running_block(_part(spec, block_sizes).vocabulary_block, spec.vocabulary, ALIGNED)
    return {"rows_block": spec.rows, "vocabulary_block": columns}


def forward(spec: CrossEntropySpec, block_sizes: BlockSizes, operands: Operands) -> Results:
    """One kernel gives the statistics, and another one the values of which the library makes the products.

    With a block of the whole vocabulary the first one stores the logits too, for a block of rows at a time.
    """
    if keeps(spec, block_sizes):
        return _kept(spec, block_sizes, operands) if _exact(spec) else xla.forward(spec, block_sizes, operands)
    found = _statistics(spec, operands) if spec.statistics else ()
    if not spec.products:
        return Results(found)
    finished = TileOperands.of(spec, operands).finished(spec, (0, spec.rows), found)
    more = tuple(SideSpec(f.dtype, (f.shape[0] != 1, False)) for f in finished)
    # The programs of products read the finished values behind the side inputs, of which they are then some.
    rest = replace(spec, statistics=(), finish=(), sides=(*spec.sides, *more))
    given = operands._replace(sides=(*operands.sides, *finished))
    programs = [p.program for p in spec.products]
    if reason_against_programs(programs) is not None:
        return Results(found, xla.forward(rest, block_sizes.fitted(spec), given).products)
    targets = [Target.of_product(p) for p in spec.products]
    products = _contracted(rest, block_sizes, given, targets, programs)
    shaped = (a[0] if p.kind == "column_sum" else a for a, p in zip(products, spec.products, strict=True))
    return Results(found, tuple(shaped))


def backward(
    spec: CrossEntropySpec,
    block_sizes: BlockSizes,
    operands: Operands,
    residuals: Residuals,
    cotangents: Sequence[Array | None],
    wanted: Sequence[bool],
) -> Gradients:
    """The kernel of the values gives what the library makes the gradients of."""
    targets = Target.of_gradients(spec, wanted)
    if not targets:
        return Gradients.at({}, len(spec.sides))
    labels = TileOperands.of(spec, operands).labels

    def compute(other: CrossEntropySpec) -> tuple[Array, ...]:
        return _statistics(other, operands)

    pull = Pull.of(spec, labels, residuals.statistics, cotangents, compute)
    programs = [pull.program(position - 2 if position >= 2 else None) for position in targets]
    if not pull.terms or reason_against_programs(programs) is not None:
        return xla.backward(spec, block_sizes.fitted(spec), operands, residuals, cotangents, wanted)
    given = operands._replace(sides=(*operands.sides, *pull.arrays()))
    results = _contracted(spec, block_sizes, given, [*targets.values()], programs)
    return Gradients.at(dict(zip(targets, results, strict=True)), len(spec.sides))


def _statistics(spec: CrossEntropySpec, operands: Operands) -> tuple[Array, ...]:
    """The spec's statistics, [N] each."""
    return _statistics_and_logits(spec, operands, kept=False)[0]


def _statistics_and_logits(
    spec: CrossEntropySpec, operands: Operands, kept: bool = True
) -> tuple[tuple[Array, ...], Array | None]:
    """The spec's statistics, [N] each, and the logits [N, V] if they are kept."""
    from autopallas.kernels.cross_entropy.gpu_logits import Vectors
    from autopallas.kernels.cross_entropy.gpu_statistics import plan_of, statistics_call, tiles_of_labels

    needed = required(spec.statistics)
    labels = TileOperands.of(spec, operands).labels
    given = operands._replace(sides=(*operands.sides, *labels.values()))
    vectors = Vectors.of(given.side_arrays)
    x, w, beside = _whole(spec, vectors, given)
    places = {position: len(operands.sides) + n for n, position in enumerate(labels)}
    columns = w.shape[0 if spec.vocabulary_major else 1]
    kernel = statistics_call(spec, needed, places, vectors, x.shape[0], columns, kept)
    tile = plan_of(spec, len(needed), kept).columns
    tables = [tiles_of_labels([*labels.values()], x.shape[0], tile, -(-columns // tile))] if labels else []
    *found, last = kernel(x, w, *tables, *beside)
    parts = dict(zip(needed, found if kept else [*found, last], strict=True))
    statistics = tuple(_merged(s, parts)[: spec.rows] for s in spec.statistics)
    return statistics, last[: spec.rows, : spec.vocabulary] if kept else None


def _kept(spec: CrossEntropySpec, sizes: BlockSizes, operands: Operands) -> Results:
    """Logits are computed once: the kernel of the statistics stores those of some rows, and all that follows is the
    library's."""
    from autopallas.kernels.cross_entropy.gpu_logits import ALIGNED, ROWS, padded

    arrays = TileOperands.of(spec, operands)
    w = padded(operands.w, tuple(rounded(n, ALIGNED) for n in operands.w.shape))

    def found(tile: Tile, rows: Block) -> tuple[Array, tuple[Array, ...]]:
        # The tile's own logits are not read, so that nothing computes them.
        own = replace(spec, rows=rows[1], finish=(), products=())
        sides = cut_rows(operands.side_arrays, rows)
        statistics, logits = _statistics_and_logits(own, Operands(cut(operands.x, rows, 0), w, sides))
        assert logits is not None
        return logits, statistics

    return statistics_and_products(spec.honoured(), sizes, arrays, found, ROWS)


def _exact(spec: CrossEntropySpec) -> bool:
    """Whether the library, which makes the values of products from logits that were stored, finds in them what the
    kernel found: the number of a row, and where a program of the logits is greatest."""
    counts = any(isinstance(i, Index) and i.axis == "query" for s in spec.statistics for i in s.program.inputs)
    return not counts and not any(s.kind in ("argmax", "ties") for s in spec.statistics)


def _contracted(
    spec: CrossEntropySpec,
    sizes: BlockSizes,
    operands: Operands,
    targets: Sequence[Target],
    programs: Sequence[ElementwiseProgram],
) -> tuple[Array, ...]:
    """The targets of the values of programs, all rows and a part of the vocabulary at a time.

    Args:
      spec: of the logits.
      sizes: whose vocabulary block is the part.
      operands: with all that the programs read among the sides, none of which varies over both axes.
      targets, programs: one of each.
    """
    from autopallas.kernels.cross_entropy.gpu_logits import ALIGNED, Vectors
    from autopallas.kernels.cross_entropy.gpu_values import values_call

    vectors = Vectors.of(operands.side_arrays)
    x, w, beside = _whole(spec, vectors, operands)
    stored = [(p, p.dtype) for p in programs]
    different = tuple(dict.fromkeys(stored))

    def make(tile: Tile, rows: Block, columns: Block) -> tuple[Array, ...]:
        # The tile's own logits are not read, so that nothing computes them.
        kernel = values_call(spec, different, vectors, columns[1])
        start = jnp.full((1,), columns[0], np.int32)
        values = dict(zip(different, kernel(start, x, w, *beside), strict=True))
        return tuple(values[each][: spec.rows, : columns[1]] for each in stored)

    own = operands._replace(sides=operands.sides[: len(spec.sides)])
    return contracted(spec, _part(spec, sizes), TileOperands.of(spec, own), targets, make, ALIGNED)


def _part(spec: CrossEntropySpec, sizes: BlockSizes) -> BlockSizes:
    """All rows, and the part of the vocabulary that is computed at a time."""
    from autopallas.kernels.cross_entropy.gpu_logits import ALIGNED

    return BlockSizes(spec.rows, min(spec.vocabulary, rounded(sizes.vocabulary_block, ALIGNED)))


def _whole(spec: CrossEntropySpec, vectors: Vectors, operands: Operands) -> tuple[Array, Array, list[Array]]:
    """A kernel's operands are whole tiles, padded: what is behind the end of main memory is not to be read."""
    from autopallas.kernels.cross_entropy.gpu_logits import ALIGNED, ROWS, padded

    rows = rounded(spec.rows, ROWS)
    beside = vectors.operands(operands.side_arrays, rows, rounded(spec.vocabulary, _WIDEST) + _WIDEST)
    x = padded(operands.x, (rows, rounded(spec.hidden, ALIGNED)))
    return x, padded(operands.w, tuple(rounded(n, ALIGNED) for n in operands.w.shape)), beside


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
