"""What a TPU kernel of cross-entropy has in VMEM: the size of its tile, and its side inputs, packed.

An array [N, 1] fills a tile's 128 lanes with one number.  So all numbers per row go into two arrays, one of floats and
one of integers, with a column each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from autopallas.kernels.cross_entropy.block_sizes import BlockSizes
from autopallas.kernels.cross_entropy.spec import CrossEntropySpec
from autopallas.kernels.refs import Ref
from autopallas.kernels.tpu import LANES, block_bytes, rounded

__all__ = ["SUBLANES", "Packed", "Place", "Shape", "Task", "fitting"]

Array: TypeAlias = jax.Array
Task: TypeAlias = Literal["statistics", "rows", "columns"]
"""What a kernel sums over: the vocabulary, for numbers per row or for products with the weight; or the rows."""

SUBLANES = 32
"""Of the narrowest dtype that a side input may have."""
_ADDED = 4 * 2**20
_OUTER = (2048, 1024, 512, 256, 128, 64, 32)
_INNER = (1024, 512, 256, 128)


class Shape(NamedTuple):
    """Rows and columns of a tile of logits."""

    rows: int
    columns: int


def fitting(
    spec: CrossEntropySpec, sizes: BlockSizes, task: Task, budget: int, lanes: int = LANES, sublanes: int = SUBLANES
) -> Shape | None:
    """Returns the tile for a task: at most the block sizes, rounded up to whole registers, and what fits into the
    budget.

    What the outer loop holds is read once, and what the inner one holds once for each of the outer's blocks: so the
    outer block is as large as can be.

    Args:
      spec, sizes: what is computed, and with which blocks.
      task: for which of the kernels.
      budget: bytes of VMEM.
      lanes, sublanes: what blocks of columns, and of rows, must be multiples of, unless they are all there is.

    Returns:
      None where not even the smallest tile fits.
    """

    def blocks(most: int, extent: int, unit: int, choices: Sequence[int]) -> list[int]:
        largest = min(rounded(most, unit), extent)
        return [largest, *(c for c in choices if c < largest and c % unit == 0)]

    rows = blocks(sizes.rows_block, spec.rows, sublanes, _OUTER if task != "columns" else _INNER)
    columns = blocks(sizes.vocabulary_block, spec.vocabulary, lanes, _OUTER if task == "columns" else _INNER)
    outers, inners = (columns, rows) if task == "columns" else (rows, columns)
    room = budget - budget // 16  # for what the compiler spills
    for least in (min(256, inners[0]), 0):
        for outer in outers:
            for inner in inners:
                shape = Shape(inner, outer) if task == "columns" else Shape(outer, inner)
                if inner >= least and vmem_bytes(spec, shape, task) <= room:
                    return shape
    return None


def vmem_bytes(spec: CrossEntropySpec, shape: Shape, task: Task) -> int:
    """Estimate of the VMEM that a kernel takes: two buffers for each block, accumulators, and values on the tile."""
    rows, columns = shape
    weight = (columns, spec.hidden) if spec.vocabulary_major else (spec.hidden, columns)
    total = block_bytes((rows, spec.hidden), spec.row_dtype, 2) + block_bytes(weight, spec.weight_dtype, 2)
    numbers = block_bytes((rows, 1), np.float32, 2)
    if task == "statistics":
        total += (1 + len(spec.statistics)) * numbers
    else:
        block, dtype = ((rows, spec.hidden), spec.row_dtype) if task == "rows" else (weight, spec.weight_dtype)
        sums = block_bytes(block, np.float32)
        # A part of what is added to the sums is there at a time.
        total += 2 * numbers + sums + min(sums, _ADDED) + block_bytes(block, dtype, 2)
    for side in spec.sides:
        if side.varies[1]:
            total += block_bytes((rows if side.varies[0] else 1, columns), side.dtype, 2)
    return total + 3 * block_bytes((rows, columns), np.float32)


# ---------------------------------------------------------------------- side inputs


class Place(NamedTuple):
    """Where a kernel finds a side input: a column of the packed numbers per row, or an array of its own."""

    kind: Literal["float", "int", "column", "full"]
    number: int
    dtype: DTypeLike


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Side inputs as a kernel reads them.

    Attributes:
      places: one per side input.
      arrays: the operands of the kernel.
      kinds: of each: "float" and "int" are [N, columns], "column" is [1, V], "full" is [N, V].
    """

    places: tuple[Place, ...]
    arrays: tuple[Array, ...]
    kinds: tuple[str, ...]

    @staticmethod
    def of(arrays: Sequence[Array], rows: int) -> Packed:
        """Packs arrays [N|1, V|1]."""
        places: list[Place] = []
        packs: dict[str, list[Array]] = {"float": [], "int": []}
        own: list[tuple[str, Array]] = []
        for array in arrays:
            if array.shape[1] != 1:
                kind: Literal["float", "int", "column", "full"] = "column" if array.shape[0] == 1 else "full"
                narrow = jnp.int8 if kind == "full" else jnp.int32
                own.append((kind, array.astype(narrow) if array.dtype == jnp.bool_ else array))
                places.append(Place(kind, len(own) - 1, array.dtype))
                continue
            kind = "float" if jnp.issubdtype(array.dtype, jnp.floating) else "int"
            wide = array.astype(jnp.float32 if kind == "float" else jnp.int32)
            packs[kind].append(jnp.broadcast_to(wide, (rows, 1)))
            places.append(Place(kind, len(packs[kind]) - 1, array.dtype))
        filled = [(kind, jnp.concatenate(pack, axis=1)) for kind, pack in packs.items() if pack]
        behind = len(filled)
        places = [p._replace(number=p.number + behind) if p.kind in ("column", "full") else p for p in places]
        everything = [*filled, *own]
        return Packed(tuple(places), tuple(a for _, a in everything), tuple(k for k, _ in everything))

    def read(self, arrays: Sequence[Ref]) -> list[Array]:
        """Returns the side inputs on a tile, [r|1, c|1] each, from what the kernel has of :attr:`arrays`."""
        found = []
        for kind, number, dtype in self.places:
            if kind in ("float", "int"):
                found.append(_restored(arrays[self.kinds.index(kind)][:, number : number + 1], dtype))
            else:
                found.append(_restored(arrays[number][...], dtype))
        return found


def _restored(value: Array, dtype: DTypeLike) -> Array:
    if dtype == jnp.bool_:
        return (value if value.dtype == jnp.int32 else value.astype(jnp.int32)) != 0
    return lax.convert_element_type(value, dtype)
