"""Row statistics of the values of programs on tiles of logits, tile after tile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from autopallas.kernels.cross_entropy.block_sizes import BlockSizes
from autopallas.kernels.cross_entropy.spec import CrossEntropySpec, Statistic
from autopallas.kernels.cross_entropy.tiles import Block, Tile, TileOperands, cut_row, cut_rows, over, stored
from autopallas.sites.elementwise import ElementwiseProgram

__all__ = ["advanced", "finite", "initial", "required", "stream"]

Array: TypeAlias = jax.Array


def required(statistics: Sequence[Statistic]) -> tuple[Statistic, ...]:
    """Returns the statistics, each once, and the maxima that their computation needs, in an order that has maxima
    first."""
    maxima = [Statistic("max", s.program) for s in statistics if s.kind in ("max", "exp_sum", "argmax", "ties")]
    return tuple(dict.fromkeys((*maxima, *statistics)))


def initial(statistics: Sequence[Statistic], rows: int, dtype: DTypeLike) -> tuple[Array, ...]:
    """Returns the statistics of no columns at all, [rows] each."""

    def of(statistic: Statistic) -> Array:
        if statistic.kind == "max":
            return jnp.full((rows,), -jnp.inf, dtype)
        return jnp.zeros((rows,), jnp.int32 if statistic.kind == "argmax" else dtype)

    return tuple(map(of, statistics))


def finite(maximum: Array) -> Array:
    """Returns what an exponential is shifted by."""
    return jnp.where(jnp.isfinite(maximum), maximum, 0)


def advanced(
    statistics: Sequence[Statistic], before: Sequence[Array], tile: Tile, labels: dict[int, Array], dtype: DTypeLike
) -> tuple[Array, ...]:
    """Returns the statistics after one more tile, whose columns come behind those before.

    Args:
      statistics: what :func:`required` gives.
      before: their values so far, [r] each.
      tile: the tile.
      labels: the canonical labels [r|1, 1] by the position of their side input.
      dtype: of all statistics but argmax.
    """
    old = dict(zip(statistics, before, strict=True))
    new: dict[Statistic, Array] = {}
    values: dict[ElementwiseProgram, Array] = {}
    compared = {s.program for s in statistics if s.kind in ("argmax", "ties")}
    for statistic in statistics:
        program = statistic.program
        if program not in values and statistic.kind != "pick":
            values[program] = tile.value(program, dtype)
            if program in compared:
                new |= _greatest(program, statistics, old, values[program], tile)
        if statistic in new:
            continue
        maximum = Statistic("max", program)
        match statistic.kind:
            case "max":
                found = jnp.maximum(old[statistic], jnp.max(values[program], axis=1))
            case "exp_sum":
                shift = finite(new[maximum])
                # Not exp(old shift - shift): where all was -inf so far, 0 times its overflow would be NaN.
                shrunk = old[statistic] * jnp.exp(old[maximum] - shift)
                found = shrunk + jnp.sum(jnp.exp(values[program] - shift[:, None]), axis=1)
            case "sum":
                found = old[statistic] + jnp.sum(values[program], axis=1)
            case "pick":
                assert statistic.label is not None
                found = _picked(old[statistic], statistic, tile, labels[statistic.label], dtype)
        new[statistic] = found
    return tuple(new[statistic] for statistic in statistics)


def stream(spec: CrossEntropySpec, sizes: BlockSizes, operands: TileOperands) -> tuple[Array, ...]:
    """Returns the spec's statistics: the vocabulary outside, so that each part of the weight is read once."""
    needed = required(spec.statistics)
    dtype = spec.accumulation_dtype

    def columns(block: Block, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        w = operands.columns(block)

        def rows(part: Block, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            tile = operands.tile(spec, operands.rows(part), w, part, block)
            labels = {n: cut_row(label, part) for n, label in operands.labels.items()}
            found = advanced(needed, cut_rows(carry, part), tile, labels, dtype)
            return tuple(stored(c, f, part, 0) for c, f in zip(carry, found, strict=True))

        return over(spec.rows, sizes.rows_block, rows, carry)

    final = over(spec.vocabulary, sizes.vocabulary_block, columns, initial(needed, spec.rows, dtype))
    found = dict(zip(needed, final, strict=True))
    return tuple(found[s] for s in spec.statistics)


def _greatest(
    program: ElementwiseProgram,
    statistics: Sequence[Statistic],
    old: Mapping[Statistic, Array],
    values: Array,
    tile: Tile,
) -> dict[Statistic, Array]:
    """The maximum of a program's values, where it is, and how often, in one reduction.

    A comparison of the values with their maximum would not do: XLA computes what is cheap anew for each use, and one
    of them may multiply and add with one rounding where the other has two.
    """
    of_values = {
        Statistic("max", program): (values, -jnp.inf),
        Statistic("argmax", program): (jnp.broadcast_to(tile.key, values.shape), jnp.iinfo(jnp.int32).max),
        Statistic("ties", program): (jnp.ones_like(values), 0),
    }
    asked = [s for s in of_values if s in statistics]

    def merged(before: Sequence[Array], after: Sequence[Array]) -> tuple[Array, ...]:
        maximum = jnp.maximum(before[0], after[0])
        found = [maximum]
        for statistic, a, b in zip(asked[1:], before[1:], after[1:], strict=True):
            if statistic.kind == "ties":
                found.append(jnp.where(before[0] == maximum, a, 0) + jnp.where(after[0] == maximum, b, 0))
            else:  # a NaN is the maximum, though nothing equals it
                a, b = (
                    jnp.where((m == maximum) | (m != m), x, jnp.iinfo(jnp.int32).max)
                    for m, x in ((before[0], a), (after[0], b))
                )
                found.append(jnp.minimum(a, b))
        return tuple(found)

    operands = [of_values[s][0] for s in asked]
    starts = [jnp.asarray(of_values[s][1], x.dtype) for s, x in zip(asked, operands, strict=True)]
    here = lax.reduce(operands, starts, merged, (1,))
    return dict(zip(asked, merged([old[s] for s in asked], here), strict=True))


def _picked(before: Array, statistic: Statistic, tile: Tile, label: Array, dtype: DTypeLike) -> Array:
    rows, columns = tile.score.shape
    local = jnp.broadcast_to(label, (rows, 1)) - tile.key[0, 0]
    inside = (label >= 0) & (local >= 0) & (local < columns)
    value = tile.picked(jnp.clip(local, 0, columns - 1)).value(statistic.program, dtype)
    return jnp.where(inside, value, before[:, None])[:, 0]
