"""Grouped matmul for Mosaic TPU: a grid over the visits of tiles to groups, which tables in scalar memory describe.

A tile of rows is multiplied with the weights of each group that owns some of them, as in MegaBlocks (Gale et al. 2022,
https://arxiv.org/abs/2211.15841).  The weights' block stays in VMEM for as long as the group does.  Tiles stand at
fixed rows, so operands are read in place; a mask keeps apart the groups that share a tile.

Examples of a batch stand one behind the other, each with groups of its own, so that a batch is one call of the kernel.

Letters: B batch, M rows, K and N the weights' two sides, G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from autopallas.kernels.grouped_matmul import tpu_cores, xla
from autopallas.kernels.grouped_matmul.block_sizes import BlockSizes
from autopallas.kernels.grouped_matmul.operands import Gradients, Operands
from autopallas.kernels.grouped_matmul.spec import GroupedMatmulSpec, ProductSpec
from autopallas.kernels.grouped_matmul.tpu_cores import Told
from autopallas.kernels.grouped_matmul.visits import (
    capacity,
    even_bounds,
    group_bounds,
    visits_by_group,
    visits_by_tile,
)
from autopallas.kernels.refs import Number, Ref
from autopallas.kernels.tpu import LANES, Generation, block_bytes, call, dot, generation, reason_against, rounded
from autopallas.kernels.tpu_schedule_tracing import assume, concrete, is_simulated, unknown
from autopallas.numerics.classes import Numerics
from autopallas.sites.block_sizes import aligned
from autopallas.sites.device import Device
from autopallas.sites.elementwise import ElementwiseProgram
from autopallas.sites.interpret import refusal
from autopallas.sites.operation import Supported, Unsupported
from autopallas.sites.spec import Sizes

__all__ = ["NUMERICS", "Tile", "backward", "candidates", "forward", "running_sizes", "supports"]

NUMERICS: Numerics = "tolerance"
"""How its results relate to the original's."""

Array: TypeAlias = jax.Array

EPILOGUES = True
"""Whether ``forward`` takes a spec with an epilogue; those that do not say so are given none."""

_COLUMN_BLOCK = 1024
_LEAST_ROWS = 16
"""A whole register of 16-bit elements."""
_DTYPES = ("bfloat16", "float32")
_ANY_TPU = Device("tpu", "")
_SCALARS = 256 * 2**10
"""Bytes of scalar memory that tables may take: a quarter of what the smallest generation has."""


def supports(spec: GroupedMatmulSpec, device: Device) -> Supported | Unsupported:
    """bfloat16 and float32, on TPUs."""
    if (answer := refusal("tpu", device)) is not None:
        return answer
    for dtype in (spec.first_dtype, spec.second_dtype, spec.result_dtype):
        if dtype.name not in _DTYPES:
            return Unsupported(f"TPUs' matrix units take {' and '.join(_DTYPES)}, not {dtype}")
    tables = 6 * 4 * capacity(spec.batch * spec.rows, _LEAST_ROWS, spec.batch * spec.groups)
    if tables > _SCALARS:
        return Unsupported(f"the tables of its visits, {tables} bytes, do not fit into scalar memory")
    if not spec.assume_finite:
        return Unsupported("assume_finite is off: an inf or NaN in one group's weights would not reach other groups")
    return Supported()


def candidates(spec: ProductSpec, device: Device) -> tuple[BlockSizes, ...]:
    """Returns what a search should try, best guess first: where VMEM is large, more rows for each block of weights."""
    rows = (1024, 512) if generation(device).budget > 2**26 else (512, 1024)
    sizes = [BlockSizes(n).fitted(spec) for n in (*rows, 256, 128)]
    sizes += [BlockSizes(n, 1024, 1024).fitted(spec) for n in rows]
    return tuple(dict.fromkeys(sizes))


def running_sizes(spec: GroupedMatmulSpec, block_sizes: BlockSizes, device: Device) -> Sizes:
    """Returns the tile of the kernel; plain JAX, which computes groups that overlap, has the rows of the block
    sizes."""
    shared = None if spec.use == "drhs" else shared_tile(spec, block_sizes, spec.batch * spec.rows)
    rows, inner, columns = shared or _tile(spec, block_sizes, generation(device))
    return {"row_block": rows, "inner_block": inner, "column_block": columns}


def forward(spec: GroupedMatmulSpec, block_sizes: BlockSizes, operands: Operands) -> Array:
    """One kernel computes it, where the groups do not overlap."""
    if spec.epilogue is not None and not _computable(spec.epilogue):
        return spec.finished(forward(spec.product, block_sizes, operands))
    first, second, group_sizes, _ = operands
    batch = spec.batch
    kernel = _weights if spec.use == "drhs" else _rows
    if is_simulated():
        assume("groups of equal sizes")
        start, end = even_bounds(batch, spec.groups, spec.rows)
        return kernel(spec, block_sizes, first, second, start, end)
    start, end, apart = group_bounds(jnp.broadcast_to(group_sizes, (batch, spec.groups)), spec.rows)

    def tiled(first: Array, second: Array) -> Array:
        return kernel(spec, block_sizes, first, second, start, end)

    def streamed(first: Array, second: Array) -> Array:
        sizes = block_sizes.fitted(spec)
        product = xla.forward(spec.product, sizes, Operands(first, second, group_sizes))
        return _finished_in_place(spec, product, sizes.row_block)

    # Negative sizes make groups overlap, and results sums over them, for which visits have no order.
    result: Array = lax.cond(apart, tiled, streamed, first, second)
    return result


def _finished_in_place(spec: GroupedMatmulSpec, product: Array, block: int) -> Array:
    """The epilogue of the product, some rows at a time.

    Of all rows at once the TPU's compiler makes a second array where a device has two cores; and it sets memory aside
    for both, whether or not this branch is taken.
    """
    if spec.epilogue is None or spec.output_dtype != spec.result_dtype:
        return spec.finished(product)
    count, rest = divmod(spec.rows, block)

    def part(start: Number, size: int, out: Array) -> Array:
        done = spec.finished(lax.dynamic_slice_in_dim(out, start, size, axis=1))
        return lax.dynamic_update_slice_in_dim(out, done, start, axis=1)

    product = lax.fori_loop(0, count, lambda i, out: part(i * block, block, out), product)
    return part(count * block, rest, product) if rest else product


def _computable(epilogue: ElementwiseProgram) -> bool:
    """Whether Mosaic has what an epilogue asks for; else XLA computes it, in a pass of its own."""
    return reason_against(_ANY_TPU, [epilogue], [epilogue.dtype]) is None


def backward(
    spec: GroupedMatmulSpec,
    block_sizes: BlockSizes,
    operands: Operands,
    cotangent: Array,
    wanted: Sequence[bool] = (True, True),
) -> Gradients:
    """Each gradient is one of the other two uses."""
    return xla.gradients(forward, spec, block_sizes, operands, cotangent, wanted)


class Tile(NamedTuple):
    """Sizes of the blocks, each a multiple of what the hardware wants or all of its axis."""

    rows: int
    inner: int
    columns: int

    @staticmethod
    def of(spec: GroupedMatmulSpec, sizes: BlockSizes, rows: int, budget: int, cores: int = 1) -> Tile:
        """Returns the block sizes, rounded up to whole registers, and then made smaller until they fit into the VMEM.

        Args:
          spec, sizes: what is computed, and with which blocks; those that are left open begin large.
          rows: B M.
          budget: bytes of VMEM.
          cores: of how many the columns are cut for, if they are left open.
        """
        inner, columns = (spec.contracting, spec.columns) if spec.use != "dlhs" else (spec.columns, spec.contracting)
        column_block = aligned(sizes.column_block or _even(columns, _COLUMN_BLOCK, cores), columns, LANES)
        wanted = sizes.inner_block or inner
        if spec.use == "drhs":  # both sides of the weights are columns of a result
            wanted = sizes.column_block or _even(inner, _COLUMN_BLOCK)
        tile = Tile(aligned(sizes.row_block, rows, _LEAST_ROWS), aligned(wanted, inner, LANES), column_block)
        room = budget - budget // 16  # for what the compiler spills
        while tile.vmem_bytes(spec) > room:
            # What is summed over goes first, and with it only traffic between VMEM and the sum.
            if spec.use == "drhs":
                name = "rows" if tile.rows > 256 else "columns" if tile.columns >= tile.inner else "inner"
            else:
                name = "inner" if tile.inner > 512 else "rows" if tile.rows > 256 else "columns"
            least = _LEAST_ROWS if name == "rows" else LANES
            block = getattr(tile, name)
            if block <= least:
                break
            tile = tile._replace(**{name: rounded(block // 2, least)})
        return tile

    def vmem_bytes(self, spec: GroupedMatmulSpec) -> int:
        """Two buffers for each block that is read or written, the sum, and for products of rows what is added to it."""
        rows, inner, columns = self
        lhs, weights, out = (rows, inner), (inner, columns), (rows, columns)
        blocks = (lhs, out, weights) if spec.use == "drhs" else (lhs, weights, out)
        dtypes = (spec.first_dtype, spec.second_dtype, spec.output_dtype)
        buffers = sum(block_bytes(block, dtype, 2) for block, dtype in zip(blocks, dtypes, strict=True))
        return buffers + block_bytes(blocks[2], np.float32, 1 if spec.use == "drhs" else 2)


def _even(extent: int, block: int, cores: int = 1) -> int:
    """A block of at most this size, of which those that are needed leave the least over, and as few cores idle."""
    count = rounded(-(-extent // block), cores)
    return rounded(-(-extent // count), LANES)


# ---------------------------------------------------------------------- rows by weights


def _rows(spec: GroupedMatmulSpec, sizes: BlockSizes, rows: Array, weights: Array, start: Array, end: Array) -> Array:
    """[B|1, M, K] by [B|1, G, K, N] to [B, M, N]; for "dlhs" [B|1, M, N] by [B|1, G, K, N] to [B, M, K]."""
    total = spec.batch * spec.rows
    device = generation(Device.current())
    shared = shared_tile(spec, sizes, total)
    tile = shared or _tile(spec, sizes, device)
    flat = jnp.broadcast_to(rows, (spec.batch, *rows.shape[1:])).reshape(total, rows.shape[2])
    with concrete():
        visits = visits_by_tile(start, end, total, tile.rows)
        visits = visits._replace(group=visits.group % (weights.shape[0] * spec.groups))
    given = (
        visits.tile, visits.group, visits.begin, visits.end, visits.first,
        flat, weights.reshape(-1, *weights.shape[2:]),
    )  # fmt: skip
    if shared is not None:
        unknown("shares of cores")
        cores = device.cores
        shares = tpu_cores.shares(visits.tile, visits.number, total // tile.rows, cores)
        out = rows_call_on_cores(spec, tile, total, len(start), cores, len(visits.tile))(shares, *given)
    else:
        out = rows_call(spec, tile, total, len(start), visits.number)(*given)
    return out.reshape(spec.batch, *spec.result_shape())


def _tile(spec: GroupedMatmulSpec, sizes: BlockSizes, device: Generation) -> Tile:
    """The tile of a grid's steps."""
    cores = 1 if spec.use == "drhs" else device.cores
    return Tile.of(spec, sizes, spec.batch * spec.rows, device.budget, cores)


def shared_tile(spec: GroupedMatmulSpec, sizes: BlockSizes, rows: int) -> Tile | None:
    """Returns the tile with which several cores share the rows, where that is better than what a grid does."""
    device = generation(Device.current())
    known = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    if device.cores == 1 or known.platform != "tpu":  # a pipeline asks JAX for the device
        return None
    on_grid = Tile.of(spec, sizes, rows, device.budget, device.cores)
    tile = Tile.of(spec, sizes, rows, device.budget)
    inner, columns = _sides(spec)
    whole = not (rows % tile.rows or inner % tile.inner or columns % tile.columns or inner % LANES or columns % LANES)
    pays = tpu_cores.pays(device.cores, rows // tile.rows, columns, on_grid.columns)
    return tile if whole and pays else None


def _sides(spec: GroupedMatmulSpec) -> tuple[int, int]:
    """What products of rows are summed over, and the columns that they have."""
    return (spec.columns, spec.contracting) if spec.use == "dlhs" else (spec.contracting, spec.columns)


def rows_call(spec: GroupedMatmulSpec, tile: Tile, rows: int, groups: int, count: Number) -> Callable[..., Array]:
    """Returns the kernel as a function of (five tables, rows [B M, ...], weights [groups, K, N]).

    Args:
      spec, tile: what to compute, and how.
      rows: B M.
      groups: B G.
      count: how many visits there are; it may be traced.
    """
    inner, columns = _sides(spec)
    steps, passes = -(-inner // tile.inner), -(-columns // tile.columns)
    in_specs, out_specs = _rows_specs(spec, tile, lambda visit, tables: _read(tables, visit))

    def kernel(*refs: Ref) -> None:
        _rows_kernel(spec, tile, inner, lambda visit: _read(refs[:5], visit), *refs[5:])

    return call(
        kernel,
        name=f"autopallas_grouped_matmul_{spec.use}",
        prefetched=5,
        grid=(passes, count, steps),
        semantics=("parallel", "arbitrary", "arbitrary"),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=jax.ShapeDtypeStruct((rows, columns), spec.output_dtype),
        scratch_shapes=_rows_scratch(tile, steps),
        cost=_rows_cost(spec, rows, groups, passes),
        alike=2,
    )


def rows_call_on_cores(
    spec: GroupedMatmulSpec,
    tile: Tile,
    rows: int,
    groups: int,
    cores: int,
    visits: int,
    at: Told | None = None,
) -> Callable[..., Array]:
    """The same as a function of (the cores' shares, five tables, rows, weights), where there is a
    :func:`shared_tile`.

    Args:
      spec, tile, rows, groups: as of :func:`rows_call`.
      cores: among how many the tiles are cut.
      visits: capacity of the tables.
      at: ``at(visit)`` gives (tile, group, begin, end, first); None reads shares and tables.
    """
    inner, columns = _sides(spec)
    steps, passes = -(-inner // tile.inner), -(-columns // tile.columns)
    return tpu_cores.split_call(
        partial(_rows_kernel, spec, tile, inner),
        name=f"autopallas_grouped_matmul_{spec.use}_on_cores",
        cores=cores,
        passes=passes,
        steps=steps,
        visits=visits,
        in_specs=lambda read: _rows_specs(spec, tile, lambda visit, tables: read(visit))[0],
        out_specs=lambda read: _rows_specs(spec, tile, lambda visit, tables: read(visit))[1],
        out_shape=jax.ShapeDtypeStruct((rows, columns), spec.output_dtype),
        scratch_shapes=_rows_scratch(tile, steps),
        limit=generation(Device.current()).limit,
        cost=_rows_cost(spec, rows, groups, passes),
        at=at,
    )


def _rows_specs(
    spec: GroupedMatmulSpec, tile: Tile, told: Callable[[Number, Sequence[Ref]], tuple[Number, ...]]
) -> tuple[list[pl.BlockSpec], pl.BlockSpec]:
    """Blocks of rows, weights and result on a grid of (passes, visits, steps); ``told(visit, tables)``."""
    transposed = spec.use == "dlhs"

    def rows_map(n: Number, v: Number, k: Number, *tables: Ref) -> tuple[Number, ...]:
        return told(v, tables)[0], k

    def weights_map(n: Number, v: Number, k: Number, *tables: Ref) -> tuple[Number, ...]:
        return told(v, tables)[1], *((n, k) if transposed else (k, n))

    def out_map(n: Number, v: Number, k: Number, *tables: Ref) -> tuple[Number, ...]:
        return told(v, tables)[0], n

    weights_block = (tile.columns, tile.inner) if transposed else (tile.inner, tile.columns)
    in_specs = [pl.BlockSpec((tile.rows, tile.inner), rows_map), pl.BlockSpec((None, *weights_block), weights_map)]
    return in_specs, pl.BlockSpec((tile.rows, tile.columns), out_map)


def _rows_scratch(tile: Tile, steps: int) -> list[Ref]:
    return [pltpu.VMEM((tile.rows, tile.columns), jnp.float32)] * (steps > 1)


def _rows_cost(spec: GroupedMatmulSpec, rows: int, groups: int, passes: int) -> pl.CostEstimate:
    inner, columns = _sides(spec)
    first, second, result = (d.itemsize for d in (spec.first_dtype, spec.second_dtype, spec.output_dtype))
    moved = rows * inner * passes * first + groups * inner * columns * second + rows * columns * result
    return pl.CostEstimate(flops=2 * rows * inner * columns, bytes_accessed=moved, transcendentals=0)


def _read(tables: Sequence[Ref], visit: Number) -> tuple[Array, ...]:
    return tuple(table[visit] for table in tables)


def _rows_kernel(
    spec: GroupedMatmulSpec,
    tile: Tile,
    inner: int,
    read: Told,
    rows_ref: Ref,
    weights_ref: Ref,
    out_ref: Ref,
    *scratch: Ref,
) -> None:
    visit, step, steps = pl.program_id(1), pl.program_id(2), -(-inner // tile.inner)
    _, _, begin, end, first = read(visit)
    axis = 1 if spec.use == "dlhs" else 0
    if left := inner % tile.inner:  # what lies behind the axis may be anything

        @pl.when(step == steps - 1)
        def clear_tails() -> None:
            for ref, behind in ((rows_ref, 1), (weights_ref, axis)):
                part = (slice(None), slice(left, None)) if behind else (slice(left, None), slice(None))
                ref[part] = jnp.zeros_like(ref[part])

    def product() -> Array:
        return dot(rows_ref[...], weights_ref[...], (1, axis), spec.precision)

    def finished(value: Array) -> Array:
        return spec.finished(value.astype(spec.result_dtype)).astype(out_ref.dtype)

    def store(value: Array) -> None:
        row = lax.broadcasted_iota(jnp.int32, (tile.rows, 1), 0)
        inside = (row >= begin) & (row < end)

        @pl.when(first == 1)
        def store_first() -> None:
            out_ref[...] = finished(jnp.where(inside, value, 0))

        @pl.when(first == 0)
        def store_more() -> None:
            out_ref[...] = jnp.where(inside, finished(value), out_ref[...])

    if steps == 1:

        @pl.when(end > begin)
        def only() -> None:
            store(product())

        @pl.when(end <= begin)
        def none() -> None:
            out_ref[...] = finished(jnp.zeros((tile.rows, tile.columns), jnp.float32))

        return
    (sum_ref,) = scratch

    @pl.when(step == 0)
    def begin_sum() -> None:
        sum_ref[...] = product()

    @pl.when((step > 0) & (step < steps - 1))
    def add() -> None:
        sum_ref[...] += product()

    @pl.when(step == steps - 1)
    def finish() -> None:
        store(sum_ref[...] + product())


# ---------------------------------------------------------------------- gradient of the weights


def _weights(spec: GroupedMatmulSpec, sizes: BlockSizes, lhs: Array, dout: Array, start: Array, end: Array) -> Array:
    """[B|1, M, K] by [B|1, M, N] to [B, G, K, N]."""
    total = spec.batch * spec.rows
    tile = _tile(spec, sizes, generation(Device.current()))
    flat = [jnp.broadcast_to(x, (spec.batch, *x.shape[1:])).reshape(total, x.shape[2]) for x in (lhs, dout)]
    with concrete():
        visits = visits_by_group(start, end, total, tile.rows)
    out = weights_call(spec, tile, total, len(start), visits.number)(
        visits.tile, visits.group, visits.begin, visits.end, visits.first, visits.last, *flat
    )
    return out.reshape(spec.batch, *spec.result_shape())


def weights_call(spec: GroupedMatmulSpec, tile: Tile, rows: int, groups: int, count: Number) -> Callable[..., Array]:
    """Returns the kernel as a function of (six tables, lhs [B M, K], dout [B M, N]); arguments as in
    :func:`rows_call`."""
    k, n = spec.contracting, spec.columns
    k_steps, n_steps = -(-k // tile.inner), -(-n // tile.columns)
    itemsizes = [d.itemsize for d in (spec.first_dtype, spec.second_dtype, spec.result_dtype)]
    return call(
        partial(_weights_kernel, spec, tile),
        name="autopallas_grouped_matmul_drhs",
        prefetched=6,
        grid=(k_steps, n_steps, count),
        semantics=("parallel", "parallel", "arbitrary"),
        in_specs=[
            pl.BlockSpec((tile.rows, tile.inner), lambda k, n, v, *tables: (_read(tables, v)[0], k)),
            pl.BlockSpec((tile.rows, tile.columns), lambda k, n, v, *tables: (_read(tables, v)[0], n)),
        ],
        out_specs=pl.BlockSpec((None, tile.inner, tile.columns), lambda k, n, v, *tables: (_read(tables, v)[1], k, n)),
        out_shape=jax.ShapeDtypeStruct((groups, k, n), spec.result_dtype),
        scratch_shapes=[pltpu.VMEM((tile.inner, tile.columns), jnp.float32)],
        cost=pl.CostEstimate(
            flops=2 * rows * k * n,
            bytes_accessed=rows * (k * n_steps * itemsizes[0] + n * k_steps * itemsizes[1])
            + groups * k * n * itemsizes[2],
            transcendentals=0,
        ),
        alike=2,
    )


def _weights_kernel(spec: GroupedMatmulSpec, tile: Tile, *refs: Ref) -> None:
    tables, (lhs_ref, dout_ref, out_ref, sum_ref) = refs[:6], refs[6:]
    _, _, begin, end, first, last = _read(tables, pl.program_id(2))
    whole = (begin == 0) & (end == tile.rows)

    @pl.when(first == 1)
    def zero() -> None:
        sum_ref[...] = jnp.zeros_like(sum_ref)

    @pl.when(whole)
    def add_whole() -> None:
        sum_ref[...] += dot(lhs_ref[...], dout_ref[...], (0, 0), spec.precision)

    @pl.when((end > begin) & ~whole)
    def add_part() -> None:
        # Both are masked: what lies outside the group may be inf or NaN.
        lhs, dout = (_inside(x[...], begin, end) for x in (lhs_ref, dout_ref))
        sum_ref[...] += dot(lhs, dout, (0, 0), spec.precision)

    @pl.when(last == 1)
    def write() -> None:
        out_ref[...] = sum_ref[...].astype(out_ref.dtype)


# ---------------------------------------------------------------------- on a tile


def _inside(x: Array, begin: Number, end: Number) -> Array:
    """``x`` with zeros in the rows outside: a choice among 32-bit values, as older generations have no other."""
    row = lax.broadcasted_iota(jnp.int32, (x.shape[0], 1), 0)
    return jnp.where((row >= begin) & (row < end), x.astype(jnp.float32), 0).astype(x.dtype)
