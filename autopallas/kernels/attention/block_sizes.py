"""Defines block sizes of the streaming attention: their meaning, their memory, and which to try."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

from autopallas.kernels.attention.spec import AttentionSpec
from autopallas.sites.block_sizes import aligned
from autopallas.sites.spec import Sizes

__all__ = ["PERSISTENT", "SECTIONS", "BlockSizes", "Schedule"]

Schedule: TypeAlias = Literal["", "sections", "persistent"]
SECTIONS: Schedule = "sections"
PERSISTENT: Schedule = "persistent"

_WORKING_SET = 8 * 2**20


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """Sizes of one score tile.

    Attributes:
      query_block: rows, that is, query positions.
      key_block: columns, that is, key positions.  If it is the key length or more, a block of rows has one tile.
      schedule: in which order a GPU's blocks are computed: head after head (""), in "sections" of several heads, or so
        by "persistent" blocks of threads.  Other implementations have one order.
      blocks_per_processor: how many blocks of threads each processor of a GPU gets at most, where several divide the
        keys of few queries, and the query heads of a group are rows of one tile; 0 if none do.
    """

    query_block: int
    key_block: int
    schedule: Schedule = ""
    blocks_per_processor: int = 0

    def __post_init__(self) -> None:
        for name in ("query_block", "key_block"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive integer, not {value!r}")
        blocks = self.blocks_per_processor
        if not isinstance(blocks, int) or isinstance(blocks, bool) or blocks < 0:
            raise ValueError(f"blocks_per_processor must be 0 or a positive integer, not {blocks!r}")
        if self.schedule not in get_args(Schedule):
            raise ValueError(f"schedule must be one of {get_args(Schedule)}, not {self.schedule!r}")

    @classmethod
    def get_default(cls) -> BlockSizes:
        """Returns sizes that suit most cases: a tile of 256 x 256 stays in the second-level cache."""
        return cls(256, 256)

    def fitted(self, spec: AttentionSpec) -> BlockSizes:
        """Returns sizes that are valid for the shape: aligned, and no longer than the axis.

        A block need not divide the length: the last block is then shorter, or repeats some of the one before.
        """
        query_block, key_block = aligned(self.query_block, spec.query_length), aligned(self.key_block, spec.key_length)
        return replace(self, query_block=query_block, key_block=key_block)

    def heads_per_step(self, spec: AttentionSpec) -> tuple[int, int]:
        """Returns (batch, key heads) that one tile covers: as many as fit into the cache, at least one."""
        tile = spec.groups * self.query_block * self.key_block * spec.accumulation_dtype.itemsize
        room = max(1, _WORKING_SET // tile)
        heads = _largest_divisor(spec.key_heads, room)
        return (_largest_divisor(spec.batch, room // heads) if heads == spec.key_heads else 1), heads

    def temporary_bytes(self, spec: AttentionSpec, direction: str = "forward") -> int:
        """Estimates the temporary memory within about a factor of two; candidates are pruned by it."""
        batch, heads = self.heads_per_step(spec)
        size = spec.accumulation_dtype.itemsize
        per_head = spec.groups * self.query_block * (self.key_block * 3 + spec.value_head_size * 2 + spec.head_size)
        total = batch * heads * per_head * size
        if direction == "forward":
            return total
        keys = spec.batch * spec.key_heads * spec.key_length * (spec.head_size + spec.value_head_size)
        rows = spec.batch * spec.key_heads * spec.groups * spec.query_length
        return 2 * total + size * (keys + rows * (spec.head_size + spec.value_head_size + 1))

    @classmethod
    def candidates(cls, spec: AttentionSpec) -> tuple[BlockSizes, ...]:
        """Returns different block sizes to try, best guess first, each valid for the shape.

        They are for implementations without their own ``candidates``.
        """
        pairs = [(256, 256), (128, 256), (256, 512), (512, 256), (512, 512), (128, 128), (128, 512), (512, 1024)]
        fitted = (cls(query, key).fitted(spec) for query, key in pairs)
        return tuple(dict.fromkeys(fitted))

    def to_dict(self) -> Sizes:
        """Returns the sizes by name, and what else there is."""
        sizes: dict[str, int | str] = {"query_block": self.query_block, "key_block": self.key_block}
        further = {"schedule": self.schedule, "blocks_per_processor": self.blocks_per_processor}
        return sizes | {name: value for name, value in further.items() if value}


def _largest_divisor(number: int, at_most: int) -> int:
    return next(d for d in range(max(1, min(number, at_most)), 0, -1) if number % d == 0)
