"""Processes that judge programs, each watched: one that does not answer in time is ended, and its program is found."""

from __future__ import annotations

import functools
import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .judge import Verdict

__all__ = ["SECONDS", "Judging", "verdicts"]

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 120.0
"""After so many seconds of a processor without an answer a program hangs.  The slowest took a tenth of it."""
_LIFE = 400
"""So many programs are judged by one process: compiled code is never given back entirely."""

_FASTER = "--xla_cpu_use_fusion_emitters=false"
"""Halves the time of compiling, where XLA knows it.  What it makes of ``x / 3`` differs from place to place, so that
``x / 3 - max(x / 3)`` need not be 0: a program that is wrong is judged again without it, and at level 1 at least: at
level 0 a large fusion may read what was never written, whatever made it (JAX 0.10.2)."""


@functools.cache
def _environment(quick: bool, level: int) -> dict[str, str]:
    level = level if quick else max(level, 1)
    flags = f"--xla_backend_optimization_level={level} --xla_llvm_disable_expensive_passes={str(not level).lower()}"
    own = {name: value for name, value in os.environ.items() if not name.startswith(("AUTOPALLAS_", "XLA_", "JAX_"))}
    own |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{flags} {_FASTER}", "PYTHONPATH": str(ROOT)}
    own |= {"OMP_NUM_THREADS": "1"}
    if level or not quick:
        return own | {"XLA_FLAGS": flags}
    tried = subprocess.run(
        [sys.executable, "-c", "import jax; jax.devices()"], env=own, capture_output=True, check=False
    )
    return own if tried.returncode == 0 else own | {"XLA_FLAGS": flags}


def _seconds_of(process: int) -> float:
    """The seconds of a processor that a process has used; those of the clock where the system does not tell."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return time.monotonic()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Judging:
    """One such process, started when it is first needed."""

    def __init__(self, fault: str | None = None, seconds: float = SECONDS, quick: bool = True, level: int = 0):
        self._fault, self._seconds = fault, seconds
        self._environment = _environment(quick, level)
        self._process: subprocess.Popen[str] | None = None
        self._judged = 0

    def __call__(self, seed: int, plain: Sequence[str] = ()) -> Verdict:
        """The verdict on a program."""
        (verdict,) = self.ask(seed, plain, ())
        return verdict

    def ask(self, seed: int, plain: Sequence[str], faults: Sequence[str]) -> list[Verdict]:
        """The verdicts on a program with the faults that make a difference to it, or without any."""
        if self._process is None or self._judged >= _LIFE:
            self.close()
            self._start()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([seed, list(plain), list(faults)]) + "\n")
        process.stdin.flush()
        self._judged += 1
        allowed, begun = self._seconds + 60.0 * (self._judged == 1), _seconds_of(process.pid)
        ready: list[Any] = []
        for _ in range(100):  # one that waits for something uses no processor, and is given ten times as long
            ready, _, _ = select.select([process.stdout], [], [], allowed / 10)
            if ready or _seconds_of(process.pid) - begun > allowed:
                break
        line = process.stdout.readline() if ready else ""
        if line:
            return [Verdict(**fields) for fields in json.loads(line)]
        said = "hang" if not ready else "crash"
        process.kill()
        complaint = f"no answer within {self._seconds:g} s" if not ready else f"the process ended ({process.wait()})"
        self.close()
        return [Verdict(seed, kind=said, complaints=[complaint], badness=float("inf"))]

    def _start(self) -> None:
        command = [sys.executable, "-m", "tests.fuzz.worker"]
        command += ["--fault", self._fault] if self._fault else []
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._judged = 0

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def verdicts(
    seeds: Iterable[int], workers: int, fault: str | None = None, faults: Sequence[str] = (), level: int = 0
) -> Iterator[list[Verdict]]:
    """The verdicts on each of some programs as they come; closing the iterator ends the processes.

    Args:
      seeds: of the programs.
      workers: how many processes judge.
      fault: what each of them has put back, from its start on.
      faults: those that are put back for each program, one at a time.
      level: XLA's optimization level.
    """
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    total = 0
    for seed in seeds:
        waiting.put(seed)
        total += 1
    done: queue.SimpleQueue[Any] = queue.SimpleQueue()
    stopping = threading.Event()

    def work() -> None:
        judging, again = Judging(fault, level=level), Judging(fault, quick=False, level=level)
        try:
            while not stopping.is_set():
                seed = waiting.get_nowait()
                found = judging.ask(seed, (), faults)
                done.put(again.ask(seed, (), faults) if not faults and found[0].kind else found)
        except queue.Empty:
            pass
        except Exception as error:
            done.put(error)
        finally:
            judging.close()
            again.close()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(workers)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(total):
            found = done.get()
            if isinstance(found, Exception):
                raise found
            yield found
    finally:
        stopping.set()
        for thread in threads:
            thread.join()
