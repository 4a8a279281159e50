"""Computes the backward of attention on an H100; the gradients of queries and of keys and values share a kernel body.

The algorithm is FlashAttention-2 (Dao 2023, https://arxiv.org/abs/2307.08691), in two passes without atomics, so that
results are the same in every run.  With a, b at home and c, d streamed, both passes are: score = a c^T, dp = b d^T, the
elementwise derivative, then gradient of a += dscore c, and of b += p d.  Queries and cotangents are at home in the
first pass, keys and values in the second, where the tile is transposed, so that no tile has to be turned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from autopallas.kernels import gpu
from autopallas.kernels.attention import xla
from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.kernels.attention.fill_proofs import Proof
from autopallas.kernels.attention.gpu_backward_plan import Block, Memory, Plan, home_of
from autopallas.kernels.attention.gpu_block_sizes import backward_tiles, schedule_of
from autopallas.kernels.attention.gpu_elements import Value, backward_elements
from autopallas.kernels.attention.gpu_forward import normalizers
from autopallas.kernels.attention.gpu_grid import (
    WARPGROUP_ROWS,
    Loop,
    Place,
    exists,
    head_size_of,
    side_values,
    vector,
)
from autopallas.kernels.attention.gpu_layout import Layout
from autopallas.kernels.attention.gpu_order import list_length
from autopallas.kernels.attention.gpu_score_units import F16, Units, fit, norm, unit_of
from autopallas.kernels.attention.gpu_side_gradient import tile_gradient
from autopallas.kernels.attention.gpu_warpgroups import drain, fill, multiply, parts, share_registers, started, vectors
from autopallas.kernels.attention.operands import Cotangents, Gradients, Operands, Residuals, ScaledRows
from autopallas.kernels.attention.spec import AttentionSpec
from autopallas.kernels.gpu import mosaic, store
from autopallas.kernels.refs import Number, Ref

__all__ = ["backward"]

Array: TypeAlias = jax.Array
F32 = np.dtype(np.float32)


def backward(
    spec: AttentionSpec, block_sizes: BlockSizes, operands: Operands, residuals: Residuals, cotangents: Cotangents
) -> Gradients:
    """Computes the gradients; see ``pallas_gpu.backward``."""
    query, key, value, _, sink = operands
    dout, size = cotangents.out, spec.value_head_size
    # wgmma multiplies 16-bit operands: a cotangent that the original does not round is split into a sum of two, which
    # are concatenated along the head, and the values are repeated for them.
    split = spec.reads_weights != query.dtype or dout.dtype != query.dtype
    shift, factor = normalizers(spec, block_sizes, operands, residuals)
    if split and head_size_of(2 * size) is None:
        return xla.backward(spec, block_sizes, operands, residuals._replace(shift=shift, factor=factor), cotangents)
    # Everything after the probabilities is linear in the cotangent, which is multiplied by their factor instead.  It is
    # read and written as it lies in memory.
    layout = Layout.of(spec.layouts.query)
    scaled = layout.from_canonical(dout).astype(F32) * layout.from_canonical(factor[..., None])
    unit = unit_of(scaled, value) if query.dtype == np.float16 else None
    scaled = scaled if unit is None else scaled * unit
    delta = jnp.sum(scaled * layout.from_canonical(residuals.out).astype(F32), axis=-1, keepdims=True)
    proof = Proof.of(spec, operands, dout, (delta, factor))
    rounded_dout = scaled.astype(query.dtype)
    read = operands
    if split:
        rest = (scaled - rounded_dout.astype(F32)).astype(query.dtype)
        rounded_dout = jnp.concatenate([rounded_dout, rest], axis=-1)
        read = operands._replace(value=jnp.concatenate([value, value], axis=-1))
        spec = replace(spec, value_head_size=2 * size)
    rows = ScaledRows(layout.to_canonical(rounded_dout), shift, layout.to_canonical(delta)[..., 0])
    units = Units.of(spec, layout.to_canonical(norm(scaled)[..., None])[..., 0], value) if fit(spec) else None
    schedule = schedule_of(spec, block_sizes)
    if spec.rounding_adds_up:
        tiles = backward_tiles(spec, "query")
        plan = Plan.of(spec, "query", tiles, (), read, schedule, proof)
        rows = rows._replace(delta=_call(plan, read, rows)["delta"] * factor)
    found: dict[str | int, Array] = {}
    for kernel in ("query", "key_value"):
        tiles = backward_tiles(spec, kernel)
        for outputs in tiles.outputs:
            found |= _call(Plan.of(spec, kernel, tiles, outputs, read, schedule, proof), read, rows, units)
    if split:
        found["value"] = found["value"][..., :size].astype(F32) + found["value"][..., size:].astype(F32)

    def finished(gradient: Array, operand: Array) -> Array:
        return (gradient if unit is None else gradient / unit).astype(operand.dtype)

    dsides = tuple(
        finished(_side_gradient(spec, number, found, read, rows, proof), x) if side.differentiable else None
        for number, (side, x) in enumerate(zip(spec.sides, operands.sides, strict=True))
    )
    dsink = None
    if sink is not None and spec.sink is not None:
        weight = jnp.exp(sink.astype(F32) - shift[..., None])
        summed = tuple(axis for axis, varies in enumerate(spec.sink) if not varies)
        dsink = finished(jnp.sum(-weight * rows.delta[..., None], axis=summed, keepdims=True), sink)
    dquery = finished(found["query"], query)
    dkey, dvalue = finished(found["key"], key), finished(found["value"], value)
    return Gradients(dquery, dkey, dvalue, dsides, dsink)


def _side_gradient(
    spec: AttentionSpec,
    number: int,
    found: Mapping[str | int, Array],
    operands: Operands,
    rows: ScaledRows,
    proof: Proof | None,
) -> Array:
    """Computes the gradient of a side input; if it does not fill tiles, from a number per row or key, and head."""
    varies = spec.sides[number].varies
    if varies[3] and varies[4]:
        return tile_gradient(spec, number, operands, rows, proof)
    whole = found[number][:, :, None, None, :] if varies[4] else found[number][..., None]
    summed = tuple(axis for axis, v in enumerate(varies) if not v and whole.shape[axis] > 1)
    return jnp.sum(whole, axis=summed, keepdims=True)


# ---------------------------------------------------------------------- the kernel

_NUMBERS = ("shift", "delta")
"""What is read of each row."""


def _call(plan: Plan, operands: Operands, rows: ScaledRows, units: Units | None = None) -> dict[str | int, Array]:
    """Runs a kernel; returns its gradients and numbers by name, cut to the attention's sizes."""
    spec, visits, outputs = plan.spec, plan.visits, plan.outputs
    inputs, results, sizes = plan.inputs(operands, rows, units), plan.results, plan.sizes
    tiles_visited = math.prod(plan.heads) * visits.home_blocks * visits.most * plan.groups
    elements = tiles_visited * plan.home * plan.away
    read = plan.head_size + plan.value_head_size * plan.inner
    found = gpu.call(
        partial(_kernel, plan),
        name=f"autopallas_attention_gpu_backward_{'_'.join(outputs) or 'delta'}",
        grid={"block": plan.order.blocks},
        out_type=results,
        scratch=plan.scratch(),
        warpgroups=plan.warpgroups + 1,
        flops=2 * elements * (read + sum(sizes[o] for o in outputs)),
        transcendentals=elements,
        bytes_accessed=gpu.array_bytes(*inputs, *results),
        approximate=True,
        by_lanes=True,
    )(*inputs)
    cut = spec.key_length if plan.flipped else spec.query_length
    head_sizes = {"query": spec.head_size, "key": spec.head_size, "value": spec.value_head_size}
    named: dict[str | int, Array] = {
        o: plan.layouts[o].cut(x, cut, head_sizes[o]) for o, x in zip(outputs, found, strict=False)
    }
    return named | {n: x[..., :cut] for n, x in zip(plan.numbers, found[len(outputs) :], strict=True)}


def _kernel(plan: Plan, *refs: Ref) -> None:
    memory, warpgroup = Memory.of(plan, refs), lax.axis_index("warpgroup")
    if plan.persistent:
        pl.when(warpgroup < plan.warpgroups)(partial(_compute_all, plan, memory))
        pl.when(warpgroup == plan.warpgroups)(partial(_load_all, plan, memory))
        return
    pl.when(warpgroup < plan.warpgroups)(lambda: _compute(Block.of(plan, memory)))
    pl.when(warpgroup == plan.warpgroups)(lambda: _load(Block.of(plan, memory)))


def _load(own: Block) -> None:
    """Fills the ring with the streamed operands."""
    share_registers(own.plan.warpgroups, computes=False)
    fill(_parts(own), own.plan.stages, partial(_load_step, own), partial(_free, own.memory))


def _load_all(plan: Plan, memory: Memory) -> None:
    """Fills the ring, and loads what is at home when what was there before is not read any more.

    The first streamed operands of a home block are loaded before, since they need not wait for that.
    """
    plgpu = mosaic()
    share_registers(plan.warpgroups, computes=False)

    def at_home(own: Block, n: Number) -> None:
        outer, number = home_of(plan, memory, n)
        for w in range(plan.warpgroups):
            pl.when(n > 0)(partial(plgpu.barrier_wait, memory.home_free.at[w]))
            _load_home(own, outer, number * plan.home + w * WARPGROUP_ROWS, w)

    def take(n: Array, done: Array) -> Array:
        own = Block.of(plan, memory, n, done)

        def load(part: int, step: Number, slot: Array) -> None:
            _load_step(own, part, step, slot)
            pl.when(step == 0)(partial(at_home, own, n))

        pl.when(own.total == 0)(partial(at_home, own, n))
        fill(_parts(own), plan.stages, load, partial(_free, memory), done)
        return done + own.total

    done = lax.fori_loop(0, list_length(memory.lists), take, jnp.int32(0))
    drain(done, plan.stages, partial(_free, memory))
    for w in range(plan.warpgroups):
        plgpu.barrier_wait(memory.home_free.at[w])


def _parts(own: Block) -> list[tuple[Number, Number]]:
    """Returns the first step and the number of steps of each loop."""
    groups = own.plan.groups
    return [(loop.first * groups, loop.steps * groups) for loop in own.loops]


def _load_step(own: Block, part: int, n: Number, slot: Array) -> None:
    """Loads what a step streams."""
    plgpu, plan, memory = mosaic(), own.plan, own.memory
    index, start = own.address(n, own.loops[part])
    window = (*index, pl.ds(start, plan.away))
    for source, target in zip(memory.streamed, memory.streamed_shared, strict=True):
        if source is not None:
            plgpu.copy_gmem_to_smem(source.at[window], target.at[slot], memory.ready.at[slot])
    if plan.flipped:
        numbers = memory.numbers.at[(*index, slice(None), pl.ds(start, plan.away))]
        plgpu.copy_gmem_to_smem(numbers, memory.numbers_shared.at[slot], memory.ready.at[slot])
    for side, target in memory.sides_shared.items():
        # Computed anew, for this warpgroup has few registers.
        (b, k), number = home_of(plan, memory, own.listed)
        at = tuple(i if v else 0 for i, v in zip((b, k, index[2]), plan.spec.sides[side].varies, strict=False))
        for w in range(plan.warpgroups):
            keys = pl.ds(number * plan.home + w * WARPGROUP_ROWS, WARPGROUP_ROWS)
            source = memory.sides[side].at[(*at, pl.ds(start, plan.away), keys)]
            plgpu.copy_gmem_to_smem(source, target.at[slot, w], memory.ready.at[slot])


def _free(memory: Memory, slot: Array) -> None:
    """Waits for the last use of a stage."""
    mosaic().barrier_wait(memory.free.at[slot])


def _load_home(own: Block, outer: tuple[Number, ...], base: Number, warpgroup: Number) -> None:
    """Loads what a warpgroup has at home, from position ``base`` on."""
    plgpu, memory = mosaic(), own.memory
    window = (*outer, pl.ds(base, WARPGROUP_ROWS))
    for source, target in zip(memory.home[:2], memory.home_shared[:2], strict=True):
        plgpu.copy_gmem_to_smem(source.at[window], target.at[warpgroup], memory.home_ready.at[warpgroup])


def _compute(own: Block) -> None:
    """Computes the gradients of the 64 rows or columns of a warpgroup."""
    share_registers(own.plan.warpgroups, computes=True)
    _load_home(own, *own.window(), own.warpgroup)
    _visit(own)


def _compute_all(plan: Plan, memory: Memory) -> None:
    """Computes the gradients of 64 rows or columns of each home block that this block of threads has."""
    share_registers(plan.warpgroups, computes=True)

    def take(n: Array, done: Array) -> Array:
        own = Block.of(plan, memory, n, done)
        _visit(own)
        return done + own.total

    lax.fori_loop(0, list_length(memory.lists), take, jnp.int32(0))


def _visit(own: Block) -> None:
    """Computes and stores the gradients of what a warpgroup has at home."""
    plgpu, plan, memory, here = mosaic(), own.plan, own.memory, own.warpgroup
    _, base = own.window()
    at_home = {}
    if not plan.flipped:
        rows = pl.ds(base, WARPGROUP_ROWS)
        at_home = {x: vector(memory.numbers, (*own.outer, n, rows), "along_0") for n, x in enumerate(_NUMBERS)}
    if plan.halved:
        at_home["unit"] = own.units(0)
    plgpu.barrier_wait(memory.home_ready.at[here])

    def visit(*sums: Ref) -> None:
        numbers = tuple(vectors(0.0) for _ in plan.numbers)
        for loop in own.loops:
            first, last = loop.first * plan.groups, (loop.first + loop.steps) * plan.groups
            step = partial(_add_tile, own, base, at_home, loop, dict(zip(plan.outputs, sums, strict=True)))
            numbers = lax.fori_loop(first, last, step, numbers)
        if plan.persistent:
            plgpu.barrier_arrive(memory.home_free.at[here])
        outer, first = own.window(again=True)
        window = (*outer, pl.ds(first, WARPGROUP_ROWS))
        found = {name: sum_[...] for name, sum_ in zip(plan.outputs, sums, strict=True)}
        for name in [name for name in found if plan.halved and name != "value"]:
            found[name] *= own.units(1).widened("tile", found[name].shape)
        for ref, total in zip(memory.results, (*found.values(), *numbers), strict=True):
            store(ref.at[window], total.astype(ref.dtype))

    if plan.outputs:
        pl.run_scoped(visit, *(plgpu.ACC((WARPGROUP_ROWS, plan.sizes[o]), jnp.float32) for o in plan.outputs))
    else:
        visit()


class _Tile(NamedTuple):
    """A tile of a warpgroup.

    Attributes:
      block: the block of threads.
      place: where the tile is.
      slot: the stage.
      at_home: shift and delta, if rows are at home, and the unit.
      ragged: whether streamed positions may not exist.
    """

    block: Block
    place: Place
    slot: Array
    at_home: Mapping[str, Value]
    ragged: bool

    @staticmethod
    def of(own: Block, base: Array, at_home: Mapping[str, Value], loop: Loop, n: Number) -> _Tile:
        plan, spec = own.plan, own.plan.spec
        slot = own.slot(n)
        index, start = own.address(n, loop)
        row, column = (start, base) if plan.flipped else (base, start)
        b, k, g = index if plan.flipped else own.outer
        place = Place(b, k, g, row, column, plan.shape, plan.flipped)
        length = spec.query_length if plan.flipped else spec.key_length
        ragged = loop.general and bool(length % plan.away) and not plan.unmasked
        return _Tile(own, place, slot, at_home, ragged)

    def numbers(self, name: Literal["shift", "delta"]) -> Value:
        """Reads shift or delta of the tile's rows."""
        plan, memory = self.block.plan, self.block.memory
        if not plan.flipped:
            return self.at_home[name]
        return vector(memory.numbers_shared, (self.slot, _NUMBERS.index(name)), "along_1")

    def existing(self, x: Value) -> Array:
        """Returns a value as a tile in float32, with zeros where a streamed position does not exist."""
        array = x.widened("tile", self.place.shape).astype(F32)
        return jnp.where(exists(self.place.again(), self.block.plan.spec), array, 0.0) if self.ragged else array

    def add(self, output: str, x: Value, total: Ref) -> int:
        """Starts to add the product of a tile with streamed operands to the gradient of ``output``; returns the number
        of wgmma."""
        plan, memory, spec = self.block.plan, self.block.memory, self.block.plan.spec
        value = output == "value"
        if plan.halved and not value:
            staged = None if memory.staged_half is None else memory.staged_half.at[self.block.warpgroup]
            scaled = self.existing(x) * self.at_home["unit"].widened("tile", plan.shape)
            multiply(scaled.astype(F16), memory.streamed_shared.halved.at[self.slot], total, staged)
            return 1
        staged = None if memory.staged is None else memory.staged.at[self.block.warpgroup]
        streamed = memory.streamed_shared.second if value else memory.streamed_shared.first
        read = spec.reads_weights if value else spec.reads_score_gradients
        precision = spec.value_precision if value else spec.score_precision
        found = parts(self.existing(x), read, plan.dtype, precision)
        for part in found:
            multiply(part, streamed.at[self.slot], total, staged)
        return len(found)


def _add_tile(
    own: Block,
    base: Array,
    at_home: Mapping[str, Value],
    loop: Loop,
    sums: Mapping[str, Ref],
    n: Number,
    numbers: tuple[Array, ...],
) -> tuple[Array, ...]:
    """Adds the contributions of one more tile to the gradients, and returns the numbers with those of the tile.

    ``base`` is the first position at home, and ``n`` the step.
    """
    plan, memory = own.plan, own.memory
    # Addresses of what is at home are computed for each tile: registers would not hold them.
    here = lax.optimization_barrier(own.warpgroup)
    tile = _Tile.of(own, base, at_home, loop, n)
    home, streamed = memory.home_shared, memory.streamed_shared
    pairs = [(home.first.at[here], streamed.first.at[tile.slot])]
    if plan.inner:
        pairs.append((home.second.at[here], streamed.second.at[tile.slot]))
    mosaic().barrier_wait(memory.ready.at[tile.slot])
    found: tuple[Array, ...] = started(pairs, plan.shape, partial(_add_products, tile, loop, sums, numbers))
    return found


def _add_products(
    tile: _Tile,
    loop: Loop,
    sums: Mapping[str, Ref],
    numbers: tuple[Array, ...],
    score: Callable[..., Array],
    dp_of: Callable[..., Array] | None = None,
) -> tuple[Array, ...]:
    """Adds what follows from the scores and the gradients of the probabilities, which are being computed.

    Exponentials are computed while wgmma multiplies for these gradients, and gradients of scores while it multiplies
    the probabilities.  ``score`` and ``dp_of`` are functions as :func:`started` has them.
    """
    plgpu, plan, memory = mosaic(), tile.block.plan, tile.block.memory
    spec, shape, outputs = plan.spec, plan.shape, plan.outputs
    turned = {n: ref.at[tile.slot, tile.block.warpgroup] for n, ref in memory.sides_shared.items()}
    known = side_values(spec, memory.sides, tile.place, turned) | {"shift": tile.numbers("shift")}
    known["score"] = Value("tile", score().astype(spec.score_dtype))
    place = tile.place.again() if loop.general else tile.place
    elements = backward_elements(spec, loop.programs).on(shape, known | place.positions())
    running = tile.add("value", elements.result()[0], sums["value"]) if "value" in outputs else 0
    dp = None
    if dp_of is not None:
        dp = dp_of(running)
        if loop.general:
            elements.renewed(tile.place.again().positions())
        elements.given({"dp": Value("tile", dp)} | ({"delta": tile.numbers("delta")} if outputs else {}))
    if plan.inner and outputs:
        tile.add(outputs[0], elements.result()[1], sums[outputs[0]])
    further = []
    for number, total in zip(plan.numbers, numbers, strict=True):
        if number == "delta":
            assert dp is not None
            part = Value("tile", elements.result()[0].widened("tile", shape).astype(F32) * dp)
        else:
            part = elements.result()[2][plan.floating.index(number)]
        further.append(total + jnp.sum(tile.existing(part), axis=1))
    plgpu.wgmma_wait(0)
    plgpu.barrier_arrive(memory.free.at[tile.slot])
    return tuple(further)
