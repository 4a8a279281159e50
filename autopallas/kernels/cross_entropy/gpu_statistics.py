"""The body of cross-entropy's GPU kernel: statistics of the rows of a tile of logits that is in the registers.

For each of its 64 rows of a tile, a consumer writes one number per statistic.  It writes the logits too, where they are
wanted.

Letters: N rows (tokens), D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from autopallas.kernels.cross_entropy.gpu_logits import Logits, Plan, Vectors, each_tile, padded, paired, value_of
from autopallas.kernels.cross_entropy.spec import CrossEntropySpec, Statistic
from autopallas.kernels.cross_entropy.tiles import Tile
from autopallas.kernels.gpu import APPROXIMATED, call, mosaic, rounded, tile
from autopallas.kernels.gpu_pipeline import CONSUMERS, PART, Ring, grid
from autopallas.kernels.refs import Ref
from autopallas.sites.elementwise import ElementwiseProgram

__all__ = ["plan_of", "statistics_call", "tiles_of_labels"]

Array: TypeAlias = jax.Array

_FEW = 3
"""Statistics beside which the registers hold 256 columns."""
_NONE = np.iinfo(np.int32).max


def plan_of(spec: CrossEntropySpec, statistics: int, kept: bool = False) -> Plan:
    """Few columns where many statistics, side inputs or float16 need registers.

    Logits that are ``kept`` are in shared memory for a tile at a time, so that they are waited for once.
    """
    along = any(side.varies[1] or (side.varies[0] and side.differentiable) for side in spec.sides)
    plain = all(len(s.program.instructions) <= 1 for s in spec.statistics)
    wide = statistics <= _FEW and (plain or spec.logit_dtype != np.float16)
    strip = 64 if wide and not along else 32
    columns = 256 if wide and (not kept or spec.logit_dtype.itemsize == 2) else 128
    columns = max(PART, min(columns, rounded(spec.vocabulary, PART)))
    logits = [((CONSUMERS, columns // PART, PART, PART), spec.logit_dtype)] if kept else []
    return Plan.of(spec, columns, strip, [*logits, *[((CONSUMERS, PART), np.float32)] * statistics])


def statistics_call(
    spec: CrossEntropySpec,
    needed: Sequence[Statistic],
    labels: Mapping[int, int],
    vectors: Vectors,
    rows: int,
    vocabulary: int,
    kept: bool = False,
) -> Callable[..., tuple[Array, ...]]:
    """The kernel as a function of (x [rows, D], w, what :func:`tiles_of_labels` gives where a statistic picks columns,
    what ``vectors.operands`` gives).

    It gives, for each statistic, that of each tile of columns, [tiles, rows]; and last the logits that are kept, [rows,
    vocabulary].

    Args:
      spec: whose statistics.
      needed: as ``statistics.required`` gives them, maxima first.
      labels: where, among the vectors, the canonical labels are, by the position of their side input.
      vectors: the side inputs, and the labels.
      rows, vocabulary: with what they are padded by.
      kept: whether the logits are wanted.
    """
    plan = plan_of(spec, len(needed), kept)
    count = -(-vocabulary // plan.columns)
    dtypes = [np.dtype(np.int32 if s.kind == "argmax" else np.float32) for s in needed]
    types = [jax.ShapeDtypeStruct((count, rows), dtype) for dtype in dtypes]
    buffers = [mosaic().SMEM((CONSUMERS, PART), dtype) for dtype in dtypes]
    if kept:
        types.append(jax.ShapeDtypeStruct((rows, vocabulary), spec.logit_dtype))
        buffers.append(tile(*plan.beside[0]))
    return call(
        partial(_kernel, spec, plan, tuple(needed), dict(labels), vectors),
        name="autopallas_cross_entropy_logits" if kept else "autopallas_cross_entropy_statistics",
        **grid(paired(rows)),
        out_type=tuple(types),
        scratch=[*plan.scratch(spec, rows), *buffers],
        warpgroups=CONSUMERS + 1,
        flops=2 * rows * vocabulary * spec.hidden,
        transcendentals=rows * vocabulary,
        approximate=all(APPROXIMATED.isdisjoint(s.program.primitives) for s in needed),
        bytes_accessed=spec.row_dtype.itemsize * spec.hidden * (rows + vocabulary)
        + 4 * rows * count * len(needed)
        + kept * rows * vocabulary * spec.logit_dtype.itemsize,
    )


def _kernel(
    spec: CrossEntropySpec,
    plan: Plan,
    needed: Sequence[Statistic],
    labels: Mapping[int, int],
    given: Vectors,
    *refs: Ref,
) -> None:
    streamed, picked = [s for s in needed if s.kind != "pick"], [s for s in needed if s.kind == "pick"]
    x, w, *rest = refs
    tables, rest = rest[: bool(picked)], rest[bool(picked) :]
    vectors, rest = rest[: len(given.kinds)], rest[len(given.kinds) :]
    count = len(plan.beside)  # one more than there are statistics, where the logits are kept
    results, (first, second, full, free, *stored) = rest[:count], rest[count:]
    keeping = list(zip(stored[len(needed) :], results[len(needed) :], strict=True))
    plgpu = mosaic()
    warpgroup = lax.axis_index("warpgroup")

    def visit(at: Array, column: Array, logits: Array) -> None:
        rows = given.of_rows(vectors, at)
        start = column * plan.columns
        for place, _ in keeping:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for n in range(plan.columns // PART):
                place.at[warpgroup, n][...] = logits[:, n * PART : (n + 1) * PART].astype(spec.logit_dtype)
        here: Array = tables[0][lax.div(at, jnp.int32(PART)), column] != 0 if picked else jnp.bool_(False)

        def strips(bounded: bool) -> Iterator[_Strip]:
            for c in range(0, plan.columns, plan.strip):
                tile = given.strip(spec, logits[:, c : c + plan.strip], (at, start + c), vectors, rows)
                inside = tile.key < spec.vocabulary if bounded else None
                yield _Strip(tile, inside, start + c, labels)

        def keep(statistics: Sequence[Statistic], found: Sequence[Array]) -> None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for statistic, value in zip(statistics, found, strict=True):
                stored[needed.index(statistic)].at[warpgroup][...] = value

        def stream(bounded: bool) -> None:
            found = [_initial(s) for s in streamed]
            for strip in strips(bounded):
                found = _advanced(streamed, found, strip)
            keep(streamed, found)

        def pick() -> None:
            found = [_initial(s) for s in picked]
            for strip in strips(False):
                found = [before + strip.picked(s) for s, before in zip(picked, found, strict=True)]
            keep(picked, found)

        # What only some tiles need is computed in those alone: bounds, and the logits of labels.
        if spec.vocabulary % plan.columns == 0:
            stream(False)
        else:
            last = start + plan.columns > spec.vocabulary
            pl.when(last)(partial(stream, True))
            pl.when(~last)(partial(stream, False))
        if picked:
            pl.when(here)(pick)
            pl.when(~here)(lambda: keep(picked, [_initial(s) for s in picked]))
        plgpu.commit_smem()
        for place, result in zip(stored[: len(needed)], results[: len(needed)], strict=True):
            plgpu.copy_smem_to_gmem(place.at[warpgroup], result.at[column, pl.ds(at, PART)])
        for place, result in keeping:
            for n in range(plan.columns // PART):
                # What is behind the end of the vocabulary is dropped.
                target = result.at[pl.ds(at, PART), pl.ds(start + n * PART, PART)]
                plgpu.copy_smem_to_gmem(place.at[warpgroup, n], target)

    ring = Ring(first, second, full, free, plan.stages)
    each_tile(Logits(spec, plan, x, w, ring, results[0].shape[0]), visit)


def tiles_of_labels(labels: Sequence[Array], rows: int, columns: int, count: int) -> Array:
    """Whether a tile has the logit of a label, int32 [rows / 64, count].

    A kernel cannot find out by itself: what Mosaic reduces over the rows goes through shared memory that its two
    warpgroups would overwrite for each other.

    Args:
      labels: canonical, [N|1, 1] each.
      rows: N, padded to whole tiles.
      columns: of a tile.
      count: tiles along the vocabulary.
    """
    found = jnp.zeros((rows // PART, count), jnp.bool_)
    for label in labels:
        own = jnp.where(label[:, 0] < 0, -1, label[:, 0] // columns)
        each = padded(own, (rows,)) if own.size > 1 else jnp.broadcast_to(own, (rows,))
        found |= jnp.any(each.reshape(-1, PART, 1) == jnp.arange(count, dtype=jnp.int32), axis=1)
    return found.astype(jnp.int32)


def _initial(statistic: Statistic) -> Array:
    kind = statistic.kind
    dtype = jnp.int32 if kind == "argmax" else jnp.float32
    layout = mosaic().Layout.WGMMA.reduce(1)
    start: Array = mosaic().layout_cast(jnp.full((PART,), -jnp.inf if kind == "max" else 0, dtype), layout)
    return start


def _wide(value: Array, like: Array) -> Array:
    return lax.broadcast_in_dim(value, like.shape, (0,))


class _Strip(NamedTuple):
    """A strip of logits [64, c] of a tile.

    Attributes:
      tile: the logits, and what belongs to them.
      inside: whether a column is one of the vocabulary's; None where all are.
      column: the first.
      labels: where the labels are among the side inputs.
    """

    tile: Tile
    inside: Array | None
    column: Array
    labels: Mapping[int, int]

    def value(self, program: ElementwiseProgram) -> Array:
        return value_of(program, self.tile).astype(jnp.float32)

    def within(self, value: Array, otherwise: float) -> Array:
        """Returns the value, and another behind the end of the vocabulary."""
        return value if self.inside is None else jnp.where(self.inside, value, otherwise)

    def both(self, condition: Array) -> Array:
        return condition if self.inside is None else self.inside & condition

    def picked(self, statistic: Statistic) -> Array:
        """Returns the value in the label's column [64]; 0 where that is elsewhere."""
        assert statistic.label is not None
        chosen = self.tile.key == self.tile.sides[self.labels[statistic.label]]
        return jnp.sum(jnp.where(chosen, self.value(statistic.program), 0), axis=1)


def _advanced(streamed: Sequence[Statistic], before: Sequence[Array], strip: _Strip) -> list[Array]:
    """The statistics [64], but those that pick a column, after one more strip."""
    key = strip.tile.key
    old, new = dict(zip(streamed, before, strict=True)), dict[Statistic, Array]()
    values = {program: strip.value(program) for program in dict.fromkeys(s.program for s in streamed)}
    greatest = {
        s.program: jnp.max(strip.within(values[s.program], -jnp.inf), axis=1) for s in streamed if s.kind == "max"
    }
    for statistic in streamed:
        program = statistic.program
        value, maximum = values[program], Statistic("max", program)
        match statistic.kind:
            case "max":
                found = jnp.maximum(old[statistic], greatest[program])
            case "exp_sum":
                shift = jnp.where(jnp.abs(new[maximum]) < jnp.inf, new[maximum], 0.0)  # Mosaic has no is_finite
                exponentials = jnp.exp(strip.within(value, -jnp.inf) - _wide(shift, key))
                # Not exp(old shift - shift): where all was -inf so far, 0 times its overflow would be NaN.
                found = old[statistic] * jnp.exp(old[maximum] - shift) + jnp.sum(exponentials, axis=1)
            case "sum":
                found = old[statistic] + jnp.sum(strip.within(value, 0), axis=1)
            case "argmax":
                here, past = greatest[program], old[maximum]
                level = _wide(here, key)
                most = strip.both((value == level) | ((level != level) & (value != value)))
                index = jnp.min(jnp.where(most, key, _NONE), axis=1)
                # Where all is -inf so far, the first column has it.
                empty = (here == past) & (old[statistic] == 0) & (strip.column == 0)
                found = jnp.where((here > past) | ((here != here) & (past == past)) | empty, index, old[statistic])
            case "ties":
                here, past, now = greatest[program], old[maximum], new[maximum]
                times = jnp.sum(jnp.where(strip.both(value == _wide(here, key)), 1.0, 0.0), axis=1)
                found = jnp.where(past == now, old[statistic], 0.0) + jnp.where(here == now, times, 0.0)
        new[statistic] = found
    return [new[statistic] for statistic in streamed]
