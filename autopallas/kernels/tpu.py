"""Shares what the TPU kernels of all operations need: generations, memory, alignment, and the one ``pallas_call``.

Everything here except :func:`call` is plain arithmetic that needs no TPU and no Pallas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from autopallas.compat import ArrayFunction, PyTree, Shaped
from autopallas.kernels.refs import Number, Ref, Types
from autopallas.kernels.tpu_schedule_tracing import Table, in_main_memory, limit_of, part_of, tables_of
from autopallas.sites.device import Device
from autopallas.sites.elementwise import ElementwiseProgram
from autopallas.sites.interpret import interpretation, refusal
from autopallas.sites.operation import Unsupported

if TYPE_CHECKING:
    from jax.experimental import pallas as pl

__all__ = [
    "ANY_GENERATION",
    "GENERATIONS",
    "LANES",
    "MIB",
    "PROGRAM_PRIMITIVES",
    "Generation",
    "accumulate",
    "block_bytes",
    "call",
    "check_block",
    "cost_of",
    "dot",
    "generation",
    "reason_against",
    "rounded",
    "sublanes",
]

KIB, MIB = 2**10, 2**20
LANES = 128
"""Elements along the minor dimension of a tile."""

Semantics: TypeAlias = Literal["parallel", "arbitrary"]


@dataclass(frozen=True, slots=True)
class Generation:
    """One generation of TPU, as far as kernels have to know it.

    Attributes:
      name: as in ``--target tpu-<name>``.
      kinds: what JAX calls its devices.
      vmem: bytes of vector memory of one core.
      limit: bytes of it that a kernel asks for; None: what the compiler gives unasked.
      unasked: that number of bytes.
      cores: TensorCores that one device has: a kernel's parallel dimension is cut into as many parts.
    """

    name: str
    kinds: tuple[str, ...]
    vmem: int
    limit: int | None
    unasked: int
    cores: int = 1

    @property
    def budget(self) -> int:
        """Bytes of vector memory that a kernel may use."""
        return self.unasked if self.limit is None else self.limit


GENERATIONS = (
    Generation("v4", ("TPU v4",), 16 * MIB, None, 16 * MIB, cores=2),
    Generation("v5e", ("TPU v5 lite", "TPU v5e"), 128 * MIB, 50_000 * KIB, 16 * MIB),
    Generation("v5p", ("TPU v5", "TPU v5p"), 64 * MIB, 50_000 * KIB, 16 * MIB, cores=2),
    Generation("v6e", ("TPU v6 lite", "TPU v6e"), 128 * MIB, 98_304 * KIB, 32 * MIB),
    Generation("v7x", ("TPU7x", "TPU v7x"), 64 * MIB, 50_000 * KIB, 32 * MIB),
)
ANY_GENERATION = Generation("any", (), 16 * MIB, None, 16 * MIB)
"""Properties that every generation has: for programs that are exported without a device at hand."""


def generation(device: Device) -> Generation:
    """Returns the generation of a device; :data:`ANY_GENERATION` for an unknown kind, as where kernels are
    interpreted."""
    return next((g for g in GENERATIONS if device.kind in (*g.kinds, g.name)), ANY_GENERATION)


# ---------------------------------------------------------------------- tiles and memory


def sublanes(dtype: DTypeLike) -> int:
    """Returns the elements along the second minor dimension of a tile: 8 of 32 bits, 16 of 16 bits, 32 of 8 bits."""
    return 32 // int(np.dtype(dtype).itemsize)


def rounded(number: int, multiple: int) -> int:
    """Returns the next multiple at or above a number."""
    return -(-number // multiple) * multiple


def block_bytes(shape: Sequence[int], dtype: DTypeLike, buffers: int = 1) -> int:
    """Returns the bytes that a block takes in vector memory, with its last two dimensions filled up to whole tiles.

    Args:
      shape: the block's shape.
      dtype: its dtype.
      buffers: 2 for inputs and outputs of a pipelined kernel, 1 for scratch.

    Example:
      >>> block_bytes((512, 64), np.float32, buffers=2)
      524288
    """
    *leading, rows, columns = (1, 1, *shape)
    rows = rounded(rows, sublanes(dtype)) if rows > 1 else 1
    return buffers * math.prod(leading) * rows * rounded(columns, LANES) * int(np.dtype(dtype).itemsize)


def check_block(name: str, block: Sequence[int], shape: Sequence[int], dtype: DTypeLike) -> None:
    """Raises where Mosaic would not take a block.

    Each of a block's last two dimensions has to be the array's, or divisible by the tile's.

    Args:
      name: what the message calls it.
      block: the block's shape.
      shape: the array's shape.
      dtype: the array's dtype.

    Raises:
      ValueError: says which dimension, and what it may be.

    Example:
      >>> check_block("labels", (1, 512), (1, 8192), np.int32)
      >>> check_block("labels", (1, 100), (1, 8192), np.int32)
      Traceback (most recent call last):
      ValueError: labels: a block of (1, 100) of an array of (1, 8192): 100 must be a multiple of 128, or all of 8192
    """
    for axis, multiple in ((-1, LANES), (-2, sublanes(dtype))):
        if len(block) >= -axis and block[axis] != shape[axis] and block[axis] % multiple:
            raise ValueError(
                f"{name}: a block of {tuple(block)} of an array of {tuple(shape)}: {block[axis]} must be a multiple of "
                f"{multiple}, or all of {shape[axis]}"
            )


# ---------------------------------------------------------------------- what Mosaic can compute

PROGRAM_PRIMITIVES = frozenset(
    """
    abs add add_any and atan2 bitcast_convert_type ceil clamp clz convert_element_type cos div eq erf erf_inv exp exp2
    floor ge gt integer_pow is_finite le log log1p logistic lt max min mul ne neg nextafter not one_minus_square or
    population_count pow rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sqrt
    square stop_gradient sub tan tanh xor
    """.split()
)
"""Elementwise primitives that Mosaic lowers in every supported version of JAX."""

_PROGRAM_DTYPES = frozenset("bool int8 int16 int32 uint8 uint16 uint32 bfloat16 float32".split())


def reason_against(
    device: Device, programs: Iterable[ElementwiseProgram], dtypes: Iterable[DTypeLike]
) -> Unsupported | None:
    """Returns what stops a TPU kernel of these programs and operands, from rules alone; None where no obstacle is
    known.

    Args:
      device: where it is to run.
      programs: what it evaluates on a tile.
      dtypes: dtypes of its operands and results.
    """
    if (answer := refusal("tpu", device)) is not None:
        return answer
    programs = tuple(programs)
    used = {p for program in programs for p in program.primitives}
    if missing := sorted(used - PROGRAM_PRIMITIVES):
        return Unsupported(f"Mosaic TPU has no {', '.join(missing)}")
    held = {np.dtype(d).name for d in dtypes}
    held |= {np.dtype(x.dtype).name for program in programs for x in (*program.inputs, *program.instructions)}
    if missing := sorted(held - _PROGRAM_DTYPES):
        return Unsupported(f"TPUs do not compute with {', '.join(missing)}")
    return None


# ---------------------------------------------------------------------- the call


def call(
    kernel: Callable[..., None],
    *,
    name: str,
    grid: Sequence[Number],
    semantics: Sequence[Semantics],
    in_specs: Sequence[pl.BlockSpec],
    out_specs: pl.BlockSpec | Sequence[pl.BlockSpec],
    out_shape: Types,
    cost: pl.CostEstimate,
    alike: int = 0,
    scratch_shapes: Sequence[Ref] = (),
    prefetched: int = 0,
    aliases: dict[int, int] | None = None,
) -> ArrayFunction:
    """Returns a ``pallas_call`` as every TPU kernel here needs it: named, scoped, with its cost and a memory limit.

    Args:
      kernel: the body: prefetched scalars, inputs, outputs, scratch.
      name: of the call and of the scope around it.
      grid: one extent per dimension; the last one is the innermost.
      semantics: "parallel" for a dimension whose steps are independent, "arbitrary" for one that is in order.
      in_specs, out_specs, out_shape, scratch_shapes: as of ``pallas_call``.
      cost: the ``pl.CostEstimate``; see :func:`cost_of`.
      alike: how many of the grid's first dimensions have steps that all take as long: a simulation may run a part.
      prefetched: how many leading operands are scalars in SMEM that index maps see.
      aliases: operand to output.

    Returns:
      A function of the operands. It raises ValueError, before anything is lowered, where Mosaic would not take a block.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    def made(tables: Sequence[Table] | None) -> ArrayFunction:
        """Makes the call; ``tables``, if given, take the place of the prefetched operands."""
        body, blocks_in, blocks_out, scalars, aliased = kernel, list(in_specs), out_specs, prefetched, aliases or {}
        extents = tuple(grid)
        if tables is not None:
            body, scalars, extents = partial(kernel, *tables), 0, tuple(map(int, grid))
            blocks_in, blocks_out = jax.tree.map(lambda spec: _without_scalars(spec, tables), (blocks_in, out_specs))
            aliased = {source - prefetched: target for source, target in aliased.items()}
        if not scalars:
            extents = part_of(name, extents, alike)
        of_shapes = partial(
            pl.pallas_call,
            body,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=scalars,
                grid=extents,
                in_specs=blocks_in,
                out_specs=blocks_out,
                scratch_shapes=list(scratch_shapes),
            ),
            input_output_aliases=dict(aliased),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=tuple(semantics), vmem_limit_bytes=limit_of(generation(Device.current()).limit)
            ),
            interpret=interpretation(),
            cost_estimate=cost,
            name=name,
        )
        return in_main_memory(of_shapes, out_shape, scalars)

    def run(*operands: jax.Array) -> PyTree:
        if not interpretation():
            written = zip(jax.tree.leaves(out_specs), jax.tree.leaves(out_shape), strict=True)
            for spec, array in (*zip(in_specs, operands[prefetched:], strict=True), *written):
                block = [1 if n is None else n for n in spec.block_shape]
                # Narrow types have taller tiles, but Mosaic can take a part of one too.
                check_block(name, block, array.shape, np.float32)
        tables = tables_of(name, operands[:prefetched])
        # Index maps count in 32 bits, even where the surrounding program has 64.
        with jax.named_scope(name), jax.enable_x64(False):
            return made(tables)(*(operands if tables is None else operands[prefetched:]))

    return run


def _without_scalars(spec: pl.BlockSpec, tables: Sequence[Table]) -> pl.BlockSpec:
    """Replaces the prefetched scalars that a block's index map sees by tables."""
    index_map = spec.index_map
    assert index_map is not None
    return replace(spec, index_map=lambda *ids: index_map(*ids, *tables))


def dot(a: jax.Array, b: jax.Array, axes: tuple[int, int], precision: str | None) -> jax.Array:
    """Returns the product of two matrices over one axis of each, summed in float32.

    Mosaic has the lowest precision, one pass of bfloat16, and the highest one, which any ``precision`` gets.
    """
    dtype = jnp.promote_types(a.dtype, b.dtype)
    wanted = None if precision is None else lax.Precision.HIGHEST
    numbers = (((axes[0],), (axes[1],)), ((), ()))
    product: jax.Array = lax.dot_general(
        a.astype(dtype), b.astype(dtype), numbers, precision=wanted, preferred_element_type=jnp.float32
    )
    return product


def accumulate(total: Ref, part: jax.Array, step: Number) -> None:
    """Adds a part to a sum in the kernel's memory, which the first step begins."""
    from jax.experimental import pallas as pl

    @pl.when(step == 0)
    def _() -> None:
        total[...] = part

    @pl.when(step != 0)
    def _() -> None:
        total[...] += part


def cost_of(body: ArrayFunction, *types: jax.ShapeDtypeStruct, times: int, arrays: Iterable[Shaped]) -> pl.CostEstimate:
    """Estimates what a kernel costs, in the form that XLA's scheduler reads.

    Args:
      body: a function that computes what the kernel's body does on one tile, without program ids and references.
      *types: shapes and dtypes of its arguments.
      times: the number of tiles.
      arrays: shapes and dtypes of what is read from and written to main memory.
    """
    from jax.experimental import pallas as pl

    one = pl.estimate_cost(body, *types)
    moved = sum(math.prod(a.shape) * np.dtype(a.dtype).itemsize for a in arrays)
    return pl.CostEstimate(flops=one.flops * times, transcendentals=one.transcendentals * times, bytes_accessed=moved)
