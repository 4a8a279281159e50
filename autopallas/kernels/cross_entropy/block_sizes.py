"""Block sizes of the streaming cross-entropy: what they mean, what they cost, which are worth trying."""

from __future__ import annotations

from dataclasses import dataclass

from autopallas.kernels.cross_entropy.spec import CrossEntropySpec
from autopallas.sites.block_sizes import aligned

__all__ = ["WHOLE", "BlockSizes"]

WHOLE = 2**20
"""A vocabulary block that no vocabulary exceeds."""
_LARGEST_TILE = 64 * 2**20
"""Bytes.  512 rows of 32,000 logits are the fastest; with more, what is saved is too little to be worth while."""


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """Sizes of one tile of logits.

    Attributes:
      rows_block: rows, that is, tokens.  At least N: the weight streams past all rows at once.
      vocabulary_block: columns, that is, positions in the vocabulary.  At least V: rows stream past the whole weight,
        and statistics and products that are asked for together see the same logits, which are then computed once.
    """

    rows_block: int
    vocabulary_block: int

    def __post_init__(self) -> None:
        for name in ("rows_block", "vocabulary_block"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive integer, not {value!r}")

    @classmethod
    def get_default(cls) -> BlockSizes:
        """Returns the least memory at nearly the best speed: the weight streams, a part of the vocabulary at a time."""
        return cls(2048, 2048)

    def fitted(self, spec: CrossEntropySpec) -> BlockSizes:
        """Returns the same, valid for the shape: aligned, and no longer than the axis.

        A length that the block does not divide is not a reason for a smaller block: the last block is the shorter one.
        """
        return BlockSizes(aligned(self.rows_block, spec.rows), aligned(self.vocabulary_block, spec.vocabulary))

    def temporary_bytes(self, spec: CrossEntropySpec, direction: str = "forward") -> int:
        """Estimate of the temporary memory, from which candidates are pruned; within a factor of two or so."""
        size = spec.accumulation_dtype.itemsize
        hidden, heads = sum(head.hidden for head in spec.heads), len(spec.heads)
        rows, columns = min(self.rows_block, spec.rows), min(self.vocabulary_block, spec.vocabulary)
        # A tile of logits, the operands of its dot in the dtype of the dot, and the statistics.
        total = heads * rows * columns + hidden * (rows + columns) + 8 * spec.rows
        if direction == "forward" and not spec.products:
            return total * size
        total += heads * rows * columns + hidden * (2 * spec.rows + columns)
        if rows < spec.rows and columns == spec.vocabulary:
            total += hidden * spec.vocabulary  # the accumulator of the weight's gradient
        return total * size

    @classmethod
    def candidates(cls, spec: CrossEntropySpec) -> tuple[BlockSizes, ...]:
        """Returns what a search should try, best guess first, none twice.

        Those for the whole vocabulary are not fitted to this one: they are meant for every one near by.
        """
        streaming = [(2048, 4096), (2048, 2048), (2048, 1280), (1024, 2048), (512, 2048)]
        spanning = [(rows, WHOLE) for rows in (512, 256, 128, 64)]
        if spec.products:  # logits that are kept need not be computed twice
            blocks = [*spanning[:3], streaming[0], spanning[3], *streaming[1:]]
        else:
            blocks = [streaming[1], spanning[0], streaming[0], *streaming[2:]]
        different: dict[BlockSizes, BlockSizes] = {}
        for sizes in (cls(*pair) for pair in blocks):
            fitted = sizes.fitted(spec)
            tile = fitted.rows_block * fitted.vocabulary_block * spec.accumulation_dtype.itemsize
            if tile <= _LARGEST_TILE:
                different.setdefault(fitted, sizes)
        return tuple(
            cls(fitted.rows_block, sizes.vocabulary_block) if sizes.vocabulary_block == WHOLE else fitted
            for fitted, sizes in different.items()
        )

    def to_dict(self) -> dict[str, int]:
        return {"rows_block": self.rows_block, "vocabulary_block": self.vocabulary_block}
