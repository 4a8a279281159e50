"""Computes grouped matmuls by ``tokamax.ragged_dot_general``."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import RaggedDotDimensionNumbers

from autopallas.kernels.grouped_matmul import xla
from autopallas.kernels.grouped_matmul.block_sizes import BlockSizes
from autopallas.kernels.grouped_matmul.operands import Gradients, Operands
from autopallas.kernels.grouped_matmul.spec import GroupedMatmulSpec, Use
from autopallas.sites.device import Device
from autopallas.sites.operation import Supported, Unsupported

__all__ = ["backward", "candidates", "forward", "supports"]

Array = jax.Array

_SIXTEEN_BITS = frozenset({"bfloat16", "float16"})

_DIMENSIONS: dict[Use, RaggedDotDimensionNumbers] = {
    "forward": RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0]),
    "dlhs": RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0]),
    "drhs": RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], []),
}
"""Of rows [M, .] and matrices [G, K, N], or of two arrays of rows."""


def supports(spec: GroupedMatmulSpec, device: Device) -> Supported | Unsupported:
    """Supports one batch of 16-bit operands, on CPUs float32 too."""
    if not device.here:
        return Unsupported("programs for another machine do not call tokamax: what it chooses there is unknown")
    if not spec.assume_finite:
        return Unsupported("assume_finite is off: an inf or NaN in one group's weights would not reach other groups")
    if spec.batch != 1:
        return Unsupported("tokamax's ragged_dot has no batch")
    names = {spec.first_dtype.name, spec.second_dtype.name}
    allowed = _SIXTEEN_BITS | ({"float32"} if device.platform == "cpu" else set())
    if len(names) > 1 or not names <= allowed or spec.result_dtype.name not in {*names, "float32"}:
        return Unsupported(f"it is used with operands of one of {', '.join(sorted(allowed))}")
    if names != {"float32"} and spec.precision is not None:
        return Unsupported(f"the original asks for the precision {spec.precision}")
    return Supported()


def candidates(spec: GroupedMatmulSpec, device: Device) -> tuple[BlockSizes, ...]:
    """Returns one: tokamax chooses its blocks itself."""
    return (BlockSizes.get_default(),)


def forward(spec: GroupedMatmulSpec, block_sizes: BlockSizes, operands: Operands) -> Array:
    """Calls tokamax where group sizes are as its interface asks for: not negative, and no more than the rows together.
    Elsewhere, which only the data knows, each group's rows meet its weights in XLA."""
    sizes = operands.group_sizes[0]

    def by_tokamax(operands: Operands) -> Array:
        with jax.named_scope("autopallas_grouped_matmul_tokamax"):
            return _product(spec, *(x[0] for x in operands))[None]

    def by_xla(operands: Operands) -> Array:
        return xla.forward(spec.product, block_sizes, operands)

    usual = jnp.all(sizes >= 0) & (jnp.sum(sizes) <= spec.rows)
    return spec.finished(jax.lax.cond(usual, by_tokamax, by_xla, operands))


def backward(
    spec: GroupedMatmulSpec,
    block_sizes: BlockSizes,
    operands: Operands,
    cotangent: Array,
    wanted: Sequence[bool] = (True, True),
) -> Gradients:
    """Each gradient is one of the other two uses."""
    return xla.gradients(forward, spec, block_sizes, operands, cotangent, wanted)


def _product(spec: GroupedMatmulSpec, first: Array, second: Array, sizes: Array) -> Array:
    """Computes one batch; rows that no group owns are zero, or contribute nothing, whatever tokamax does with them."""
    import tokamax

    owned = (jnp.arange(spec.rows) < jnp.sum(sizes))[:, None]
    if spec.use == "drhs":
        first, second = jnp.where(owned, first, 0), jnp.where(owned, second, 0)
    out = tokamax.ragged_dot_general(
        first,
        second,
        sizes,
        _DIMENSIONS[spec.use],
        precision=jax.lax.Precision.HIGHEST if first.dtype == np.float32 else None,
        preferred_element_type=spec.result_dtype,
    )
    found: Array = jnp.asarray(out, spec.result_dtype)
    return found if spec.use == "drhs" else jnp.where(owned, found, 0)
