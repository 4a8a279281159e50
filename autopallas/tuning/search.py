"""The search for the block sizes of one site: compile, compare with the reference, time, within a budget of seconds."""

from __future__ import annotations

import datetime
import importlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from autopallas.tuning.entry import Entry, Rejected
from autopallas.tuning.key import TuningKey
from autopallas.tuning.measure import Failure, Measurement, Timing, measure
from autopallas.tuning.table import Row
from autopallas.tuning.trial import Trial

__all__ = ["ORIGINAL", "free_bytes", "search"]

ORIGINAL = "original"

_SCREENING_SHARE = 0.6
"""The part of the budget that compiling and comparing may take; the rest is for timing."""
_FINALISTS = 4
_CLOSE = 1.5
"""A candidate whose first timed run took this much longer than the best one's is not timed again."""
_ROUNDS = 3
_RUNS_BEFORE = 2
_OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "MemoryError", "out of memory", "Out of memory")


@dataclass
class _Search:
    """One search while it runs."""

    match: Any
    implementation: str
    seconds: float
    clock: Callable[[], float]
    say: Callable[[str], None]
    rejected: list[Rejected] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.begin = self.clock()
        self.limit = free_bytes()

    def left(self, share: float = 1.0) -> float:
        """The seconds that are left of a share of the budget."""
        return self.begin + share * self.seconds - self.clock()

    def run(self, candidates: Sequence[Any]) -> tuple[Any, Row | None, str]:
        """(the best block sizes or None, what they cost, why there are none)."""
        needed = Trial.bytes_needed(self.match)
        if self.limit is not None and needed > self.limit:
            return None, None, f"its inputs and results need {needed} bytes, and {self.limit} are free"
        trial = Trial.of(self.match)
        self.say("the reference")
        reference, problem = self._reference(trial)
        if problem:
            return None, None, problem
        self.say("the original")
        compiled, failure = self._compiled(trial.original(), trial)
        if failure is None:
            original = self._once(compiled, trial, reference)
            failure = original.failure
        if failure is not None:
            return None, None, f"the original cannot be run on its own: {failure}"

        works: dict[Any, tuple[Any, float]] = {}
        tried = 0
        for number, sizes in enumerate(candidates, 1):
            if self.left(_SCREENING_SHARE) <= 0:
                break
            tried += 1
            self.say(f"candidate {number} of {len(candidates)}")
            found = self._screened(sizes, trial, reference, original)
            if found is not None:
                works[sizes] = found
        if not works:
            if tried < len(candidates):
                return None, None, self._used_up()
            # A candidate can break the device for all that come after it.
            broken = self._once(compiled, trial, None).failure
            return None, None, "" if broken is None else f"the original fails too by now: {broken}"
        self.say("timing")
        return self._raced(works, compiled, original.wall[-1], trial)

    def _used_up(self) -> str:
        return f"the budget of {self.seconds:g} seconds was used up"

    # ------------------------------------------------------------------ one candidate

    def _reference(self, trial: Trial) -> tuple[Any, str]:
        with jax.default_matmul_precision("highest"):
            compiled, failure = self._compiled(trial.kernel("reference", None), trial)
        if failure is None:
            analysis = compiled.memory_analysis()
            needed = 0 if analysis is None else analysis.temp_size_in_bytes + analysis.output_size_in_bytes
            if self.limit is not None and needed > self.limit:
                return None, f"the reference needs {needed} bytes, and {self.limit} are free"
            try:
                return jax.device_get(compiled(*trial.arguments)), ""
            except Exception as error:
                failure = Failure("run", f"{type(error).__name__}: {error}")
        return None, f"the reference cannot be run: {failure}"

    def _compiled(self, function: Any, trial: Trial) -> tuple[Any, Failure | None]:
        stage: Any = "lower"
        try:
            lowered = jax.jit(function).lower(*trial.arguments)
            stage = "compile"
            return lowered.compile(), None
        except Exception as error:
            return None, Failure(stage, f"{type(error).__name__}: {error}")

    def _once(self, compiled: Any, trial: Trial, reference: Any) -> Timing:
        """One run that is compared, and one that is timed."""
        measured = measure(
            {"it": compiled},
            trial.arguments,
            repetitions=1,
            minimum_repetitions=1,
            warm_up=0,
            reference=reference,
            memory_limit=self.limit,
        )
        return measured["it"]

    def _screened(self, sizes: Any, trial: Trial, reference: Any, original: Timing) -> tuple[Any, float] | None:
        """(compiled, seconds of a run) of a candidate that works and is right, or None."""
        compiled, failure = self._compiled(trial.kernel(self.implementation, sizes), trial)
        if failure is None:
            timing = self._once(compiled, trial, reference)
            failure = timing.failure
        if failure is None:
            fault = trial.fault(timing.differences, original.differences)
            if fault is None:
                return compiled, timing.wall[-1]
            failure = Failure("compare", fault)
        if failure.stage == "memory" or any(sign in failure.error for sign in _OUT_OF_MEMORY):
            failure = Failure("memory", failure.error)  # which says something of this moment, not of the kernel
        self.rejected.append(Rejected(sizes.to_dict(), failure.stage, failure.error))
        return None

    # ------------------------------------------------------------------ the race

    def _raced(
        self, works: Mapping[Any, tuple[Any, float]], original: Any, original_seconds: float, trial: Trial
    ) -> tuple[Any, Row | None, str]:
        runs = _ROUNDS + _RUNS_BEFORE
        room = self.left() - runs * original_seconds
        fastest = min(seconds for _, seconds in works.values())
        finalists: dict[str, Any] = {}
        for sizes, (_, seconds) in sorted(works.items(), key=lambda item: item[1][1]):
            room -= runs * seconds
            if room < 0 or seconds > _CLOSE * fastest or len(finalists) == _FINALISTS:
                break
            finalists[str(sizes)] = sizes
        if not finalists:
            return None, None, self._used_up()
        measured = measure(
            {ORIGINAL: original, **{name: works[sizes][0] for name, sizes in finalists.items()}},
            trial.arguments,
            baseline=ORIGINAL,
            seconds=max(self.left() - _RUNS_BEFORE * (original_seconds + fastest), 0.0),
            minimum_repetitions=_ROUNDS,
            warm_up=_RUNS_BEFORE - 1,
        )
        scores = {name: _score(measured[name]) for name in finalists}
        best = min((name for name in scores if scores[name] is not None), key=lambda n: scores[n] or 0.0, default=None)
        if best is None or (row := _row(finalists[best], measured, best)) is None:
            return None, None, f"timing failed: {'; '.join(map(str, measured.failures.values()))}"
        return finalists[best], row, ""


def _score(timing: Timing) -> float | None:
    """Mean and spread together, for a candidate that is fast now and then is not a fast one."""
    if timing.failure is not None or not timing.wall:
        return None
    return statistics.fmean(timing.wall) + statistics.pstdev(timing.wall)


def _row(sizes: Any, measured: Measurement, name: str) -> Row | None:
    kernel, ratio = measured[name].spread(), measured.ratio(name)
    own, base = _score(measured[name]), _score(measured[ORIGINAL])
    if kernel is None or ratio is None or kernel.median <= 0 or own is None or base is None:
        return None
    microseconds = kernel.median * 1e6
    gain = ratio.median if own < base else min(ratio.median, 1.0)  # a gain that the spread hides is none
    return Row(
        block_sizes=sizes,
        kernel_us=float(f"{microseconds:.4g}"),
        original_us=float(f"{microseconds * gain:.4g}"),  # so that the row's ratio is that of paired runs
        kernel_bytes=measured[name].temporary_bytes or 0,
        original_bytes=measured[ORIGINAL].temporary_bytes or 0,
        evidence="measured",
        date=datetime.date.today().isoformat(),
        versions=f"jax {jax.__version__}",
    )


def free_bytes() -> int | None:
    """What is left of the device's memory, or of the machine's; None where that is not known."""
    statistics = jax.local_devices()[0].memory_stats()
    if statistics and "bytes_limit" in statistics:
        return int(statistics["bytes_limit"]) - int(statistics.get("bytes_in_use", 0))
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def search(
    match: Any,
    implementation: str,
    key: TuningKey,
    first: Any,
    seconds: float,
    known: Entry | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Entry:
    """Measures the candidates for a site's block sizes against each other and the original.

    No step begins after the budget; the one that runs then is not broken off.

    Args:
      match: the site, as recognised.
      implementation: the implementation's name.
      key: what the result is for.
      first: block sizes to begin with, such as the nearest known ones.
      seconds: the budget.
      known: an earlier, unfinished result; what was wrong then is not tried again.
      clock: a clock in seconds.

    Returns:
      The result, with or without block sizes.
    """
    spec = match.spec
    kind = importlib.import_module(f"autopallas.kernels.{match.op}.block_sizes").BlockSizes
    wrong = [r for r in known.rejected if r.stage == "compare"] if known is not None else []
    with _progress(match.op) as say:
        run = _Search(match, implementation, seconds, clock, say, list(wrong))
        candidates = [
            sizes
            for sizes in dict.fromkeys((first, *kind.candidates(spec)))
            if all(sizes.to_dict() != dict(r.block_sizes) for r in wrong)
            and (run.limit is None or sizes.temporary_bytes(spec, match.direction) <= run.limit)
        ]
        if not candidates and not wrong:
            return Entry(key.description, "unfinished", reason="no candidate fits into memory", seconds=seconds)
        sizes, row, reason = run.run(candidates)
    rejected = tuple(run.rejected)
    if sizes is not None:
        return Entry(key.description, "tuned", sizes.to_dict(), row, "", rejected, seconds)
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


class _progress:
    """``with _progress(op) as say``: ``say(text)`` shows one line on a terminal, and nothing anywhere else."""

    def __init__(self, op: str):
        self.op = op
        self.shown = False

    def __enter__(self) -> Callable[[str], None]:
        try:
            self.shown = sys.stderr.isatty()
        except (AttributeError, ValueError):  # no stream, or a closed one
            self.shown = False
        return self.say

    def say(self, text: str) -> None:
        if self.shown:
            sys.stderr.write(f"\r\x1b[Kautopallas: tuning {self.op}: {text}")
            sys.stderr.flush()

    def __exit__(self, *error: object) -> None:
        if self.shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
