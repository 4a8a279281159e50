"""What the warpgroups of attention's GPU kernels have in common: registers, rings of stages, and products.

The last warpgroup of a block of threads fills stages of shared memory; the others wait until one is filled, multiply
it, and release it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from autopallas.compat import Dtype, PyTree
from autopallas.kernels.attention.gpu_grid import WARPGROUP_ROWS
from autopallas.kernels.gpu import mosaic
from autopallas.kernels.refs import Number, Ref

__all__ = [
    "drain",
    "fill",
    "multiplied",
    "multiply",
    "parts",
    "products",
    "ring",
    "share_registers",
    "started",
    "vectors",
]

Array: TypeAlias = jax.Array
F32 = np.dtype(np.float32)
_REGISTERS = {1: None, 2: (240, 24), 3: (160, 32)}
"""Registers of a thread that computes, and of one that only moves memory, by the number of warpgroups that compute.

A block has 65536.  If one warpgroup computes, each thread can have all 255 that an instruction can address.
"""


def share_registers(warpgroups: int, computes: bool) -> None:
    """Moves registers from the warpgroup that moves memory to those that compute; each calls it first."""
    share = _REGISTERS[warpgroups]
    if share is not None:
        mosaic().set_max_registers(share[0 if computes else 1], action="increase" if computes else "decrease")


def vectors(value: float) -> Array:
    """Returns the same number for each row of a warpgroup."""
    plgpu = mosaic()
    same: Array = plgpu.layout_cast(jnp.full((WARPGROUP_ROWS,), value, F32), plgpu.Layout.WGMMA.reduce(1))
    return same


def ring(stages: int, warpgroups: int, copies: int = 1) -> list[Ref]:
    """Returns the barriers of a ring of stages: for filled stages, and for those that all warpgroups have used."""
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
    done: Array | None = None,
) -> None:
    """Loads each step into its stage, in the warpgroup that moves memory, after waiting for the stage's last use.

    In the end it waits for the last use of each stage (:func:`drain`), unless the block is one of several.

    Args:
      parts: (first step, number of steps) of each loop of the warpgroups that compute, in order.
      stages: the number of stages.
      load: starts the transfers; called with the part, the step, and the step's stage.
      free: waits until a stage may be filled again.
      done: steps of the blocks before, if the block is one of several; the last of these is not the last use.
    """
    total: Number = 0
    for number, (first, count) in enumerate(parts):
        total = first + count

        @pl.loop(first, first + count)
        def _(n: Array, number: int = number) -> None:
            step = n if done is None else done + n
            slot = lax.rem(step, jnp.int32(stages))
            pl.when(step >= stages)(lambda: free(slot))
            load(number, n, slot)

    if done is None:
        drain(total, stages, free)


def drain(total: Number, stages: int, free: Callable[[Array], None]) -> None:
    """Waits for the last use of each stage, after ``total`` steps.

    Every arrival is observed, and shared memory is not released while wgmma reads it.
    """
    used = min(total, stages) if isinstance(total, int) else jnp.minimum(total, stages)

    @pl.loop(0, used)
    def _(n: Array) -> None:
        free(lax.rem(total - used + n, jnp.int32(stages)))


def parts(tile_value: Array, read: Dtype | None, dtype: DTypeLike, precision: str | None) -> list[Array]:
    """Splits a tile into a sum of tiles of the dtype that wgmma takes.

    It is one tile if the original's product reads the tile in that dtype; else two, with 16 bits of fraction or more,
    of which TF32 has 10; or three for a higher precision.
    """
    if read == dtype:
        return [tile_value.astype(dtype)]
    count = 2 if precision is None else 3
    found = []
    for _ in range(count - 1):
        first = _cut(tile_value) if dtype == jnp.bfloat16 else tile_value.astype(dtype).astype(F32)
        found.append(first.astype(dtype))
        tile_value = tile_value - first
    return [*found, tile_value.astype(dtype)]


def _cut(x: Array) -> Array:
    """Returns float32 numbers without the bits that bfloat16 does not have.

    Rounding would have each element converted there and back on its own, in the unit of the exponentials.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return lax.bitcast_convert_type(bits & jnp.full(x.shape, -(1 << 16), jnp.int32), F32)


def multiplied(tile_value: Array, shared: Ref, accumulator: Array, through: Ref | None) -> Array:
    """Adds a tile in registers times a matrix in shared memory to an accumulator, and waits for the product.

    ``through`` is shared memory for the tile, for the interpreter, which cannot multiply from registers.
    """
    plgpu = mosaic()
    if through is None:

        def multiply(ref: Ref) -> None:
            plgpu.wgmma(ref, tile_value, shared)

        done: Array = pl.run_state(multiply)(plgpu.ACC.init(accumulator))
        return done

    through[...] = tile_value
    plgpu.commit_smem()

    def multiply_staged(ref: Ref) -> Array:
        plgpu.wgmma(ref, through, shared)
        found: Array = ref[...]
        return found

    summed: Array = accumulator + pl.run_scoped(multiply_staged, plgpu.ACC(accumulator.shape, jnp.float32))
    return summed


def multiply(tile_value: Array, shared: Ref, total: Ref, through: Ref | None) -> None:
    """Starts to add a tile in registers times a matrix in shared memory to an accumulator.

    ``through`` is shared memory for the tile, for the interpreter, which cannot multiply from registers.
    """
    plgpu = mosaic()
    if through is not None:
        through[...] = tile_value
        plgpu.commit_smem()
    plgpu.wgmma(total, tile_value if through is None else through, shared)


def started(pairs: Sequence[tuple[Ref, Ref]], shape: tuple[int, int], use: Callable[..., PyTree]) -> PyTree:
    """Starts to compute a b^T of pairs (a, b) of tiles in shared memory, and returns ``use(*products)``.

    Each of the ``products`` is a function that waits for it and those before it, and returns it. Its argument is the
    number of wgmma that ``use`` has started meanwhile, 0 by default.
    """
    plgpu = mosaic()

    def run(*accumulators: Ref) -> PyTree:
        for accumulator, (a, b) in zip(accumulators, pairs, strict=True):
            plgpu.wgmma(accumulator, a, b.transpose((1, 0)))

        def product(number: int, others: int = 0) -> Array:
            behind = len(accumulators) - 1 - number + others
            found: Array = plgpu.wgmma_accumulator_load(accumulators[number], wait_n=behind)
            return found

        return use(*(partial(product, number) for number in range(len(accumulators))))

    return pl.run_scoped(run, *(plgpu.ACC(shape, jnp.float32) for _ in pairs))


def products(
    pairs: Sequence[tuple[Ref, Ref]], shape: tuple[int, int], started: Callable[[], None] | None = None
) -> tuple[Array, ...]:
    """Computes a b^T of pairs (a, b) of tiles in shared memory; ``started`` is called before they are waited for."""
    plgpu = mosaic()

    def multiply(*accumulators: Ref) -> tuple[Array, ...]:
        for accumulator, (a, b) in zip(accumulators, pairs, strict=True):
            plgpu.wgmma(accumulator, a, b.transpose((1, 0)))
        if started is not None:
            started()
        return tuple(accumulator[...] for accumulator in accumulators)

    found: tuple[Array, ...] = pl.run_scoped(multiply, *(plgpu.ACC(shape, jnp.float32) for _ in pairs))
    return found
