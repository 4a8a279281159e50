"""The TPU kernels of normalisations of rows by their moments: each reads its rows once.

The forward keeps nothing for the backward, which computes the moments again from the rows that it reads: where a
residual is added to them, from the sum, if the forward gives that.  Gradients of what all rows share are summed in VMEM
while the rows pass, by each TensorCore of a device for its own share.

Rows that are turned by tables come in slabs, [r, H, N], where H of them have the same row of a table.  The other column
of each pair is brought beside the first by rotating the lanes.

Letters: B models, M rows, N columns; a block is [r, N].
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from autopallas.compat import Dtype
from autopallas.kernels.refs import Number, Ref
from autopallas.kernels.row_moments import APART, OF_ROWS, TURNING, Arrays, MomentsKernels, Rows, divisor
from autopallas.kernels.row_norms import RowNormSpec
from autopallas.kernels.tpu import LANES, accumulate, block_bytes, call, generation, reason_against, rounded
from autopallas.sites.device import Device
from autopallas.sites.operation import Supported, Unsupported

__all__ = ["TpuMomentsKernels"]

Array: TypeAlias = jax.Array

_DTYPES = ("bfloat16", "float32")
_LEAST_ROWS, _MOST_ROWS = 16, 1024


class TpuMomentsKernels(MomentsKernels):
    """The kernels of one normalisation."""

    def supports(self, spec: RowNormSpec, device: Device) -> Supported | Unsupported:
        """bfloat16 and float32 on TPUs, and rows of which a few fit into VMEM."""
        if (answer := reason_against(device, (), spec.dtypes())) is not None:
            return answer
        if spec.strided:
            return Unsupported(APART)
        for dtype in spec.dtypes():
            if dtype.name not in _DTYPES:
                return Unsupported(f"the TPU kernels of norms take {' and '.join(_DTYPES)}, not {dtype}")
        budget = generation(device).budget
        arrays = 3 if spec.residual_dtype is None and spec.sum_dtype is None else 4
        if _block(spec, arrays, _LEAST_ROWS, budget, spec.heads) is None:
            return Unsupported(f"rows of {spec.columns} columns do not fit into {budget} bytes of VMEM")
        return Supported()

    def call(self, site: Rows, direction: str, more: Arrays, written: Mapping[str, Dtype]) -> list[Array]:
        """Runs the kernel of a direction."""
        spec, device = site.spec, generation(Device.current())
        slabs, across = site.rows // site.heads, (site.heads,) if site.heads > 1 else ()
        given = {**site.given, **more}
        if across:
            given = {name: array.reshape(site.models, slabs, *across, -1) for name, array in given.items()}
        read = {**given, **site.shared, **_wide_tables(site)}
        count = len(given) + sum(name in OF_ROWS for name in written)
        most = max(1, _MOST_ROWS // site.heads) if across else _MOST_ROWS
        block = _block(spec, count, min(most, rounded(slabs, _LEAST_ROWS)), device.budget, site.heads)
        if block is None:
            raise ValueError(f"rows of {spec.columns} columns do not fit into {device.budget} bytes of VMEM")
        block = min(block, slabs)
        blocks = -(-slabs // block)
        # Each core sums over its own blocks; a block behind the last is the last one again, and adds nothing.
        cores = min(device.cores, blocks) if direction == "backward" else 1
        each = -(-blocks // cores)
        columns = spec.columns

        def at(core: Number, step: Number) -> Number:
            return core * each + step if blocks % cores == 0 else jnp.minimum(core * each + step, blocks - 1)

        whole = (0,) * len(across)
        of_rows = pl.BlockSpec((None, block, *across, columns), lambda b, c, i: (b, at(c, i), *whole, 0))
        of_sums = pl.BlockSpec((None, None, 1, columns), lambda b, c, i: (b, c, 0, 0))

        def of_columns(array: Array) -> pl.BlockSpec:
            varies = array.shape[0] > 1
            return pl.BlockSpec((None, 1, array.shape[2]), lambda b, c, i: (own(b) if varies else 0, 0, 0))

        def of_table(array: Array) -> pl.BlockSpec:
            varies, shape = array.shape[0] > 1, (None, block, *array.shape[2:])
            return pl.BlockSpec(shape, lambda b, c, i: (own(b) if varies else 0, at(c, i), *whole, 0))

        def own(model: Number) -> Number:
            return model if site.groups == 1 else model // site.groups

        def read_at(name: str, array: Array) -> pl.BlockSpec:
            return of_rows if name in OF_ROWS else of_table(array) if name in TURNING else of_columns(array)

        shapes = [
            jax.ShapeDtypeStruct((site.models, slabs, *across, columns), dtype)
            if name in OF_ROWS
            else jax.ShapeDtypeStruct((site.models, cores, 1, columns), dtype)
            for name, dtype in written.items()
        ]
        body = _forward if direction == "forward" else _backward
        found = call(
            partial(body, self, spec, _Place(slabs, block, each, len(across)), tuple(read), tuple(written)),
            name=f"autopallas_{self.name}_{direction}",
            grid=(site.models, cores, each),
            semantics=("parallel", "parallel", "parallel" if direction == "forward" else "arbitrary"),
            in_specs=[read_at(name, array) for name, array in read.items()],
            out_specs=[of_rows if name in OF_ROWS else of_sums for name in written],
            out_shape=shapes,
            cost=_cost(site, [*read.values(), *shapes]),
            alike=3,
        )(*read.values())
        shape = site.models, site.rows, columns
        found = [x.reshape(shape) if across and name in OF_ROWS else x for name, x in zip(written, found, strict=True)]
        return [x if name in OF_ROWS else x.sum(1)[:, 0] for name, x in zip(written, found, strict=True)]


def _wide_tables(site: Rows) -> dict[str, Array]:
    """The tables with a number for each column, 1 and 0 where none is turned: [B|1, P, N] or [B|1, P, 1, N]."""
    spec, found = site.spec, {}
    for name, table in site.tables.items():
        after = spec.columns - spec.start - table.shape[2]
        wide = jnp.pad(table, ((0, 0), (0, 0), (spec.start, after)), constant_values=1 if name == "cos" else 0)
        found[name] = wide[:, :, None] if site.heads > 1 else wide
    return found


def _block(spec: RowNormSpec, arrays: int, most: int, budget: int, heads: int = 1) -> int | None:
    """The rows of a block, or its slabs of ``heads`` rows, of ``arrays`` of the rows' size; None where not even the
    fewest fit."""
    room = budget - budget // 16  # for what the compiler spills
    dtypes = (spec.x_dtype, spec.residual_dtype, spec.result_dtype, spec.sum_dtype)
    wide = max((dtype for dtype in dtypes if dtype is not None), key=lambda dtype: dtype.itemsize)
    slab, least = ((heads, spec.columns), 1) if heads > 1 else ((spec.columns,), _LEAST_ROWS)
    rows = most
    while rows >= least:
        taken = arrays * block_bytes((rows, *slab), wide, 2)
        taken += 4 * block_bytes((rows, *slab), np.float32) + 8 * block_bytes((8, spec.columns), np.float32)
        if spec.turns:
            taken += 8 * block_bytes((rows, *slab), np.float32)  # the tables, and what is rotated
        if taken <= room:
            return rows
        rows = rows // 2 // least * least
    return None


def _cost(site: Rows, arrays: Sequence[Array | jax.ShapeDtypeStruct]) -> pl.CostEstimate:
    moved = sum(math.prod(a.shape) * np.dtype(a.dtype).itemsize for a in arrays)
    size = site.models * site.rows
    return pl.CostEstimate(flops=12 * size * site.spec.columns, transcendentals=size, bytes_accessed=moved)


class _Place(NamedTuple):
    """Where a block is: of ``rows`` rows, or slabs of them, it has ``block``, and a core has ``each`` blocks; there are
    ``further`` axes between those of rows and columns."""

    rows: int
    block: int
    each: int
    further: int = 0

    def inside(self) -> Array | None:
        """Tells which rows of this step's block there are, and have not been before, [r, 1]; None: all of them.

        Slabs of rows have a further axis, of size 1.
        """
        if self.rows % (self.block * self.each) == 0:
            return None
        number = pl.program_id(1) * self.each + pl.program_id(2)
        row = number * self.block + lax.broadcasted_iota(jnp.int32, (self.block, *(1,) * self.further, 1), 0)
        return row < self.rows


def _added(held: Mapping[str, Ref]) -> Array:
    """Returns the rows in float32, with the residual where that is still to be added."""
    x: Array = held["x"][...].astype(jnp.float32)
    return x + held["residual"][...].astype(jnp.float32) if "residual" in held else x


def _moments(kernels: MomentsKernels, spec: RowNormSpec, wide: Array) -> tuple[Array, Array, Array | None]:
    """The rows, taken from their means if they are to be, and what :func:`divisor` returns for their moment."""
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True) if kernels.centred else wide
    square = jnp.sum(centred * centred, axis=-1, keepdims=True) / (spec.columns / spec.factor)
    return centred, *divisor(spec, square)


def _others(spec: RowNormSpec, rows: Array) -> Array:
    """Returns the other column of its pair for each column that is turned; some other one for columns that are not."""
    axis, apart = rows.ndim - 1, 1 if spec.neighbours else spec.angles
    # Whole lanes are rotated by one instruction; of others, the two parts are moved.
    rolled = jnp.roll if spec.columns % LANES else pltpu.roll
    before = rolled(rows, apart, axis)
    if 2 * apart == spec.columns:
        return before
    behind = rolled(rows, spec.columns - apart, axis)
    column = lax.broadcasted_iota(jnp.int32, rows.shape, axis) - spec.start
    return jnp.where(column % 2 == 0 if spec.neighbours else column < spec.angles, behind, before)


def _within_turned(spec: RowNormSpec, turned: Array, rows: Array) -> Array:
    """Returns the columns that are turned of one array, and those that are not of the other one."""
    if 2 * spec.angles == spec.columns:
        return turned
    column = lax.broadcasted_iota(jnp.int32, rows.shape, rows.ndim - 1) - spec.start
    return jnp.where((column >= 0) & (column < 2 * spec.angles), turned, rows)


def _tables(held: Mapping[str, Ref]) -> tuple[Array, Array]:
    return held["cos"][...].astype(jnp.float32), held["sin"][...].astype(jnp.float32)


def _turned(spec: RowNormSpec, held: Mapping[str, Ref], rows: Array) -> Array:
    cos, sin = _tables(held)
    return _within_turned(spec, rows * cos + _others(spec, rows) * sin, rows)


def _turned_back(spec: RowNormSpec, held: Mapping[str, Ref], cotangent: Array) -> Array:
    """Returns the cotangent of the rows before they were turned."""
    cos, sin = _tables(held)
    return _within_turned(spec, cotangent * cos + _others(spec, cotangent * sin), cotangent)


def _forward(
    kernels: MomentsKernels, spec: RowNormSpec, place: _Place, read: Sequence[str], written: Sequence[str], *refs: Ref
) -> None:
    held, results = dict(zip(read, refs, strict=False)), dict(zip(written, refs[len(read) :], strict=True))
    rows, out = _added(held), results["result"]
    if "sum" in results:
        rounded_sum = rows.astype(results["sum"].dtype)
        results["sum"][...] = rounded_sum
        rows = rounded_sum.astype(jnp.float32)
    centred, divides, _ = _moments(kernels, spec, rows)
    result = centred * (spec.gain / divides)
    result = result * held["scale"][...] if "scale" in held else result
    result = result + held["shift"][...] if "shift" in held else result
    result = _turned(spec, held, result) if spec.turns else result
    out[...] = result.astype(out.dtype)


def _backward(
    kernels: MomentsKernels, spec: RowNormSpec, place: _Place, read: Sequence[str], written: Sequence[str], *refs: Ref
) -> None:
    """Of y = g x / d, where d^2 = f mean(x^2): dx = g (dy / d - f x mean(dy x) / d^3), whose second term has a factor
    behind epsilon; less its mean where x is centred."""
    held, results = dict(zip(read, refs, strict=False)), dict(zip(written, refs[len(read) :], strict=True))
    step, inside = pl.program_id(2), place.inside()
    cotangent = held["cotangent"][...].astype(jnp.float32)
    cotangent = _turned_back(spec, held, cotangent) if spec.turns else cotangent
    centred, divides, passed = _moments(kernels, spec, _added(held))
    inverse = 1 / divides
    normal = centred * inverse
    if "x" in results:
        of_normal = cotangent * held["scale"][...] if "scale" in held else cotangent
        # Divided before it is summed, it is finite wherever what it is taken from is.
        along = jnp.sum(of_normal * (normal * np.float32(spec.factor / spec.columns)), axis=-1, keepdims=True)
        gradient = of_normal - normal * (along if passed is None else along * passed)
        if kernels.centred:
            gradient = gradient - jnp.mean(of_normal, axis=-1, keepdims=True)
        gradient = gradient * (inverse if spec.gain == 1 else inverse * spec.gain)
        gradient = gradient + held["of_sum"][...].astype(jnp.float32) if "of_sum" in held else gradient
        results["x"][...] = gradient.astype(results["x"].dtype)
    of_scale = cotangent * normal if spec.gain == 1 else cotangent * normal * spec.gain
    for name, value in (("scale", of_scale), ("shift", cotangent)):
        if name not in results:
            continue
        value = value if inside is None else jnp.where(inside, value, 0)
        value = jnp.sum(value, axis=0) if place.further else value
        part = jnp.sum(value, axis=0, keepdims=True)
        accumulate(results[name], part, step)
