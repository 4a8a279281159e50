"""Sizes of the tiles of the GPU kernels, and the shared memory that they take."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from autopallas.compat import Dtype
from autopallas.kernels.gpu import SHARED_MEMORY, rounded, shared_bytes
from autopallas.kernels.grouped_matmul.block_sizes import BlockSizes
from autopallas.kernels.grouped_matmul.spec import GroupedMatmulSpec

__all__ = ["PART", "STORED", "WIDENED", "WIDEST", "SharedOperand", "Tile"]

Stored: TypeAlias = tuple[tuple[int, ...], Dtype]
"""Shape and dtype of something in shared memory."""

SharedOperand: TypeAlias = Literal["first", "second"]
"""What two blocks load together: the first operand for tiles side by side, the second for tiles one below the other."""

PART = 64
"""Rows of one wgmma, and what is summed over between two steps of the pipeline."""

STORED = 64
"""Columns of the result that go through shared memory at a time."""

WIDEST = 256
"""Most columns of a tile."""

WIDENED = 2
"""Steps whose weights have a place in shared memory as they are multiplied, where they are loaded in 8 bits."""

_FEWEST_TOGETHER, _MOST_TOGETHER = 2, 4
"""Strips of so many columns that are stored together."""

_MOST_STAGES = 6


class Tile(NamedTuple):
    """The result's tile of one block, which two warpgroups share, and the pipeline that feeds them.

    Attributes:
      rows: of the result: 128, or 64.  A warpgroup has 64 of them: of 128 its own half, of 64 all and half the columns.
      inner: what is summed over in a step.
      columns: of the result.
      stages: how many steps the loads are ahead.
      together: how many strips of the result have a place in shared memory, and are stored together.
    """

    rows: int
    inner: int
    columns: int
    stages: int
    together: int = _FEWEST_TOGETHER

    @staticmethod
    def of(spec: GroupedMatmulSpec, sizes: BlockSizes) -> Tile:
        """Returns the tile for block sizes: rounded to what wgmma takes, no larger than the result, and with as many
        stages as fit into shared memory; and then with more room for the result, if there is."""
        inner, columns = spec.contracting, spec.columns
        if spec.use == "dlhs":
            inner, columns = columns, inner
        if spec.use == "drhs":
            rows, inner = (2 * PART if spec.contracting > PART else PART), spec.rows
        else:
            rows = 2 * PART if sizes.row_block > PART else PART
        step = min(rounded(sizes.inner_block or PART, PART), 2 * PART) if spec.use != "drhs" else PART
        share = 1 if rows > PART else 2
        # Four warpgroups have 128 registers of a thread each to start with, in which a sum of 64 x 256 has no room.
        widest = WIDEST if spec.widening is None else share * WIDEST // 2
        wide = min(rounded(sizes.column_block or WIDEST, share * STORED), widest)
        tile = Tile(rows, step, min(wide, rounded(columns, share * STORED)), 1)
        wanted = min(_MOST_STAGES, max(2, -(-inner // step)))
        for stages in range(wanted, 1, -1):
            if (candidate := tile._replace(stages=stages)).shared_bytes(spec) <= SHARED_MEMORY:
                strips = min(_MOST_TOGETHER, tile.part_columns // STORED)
                roomy = candidate._replace(together=max(strips, _FEWEST_TOGETHER))
                # An activation is evaluated strip by strip.
                more = spec.epilogue is None and roomy.shared_bytes(spec) <= SHARED_MEMORY
                return roomy if more else candidate
        return tile._replace(stages=2)

    @property
    def row_parts(self) -> int:
        """How many warpgroups share the rows; the others share the columns."""
        return self.rows // PART

    @property
    def column_parts(self) -> int:
        return 2 // self.row_parts

    @property
    def part_columns(self) -> int:
        """Columns of one warpgroup."""
        return self.columns // self.column_parts

    @property
    def halves(self) -> bool:
        """Whether a tile may be computed as two, of 64 rows each, by warpgroups that share the columns."""
        return self.row_parts == 2 and self.columns % (2 * STORED) == 0

    def shared_operand(self, columns: int, rows: int | None = None) -> SharedOperand | None:
        """Returns what two blocks share, where the result's tiles are an even number along an axis; the larger one if
        they are along both.

        Args:
          columns, rows: of the result; rows are None where tiles one below the other may differ in their weights.
        """
        if rows is not None and -(-rows // self.rows) % 2 == 0:
            return "second"
        return "first" if -(-columns // self.columns) % 2 == 0 else None

    def shapes(self, spec: GroupedMatmulSpec) -> tuple[Stored, ...]:
        """Shape and dtype of what is in shared memory: first, second, the result on its way out, whole and cut, and
        the second operand as it is multiplied where that is not as it is stored."""
        first = (self.inner, PART) if spec.use == "drhs" else (PART, self.inner)
        second = (self.column_parts, *self._second(spec))
        found = (
            ((self.stages, self.row_parts, *first), spec.first_dtype),
            ((self.stages, *second), spec.stored_dtype),
            ((2, self.together, PART, STORED), spec.output_dtype),
        )
        if spec.use == "drhs":
            return found
        cut: Stored = ((2, PART, STORED), spec.output_dtype)
        wide: tuple[Stored, ...] = ()
        if spec.widening is not None:
            wide = (((WIDENED, *second), spec.second_dtype),)
        return (*found, cut, *wide)

    def _second(self, spec: GroupedMatmulSpec) -> tuple[int, int]:
        return (self.part_columns, self.inner) if spec.use == "dlhs" else (self.inner, self.part_columns)

    def second_swizzle(self, spec: GroupedMatmulSpec) -> int:
        """Most bytes that the second operand's swizzle may have: TMA moves whole ones, and of arrays that have half of
        one left at the end those of half the size."""
        return 64 if spec.widening is not None and rounded(spec.columns, PART) % 128 else 128

    def shared_bytes(self, spec: GroupedMatmulSpec) -> int:
        """Of one block."""
        return shared_bytes(self.shapes(spec), barriers=2 * self.stages + 1 + 2 * WIDENED * (spec.widening is not None))
