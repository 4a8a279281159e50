"""Chunks of recurrences on a Hopper GPU, in three kernels: states at the beginnings of chunks, results, and gradients.

The states of one head go from chunk to chunk in the registers of a warpgroup, which multiplies them by the chunk's
decay and has wgmma add what the chunk adds; another warpgroup loads ahead, and a third weighs keys.  Backwards through
the chunks the same kernel gives the cotangents of the states.  Everything else of a chunk needs only the state before
it and the cotangent of the one after it, so that a block computes one chunk of one head, and all of them run at once.
Of the gradients one block computes those of queries, and another one, with transposed tiles, those of keys and values.

The products of decays over the segments of a chunk are made in registers, each of two factors: see
:class:`autopallas.kernels.recurrence.products.HalvedProducts`.

Queries, keys, values, results and their cotangents are read and written in the layout of the loop, steps first: TMA
moves a chunk of one head, of which the steps are as far apart as the program has them.

Letters: T steps, X chunks, C steps of a chunk, G groups, H heads of a group, J heads of keys and queries (H or 1), N
rows of a state, P columns, L sizes of blocks of steps.

This module imports Pallas, so it is imported only where a kernel is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from autopallas.kernels.gpu import array_bytes, call, mosaic, store, tile, unravelled
from autopallas.kernels.recurrence.gpu_sizes import CHUNK, FROM_START, LEVELS, NUMBERS, PART, TO_END
from autopallas.kernels.refs import Ref
from autopallas.sites.interpret import interpretation
from autopallas.sites.spec import Dtype

__all__ = ["gradients", "results", "states"]

Array: TypeAlias = jax.Array

_F32, _BF16 = jnp.float32, jnp.bfloat16


def _stages(columns: int) -> int:
    """Returns how many chunks are loaded ahead, with which two blocks have room on a multiprocessor."""
    return 4 if columns <= PART else 3


# ---------------------------------------------------------------------- states


def states(
    key: Array, value: Array, numbers: Array, total: Array, initial: Array, reverse: bool = False
) -> tuple[Array, Array]:
    """Returns the states before all chunks [X, G, H, N, P] in bfloat16, and the last one [G, H, N, P].

    Args:
      key: [T, G, J, N].
      value: [T, G, H, P].
      numbers: [X, G, H, L + 2, C], see :data:`autopallas.kernels.recurrence.gpu_sizes.NUMBERS`, of which keys are
        multiplied by those to the end of the chunk.
      total: [X, G, H], the decay of whole chunks.
      initial: [G, H, N, P].
      reverse: whether the last chunk comes first, and keys are multiplied by the numbers from its start.
    """
    _, groups, heads, columns = value.shape
    chunks, rows = total.shape[0], key.shape[-1]
    stages = _stages(columns)
    plgpu = mosaic()
    kernel = call(
        partial(_states_kernel, reverse),
        name="autopallas_recurrence_states",
        grid={"block": groups * heads * (rows // PART)},
        out_type=(
            jax.ShapeDtypeStruct((chunks, groups, heads, rows, columns), _BF16),
            jax.ShapeDtypeStruct((groups, heads, rows, columns), _F32),
        ),
        scratch=[
            tile((stages, CHUNK, PART), _BF16),
            tile((stages, CHUNK, columns), _BF16),
            plgpu.SMEM((stages, CHUNK), _F32),
            tile((2, PART, columns), _BF16),
            plgpu.Barrier(num_arrivals=3, num_barriers=stages),
            plgpu.Barrier(num_arrivals=1, num_barriers=stages),
            plgpu.Barrier(num_arrivals=1, num_barriers=stages),
        ],
        warpgroups=3,
        by_lanes=True,
        flops=2 * chunks * groups * heads * CHUNK * rows * columns,
        bytes_accessed=array_bytes(key, value, total) + (2 * chunks + 8) * groups * heads * rows * columns,
    )
    entering, last = kernel(key, value, numbers, total.reshape(-1), initial)
    return entering, last


def _states_kernel(reverse: bool, *refs: Ref) -> None:
    key, value, numbers, total, initial, entering, last, keys, values, weights, stored, full, weighted, free = refs
    plgpu, stages = mosaic(), keys.shape[0]
    chunks, groups, heads, rows, _ = entering.shape
    head, part = unravelled(lax.axis_index("block"), rows // PART)
    g, h = unravelled(head, heads)
    j = h if key.shape[2] == heads else 0
    across = pl.ds(part * PART, PART)
    warpgroup = lax.axis_index("warpgroup")

    def place(i: Array) -> Array:
        return chunks - 1 - i if reverse else i

    @pl.when(warpgroup == 1)
    def produce() -> None:
        @pl.loop(0, chunks)
        def load(i: Array) -> None:
            slot, x = lax.rem(i, jnp.int32(stages)), place(i)
            pl.when(i >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
            number = numbers.at[x, g, h, FROM_START if reverse else TO_END]
            plgpu.copy_gmem_to_smem(number, weights.at[slot], full.at[slot])
            plgpu.copy_gmem_to_smem(key.at[_steps_of(x), g, j, across], keys.at[slot], full.at[slot])
            plgpu.copy_gmem_to_smem(value.at[_steps_of(x), g, h], values.at[slot], full.at[slot])

        held = min(chunks, stages)

        @pl.loop(0, held)
        def drain(i: Array) -> None:
            plgpu.barrier_wait(free.at[lax.rem(chunks - held + i, jnp.int32(stages))])

    @pl.when(warpgroup == 2)
    def weigh() -> None:
        @pl.loop(0, chunks)
        def multiply(i: Array) -> None:
            slot = lax.rem(i, jnp.int32(stages))
            plgpu.barrier_wait(full.at[slot])
            own = _loaded(keys.at[slot])
            keys.at[slot][...] = (own * _along(weights, slot, own.shape, 0)).astype(_BF16)
            plgpu.commit_smem()
            plgpu.barrier_arrive(weighted.at[slot])

    @pl.when(warpgroup == 0)
    def consume() -> None:
        def advance(i: Array, state: Array) -> Array:
            slot, x = lax.rem(i, jnp.int32(stages)), place(i)
            buffer = stored.at[lax.rem(i, jnp.int32(2))]
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            buffer[...] = state.astype(_BF16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffer, entering.at[x, g, h, across])
            factor = total[(x * groups + g) * heads + h]
            plgpu.barrier_wait(full.at[slot])
            plgpu.barrier_wait(weighted.at[slot])
            after = _added(factor * state, keys.at[slot].transpose((1, 0)), values.at[slot])
            plgpu.barrier_arrive(free.at[slot])
            return after

        first = plgpu.load(initial.at[g, h, across], layout=plgpu.Layout.WGMMA, optimized=False)
        store(last.at[g, h, across], lax.fori_loop(0, chunks, advance, first))
        plgpu.wait_smem_to_gmem(0)


def _steps_of(chunk: Array) -> slice | pl.Slice:
    """Returns the steps of a chunk."""
    return pl.ds(chunk * CHUNK, CHUNK)


def _loaded(shared: Ref) -> Array:
    """Returns a matrix in shared memory, in float32 and registers."""
    plgpu = mosaic()
    found: Array = plgpu.load(shared, layout=plgpu.Layout.WGMMA)
    return found.astype(_F32)


def _stored(target: Ref, value: Array, shared: Ref) -> None:
    """Stores a matrix, through shared memory that nothing else needs any longer where it is rounded to bfloat16."""
    plgpu = mosaic()
    if target.dtype != _BF16:
        store(target, value)
        return
    plgpu.commit_smem()  # the other warps have multiplied by it, too
    shared[...] = value.astype(_BF16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(shared, target)


# ---------------------------------------------------------------------- results


class _Tiles(NamedTuple):
    """Shared memory of a chunk: tiles of the shapes of :func:`_chunk_shapes`, and ``NUMBERS`` numbers of each step."""

    query: Ref
    key: Ref
    value: Ref
    state: Ref
    numbers: Ref


def _chunk_shapes(rows: int, columns: int) -> list[tuple[int, ...]]:
    return [(CHUNK, rows), (CHUNK, rows), (CHUNK, columns), (rows, columns)]


def results(
    before: bool, dtype: Dtype, query: Array, key: Array, value: Array, numbers: Array, entering: Array
) -> Array:
    """Returns y [T, G, H, P].

    Args:
      before: whether y reads the states before their steps.
      dtype: that of y, bfloat16 or float32.
      query, key: [T, G, J, N].
      value: [T, G, H, P].
      numbers: [X, G, H, L + 2, C], see :data:`autopallas.kernels.recurrence.gpu_sizes.NUMBERS`.
      entering: [X, G, H, N, P], the states before the chunks.
    """
    chunks, groups, heads, rows, columns = entering.shape
    plgpu = mosaic()
    kernel = call(
        partial(_results_kernel, before),
        name="autopallas_recurrence_results",
        grid={"block": chunks * groups * heads},
        out_type=jax.ShapeDtypeStruct(value.shape, dtype),
        scratch=[
            *(tile(shape, _BF16) for shape in _chunk_shapes(rows, columns)),
            plgpu.SMEM((NUMBERS, CHUNK), _F32),
            *_staging(),
            plgpu.Barrier(num_arrivals=5),
        ],
        warpgroups=1,
        by_lanes=True,
        flops=2 * chunks * groups * heads * CHUNK * (CHUNK * (rows + columns) + rows * columns),
        bytes_accessed=array_bytes(query, key, value, numbers, entering) + dtype.itemsize * value.size,
    )
    found: Array = kernel(query, key, value, numbers, entering)
    return found


def _staging() -> list[Ref]:
    """Makes shared memory for tiles that are multiplied, for the interpreter, which cannot multiply from registers."""
    return [tile((CHUNK, CHUNK), _BF16)] if interpretation() else []


def _place(number: Array, shape: Sequence[int]) -> tuple[Array, Array, Array]:
    """Returns which chunk, group and head the one with a number is."""
    head, h = unravelled(number, shape[2])
    x, g = unravelled(head, shape[1])
    return x, g, h


def _results_kernel(before: bool, *refs: Ref) -> None:
    query, key, value, numbers, entering, out = refs[:6]
    *shared, barrier = refs[6:]
    tiles, staged = _Tiles(*shared[:5]), shared[5] if len(shared) > 5 else None
    plgpu = mosaic()
    x, g, h = _place(lax.axis_index("block"), entering.shape)
    j = h if key.shape[2] == entering.shape[2] else 0
    steps = _steps_of(x)
    of_steps = (query.at[steps, g, j], key.at[steps, g, j], value.at[steps, g, h])
    places = (*of_steps, entering.at[x, g, h], numbers.at[x, g, h])
    for place, own in zip(places, tiles, strict=True):
        plgpu.copy_gmem_to_smem(place, own, barrier)
    plgpu.barrier_wait(barrier)
    columns = entering.shape[4]

    def products(scores: Ref, read: Ref) -> tuple[Array, Array]:
        plgpu.wgmma(scores, tiles.query, tiles.key.transpose((1, 0)))
        plgpu.wgmma(read, tiles.query, tiles.state)
        weights = _weights(tiles.numbers, before, transposed=False)
        return scores[...] * weights, read[...]

    scores, read = pl.run_scoped(products, plgpu.ACC((CHUNK, CHUNK), _F32), plgpu.ACC((CHUNK, columns), _F32))
    read = read * _along(tiles.numbers, FROM_START, read.shape, 0)
    _stored(out.at[steps, g, h], _multiplied(scores.astype(_BF16), tiles.value, read, staged), tiles.value)
    plgpu.wait_smem_to_gmem(0)


def _along(numbers: Ref, number: int | Array, shape: tuple[int, ...], axis: int) -> Array:
    """Returns one of the numbers of each step as a tile whose axis are the steps."""
    plgpu = mosaic()
    found = plgpu.load(numbers.at[number], layout=plgpu.Layout.WGMMA.reduce(1 - axis), optimized=False)
    return lax.broadcast_in_dim(found, shape, (axis,))


def _of_level(numbers: Ref, level: int, axis: int) -> Array:
    return _along(numbers, level, (CHUNK, CHUNK), axis)


def _steps() -> tuple[Array, Array]:
    """Returns the number of each row and of each column of a tile of scores."""
    plgpu = mosaic()
    shape, layout = (CHUNK, CHUNK), plgpu.Layout.WGMMA
    first, second = (plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout) for axis in (0, 1))
    return first, second


def _weights(numbers: Ref, before: bool, transposed: bool) -> Array:
    """Returns the factor [C, C] with which a step (a row; or a column) reads what another one added.

    Two steps are in different halves of one block of 2, 4, 8, ... steps: that of the highest bit in which they differ.
    """
    first, second = _steps()
    differing = first ^ second
    found = _of_level(numbers, 0, 0) * _of_level(numbers, 0, 1)
    for level in range(1, LEVELS):
        product = _of_level(numbers, level, 0) * _of_level(numbers, level, 1)
        found = jnp.where(differing >= 1 << level, product, found)
    later, earlier = (second, first) if transposed else (first, second)
    own = 0.0 if before else jnp.where(differing == 0, _full(1.0), _full(0.0))
    return jnp.where(later > earlier, found, own)


def _full(value: float) -> Array:
    plgpu = mosaic()
    found: Array = plgpu.layout_cast(jnp.full((CHUNK, CHUNK), value, _F32), plgpu.Layout.WGMMA)
    return found


def _multiplied(factor: Array, shared: Ref, total: Array, staged: Ref | None) -> Array:
    """Returns a sum and the product of a tile in registers with a matrix in shared memory."""
    if staged is None:
        return _added(total, factor, shared)
    staged[...] = factor
    mosaic().commit_smem()
    return _added(total, staged, shared)


def _added(total: Array, first: Ref | Array, second: Ref) -> Array:
    """Returns a sum and the product of two matrices, which wgmma adds in place; the interpreter adds them itself."""
    plgpu = mosaic()

    def multiply(sum_: Ref) -> None:
        plgpu.wgmma(sum_, first, second)

    if interpretation():
        (product,) = _products((first, second))
        return total + product
    found: Array = pl.run_state(multiply)(plgpu.ACC.init(total))
    return found


# ---------------------------------------------------------------------- gradients


def gradients(
    before: bool,
    query: Array,
    key: Array,
    value: Array,
    numbers: Array,
    entering: Array,
    dout: Array,
    leaving: Array,
) -> tuple[Array, ...]:
    """Returns the cotangents of each head's queries and keys [T, G, H, N] and values [T, G, H, P], in bfloat16; and
    those of the numbers of levels with that of the decays from the start, as far as queries give them, with the parts
    of that of the chunk's decay, [X, G, H, L + 2, C]; and with that of the decays to the end, as far as keys give them,
    [X, G, H, L + 1, C].

    Args:
      before, query, key, value, numbers, entering: as :func:`results` has them.
      dout: [T, G, H, P], the cotangent of y.
      leaving: [X, G, H, N, P], that of the states after the chunks.
    """
    chunks, groups, heads, rows, columns = entering.shape
    plgpu = mosaic()
    kernel = call(
        partial(_gradients_kernel, before),
        name="autopallas_recurrence_gradients",
        grid={"block": 2 * chunks * groups * heads},
        out_type=(
            *(jax.ShapeDtypeStruct((dout.shape[0], groups, heads, size), _BF16) for size in (rows, rows, columns)),
            *(jax.ShapeDtypeStruct((chunks, groups, heads, LEVELS + more, CHUNK), _F32) for more in (2, 1)),
        ),
        scratch=[
            *(tile(shape, _BF16) for shape in _chunk_shapes(rows, columns)),
            plgpu.SMEM((NUMBERS, CHUNK), _F32),
            tile((CHUNK, columns), _BF16),
            *_staging(),
            plgpu.Barrier(num_arrivals=6),
            plgpu.Barrier(num_arrivals=1),
        ],
        warpgroups=1,
        by_lanes=True,
        flops=2 * chunks * groups * heads * CHUNK * (CHUNK * (4 * rows + 3 * columns) + 3 * rows * columns),
        bytes_accessed=array_bytes(query, key, value, numbers, entering, dout, leaving)
        + 2 * chunks * groups * heads * CHUNK * (2 * rows + columns),
    )
    found: tuple[Array, ...] = kernel(query, key, value, numbers, entering, dout, leaving)
    return found


def _gradients_kernel(before: bool, *refs: Ref) -> None:
    (query, key, value, numbers, entering, dout, leaving), outs, shared = refs[:7], refs[7:12], refs[12:]
    dquery, dkey, dvalue, of_queries, of_keys = outs
    tiles, dy, (loaded, further) = _Tiles(*shared[:5]), shared[5], shared[-2:]
    staged = shared[6] if len(shared) > 8 else None
    plgpu = mosaic()
    number, role = unravelled(lax.axis_index("block"), 2)  # both roles side by side, for they read the same
    x, g, h = _place(number, entering.shape)
    j = h if key.shape[2] == entering.shape[2] else 0
    steps = _steps_of(x)

    def load(states: Ref) -> None:
        of_steps = (query.at[steps, g, j], key.at[steps, g, j], value.at[steps, g, h])
        places = (*of_steps, states.at[x, g, h], numbers.at[x, g, h], dout.at[steps, g, h])
        for place, own in zip(places, (*tiles, dy), strict=True):
            plgpu.copy_gmem_to_smem(place, own, loaded)
        plgpu.barrier_wait(loaded)

    def load_leaving(start: int) -> None:
        plgpu.commit_smem()  # all warps are done with the values, or the rows before these
        plgpu.copy_gmem_to_smem(leaving.at[x, g, h, pl.ds(start, CHUNK)], tiles.value, further)

    def of_states(start: int) -> Array:
        """Returns the sum of the products of both states along each row."""
        plgpu.barrier_wait(further)
        product = _loaded(tiles.state.at[pl.ds(start, CHUNK)]) * _loaded(tiles.value)
        found: Array = jnp.sum(product, axis=1)
        return found

    @pl.when(role == 0)
    def of_query() -> None:
        load(entering)
        scores, dweights = _products(
            (tiles.query, tiles.key.transpose((1, 0))),
            (dy, tiles.value.transpose((1, 0))),
        )
        load_leaving(0)
        target = of_queries.at[x, g, h]
        _store_levels(scores * dweights, tiles.numbers, False, target)
        dscores = (dweights * _weights(tiles.numbers, before, False)).astype(_BF16)
        (read,) = _products((dy, tiles.state.transpose((1, 0))))
        _store_sum(read, tiles.query, target)
        read = read * _along(tiles.numbers, FROM_START, read.shape, 0)
        sums = of_states(0)
        starts = range(CHUNK, entering.shape[3], CHUNK)
        if starts:
            load_leaving(starts[0])
        _stored(dquery.at[steps, g, h], _multiplied(dscores, tiles.key, read, staged), tiles.key)
        for start in starts:
            sums = sums + of_states(start)
        store(target.at[LEVELS + 1], sums)

    @pl.when(role == 1)
    def of_key() -> None:
        load(leaving)
        scores, dweights = _products(
            (tiles.key, tiles.query.transpose((1, 0))),
            (tiles.value, dy.transpose((1, 0))),
        )
        target = of_keys.at[x, g, h]
        _store_levels(scores * dweights, tiles.numbers, True, target)
        weights = _weights(tiles.numbers, before, True)
        scores, dscores = ((x * weights).astype(_BF16) for x in (scores, dweights))
        (added,) = _products((tiles.value, tiles.state.transpose((1, 0))))
        _store_sum(added, tiles.key, target)
        added = added * _along(tiles.numbers, TO_END, added.shape, 0)
        _stored(dkey.at[steps, g, h], _multiplied(dscores, tiles.query, added, staged), tiles.query)
        (of_value,) = _products((tiles.key, tiles.state))
        of_value = of_value * _along(tiles.numbers, TO_END, of_value.shape, 0)
        _stored(dvalue.at[steps, g, h], _multiplied(scores, dy, of_value, staged), dy)

    plgpu.wait_smem_to_gmem(0)


def _products(*pairs: tuple[Ref | Array, Ref]) -> tuple[Array, ...]:
    """Returns the products of pairs of matrices in shared memory."""
    plgpu = mosaic()

    def multiply(*sums: Ref) -> tuple[Array, ...]:
        for sum_, (first, second) in zip(sums, pairs, strict=True):
            plgpu.wgmma(sum_, first, second)
        return tuple(sum_[...] for sum_ in sums)

    shapes = ((first.shape[0], second.shape[1]) for first, second in pairs)
    found: tuple[Array, ...] = pl.run_scoped(multiply, *(plgpu.ACC(shape, _F32) for shape in shapes))
    return found


def _store_levels(cotangents: Array, numbers: Ref, transposed: bool, target: Ref) -> None:
    """Stores the cotangents of the rows' numbers of all levels, from those of the factors times what they multiply."""
    first, second = _steps()
    differing = first ^ second
    later, earlier = (second, first) if transposed else (first, second)
    for level in range(LEVELS):
        own = (lax.shift_right_logical(differing, jnp.int32(level)) == 1) & (later > earlier)
        found = jnp.where(own, cotangents * _of_level(numbers, level, 1), _full(0.0))
        store(target.at[level], jnp.sum(found, axis=1))


def _store_sum(product: Array, factor: Ref, target: Ref) -> None:
    """Stores the cotangent of what multiplies the rows of a product, of which a factor is given."""
    store(target.at[LEVELS], jnp.sum(product * factor[...].astype(_F32), axis=1))
