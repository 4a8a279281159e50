"""Measures what each replaced site of a program is worth: with all sites, and with each left out in turn."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autopallas.compat import ArrayFunction, PyTree
from autopallas.tuning.measure import Clock, Measurement, Timing, measure

__all__ = ["Interval", "Whole", "Worth", "interval", "worths"]

ORIGINAL, ALL = "as it is written", "with all sites"
_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """A median and the interval that holds the true one with 95% confidence; the same in reverse for differences."""

    median: float
    lower: float
    upper: float

    @property
    def certain(self) -> bool:
        """Whether zero is outside."""
        return self.lower > 0 or self.upper < 0


@dataclass(frozen=True, slots=True)
class Worth:
    """What one place of a program is worth: how much more the program needs without it.

    Attributes:
      op, location, sites: the operation, its place in the user's code, and how many sites there are at this place.
      seconds: more time of a step, within rounds; None where the program without it failed.
      share: the same, relative to a step with all sites.
      temporary_bytes: more temporary memory, as the compiler plans it.
      first_step_seconds: more time until the first result: tracing, lowering, compiling, running.  Taken once.
      failure: why the program without it could not be measured, or an empty string.
    """

    op: str
    location: str
    sites: int
    seconds: Interval | None
    share: float | None
    temporary_bytes: int | None
    first_step_seconds: float | None
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Whole:
    """The measurement of a program: with all sites, as it is written, and what the difference is.

    Attributes:
      original, optimized: medians of a step, in seconds, with intervals; None where one failed.
      gain: how much longer a step of the original takes, within rounds.
      temporary_bytes, first_step_seconds: of the original and of the optimized program.
      worths: the places, the most valuable first.
      clock: what was measured: "wall" or, on accelerators, "device".
      rounds: how often each program ran.
      failures: what could not be measured, by program.
    """

    original: Interval | None
    optimized: Interval | None
    gain: Interval | None
    temporary_bytes: tuple[int | None, int | None]
    first_step_seconds: tuple[float | None, float | None]
    worths: tuple[Worth, ...]
    clock: Clock
    rounds: int
    failures: Mapping[str, str]


def interval(sample: Sequence[float]) -> Interval | None:
    """Returns the median of a sample with its 95% confidence interval by order statistics; None for an empty one.

    Of fewer than six numbers it is the whole range, which holds the median with less confidence.

    Example:
      >>> interval([3.0, 1.0, 2.0])
      Interval(median=2.0, lower=1.0, upper=3.0)
    """
    ordered = sorted(sample)
    count = len(ordered)
    if not count:
        return None
    outside, tail = 0, 0.0  # ranks to leave out at each end, and the chance that the median lies there
    while outside + 1 <= (count - 1) // 2:
        tail += math.comb(count, outside) / 2**count
        if 2 * tail > 1 - _CONFIDENCE:
            break
        outside += 1
    middle = count // 2
    median = ordered[middle] if count % 2 else (ordered[middle - 1] + ordered[middle]) / 2
    low = max(outside - 1, 0)
    return Interval(median, ordered[low], ordered[count - 1 - low])


def worths(
    original: ArrayFunction,
    optimized: ArrayFunction,
    without: Mapping[tuple[str, str], tuple[int, ArrayFunction]],
    arguments: Sequence[PyTree],
    *,
    rounds: int = 21,
    seconds: float = 60.0,
    progress: Callable[[str], None] | None = None,
) -> Whole:
    """Runs a program in all its forms in turns, in an order drawn anew for each round.

    Args:
      original: the program as it is written.
      optimized: with all sites replaced.
      without: by (operation, location), the number of sites there, and the program without them.
      arguments: arguments of all of them.
      rounds: the largest number of rounds.
      seconds: wall time of all rounds.
      progress: called with a line before each stage.
    """
    names = {f"without {op} at {place}": (op, place) for op, place in without}
    candidates = {ORIGINAL: original, ALL: optimized, **{name: without[key][1] for name, key in names.items()}}
    found = measure(
        candidates,
        arguments,
        baseline=ALL,
        repetitions=rounds,
        seconds=seconds,
        minimum_repetitions=6,
        progress=progress,
    )
    clock: Clock = "device" if found[ALL].device else "wall"
    whole = found[ALL]
    listed = [_worth(found, name, key, without[key][0], clock) for name, key in names.items()]
    listed.sort(key=lambda worth: -(worth.seconds.median if worth.seconds is not None else -math.inf))
    return Whole(
        original=interval(found[ORIGINAL].samples(clock)),
        optimized=interval(whole.samples(clock)),
        gain=_difference(found, ORIGINAL, clock),
        temporary_bytes=(found[ORIGINAL].temporary_bytes, whole.temporary_bytes),
        first_step_seconds=(found[ORIGINAL].first_step_seconds, whole.first_step_seconds),
        worths=tuple(listed),
        clock=clock,
        rounds=len(whole.samples(clock)),
        failures={name: str(failure) for name, failure in found.failures.items()},
    )


def _worth(found: Measurement, name: str, key: tuple[str, str], sites: int, clock: Clock) -> Worth:
    own, whole = found[name], found[ALL]
    difference = _difference(found, name, clock)
    step = interval(whole.samples(clock))
    share = None if difference is None or step is None or not step.median else difference.median / step.median
    failure = "" if own.failure is None else str(own.failure)
    return Worth(*key, sites, difference, share, *_more(own, whole), failure)


def _more(own: Timing, whole: Timing) -> tuple[int | None, float | None]:
    memory, first = None, None
    if own.temporary_bytes is not None and whole.temporary_bytes is not None:
        memory = own.temporary_bytes - whole.temporary_bytes
    if own.first_step_seconds is not None and whole.first_step_seconds is not None:
        first = own.first_step_seconds - whole.first_step_seconds
    return memory, first


def _difference(found: Measurement, name: str, clock: Clock) -> Interval | None:
    """Returns how much longer a program takes than the one with all sites, round by round."""
    pairs = zip(found[name].samples(clock), found[ALL].samples(clock), strict=False)
    return interval([own - whole for own, whole in pairs])
