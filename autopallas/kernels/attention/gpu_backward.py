"""The backward of attention on an H100: one kernel body for the gradient of queries and for those of keys and values.

FlashAttention-2 (Dao 2023, https://arxiv.org/abs/2307.08691), in two passes without atomics, so that the result is the
same in every run.  With a, b at home and c, d streamed, both passes are: score = a c^T, dp = b d^T, the elementwise
derivative, then gradient of a += dscore c, and of b += p d.  Queries and cotangents are at home in the one, keys and
values in the other, where the tile is transposed; so no tile ever has to be turned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopallas.kernels import gpu
from autopallas.kernels.attention import gpu_forward, xla
from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.kernels.attention.gpu_block_sizes import Tiles, backward_tiles
from autopallas.kernels.attention.gpu_elements import Value, backward_elements
from autopallas.kernels.attention.gpu_forward import fill, multiplied, parts, ring, share_registers, vectors
from autopallas.kernels.attention.gpu_grid import (
    WARPGROUP_ROWS,
    Place,
    Visits,
    exists,
    head_size_of,
    padded,
    side_operand,
    side_values,
    vector,
)
from autopallas.kernels.attention.gpu_side_gradient import tile_gradient
from autopallas.kernels.attention.schedule import TilePrograms
from autopallas.kernels.attention.spec import AttentionSpec, SideSpec
from autopallas.kernels.attention.tile_values import reciprocal
from autopallas.kernels.gpu import mosaic, rounded, tile
from autopallas.kernels.refs import Number, Ref
from autopallas.sites.interpret import interpretation

__all__ = ["backward"]

Array: TypeAlias = jax.Array
F32 = np.dtype(np.float32)

_LARGE_LOGSUMEXP = 256.0
"""Beyond it the logsumexp's rounding shows in the probabilities, and maximum and sum are computed anew."""


def backward(
    spec: AttentionSpec,
    block_sizes: BlockSizes,
    query: Array,
    key: Array,
    value: Array,
    sides: Sequence[Array],
    sink: Array | None,
    out: Array,
    logsumexp: Array,
    dout: Array,
) -> tuple[Array, Array, Array, tuple[Array | None, ...], Array | None]:
    """Gradients of the forward's first result; see ``pallas_gpu.backward``."""
    # What wgmma multiplies with has 16 bits: a cotangent that the original does not round is the sum of two, which lie
    # side by side, and so do the values for them.
    split = spec.reads_weights != query.dtype or dout.dtype != query.dtype
    if split and head_size_of(2 * spec.value_head_size) is None:
        return xla.backward(spec, block_sizes, query, key, value, sides, sink, out, logsumexp, dout)

    def anew() -> tuple[Array, Array]:
        maximum, total = gpu_forward.statistics(spec, block_sizes, query, key, sides, sink)
        return maximum, reciprocal(total)

    if spec.inner_weights:
        shift, factor = anew()
    else:
        large = jnp.isfinite(logsumexp) & (jnp.abs(logsumexp) > _LARGE_LOGSUMEXP)
        shift, factor = lax.cond(jnp.any(large), anew, lambda: (logsumexp, jnp.ones_like(logsumexp)))
    # Everything after the probabilities is linear in the cotangent, so that their factor goes there.
    scaled = dout.astype(F32) * factor[..., None]
    unit = _unit(scaled, value) if query.dtype == np.float16 else None
    scaled = scaled if unit is None else scaled * unit
    delta = jnp.sum(scaled * out.astype(F32), axis=-1)
    read_dout = scaled.astype(query.dtype)
    size = spec.value_head_size
    if split:
        rest = (scaled - read_dout.astype(F32)).astype(query.dtype)
        read_dout = jnp.concatenate([read_dout, rest], axis=-1)
        value = jnp.concatenate([value, value], axis=-1)
        spec = replace(spec, value_head_size=2 * size)
    operands = query, key, value, sides, read_dout, shift, delta
    if spec.rounding_adds_up:
        tiles = backward_tiles(spec, "query", block_sizes)
        operands = *operands[:-1], _gradients(spec, "query", tiles, (), *operands)["delta"] * factor

    def finished(gradient: Array, operand: Array) -> Array:
        return (gradient if unit is None else gradient / unit).astype(operand.dtype)

    found: dict[str | int, Array] = {}
    for kernel in ("query", "key_value"):
        tiles = backward_tiles(spec, kernel, block_sizes)
        for outputs in tiles.outputs:
            found |= _gradients(spec, kernel, tiles, outputs, *operands)
    if split:
        found["value"] = found["value"][..., :size].astype(F32) + found["value"][..., size:].astype(F32)
    dsides: list[Array | None] = []
    for number, (side, x) in enumerate(zip(spec.sides, sides, strict=True)):
        if not side.differentiable:
            dsides.append(None)
        elif side.varies[3] and side.varies[4]:
            dsides.append(finished(tile_gradient(spec, number, *operands), x))
        else:
            dsides.append(finished(_summed(spec, side, found[number]), x))
    dsink = None
    if sink is not None and spec.sink is not None:
        weight = jnp.exp(sink.astype(F32) - shift[..., None])
        summed = tuple(axis for axis, varies in enumerate(spec.sink) if not varies)
        dsink = jnp.sum(-weight * operands[-1][..., None], axis=summed, keepdims=True)
        dsink = finished(dsink, sink)
    dquery, dkey, dvalue = (finished(found[name], x) for name, x in (("query", query), ("key", key), ("value", value)))
    return dquery, dkey, dvalue, tuple(dsides), dsink


def _unit(dout: Array, value: Array) -> Array:
    """A power of two that brings gradients of scores, as float16, into the middle of its range.

    A probability's is no more than the product of the norms of its row's cotangent and of its key's value.
    """
    norms = (jnp.sqrt(jnp.max(jnp.sum(jnp.square(x.astype(F32)), axis=-1))) for x in (dout, value))
    of_dout, of_value = norms
    exponent = jnp.minimum(_MIDDLE - jnp.log2(of_dout * of_value), _LARGEST - jnp.log2(of_dout))
    return jnp.where(jnp.isfinite(exponent), jnp.exp2(jnp.floor(exponent)), 1.0)


_MIDDLE, _LARGEST = 6, 14
"""Exponents of float16, whose numbers are between 2**-24 and 2**16: of a probability's gradient, and of a cotangent."""


def _summed(spec: AttentionSpec, side: SideSpec, numbers: Array) -> Array:
    """The gradient of a side input that does not fill tiles, from a number per row and head, or per key and head."""
    whole = numbers[:, :, None, None, :] if side.varies[4] else numbers[..., None]
    summed = tuple(axis for axis, varies in enumerate(side.varies) if not varies and whole.shape[axis] > 1)
    return jnp.sum(whole, axis=summed, keepdims=True)


def _numbers_of(spec: AttentionSpec, kernel: str, outputs: tuple[str, ...]) -> list[int | Literal["delta"]]:
    """The side inputs whose gradient is a number per row (or less), or per column, and comes with these outputs.

    Without any output it is delta, the sum of p dp over each row, that the rounding of the result has no part in.
    """
    if not outputs:
        return ["delta"]
    if outputs == ("value",):
        return []
    wanted = kernel == "key_value"
    sides = enumerate(spec.sides)
    return [n for n, s in sides if s.differentiable and not (s.varies[3] and s.varies[4]) and s.varies[4] == wanted]


def _gradients(
    spec: AttentionSpec,
    kernel: Literal["query", "key_value"],
    tiles: Tiles,
    outputs: tuple[str, ...],
    query: Array,
    key: Array,
    value: Array,
    sides: Sequence[Array],
    dout: Array,
    shift: Array,
    delta: Array,
) -> dict[str | int, Array]:
    from jax.experimental import pallas as pl

    plgpu = mosaic()
    flipped = kernel == "key_value"
    warpgroups, away = tiles.warpgroups, tiles.away
    home = warpgroups * WARPGROUP_ROWS
    row_block, column_block = (away, home) if flipped else (home, away)
    visits = Visits.of(spec, "column" if flipped else "row", row_block, column_block, sides)
    groups = spec.groups if flipped else 1
    stages = min(tiles.stages, max(1, visits.most * groups))
    rows, columns = rounded(spec.query_length, row_block), rounded(spec.key_length, column_block)
    d, dv = head_size_of(spec.head_size) or 0, head_size_of(spec.value_head_size) or 0
    inner = outputs != ("value",)  # whether anything beyond the probabilities is wanted
    of_rows = padded(query, rows, d), padded(dout, rows, dv)
    of_columns = padded(key, columns, d), padded(value, columns, dv)
    inputs = [*(of_columns if flipped else of_rows), *(of_rows if flipped else of_columns)]
    inputs += [padded(jnp.broadcast_to(x, (*query.shape[:3], spec.query_length)), rows) for x in (shift, delta)]
    inputs += visits.operands
    inputs += [side_operand(s, x, rows, columns, flipped) for s, x in zip(spec.sides, sides, strict=True)]

    heads = (spec.batch, spec.key_heads) if flipped else (spec.batch, spec.key_heads, spec.groups)
    length = columns if flipped else rows
    sizes = {"query": d, "key": d, "value": dv}
    # What is in other units may be out of float16's range.
    kept = F32 if query.dtype == np.float16 else query.dtype
    results = [jax.ShapeDtypeStruct((*heads, length, sizes[o]), kept) for o in outputs]
    numbers = _numbers_of(spec, kernel, outputs)
    results += [jax.ShapeDtypeStruct((*heads, length), F32) for _ in numbers]
    dtype = query.dtype
    through_memory = bool(interpretation())
    shapes = [(n, size, of) for n, size in ((warpgroups, WARPGROUP_ROWS), (stages, away)) for of in (d, dv)]
    scratch = [tile(shape, dtype, widest=away * dtype.itemsize) for shape in shapes]
    barriers = [plgpu.Barrier(num_arrivals=2, num_barriers=warpgroups), *ring(stages, warpgroups, copies=2)]
    if through_memory:
        scratch.append(tile((warpgroups, WARPGROUP_ROWS, away), dtype))

    def body(*refs: Ref) -> None:
        given = list(refs)
        a_ref, b_ref, c_ref, d_ref, shift_ref, delta_ref = (given.pop(0) for _ in range(6))
        table = given.pop(0) if visits.operands else None
        side_refs = [given.pop(0) for _ in spec.sides]
        written = [given.pop(0) for _ in results]
        a_shared, b_shared, c_shared, d_shared = (given.pop(0) for _ in range(4))
        through = given.pop(0) if through_memory else None
        home_ready, ready, free = given

        here = lax.axis_index("warpgroup")
        head = lax.axis_index("head")
        place: tuple[Array, ...]
        if flipped:
            place = lax.div(head, jnp.int32(spec.key_heads)), lax.rem(head, jnp.int32(spec.key_heads))
        else:
            outer = lax.div(head, jnp.int32(spec.groups))
            k = lax.rem(outer, jnp.int32(spec.key_heads))
            place = lax.div(outer, jnp.int32(spec.key_heads)), k, lax.rem(head, jnp.int32(spec.groups))
        block = lax.axis_index("home")
        if visits.longest_first:
            block = visits.home_blocks - 1 - block
        steps = visits.steps(table, place[0], block)
        loops = list(visits.loops(steps))

        def address(n: Number, first: Number, count: Number) -> tuple[tuple[Number, ...], Number]:
            """(indices of batch entry and heads, first position) of what step n streams."""
            if not flipped:
                return place[:2], steps.block(n) * away
            group = 0 if groups == 1 else lax.div(n - first * groups, jnp.int32(count))
            step = n if groups == 1 else first + lax.rem(n - first * groups, jnp.int32(count))
            return (*place, group), steps.block(step) * away

        @pl.when(here < warpgroups)
        def _() -> None:
            share_registers(warpgroups, computes=True)
            base = block * home + here * WARPGROUP_ROWS
            window = (*place, pl.ds(base, WARPGROUP_ROWS))
            plgpu.copy_gmem_to_smem(a_ref.at[window], a_shared.at[here], home_ready.at[here])
            plgpu.copy_gmem_to_smem(b_ref.at[window], b_shared.at[here], home_ready.at[here])
            at_home = {}
            if not flipped:
                at_home = {n: vector(ref, window, "along_0") for n, ref in (("shift", shift_ref), ("delta", delta_ref))}
            sums = tuple(
                plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS, sizes[o]), F32), plgpu.Layout.WGMMA) for o in outputs
            )
            sums += tuple(vectors(0.0) for _ in numbers)
            plgpu.barrier_wait(home_ready.at[here])

            for programs, general, first, count in loops:

                def step(
                    n: Number,
                    sums: tuple[Array, ...],
                    programs: TilePrograms = programs,
                    general: bool = general,
                    first: Number = first,
                    count: Number = count,
                ) -> tuple[Array, ...]:
                    slot = lax.rem(n, jnp.int32(stages))
                    index, start = address(n, first, count)
                    shape = (WARPGROUP_ROWS, away)

                    def rows(ref: Ref, name: str) -> Value:
                        if not flipped:
                            return at_home[name]
                        return vector(ref, (*index, pl.ds(start, away)), "along_1")

                    row, column = (start, base) if flipped else (base, start)
                    b, k, g = index if flipped else place
                    tile_place = Place(b, k, g, row, column, shape, flipped)
                    ragged = general and (spec.query_length if flipped else spec.key_length) % away

                    def shown(x: Value) -> Array:
                        array = x.widened("tile", shape).astype(F32)
                        return jnp.where(exists(tile_place, spec), array, 0.0) if ragged else array

                    def add(output: str, x: Value, streamed: Ref) -> Array:
                        total = sums[outputs.index(output)]
                        staged = None if through is None else through.at[here]
                        value = output == "value"
                        read = spec.reads_weights if value else spec.reads_score_gradients
                        precision = spec.value_precision if value else spec.score_precision
                        for part in parts(shown(x), read, dtype, precision):
                            total = multiplied(part, streamed.at[slot], total, staged)
                        return total

                    plgpu.barrier_wait(ready.at[slot])
                    known = tile_place.positions() | side_values(spec, side_refs, tile_place)
                    score = _product(a_shared.at[here], c_shared.at[slot], shape)
                    known |= {"score": Value("tile", score.astype(spec.score_dtype)), "shift": rows(shift_ref, "shift")}
                    elements = backward_elements(spec, programs).on(shape, known)
                    new = {}
                    # What needs the probabilities alone comes first: registers are short.
                    if "value" in outputs:
                        new["value"] = add("value", elements.result()[0], d_shared)
                    if inner:
                        dp = _product(b_shared.at[here], d_shared.at[slot], shape)
                        elements.given({"dp": Value("tile", dp)})
                    if inner and outputs:
                        elements.given({"delta": rows(delta_ref, "delta")})
                        new[outputs[0]] = add(outputs[0], elements.result()[1], c_shared)
                    plgpu.barrier_arrive(free.at[slot])
                    floating = [i for i, s in enumerate(spec.sides) if s.differentiable]
                    further = []
                    for number, total in zip(numbers, sums[len(outputs) :], strict=True):
                        if number == "delta":
                            p = elements.result()[0].widened("tile", shape)
                            part = Value("tile", p.astype(F32) * dp)
                        else:
                            part = elements.result()[2][floating.index(number)]
                        further.append(total + jnp.sum(shown(part), axis=1))
                    return (*(new[o] for o in outputs), *further)

                sums = lax.fori_loop(first * groups, (first + count) * groups, step, sums)
            for ref, total in zip(written, sums, strict=True):
                ref.at[window][...] = total.astype(ref.dtype)

        @pl.when(here == warpgroups)
        def _() -> None:
            share_registers(warpgroups, computes=False)

            def load(part: int, n: Number, slot: Array) -> None:
                index, start = address(n, *loops[part][2:])
                window = (*index, pl.ds(start, away))
                plgpu.copy_gmem_to_smem(c_ref.at[window], c_shared.at[slot], ready.at[slot])
                plgpu.copy_gmem_to_smem(d_ref.at[window], d_shared.at[slot], ready.at[slot])

            parts = [(first * groups, count * groups) for _, _, first, count in loops]
            fill(parts, stages, load, lambda slot: plgpu.barrier_wait(free.at[slot]))

    tiles_visited = math.prod(heads) * visits.home_blocks * visits.most * groups
    found = gpu.call(
        body,
        name=f"autopallas_attention_gpu_backward_{'_'.join(outputs) or 'delta'}",
        grid={"head": math.prod(heads), "home": visits.home_blocks},
        out_type=tuple(results),
        scratch=[*scratch, *barriers],
        warpgroups=warpgroups + 1,
        flops=2 * tiles_visited * home * away * (d + dv * inner + sum(sizes[o] for o in outputs)),
        transcendentals=tiles_visited * home * away,
        bytes_accessed=gpu.array_bytes(*inputs, *results),
        approximate=True,
        by_lanes=True,
    )(*inputs)
    cut = spec.key_length if flipped else spec.query_length
    head_sizes = {"query": spec.head_size, "key": spec.head_size, "value": spec.value_head_size}
    named: dict[str | int, Array] = {o: x[..., :cut, : head_sizes[o]] for o, x in zip(outputs, found, strict=False)}
    return named | {n: x[..., :cut] for n, x in zip(numbers, found[len(outputs) :], strict=True)}


def _product(a: Ref, b: Ref, shape: tuple[int, int]) -> Array:
    """a b^T of two tiles in shared memory."""
    from jax.experimental import pallas as pl

    plgpu = mosaic()

    def multiply(accumulator: Ref) -> Array:
        plgpu.wgmma(accumulator, a, b.transpose((1, 0)))
        found: Array = accumulator[...]
        return found

    product: Array = pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))
    return product
