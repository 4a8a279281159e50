"""Measures one program in a process of its own: ``python -m benchmarks.programs.child WHAT NAME ROUNDS``.

WHAT is ``original`` or ``optimized``, whose first step is timed, ``steps``, for which both run in turns, or ``rows``,
which lists the sites that have a kernel here and whether the tuned tables have a row for each, and runs nothing.  The
result is one line of JSON, the last on standard output.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from typing import Any

import jax
import numpy as np

import autopallas
from autopallas.sites.operation import operation_named
from autopallas.tuning import measure
from autopallas.tuning.measure import Timing
from benchmarks.programs import programs
from benchmarks.programs.program import Built

ORIGINAL, OPTIMIZED, MEMORY, ROWS = "original", "optimized", "memory", "rows"


def _first_step(built: Built, optimized: bool) -> dict[str, Any]:
    """Processor and wall time from the function to its first result: trace, lower, compile, run."""
    function, arguments = built
    jax.block_until_ready(arguments)
    candidate = autopallas.optimize(function) if optimized else jax.jit(function)
    wall, cpu = time.perf_counter(), time.process_time()
    jax.block_until_ready(candidate(*arguments))
    return {"cpu_seconds": time.process_time() - cpu, "wall_seconds": time.perf_counter() - wall}


def _median(timing: Timing) -> float | None:
    spread = timing.spread("cpu")
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


def _steps(built: Built, rounds: int) -> dict[str, Any]:
    function, arguments = built
    optimized, smaller = autopallas.optimize(function), autopallas.optimize(function, objective="memory")
    original = jax.jit(function)
    differs = difference(original(*arguments), optimized(*arguments), arguments)
    measured = measure(
        {ORIGINAL: original, OPTIMIZED: optimized}, arguments,
        baseline=ORIGINAL, repetitions=rounds, seconds=180.0,
    )  # fmt: skip
    ratios = {clock: measured.ratio(OPTIMIZED, clock=clock) for clock in ("cpu", "wall")}
    timing = measured[OPTIMIZED]
    sites = optimized.report().sites
    analysis = smaller.lower(*arguments).compile().memory_analysis()
    return {
        **{f"{clock}_ratio": r and [r.median, r.lower, r.upper] for clock, r in ratios.items()},
        "cpu_seconds": {name: _median(measured[name]) for name in (ORIGINAL, OPTIMIZED)},
        "temporary_bytes": {
            ORIGINAL: measured[ORIGINAL].temporary_bytes, OPTIMIZED: timing.temporary_bytes,
            MEMORY: analysis and int(analysis.temp_size_in_bytes),
        },
        "sites": [
            {"op": site.op, "kind": site.kind, "direction": site.direction, "verdict": site.verdict,
             "implementation": site.implementation, "reason": site.reason, "spec": site.spec_line} for site in sites
        ],
        "near_misses": [[miss.op, miss.reason] for miss in optimized.report().near_misses],
        "difference": differs,
        "rounds": len(timing.cpu),
        "failure": timing.failure and str(timing.failure),
        "load": os.getloadavg()[0],
    }  # fmt: skip


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
    what, name, rounds = sys.argv[1:]
    (program,) = (one for one in programs() if one.name == name)
    built = program.build()
    if what == ROWS:
        found = _rows(built)
    elif what == "steps":
        found = _steps(built, int(rounds))
    else:
        found = _first_step(built, what == OPTIMIZED)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
