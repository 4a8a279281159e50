"""The body of cross-entropy's GPU kernel: statistics of the rows of a tile of logits that never leaves the registers.

The logits are a matrix product through the pipeline of :mod:`autopallas.kernels.gpu_pipeline`.  Each of the two
consumers has 64 rows of the tile, looks at them strip by strip, and writes one number per row and statistic.

Letters: N rows (tokens), D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from autopallas.kernels.cross_entropy.spec import CrossEntropySpec, Statistic
from autopallas.kernels.gpu import SHARED_MEMORY, call, mosaic, processors, shared_bytes, tile
from autopallas.kernels.gpu_pipeline import CONSUMERS, PART, REGISTERS, Ring, placed, steps_of, tiles
from autopallas.kernels.implementation import Device
from autopallas.program import Program

__all__ = ["ROWS", "Plan", "statistics_call"]

Array: TypeAlias = jax.Array
Ref: TypeAlias = Any

ROWS = CONSUMERS * PART
_FEW = 3
"""Statistics beside which the registers hold 256 columns."""
_NONE = np.iinfo(np.int32).max


class Plan(NamedTuple):
    """The tile of logits and the pipeline.

    Attributes:
      columns: of the tile, positions in the vocabulary.
      stages: how many steps of 64 along D the loads are ahead.
      strip: columns that are looked at together.
    """

    columns: int
    stages: int
    strip: int

    @staticmethod
    def of(spec: CrossEntropySpec, columns: int, statistics: int) -> Plan:
        """As many stages as fit into shared memory, 6 at most; few columns where many statistics need registers."""
        wide = max(PART, min(256 if statistics <= _FEW else 128, -(-columns // PART) * PART))
        strip = 64 if statistics <= _FEW else 32
        for stages in range(min(6, max(2, -(-spec.hidden // PART))), 2, -1):
            if (plan := Plan(wide, stages, strip)).shared_bytes(spec, statistics) <= SHARED_MEMORY:
                return plan
        return Plan(wide, 2, strip)

    def shapes(self, spec: CrossEntropySpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of the stages of x and of the weight."""
        w = (self.columns, PART) if spec.vocabulary_major else (PART, self.columns)
        return (self.stages, CONSUMERS, PART, PART), (self.stages, *w)

    def shared_bytes(self, spec: CrossEntropySpec, statistics: int) -> int:
        """Of one block."""
        x, w = self.shapes(spec)
        parts: list[tuple[tuple[int, ...], Any]] = [(x, spec.row_dtype), (w, spec.weight_dtype)]
        parts += [((CONSUMERS, PART), np.float32)] * statistics
        return shared_bytes(parts, barriers=2 * self.stages)


def statistics_call(
    spec: CrossEntropySpec, plan: Plan, needed: Sequence[Statistic], labels: Sequence[int], rows: int, vocabulary: int
) -> Callable[..., tuple[Array, ...]]:
    """The kernel as a function of (x [rows, D], w, one array [rows] or [1] per side input, one [rows] per label).

    It gives, for each statistic, that of each tile of columns: [tiles, rows].

    Args:
      needed: as ``statistics.required`` gives them, maxima first.
      labels: the positions of the side inputs whose canonical labels come last.
      rows, vocabulary: with what they are padded by.
    """
    count = -(-vocabulary // plan.columns)
    dtypes = [np.dtype(np.int32 if s.kind == "argmax" else np.float32) for s in needed]
    plgpu = mosaic()
    x, w = plan.shapes(spec)
    arrivals = CONSUMERS + 1
    return call(
        partial(_kernel, spec, plan, tuple(needed), tuple(labels)),
        name="autopallas_cross_entropy_statistics",
        grid={"block": processors(Device.current())},
        out_type=tuple(jax.ShapeDtypeStruct((count, rows), dtype) for dtype in dtypes),
        scratch=[
            tile(x, spec.row_dtype),
            tile(w, spec.weight_dtype),
            plgpu.Barrier(num_arrivals=arrivals, num_barriers=plan.stages),
            plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=plan.stages),
            *(plgpu.SMEM((CONSUMERS, PART), dtype) for dtype in dtypes),
        ],
        warpgroups=CONSUMERS + 1,
        flops=2 * rows * vocabulary * spec.hidden,
        transcendentals=rows * vocabulary,
        bytes_accessed=spec.row_dtype.itemsize * spec.hidden * (rows + vocabulary) + 4 * rows * count * len(needed),
    )


def _kernel(spec: CrossEntropySpec, plan: Plan, needed: Sequence[Statistic], labels: Sequence[int], *refs: Ref) -> None:
    given = 2 + len(spec.sides) + len(labels)
    (x, w, *vectors), rest = refs[:given], refs[given:]
    results, (first, second, full, free, *stored) = rest[: len(needed)], rest[len(needed) :]
    plgpu = mosaic()
    ring = Ring(first, second, full, free, plan.stages)
    row_tiles, column_tiles = -(-x.shape[0] // ROWS), results[0].shape[0]
    steps = -(-x.shape[1] // PART)
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == CONSUMERS)
    def produce() -> None:
        plgpu.set_max_registers(REGISTERS[1], action="decrease")

        def load_tile(index: Array, step: Array) -> Array:
            row, column = placed(index, row_tiles, column_tiles)

            def load(k: Array, step: Array) -> Array:
                def copies(slot: Array, barrier: Ref) -> None:
                    along, across = pl.ds(k * PART, PART), pl.ds(column * plan.columns, plan.columns)
                    for i in range(CONSUMERS):
                        part = pl.ds(row * ROWS + i * PART, PART)
                        plgpu.copy_gmem_to_smem(x.at[part, along], first.at[slot, i], barrier)
                    block = (across, along) if spec.vocabulary_major else (along, across)
                    plgpu.copy_gmem_to_smem(w.at[block], second.at[slot], barrier)

                ring.load(step, copies)
                return jnp.add(step, 1)

            return steps_of(0, steps, load, step)

        ring.drain(tiles(row_tiles * column_tiles, load_tile))

    @pl.when(warpgroup < CONSUMERS)
    def consume() -> None:
        plgpu.set_max_registers(REGISTERS[0], action="increase")

        def compute_tile(index: Array, step: Array) -> Array:
            row, column = placed(index, row_tiles, column_tiles)

            def product(sum_: Ref) -> Array:
                def use(i: Array, slot: Array) -> None:
                    b = second.at[slot]
                    plgpu.wgmma(sum_, first.at[slot, warpgroup], b.transpose((1, 0)) if spec.vocabulary_major else b)

                ring.consume(step, jnp.int32(steps), use)
                total: Array = sum_[...]
                return total

            logits = pl.run_scoped(product, plgpu.ACC((PART, plan.columns), jnp.float32))
            at = row * ROWS + warpgroup * PART
            found = [_initial(s) for s in needed]
            sides = [_along_rows(v, at) for v in vectors]
            for c in range(0, plan.columns, plan.strip):
                strip = logits[:, c : c + plan.strip].astype(spec.logit_dtype)
                found = _advanced(spec, needed, found, strip, at, column * plan.columns + c, sides, labels)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for value, place in zip(found, stored, strict=True):
                place.at[warpgroup][...] = value
            plgpu.commit_smem()
            for place, result in zip(stored, results, strict=True):
                plgpu.copy_smem_to_gmem(place.at[warpgroup], result.at[column, pl.ds(at, PART)])
            return jnp.add(step, steps)

        tiles(row_tiles * column_tiles, compute_tile)
        plgpu.wait_smem_to_gmem(0)


def _row_layout() -> Any:
    return mosaic().Layout.WGMMA.reduce(1)


def _initial(statistic: Statistic) -> Array:
    kind = statistic.kind
    dtype = jnp.int32 if kind == "argmax" else jnp.float32
    start: Array = mosaic().layout_cast(jnp.full((PART,), -jnp.inf if kind == "max" else 0, dtype), _row_layout())
    return start


def _along_rows(vector: Ref, at: Array) -> Array:
    """What a side input has for each row of the tile: [64], or a scalar."""
    if vector.shape[0] == 1:
        scalar: Array = vector[0]
        return scalar
    found: Array = mosaic().load(vector.at[pl.ds(at, PART)], layout=_row_layout(), optimized=False)
    return found


def _wide(value: Array, like: Array) -> Array:
    return lax.broadcast_in_dim(value, like.shape, (0,) if value.ndim else ())


def _advanced(
    spec: CrossEntropySpec,
    needed: Sequence[Statistic],
    before: Sequence[Array],
    logits: Array,
    row: Array,
    column: Array,
    sides: Sequence[Array],
    labels: Sequence[int],
) -> list[Array]:
    """The statistics [64] after one more strip of logits [64, c] at ``(row, column)``."""
    layout = mosaic().Layout.WGMMA
    key = mosaic().broadcasted_iota(jnp.int32, logits.shape, 1, layout=layout) + column
    query = mosaic().broadcasted_iota(jnp.int32, logits.shape, 0, layout=layout) + row
    inside = key < spec.vocabulary
    known = [_wide(side, key) for side in sides[: len(spec.sides)]]
    canonical = dict(zip(labels, sides[len(spec.sides) :], strict=True))
    old, new = dict(zip(needed, before, strict=True)), dict[Statistic, Array]()

    def value_of(program: Program) -> Array:
        return program.evaluate(logits, query, key, known).astype(jnp.float32)

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
                chosen = key == _wide(canonical[statistic.label], key)
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
