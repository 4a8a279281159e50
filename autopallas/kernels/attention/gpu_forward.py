"""The forward of attention on an H100: warpgroups with 64 rows each, and one that only moves memory.

FlashAttention-2 (Dao 2023, https://arxiv.org/abs/2307.08691) with the division of work of FlashAttention-3 (Shah et al.
2024, https://arxiv.org/abs/2407.08608): the last warpgroup fills a ring of stages with keys and values by TMA, the
others wait for a stage, use it, and say so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from autopallas.compat import Dtype
from autopallas.kernels import gpu
from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.kernels.attention.gpu_block_sizes import forward_tiles
from autopallas.kernels.attention.gpu_elements import Value, forward_elements, scale_of
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
from autopallas.kernels.attention.schedule import TilePrograms
from autopallas.kernels.attention.spec import AttentionSpec
from autopallas.kernels.attention.tile_values import halves
from autopallas.kernels.gpu import mosaic, rounded, tile
from autopallas.kernels.refs import Number, Ref
from autopallas.sites.interpret import interpretation

__all__ = ["forward", "multiplied", "parts", "ring", "share_registers", "statistics", "vectors"]

Array: TypeAlias = jax.Array
F32 = np.dtype(np.float32)
LOG2E = math.log2(math.e)
_REGISTERS = {1: None, 2: (240, 24), 3: (160, 32)}
"""Registers of a thread that computes and of one that only moves memory, by the number of warpgroups that compute.

A block has 65536.  With one such warpgroup each thread can have all the 255 that an instruction can name.
"""


class _Running(NamedTuple):
    """What a block of rows knows after some of its tiles; a number per row is [64]."""

    accumulator: Array | None
    maximum: Array
    total: Array
    kept: Array | None


def forward(
    spec: AttentionSpec,
    blocks: BlockSizes,
    query: Array,
    key: Array,
    value: Array,
    sides: Sequence[Array],
    sink: Array | None,
) -> tuple[Array, Array]:
    """(result [B, K, G, T, Dv], logsumexp [B, K, G, T]); see ``pallas_gpu.forward``."""
    out, logsumexp = _call(spec, blocks, query, key, value, sides, sink)
    return out, logsumexp


def statistics(
    spec: AttentionSpec, blocks: BlockSizes, query: Array, key: Array, sides: Sequence[Array], sink: Array | None
) -> tuple[Array, Array]:
    """(maximum, sum of exponentials) of each row, [B, K, G, T]."""
    maximum, total = _call(spec, blocks, query, key, None, sides, sink)
    return maximum, total


def _call(
    spec: AttentionSpec,
    blocks: BlockSizes,
    query: Array,
    key: Array,
    value: Array | None,
    sides: Sequence[Array],
    sink: Array | None,
) -> tuple[Array, Array]:
    from jax.experimental import pallas as pl

    plgpu = mosaic()
    tiles = forward_tiles(spec, blocks)
    warpgroups, bk = tiles.warpgroups, tiles.away
    bq = warpgroups * WARPGROUP_ROWS
    visits = Visits.of(spec, "row", bq, bk, sides)
    stages = min(tiles.stages, max(visits.most, 1))
    rows, columns = rounded(spec.query_length, bq), rounded(spec.key_length, bk)
    d, dv = head_size_of(spec.head_size) or 0, head_size_of(spec.value_head_size) or 0
    heads = (spec.batch, spec.key_heads, spec.groups)
    inputs = [padded(query, rows, d), padded(key, columns, d)]
    if value is not None:
        inputs.append(padded(value, columns, dv))
    inputs += visits.operands
    inputs += [side_operand(s, x, rows, columns, False) for s, x in zip(spec.sides, sides, strict=True)]
    if sink is not None:
        inputs.append(padded(jnp.broadcast_to(sink[..., 0].astype(F32), (*heads, spec.query_length)), rows))
    numbers = jax.ShapeDtypeStruct((*heads, rows), F32)
    results = [numbers, numbers]
    if value is not None:
        results[0] = jax.ShapeDtypeStruct((*heads, rows, dv), spec.result_dtype)
    through_memory = bool(interpretation())

    scratch = [tile((warpgroups, WARPGROUP_ROWS, d), query.dtype), tile((stages, bk, d), key.dtype)]
    barriers = [plgpu.Barrier(num_barriers=warpgroups), *ring(stages, warpgroups)]
    if value is not None:
        scratch.append(tile((stages, bk, dv), value.dtype))
        barriers += ring(stages, warpgroups)
    if through_memory and value is not None:
        scratch.append(tile((warpgroups, WARPGROUP_ROWS, bk), value.dtype))

    def body(*refs: Ref) -> None:
        given = list(refs)
        q_ref, k_ref = given.pop(0), given.pop(0)
        v_ref: Ref = given.pop(0) if value is not None else None
        table = given.pop(0) if visits.operands else None
        side_refs = [given.pop(0) for _ in spec.sides]
        sink_ref = given.pop(0) if sink is not None else None
        outputs = [given.pop(0) for _ in results]
        q_shared, k_shared = given.pop(0), given.pop(0)
        v_shared: Ref = given.pop(0) if v_ref is not None else None
        p_shared = given.pop(0) if through_memory and v_ref is not None else None
        q_ready, k_ready, k_free = given.pop(0), given.pop(0), given.pop(0)
        v_ready: Ref = given.pop(0) if v_ref is not None else None
        v_free: Ref = given.pop(0) if v_ref is not None else None

        here = lax.axis_index("warpgroup")
        head = lax.axis_index("head")
        group = lax.rem(head, jnp.int32(spec.groups))
        b, k = lax.div(head, jnp.int32(spec.groups * spec.key_heads)), lax.div(head, jnp.int32(spec.groups))
        k = lax.rem(k, jnp.int32(spec.key_heads))
        home = lax.axis_index("rows")
        if visits.longest_first:
            home = visits.home_blocks - 1 - home
        steps = visits.steps(table, b, home)

        @pl.when(here < warpgroups)
        def _() -> None:
            share_registers(warpgroups, computes=True)
            base = home * bq + here * WARPGROUP_ROWS
            plgpu.copy_gmem_to_smem(
                q_ref.at[b, k, group, pl.ds(base, WARPGROUP_ROWS)], q_shared.at[here], q_ready.at[here]
            )
            start = vectors(-jnp.inf), vectors(0.0)
            if sink_ref is not None:
                first = vector(sink_ref, (b, k, group, pl.ds(base, WARPGROUP_ROWS)), "along_0").array
                start = first, jnp.where(first == -jnp.inf, 0.0, 1.0)
            running = _Running(
                plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS, dv), F32), plgpu.Layout.WGMMA)
                if v_ref is not None
                else None,
                *start,
                vectors(0.0) if spec.keeps and v_ref is not None else None,
            )
            plgpu.barrier_wait(q_ready.at[here])

            for programs, general, first_step, count in visits.loops(steps):

                def step(
                    n: Number, running: _Running, programs: TilePrograms = programs, general: bool = general
                ) -> _Running:
                    place = Place(b, k, group, base, steps.block(n) * bk, (WARPGROUP_ROWS, bk))
                    slot = lax.rem(n, jnp.int32(stages))
                    plgpu.barrier_wait(k_ready.at[slot])

                    def scores(accumulator: Ref) -> Array:
                        plgpu.wgmma(accumulator, q_shared.at[here], k_shared.at[slot].transpose((1, 0)))
                        found: Array = accumulator[...]
                        return found

                    score = pl.run_scoped(scores, plgpu.ACC((WARPGROUP_ROWS, bk), jnp.float32))
                    plgpu.barrier_arrive(k_free.at[slot])
                    p, running = _softmax(spec, programs, general, place, score, side_refs, running, value is not None)
                    if value is None or running.accumulator is None:
                        return running
                    plgpu.barrier_wait(v_ready.at[slot])
                    shared = None if p_shared is None else p_shared.at[here]
                    accumulator = running.accumulator
                    for part in parts(p, spec.reads_weights, value.dtype, spec.value_precision):
                        accumulator = multiplied(part, v_shared.at[slot], accumulator, shared)
                    plgpu.barrier_arrive(v_free.at[slot])
                    return running._replace(accumulator=accumulator)

                running = lax.fori_loop(first_step, first_step + count, step, running)

            window = b, k, group, pl.ds(base, WARPGROUP_ROWS)
            if v_ref is None or running.accumulator is None:
                outputs[0].at[window][...] = running.maximum
                outputs[1].at[window][...] = running.total
                return
            shape = running.accumulator.shape
            result = running.accumulator / lax.broadcast_in_dim(running.total, shape, (0,))
            if running.kept is not None:
                result = jnp.where(lax.broadcast_in_dim(running.kept, shape, (0,)) > 0.0, result, 0.0)
            outputs[0].at[window][...] = result.astype(spec.result_dtype)
            outputs[1].at[window][...] = running.maximum + jnp.log(running.total)

        @pl.when(here == warpgroups)
        def _() -> None:
            share_registers(warpgroups, computes=False)

            def load(_: int, n: Number, slot: Array) -> None:
                window = b, k, pl.ds(steps.block(n) * bk, bk)
                plgpu.copy_gmem_to_smem(k_ref.at[window], k_shared.at[slot], k_ready.at[slot])
                if v_ref is not None:
                    plgpu.copy_gmem_to_smem(v_ref.at[window], v_shared.at[slot], v_ready.at[slot])

            def free(slot: Array) -> None:
                plgpu.barrier_wait(k_free.at[slot])
                if v_free is not None:
                    plgpu.barrier_wait(v_free.at[slot])

            fill([(0, steps.total)], stages, load, free)

    live = spec.batch * spec.key_heads * spec.groups * visits.home_blocks * visits.most
    found = gpu.call(
        body,
        name="autopallas_attention_gpu" + ("" if value is not None else "_statistics"),
        grid={"head": math.prod(heads), "rows": visits.home_blocks},
        out_type=tuple(results),
        scratch=[*scratch, *barriers],
        warpgroups=warpgroups + 1,
        flops=2 * live * bq * bk * (d + (dv if value is not None else 0)),
        transcendentals=live * bq * bk,
        bytes_accessed=gpu.array_bytes(*inputs, *results),
        approximate=True,
        by_lanes=True,
    )(*inputs)
    cut = spec.query_length
    first = found[0][..., :cut] if value is None else found[0][..., :cut, : spec.value_head_size]
    return first, found[1][..., :cut]


def _softmax(
    spec: AttentionSpec,
    programs: TilePrograms,
    general: bool,
    place: Place,
    score: Array,
    side_refs: Sequence[Ref],
    running: _Running,
    wants_values: bool,
) -> tuple[Array, _Running]:
    """The weights of one tile, and what is known after it, its product with the values aside.

    The exponentials are of base 2.  A plain scale is folded into the factor of that, which the compiler merges with the
    subtraction.  Elsewhere the maximum is subtracted first: a fill of -1e30 times log2(e) minus itself is far from 0.
    """
    shape = place.shape
    elements = forward_elements(spec, programs)

    def across(rows: Array) -> Array:
        return lax.broadcast_in_dim(rows, shape, (0,))

    plain = not general and spec.score_dtype == F32 and not programs.inner_weights
    scale = scale_of(programs.score) if plain else None
    known: dict[str, Value] = {}
    if scale is None or len(elements) > 1:
        known = place.positions() | side_values(spec, side_refs, place)
    valid = exists(place, spec) if general and spec.key_length % shape[1] else None
    if scale is not None:
        maximum = jnp.maximum(running.maximum, jnp.max(score, axis=1) * np.float32(scale))
        e = jnp.exp2(score * np.float32(scale * LOG2E) - across(maximum * np.float32(LOG2E)))
        finite = maximum
    else:
        rounded_score = Value("tile", score.astype(spec.score_dtype))
        x = elements["logit"].on(shape, known | {"score": rounded_score}).result().widened("tile", shape)
        if valid is not None:
            x = jnp.where(valid, x, -jnp.inf)
        reached = x
        if "height" in elements:
            reached = elements["height"].on(shape, known | {"x": Value("tile", x)}).result().widened("tile", shape)
            reached = reached if valid is None else jnp.where(valid, reached, -jnp.inf)
        maximum = jnp.maximum(running.maximum, jnp.max(reached, axis=1))
        # A row with nothing but -inf so far must stay at sum 0, where -inf - -inf would be NaN.
        finite = jnp.where(maximum == -jnp.inf, 0.0, maximum)
        e = halves(x, across(finite)) if "inner" in elements else jnp.exp2((x - across(finite)) * np.float32(LOG2E))
    shrink = jnp.exp2((running.maximum - finite) * np.float32(LOG2E))

    def weighted(name: str, e: Array) -> Array:
        if name not in elements:
            return e
        e = elements[name].on(shape, known | {"e": Value("tile", e)}).result().widened("tile", shape)
        return e if valid is None else jnp.where(valid, e, 0.0)

    if "inner" in elements:
        e = weighted("inner", e) * e
    total = running.total * shrink + jnp.sum(e, axis=1)
    running = running._replace(maximum=maximum, total=total)
    if not wants_values or running.accumulator is None:
        return e, running
    p = weighted("outer", e)
    kept = running.kept
    if kept is not None:
        seen = elements["kept"].on(shape, known).result().widened("tile", shape) if "kept" in elements else None
        ones = jnp.full(shape, 1.0, F32)
        seen = ones if seen is None else jnp.where(seen, ones, 0.0)
        seen = mosaic().layout_cast(seen if valid is None else jnp.where(valid, seen, 0.0), mosaic().Layout.WGMMA)
        kept = jnp.maximum(kept, jnp.max(seen, axis=1))
    accumulator = running.accumulator * lax.broadcast_in_dim(shrink, running.accumulator.shape, (0,))
    return p, running._replace(accumulator=accumulator, kept=kept)


# ---------------------------------------------------------------------- shared with the backward


def share_registers(warpgroups: int, computes: bool) -> None:
    """Moves registers from the warpgroup that moves memory to those that compute: first thing in either."""
    share = _REGISTERS[warpgroups]
    if share is not None:
        mosaic().set_max_registers(share[0 if computes else 1], action="increase" if computes else "decrease")


def vectors(value: float) -> Array:
    """The same number for each row of a warpgroup."""
    plgpu = mosaic()
    same: Array = plgpu.layout_cast(jnp.full((WARPGROUP_ROWS,), value, F32), plgpu.Layout.WGMMA.reduce(1))
    return same


def ring(stages: int, warpgroups: int, copies: int = 1) -> list[Ref]:
    """The barriers of a ring of stages: one says that a stage is filled, one that all who compute have used it."""
    plgpu = mosaic()
    return [
        plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
    ]


def fill(
    parts: Sequence[tuple[Number, Number]],
    stages: int,
    load: Callable[[int, Array, Array], None],
    free: Callable[[Array], None],
) -> None:
    """What the warpgroup that moves memory does: it loads each step into its stage, once that is ``free``.

    In the end it waits for the last use of each stage: no arrival stays unobserved, and shared memory is not given back
    while wgmma reads it.

    Args:
      parts: (first step, how many) of each loop of those who compute, which follow each other.
      stages: of the ring.
      load: called with the part, the step, and its stage.
      free: waits until a stage may be filled again.
    """
    from jax.experimental import pallas as pl

    total: Number = 0
    for number, (first, count) in enumerate(parts):
        total = first + count

        @pl.loop(first, first + count)
        def _(n: Array, number: int = number) -> None:
            slot = lax.rem(n, jnp.int32(stages))
            pl.when(n >= stages)(lambda: free(slot))
            load(number, n, slot)

    used = min(total, stages) if isinstance(total, int) else jnp.minimum(total, stages)

    @pl.loop(0, used)
    def _(n: Array) -> None:
        free(lax.rem(total - used + n, jnp.int32(stages)))


def parts(tile_value: Array, read: Dtype | None, dtype: DTypeLike, precision: str | None) -> list[Array]:
    """A tile as a sum of tiles of the dtype that wgmma takes: one where the original's product reads the tile in that
    dtype, else two, which have 16 bits of fraction and more where TF32 has 10, or three for a higher precision."""
    if read == dtype:
        return [tile_value.astype(dtype)]
    found = []
    for _ in range(2 if precision is None else 3):
        found.append(tile_value.astype(dtype))
        tile_value = tile_value - found[-1].astype(F32)
    return found


def multiplied(tile_value: Array, shared: Ref, accumulator: Array, through: Ref | None) -> Array:
    """``accumulator`` plus a tile in registers times a matrix in shared memory, complete when it returns.

    ``through``: shared memory for the tile, where the interpreter cannot multiply from registers.
    """
    from jax.experimental import pallas as pl

    plgpu = mosaic()
    if through is None:

        def multiply(ref: Ref) -> None:
            plgpu.wgmma(ref, tile_value, shared)

        done: Array = pl.run_state(multiply)(plgpu.ACC.init(accumulator))
        return done

    through[...] = tile_value
    plgpu.commit_smem()

    def product(ref: Ref) -> Array:
        plgpu.wgmma(ref, through, shared)
        found: Array = ref[...]
        return found

    summed: Array = accumulator + pl.run_scoped(product, plgpu.ACC(accumulator.shape, jnp.float32))
    return summed
