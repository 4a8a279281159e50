"""Peak resident memory of one candidate, measured in a process of its own.

The compiler's own account of temporary memory leaves out what XLA:CPU allocates inside fused loops.  What a program
really occupied is known to the operating system, but only as the high-water mark of a whole process: so each
candidate gets a process, which compiles it, notes what is resident, runs it, and reads the mark.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from benchmarks import environment
from benchmarks.case import Case, benchmark

SECONDS = 120.0
"""After which a child is given up."""


def peaks(wanted: Iterable[tuple[Case, str]], *, processes: int = 2) -> dict[tuple[Case, str], int]:
    """Bytes that became resident in the first runs of candidates, as far as they could be measured.

    Args:
      wanted: pairs of a case and the name of one of its candidates.
      processes: how many to measure at a time; memory, unlike time, does not suffer from company.
    """
    pairs = list(wanted)
    with ThreadPoolExecutor(processes) as pool:
        found = pool.map(lambda pair: _in_child(*pair), pairs)
    return {pair: peak for pair, peak in zip(pairs, found, strict=True) if peak is not None}


def _in_child(case: Case, candidate: str) -> int | None:
    order = json.dumps({"case": asdict(case), "candidate": candidate})
    try:
        # As a user's process would have it, without the settings that keep freed memory.
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.resident", order],
            env=environment.without_allocator_settings(),
            cwd=Path(__file__).parent.parent,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=True,
        )
        return int(done.stdout.split()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError, OSError):
        return None


def measure_here(case: Case, candidate: str, runs: int = 2) -> int:
    """Bytes by which this process's peak exceeds what was resident before the first run."""
    offered = benchmark(case.kernel)
    arguments = offered.arguments(case)
    compiled = jax.jit(offered.candidates(case)[candidate].function).lower(*arguments).compile()
    _forget_peak()
    before = _resident("VmRSS")
    for _ in range(runs):
        jax.block_until_ready(compiled(*arguments))
    return max(0, _resident("VmHWM") - before)


def _forget_peak() -> None:
    """Compiling needs memory too: it is given back, and the mark set down, so that neither hides what the run needs."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError):
        pass  # then a run that needs less than compiling did is shown as that much


def _resident(field: str) -> int:
    # ru_maxrss, the portable way, survives exec: a child starts with its parent's peak.  /proc has this program's own,
    # on Linux; elsewhere this fails, and nothing is reported.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def _main(order: str) -> None:
    asked: dict[str, Any] = json.loads(order)
    fields = asked["case"] | {"sizes": tuple((letter, size) for letter, size in asked["case"]["sizes"])}
    print(measure_here(Case(**fields), asked["candidate"]))


if __name__ == "__main__":
    _main(sys.argv[1])
