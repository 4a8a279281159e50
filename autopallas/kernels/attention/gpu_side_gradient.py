"""Computes the gradient of a bias that fills tiles, on an H100: sums over the heads and examples that share a tile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from autopallas.kernels import gpu
from autopallas.kernels.attention.gpu_elements import Elements, Value, backward_elements
from autopallas.kernels.attention.gpu_grid import (
    WARPGROUP_ROWS,
    Place,
    head_size_of,
    side_operand,
    side_values,
    vector,
)
from autopallas.kernels.attention.gpu_layout import Layout, Turned, padded
from autopallas.kernels.attention.operands import Operands, ScaledRows
from autopallas.kernels.attention.schedule import TilePrograms
from autopallas.kernels.attention.spec import AttentionSpec
from autopallas.kernels.attention.tiles import increasing
from autopallas.kernels.gpu import mosaic, rounded, store, tile
from autopallas.kernels.refs import Number, Ref

__all__ = ["tile_gradient"]

Array: TypeAlias = jax.Array
F32 = np.dtype(np.float32)
BLOCK = WARPGROUP_ROWS


class _Plan(NamedTuple):
    """The kernel of one gradient: each block of threads sums one tile over the heads and examples that share it.

    Attributes:
      spec: the attention.
      number: the side input.
      outer: [B|1, K|1, G|1], the axes of the gradient.
      inner: the axes that it is summed over.
      head_size, value_head_size: those with which the kernel computes.
    """

    spec: AttentionSpec
    number: int
    outer: tuple[int, ...]
    inner: tuple[int, ...]
    head_size: int
    value_head_size: int

    @staticmethod
    def of(spec: AttentionSpec, number: int) -> _Plan:
        varies, extents = spec.sides[number].varies, (spec.batch, spec.key_heads, spec.groups)
        outer = tuple(n if v else 1 for n, v in zip(extents, varies, strict=False))
        inner = tuple(1 if v else n for n, v in zip(extents, varies, strict=False))
        return _Plan(
            spec, number, outer, inner, head_size_of(spec.head_size) or 0, head_size_of(spec.value_head_size) or 0
        )

    @property
    def lengths(self) -> tuple[int, int]:
        """Rows and columns of all tiles."""
        return rounded(self.spec.query_length, BLOCK), rounded(self.spec.key_length, BLOCK)

    @property
    def tiles(self) -> tuple[int, int]:
        """Numbers of tiles along rows and columns."""
        rows, columns = self.lengths
        return rows // BLOCK, columns // BLOCK

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Layouts of queries, cotangents, keys and values."""
        query, key, value = map(Layout.of, self.spec.layouts)
        return query, query, key, value

    @property
    def elements(self) -> Elements:
        spec = self.spec
        programs = TilePrograms(spec.score, spec.inner_weights, spec.weights, increasing(spec.score))
        return backward_elements(spec, programs)

    def inputs(self, operands: Operands, scaled: ScaledRows) -> list[Array]:
        """Returns the arrays in main memory, padded to whole tiles."""
        spec, (rows, columns), d, dv = self.spec, self.lengths, self.head_size, self.value_head_size
        query, key, value, sides, _ = operands
        arrays = (query, rows, d), (scaled.dout, rows, dv), (key, columns, d), (value, columns, dv)
        found = [layout.padded(*array) for layout, array in zip(self.layouts, arrays, strict=True)]
        shape = spec.batch, spec.key_heads, spec.groups, spec.query_length
        found += [padded(jnp.broadcast_to(x, shape), rows) for x in (scaled.shift, scaled.delta)]
        return [*found, *(side_operand(s, x, rows, columns, False) for s, x in zip(spec.sides, sides, strict=True))]


class _Memory(NamedTuple):
    """References of the kernel.

    Attributes:
      tiles: queries, cotangents, keys and values in main memory.
      shift, delta, sides: further operands.
      result: the gradient.
      shared: tiles of the first four in shared memory.
      ready: their barriers.
    """

    tiles: Sequence[Ref]
    shift: Ref
    delta: Ref
    sides: Sequence[Ref]
    result: Ref
    shared: Sequence[Ref]
    ready: Ref

    @staticmethod
    def of(plan: _Plan, refs: Sequence[Ref]) -> _Memory:
        end = 6 + len(plan.spec.sides)
        tiles = [Turned(ref, layout) for ref, layout in zip(refs[:4], plan.layouts, strict=True)]
        return _Memory(tiles, refs[4], refs[5], refs[6:end], refs[end], refs[end + 1 : end + 5], refs[end + 5])


def tile_gradient(spec: AttentionSpec, number: int, operands: Operands, rows: ScaledRows) -> Array:
    """Computes the gradient of the side input ``number``, [B|1, K|1, G|1, T, S], in its dtype.

    With queries of float16 the gradient is in float32.
    """
    plan, dtype = _Plan.of(spec, number), operands.query.dtype
    inputs, lengths = plan.inputs(operands, rows), plan.lengths
    kept = F32 if dtype == np.float16 else spec.sides[number].dtype
    result = jax.ShapeDtypeStruct((*plan.outer, *lengths), kept)
    d, dv = plan.head_size, plan.value_head_size
    times = spec.batch * spec.key_heads * spec.groups * math.prod(lengths)
    scratch = [tile((BLOCK, size), dtype) for size in (d, dv, d, dv)]
    found: Array = gpu.call(
        partial(_kernel, plan),
        name=f"autopallas_attention_gpu_backward_side{number}",
        grid={"block": math.prod(plan.outer) * plan.tiles[0] * plan.tiles[1]},
        out_type=result,
        scratch=[*scratch, mosaic().Barrier(num_barriers=4)],
        warpgroups=1,
        flops=2 * times * (d + dv),
        transcendentals=times,
        bytes_accessed=gpu.array_bytes(*inputs, result),
        approximate=True,
        by_lanes=True,
    )(*inputs)
    return found[..., : spec.query_length, : spec.key_length]


def _kernel(plan: _Plan, *refs: Ref) -> None:
    """Computes one tile of the gradient."""
    plgpu, memory = mosaic(), _Memory.of(plan, refs)
    first, at_column = gpu.unravelled(lax.axis_index("block"), plan.tiles[1])
    head, at_row = gpu.unravelled(first, plan.tiles[0])
    row, column = at_row * BLOCK, at_column * BLOCK
    owned = _unravelled(head, plan.outer)
    total = plgpu.layout_cast(jnp.zeros((BLOCK, BLOCK), F32), plgpu.Layout.WGMMA)
    step = partial(_add_head, plan, memory, owned, (row, column))
    total = lax.fori_loop(0, math.prod(plan.inner), step, total)
    at = memory.result.at[*owned, pl.ds(row, BLOCK), pl.ds(column, BLOCK)]
    store(at, total.astype(memory.result.dtype))


def _add_head(
    plan: _Plan, memory: _Memory, owned: tuple[Number, ...], start: tuple[Array, Array], n: Array, total: Array
) -> Array:
    """Adds one of the heads and examples that share the tile."""
    plgpu, spec, shape, (row, column) = mosaic(), plan.spec, (BLOCK, BLOCK), start
    summed = _unravelled(n, plan.inner)
    varies = spec.sides[plan.number].varies
    b, k, g = (o if v else s for o, s, v in zip(owned, summed, varies, strict=False))
    windows = [(b, k, g, pl.ds(row, BLOCK))] * 2 + [(b, k, pl.ds(column, BLOCK))] * 2
    for i, (ref, window) in enumerate(zip(memory.tiles, windows, strict=True)):
        plgpu.copy_gmem_to_smem(ref.at[window], memory.shared[i], memory.ready.at[i])
    place = Place(b, k, g, row, column, shape)
    known = place.positions() | side_values(spec, memory.sides, place)
    known |= {
        "shift": vector(memory.shift, windows[0], "along_0"),
        "delta": vector(memory.delta, windows[0], "along_0"),
    }
    for i in range(4):
        plgpu.barrier_wait(memory.ready.at[i])
    q, do, k_tile, v_tile = memory.shared

    def multiply(score: Ref, dp: Ref) -> tuple[Array, Array]:
        plgpu.wgmma(score, q, k_tile.transpose((1, 0)))
        plgpu.wgmma(dp, do, v_tile.transpose((1, 0)))
        return score[...], dp[...]

    score, dp = pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32), plgpu.ACC(shape, jnp.float32))
    known |= {"score": Value("tile", score.astype(spec.score_dtype)), "dp": Value("tile", dp)}
    _, _, dsides = plan.elements.on(shape, known).result()
    floating = [i for i, s in enumerate(spec.sides) if s.differentiable]
    gradient: Array = dsides[floating.index(plan.number)].widened("tile", shape)
    return total + gradient.astype(F32)


def _unravelled(n: Array, extents: tuple[int, ...]) -> tuple[Number, ...]:
    """Returns the index of element n of an array, in row-major order."""
    found: list[Number] = []
    for extent in reversed(extents):
        found.append(lax.rem(n, jnp.int32(extent)) if extent > 1 else 0)
        n = lax.div(n, jnp.int32(extent)) if extent > 1 else n
    return tuple(reversed(found))
