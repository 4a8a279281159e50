"""Lists what is done in each stage, the most important first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, TypeAlias

from autopallas.sites.declared import declared_named
from autopallas.sites.device import Device
from benchmarks.gpu_benchmark import Check, GpuBenchmark, Timed
from benchmarks.gpu_declared import DECLARED, offered

__all__ = ["LAST_FIRST", "OPERATIONS", "STAGES", "Kind", "Task", "has_products", "of_kernels", "tasks"]

OPERATIONS = ("attention", "grouped_matmul", "cross_entropy", "recurrence", *DECLARED)
"""Those that have a benchmark of their own, and all others that declare a Pallas GPU kernel."""
STAGES = {
    0: "a small case of each kernel",
    1: "compiling ahead",
    2: "headline times",
    3: "repetitions",
    4: "the grid of shapes",
    5: "the other times",
}
Kind: TypeAlias = Literal["check", "time", "original", "copy"]

HEADLINE = 100
"""Priority of cases that are no headline."""

_OF_MOSAIC = ("pallas_gpu", "jax_mgpu")
"""How the names of candidates begin that XLA does not compile itself."""

LAST_FIRST = ("xla", "streaming")
"""Candidates that XLA compiles, which take longest to compile and to run: timed after all others, beside our best."""


@dataclass(frozen=True)
class Task:
    """What a worker does at one request.

    Attributes:
      stage, operation, kind: say what it is: "check" compares and repeats, "time" times our candidates and peers,
        "original" times our best beside the original, and "copy" the memory.
      check, case: what is compared or timed.
    """

    stage: int
    operation: str
    kind: Kind
    check: Check | None = None
    case: Timed | None = None

    @property
    def name(self) -> str:
        """Identifies the task in journals."""
        of = self.check or self.case
        described = "" if of is None else f" {of.name} {of.dtype} {of.direction}"
        return f"{self.stage} {self.operation} {self.kind}{described}"

    @property
    def candidates(self) -> tuple[str, ...]:
        """Names of the rows that it gives."""
        if self.case is None:
            return ("autopallas",) if self.kind == "check" else ("copy",)
        originals = tuple(n for n in self.case.candidates if n in LAST_FIRST)
        return originals if self.kind == "original" else tuple(n for n in self.case.candidates if n not in LAST_FIRST)

    def limited(self, names: Sequence[str]) -> Task:
        """Returns the task with the candidates that have one of these in their names, and the originals; of our own
        the first, if none has."""
        if self.case is None:
            return self
        ours = [n for n in self.case.block_sizes if any(name in n for name in names)]
        ours = ours or list(self.case.block_sizes)[:1]
        kept = [
            n for n in self.case.candidates
            if n in ours or n in LAST_FIRST or (n not in self.case.block_sizes and any(name in n for name in names))
        ]  # fmt: skip
        return replace(self, case=replace(self.case, candidates={n: self.case.candidates[n] for n in kept}))


def tasks(small: bool, device: Device, operations: Sequence[str] = OPERATIONS) -> list[Task]:
    """Returns all tasks in their order.

    Args:
      small: whether shapes are those of a dry run, whose kernels are interpreted.
      device: where they are to run.
      operations: those that are wanted.
    """
    found = [task for name in operations for task in _of_operation(name, small, device)]
    copy = [Task(2, "memory", "copy")]

    def order(task: Task) -> tuple[int, bool, int]:
        # Originals of headlines come when all other headlines are known; those of other cases come with these.
        late = task.kind == "original" and task.stage == 2
        return task.stage, late, task.case.priority if task.case is not None and task.stage == 2 else 0

    return sorted([*copy, *found], key=order)


@cache
def _of_operation(operation: str, small: bool, device: Device) -> tuple[Task, ...]:
    with device.targeted() if device.platform == "gpu" else nullcontext():
        return tuple(_tasks(operation, offered(operation), small))


def _tasks(operation: str, own: GpuBenchmark, small: bool) -> Iterator[Task]:
    yield from (Task(0, operation, "check", check) for check in own.smoke(small))
    yield from (Task(3, operation, "check", check) for check in own.stressed(small))
    yield from (Task(4, operation, "check", check) for check in own.checks(small))
    for case in own.timed(small):
        stage = 2 if case.priority < HEADLINE else 5
        yield Task(stage, operation, "time", case=case)
        yield Task(stage, operation, "original", case=case)


def has_products(operation: str) -> bool:
    """Returns whether XLA multiplies matrices beside the kernels of an operation."""
    if operation in DECLARED:
        return declared_named(operation).contracts
    return operation == "cross_entropy"


def of_kernels(task: Task) -> list[str]:
    """Returns the programs of a task that are compiled ahead, several at once.

    XLA chooses the algorithms of its own products by timing them while it compiles, which others would disturb: what
    has such products is compiled when its turn has come.  So a check's reference counts here, but no original.
    """
    if task.check is not None:
        return ["function", "reference"]
    if task.case is None or task.kind != "time" or has_products(task.operation):
        return []
    return [name for name in task.candidates if name.startswith(_OF_MOSAIC)]
