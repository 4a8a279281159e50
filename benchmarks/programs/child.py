"""Measures one program in a process of its own: ``python -m benchmarks.programs.child WHAT NAME ROUNDS [FLAG ...]``.

WHAT is ``original`` or ``optimized``, whose first step is timed, ``steps``, for which both run in turns, or ``rows``,
which lists the sites that have a kernel here and whether the tuned tables have a row for each, and runs nothing.  FLAGs
are ``quick``, with which ``steps`` leaves out what takes a compilation more and stops earlier, ``small``, for the
sizes of a dry run, and a number: the option ``tune_seconds``.  Results are JSON objects, a line each, on standard
output: what ``steps`` knows after the first step, it says then.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import numpy as np

import autopallas
from autopallas.report import Report
from autopallas.sites.operation import operation_named
from autopallas.tuning import measure
from autopallas.tuning.measure import Timing
from benchmarks import environment
from benchmarks.programs import programs
from benchmarks.programs.program import Built

ORIGINAL, OPTIMIZED, MEMORY, ROWS = "original", "optimized", "memory", "rows"
QUICK, SMALL = "quick", "small"

_OF_SITE = (
    "op", "kind", "direction", "verdict", "implementation", "reason", "block_sizes", "block_sizes_from", "measured",
    "attempts",
)  # fmt: skip


def _first_step(built: Built, optimized: bool) -> dict[str, Any]:
    """Processor and wall time from the function to its first result: trace, lower, compile, run."""
    function, arguments = built
    return _timed(autopallas.optimize(function) if optimized else jax.jit(function), arguments)[1]


def _timed(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, dict[str, float]]:
    jax.block_until_ready(arguments)
    wall, cpu = time.perf_counter(), time.process_time()
    result = jax.block_until_ready(function(*arguments))
    return result, {"cpu_seconds": time.process_time() - cpu, "wall_seconds": time.perf_counter() - wall}


def _median(timing: Timing, clock: Any) -> float | None:
    spread = timing.spread(clock)
    return spread and spread.median


def difference(expected: Any, found: Any, arguments: tuple[Any, ...]) -> float:
    """Norm of the difference of two results over the norm of the expected one, over all their numbers together.

    Where a step returns its state, of the first argument's structure, the change of the state is what is compared: what
    differs in a gradient would vanish beside the state.  Leaves that are no numbers (keys) are left out.
    """
    if isinstance(expected, tuple) and jax.tree.structure(expected[0]) == jax.tree.structure(arguments[0]):
        before = arguments[0]
        expected, found = ((jax.tree.map(_change, before, new), *rest) for new, *rest in (expected, found))
    norm = rest = 0.0
    for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        if jax.dtypes.issubdtype(one.dtype, np.number):
            wide, also = np.asarray(one, np.float64), np.asarray(other, np.float64)
            norm += float(np.sum(wide**2))
            rest += float(np.sum((also - wide) ** 2))
    return math.sqrt(rest / norm) if norm else math.sqrt(rest)


def _change(before: Any, after: Any) -> Any:
    return after - before if jax.dtypes.issubdtype(after.dtype, np.inexact) else after


def _steps(
    built: Built, rounds: int, quick: bool = False, say: Callable[[Any], None] = lambda found: None
) -> dict[str, Any]:
    function, arguments = built
    optimized, original = autopallas.optimize(function), jax.jit(function)
    found, searched = _timed(optimized, arguments)
    of_first = {"first_step": {"searched": searched}, **_of_report(optimized.report())}
    say(of_first)
    expected, of_first["first_step"][ORIGINAL] = _timed(original, arguments)
    say(of_first)
    differs = difference(expected, found, arguments)
    del expected, found
    measured = measure(
        {ORIGINAL: original, OPTIMIZED: optimized}, arguments,
        baseline=ORIGINAL, repetitions=rounds, seconds=10.0 if quick else 180.0,
    )  # fmt: skip
    clocks = ("cpu", "wall") if environment.backend() == "cpu" else ("wall", "device")
    ratios = {clock: measured.ratio(OPTIMIZED, clock=clock) for clock in clocks}
    timing = measured[OPTIMIZED]
    memory = {ORIGINAL: measured[ORIGINAL].temporary_bytes, OPTIMIZED: timing.temporary_bytes}
    if not quick:
        memory[MEMORY] = _smallest(built)
    return {
        "clock": clocks[0],
        **{f"{clock}_ratio": r and [r.median, r.lower, r.upper] for clock, r in ratios.items()},
        **{
            f"{clock}_seconds": {name: _median(measured[name], clock) for name in (ORIGINAL, OPTIMIZED)}
            for clock in clocks
        },
        "temporary_bytes": memory,
        **of_first,
        "difference": differs,
        "rounds": len(timing.wall),
        "failure": timing.failure and str(timing.failure),
        "load": os.getloadavg()[0],
    }


def _smallest(built: Built) -> int | None:
    """The temporary memory of a program under objective="memory", which is compiled for it and not run."""
    function, arguments = built
    smaller = autopallas.optimize(function, objective="memory")
    analysis = smaller.lower(*arguments).compile().memory_analysis()
    return analysis and int(analysis.temp_size_in_bytes)


def _without_folders(text: str) -> str:
    """Returns text without the folders of this machine in which packages and the project lie.

    Example:
      >>> _without_folders("read at /home/me/env/lib/python3.11/site-packages/flax/linen/recurrent.py:168")
      'read at flax/linen/recurrent.py:168'
    """
    return re.sub(r"/\S*?/site-packages/", "", text).replace(f"{Path(__file__).parents[2]}/", "")


def _of_report(report: Report) -> dict[str, Any]:
    """What a report says of sites, and of the time that passes took: the search is in that of the plan."""
    found: Any = report.to_dict()
    return {
        "sites": [{name: site[name] for name in _OF_SITE} | {"spec": site["spec_line"]} for site in found["sites"]],
        "near_misses": [[miss["op"], _without_folders(miss["reason"])] for miss in found["near_misses"]],
        "failures": found["failures"],
        "tuning": found["tuning"],
        "passes": {one.name: round(one.seconds, 3) for one in report.trace if one.seconds >= 0.01},
    }


def _rows(built: Built) -> dict[str, Any]:
    function, arguments = built
    report = autopallas.explain(function, *arguments)
    # A norm has no kernel on a CPU, so that there is nothing to measure.
    sites = [s for s in report.sites if s.implementation and not operation_named(s.op).only_restates(s.implementation)]
    return {
        "sites": [
            {"name": site.kind or site.op, "has_row": site.measured is not None, "reason": site.reason,
             "spec": site.spec_line} for site in sites
        ]
    }  # fmt: skip


def main() -> None:
    what, name, rounds, *flags = sys.argv[1:]
    faulthandler.register(signal.SIGUSR1)
    begin = time.perf_counter()
    (program,) = (one for one in programs() if one.name == name)
    built = program.small() if SMALL in flags and program.small else program.build()
    jax.block_until_ready(built)
    _say({"build_seconds": round(time.perf_counter() - begin, 2)})
    seconds = [float(flag) for flag in flags if flag not in (QUICK, SMALL)]
    with autopallas.options(tune_seconds=seconds[0]) if seconds else nullcontext():
        if what == ROWS:
            found = _rows(built)
        elif what == MEMORY:
            found = {"smallest": _smallest(built)}
        elif what == "steps":
            found = _steps(built, int(rounds), QUICK in flags, _say)
        else:
            found = _first_step(built, what == OPTIMIZED)
    _say(found)


def _say(found: dict[str, Any]) -> None:
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
