"""Has the interpreter of GPU kernels do what TMA does where blocks of a cluster load something together.

By itself the interpreter has each block load all of it for itself, so that neither a window that differs between the
blocks would be seen, nor a stage that the other block still reads. Here each loads its half, into the shared memory of
both, and a barrier of either block is arrived at when both halves are there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import Lock
from typing import Any

import pytest

__all__ = ["interpreted_multicast"]

_BLOCKS = 2
_SECONDS = 30.0
"""After which a block that does not start is an error."""


@contextmanager
def interpreted_multicast() -> Iterator[list[int]]:
    """Multicasts while it lasts, in clusters of two; yields a list whose one number counts the transfers."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret

    count, held, lock = [0], {}, Lock()
    plain = gpu_callbacks.copy_gmem_to_smem

    class Half(gpu_callbacks.AsyncCopyGmemToSmemTask):
        """Arrives at the barrier when the other block's half is there too."""

        whole: Any = None

        def post_write(self, tma_thread_id: int, shared_memory: Any) -> None:
            issuer = self.thread.block_id
            with lock:
                clocks = held.setdefault(self.whole, {})
                assert issuer not in clocks, "a block is a step ahead of the other one's half"
                clocks[issuer] = None if self.clock is None else self.clock.copy()
                if len(clocks) < _BLOCKS:
                    return
                both = [clock for clock in held.pop(self.whole).values() if clock is not None]
            for clock in both[1:]:
                both[0].update(clock)
            self.barrier.arrive(self.thread, both[0] if both else None, self.logging_info)

    def halved(access: Any, half: int) -> Any:
        """Half of the rows of a window; what is behind one number is all of it."""
        rows = [n for n, part in enumerate(access.range) if isinstance(part, slice)][-2]
        part = access.range[rows]
        length = (part.stop - part.start) // _BLOCKS
        begin = part.start + half * length
        return replace(
            access, range=(*access.range[:rows], slice(begin, begin + length, part.step), *access.range[rows + 1 :])
        )

    def copy(*, token, mesh_location, thread, source_info=None, **keys):  # type: ignore[no-untyped-def]
        memory = gpu_callbacks._get_shared_memory()
        source, target, barrier = (
            gpu_callbacks.HostAllocationKey.from_array(keys[f"{name}_allocation_key_as_array"])
            for name in ("src", "dst", "barrier")
        )
        read, written = (
            gpu_callbacks.jax.tree.map(int, gpu_callbacks._remove_noop_transforms(keys[f"{name}_transforms"]))
            for name in ("src", "dst")
        )
        clock = memory.incr_clock(thread) if memory.detect_races else None
        to = memory.access(target, written)
        for block in range(_BLOCKS):
            there, arrival = replace(target, block_id=block), replace(barrier, block_id=block)
            end = time.monotonic() + _SECONDS
            while there not in memory.mem or arrival not in memory.mem:  # a cluster's blocks start together
                assert time.monotonic() < end, "the other block is not there"
                time.sleep(1e-3)
            half = Half(
                mesh_location, thread, source, halved(memory.access(source, read), thread.block_id),
                there, halved(to, thread.block_id), arrival, source_info, None if clock is None else clock.copy(),
            )  # fmt: skip
            half.whole = str((there, to.range))
            memory.execute_async_task(half)
        count[0] += 1
        return token

    method = jaxpr_interpret.JaxprInterpreter._interpret_copy_gmem_to_smem_p

    def interpret(self, equation, *rest):  # type: ignore[no-untyped-def]
        gpu_callbacks.copy_gmem_to_smem = copy if equation.params["collective_axes"] else plain
        try:
            return method(self, equation, *rest)
        finally:
            gpu_callbacks.copy_gmem_to_smem = plain

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxpr_interpret.JaxprInterpreter, "_interpret_copy_gmem_to_smem_p", interpret)
        yield count
    assert not held, "half of a transfer is missing"
