"""Pipelines Hopper's matrix kernels: a warpgroup loads with TMA, two multiply with wgmma, blocks are persistent.

The tiles of the result are dealt out to the blocks in turn. The loading warpgroup runs ahead, beyond the end of a tile
too, for as long as the ring of stages has room. Each stage has two barriers: TMA's transfers arrive on ``full``, and
all consumers arrive on ``free``.

Two blocks may be a cluster whose tiles have an operand in common. Each then loads half of it, which TMA writes into the
shared memory of both, so that L2 is asked for it once. Such blocks take the same number of steps, and a stage is free
when the consumers of both have given it back.

This module imports Pallas, so it is imported only inside a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, TypeAlias, TypedDict

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from autopallas.kernels.gpu import clusters, mosaic, processors
from autopallas.kernels.refs import Ref
from autopallas.sites.device import Device

__all__ = ["CONSUMERS", "PAIR", "PART", "REGISTERS", "Grid", "Ring", "grid", "placed", "steps_of", "tiles"]

Array: TypeAlias = jax.Array

CONSUMERS = 2
PAIR = "pair"
"""The axis of a cluster of two blocks that share an operand."""
PART = 64
"""Rows of one wgmma."""
PANEL = 8
"""Rows of tiles that are visited before the column moves on: what a wave of blocks reads then fits into L2."""
REGISTERS = (232, 40)
"""Registers per thread of a consumer and of the producer, together no more than the 168 that each thread starts
with."""


class Grid(TypedDict):
    """Persistent blocks, as ``call`` takes them."""

    grid: Mapping[str, int]
    cluster: Mapping[str, int]


def grid(paired: bool) -> Grid:
    """Returns a block for each multiprocessor of the current device, or a cluster for two of them."""
    device = Device.current()
    blocks = clusters(device) if paired else processors(device)
    return Grid(grid={"block": blocks}, cluster={PAIR: 2} if paired else {})


class Ring(NamedTuple):
    """The stages between the producer and the consumers; ``step`` counts all steps of the block."""

    first: Ref
    second: Ref
    full: Ref
    free: Ref
    stages: int

    @staticmethod
    def barriers(stages: int, transfers: int, paired: bool = False, readers: int = CONSUMERS) -> list[Ref]:
        """Makes ``full``, on which so many transfers arrive for a step, and ``free``, on which so many warpgroups do
        that have read it, of both blocks where they are paired."""
        plgpu = mosaic()
        full = plgpu.Barrier(num_arrivals=transfers, num_barriers=stages)
        barrier = partial(plgpu.ClusterBarrier, collective_axes=(PAIR,)) if paired else plgpu.Barrier
        return [full, barrier(num_arrivals=readers, num_barriers=stages)]

    def slot(self, step: Array) -> Array:
        return lax.rem(step, jnp.int32(self.stages))

    def load(self, step: Array, copies: Callable[[Array, Ref], None]) -> None:
        """Waits until the stage is free; then ``copies(slot, barrier)`` starts the transfers into it."""
        slot = self.slot(step)

        @pl.when(step >= self.stages)
        def wait() -> None:
            mosaic().barrier_wait(self.free.at[slot])

        copies(slot, self.full.at[slot])

    def drain(self, steps: Array) -> None:
        """Waits for the last stages, since a block must not end before every arrival has been seen."""
        held = jnp.minimum(steps, self.stages)

        @pl.loop(0, held)
        def wait(i: Array) -> None:
            mosaic().barrier_wait(self.free.at[self.slot(steps - held + i)])

    def consume(
        self,
        step: Array,
        steps: Array | int,
        use: Callable[[Array, Array], None],
        started: int = 1,
        beside: Ring | None = None,
    ) -> None:
        """Calls ``use(i, slot)``, which starts wgmma, on each of the stages from ``step`` on.

        wgmma runs on after it was started. Those of one stage, of which there are ``started``, are left running while
        the kernel waits for the next stage; a stage is given back when the one after it has been started and all before
        that are done.

        Args:
          step, steps: the first step, and how many there are.
          use: what is done with a stage.
          started: how many wgmma it starts.
          beside: a second ring, whose stages of the same steps are waited for and given back with these.
        """
        plgpu = mosaic()

        def give_back(step: Array) -> None:
            plgpu.barrier_arrive(self.free.at[self.slot(step)])
            if beside is not None:
                plgpu.barrier_arrive(beside.free.at[beside.slot(step)])

        @pl.loop(0, steps)
        def body(i: Array) -> None:
            slot = self.slot(step + i)
            plgpu.barrier_wait(self.full.at[slot])
            if beside is not None:
                plgpu.barrier_wait(beside.full.at[beside.slot(step + i)])
            use(i, slot)
            plgpu.wgmma_wait(started)

            @pl.when(i > 0)
            def release() -> None:
                give_back(step + i - 1)

        plgpu.wgmma_wait(0)

        @pl.when(steps > 0)
        def release() -> None:
            give_back(step + steps - 1)


def tiles(count: Array | int, visit: Callable[[Array, Array], Array], done: Array | int = 0) -> Array:
    """Calls ``visit(number, steps done)`` for each tile of this block; returns the number of steps of all of them, and
    of those that were done before."""
    block, blocks = lax.axis_index("block"), lax.axis_size("block")
    own = lax.div(jnp.maximum(count - block + (blocks - 1), 0), jnp.int32(blocks))
    return steps_of(0, own, lambda i, step: visit(block + i * blocks, step), jnp.int32(done))


def steps_of(begin: Array | int, end: Array | int, body: Callable[[Array, Array], Array], step: Array) -> Array:
    """Runs a loop that carries the number of steps."""
    done: Array = lax.fori_loop(begin, end, body, step)
    return done


def placed(number: Array, rows: Array | int, columns: int) -> tuple[Array, Array]:
    """Returns the (row, column) of a tile: tiles are ordered by panels of rows, and column by column within a panel."""
    panel = lax.div(number, jnp.int32(PANEL * columns))
    within = number - panel * (PANEL * columns)
    height = jnp.minimum(rows - panel * PANEL, PANEL)
    return panel * PANEL + lax.rem(within, height), lax.div(within, height)
