"""Searches block sizes for one site: compiles, compares with the reference, and times, within a budget of seconds."""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax

from autopallas import compat
from autopallas.autotune.free_memory import free_bytes
from autopallas.autotune.trial import Trial
from autopallas.compat import ArrayFunction, PyTree
from autopallas.compile.subprocess import lacks_memory
from autopallas.numerics.oracle import Oracle
from autopallas.progress import Progress
from autopallas.sites.device import Device
from autopallas.sites.operation import operation_named
from autopallas.sites.spec import BlockSizes, Sizes
from autopallas.sites.workload import SiteWorkload
from autopallas.tuning.coverage import stated
from autopallas.tuning.entry import Entry, Rejected
from autopallas.tuning.key import TuningKey
from autopallas.tuning.measure import Clock, Clocks, Failure, Measurement, Stage, Timing, measure
from autopallas.tuning.row import running_jax
from autopallas.tuning.table import MEMORY_SLOWDOWN, Row

__all__ = ["ORIGINAL", "Tried", "Yardstick", "candidates_of", "search"]

ORIGINAL = "original"

_SCREENING_SHARE = 0.6
"""Share of the budget that compiling and comparing may take; the rest is for timing."""
_FINALISTS = 4
_CLOSE = 1.5
"""Factor by which a candidate's first timed run may exceed the best one's before it is not timed again."""
_ROUNDS = 3
_QUICK_CANDIDATES = 2
_QUICK_SCREENING_SHARE = 0.3
"""Share of a quick search's budget after which one candidate that works is enough."""
_QUICK_ROUNDS = 1
"""Rounds of a quick search, if one run of the original takes longer than ``_LONG_SECONDS``."""
_LONG_SECONDS = 0.1
_RUNS_BEFORE = 2
_SINGLE_RUN_SHARE = 0.8
"""Share of a gain that counts if one run of each was timed, after one other: fresh memory slows the original more."""


@dataclass(frozen=True, slots=True)
class Tried:
    """One candidate, and how far it came.

    Attributes:
      block_sizes: by name.
      stage: where it failed; "budget": its turn did not come; an empty string: nowhere.
      error: how it failed.
      microseconds: the time of one run; None if it was not run.
      temporary_bytes: as the compiler planned them; None if it was not compiled.
      difference: the greatest difference from the reference.
      row: what it and the original cost, if it was in the race.
      cycles, vmem_bytes: simulated, and by the compiler's account, if it was compiled for a TPU that is not present.
    """

    block_sizes: Sizes
    stage: str = ""
    error: str = ""
    microseconds: float | None = None
    temporary_bytes: int | None = None
    difference: float | None = None
    row: Row[object] | None = None
    cycles: int | None = None
    vmem_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class _Works:
    """A candidate whose results are right."""

    compiled: jax.stages.Compiled
    timing: Timing

    @property
    def seconds(self) -> float:
        return self.timing.wall[-1]

    @property
    def temporary_bytes(self) -> int:
        return self.timing.temporary_bytes or 0


@dataclass
class Yardstick:
    """What the candidates of a site are compared and timed with; the first search for it makes it.

    Attributes:
      trial: the site with inputs; None before that search, and where there is a problem.
      reference: what its results are compared with.
      compiled, original: the site's original, and what its first run took.
      problem: why there is none.
    """

    trial: Trial | None = None
    reference: PyTree = None
    compiled: jax.stages.Compiled | None = None
    original: Timing = field(default_factory=Timing)
    problem: str = ""


@dataclass
class _Search:
    """One search while it runs."""

    match: SiteWorkload
    implementation: str
    seconds: float
    clock: Callable[[], float]
    say: Callable[[str], None]
    quick: bool = False
    rejected: list[Rejected] = field(default_factory=list)
    yardstick: Yardstick = field(default_factory=Yardstick)
    tried: dict[BlockSizes, Tried] = field(default_factory=dict)
    lean: Row[BlockSizes] | None = None

    def __post_init__(self) -> None:
        self.rounds, self.runs_before = _ROUNDS, _RUNS_BEFORE
        self.begin = self.clock()
        self.limit = free_bytes()

    def left(self, share: float = 1.0) -> float:
        """Returns the seconds that are left of a share of the budget."""
        return self.begin + share * self.seconds - self.clock()

    def run(self, candidates: Sequence[BlockSizes]) -> tuple[BlockSizes | None, Row[BlockSizes] | None, str]:
        """Returns (the best block sizes or None, what they cost, why there are none)."""
        needed = Trial.bytes_needed(self.match)
        if self.limit is not None and needed > self.limit:
            return None, None, f"its inputs and results need {needed} bytes, and {self.limit} are free"
        made = self.yardstick
        if made.trial is None and not made.problem:
            self._make(made)
        if made.problem:
            return None, None, made.problem
        trial, reference, compiled, original = made.trial, made.reference, made.compiled, made.original
        assert trial is not None
        assert compiled is not None
        single = self._fills_budget(original)
        if self.quick and original.wall[-1] > _LONG_SECONDS:
            self.rounds, self.runs_before = _QUICK_ROUNDS, 0
        works: dict[BlockSizes, _Works] = {}
        tried = 0
        for number, sizes in enumerate(candidates, 1):
            late = self.left(_QUICK_SCREENING_SHARE if self.quick and works else _SCREENING_SHARE) <= 0
            if late and (tried or not single):
                break
            tried += 1
            self.say(f"candidate {number} of {len(candidates)}")
            found = self._screened(sizes, trial, reference, original, single)
            if found is not None:
                works[sizes] = found
        if not works:
            if tried < len(candidates):
                return None, None, self._used_up()
            # A candidate can break the device for all that come after it.
            broken = None if single else self._once(compiled, trial, None).failure
            return None, None, "" if broken is None else f"the original fails too by now: {broken}"
        self.say("timing")
        return self._raced(works, compiled, original, trial)

    def _make(self, made: Yardstick) -> None:
        """Runs what candidates are compared with, and the original."""
        trial = Trial.of(self.match)
        if self.quick and trial.adds_up_roundings:
            made.problem = "its loop rounds each step to 16 bits: what is right takes longer than a quick search has"
        elif not self.quick:
            self.say("the reference")
            made.reference, made.problem = self._reference(trial)
        if made.problem:
            return
        self.say("the original")
        made.compiled, failure = self._compiled(trial.original(), trial)
        if self.quick and made.compiled is not None:
            try:
                made.reference, made.original = self._first_run(made.compiled, trial)
            except Exception as error:
                made.compiled, failure = None, Failure("run", f"{type(error).__name__}: {error}")
        if made.compiled is not None and not self._fills_budget(made.original):
            compared = None if self.quick else made.reference
            made.original = self._once(made.compiled, trial, compared, warm=self.quick)
            failure = made.original.failure
        if made.compiled is None or failure is not None:
            made.problem = f"the original cannot be run on its own: {failure}"
        else:
            made.trial = trial

    def _fills_budget(self, original: Timing) -> bool:
        """Returns whether one run of the original takes so much of a quick search's budget that none may be added.

        Then a single run of one candidate decides, however late it is: what such an original loses is a step of this
        length each time, and where the candidate gains, it saves in this first step what the search took.
        """
        return self.quick and bool(original.wall) and original.wall[-1] > _SCREENING_SHARE * self.seconds

    def told(self, candidates: Sequence[BlockSizes]) -> list[Tried]:
        """Returns how far each candidate came."""
        late = Tried({}, "budget", self._used_up())
        return [self.tried.get(c) or replace(late, block_sizes=c.to_dict()) for c in candidates]

    def _used_up(self) -> str:
        return f"the budget of {self.seconds:g} seconds was used up"

    # ------------------------------------------------------------------ one candidate

    def _reference(self, trial: Trial) -> tuple[PyTree, str]:
        if trial.adds_up_roundings:
            return self._exact(trial)
        with jax.default_matmul_precision("highest"):
            name = "oracle" if operation_named(self.match.op).has("oracle") else "reference"
            compiled, failure = self._compiled(trial.kernel(name, None), trial, timed=False)
        if compiled is not None:
            analysis = compiled.memory_analysis()
            needed = 0 if analysis is None else analysis.temp_size_in_bytes + analysis.output_size_in_bytes
            if self.limit is not None and needed > self.limit:
                return None, f"the reference needs {needed} bytes, and {self.limit} are free"
            try:
                return jax.device_get(compiled(*trial.arguments)), ""
            except Exception as error:
                failure = Failure("run", f"{type(error).__name__}: {error}")
        return None, f"the reference cannot be run: {failure}"

    def _exact(self, trial: Trial) -> tuple[PyTree, str]:
        """Returns the original's results in float64, beside which the oracle computes them in 16 bits."""
        compiled, failure = self._compiled(trial.original(), trial, timed=False)
        if compiled is None:
            return None, f"the original cannot be run on its own: {failure}"
        analysis = compiled.memory_analysis()
        needed = 0 if analysis is None else 5 * (analysis.temp_size_in_bytes + analysis.output_size_in_bytes)
        if self.limit is not None and needed > self.limit:
            return None, f"the original in float64 needs about {needed} bytes, and {self.limit} are free"
        try:
            program = compat.make_jaxpr(trial.original(), *trial.arguments)
            return Oracle(program)(*jax.tree.leaves(trial.arguments)), ""
        except Exception as error:
            return None, f"the original cannot be evaluated in float64: {type(error).__name__}: {error}"

    def _compiled(
        self, function: ArrayFunction, trial: Trial, timed: bool = True
    ) -> tuple[jax.stages.Compiled | None, Failure | None]:
        """Compiles a function for a trial; XLA tries no forms of products on a GPU for what is not timed."""
        on_gpu = jax.default_backend() == "gpu"
        options: dict[str, str | bool] | None = {"xla_gpu_autotune_level": "0"} if on_gpu and not timed else None
        stage: Stage = "lower"
        try:
            lowered = jax.jit(function).lower(*trial.arguments)
            stage = "compile"
            return lowered.compile(compiler_options=options), None
        except Exception as error:
            return None, Failure(stage, f"{type(error).__name__}: {error}")

    def _first_run(self, compiled: jax.stages.Compiled, trial: Trial) -> tuple[PyTree, Timing]:
        """Returns the original's results, and what its first run takes."""
        analysis = compiled.memory_analysis()
        temporary = None if analysis is None else int(analysis.temp_size_in_bytes)
        if self.limit is not None and temporary is not None:
            needed = Trial.bytes_needed(self.match) + temporary
            if needed > self.limit:
                raise MemoryError(f"it needs {needed} bytes, and {self.limit} are free")
        clocks = Clocks()
        wall, cpu = clocks.wall(), clocks.cpu()
        results = jax.block_until_ready(compiled(*trial.arguments))
        wall, cpu = clocks.wall() - wall, clocks.cpu() - cpu
        return jax.device_get(results), Timing(wall=(wall,), cpu=(cpu,), temporary_bytes=temporary)

    def _once(self, compiled: jax.stages.Compiled, trial: Trial, reference: PyTree, warm: bool = False) -> Timing:
        """Does one run that is compared and one that is timed; if it is warm, one that is both."""
        measured = measure(
            {"it": compiled},
            trial.arguments,
            repetitions=1,
            minimum_repetitions=1,
            warm_up=None if warm else 0,
            reference=reference,
            memory_limit=self.limit,
        )
        return measured["it"]

    def _screened(
        self, sizes: BlockSizes, trial: Trial, reference: PyTree, original: Timing, single: bool
    ) -> _Works | None:
        """Returns a candidate that works and is right, or None; ``single`` if it may run once only."""
        compiled, failure = self._compiled(trial.kernel(self.implementation, sizes), trial)
        timing = Timing()
        if compiled is not None:
            timing = self._once(compiled, trial, reference, warm=single)
            failure = timing.failure
        if failure is None:
            fault = trial.fault(timing.differences, original.differences)
            failure = None if fault is None else Failure("compare", fault)
        if failure is not None and (failure.stage == "memory" or lacks_memory(failure.error)):
            failure = Failure("memory", failure.error)  # this describes the moment, not the kernel
        self.tried[sizes] = Tried(
            block_sizes=sizes.to_dict(),
            stage="" if failure is None else failure.stage,
            error="" if failure is None else failure.error,
            microseconds=timing.wall[-1] * 1e6 if timing.wall else None,
            temporary_bytes=timing.temporary_bytes,
            difference=None if timing.difference is None else timing.difference.maximum,
        )
        if compiled is not None and failure is None:
            return _Works(compiled, timing)
        assert failure is not None
        self.rejected.append(Rejected(sizes.to_dict(), failure.stage, failure.error))
        return None

    # ------------------------------------------------------------------ the race

    def _finalists(self, works: Mapping[BlockSizes, _Works], original_seconds: float) -> list[BlockSizes]:
        """Returns the few that may be the fastest, and the one that may need the least memory in acceptable time."""
        runs = self.rounds + self.runs_before
        room = self.left() - runs * original_seconds
        fastest = min(work.seconds for work in works.values())
        bearable = [s for s, work in works.items() if work.seconds <= _CLOSE * MEMORY_SLOWDOWN * original_seconds]
        leanest = min(bearable, key=lambda s: (works[s].temporary_bytes, works[s].seconds), default=None)
        chosen: list[BlockSizes] = []
        for sizes, work in sorted(works.items(), key=lambda item: item[1].seconds):
            if work.seconds > _CLOSE * fastest or len(chosen) == _FINALISTS or runs * work.seconds > room:
                break
            room -= runs * work.seconds
            chosen.append(sizes)
        if chosen and leanest is not None and leanest not in chosen and runs * works[leanest].seconds <= room:
            chosen.append(leanest)
        return chosen

    def _raced(
        self,
        works: Mapping[BlockSizes, _Works],
        original: jax.stages.Compiled,
        alone: Timing,
        trial: Trial,
    ) -> tuple[BlockSizes | None, Row[BlockSizes] | None, str]:
        """Times the original and the best candidates in turns.

        Args:
          works: the candidates that work, each timed once.
          original: the original, compiled.
          alone: what one run of it took.
          trial: the inputs.
        """
        seconds = alone.wall[-1]
        finalists = {str(sizes): sizes for sizes in self._finalists(works, seconds)}
        share, fastest = 1.0, min(works, key=lambda sizes: works[sizes].seconds)
        if finalists:
            measured = measure(
                {ORIGINAL: original, **{name: works[sizes].compiled for name, sizes in finalists.items()}},
                trial.arguments,
                baseline=ORIGINAL,
                seconds=max(self.left() - self.runs_before * (seconds + works[fastest].seconds), 0.0),
                minimum_repetitions=self.rounds,
                warm_up=self.runs_before - 1 if self.runs_before else None,
            )
        elif self.quick and not self.runs_before:  # no time is left for another run of each
            finalists, share = {str(fastest): fastest}, _SINGLE_RUN_SHARE
            measured = Measurement({ORIGINAL: alone, str(fastest): works[fastest].timing}, ORIGINAL)
        else:
            return None, None, self._used_up()
        clock: Clock = "device" if all(measured[name].device for name in (ORIGINAL, *finalists)) else "wall"
        rows: dict[str, Row[BlockSizes]] = {}
        for name, sizes in finalists.items():
            row = _row(sizes, measured, name, clock, self.quick, share)
            if row is not None:
                rows[name] = row = stated(row, self.match, Device.current())
                if sizes in self.tried:
                    self.tried[sizes] = replace(self.tried[sizes], row=row)
        if not rows:
            return None, None, f"timing failed: {'; '.join(map(str, measured.failures.values()))}"
        best = min(rows, key=lambda name: _score(measured[name], clock) or 0.0)
        self.lean = _leanest(rows, rows[best])
        return finalists[best], rows[best], ""


def _leanest(rows: Mapping[str, Row[BlockSizes]], fastest: Row[BlockSizes]) -> Row[BlockSizes] | None:
    """Returns the row of least memory among those that are not too slow, if it needs less than the fastest."""
    bearable = [row for row in rows.values() if row.kernel_us <= MEMORY_SLOWDOWN * row.original_us]
    least = min(bearable, key=lambda row: (row.kernel_bytes, row.kernel_us), default=None)
    return least if least is not None and least.kernel_bytes < fastest.kernel_bytes else None


def _score(timing: Timing, clock: Clock) -> float | None:
    """Adds mean and standard deviation, since a candidate that is fast only now and then is not a fast one."""
    sample = timing.samples(clock)
    if timing.failure is not None or not sample:
        return None
    return statistics.fmean(sample) + statistics.pstdev(sample)


def _row(
    sizes: BlockSizes, measured: Measurement, name: str, clock: Clock, quick: bool, share: float = 1.0
) -> Row[BlockSizes] | None:
    """Returns what a candidate cost; ``share`` is that of the gain that counts."""
    kernel, ratio = measured[name].spread(clock), measured.ratio(name, clock=clock)
    own, base = _score(measured[name], clock), _score(measured[ORIGINAL], clock)
    if kernel is None or ratio is None or kernel.median <= 0 or own is None or base is None:
        return None
    microseconds = kernel.median * 1e6
    gain = ratio.median if own < base else min(ratio.median, 1.0)  # a gain that the spread hides does not count
    processors = measured.ratio(name, clock="cpu") if jax.default_backend() == "cpu" else None
    if processors is not None:
        # Wall time also depends on what else runs on the machine, and is gained by using more processors, which others
        # then lack; processor time does not show how many are used: the gain has to show in both.
        gain = min(gain, processors.median)
    gain *= share
    return Row(
        block_sizes=sizes,
        kernel_us=float(f"{microseconds:.4g}"),
        original_us=float(f"{microseconds * gain:.4g}"),  # so that the row's ratio is that of paired runs
        kernel_bytes=measured[name].temporary_bytes or 0,
        original_bytes=measured[ORIGINAL].temporary_bytes or 0,
        evidence="quickly measured" if quick else "measured",
        date=datetime.date.today().isoformat(),
        versions=running_jax(),
    )


def candidates_of(match: SiteWorkload, implementation: str, first: BlockSizes, device: Device) -> list[BlockSizes]:
    """Returns the block sizes to try, best guess first: those of the implementation, else those of the operation.

    Args:
      match: the site.
      implementation: the implementation's name; its module may have a function ``candidates(spec, device)``.
      first: block sizes to begin with.
      device: where it will run.
    """
    module = match.site.operation.implementation(implementation)
    kind = operation_named(match.op).part("block_sizes").BlockSizes
    own = getattr(module, "candidates", None)
    with device.targeted():
        return list(dict.fromkeys((first, *(kind.candidates(match.spec) if own is None else own(match.spec, device)))))


def search(
    match: SiteWorkload,
    implementation: str,
    key: TuningKey,
    first: BlockSizes,
    seconds: float,
    known: Entry | None = None,
    clock: Callable[[], float] = time.monotonic,
    observe: Callable[[Sequence[Tried]], None] | None = None,
    quick: bool = False,
    alone: bool = False,
    yardstick: Yardstick | None = None,
) -> Entry:
    """Measures the candidates for a site's block sizes against each other and the original.

    No step begins after the budget, but of a quick search whose original fills it alone; a step that runs then is not
    interrupted.

    Args:
      match: the site, as recognised.
      implementation: the implementation's name.
      key: the key of the result.
      first: block sizes to begin with, such as the nearest known ones.
      seconds: the budget.
      known: an earlier, unfinished result; what was wrong then is not tried again.
      clock: a clock in seconds.
      observe: called with all candidates and how far each came, including those that failed or had no turn.
      quick: whether only the best guesses are tried; the result then says so.
      alone: whether ``first`` is the only candidate, so that what it gains is measured once more.
      yardstick: what other searches for the same site, at the same time, are compared with too.

    Returns:
      The result, with or without block sizes.
    """
    spec = match.spec
    wrong = [r for r in known.rejected if r.stage == "compare"] if known is not None else []
    with Progress(f"autopallas: tuning {match.op}") as say:
        run = _Search(match, implementation, seconds, clock, say, quick, list(wrong), yardstick or Yardstick())
        every = [
            sizes
            for sizes in candidates_of(match, implementation, first, Device.current())
            if all(sizes.to_dict() != dict(r.block_sizes) for r in wrong)
        ]
        every = [first] if alone else every[:_QUICK_CANDIDATES] if quick else every
        candidates = []
        for sizes in every:
            estimate = sizes.temporary_bytes(spec, match.direction)
            if run.limit is None or estimate <= run.limit:
                candidates.append(sizes)
            else:
                error = f"it needs {estimate} bytes by the estimate, and {run.limit} are free"
                run.tried[sizes] = Tried(sizes.to_dict(), "memory", error)
        if candidates or wrong:
            best, row, reason = run.run(candidates)
        else:
            best, row, reason = None, None, "no candidate fits into memory"
    if observe is not None:
        observe(run.told(every))
    rejected = tuple(run.rejected)
    if best is not None:
        lean = None if run.lean is None else run.lean.of(run.lean.block_sizes.to_dict())
        return Entry(key.description, "tuned", best.to_dict(), row, "", rejected, seconds, lean)
    if reason:
        return Entry(key.description, "unfinished", None, None, reason, rejected, seconds)
    reasons = "; ".join(dict.fromkeys(f"{r.stage}: {r.error}".split("\n")[0][:300] for r in rejected))
    passing = any(r.stage == "memory" for r in rejected)
    return Entry(
        key.description,
        "unfinished" if passing else "failed",
        reason=f"none of {len(rejected)} candidates works: {reasons}",
        rejected=rejected,
        seconds=seconds,
    )
