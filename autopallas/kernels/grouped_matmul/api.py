"""Grouped matmul as a function, usable without the rest of autopallas."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from autopallas.kernels.arguments import check_block_sizes, check_floating, kind, require
from autopallas.kernels.grouped_matmul.block_sizes import BlockSizes
from autopallas.kernels.grouped_matmul.operands import Operands
from autopallas.kernels.grouped_matmul.operation import OPERATION
from autopallas.kernels.grouped_matmul.spec import GroupedMatmulSpec
from autopallas.sites.device import Device
from autopallas.tuning.direct import block_sizes_for

__all__ = ["apply", "grouped_matmul"]

Array: TypeAlias = jax.Array


def grouped_matmul(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    *,
    preferred_element_type: DTypeLike | None = None,
    precision: lax.Precision | str | None = None,
    implementation: str | Sequence[str] | None = None,
    block_sizes: BlockSizes | None = None,
) -> Array:
    """Each group of consecutive rows of lhs times its own matrix in rhs, as ``lax.ragged_dot``, in time that does not
    grow with the number of groups.

    The first ``group_sizes[0]`` rows are multiplied with ``rhs[0]``, the next ``group_sizes[1]`` with ``rhs[1]``, and
    so on; rows past the sum of the sizes are zero, and groups that reach past the last row end there.  Accumulates in
    float32 (float64 for float64 operands).  Differentiable in reverse mode once, with respect to lhs and rhs; forward
    mode and second derivatives are not available here (``autopallas.optimize`` has them).  The tiling of ragged rows
    is that of MegaBlocks (Gale et al. 2022, https://arxiv.org/abs/2211.15841), without its padding.

    Letters: M rows, K inner size, N columns, G groups.

    Arguments:
      lhs: [M, K], floating point.
      rhs: [G, K, N], floating point.
      group_sizes: [G], an integer dtype that can count M rows.
      preferred_element_type: dtype of the result; by default the one to which lhs and rhs promote.
      precision: None, or a ``lax.Precision`` or its name.
      implementation: None for the best one here, a name ("xla", "reference", ...), or a sequence of names to try in
        order, with a warning for each that cannot be used.
      block_sizes: tile sizes; from the cache or the tuned table by default.

    Returns:
      [M, N].

    Raises:
      TypeError, ValueError: an argument has the wrong dtype, rank or size.
      UnsupportedError: the named implementation cannot compute this, or none of several can.

    Example:
      >>> import jax.numpy as jnp
      >>> from autopallas.kernels.grouped_matmul import grouped_matmul
      >>> weights = jnp.stack([jnp.eye(3), 2 * jnp.eye(3)])
      >>> grouped_matmul(jnp.ones((4, 3)), weights, jnp.array([1, 2]))
      Array([[1., 1., 1.],
             [2., 2., 2.],
             [2., 2., 2.],
             [0., 0., 0.]], dtype=float32)
    """
    rows, inner, columns, groups = _sizes(lhs, rhs, group_sizes)
    check_block_sizes(block_sizes, BlockSizes)
    result_dtype = jnp.promote_types(lhs.dtype, rhs.dtype)
    if preferred_element_type is not None:
        result_dtype = np.dtype(preferred_element_type)
        if not jnp.issubdtype(result_dtype, jnp.floating):
            raise TypeError(f"preferred_element_type is {result_dtype}; it must be a floating-point dtype")
    spec = GroupedMatmulSpec(
        use="forward",
        batch=1,
        rows=rows,
        groups=groups,
        contracting=inner,
        columns=columns,
        first_dtype=np.dtype(lhs.dtype),
        second_dtype=np.dtype(rhs.dtype),
        result_dtype=np.dtype(result_dtype),
        precision=_precision(precision),
    )
    device = Device.current()

    def call(name: str) -> Array:
        sizes = block_sizes_for(OPERATION.name, spec, device, name, block_sizes)
        result: Array = apply(name, spec, sizes, lhs[None], rhs[None], group_sizes[None])
        return result[0]

    return OPERATION.first_that_works(spec, device, implementation, call)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def apply(
    name: str,
    spec: GroupedMatmulSpec,
    block_sizes: tuple[BlockSizes, BlockSizes],
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
) -> Array:
    """The kernel ``name`` on canonical arrays, with its derivative; block sizes for forward alone, and for both."""
    module = OPERATION.implementation(name)
    assert module is not None
    out: Array = module.forward(spec, block_sizes[0], Operands(lhs, rhs, group_sizes))
    return out


def _apply_forward(
    name: str, spec: GroupedMatmulSpec, block_sizes: tuple[BlockSizes, BlockSizes], *arrays: Array
) -> tuple[Array, Operands]:
    module, operands = OPERATION.implementation(name), Operands(arrays[0], arrays[1], arrays[2])
    assert module is not None
    return module.forward(spec, block_sizes[1], operands), operands


def _apply_backward(
    name: str,
    spec: GroupedMatmulSpec,
    block_sizes: tuple[BlockSizes, BlockSizes],
    operands: Operands,
    dout: Array,
) -> tuple[Array, Array, None]:
    module = OPERATION.implementation(name)
    assert module is not None
    dlhs, drhs = module.backward(spec, block_sizes[1], operands, dout)
    return dlhs, drhs, None


apply.defvjp(_apply_forward, _apply_backward)


def _sizes(lhs: Array, rhs: Array, group_sizes: Array) -> tuple[int, int, int, int]:
    """The operands agree in (rows, inner size, columns, groups); else this raises."""
    rows, inner = _shape("lhs", lhs, "rows, inner size")
    groups, rhs_inner, columns = _shape("rhs", rhs, "groups, inner size, columns")
    require(rhs_inner == inner, f"rhs has inner size {rhs_inner} and lhs {inner}; they are multiplied and must agree")
    require(min(rows, inner, groups, columns) > 0, "lhs and rhs must not be empty")
    if not hasattr(group_sizes, "dtype") or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise TypeError(f"group_sizes must be an array of integers, not {kind(group_sizes)}; convert it")
    require(group_sizes.shape == (groups,), f"group_sizes has shape {group_sizes.shape}; rhs has {groups} groups")
    largest = jnp.iinfo(group_sizes.dtype).max
    require(largest >= rows, f"group_sizes of dtype {group_sizes.dtype} cannot count {rows} rows; use int32")
    return rows, inner, columns, groups


def _precision(given: lax.Precision | str | None) -> str | None:
    if given is None:
        return None
    name = lax.Precision(given).name  # raises ValueError for what is none
    return None if name == "DEFAULT" else name


def _shape(name: str, x: Array, axes: str) -> tuple[int, ...]:
    check_floating(name, x)
    if x.ndim != len(axes.split(",")):
        raise ValueError(f"{name} has shape {x.shape}; it must be [{axes}]")
    return tuple(x.shape)
