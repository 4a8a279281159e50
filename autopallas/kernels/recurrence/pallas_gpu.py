"""Recurrences in chunks for Mosaic GPU, in the three parts of Mamba-2's dual form (Dao and Gu 2024,
https://arxiv.org/abs/2405.21060): states from chunk to chunk, then all chunks at once.

The products of decays over segments are made by multiplication alone, as in plain JAX.  Keys, queries, values, and the
states at the beginnings of chunks are multiplied in bfloat16, with sums in float32: programs whose states are bfloat16
round each state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from autopallas.kernels.gpu import reason_against, rounded
from autopallas.kernels.recurrence import directions
from autopallas.kernels.recurrence.block_sizes import BlockSizes
from autopallas.kernels.recurrence.chunks import Recurrence, by_scans
from autopallas.kernels.recurrence.gpu_sizes import CHUNK, LARGEST, LEVELS, NUMBERS, PART
from autopallas.kernels.recurrence.products import halved_products
from autopallas.kernels.recurrence.spec import RecurrenceSpec
from autopallas.numerics.classes import Numerics
from autopallas.sites.device import Device
from autopallas.sites.operation import Supported, Unsupported
from autopallas.sites.spec import Dtype, Sizes

if TYPE_CHECKING:
    from autopallas.kernels.recurrence.site import RecurrenceSite

__all__ = ["NUMERICS", "backward", "candidates", "forward", "of_chunks", "running_sizes", "supports"]

NUMERICS: Numerics = "tolerance"
"""How its results relate to the original's."""

Array: TypeAlias = jax.Array
_BF16 = np.dtype(jnp.bfloat16)


def supports(spec: RecurrenceSpec, device: Device) -> Supported | Unsupported:
    """Returns whether the largest state is a bfloat16 matrix of at most 128 rows and columns, with one decay."""
    if not spec.is_matrix:
        return Unsupported("no products compute several steps of its state at once, so that there is none for wgmma")
    if spec.delta:
        return Unsupported("its step corrects the state by the delta rule, for which there is no GPU kernel")
    if spec.decay != "scalar":
        return Unsupported("each row of the state has its own decay, for which there is no GPU kernel")
    if spec.state_dtype != _BF16:
        return Unsupported(
            f"the kernels multiply in bfloat16, which would round what a {spec.state_dtype} state does not"
        )
    if max(spec.rows, spec.columns) > LARGEST:
        return Unsupported(f"a state of {spec.rows} x {spec.columns} is larger than the {LARGEST} x {LARGEST} it holds")
    return reason_against(device, [_BF16]) or Supported()


def candidates(spec: RecurrenceSpec, device: Device) -> tuple[BlockSizes, ...]:
    """Returns the one form that the kernels have."""
    return (BlockSizes("chunked", "chunked", CHUNK).fitted(spec),)


def running_sizes(spec: RecurrenceSpec, block_sizes: BlockSizes, device: Device) -> Sizes:
    """Returns the forms, with the one chunk that the kernels have, or fewer steps where there are no more."""
    return _in_chunks(block_sizes).fitted(spec).to_dict()


def _in_chunks(block_sizes: BlockSizes) -> BlockSizes:
    return replace(block_sizes, chunk=CHUNK)


def forward(site: RecurrenceSite, block_sizes: BlockSizes, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the last carried values and the stacked results."""
    return directions.forward(of_chunks, site, _in_chunks(block_sizes), operands)


def backward(
    site: RecurrenceSite,
    block_sizes: BlockSizes,
    operands: Sequence[jax.Array],
    cotangents: Sequence[jax.Array],
    active: Sequence[int],
) -> tuple[jax.Array, ...]:
    """Returns the cotangents of the operands at the positions ``active``."""
    return directions.backward(of_chunks, site, _in_chunks(block_sizes), operands, cotangents, active)


def of_chunks(before: bool, given: Recurrence) -> tuple[Array, Array]:
    """Computes chunks of up to 64 steps (:data:`autopallas.kernels.recurrence.chunks.OfChunks`).

    What the kernels do not have, such as a second and smaller state with a decay for each row, is plain JAX's.
    """
    rows, columns = given.initial.shape[2:]
    if given.decay.ndim == 5 or given.probe is not None or max(rows, columns) > LARGEST or given.decay.shape[1] > CHUNK:
        return by_scans(before, given)
    chunks, steps, groups, heads = given.decay.shape
    missing = CHUNK - steps
    flat = (chunks, CHUNK, groups * heads)
    decay = _behind(given.decay, 1, missing, 1.0).reshape(flat)
    excess = None if given.excess is None else _behind(given.excess, 1, missing).reshape(flat)
    levels, from_start, to_end, total = halved_products(decay, excess, unrolled=True)
    if not before:  # a state after a step has decayed once more
        second = (np.arange(CHUNK) & (1 << np.arange(LEVELS))[:, None]) > 0
        levels = jnp.where(second[:, None, :, None], levels * decay, levels)
        from_start = from_start * decay
    numbers = jnp.stack([x.swapaxes(1, 2) for x in (*levels, from_start, to_end)], 2)
    numbers = numbers.reshape(chunks, groups, heads, NUMBERS, CHUNK)
    key, query, value = (
        _behind(_behind(x, 1, missing), 4, rounded(x.shape[4], PART) - x.shape[4])
        .reshape(chunks * CHUNK, *x.shape[2:4], -1)
        .astype(_BF16)
        for x in (given.key, given.query, given.value)
    )
    initial = _behind(_behind(given.initial, 2, key.shape[3] - rows), 3, value.shape[3] - columns)
    dtype = _BF16 if given.query.dtype == _BF16 else np.dtype(jnp.float32)
    total = total.reshape(chunks, groups, heads)
    y, last = _computed(before, dtype, _Chunks(query, key, value, numbers, total, initial))
    return y.reshape(chunks, CHUNK, *y.shape[1:])[:, :steps, ..., :columns], last[:, :, :rows, :columns]


def _behind(x: Array, axis: int, count: int, value: float = 0.0) -> Array:
    """Returns an array with so many numbers more behind the end of an axis."""
    return jnp.pad(x, [(0, count * (i == axis)) for i in range(x.ndim)], constant_values=value) if count else x


class _Chunks(NamedTuple):
    """What the kernels compute from: matrices in bfloat16, numbers and first states in float32.

    Attributes:
      query, key: [T, G, J, N].
      value: [T, G, H, P].
      numbers: [X, G, H, L + 2, C], of :data:`autopallas.kernels.recurrence.gpu_sizes.NUMBERS`.
      total: [X, G, H], the decays of whole chunks.
      initial: [G, H, N, P].
    """

    query: Array
    key: Array
    value: Array
    numbers: Array
    total: Array
    initial: Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _computed(before: bool, dtype: Dtype, given: _Chunks) -> tuple[Array, Array]:
    """Returns (y [T, G, H, P] in a dtype, the last state [G, H, N, P])."""
    return _computed_forward(before, dtype, given)[0]


def _computed_forward(before: bool, dtype: Dtype, given: _Chunks) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    from autopallas.kernels.recurrence import gpu_kernels as kernels

    query, key, value, numbers, total, initial = given
    entering, last = _by_groups(kernels.states, (1, 1, 1, 1, 0), (1, 0))(key, value, numbers, total, initial)
    (y,) = _by_groups(lambda *x: (kernels.results(before, dtype, *x),), (1,) * 5, (1,))(
        query, key, value, numbers, entering
    )
    return (y, last), (query, key, value, numbers, total, entering)


def _computed_backward(
    before: bool, dtype: Dtype, saved: tuple[Array, ...], cotangents: tuple[Array, Array]
) -> tuple[_Chunks]:
    from autopallas.kernels.recurrence import gpu_kernels as kernels

    query, key, value, numbers, total, entering = saved
    dy, dlast = cotangents[0].astype(_BF16), cotangents[1]
    backwards = functools.partial(kernels.states, reverse=True)
    leaving, dinitial = _by_groups(backwards, (1, 1, 1, 1, 0), (1, 0))(query, dy, numbers, total, dlast)
    found = _by_groups(functools.partial(kernels.gradients, before), (1,) * 7, (1,) * 5)(
        query, key, value, numbers, entering, dy, leaving
    )
    dquery, dkey, dvalue, of_queries, of_keys = found
    if query.shape[2] == 1:
        dquery, dkey = (jnp.sum(x, 2, keepdims=True, dtype=jnp.float32).astype(_BF16) for x in (dquery, dkey))
    dtotal = jnp.sum(of_queries[:, :, :, -1], -1)
    levels = of_queries[:, :, :, :LEVELS] + of_keys[:, :, :, :LEVELS]
    dnumbers = jnp.concatenate([levels, of_queries[:, :, :, LEVELS:-1], of_keys[:, :, :, LEVELS:]], 3)
    return (_Chunks(dquery, dkey, dvalue, dnumbers, dtotal, dinitial),)


_computed.defvjp(_computed_forward, _computed_backward)


def _by_groups(
    kernel: Callable[..., Sequence[Array]], given: Sequence[int], found: Sequence[int]
) -> Callable[..., Sequence[Array]]:
    """Returns a kernel that under ``vmap`` has more groups, of which the axes of its operands and results are given."""
    mapped = jax.custom_batching.custom_vmap(lambda *operands: kernel(*operands))  # which hides further parameters

    @mapped.def_vmap
    def rule(size: int, batched: Sequence[bool], *operands: Array) -> tuple[Sequence[Array], Sequence[bool]]:
        merged = []
        for x, own, axis in zip(operands, batched, given, strict=True):
            x = jnp.moveaxis(x if own else jnp.broadcast_to(x, (size, *x.shape)), 0, axis)
            merged.append(x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :]))
        results = []
        for x, axis in zip(mapped(*merged), found, strict=True):
            x = x.reshape(*x.shape[:axis], size, -1, *x.shape[axis + 1 :])
            results.append(jnp.moveaxis(x, axis, 0))
        return tuple(results), (True,) * len(results)

    called: Callable[..., Sequence[Array]] = mapped
    return called
