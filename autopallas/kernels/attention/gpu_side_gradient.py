"""The gradient of a bias that fills tiles, on an H100: each tile is summed over heads and examples that share it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopallas.kernels import gpu
from autopallas.kernels.attention.gpu_elements import Value, backward_elements
from autopallas.kernels.attention.gpu_grid import (
    WARPGROUP_ROWS,
    Place,
    head_size_of,
    padded,
    side_operand,
    side_values,
    vector,
)
from autopallas.kernels.attention.schedule import TilePrograms
from autopallas.kernels.attention.spec import AttentionSpec
from autopallas.kernels.attention.tiles import increasing
from autopallas.kernels.gpu import mosaic, rounded, tile
from autopallas.kernels.refs import Number, Ref

__all__ = ["tile_gradient"]

Array: TypeAlias = jax.Array
F32 = np.dtype(np.float32)
BLOCK = WARPGROUP_ROWS


def tile_gradient(
    spec: AttentionSpec,
    number: int,
    query: Array,
    key: Array,
    value: Array,
    sides: Sequence[Array],
    dout: Array,
    shift: Array,
    delta: Array,
) -> Array:
    """[B|1, K|1, G|1, T, S] of the side input ``number``, in its dtype; with queries of float16 in float32."""
    from jax.experimental import pallas as pl

    plgpu = mosaic()
    side = spec.sides[number]
    rows, columns = rounded(spec.query_length, BLOCK), rounded(spec.key_length, BLOCK)
    d, dv = head_size_of(spec.head_size) or 0, head_size_of(spec.value_head_size) or 0
    extents = (spec.batch, spec.key_heads, spec.groups)
    outer = tuple(n if v else 1 for n, v in zip(extents, side.varies, strict=False))
    inner = tuple(1 if v else n for n, v in zip(extents, side.varies, strict=False))
    inputs = [padded(query, rows, d), padded(dout, rows, dv), padded(key, columns, d), padded(value, columns, dv)]
    inputs += [padded(jnp.broadcast_to(x, (*extents, spec.query_length)), rows) for x in (shift, delta)]
    inputs += [side_operand(s, x, rows, columns, False) for s, x in zip(spec.sides, sides, strict=True)]
    kept = F32 if query.dtype == np.float16 else side.dtype
    result = jax.ShapeDtypeStruct((*outer, rows, columns), kept)
    programs = TilePrograms(spec.score, spec.inner_weights, spec.weights, increasing(spec.score))
    floating = [i for i, s in enumerate(spec.sides) if s.differentiable]
    dtype, shape = query.dtype, (BLOCK, BLOCK)

    def body(*refs: Ref) -> None:
        given = list(refs)
        operands, shift_ref, delta_ref = given[:4], given[4], given[5]
        side_refs = given[6 : 6 + len(spec.sides)]
        written, *rest = given[6 + len(spec.sides) :]
        shared, ready = rest[:4], rest[4]
        head = lax.axis_index("head")
        row, column = lax.axis_index("rows") * BLOCK, lax.axis_index("columns") * BLOCK
        owned = _unravelled(head, outer)

        def step(n: Array, total: Array) -> Array:
            summed = _unravelled(n, inner)
            b, k, g = (o if v else s for o, s, v in zip(owned, summed, side.varies, strict=False))
            windows = [(b, k, g, pl.ds(row, BLOCK))] * 2 + [(b, k, pl.ds(column, BLOCK))] * 2
            for i, (ref, window) in enumerate(zip(operands, windows, strict=True)):
                plgpu.copy_gmem_to_smem(ref.at[window], shared[i], ready.at[i])
            place = Place(b, k, g, row, column, shape)
            known = place.positions() | side_values(spec, side_refs, place)
            known |= {
                "shift": vector(shift_ref, windows[0], "along_0"),
                "delta": vector(delta_ref, windows[0], "along_0"),
            }
            for i in range(4):
                plgpu.barrier_wait(ready.at[i])
            q, do, k_tile, v_tile = shared

            def multiply(score: Ref, dp: Ref) -> tuple[Array, Array]:
                plgpu.wgmma(score, q, k_tile.transpose((1, 0)))
                plgpu.wgmma(dp, do, v_tile.transpose((1, 0)))
                return score[...], dp[...]

            score, dp = pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32), plgpu.ACC(shape, jnp.float32))
            known |= {"score": Value("tile", score.astype(spec.score_dtype)), "dp": Value("tile", dp)}
            _, _, dsides = backward_elements(spec, programs).on(shape, known).result()
            gradient: Array = dsides[floating.index(number)].widened("tile", shape)
            return total + gradient.astype(F32)

        total = plgpu.layout_cast(jnp.zeros(shape, F32), plgpu.Layout.WGMMA)
        total = lax.fori_loop(0, math.prod(inner), step, total)
        written.at[*owned, pl.ds(row, BLOCK), pl.ds(column, BLOCK)][...] = total.astype(kept)

    times = math.prod(extents) * rows * columns
    scratch = [tile((BLOCK, size), dtype) for size in (d, dv, d, dv)]
    found: Array = gpu.call(
        body,
        name=f"autopallas_attention_gpu_backward_side{number}",
        grid={"head": math.prod(outer), "rows": rows // BLOCK, "columns": columns // BLOCK},
        out_type=result,
        scratch=[*scratch, plgpu.Barrier(num_barriers=4)],
        warpgroups=1,
        flops=2 * times * (d + dv),
        transcendentals=times,
        bytes_accessed=gpu.array_bytes(*inputs, result),
        approximate=True,
        by_lanes=True,
    )(*inputs)
    return found[..., : spec.query_length, : spec.key_length]


def _unravelled(n: Array, extents: tuple[int, ...]) -> tuple[Number, ...]:
    """The index of element n of an array, in row-major order."""
    found: list[Number] = []
    for extent in reversed(extents):
        found.append(lax.rem(n, jnp.int32(extent)) if extent > 1 else 0)
        n = lax.div(n, jnp.int32(extent)) if extent > 1 else n
    return tuple(reversed(found))
