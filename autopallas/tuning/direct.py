"""Chooses block sizes for an operation that is called as a function, without recognition, from the usual sources."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Literal, TypeVar, cast

from autopallas.autotune.tuner import Tuner
from autopallas.compat import ClosedJaxpr
from autopallas.options import resolve
from autopallas.sites.device import Device
from autopallas.sites.spec import BlockSizes, SiteSpec
from autopallas.tuning.lookup import of_table

__all__ = ["Call", "block_sizes_for", "recorded"]

B = TypeVar("B", bound=BlockSizes)


@dataclass(frozen=True)
class Call:
    """A direct call, in the form that a table or a cache needs instead of a match."""

    op: str
    spec: SiteSpec
    direction: Literal["forward", "forward+backward"]

    @property
    def passes(self) -> tuple[Call, ...]:
        return (self,)

    @property
    def original(self) -> ClosedJaxpr:
        return cast(ClosedJaxpr, SimpleNamespace(in_avals=()))


class _Recorder(threading.local):
    calls: list[tuple[Call, str]] | None = None


_RECORDER = _Recorder()


@contextmanager
def recorded() -> Iterator[list[tuple[Call, str]]]:
    """``with recorded() as calls`` collects this thread's calls that ask for block sizes: (call, implementation)."""
    before, _RECORDER.calls = _RECORDER.calls, []
    try:
        yield _RECORDER.calls
    finally:
        _RECORDER.calls = before


def block_sizes_for(
    operation: str, spec: SiteSpec, device: Device, implementation: str, given: B | None
) -> tuple[B, B]:
    """Returns the block sizes of a forward call alone, and of a call whose gradients are taken.

    Args:
      operation: the operation's name.
      spec: the spec of the call.
      device: where it will run.
      implementation: the implementation's name.
      given: what the caller passes, which wins; otherwise the cache, the table's row, its nearest row, the default.

    Returns:
      Two block sizes, valid for the shape.
    """
    if given is not None:
        return cast(B, given.fitted(spec)), cast(B, given.fitted(spec))
    options = replace(resolve({}), autotune=False)
    tuner = Tuner(device, options)

    def chosen(direction: Literal["forward", "forward+backward"]) -> B:
        call = Call(operation, spec, direction)
        if _RECORDER.calls is not None:
            _RECORDER.calls.append((call, implementation))
        choice = tuner.choose(call, implementation)
        if choice.block_sizes is None:  # a search found none that work; the kernel itself tells callers who name it
            choice = of_table(call, implementation, device, options.objective)
        return cast(B, choice.block_sizes)

    return chosen("forward"), chosen("forward+backward")
