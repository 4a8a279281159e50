"""Estimates how long a Hopper kernel takes, from what its compiled loops consist of.

A multiprocessor multiplies 2,048 pairs of 16 bits per cycle. Beside this, its four schedulers issue what the warps have
to compute; two warpgroups give each of them two warps. What of the one hides behind the other depends on how the
warpgroups are synchronised, which is a factor for each of four ways, and the code shows which way it is:

* "turns": warpgroups wait for each other within the loop; one multiplies while the other computes.
* "overlapped": a wait leaves one group of wgmma running, so that a warpgroup computes beside its own products.
* "together": neither; all multiply, then all compute.
* "alone": one warpgroup, and nothing hides.

The constants were fitted once, to measured times of other kernels and to a review's estimates (:mod:`.anchors`), and
stay as they are: a change of a kernel changes its code and not the model. All results are estimates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from benchmarks.gpu_model.listing import Listing, Loop

__all__ = [
    "BANDWIDTH",
    "CONSTANTS",
    "Blocks",
    "Case",
    "Code",
    "Constants",
    "Part",
    "Streams",
    "Tiles",
    "Work",
    "occupancy",
]

PROCESSORS = 132
PRODUCTS_PER_CYCLE = 2048
DENSE = 800e12
"""Operations per second of large products by the vendor's library, as measured elsewhere."""
CLOCK = DENSE / (PROCESSORS * PRODUCTS_PER_CYCLE * 2)
"""Cycles per second at which the tensor cores would do this without a pause."""
_TURNS = 4
"""Waits of a loop whose warpgroups take turns; the others wait for what is loaded, once or twice."""
LAUNCH = 3e-6
"""Seconds between two kernels."""
BANDWIDTH = 3.35e12
"""Bytes per second of an H100's memory by its data sheet."""
LIBRARY = 700e12
"""Operations per second of the vendor's products as they follow each other in a train step."""


class Constants(NamedTuple):
    """What was fitted.

    Attributes:
      turns, overlapped, alone: the time of a pass of a loop, by the time of its longest chain.
      together: how much of what is computed does not hide, beside the products.
      block, backward_block: cycles of a block before and behind its loops.
      two_stages: cycles that a pass waits where two stages hold keys and values that are given back at once.
      bytes_per_cycle: that each multiprocessor can load.
      latency: by which the stalls of a tile's epilogue are multiplied.
      fence: cycles of each wait for what was written to be seen by TMA, and the store behind it.
      copied: bytes per second of a transposed copy.
    """

    turns: float = 1.07
    overlapped: float = 1.1
    alone: float = 1.85
    together: float = 0.81
    block: float = 6050.0
    backward_block: float = 9900.0
    two_stages: float = 290.0
    bytes_per_cycle: float = 66.1
    latency: float = 1.87
    fence: float = 945.0
    copied: float = 2.9e12


CONSTANTS = Constants()
"""Frozen: what is estimated for different versions of a kernel is comparable only with the same constants."""


class Part(NamedTuple):
    """One pass of a loop, by one warpgroup.

    Attributes:
      products: cycles of the tensor cores.
      instructions: all but wgmma.
      special, half, full: those of these classes.
      stalls: cycles of a warp that has its scheduler alone.
      waits: for barriers of either kind, BAR and SYNCS.
      fences: MEMBAR.
      overlaps: as a loop has it.
    """

    products: float
    instructions: int
    special: int
    half: int
    full: int
    stalls: int
    waits: int
    fences: int
    overlaps: int

    @staticmethod
    def of(loop: Loop) -> Part:
        cycles = 0.0
        for shape, count in loop.products.items():
            m, n, k = map(int, shape.split("x"))
            cycles += count * m * n * k / PRODUCTS_PER_CYCLE
        kinds = loop.classes
        return Part(
            cycles,
            loop.instructions - kinds.get("product", 0),
            *(kinds.get(kind, 0) for kind in ("special", "half", "full")),
            loop.cycles,
            loop.waits,
            loop.operations.get("MEMBAR", 0),
            loop.overlaps,
        )

    @property
    def issued(self) -> int:
        """Cycles for which one warp keeps the busiest unit of its scheduler."""
        return max(8 * self.special, 2 * self.half, self.full, self.instructions)

    @property
    def way(self) -> str:
        """How two warpgroups that run it hide computation."""
        return "turns" if self.waits >= _TURNS else "overlapped" if self.overlaps else "together"


@dataclass(frozen=True)
class Code:
    """Parts of a kernel.

    Attributes:
      loops: those with products, in the order of the code.
      tile: what a persistent kernel does for a tile beside its products, or None.
      registers, shared_bytes: as ptxas reports them.
      multicasts: transfers of a step that two blocks make together.
    """

    loops: tuple[Part, ...]
    tile: Part | None
    registers: int = 168
    shared_bytes: int = 0
    multicasts: int = 0

    @staticmethod
    def of(listing: str, registers: int, shared_bytes: int) -> Code:
        """Reads the code of a kernel."""
        loops = Listing.of(listing).loops
        around = [Part.of(loop) for loop in loops if loop.inside]
        own = tuple(Part.of(loop) for loop in loops if loop.products)
        multicasts = max((loop.multicasts for loop in loops), default=0)
        return Code(own, around[0] if around else None, registers, shared_bytes, multicasts)


def occupancy(registers: int, threads: int, shared_bytes: int) -> int:
    """Returns how many blocks a multiprocessor holds at once.

    Example:
      >>> occupancy(168, 384, 201_792), occupancy(90, 128, 40_000)
      (1, 5)
    """
    by_registers = 65536 // (-(-registers // 8) * 8 * threads)
    return max(1, min(by_registers, 2048 // threads, 233_472 // (shared_bytes + 1024)))


class Work(Protocol):
    """One kernel's work, by so many warpgroups that compute."""

    @property
    def code(self) -> Code: ...

    @property
    def warpgroups(self) -> int: ...

    def seconds(self, constants: Constants) -> float:
        """Estimates its time."""


@dataclass(frozen=True)
class Blocks:
    """Blocks that are not persistent, as attention has them.

    Attributes:
      code: of the kernel.
      count: blocks in all.
      passes: of each loop of the code, per block, on the average.
      warpgroups: that compute.
      even: whether all blocks take the same time, so that a last wave is not full.
      backward: whether it is a backward pass.
      two_stages: whether keys and values share a ring of two stages.
    """

    code: Code
    count: float
    passes: tuple[float, ...]
    warpgroups: int = 2
    even: bool = False
    backward: bool = False
    two_stages: bool = False

    def seconds(self, constants: Constants) -> float:
        begin = constants.backward_block if self.backward else constants.block
        each = begin + sum(
            n * self._cycles(part, constants) for n, part in zip(self.passes, self._parts(), strict=True)
        )
        waves = math.ceil(self.count / PROCESSORS) if self.even else self.count / PROCESSORS + 0.5
        return waves * each / CLOCK + LAUNCH

    def _parts(self) -> Sequence[Part]:
        return [self.code.loops[min(n, len(self.code.loops) - 1)] for n in range(len(self.passes))]

    def _cycles(self, part: Part, constants: Constants) -> float:
        all_products, both = self.warpgroups * part.products, max(self.warpgroups * part.issued, part.stalls)
        if self.warpgroups == 1:
            return constants.alone * (part.products + both)
        if part.way == "turns":
            own = part.products + max(part.issued, part.stalls)
            return constants.turns * max(all_products, self.warpgroups * part.issued, own)
        if part.way == "overlapped":
            return constants.overlapped * max(all_products, part.products + both)
        return all_products + constants.together * both + constants.two_stages * self.two_stages


@dataclass(frozen=True)
class Streams:
    """Blocks that read much of the main memory and compute little of it, as those of few queries.

    Attributes:
      code: of the kernel.
      count: blocks in all.
      steps: passes of the loop for each, which its warpgroups divide.
      moved: bytes that all of them read and write.
      warpgroups: that compute; none waits for another.
    """

    code: Code
    count: int
    steps: float
    moved: float
    warpgroups: int = 2

    def seconds(self, constants: Constants) -> float:
        return self.begin(constants) + max(self.computed(constants), self.moved / constants.copied) + LAUNCH

    def begin(self, constants: Constants) -> float:
        """Seconds of a block before and behind its loop."""
        return constants.block / CLOCK

    def computed(self, constants: Constants) -> float:
        """Seconds of all loops if memory took no time."""
        part = self.code.loops[0]
        own = constants.alone * (part.products + max(part.issued, part.stalls))
        both = max(own, self.warpgroups * part.products, self.warpgroups * part.issued)
        return math.ceil(self.count / PROCESSORS) * math.ceil(self.steps / self.warpgroups) * both / CLOCK


@dataclass(frozen=True)
class Tiles:
    """Tiles of a persistent kernel: products, and an epilogue during which the next tile's operands are loaded.

    Attributes:
      code: of the kernel.
      count: tiles in all.
      steps: passes of the loop for each.
      step_bytes: loaded in a step from L2 by each multiprocessor.
      warpgroups: that compute.
      half_bytes: the same where two blocks compute a tile, half of the rows each.
    """

    code: Code
    count: float
    steps: float
    step_bytes: float = 49152.0
    warpgroups: int = 2
    half_bytes: float = 40960.0

    def seconds(self, constants: Constants) -> float:
        step, *others = self.code.loops
        rounds, rest = divmod(self.count, PROCESSORS)
        begin = self.epilogue(constants)
        cycles = rounds * (self.steps * self._step(step, self.step_bytes, constants) + begin)
        if rest and others and 2 * others[0].products == step.products and 2 * rest <= PROCESSORS:
            # Two blocks compute a tile of the last round.
            cycles += self.steps * self._step(others[0], self.half_bytes, constants) + begin
        elif rest:
            cycles += self.steps * self._step(step, self.step_bytes, constants) + begin
        return cycles / CLOCK + LAUNCH

    def _step(self, step: Part, loaded: float, constants: Constants) -> float:
        # Products and loads wait for each other where both take nearly as long.
        products, loads = self.warpgroups * step.products, loaded / constants.bytes_per_cycle
        cycles: float = (products**3 + loads**3) ** (1 / 3)
        return cycles

    def epilogue(self, constants: Constants) -> float:
        """Cycles between two tiles' products."""
        assert self.code.tile is not None
        tile = self.code.tile
        computed = max(self.warpgroups * tile.issued, constants.latency * tile.stalls)
        return computed + constants.fence * max(tile.fences, 1)


@dataclass(frozen=True)
class Case:
    """What is estimated: kernels, one after the other, and what XLA has beside them.

    Attributes:
      name: what it is.
      operations: floating-point operations that are credited.
      works: the kernels.
      copied: bytes that transposes and other copies read and write.
      products: operations of the vendor's library.
      beside: further seconds.
    """

    name: str
    operations: float
    works: tuple[Work, ...]
    copied: float = 0.0
    products: float = 0.0
    beside: float = 0.0

    def seconds(self, constants: Constants = CONSTANTS) -> float:
        own = sum(work.seconds(constants) for work in self.works)
        return own + self.copied / constants.copied + self.products / LIBRARY + self.beside

    def teraflops(self, constants: Constants = CONSTANTS) -> float:
        """Estimates the rate."""
        return self.operations / self.seconds(constants) / 1e12
