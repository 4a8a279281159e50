"""The body of cross-entropy's GPU kernel: statistics of the rows of a tile of logits that never leaves the registers.

For each of its 64 rows of a tile, a consumer writes one number per statistic.

Letters: N rows (tokens), D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from autopallas.kernels.cross_entropy.gpu_logits import Logits, Plan, Vectors, each_tile
from autopallas.kernels.cross_entropy.spec import CrossEntropySpec, Statistic
from autopallas.kernels.cross_entropy.tiles import Tile
from autopallas.kernels.gpu import call, mosaic, processors
from autopallas.kernels.gpu_pipeline import CONSUMERS, PART, Ring
from autopallas.kernels.refs import Ref
from autopallas.sites.device import Device
from autopallas.sites.elementwise import ElementwiseProgram

__all__ = ["plan_of", "statistics_call"]

Array: TypeAlias = jax.Array

_FEW = 3
"""Statistics beside which the registers hold 256 columns."""
_NONE = np.iinfo(np.int32).max


def plan_of(spec: CrossEntropySpec, statistics: int) -> Plan:
    """Few columns where many statistics, side inputs or float16 need registers."""
    along = any(side.varies[1] or (side.varies[0] and side.differentiable) for side in spec.sides)
    plain = all(len(s.program.instructions) <= 1 for s in spec.statistics)
    wide = statistics <= _FEW and (plain or spec.logit_dtype != np.float16)
    strip = 64 if wide and not along else 32
    return Plan.of(spec, 256 if wide else 128, strip, [((CONSUMERS, PART), np.float32)] * statistics)


def statistics_call(
    spec: CrossEntropySpec,
    needed: Sequence[Statistic],
    labels: Mapping[int, int],
    vectors: Vectors,
    rows: int,
    vocabulary: int,
) -> Callable[..., tuple[Array, ...]]:
    """The kernel as a function of (x [rows, D], w, what ``vectors.operands`` gives).

    It gives, for each statistic, that of each tile of columns: [tiles, rows].

    Args:
      spec: whose statistics.
      needed: as ``statistics.required`` gives them, maxima first.
      labels: where, among the vectors, the canonical labels are, by the position of their side input.
      vectors: the side inputs, and the labels.
      rows, vocabulary: with what they are padded by.
    """
    plan = plan_of(spec, len(needed))
    count = -(-vocabulary // plan.columns)
    dtypes = [np.dtype(np.int32 if s.kind == "argmax" else np.float32) for s in needed]
    return call(
        partial(_kernel, spec, plan, tuple(needed), dict(labels), vectors),
        name="autopallas_cross_entropy_statistics",
        grid={"block": processors(Device.current())},
        out_type=tuple(jax.ShapeDtypeStruct((count, rows), dtype) for dtype in dtypes),
        scratch=[*plan.scratch(spec), *(mosaic().SMEM((CONSUMERS, PART), dtype) for dtype in dtypes)],
        warpgroups=CONSUMERS + 1,
        flops=2 * rows * vocabulary * spec.hidden,
        transcendentals=rows * vocabulary,
        bytes_accessed=spec.row_dtype.itemsize * spec.hidden * (rows + vocabulary) + 4 * rows * count * len(needed),
    )


def _kernel(
    spec: CrossEntropySpec,
    plan: Plan,
    needed: Sequence[Statistic],
    labels: Mapping[int, int],
    given: Vectors,
    *refs: Ref,
) -> None:
    count = 2 + len(given.kinds)
    (x, w, *vectors), rest = refs[:count], refs[count:]
    results, (first, second, full, free, *stored) = rest[: len(needed)], rest[len(needed) :]
    plgpu = mosaic()
    warpgroup = lax.axis_index("warpgroup")

    def visit(at: Array, column: Array, logits: Array) -> None:
        found = [_initial(s) for s in needed]
        rows = given.of_rows(vectors, at)
        for c in range(0, plan.columns, plan.strip):
            start = column * plan.columns + c
            strip = given.strip(spec, logits[:, c : c + plan.strip], (at, start), vectors, rows)
            found = _advanced(spec, needed, found, strip, start, labels)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for value, place in zip(found, stored, strict=True):
            place.at[warpgroup][...] = value
        plgpu.commit_smem()
        for place, result in zip(stored, results, strict=True):
            plgpu.copy_smem_to_gmem(place.at[warpgroup], result.at[column, pl.ds(at, PART)])

    ring = Ring(first, second, full, free, plan.stages)
    each_tile(Logits(spec, plan, x, w, ring, results[0].shape[0]), visit)


def _initial(statistic: Statistic) -> Array:
    kind = statistic.kind
    dtype = jnp.int32 if kind == "argmax" else jnp.float32
    layout = mosaic().Layout.WGMMA.reduce(1)
    start: Array = mosaic().layout_cast(jnp.full((PART,), -jnp.inf if kind == "max" else 0, dtype), layout)
    return start


def _wide(value: Array, like: Array) -> Array:
    return lax.broadcast_in_dim(value, like.shape, (0,))


def _advanced(
    spec: CrossEntropySpec,
    needed: Sequence[Statistic],
    before: Sequence[Array],
    strip: Tile,
    column: Array,
    labels: Mapping[int, int],
) -> list[Array]:
    """The statistics [64] after one more strip of logits [64, c], whose first is in this column."""
    key = strip.key
    inside = key < spec.vocabulary
    old, new = dict(zip(needed, before, strict=True)), dict[Statistic, Array]()

    def value_of(program: ElementwiseProgram) -> Array:
        return program.evaluate(strip.score, strip.query, key, strip.sides).astype(jnp.float32)

    values = {program: value_of(program) for program in dict.fromkeys(s.program for s in needed)}
    greatest = {
        s.program: jnp.max(jnp.where(inside, values[s.program], -jnp.inf), axis=1) for s in needed if s.kind == "max"
    }
    for statistic in needed:
        program = statistic.program
        value, maximum = values[program], Statistic("max", program)
        match statistic.kind:
            case "max":
                found = jnp.maximum(old[statistic], greatest[program])
            case "exp_sum":
                shift = jnp.where(jnp.abs(new[maximum]) < jnp.inf, new[maximum], 0.0)  # Mosaic has no is_finite
                exponentials = jnp.exp(jnp.where(inside, value, -jnp.inf) - _wide(shift, key))
                # Not exp(old shift - shift): where all was -inf so far, 0 times its overflow would be NaN.
                found = old[statistic] * jnp.exp(old[maximum] - shift) + jnp.sum(exponentials, axis=1)
            case "sum":
                found = old[statistic] + jnp.sum(jnp.where(inside, value, 0), axis=1)
            case "pick":
                assert statistic.label is not None
                chosen = key == strip.sides[labels[statistic.label]]
                found = old[statistic] + jnp.sum(jnp.where(chosen, value, 0), axis=1)
            case "argmax":
                here, past = greatest[program], old[maximum]
                level = _wide(here, key)
                most = inside & ((value == level) | ((level != level) & (value != value)))
                index = jnp.min(jnp.where(most, key, _NONE), axis=1)
                # Where all is -inf so far, the first column has it.
                empty = (here == past) & (old[statistic] == 0) & (column == 0)
                found = jnp.where((here > past) | ((here != here) & (past == past)) | empty, index, old[statistic])
            case "ties":
                here, past, now = greatest[program], old[maximum], new[maximum]
                times = jnp.sum(jnp.where(inside & (value == _wide(here, key)), 1.0, 0.0), axis=1)
                found = jnp.where(past == now, old[statistic], 0.0) + jnp.where(here == now, times, 0.0)
        new[statistic] = found
    return [new[statistic] for statistic in needed]
