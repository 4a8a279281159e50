"""Estimates what another order of blocks, and blocks of threads that stay, would gain of attention's measured times.

A kernel that was measured at two lengths, with the same blocks, gives the time of a step and that of a block beside its
steps: those with which simulated processors, each of which takes the next block whenever it has finished one, need the
measured times.  The same simulation then says by how much less the blocks of heads in sections would take.  Where a
step takes longer at the greater length, as where the clock is lower, no time of a block is found.  Of persistent blocks
the time beside steps is what their code says (:meth:`.model.Tiles.epilogue`), and half a step until both warpgroups
are at work, if that is less.  All but the measured times is estimated.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from autopallas.compile.gpu import H100, Compiler
from autopallas.kernels.attention.block_sizes import PERSISTENT, SECTIONS, BlockSizes
from autopallas.kernels.attention.gpu_grid import Visits
from autopallas.kernels.attention.gpu_order import Order
from benchmarks import gpu_attention
from benchmarks.gpu_model.model import CLOCK, CONSTANTS, Code, Tiles
from benchmarks.gpu_model.present import compiled

__all__ = ["Estimate", "estimates", "fitted"]

_MEASURED = Path(__file__).parents[1] / "results" / "gpu-h100.jsonl"
_SHAPES = ((1, 16384, 16, 128), (4, 4096, 16, 128))
"""Shapes (B, T, N, D) of a causal mask at which the same kernels were measured."""
_PREFIX, _SUFFIX = "autopallas_attention_gpu", "_mosaic_gpu_kernel"
_KERNELS = {"forward": "", "query": "_backward_query", "key_value": "_backward_key_value"}
_STREAMED = {"forward": 512, "query": 768, "key_value": 768}
"""Bytes that a kernel streams for each position of the other axis, with heads of 128."""


class Estimate(NamedTuple):
    """What is known of one kernel at one shape, in microseconds.

    Attributes:
      kernel, shape: what it is.
      measured: its measured time.
      step, block: the fitted times of a step, and of a block beside its steps.
      staying: the estimated time of a persistent block beside its steps.
      sections, persistent: the estimated times of the other schedules.
    """

    kernel: str
    shape: tuple[int, int, int, int]
    measured: float
    step: float
    block: float
    staying: float
    sections: float
    persistent: float

    def __str__(self) -> str:
        b, t, n, d = self.shape
        gains = ", ".join(
            f"{name} {took:.0f} us ({self.measured / took:.2f} times as fast)"
            for name, took in ((SECTIONS, self.sections), (PERSISTENT, self.persistent))
        )
        return (
            f"attention {self.kernel} B{b} T{t} N{n} D{d} causal: measured {self.measured:.0f} us; fitted "
            f"{self.step:.2f} us for a step, {self.block:.1f} us for a block beside its steps; estimated "
            f"{self.staying:.1f} us for one that stays, {gains}"
        )


def _measured() -> dict[tuple[str, int], float]:
    """Returns the last measured times by kernel and length."""
    found: dict[tuple[str, int], float] = {}
    for line in _MEASURED.read_text().splitlines():
        row = json.loads(line)
        for _, length, _, _ in _SHAPES:
            wanted = f"T{length} N16 D128 causal" in str(row.get("task", ""))
            if wanted and row.get("candidate") == "pallas_gpu (128, 128)" and row.get("kernels"):
                for kernel, suffix in _KERNELS.items():
                    both = "+" in row["direction"]
                    if (took := row["kernels"].get(_PREFIX + suffix + _SUFFIX)) and both == (kernel != "forward"):
                        found[kernel, length] = took
    return found


def _visits(kernel: str, shape: tuple[int, int, int, int]) -> Visits:
    rows, columns = {"forward": (128, 128), "query": (128, 64), "key_value": (64, 128)}[kernel]
    spec = gpu_attention._spec(*shape, "causal")
    return Visits.of(spec, "column" if kernel == "key_value" else "row", rows, columns, ())


def _order(kernel: str, shape: tuple[int, int, int, int], schedule: str) -> Order:
    b, t, n, _ = shape
    return Order.of(_visits(kernel, shape), b * n, schedule, t * _STREAMED[kernel])


def fitted(kernel: str, long: float, short: float) -> tuple[float, float]:
    """Returns the times of a step and of a block beside its steps with which a kernel takes ``long`` microseconds at
    the first of the shapes, and ``short`` at the second, as nearly as a block's time of 0 or more allows."""
    one, other = ((_order(kernel, shape, ""), _visits(kernel, shape)) for shape in _SHAPES)
    best = (float("inf"), 0.0, 0.0)
    for tenths in range(120):
        beside = tenths / 10  # in steps
        step = long / one[0].dealt(one[1], beside)[1]
        best = min(best, (abs(other[0].dealt(other[1], beside)[1] * step - short), step, beside * step))
    return best[1:]


def estimates(compiler: Compiler) -> Iterator[Estimate]:
    """Yields what is estimated of each kernel that was measured at both lengths."""
    measured = _measured()
    timed = gpu_attention._timed(*_SHAPES[1], "causal", 1, True)
    name = f"pallas_gpu {gpu_attention._named(BlockSizes(128, 128, PERSISTENT))}"
    codes = compiled(compiler, replace(timed, block_sizes={name: timed.block_sizes[name]}))
    parts = {kernel.name: Code.of(kernel.listing, kernel.registers, kernel.shared_bytes) for kernel in codes.kernels}
    for kernel, suffix in _KERNELS.items():
        if any((kernel, length) not in measured for _, length, _, _ in _SHAPES):
            continue
        with H100.targeted():
            step, block = fitted(kernel, *(measured[kernel, shape[1]] for shape in _SHAPES))
            tile = Tiles(parts[_PREFIX + suffix], 1, 1)
            staying = min(block, tile.epilogue(CONSTANTS) / CLOCK * 1e6 + step / 2)
            for shape in _SHAPES:
                visits, order = _visits(kernel, shape), _order(kernel, shape, SECTIONS)
                present = _order(kernel, shape, "").dealt(visits, block / step)[1]
                shares = (order.dealt(visits, beside / step)[1] / present for beside in (block, staying))
                own = measured[kernel, shape[1]]
                yield Estimate(kernel, shape, own, step, block, staying, *(own * share for share in shares))
