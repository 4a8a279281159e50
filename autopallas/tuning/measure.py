"""Times candidates; benchmarks, tables and searches all use this function, so that their figures compare.

A shared machine changes its speed from second to second.  What can be trusted there is not a time but the ratio of
two times taken next to each other.  So every candidate runs once per round, in an order drawn anew for each round,
and ratios are formed within rounds.
"""

from __future__ import annotations

import functools
import gc
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, TypedDict, cast

import jax
import numpy as np

from autopallas.autotune.device_time import profiled
from autopallas.compat import ArrayFunction, PyTree

__all__ = ["Clocks", "Difference", "Failure", "Measurement", "Spread", "Stage", "Timing", "measure"]

Stage: TypeAlias = Literal["lower", "compile", "memory", "run", "compare"]
Candidate: TypeAlias = ArrayFunction | jax.stages.Compiled
Clock: TypeAlias = Literal["wall", "cpu", "device"]

_PROFILED_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Clocks:
    """Sources of the time, in seconds: ``cpu`` counts the processor time of all threads of this process."""

    wall: Callable[[], float] = time.perf_counter
    cpu: Callable[[], float] = time.process_time


@dataclass(frozen=True, slots=True)
class Spread:
    """A sample's median with its quartiles: half of the sample lies between ``lower`` and ``upper``."""

    median: float
    lower: float
    upper: float
    minimum: float
    count: int

    @staticmethod
    def of(sample: Iterable[float]) -> Spread | None:
        """Returns the spread of a sample, or None if it is empty."""
        values = list(sample)
        if not values:
            return None
        lower, median, upper = (float(x) for x in np.percentile(values, (25, 50, 75)))
        return Spread(median, lower, upper, min(values), len(values))


@dataclass(frozen=True, slots=True)
class Failure:
    """The stage at which a candidate failed, and the error."""

    stage: Stage
    error: str

    def __str__(self) -> str:
        return f"{self.stage}: {self.error}"


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference of one output from its reference: ``max |x - reference| / max |reference|``, and its mean counterpart.

    Both are infinite if one side is NaN or infinite where the other one is not the same.
    """

    maximum: float
    mean: float


@dataclass(frozen=True, slots=True)
class Timing:
    """Measurements of one candidate; after a failure, those taken before it.

    Attributes:
      wall: wall time of each round, in seconds.
      cpu: process CPU time of each round, in seconds.
      device: how long the device was busy in each round, in seconds, if the profiler tells: on GPUs and TPUs.
      lower_seconds: tracing and lowering.
      compile_seconds: compiling, after lowering.
      first_step_seconds: time from the callable to its first result: lowering, compiling, first run.
      temporary_bytes: scratch memory that the compiler asked for.  XLA on a CPU may use more inside fused loops; peak
        resident memory shows that.
      argument_bytes, output_bytes: memory of arguments and results.
      differences: one per output leaf, if a reference was given.
      failure: None, or why the candidate was given up.
    """

    wall: tuple[float, ...] = ()
    cpu: tuple[float, ...] = ()
    device: tuple[float, ...] = ()
    lower_seconds: float | None = None
    compile_seconds: float | None = None
    first_step_seconds: float | None = None
    temporary_bytes: int | None = None
    argument_bytes: int | None = None
    output_bytes: int | None = None
    differences: tuple[Difference, ...] | None = None
    failure: Failure | None = None

    def samples(self, clock: Clock = "wall") -> tuple[float, ...]:
        """Returns the times of all rounds by one of the clocks."""
        return {"wall": self.wall, "cpu": self.cpu, "device": self.device}[clock]

    def spread(self, clock: Clock = "wall") -> Spread | None:
        """Returns median and quartiles of the time of one run, or None if no round was completed."""
        return Spread.of(self.samples(clock))

    @property
    def difference(self) -> Difference | None:
        """The largest differences over all outputs, or None if nothing was compared."""
        if not self.differences:
            return None
        return Difference(max(d.maximum for d in self.differences), max(d.mean for d in self.differences))


@dataclass(frozen=True, slots=True)
class Measurement:
    """Measurements of all candidates, by name, in the order in which they were given."""

    timings: Mapping[str, Timing]
    baseline: str | None = None

    def __getitem__(self, name: str) -> Timing:
        return self.timings[name]

    def ratio(self, name: str, *, baseline: str | None = None, clock: Clock = "wall") -> Spread | None:
        """Returns how many times as fast as the baseline a candidate is: 2.0 is twice as fast.

        The baseline's time is divided by the candidate's within each round; the result is the median of these ratios
        with its quartiles, or None if the two share no round.
        """
        against = baseline if baseline is not None else self.baseline
        if against is None:
            raise ValueError("a ratio needs a baseline: name one here or when measuring")
        # A failed candidate leaves, so its samples are those of the first rounds, and the shorter list decides.
        pairs = zip(self.timings[against].samples(clock), self.timings[name].samples(clock), strict=False)
        return Spread.of(base / own for base, own in pairs if own > 0)

    @property
    def failures(self) -> dict[str, Failure]:
        """The candidates that failed, each with its failure."""
        return {name: timing.failure for name, timing in self.timings.items() if timing.failure is not None}


def measure(
    candidates: Mapping[str, Candidate],
    arguments: Sequence[PyTree] = (),
    *,
    baseline: str | None = None,
    repetitions: int = 15,
    seconds: float = 10.0,
    minimum_repetitions: int = 3,
    warm_up: int | None = 2,
    reference: PyTree = None,
    memory_limit: int | None = None,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
    clocks: Clocks | None = None,
    profile: bool | None = None,
) -> Measurement:
    """Times several ways of computing the same thing against each other.

    All candidates are first lowered and compiled; each runs once and is warmed up.  Then come rounds in which every
    candidate runs once, in a random order.  Each run waits for its result.  A candidate that fails, at whatever stage,
    leaves the race; its failure is part of the result and the others go on.

    CPU time counts every thread of the process: measure while nothing else runs in it.

    Args:
      candidates: name -> function of ``arguments``.  A ``jax.jit`` function, or anything else with ``lower``, is
        lowered and compiled; an already compiled one runs as it is; any other callable is put under ``jax.jit``.
        Candidates must not donate arguments, since these are used again.
      arguments: positional arguments of every candidate, arrays or pytrees of arrays.
      baseline: the candidate that ratios refer to.
      repetitions: the largest number of rounds.
      seconds: the wall time of all rounds together, after which no further round begins.
      minimum_repetitions: the smallest number of rounds, whatever their time.
      warm_up: runs of each candidate between its first run and the first round.  Its memory is fresh at first, and
        touching it for the first time can double the time of a run.  None: not even a first run.
      reference: the expected result, a pytree like the candidates' results: gives :attr:`Timing.differences`.
      memory_limit: bytes; a candidate whose arguments, outputs and temporary memory need more is not run.
      seed: the seed of the order of the runs.
      progress: called with a line of text before each stage.
      clocks: other clocks than this process's own.
      profile: whether to repeat the last rounds under the profiler, which gives :attr:`Timing.device`; None: on GPUs
        and TPUs.

    Returns:
      The measurement: a :class:`Timing` per candidate, and ratios to the baseline.

    Raises:
      ValueError: the baseline is not among the candidates, or no round is allowed.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jnp.ones((64, 64))
      >>> m = measure({"dot": lambda x: x @ x, "loop": lambda x: jnp.stack([r @ x for r in x])}, (x,), baseline="dot")
      >>> m.ratio("dot").median
      1.0
      >>> m["loop"].spread().count
      15
    """
    if baseline is not None and baseline not in candidates:
        raise ValueError(f"the baseline {baseline!r} is not among the candidates: {', '.join(candidates)}")
    if repetitions < 1:
        raise ValueError("at least one repetition is needed")
    clocks = clocks or Clocks()
    say = progress or (lambda line: None)
    records = {name: _Record() for name in candidates}
    for name, candidate in candidates.items():
        say(f"compiling {name}")
        records[name].prepare(candidate, arguments, memory_limit, clocks)
    for name, record in records.items() if warm_up is not None else ():
        say(f"warming up {name}")
        record.first_run(arguments, reference, clocks)
        for _ in range(warm_up or 0):
            record.run(arguments)

    order = list(records.values())
    shuffle = random.Random(seed).shuffle
    if len(order) > 1:
        gc.collect()  # otherwise the first candidate would pay for what was allocated while compiling
    begin = clocks.wall()
    done = 0
    for done in range(repetitions):
        if done >= minimum_repetitions and clocks.wall() - begin >= seconds:
            break
        if all(record.failure is not None for record in order):
            break
        say(f"round {done + 1} of {repetitions}")
        shuffle(order)
        for record in order:
            record.timed_run(arguments, clocks, reference)
    if jax.default_backend() in ("gpu", "tpu") if profile is None else profile:
        say("profiling")
        _profile(order, arguments, min(done + 1, _PROFILED_ROUNDS), shuffle)
    return Measurement({name: record.timing() for name, record in records.items()}, baseline)


def _profile(
    records: Sequence[_Record], arguments: Sequence[PyTree], rounds: int, shuffle: Callable[[list[_Record]], None]
) -> None:
    """Runs some more rounds, for the time that the device takes."""
    left = [record for record in records if record.failure is None]
    order: list[_Record] = []
    for _ in range(rounds):
        shuffle(left)
        order += left
    found = profiled([functools.partial(record.run, arguments) for record in order]) if order else None
    for record, seconds in zip(order, found or (), strict=False):
        if record.failure is None:
            record.device.append(seconds)


class _Found(TypedDict, total=False):
    """The fields of a :class:`Timing` that are known so far, besides the samples."""

    lower_seconds: float
    compile_seconds: float
    first_step_seconds: float
    temporary_bytes: int
    argument_bytes: int
    output_bytes: int
    differences: tuple[Difference, ...]


@dataclass
class _Record:
    """One candidate while it is being measured."""

    call: ArrayFunction | None = None
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    device: list[float] = field(default_factory=list)
    found: _Found = field(default_factory=_Found)
    failure: Failure | None = None

    def prepare(
        self, candidate: Candidate, arguments: Sequence[PyTree], memory_limit: int | None, clocks: Clocks
    ) -> None:
        stage: Stage = "lower"
        try:
            compiled = cast(jax.stages.Compiled, candidate)
            begin = clocks.wall()
            if not hasattr(candidate, "memory_analysis"):
                lowered = (candidate if hasattr(candidate, "lower") else jax.jit(candidate)).lower(*arguments)
                lowered_at = clocks.wall()
                self.found["lower_seconds"] = lowered_at - begin
                stage = "compile"
                compiled = lowered.compile()
                self.found["compile_seconds"] = clocks.wall() - lowered_at
            self.found["first_step_seconds"] = clocks.wall() - begin
            stage = "memory"
            self._weigh(compiled.memory_analysis(), memory_limit)
            self.call = compiled
        except Exception as error:
            self._fail(stage, error)

    def _weigh(self, analysis: object, memory_limit: int | None) -> None:
        if analysis is None:  # some backends cannot tell
            return
        needed = 0
        for name, attribute in (("temporary", "temp"), ("argument", "argument"), ("output", "output")):
            size = int(getattr(analysis, f"{attribute}_size_in_bytes"))
            self.found.update(cast(_Found, {f"{name}_bytes": size}))
            needed += size
        if memory_limit is not None and needed > memory_limit:
            raise MemoryError(f"needs {needed} bytes, more than the limit of {memory_limit}")

    def first_run(self, arguments: Sequence[PyTree], reference: PyTree, clocks: Clocks) -> None:
        begin = clocks.wall()
        result = self.run(arguments)
        if self.failure is not None:
            return
        self.found["first_step_seconds"] += clocks.wall() - begin
        self._compare(result, reference)

    def _compare(self, result: PyTree, reference: PyTree) -> None:
        if self.failure is None and reference is not None and "differences" not in self.found:
            try:
                self.found["differences"] = _differences(result, reference)
            except Exception as error:
                self._fail("compare", error)

    def run(self, arguments: Sequence[PyTree]) -> PyTree:
        if self.failure is not None:
            return None
        assert self.call is not None
        try:
            return jax.block_until_ready(self.call(*arguments))
        except Exception as error:
            self._fail("run", error)

    def timed_run(self, arguments: Sequence[PyTree], clocks: Clocks, reference: PyTree) -> None:
        wall, cpu = clocks.wall(), clocks.cpu()
        result = self.run(arguments)
        cpu, wall = clocks.cpu() - cpu, clocks.wall() - wall
        self._compare(result, reference)
        del result  # freed outside the timed span, and before the next candidate needs the memory
        if self.failure is None:
            self.wall.append(wall)
            self.cpu.append(cpu)

    def _fail(self, stage: Stage, error: Exception) -> None:
        self.failure = Failure(stage, f"{type(error).__name__}: {error}")
        self.call = None

    def timing(self) -> Timing:
        return Timing(
            wall=tuple(self.wall),
            cpu=tuple(self.cpu),
            device=tuple(self.device),
            failure=self.failure,
            **self.found,
        )


def _differences(result: PyTree, reference: PyTree) -> tuple[Difference, ...]:
    results, references = jax.tree.leaves(result), jax.tree.leaves(reference)
    if len(results) != len(references):
        raise ValueError(f"{len(results)} outputs, and {len(references)} in the reference")
    return tuple(_difference(np.asarray(x), np.asarray(r)) for x, r in zip(results, references, strict=True))


def _difference(result: np.ndarray, reference: np.ndarray) -> Difference:
    if result.shape != reference.shape:
        raise ValueError(f"an output of shape {result.shape}, and {reference.shape} in the reference")
    wide = np.complex128 if np.iscomplexobj(reference) else np.float64
    x, r = result.astype(wide), reference.astype(wide)
    if x.size == 0:
        return Difference(0.0, 0.0)
    finite = np.isfinite(r)
    same = (x == r) | (np.isnan(x) & np.isnan(r))
    if not np.all(np.where(finite, np.isfinite(x), same)):
        return Difference(np.inf, np.inf)
    distance = np.abs(x[finite] - r[finite])
    size = np.abs(r[finite])
    if not distance.any():
        return Difference(0.0, 0.0)
    if not size.any():
        return Difference(np.inf, np.inf)
    return Difference(float(distance.max() / size.max()), float(distance.mean() / size.max()))
