"""Has the interpreter of GPU kernels find a block that ends before all arrivals at its barriers have been seen.

By itself it takes such a block: an arrival that comes later finds a barrier that it still has. On a GPU the shared
memory may then be another block's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

__all__ = ["drained_barriers"]


@contextmanager
def drained_barriers() -> Iterator[list[int]]:
    """While it lasts, a barrier is an error that nothing waits at, or at whose end a warpgroup that waits at it has not
    seen all of its phases; yields a list whose one number counts the barriers."""
    from jax._src.pallas.mosaic_gpu.interpret import shared_memory

    count = [0]

    def check(barrier: Any) -> None:
        count[0] += 1
        for thread, seen in (barrier.last_observed_phase_by_thread or {"nothing": 0}).items():
            if seen != barrier.phase:
                raise ValueError(f"a block ended when {thread} had seen {seen} of {barrier.phase} phases of a barrier")

    with pytest.MonkeyPatch.context() as patch:
        if hasattr(shared_memory, "BarrierReallocationChecker"):
            last = shared_memory.BarrierReallocationChecker.on_final_deallocate

            def checked_last(self: Any, barrier: Any) -> None:
                last(self, barrier)
                check(barrier)

            patch.setattr(shared_memory.BarrierReallocationChecker, "on_final_deallocate", checked_last)
        else:  # JAX 0.11
            plain = shared_memory.Barrier.deallocate

            def checked(barrier: Any) -> None:
                plain(barrier)
                if barrier.has_zero_ref_count():
                    check(barrier)

            patch.setattr(shared_memory.Barrier, "deallocate", checked)
        yield count
