"""Times functions on a GPU by two clocks: loops of calls back to back, in turns, and the profiler's trace.

The trace tells how long each kernel took.  Where it tells nothing, the loops still do: many calls are dispatched
before the last is waited for, so that the time of a dispatch hides behind the kernels, unless these are shorter.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from autopallas.autotune.device_time import traced
from autopallas.tuning.measure import Spread

__all__ = ["Times", "timed"]

_ROUNDS, _TRACED_ROUNDS = 5, 4
_LOOP_SECONDS, _MOST_CALLS = 0.03, 200


@dataclass
class Times:
    """Seconds of one call.

    Attributes:
      loop: a call's share of each loop.
      trace: how long the device was busy with each call, by the trace; empty if it does not tell.
      kernels: the time of each kernel, by the name that the trace has; summed over a call.
    """

    loop: list[float] = field(default_factory=list)
    trace: list[float] = field(default_factory=list)
    kernels: dict[str, float] = field(default_factory=dict)

    @property
    def clock(self) -> str:
        return "trace" if self.trace else "loop"

    @property
    def spread(self) -> Spread | None:
        """Spread by the better clock."""
        return Spread.of(self.trace or self.loop)


def timed(
    functions: Mapping[str, Callable[..., Any]], arguments: Sequence[Any], *, profile: bool, seconds: float = 3.0
) -> dict[str, Times]:
    """Times functions that have been compiled, and have run, in turns.

    Args:
      functions: by name.
      arguments: of all of them.
      profile: whether to use the profiler.
      seconds: for the loops of all rounds together, about; each function has a round at least.
    """
    found = {name: Times() for name in functions}
    calls = {name: _calls(f, arguments, seconds / (_ROUNDS * len(functions))) for name, f in functions.items()}
    order, shuffle = list(functions), random.Random(0).shuffle
    begin = time.perf_counter()
    for done in range(_ROUNDS):
        if done and time.perf_counter() - begin > seconds:
            break
        shuffle(order)
        for name in order:
            found[name].loop.append(_loop(functions[name], arguments, calls[name]))
    if profile:
        _trace(functions, arguments, found)
    return found


def _calls(function: Callable[..., Any], arguments: Sequence[Any], seconds: float) -> int:
    once = _loop(function, arguments, 1)
    return max(1, min(_MOST_CALLS, round(min(seconds, _LOOP_SECONDS) / max(once, 1e-6))))


def _loop(function: Callable[..., Any], arguments: Sequence[Any], calls: int) -> float:
    begin = time.perf_counter()
    result = None
    for _ in range(calls):
        result = function(*arguments)
    jax.block_until_ready(result)
    return (time.perf_counter() - begin) / calls


def _trace(functions: Mapping[str, Callable[..., Any]], arguments: Sequence[Any], found: Mapping[str, Times]) -> None:
    order: list[str] = []
    names, shuffle = list(functions), random.Random(1).shuffle
    for _ in range(_TRACED_ROUNDS):
        shuffle(names)
        order += names

    def run(name: str) -> Callable[[], object]:
        return lambda: jax.block_until_ready(functions[name](*arguments))

    told = traced([run(name) for name in order])
    if told is None:
        return
    if told.busy is not None:
        for name, busy in zip(order, told.busy, strict=True):
            found[name].trace.append(busy)
    if told.kernels is not None:
        sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for name, kernels in zip(order, told.kernels, strict=True):
            for kernel, took in kernels.items():
                sums[name][kernel] += took / order.count(name)
        for name, kernels in sums.items():
            found[name].kernels = dict(sorted(kernels.items(), key=lambda item: -item[1]))
