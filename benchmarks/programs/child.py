"""Measures one program in a process of its own: ``python -m benchmarks.programs.child WHAT NAME ROUNDS``.

WHAT is ``original`` or ``optimized``, whose first step is timed, or ``steps``, for which both run in turns.  The result
is one line of JSON, the last on standard output.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import jax

import autopallas
from autopallas.tuning import measure
from autopallas.tuning.measure import Timing
from benchmarks.programs import programs
from benchmarks.programs.program import Built

ORIGINAL, OPTIMIZED, MEMORY = "original", "optimized", "memory"


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


def _steps(built: Built, rounds: int) -> dict[str, Any]:
    function, arguments = built
    optimized, smaller = autopallas.optimize(function), autopallas.optimize(function, objective="memory")
    reference = jax.block_until_ready(jax.jit(function)(*arguments))
    measured = measure(
        {ORIGINAL: jax.jit(function), OPTIMIZED: optimized}, arguments,
        baseline=ORIGINAL, repetitions=rounds, seconds=180.0, reference=reference,
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
        "max_difference": timing.difference and timing.difference.maximum,
        "rounds": len(timing.cpu),
        "failure": timing.failure and str(timing.failure),
        "load": os.getloadavg()[0],
    }  # fmt: skip


def main() -> None:
    what, name, rounds = sys.argv[1:]
    (program,) = (one for one in programs() if one.name == name)
    built = program.build()
    found = _steps(built, int(rounds)) if what == "steps" else _first_step(built, what == OPTIMIZED)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
