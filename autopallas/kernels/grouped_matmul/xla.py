"""Grouped matmul in plain JAX: each group's rows, in tiles, meet that group's weights only.

A loop over groups, and in it one over as many tiles as the group needs, which only the data knows.  Tiles start where
their group starts.  A group's last tile reaches into the next group, or, at the end of the array, back into rows that
are done already; a mask on the tile's rows keeps those as they are.  So no row is moved, no array is padded, and
nothing of size [G, M, K] exists.

Letters: B batch, M rows, K and N the weights' two sides, G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from autopallas.kernels.grouped_matmul.block_sizes import BlockSizes
from autopallas.kernels.grouped_matmul.operands import Gradients, Operands
from autopallas.kernels.grouped_matmul.spec import GroupedMatmulSpec, ProductSpec, Use
from autopallas.numerics.classes import Numerics
from autopallas.sites.device import Device
from autopallas.sites.operation import Supported, Unsupported
from autopallas.sites.spec import Sizes

__all__ = ["backward", "forward", "numerics", "running_sizes", "supports"]

Array: TypeAlias = jax.Array
Carry = TypeVar("Carry")

EPILOGUES = True
"""Whether ``forward`` takes a spec with an epilogue; those that do not say so are given none."""


def supports(spec: GroupedMatmulSpec, device: Device) -> Supported | Unsupported:
    """Everything but the original's propagation of non-finite weights into other groups' rows, on every platform."""
    if not spec.assume_finite:
        return Unsupported("assume_finite is off: an inf or NaN in one group's weights would not reach other groups")
    return Supported()


def numerics(spec: GroupedMatmulSpec) -> Numerics:
    """Returns "reordered" where nothing is rounded to 16 bits and nothing is done but products and sums."""
    wide = all(dtype.itemsize >= 4 for dtype in (spec.first_dtype, spec.second_dtype, spec.result_dtype))
    return "reordered" if wide and spec.epilogue is None else "tolerance"


def running_sizes(spec: ProductSpec, block_sizes: BlockSizes, device: Device) -> Sizes:
    """Returns the rows of a tile; it takes all of the two other sides."""
    return {"row_block": block_sizes.row_block}


def forward(spec: GroupedMatmulSpec, block_sizes: BlockSizes, operands: Operands) -> Array:
    """Each group's rows, tile by tile, meet that group's weights."""
    if spec.epilogue is not None:
        # Not tile by tile: a compiler makes one pass of it, in place, on all cores; and rows of groups that overlap
        # are sums, known only at the end.
        return spec.finished(forward(spec.product, block_sizes, operands))
    single = _weights if spec.use == "drhs" else _rows

    def one(first: Array, second: Array, group_sizes: Array) -> Array:
        return single(spec, block_sizes.row_block, first, second, _bounds(spec, group_sizes))

    with jax.named_scope("autopallas_grouped_matmul_xla"):
        return _each(spec.batch, one, operands[:3])


def backward(
    spec: GroupedMatmulSpec,
    block_sizes: BlockSizes,
    operands: Operands,
    cotangent: Array,
    wanted: Sequence[bool] = (True, True),
) -> Gradients:
    """Each gradient is one of the other two uses."""
    return gradients(forward, spec, block_sizes, operands, cotangent, wanted)


def gradients(
    forward: Callable[..., Array],
    spec: GroupedMatmulSpec,
    block_sizes: BlockSizes,
    operands: Operands,
    cotangent: Array,
    wanted: Sequence[bool],
) -> Gradients:
    """Any implementation's ``forward`` gives the gradients."""
    first, second, group_sizes, scales = operands
    forms: dict[str, tuple[tuple[Use, tuple[Array, Array]], tuple[Use, tuple[Array, Array]]]] = {
        "forward": (("dlhs", (cotangent, second)), ("drhs", (first, cotangent))),
        "dlhs": (("forward", (cotangent, second)), ("drhs", (cotangent, first))),
        "drhs": (("dlhs", (second, cotangent)), ("forward", (first, cotangent))),
    }
    found: list[Array | None] = []
    for (use, (a, b)), dtype, asked in zip(forms[spec.use], (spec.first_dtype, spec.second_dtype), wanted, strict=True):
        if not asked:
            found.append(None)
            continue
        own = spec.widened if use == "drhs" else spec
        second_dtype = b.dtype if own.widening is None else own.second_dtype
        part = replace(own.product, use=use, first_dtype=a.dtype, second_dtype=second_dtype, result_dtype=dtype)
        found.append(forward(part, block_sizes, Operands(a, b, group_sizes, scales)))
    return Gradients(*found)


def _each(batch: int, function: Callable[..., Array], arrays: Sequence[Array]) -> Array:
    """The function of each example; an array whose batch axis has size 1 is shared by all."""
    if batch == 1:
        return function(*(x[0] for x in arrays))[None]
    own = [x.shape[0] != 1 for x in arrays]

    def one(examples: list[Array]) -> Array:
        given = iter(examples)
        return function(*(next(given) if mine else x[0] for mine, x in zip(own, arrays, strict=True)))

    result: Array = lax.map(one, [x for mine, x in zip(own, arrays, strict=True) if mine])
    return result


class _Bounds(NamedTuple):
    """The rows ``start <= m < end`` of each group, [G], within 0 .. M."""

    start: Array
    end: Array


def _bounds(spec: GroupedMatmulSpec, group_sizes: Array) -> _Bounds:
    end = jnp.cumsum(group_sizes, dtype=group_sizes.dtype)
    start = end - group_sizes
    return _Bounds(*(jnp.clip(x, 0, spec.rows).astype(jnp.int32) for x in (start, end)))


class _Tile(NamedTuple):
    """Rows ``at .. at + row_block``, of which those that are ``inside`` [row_block] belong to the group and are new."""

    at: Array
    inside: Array


def _over_tiles(
    spec: GroupedMatmulSpec, block: int, bounds: _Bounds, g: Array, body: Callable[[_Tile, Carry], Carry], carry: Carry
) -> Carry:
    """Runs ``body(tile, carry)`` over the tiles of group g."""
    start, end = bounds.start[g], bounds.end[g]

    def tile(i: Array, carry: Carry) -> Carry:
        wanted = start + i * block
        at = jnp.minimum(wanted, spec.rows - block)
        row = at + jnp.arange(block, dtype=jnp.int32)
        return body(_Tile(at, (row >= wanted) & (row < end)), carry)

    done: Carry = lax.fori_loop(0, (end - start + (block - 1)) // block, tile, carry)
    return done


def _rows(spec: GroupedMatmulSpec, block: int, rows: Array, weights: Array, bounds: _Bounds) -> Array:
    """[M, K] by [G, K, N] to [M, N]; for "dlhs" [M, N] by [G, K, N] to [M, K]."""
    side = 0 if spec.use == "forward" else 1

    def group(g: Array, out: Array) -> Array:
        own = lax.dynamic_index_in_dim(weights, g, keepdims=False)

        def tile(place: _Tile, out: Array) -> Array:
            x = lax.dynamic_slice_in_dim(rows, place.at, block)
            product = _dot(spec, x, own, 1, side).astype(spec.result_dtype)
            # Added to what is there, since negative group sizes make groups overlap: such rows are sums.
            old = lax.dynamic_slice_in_dim(out, place.at, block)
            new = jnp.where(place.inside[:, None], old + product, old)
            return lax.dynamic_update_slice_in_dim(out, new, place.at, 0)

        done: Array = _over_tiles(spec, block, bounds, g, tile, out)
        return done

    result: Array = lax.fori_loop(0, spec.groups, group, jnp.zeros(spec.result_shape(), spec.result_dtype))
    return result


def _weights(spec: GroupedMatmulSpec, block: int, lhs: Array, dout: Array, bounds: _Bounds) -> Array:
    """[M, K] by [M, N] to [G, K, N]."""

    def group(g: Array, out: Array) -> Array:
        def tile(place: _Tile, total: Array) -> Array:
            # Both are masked: what lies outside the group may be inf or NaN.
            inside = place.inside[:, None]
            x, d = (jnp.where(inside, lax.dynamic_slice_in_dim(a, place.at, block), 0) for a in (lhs, dout))
            # Transposed before the dot, and kept so by the barrier: one that contracts the leading axes of 16-bit
            # operands is several times slower on CPUs.
            return total + _dot(spec, lax.optimization_barrier(x.T), d, 1, 0)

        zero = jnp.zeros((spec.contracting, spec.columns), spec.accumulation_dtype)
        total: Array = _over_tiles(spec, block, bounds, g, tile, zero)
        updated: Array = lax.dynamic_update_index_in_dim(out, total.astype(spec.result_dtype), g, 0)
        return updated

    result: Array = lax.fori_loop(0, spec.groups, group, jnp.zeros(spec.result_shape(), spec.result_dtype))
    return result


def _dot(spec: GroupedMatmulSpec, a: Array, b: Array, axis_a: int, axis_b: int) -> Array:
    """The contraction of one axis each, in the accumulation dtype."""
    dtype = spec.accumulation_dtype
    if dtype == jnp.float64:
        a, b = a.astype(dtype), b.astype(dtype)
    precision = None if spec.precision is None else lax.Precision[spec.precision]
    numbers = (((axis_a,), (axis_b,)), ((), ()))
    product: Array = lax.dot_general(a, b, numbers, precision=precision, preferred_element_type=dtype)
    return product
