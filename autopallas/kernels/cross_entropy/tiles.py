"""Tiles of logits: how operands are cut, multiplied and rounded, and how programs are evaluated on a tile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from autopallas.kernels.cross_entropy.operands import Operands
from autopallas.kernels.cross_entropy.spec import CrossEntropySpec, SideSpec
from autopallas.kernels.even_blocks import Part
from autopallas.sites.block_sizes import dividing, evened
from autopallas.sites.device import Device
from autopallas.sites.elementwise import ElementwiseProgram, reproducible

__all__ = [
    "Block",
    "Rows",
    "Tile",
    "TileOperands",
    "cut",
    "cut_row",
    "cut_rows",
    "dot",
    "even_block",
    "on_gpu",
    "over",
    "over_rows",
    "running_block",
    "stored",
]

Array: TypeAlias = jax.Array
Start: TypeAlias = int | Array
Block: TypeAlias = tuple[Start, int]
"""(start, size) along an axis; starts may be traced, sizes are static."""
Carry = TypeVar("Carry")


class Tile(NamedTuple):
    """Logits of some rows and columns, their positions, and the side inputs there."""

    score: Array  # [r, c]
    query: Array  # [r, 1]
    key: Array  # [1, c], or [r, 1] where each row has a column of its own
    sides: tuple[Array, ...]  # [r|1, c|1]

    def value(self, program: ElementwiseProgram, dtype: DTypeLike | None = None) -> Array:
        """Returns the program's value, [r, c]."""
        value = reproducible(program).evaluate(self.score, self.query, self.key, self.sides)
        return jnp.broadcast_to(value if dtype is None else value.astype(dtype), self.score.shape)

    def picked(self, column: Array) -> Tile:
        """Returns the tile's column ``column[n, 0]`` of each row n."""

        def of(x: Array) -> Array:
            if x.shape[1] == 1:
                return x
            rows = jnp.broadcast_to(x, (column.shape[0], x.shape[1]))
            return jnp.take_along_axis(rows, column, axis=1, mode="clip")

        sides = tuple(of(side) for side in self.sides)
        return Tile(of(self.score), self.query, self.key[0, 0] + column, sides)


def canonical_labels(label: Array, vocabulary: int) -> Array:
    """Labels as int32, with -1 for those that are none."""
    # The greatest value of a narrow dtype may be less than the vocabulary's, so compare in a wide one.
    wide = label if label.dtype.itemsize > 4 or label.dtype == jnp.uint32 else label.astype(jnp.int32)
    return jnp.where((wide >= 0) & (wide < vocabulary), wide, -1).astype(jnp.int32)


class Rows(NamedTuple):
    """A block of rows of x, both ways."""

    x: Array  # [r, D]
    transposed: Array  # [D, r]


class _Head(NamedTuple):
    """Of one of the spec's heads, the activations both ways, and the weight.

    A GPU's library reads either way at the same speed, and has the activations once.
    """

    x: Array
    transposed: Array | None
    w: Array
    vocabulary_axis: int

    def rows(self, block: Block) -> Rows:
        """Part of the activations."""
        x = cut(self.x, block, 0)
        return Rows(x, x.T if self.transposed is None else cut(self.transposed, block, 1))


@dataclass(frozen=True, slots=True, eq=False)
class TileOperands:
    """Operands as the tiles read them."""

    heads: tuple[_Head, ...]
    sides: tuple[Array | None, ...]
    """None for the logits of a further head."""
    labels: dict[int, Array]
    """Canonical labels by the position of their side input."""

    @staticmethod
    def of(spec: CrossEntropySpec, operands: Operands) -> TileOperands:
        x, w, sides = operands
        positions = {s.label for s in spec.statistics if s.label is not None}
        labels = {n: canonical_labels(cast(Array, sides[n]), spec.vocabulary) for n in sorted(positions)}
        further = [side for side, s in zip(sides, spec.sides, strict=False) if s.head is not None]
        once = on_gpu()
        # The barrier keeps XLA from folding the transposition back into the dots.
        heads = tuple(
            _Head(x, None if once else lax.optimization_barrier(x.T), w, 0 if head.vocabulary_major else 1)
            for head, (x, w) in zip(spec.heads, ((x, w), *further), strict=True)
        )
        return TileOperands(heads, tuple(None if isinstance(side, tuple) else side for side in sides), labels)

    def rows(self, block: Block) -> tuple[Rows, ...]:
        """Part of the activations of each head, also transposed."""
        return tuple(head.rows(block) for head in self.heads)

    def columns(self, block: Block) -> tuple[Array, ...]:
        """Part of each weight, in its own layout."""
        return tuple(cut(head.w, block, head.vocabulary_axis) for head in self.heads)

    def tile(self, spec: CrossEntropySpec, x: Sequence[Rows], w: Sequence[Array], rows: Block, columns: Block) -> Tile:
        """Returns the tile whose operands ``x`` and ``w`` have been cut already."""
        query = (rows[0] + np.arange(rows[1], dtype=np.int32))[:, None]
        key = (columns[0] + np.arange(columns[1], dtype=np.int32))[None, :]
        dtypes = (spec.logit_dtype, *(s.dtype for s in spec.sides if s.head is not None))
        products = (
            dot(spec, part.x, weight, (1, 1 - head.vocabulary_axis), dtype)
            for head, part, weight, dtype in zip(self.heads, x, w, dtypes, strict=True)
        )
        logits = _rounded(next(products), spec.logit_dtype)

        def of(side: Array | None, s: SideSpec) -> Array:
            if side is None:
                return _rounded(next(products), s.dtype)
            if s.varies[1]:
                return cut(cut(side, rows, 0) if s.varies[0] else side, columns, 1)
            return cut_row(side, rows)

        sides = tuple(of(side, s) for side, s in zip(self.sides, spec.sides, strict=True))
        return Tile(logits, jnp.asarray(query), jnp.asarray(key), sides)

    def finished(self, spec: CrossEntropySpec, rows: Block, statistics: Sequence[Array]) -> tuple[Array, ...]:
        """Returns the values of the spec's ``finish``, [r|1, 1] each, from the statistics of these rows."""
        query = jnp.asarray((rows[0] + np.arange(rows[1], dtype=np.int32))[:, None])
        own = (jnp.zeros((1, 1)) if side is None else cut_row(side, rows) for side in self.sides)  # which none reads
        sides = (*own, *(s[:, None] for s in statistics))
        return tuple(program.evaluate(None, query, None, sides) for program in spec.finish)


def cut(array: Array, block: Block, axis: int) -> Array:
    """Returns the block of an axis; all of it without a slice."""
    start, size = block
    if size == array.shape[axis]:
        return array
    if isinstance(start, int):
        return lax.slice_in_dim(array, start, start + size, axis=axis)
    return lax.dynamic_slice_in_dim(array, start, size, axis)


def cut_row(array: Array, rows: Block) -> Array:
    """Returns the rows of an array that may have one row for all, or be a number."""
    return array if array.shape[:1] in ((), (1,)) else cut(array, rows, 0)


def cut_rows(arrays: Sequence[Array], rows: Block) -> tuple[Array, ...]:
    return tuple(cut_row(array, rows) for array in arrays)


def stored(array: Array, update: Array, block: Block, axis: int) -> Array:
    """``array`` with the block of an axis replaced."""
    update = update.astype(array.dtype)
    if update.shape == array.shape:
        return update
    return lax.dynamic_update_slice_in_dim(array, update, block[0], axis)


def running_block(block: int, length: int, multiple: int = 1) -> int:
    """Returns the size of the blocks of an axis: near the one that is asked for, and dividing the axis where one
    does."""
    return dividing(max(1, min(block, length)), length, multiple)


def even_block(block: int, rows: int) -> int:
    """Returns the size of blocks of rows of which the last one may repeat some."""
    return evened(running_block(block, rows), rows)


def over(length: int, block: int, body: Callable[[Block, Carry], Carry], carry: Carry, multiple: int = 1) -> Carry:
    """``carry`` after ``body`` for each block of an axis, the shorter last one included.

    Blocks have the size :func:`running_block`, and begin at a multiple of ``multiple``.
    """
    block = running_block(block, length, multiple)
    count, rest = divmod(length, block)
    if count == 1:
        carry = body((0, block), carry)
    elif count:
        carry = lax.fori_loop(0, count, lambda n, c: body((n * block, block), c), carry)
    if not rest:
        return carry
    start: Start = count * block
    if count and on_gpu():
        # What the last block is computed from waits for the others, so that its tiles do not take memory before.
        start, carry = lax.optimization_barrier((jnp.int32(start), carry))
    return body((start, rest), carry)


def over_rows(rows: int, block: int, body: Callable[[Part, Carry], Carry], carry: Carry, multiple: int = 1) -> Carry:
    """``carry`` after ``body`` for each block of rows.

    On a CPU all have one size, and the last one may repeat rows: a block of another size is compiled by itself, and has
    memory of its own.  On a GPU it is shorter, as of :func:`over`.
    """
    if on_gpu():
        return over(rows, block, lambda part, carry: body(Part(*part), carry), carry, multiple)
    size = even_block(block, rows)
    if size == rows:
        return body(Part(0, rows), carry)
    found: Carry = lax.fori_loop(0, -(-rows // size), lambda n, carry: body(Part.of(rows, size, n), carry), carry)
    return found


def on_gpu() -> bool:
    """Whether code is compiled for a GPU."""
    return Device.current().platform == "gpu"


def dot(
    spec: CrossEntropySpec, a: Array, b: Array, contract: tuple[int, int], rounded: DTypeLike | None = None
) -> Array:
    """Returns the product of two matrices over the given axis of each, in the accumulation dtype.

    Where it is rounded next, and the tensor cores of a GPU multiply that dtype, it is already: the library rounds what
    it has summed in float32, and the sums themselves are not written.
    """
    dtype = jnp.promote_types(a.dtype, b.dtype)
    result = spec.accumulation_dtype
    if rounded == dtype and dtype.itemsize == 2 and result == np.float32 and on_gpu():
        result = np.dtype(dtype)
    if spec.accumulation_dtype == np.float64:
        dtype = jnp.dtype(np.float64)
    elif dtype.itemsize == 2 and Device.current().platform == "cpu" and not _multiplies_natively(dtype):
        dtype = jnp.dtype(np.float32)  # as XLA would do, but without rounding what is computed here to 16 bits first
    return lax.dot_general(
        a.astype(dtype),
        b.astype(dtype),
        (((contract[0],), (contract[1],)), ((), ())),
        precision=None if spec.precision is None else lax.Precision[spec.precision],
        preferred_element_type=result,
    )


@cache
def _multiplies_natively(dtype: DTypeLike) -> bool:
    """Whether this host's processor has instructions for products of a 16-bit dtype."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return False
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return dtype == jnp.bfloat16 and ("amx_bf16" in flags or "avx512_bf16" in flags)


def _rounded(logits: Array, dtype: DTypeLike) -> Array:
    """The logits in their dtype.  A mere pair of casts XLA may drop, in one place and not in another."""
    if jnp.finfo(dtype).bits >= jnp.finfo(logits.dtype).bits:
        return logits.astype(dtype)
    if dtype == jnp.bfloat16:
        logits = lax.reduce_precision(logits, exponent_bits=8, mantissa_bits=7)
        return logits.astype(dtype)
    rounded: Array = lax.optimization_barrier(logits.astype(dtype))
    return rounded
