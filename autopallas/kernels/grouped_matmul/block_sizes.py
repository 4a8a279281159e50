"""Block sizes of the grouped matmul: what they mean, what they cost, which are worth trying."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal, TypeAlias, get_args

from autopallas.kernels.grouped_matmul.spec import ProductSpec
from autopallas.sites.block_sizes import aligned
from autopallas.sites.spec import Sizes

__all__ = ["STORED", "BlockSizes", "Weights"]

Weights: TypeAlias = Literal["", "stored"]
STORED: Weights = "stored"

_SMALLEST = 16


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """Sizes of one tile.

    Attributes:
      row_block: rows that are multiplied with one group's weights at a time, at most.
      inner_block: what a product of rows is summed over at a time (K, or N for "dlhs"); 0: the implementation's choice.
      column_block: columns of a result at a time, on both sides of the weights' gradient; 0: the implementation's
        choice.  Of these two, "xla" takes no notice: it takes all.
      weights: how a GPU's kernel loads weights that the program stores in 8 bits: as they are multiplied, which XLA
        makes of them before (""), or as they are "stored", widened in shared memory.  Others have the first alone.
    """

    row_block: int
    inner_block: int = 0
    column_block: int = 0
    weights: Weights = ""

    def __post_init__(self) -> None:
        for name, least in (("row_block", 1), ("inner_block", 0), ("column_block", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                kind = "positive integer" if least else "integer, and not negative,"
                raise ValueError(f"{name} must be a {kind}, not {value!r}")
        if self.weights not in get_args(Weights):
            raise ValueError(f"weights must be one of {get_args(Weights)}, not {self.weights!r}")

    @classmethod
    def get_default(cls) -> BlockSizes:
        """Enough rows to keep a matmul busy; less where groups are smaller."""
        return cls(256)

    def fitted(self, spec: ProductSpec) -> BlockSizes:
        """Returns the same, valid for the shape: aligned, no more than the rows, and no larger than groups tend to be.

        A group's last tile is computed in full whatever it holds, so a tile far above the mean group is mostly waste.
        """
        return replace(self, row_block=aligned(self.row_block, min(_natural(spec), spec.rows)))

    def temporary_bytes(self, spec: ProductSpec, direction: str = "forward") -> int:
        """Estimate of the temporary memory: one group's weights, a tile, and lhs transposed in the backward."""
        size = spec.accumulation_dtype.itemsize
        weights = spec.contracting * spec.columns
        tile = self.row_block * (spec.contracting + spec.columns)
        if direction == "forward":
            return size * (weights + tile)
        return size * (3 * weights + 2 * tile) + spec.rows * spec.contracting * spec.first_dtype.itemsize

    @classmethod
    def candidates(cls, spec: ProductSpec) -> tuple[BlockSizes, ...]:
        """Returns what a search should try, best guess first, each valid for the shape and none twice."""
        fitted = (cls(rows).fitted(spec) for rows in (256, 128, 512, 64, 32))
        return tuple(dict.fromkeys(fitted))

    def to_dict(self) -> Sizes:
        """Returns the sizes by name, and how weights are loaded if that is not as they are multiplied."""
        sizes = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in sizes.items() if value != ""}


def _natural(spec: ProductSpec) -> int:
    """The power of two that holds a mean group, at least :data:`_SMALLEST`."""
    return max(_SMALLEST, 1 << (spec.rows_per_group - 1).bit_length())
