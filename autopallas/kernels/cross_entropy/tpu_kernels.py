"""The bodies of the TPU kernels of cross-entropy: what happens to one tile of logits.

Each computes the tile's logits from a block of x and one of the weight, and drops them when it is done with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import ArrayLike, DTypeLike

from autopallas.kernels.cross_entropy.spec import CrossEntropySpec, Statistic
from autopallas.kernels.cross_entropy.statistics import finite
from autopallas.kernels.cross_entropy.tile_products import Target
from autopallas.kernels.cross_entropy.tiles import Tile
from autopallas.kernels.cross_entropy.tpu_memory import Packed, Shape, Task
from autopallas.kernels.refs import Number, Ref
from autopallas.kernels.tpu import accumulate, dot
from autopallas.sites.elementwise import ElementwiseProgram
from autopallas.sites.interpret import interpretation

__all__ = ["Reader", "contract", "statistics"]

Array: TypeAlias = jax.Array


@dataclass(frozen=True, slots=True, eq=False)
class Reader:
    """How a kernel sees its tile.

    Attributes:
      spec: what is computed.
      shape: the tile's.
      sides: the side inputs, packed.
    """

    spec: CrossEntropySpec
    shape: Shape
    sides: Packed

    def tile(self, x: Array, w: Array, sides: Sequence[Ref], row: Number, column: Number) -> tuple[Tile, list[Array]]:
        """Returns the tile at block ``row`` and block ``column``, with the spec's side inputs; and what is packed
        behind them.

        Args:
          x: [r, D].
          w: [c, D] or [D, c].
          sides: what the kernel has of the packed arrays.
          row, column: numbers of the blocks.
        """
        spec, (rows, columns) = self.spec, self.shape
        logits = dot(x, w, (1, 1 if spec.vocabulary_major else 0), spec.precision)
        query = row * rows + lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
        key = column * columns + lax.broadcasted_iota(jnp.int32, (1, columns), 1)
        given = self.sides.read(sides)
        count = len(spec.sides)
        return Tile(_rounded(logits, spec.logit_dtype), query, key, tuple(given[:count])), given[count:]

    @property
    def ragged(self) -> tuple[bool, bool]:
        """Whether the last block of rows, and of columns, has less than a tile."""
        return self.spec.rows % self.shape.rows != 0, self.spec.vocabulary % self.shape.columns != 0


def _rounded(logits: Array, dtype: DTypeLike) -> Array:
    """The logits in their dtype.  XLA, which interprets, may drop a mere pair of casts; Mosaic does not."""
    if dtype == jnp.bfloat16 and interpretation():
        logits = lax.reduce_precision(logits, exponent_bits=8, mantissa_bits=7)
    return logits.astype(dtype)


# ---------------------------------------------------------------------- statistics


def statistics(reader: Reader, needed: Sequence[Statistic], labels: Sequence[int], *refs: Ref) -> None:
    """One tile of logits for the statistics of its rows, which stay in VMEM while the vocabulary passes.

    The grid is (blocks of rows, blocks of the vocabulary).

    Args:
      needed: maxima first, as ``statistics.required`` gives them.
      labels: positions of side inputs whose canonical labels are packed behind the side inputs.
      refs: x, w, packed arrays; the statistics, [r, 1] each.
    """
    count = 2 + len(reader.sides.arrays)
    (x, w, *sides), results = refs[:count], refs[count:]
    row, column = pl.program_id(0), pl.program_id(1)

    @pl.when(column == 0)
    def _() -> None:
        for statistic, result in zip(needed, results, strict=True):
            result[...] = jnp.full(result.shape, -jnp.inf if statistic.kind == "max" else 0, result.dtype)

    tile, behind = reader.tile(x[...], w[...], sides, row, column)
    inside = tile.key < reader.spec.vocabulary if reader.ragged[1] else None
    known = dict(zip(labels, behind, strict=True))
    before = [result[...] for result in results]
    for result, value in zip(results, advanced(needed, before, tile, known, inside), strict=True):
        result[...] = value


def advanced(
    needed: Sequence[Statistic], before: Sequence[Array], tile: Tile, labels: dict[int, Array], inside: Array | None
) -> list[Array]:
    """Returns the statistics [r, 1] after one more tile; ``inside`` [1, c] is false behind the vocabulary's end."""
    old = dict(zip(needed, before, strict=True))
    new: dict[Statistic, Array] = {}
    values = {program: _once(tile.value(program, jnp.float32)) for program in dict.fromkeys(s.program for s in needed)}

    def kept(value: Array, otherwise: ArrayLike) -> Array:
        return value if inside is None else jnp.where(inside, value, otherwise)

    def true_inside(value: Array) -> Array:
        return value if inside is None else value & inside  # Mosaic cannot select booleans in some layouts

    greatest = {
        s.program: jnp.max(kept(values[s.program], -jnp.inf), axis=1, keepdims=True) for s in needed if s.kind == "max"
    }
    for statistic in needed:
        program = statistic.program
        value, maximum = values[program], Statistic("max", program)
        match statistic.kind:
            case "max":
                found = jnp.maximum(old[statistic], greatest[program])
            case "exp_sum":
                shift = finite(new[maximum])
                exponentials = jnp.exp(kept(value, -jnp.inf) - shift)
                # Not exp(old shift - shift): where all was -inf so far, 0 times its overflow would be NaN.
                shrunk = old[statistic] * jnp.exp(old[maximum] - shift)
                found = shrunk + jnp.sum(exponentials, axis=1, keepdims=True)
            case "sum":
                found = old[statistic] + jnp.sum(kept(value, 0), axis=1, keepdims=True)
            case "pick":
                assert statistic.label is not None
                chosen = jnp.where(labels[statistic.label] == tile.key, value, 0)
                found = old[statistic] + jnp.sum(chosen, axis=1, keepdims=True)
            case "argmax":
                here, past = greatest[program], old[maximum]
                most = true_inside((value == here) | ((here != here) & (value != value)))
                index = jnp.min(jnp.where(most, tile.key, jnp.iinfo(jnp.int32).max), axis=1, keepdims=True)
                better = (here > past) | ((here != here) & (past == past))
                # Where all is -inf so far, the first column has it.
                found = jnp.where(better, index, old[statistic])
            case "ties":
                here, past, now = greatest[program], old[maximum], new[maximum]
                equal = true_inside(value == here)
                times = jnp.sum(jnp.where(equal, 1.0, 0.0), axis=1, keepdims=True)
                found = jnp.where(past == now, old[statistic], 0) + jnp.where(here == now, times, 0)
        new[statistic] = found
    return [new[statistic] for statistic in needed]


def _once(value: Array) -> Array:
    """The value as the one that all its uses see: XLA, which interprets, would compute it anew, and round it anew."""
    return lax.optimization_barrier(value) if interpretation() else value


# ---------------------------------------------------------------------- products


Make: TypeAlias = Callable[[Tile, Sequence[Array]], Sequence[Array]]
"""The values [r, c] for each target, from the tile and what is packed behind the side inputs."""


def contract(reader: Reader, task: Task, targets: Sequence[Target], make: Make, *refs: Ref) -> None:
    """One tile of logits for sums over the vocabulary (task "rows") or over the rows ("columns").

    The grid is (blocks that results have, blocks that are summed over).

    Args:
      targets: what becomes of the values.
      refs: x, w, packed arrays; the results; a float32 sum for each result that :func:`summed_apart`.
    """
    spec, axis = reader.spec, 0 if task == "columns" else 1
    count = 2 + len(reader.sides.arrays)
    (x, w, *sides), rest = refs[:count], refs[count:]
    results, sums = rest[: len(targets)], iter(rest[len(targets) :])
    step = pl.program_id(1)
    row, column = (step, pl.program_id(0)) if task == "columns" else (pl.program_id(0), step)
    extent, block = ((spec.rows, reader.shape.rows), (spec.vocabulary, reader.shape.columns))[axis]
    # Not what Pallas counts: it remembers a body with the grid of an earlier call.
    last, left = -(-extent // block) - 1, extent % block
    if left:
        # What lies behind the end may be anything, and is multiplied with zeros.
        operand, along = (x, 0) if task == "columns" else (w, 0 if spec.vocabulary_major else 1)

        @pl.when(step == last)
        def _() -> None:
            behind = (slice(left, None), slice(None)) if along == 0 else (slice(None), slice(left, None))
            operand[behind] = jnp.zeros_like(operand[behind])

    tile, extra = reader.tile(x[...], w[...], sides, row, column)
    values = make(tile, extra)
    inside = (tile.query < spec.rows if task == "columns" else tile.key < spec.vocabulary) if left else None
    for target, value, result in zip(targets, values, results, strict=True):
        if target.kind == "side" and all(target.varies):
            result[...] = value.astype(result.dtype)
            continue
        if inside is not None:
            value = jnp.where(inside, value, jnp.zeros_like(value))
        total = next(sums) if summed_apart(target) else result
        accumulate(total, _contribution(spec, target, task, value, x, w), step)
        if total is not result:

            @pl.when(step == last)
            def _(result: Ref = result, total: Ref = total) -> None:
                result[...] = total[...].astype(result.dtype)


def summed_apart(target: Target) -> bool:
    """Whether the sum needs a place of its own, because the result is narrower."""
    return target.kind != "side" and target.dtype != jnp.float32


def _contribution(spec: CrossEntropySpec, target: Target, task: Task, value: Array, x: Ref, w: Ref) -> Array:
    if target.kind == "side":
        return jnp.sum(value.astype(jnp.float32), axis=0 if task == "columns" else 1, keepdims=True)
    operand = w[...] if target.kind == "rows" else x[...]
    if operand.dtype == target.dtype == jnp.bfloat16 and spec.precision is None and not interpretation():
        value = value.astype(operand.dtype)  # as a matrix unit takes what the original's product reads, in any dtype
    if target.kind == "rows":
        return dot(value, operand, (1, 0 if spec.vocabulary_major else 1), spec.precision)
    first, second = (value, operand) if spec.vocabulary_major else (operand, value)
    return dot(first, second, (0, 0), spec.precision)


def values_of(programs: Sequence[ElementwiseProgram]) -> Make:
    """Returns the values of programs that read, behind the side inputs, what is packed behind them."""

    def make(tile: Tile, extra: Sequence[Array]) -> list[Array]:
        tile = tile._replace(sides=(*tile.sides, *extra))
        known = {program: tile.value(program) for program in dict.fromkeys(programs)}
        return [known[program] for program in programs]

    return make
