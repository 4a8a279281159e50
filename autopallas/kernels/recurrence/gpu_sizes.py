"""Sizes of the GPU kernels of recurrences, for those who do not import Pallas."""

from __future__ import annotations

__all__ = ["CHUNK", "FROM_START", "LARGEST", "LEVELS", "NUMBERS", "PART", "TO_END"]

CHUNK = 64
"""Steps of a chunk: the rows of one wgmma."""
PART = 64
"""Rows and columns of a state are padded to a multiple of so many."""
LARGEST = 128
"""Rows, and columns, of a state at most: what the registers of a warpgroup hold beside a tile of scores."""
LEVELS = (CHUNK - 1).bit_length()
"""Sizes of blocks of 2, 4, 8, ... steps."""
FROM_START, TO_END = LEVELS, LEVELS + 1
NUMBERS = LEVELS + 2
"""Numbers that a chunk has for each step: for each size of blocks, the decays from the block's middle to the state that
the step reads, or, in the first half, from after the step to the middle; from the beginning of the chunk to the state
that it reads; and from after it to the end of the chunk."""
