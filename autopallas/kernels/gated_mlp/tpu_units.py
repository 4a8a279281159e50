"""Both projections of a tile of hidden units on a TPU, and what is computed of them.

The sums of the gate and of the other projection stay in VMEM, and only the values of the programs are written.

Letters: B models, M rows, K features, H hidden units; a tile is [r, c].
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
from autopallas.kernels.gated_mlp.operation import GatedMlpSpec
from autopallas.kernels.gated_mlp.xla import VECTORS
from autopallas.kernels.gated_mlp.xla_products import COTANGENT, unit_dtype
from autopallas.kernels.refs import Ref
from autopallas.kernels.tpu import LANES, block_bytes, call, dot, generation, rounded
from autopallas.sites.device import Device
from autopallas.sites.elementwise import Constant, ElementwiseProgram, Input, Score, Side, bind
from autopallas.sites.interpret import interpretation
from autopallas.sites.spec import BlockSizes

__all__ = ["Tile", "Units"]

Array: TypeAlias = jax.Array
Arrays: TypeAlias = Mapping[str, jax.Array]

_LEAST_ROWS = 16
"""A whole register of 16-bit elements."""
_COLUMNS = (512, 384, 256)
"""Columns of each of the two projections at a time: the first of which the blocks do not stand over by much."""


class Tile(NamedTuple):
    """Sizes of the blocks, each a multiple of what the hardware wants or all of its axis."""

    rows: int
    inner: int
    columns: int

    @staticmethod
    def of(spec: GatedMlpSpec, wanted: int, rows: int, written: Sequence[Dtype], read: int, budget: int) -> Tile:
        """Returns the largest tile that fits into the VMEM, of at most the wanted rows.

        Args:
          spec: what is computed.
          wanted: rows at a time.
          rows: how many there are.
          written: dtypes of the results of the size [rows, hidden].
          read: how many operands of that size there are.
          budget: bytes of VMEM.
        """
        over = {block: rounded(spec.hidden, block) for block in _COLUMNS}
        columns = next(
            (block for block in _COLUMNS if 16 * over[block] <= 17 * spec.hidden),
            min(over, key=lambda block: over[block]),
        )
        tile = Tile(min(rounded(wanted, _LEAST_ROWS), rows), spec.features, min(columns, spec.hidden))
        room = budget - budget // 16  # for what the compiler spills
        # What is summed over goes first, and with it only traffic between VMEM and the sums.
        for name, least in (("inner", 512), ("rows", 256), ("columns", LANES), ("inner", LANES), ("rows", _LEAST_ROWS)):
            unit = _LEAST_ROWS if name == "rows" else LANES
            while tile.vmem_bytes(spec, written, read) > room and getattr(tile, name) > least:
                tile = tile._replace(**{name: rounded(getattr(tile, name) // 2, unit)})
        return tile

    def vmem_bytes(self, spec: GatedMlpSpec, written: Sequence[Dtype], read: int) -> int:
        """Two buffers for each block that is read or written, the two sums, and in float32 what is on the tile."""
        rows, inner, columns = self
        total = block_bytes((rows, inner), spec.x_dtype, 2)
        total += sum(block_bytes((inner, columns), dtype, 2) for dtype in (spec.gate_dtype, spec.up_dtype))
        total += sum(block_bytes((rows, columns), dtype, 2) for dtype in written)
        total += read * block_bytes((rows, columns), unit_dtype(spec), 2)
        return total + (3 + len(written) + read) * block_bytes((rows, columns), np.float32)


class _Values(NamedTuple):
    """What programs read on a tile: both projections, in float32, and side inputs by position."""

    gate: Array
    sides: Mapping[int, Array]

    def value(self, program: ElementwiseProgram) -> Array:
        """Evaluates a program on the tile."""

        def load(i: Input) -> Array:
            if isinstance(i, Constant):
                return jnp.asarray(i.value, i.dtype)
            assert isinstance(i, Score | Side)
            return _rounded(self.gate if isinstance(i, Score) else self.sides[i.position], i.dtype)

        return jnp.broadcast_to(program.run(load, bind), self.gate.shape)


def _rounded(x: Array, dtype: Dtype) -> Array:
    """The numbers in a dtype.  XLA, which interprets, may drop a mere pair of casts; Mosaic does not."""
    if dtype == jnp.bfloat16 and x.dtype == np.float32 and interpretation():
        x = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return x.astype(dtype)


# ---------------------------------------------------------------------- the call


class Units(NamedTuple):
    """A site as the kernel sees it.

    Models that share all weights have their rows side by side, as those of one model.

    Attributes:
      spec, wanted: what is computed, and with how many rows at a time.
      models, rows: how many there are; of each model.
      operands: x [models|1, rows, K]; gate, up [models|1, K, H]; vectors [models|1, 1, H|1] in float32.
    """

    spec: GatedMlpSpec
    wanted: int
    models: int
    rows: int
    operands: Arrays

    @staticmethod
    def of(spec: GatedMlpSpec, block_sizes: BlockSizes, operands: Arrays) -> Units:
        """Reads canonical operands."""
        held = {name: operands[name] for name in ("x", "gate", "up")}
        held |= {name: operands[name][:, None].astype(jnp.float32) for name in VECTORS if name in operands}
        models, rows = spec.batch, spec.rows
        if all(array.shape[0] == 1 for name, array in held.items() if name != "x"):
            held["x"] = jnp.broadcast_to(held["x"], (models, *held["x"].shape[1:])).reshape(1, models * rows, -1)
            models, rows = 1, models * rows
        return Units(spec, int(block_sizes.to_dict()["rows"]), models, rows, held)

    def call(
        self,
        programs: Sequence[ElementwiseProgram],
        dtypes: Sequence[Dtype | None],
        cotangent: Array | None,
        reuse: bool,
    ) -> list[Array]:
        """Computes values of all hidden units: see :class:`~.xla_products.Compute`."""
        spec, held = self.spec, self.operands
        more = [] if cotangent is None else [cotangent.reshape(self.models, self.rows, spec.hidden)]
        budget = generation(Device.current()).budget
        tile = Tile.of(spec, self.wanted, self.rows, [d for d in dtypes if d is not None], len(more), budget)
        row_blocks, column_blocks = -(-self.rows // tile.rows), -(-spec.hidden // tile.columns)
        steps = -(-spec.features // tile.inner)
        grid = (self.models, row_blocks, column_blocks, steps)
        vectors = {1 + n: held[v] for n, v in enumerate(VECTORS) if v in held}
        # Interpreters fill up the last blocks of operands that are shorter, but not of results that lie there.
        whole_blocks = self.rows % tile.rows == 0 and spec.hidden % tile.columns == 0
        reuse = reuse and more[0].dtype in dtypes and (whole_blocks or not interpretation())

        def block(array: Array, *axes: int | None) -> pl.BlockSpec:
            sizes = {0: tile.rows, 1: tile.columns, 2: tile.inner}
            shape = (None, *(n if axis is None else sizes[axis] for axis, n in zip(axes, array.shape[1:], strict=True)))
            varies = array.shape[0] > 1
            return pl.BlockSpec(
                shape, lambda b, *at: (b if varies else 0, *(0 if axis is None else at[axis] for axis in axes))
            )

        in_specs = [block(held["x"], 0, 2), block(held["gate"], 2, 1), block(held["up"], 2, 1)]
        in_specs += [block(array, None, 1 if array.shape[2] > 1 else None) for array in vectors.values()]
        in_specs += [block(array, 0, 1) for array in more]
        whole = pl.BlockSpec((None, tile.rows, tile.columns), lambda b, i, j, k: (b, i, j))
        part = pl.BlockSpec((None, None, 1, tile.columns), lambda b, i, j, k: (b, i, 0, j))
        results = [
            jax.ShapeDtypeStruct((self.models, row_blocks, 1, spec.hidden), jnp.float32)
            if dtype is None
            else jax.ShapeDtypeStruct((self.models, self.rows, spec.hidden), dtype)
            for dtype in dtypes
        ]
        positions = (*vectors, *(COTANGENT + n for n in range(len(more))))
        found = call(
            partial(_kernel, spec, tile, self.rows, steps, positions, tuple(d is None for d in dtypes), programs),
            name=f"autopallas_gated_mlp_{'backward' if more else 'forward'}",
            grid=grid,
            semantics=("parallel", "parallel", "parallel", "arbitrary"),
            in_specs=in_specs,
            out_specs=[part if dtype is None else whole for dtype in dtypes],
            out_shape=results,
            scratch_shapes=[pltpu.VMEM((tile.rows, tile.columns), jnp.float32)] * (2 * (steps > 1)),
            cost=self._cost(tile, more, results),
            alike=3,
            aliases={len(in_specs) - 1: dtypes.index(more[0].dtype)} if reuse else {},
        )(held["x"], held["gate"], held["up"], *vectors.values(), *more)
        whole_shape = spec.batch, spec.rows, spec.hidden
        return [
            x.sum(1)[:, 0] if dtype is None else x.reshape(whole_shape) for x, dtype in zip(found, dtypes, strict=True)
        ]

    def _cost(self, tile: Tile, more: Sequence[Array], results: Sequence[jax.ShapeDtypeStruct]) -> pl.CostEstimate:
        units = self.models * self.rows * self.spec.hidden
        arrays: list[Array | jax.ShapeDtypeStruct] = [self.operands["x"], *more, *results]
        moved = sum(math.prod(a.shape) * np.dtype(a.dtype).itemsize for a in arrays)
        weights = self.operands["gate"].nbytes + self.operands["up"].nbytes
        again = -(-self.rows // tile.rows)
        return pl.CostEstimate(
            flops=4 * units * self.spec.features, bytes_accessed=moved + again * weights, transcendentals=units
        )


def _kernel(
    spec: GatedMlpSpec,
    tile: Tile,
    rows: int,
    steps: int,
    positions: Sequence[int],
    summed: Sequence[bool],
    programs: Sequence[ElementwiseProgram],
    x_ref: Ref,
    gate_ref: Ref,
    up_ref: Ref,
    *refs: Ref,
) -> None:
    """One step of a tile's sums; the last one computes what is written.  The grid is (models, rows, columns, steps)."""
    sides, refs = dict(zip(positions, refs, strict=False)), refs[len(positions) :]
    results, sums = refs[: len(summed)], refs[len(summed) :]
    step, block = pl.program_id(3), pl.program_id(1)
    if left := spec.features % tile.inner:  # what lies behind the axis may be anything

        @pl.when(step == steps - 1)
        def clear_tails() -> None:
            x_ref[:, left:] = jnp.zeros((tile.rows, tile.inner - left), x_ref.dtype)
            for ref in (gate_ref, up_ref):
                ref[left:] = jnp.zeros((tile.inner - left, tile.columns), ref.dtype)

    def finish(gate: Array, up: Array) -> None:
        given = {0: up, **{position: ref[...] for position, ref in sides.items()}}
        values = _Values(gate, given)
        for program, is_summed, ref in zip(programs, summed, results, strict=True):
            value = values.value(program)
            if not is_summed:
                ref[...] = _rounded(value, ref.dtype)
                continue
            wide = value.astype(jnp.float32)
            if rows % tile.rows:
                row = block * tile.rows + lax.broadcasted_iota(jnp.int32, (tile.rows, 1), 0)
                wide = jnp.where(row < rows, wide, 0)
            ref[...] = jnp.sum(wide, axis=0, keepdims=True)

    products = [dot(x_ref[...], ref[...], (1, 0), spec.precision) for ref in (gate_ref, up_ref)]
    if steps == 1:
        finish(*products)
        return

    @pl.when(step == 0)
    def begin() -> None:
        for ref, one in zip(sums, products, strict=True):
            ref[...] = one

    @pl.when((step > 0) & (step < steps - 1))
    def add() -> None:
        for ref, one in zip(sums, products, strict=True):
            ref[...] += one

    @pl.when(step == steps - 1)
    def last() -> None:
        finish(*(ref[...] + one for ref, one in zip(sums, products, strict=True)))
