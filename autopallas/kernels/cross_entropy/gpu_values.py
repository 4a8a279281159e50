"""Values of programs of the logits, written to main memory: what matrix products then take.

The logits of a part of the vocabulary are computed, turned into a gradient, say, while they are in registers, and
rounded to the dtype of the product.  The library's matrix products do the rest.

Letters: N rows (tokens), D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from autopallas.compat import Dtype
from autopallas.kernels.cross_entropy.gpu_logits import Logits, Plan, Vectors, each_tile, paired, value_of
from autopallas.kernels.cross_entropy.spec import CrossEntropySpec
from autopallas.kernels.gpu import call, mosaic, rounded, tile
from autopallas.kernels.gpu_pipeline import CONSUMERS, PART, Ring, grid
from autopallas.kernels.refs import Ref
from autopallas.sites.elementwise import ElementwiseProgram

__all__ = ["Wanted", "plan_of", "values_call"]

Array: TypeAlias = jax.Array
Wanted: TypeAlias = tuple[ElementwiseProgram, Dtype]
"""A program, and the dtype in which its values are stored."""

_STRIP = 64
_BUFFERS = 2
"""Strips that are stored together."""
_FEWEST_STAGES = 3
_TOGETHER = 8


def plan_of(spec: CrossEntropySpec, wanted: Sequence[Wanted], columns: int) -> Plan:
    """Returns the widest tile of so many columns at most that leaves room for a pipeline, beside two buffers per
    value."""
    beside = [((CONSUMERS, _BUFFERS, PART, _STRIP), dtype) for _, dtype in wanted]
    wide = Plan.of(spec, min(256, rounded(columns, PART)), _STRIP, beside)
    return wide if wide.stages >= _FEWEST_STAGES else Plan.of(spec, 128, _STRIP, beside)


def values_call(
    spec: CrossEntropySpec, wanted: Sequence[Wanted], vectors: Vectors, columns: int
) -> Callable[..., tuple[Array, ...]]:
    """Returns the kernel as a function of (first column [1], x [rows, D], w, what ``vectors.operands`` gives).

    It gives the values at all rows and so many columns, and a few more: TMA moves 8 rows by 64 columns together.

    Args:
      spec: of the logits.
      wanted: what is computed; the programs read the vectors as side inputs.
      vectors: side inputs.
      columns: how many there are from the first on, which is a multiple of 64.
    """
    plan = plan_of(spec, wanted, columns)
    rows, shape = spec.rows, (rounded(spec.rows, _TOGETHER), rounded(columns, _STRIP))
    return call(
        partial(_kernel, spec, plan, tuple(wanted), vectors),
        name="autopallas_cross_entropy_values",
        **grid(paired(spec.rows)),
        out_type=tuple(jax.ShapeDtypeStruct(shape, dtype) for _, dtype in wanted),
        scratch=[*plan.scratch(spec, spec.rows), *(tile(shape, dtype) for shape, dtype in plan.beside)],
        warpgroups=CONSUMERS + 1,
        flops=2 * rows * columns * spec.hidden,
        transcendentals=rows * columns,
        bytes_accessed=spec.row_dtype.itemsize * spec.hidden * (rows + columns)
        + rows * columns * sum(dtype.itemsize for _, dtype in wanted),
        approximate=all(dtype.itemsize == 2 for _, dtype in wanted),
    )


def _kernel(spec: CrossEntropySpec, plan: Plan, wanted: Sequence[Wanted], given: Vectors, *refs: Ref) -> None:
    count = 3 + len(given.kinds)
    (start, x, w, *vectors), rest = refs[:count], refs[count:]
    results, (first, second, full, free, *stored) = rest[: len(wanted)], rest[len(wanted) :]
    plgpu = mosaic()
    warpgroup = lax.axis_index("warpgroup")
    strips = plan.columns // plan.strip

    def visit(at: Array, column: Array, logits: Array) -> None:
        here, first_column = column * plan.columns, start[0]
        for i, c in enumerate(range(0, plan.columns, plan.strip)):
            position = at, first_column + here + c
            # Read anew for each strip: else ptxas computes all strips at once, and spills registers.
            rows = given.of_rows(vectors, at)
            strip = given.strip(spec, logits[:, c : c + plan.strip], position, vectors, rows)
            values = [jnp.broadcast_to(value_of(p, strip).astype(dtype), strip.score.shape) for p, dtype in wanted]
            if i % _BUFFERS == 0:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # nothing is read from the buffers any more
            for value, place in zip(values, stored, strict=True):
                place.at[warpgroup, i % _BUFFERS][...] = value
            if i % _BUFFERS < _BUFFERS - 1 and i + 1 < strips:
                continue
            plgpu.commit_smem()  # of all buffers together
            for n in range(i % _BUFFERS + 1):
                across = pl.ds(here + c - (i % _BUFFERS - n) * plan.strip, plan.strip)
                for place, result in zip(stored, results, strict=True):
                    target = result.at[pl.ds(at, PART), across]
                    plgpu.copy_smem_to_gmem(place.at[warpgroup, n], target)

    ring = Ring(first, second, full, free, plan.stages)
    # What TMA writes behind the end of the results is dropped.
    each_tile(Logits(spec, plan, x, w, ring, -(-results[0].shape[1] // plan.columns), start), visit)
