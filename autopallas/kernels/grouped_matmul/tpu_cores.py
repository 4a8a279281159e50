"""Rows by weights on a TPU device of two TensorCores: each takes half of the tiles, in a pipeline of its own.

The kernel on a grid gives each core a part of the columns.  Where they are one block, or an odd number of blocks, one
core would wait for the other; a list of visits cannot be cut by a grid, for its length is known at run time only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from autopallas import compat
from autopallas.kernels.refs import Number, Ref
from autopallas.sites.interpret import interpretation

__all__ = ["pays", "shares", "split_call"]

Array: TypeAlias = jax.Array
Told: TypeAlias = Callable[[Number], tuple[Array, ...]]
"""What tells (tile, group, begin, end, first) of a visit."""
_AXIS = "core"
_OVERHEAD = 1.1
"""What a pipeline takes where a grid leaves no core idle, in simulations for v5p."""


def pays(cores: int, tiles: int, columns: int, block: int) -> bool:
    """Whether cutting the tiles among the cores takes less time than cutting the columns.

    Args:
      cores: of the device.
      tiles: of rows.
      columns: of the result.
      block: columns at a time, where they are cut.
    """
    turns = -(-columns // (cores * block))
    return tiles >= cores and columns * _OVERHEAD < cores * turns * block


def shares(tile: Array, number: Array, tiles: int, cores: int) -> Array:
    """Returns the visits of each core: those of core c are ``shares[c] .. shares[c + 1]``, and no tile has visits of
    two.

    Args:
      tile: of each visit, ascending.
      number: of visits.
      tiles: of rows.
      cores: how many share them.
    """
    each = -(-tiles // cores)
    edges = jnp.searchsorted(tile, jnp.arange(1, cores, dtype=jnp.int32) * each, side="left")
    ends = [jnp.minimum(edges.astype(jnp.int32), number), jnp.reshape(number, (1,))]
    return jnp.concatenate([jnp.zeros((1,), jnp.int32), *ends])


def split_call(
    kernel: Callable[..., None],
    *,
    name: str,
    cores: int,
    passes: int,
    steps: int,
    visits: int,
    in_specs: Callable[[Told], list[pl.BlockSpec]],
    out_specs: Callable[[Told], pl.BlockSpec],
    out_shape: jax.ShapeDtypeStruct,
    scratch_shapes: list[Ref],
    limit: int | None,
    cost: pl.CostEstimate,
    at: Told | None = None,
) -> Callable[..., Array]:
    """The kernel on cores, as a function of (shares, five tables, operands).

    Args:
      kernel: ``kernel(read, *refs)``: the body of one visit, as on a grid of (passes, visits, steps).
      name: of the call and of the scope around it.
      cores, passes, steps, visits: extents.
      in_specs, out_specs: of blocks, given ``read(visit)``, which tells (tile, group, begin, end, first) of one.
      out_shape, scratch_shapes, cost: as of ``pallas_call``.
      limit: bytes of vector memory to ask for.
      at: ``at(visit)``, in the place of shares and tables.
    """

    def body(shares_ref: Ref, *refs: Ref) -> None:
        tables, refs = refs[:5], refs[5:]
        operands, out, (shares_here, *tables_here), scratch = refs[:2], refs[2], refs[3:9], refs[9:]
        for source, target in zip((shares_ref, *tables), (shares_here, *tables_here), strict=True):
            pltpu.sync_copy(source, target)
        core = lax.axis_index(_AXIS)
        begin, end = shares_here[core], shares_here[core + 1]

        def read(visit: Number) -> tuple[Array, ...]:
            return tuple(table[begin + visit] for table in tables_here)

        count: Number = end - begin
        told: Told = read
        if at is not None:
            given, count = at, visits // cores

            def told(visit: Number) -> tuple[Array, ...]:
                return tuple(given(core * count + visit))

        pipeline = pltpu.emit_pipeline(
            lambda *blocks: kernel(told, *blocks, *scratch),
            grid=(passes, count, steps),
            in_specs=in_specs(told),
            out_specs=[out_specs(told)],
        )
        pipeline(*operands, out)

    run = pl.kernel(
        body,
        out_type=out_shape,
        mesh=compat.tensor_cores(_AXIS, cores),
        scratch_types=[
            pltpu.SMEM((cores + 1,), jnp.int32), *[pltpu.SMEM((visits,), jnp.int32)] * 5, *scratch_shapes
        ],
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=limit),
        interpret=interpretation(),
        cost_estimate=cost,
        name=name,
    )  # fmt: skip

    def call(*operands: Array) -> Array:
        with jax.named_scope(name), jax.enable_x64(False):
            result: Array = run(*operands)
            return result

    return call
