"""Decides in which order the GPU kernels of attention compute their blocks of rows or columns, and by which threads.

Heads are visited one after the other, the longest blocks of each first, so that the keys and values of few heads are
read at once, and stay in the second-level cache.  The last head's longest block then begins late, and most processors
wait for it: with 64 heads of 32 blocks under a causal mask that takes 7% of all time.  In *sections* of several heads,
as many as the cache holds, all long blocks come before the short ones.

*Persistent* blocks of threads stay on the processors, and each goes through a list of blocks that is made here, as a
processor would get them that takes the next one whenever it has finished: what the next block needs is loaded while the
results of the last one are written.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopallas.kernels import gpu
from autopallas.kernels.attention.block_sizes import PERSISTENT, SECTIONS
from autopallas.kernels.attention.gpu_grid import Visits
from autopallas.kernels.refs import Number, Ref
from autopallas.sites.device import Device

__all__ = ["Order", "entry", "list_length"]

Array: TypeAlias = jax.Array

_CACHE = 16 * 2**20
"""Bytes that the heads of a section may stream: a third of the second-level cache of an H100."""
_BESIDE = 2.0
"""Time that a block takes beside its steps, in steps."""
_MOST_SIMULATED, _MOST_TRIED = 2**13, 16
"""Blocks of a kernel, and sizes of sections, of which each is simulated, and the first of the best is taken."""


@dataclass(frozen=True, eq=False)
class Order:
    """The order of the blocks of one kernel.

    Attributes:
      heads, home_blocks: their numbers: of blocks of rows, or of columns, each head has as many.
      section: heads whose blocks are in turns; 1: heads come one after the other.
      longest_first: whether the later blocks of a head come first.
      lists: for persistent blocks of threads, [blocks of threads, 1 + most], how many blocks each of them computes, and
        which, as head * home_blocks + block; None if each computes one.
    """

    heads: int
    home_blocks: int
    section: int
    longest_first: bool
    lists: np.ndarray | None

    @staticmethod
    def of(visits: Visits, heads: int, schedule: str, streamed_bytes: int, sharing: int = 1) -> Order:
        """Returns the order of a kernel.

        Args:
          visits: what each block visits.
          heads: their number.
          schedule: of the block sizes.
          streamed_bytes: what the blocks of a head read again and again.
          sharing: how many heads in a row read the same.
        """
        count, plain = visits.home_blocks, Order(heads, visits.home_blocks, 1, visits.longest_first, None)
        if schedule not in (SECTIONS, PERSISTENT):
            return plain
        order = plain
        if visits.counts is None and visits.known is not None:
            most = max(1, min(heads, _CACHE // max(1, streamed_bytes) * sharing))
            sections: Sequence[int] = [-(-heads // -(-heads // most))]
            if heads * count <= _MOST_SIMULATED:
                sections = range(1, most + 1, -(-most // _MOST_TRIED))
            orders = [Order(heads, count, section, visits.longest_first, None) for section in sections]
            order = orders[0] if len(orders) == 1 else min(orders, key=lambda order: order.dealt(visits)[1])
        if schedule == SECTIONS:
            return order
        return Order(heads, count, order.section, order.longest_first, order._listed(visits))

    @property
    def blocks(self) -> int:
        """Blocks of threads."""
        return self.heads * self.home_blocks if self.lists is None else len(self.lists)

    @property
    def operands(self) -> tuple[Array, ...]:
        """Arrays that the kernel reads."""
        return () if self.lists is None else (jnp.asarray(self.lists),)

    def place(self, number: Array, listed: Ref = None) -> tuple[Array, Array]:
        """Returns, in a kernel, (head, block) of what a block of threads computes; of persistent ones, of the entry
        ``listed`` of their list."""
        if listed is not None:
            return gpu.unravelled(number, self.home_blocks)
        if self.section == 1:
            head, home = gpu.unravelled(number, self.home_blocks)
        else:
            section, rest = gpu.unravelled(number, self.section * self.home_blocks)
            size: Array = jnp.int32(self.section)
            if self.heads % self.section:
                size = jnp.minimum(size, self.heads - section * self.section)
            head, home = section * self.section + lax.rem(rest, size), lax.div(rest, size)
        return head, self.home_blocks - 1 - home if self.longest_first else home

    def _all(self) -> np.ndarray:
        """All blocks in their order, as lists have them."""
        home = np.arange(self.home_blocks)
        home = home[::-1] if self.longest_first else home
        found = []
        for first in range(0, self.heads, self.section):
            head = np.arange(first, min(first + self.section, self.heads))
            found.append((head * self.home_blocks + home[:, None]).reshape(-1))
        return np.concatenate(found)

    def dealt(self, visits: Visits, beside: float = _BESIDE) -> tuple[list[list[int]], float]:
        """Simulates processors that each take the next block whenever they have finished one.

        Args:
          visits: what each block visits.
          beside: the time that a block takes beside its steps, in steps.

        Returns:
          What each of them computes, and when the last one ends, in steps.
        """
        lengths = _lengths(visits)
        processors = min(gpu.processors(Device.current()), self.heads * self.home_blocks)
        lists: list[list[int]] = [[] for _ in range(processors)]
        free = [(0.0, n) for n in range(processors)]
        for block in self._all().tolist():
            time, n = free[0]
            lists[n].append(block)
            heapq.heapreplace(free, (time + lengths[block % self.home_blocks] + beside, n))
        return lists, max(free)[0]

    def _listed(self, visits: Visits) -> np.ndarray:
        lists, _ = self.dealt(visits)
        found = np.zeros((len(lists), 1 + max(map(len, lists))), np.int32)
        for row, blocks in zip(found, lists, strict=True):
            row[: 1 + len(blocks)] = [len(blocks), *blocks]
        return found


def _lengths(visits: Visits) -> Sequence[float]:
    """Returns how many steps each block visits; of lists that are made at run time, nothing is known."""
    if visits.counts is None and visits.known is not None:
        found: list[float] = visits.known[0, :, 1].tolist()
        return found
    return [float(visits.most)] * visits.home_blocks


def list_length(lists: Ref) -> Array:
    """Returns, in a kernel, how many blocks this block of threads computes."""
    found: Array = lists[lax.axis_index("block"), 0]
    return found


def entry(lists: Ref, n: Number, block: Array | None = None) -> Array:
    """Returns, in a kernel, the n-th block that this block of threads, or the given one, computes."""
    found: Array = lists[lax.axis_index("block") if block is None else block, 1 + n]
    return found
