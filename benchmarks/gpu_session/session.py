"""Runs the tasks stage by stage, in children that may hang or die, until the time is up."""

from __future__ import annotations

import datetime
import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu_session.children import Child, Role, settings
from benchmarks.gpu_session.compile_ahead import Pool
from benchmarks.gpu_session.journal import Identity, Journal
from benchmarks.gpu_session.summary import summary
from benchmarks.gpu_session.tasks import STAGES, Task

__all__ = ["Plan", "Session", "clocks"]

_LIMITS = {"check": 120.0, "time": 100.0, "original": 120.0, "copy": 60.0}
"""Seconds after which a task is taken to hang; a candidate that hangs is left out, and the task asked for again."""
_RESERVE = 6.0
"""Seconds before the end that no child is waited for."""


@dataclass(frozen=True)
class Plan:
    """What the command line asks for.

    Attributes:
      small: whether it is a dry run.
      stages: those to run.
      until: when it has to end, by ``time.monotonic``.
      jobs: the number of children that compile.
      repetitions: of each call in stage 3.
      seconds: for the loops of one case.
      cache: the folder of compiled programs.
      keep_going: whether to go on after a fault in stage 0.
      shared: whether other calls use the device too, in turns.
      loops: whether times are those of loops alone.
    """

    small: bool
    stages: Sequence[int]
    until: float
    jobs: int
    repetitions: int
    seconds: float
    cache: Path
    keep_going: bool
    shared: bool = False
    loops: bool = False

    @property
    def patience(self) -> float:
        """How many times as long as its limit a task may take: interpreted, or behind the turns of other calls."""
        return 5.0 if self.small or self.shared else 1.0

    @property
    def lock(self) -> str:
        """The file that whoever runs something on the device holds meanwhile; empty where nobody else does."""
        return str(self.cache.absolute() / "device.lock") if self.shared else ""


@dataclass
class Session:
    """One call of the command.

    Attributes:
      plan, journal, identity: as given.
      versions: of each operation's kernels.
      child: the worker that runs tasks.
      role: what that worker was started for.
      faults: names of rows of this call that are wrong.
      skipped: names of tasks that were not run.
      say: prints a line.
    """

    plan: Plan
    journal: Journal
    identity: Identity
    versions: Mapping[str, str]
    child: Child | None = None
    role: Role = "check"
    faults: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    say: Callable[[str], None] = lambda line: print(line, flush=True)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    # ------------------------------------------------------------------ stages

    def run(self, tasks: Sequence[Task], ahead: Sequence[Task]) -> None:
        """Runs the stages; stops behind stage 0 if it finds a fault.

        Args:
          tasks: those of all stages, in order.
          ahead: those whose kernels are compiled ahead; in a dry run they are only lowered.
        """
        pool = Pool(self)
        try:
            for stage in self.plan.stages:
                begin = time.monotonic()
                self._begin("time" if stage in (2, 5) else "check")
                if stage == 0 and 1 in self.plan.stages and not self.plan.small:
                    # While one process begins, the others compile what it needs next.
                    pool.add(task for task in ahead if task.stage in {0, 2}.intersection(self.plan.stages))
                elif stage == 1:
                    wanted = (0, 2, 3) if self.plan.small else {2}.intersection(self.plan.stages)
                    pool.add(task for task in ahead if task.stage in wanted)
                    pool.finish()
                elif stage > 2 and 1 in self.plan.stages and not self.plan.small:
                    pool.add(task for task in ahead if task.stage == stage)
                if stage in (2, 5):  # nothing else runs beside what is timed
                    pool.finish()
                for task in tasks:
                    if task.stage == stage:
                        self._task(task)
                took = round(time.monotonic() - begin, 1)
                self.note({"part": "clocks", "stage": stage, "seconds": took, **clocks()})
                self.archive()
                self.say(f"stage {stage}, {STAGES[stage]}: {took:.0f} s, {len(self.faults)} faults so far")
                if stage == 0 and self.faults and not self.plan.keep_going:
                    self.say("stage 0 has faults, so nothing else is run (--keep-going goes on)")
                    return
        finally:
            pool.stop()
            self.end()

    def _begin(self, role: Role) -> None:
        """Ends a worker that was started for something else, whose memory those that compile would lack."""
        if role != self.role and not self.plan.small:
            self.end()
        self.role = role

    def end(self) -> None:
        if self.child is not None:
            self.child.end()
            self.child = None

    @property
    def left(self) -> float:
        return self.plan.until - _RESERVE - time.monotonic()

    def done(self, task: Task) -> dict[str, dict[str, Any]]:
        """Returns the task's rows that are known, by candidate."""
        rows = self.journal.reusable(self.identity, self.versions)
        return {row["candidate"]: row for row in rows if row.get("task") == task.name and "candidate" in row}

    def _task(self, task: Task) -> None:
        known = self.done(task)
        names = [name for name in task.candidates if name not in known]
        if task.kind == "original":
            names = [*self._best(task), *names] if names else []
        while names:
            if self.left <= 0:
                self.skipped.append(task.name)
                return
            names = self._asked(task, names)

    def _best(self, task: Task) -> list[str]:
        """Returns our fastest candidate of a case, whose time stands beside the original's."""
        rows = self.journal.reusable(self.identity, self.versions)
        wanted = task.name.replace(" original ", " time ")
        timed = [r for r in rows if r.get("task") == wanted and r.get("ours") and r.get("microseconds")]
        return [min(timed, key=lambda row: float(row["microseconds"]))["candidate"]] if timed else []

    def _asked(self, task: Task, names: Sequence[str]) -> list[str]:
        """Asks a child for rows; returns the names that have to be asked for again, after one hung or broke it."""
        if self.child is None:
            small = self.plan.small
            environ = settings(self.role, self.plan.cache, small, self.plan.shared)
            self.child = Child("small" if small else "", environ, self.log("run"))
        limit = _LIMITS[task.kind] * self.plan.patience
        request = {
            "do": "run", "task": task.name, "names": list(names), "small": self.plan.small,
            "seconds": self.plan.seconds, "repetitions": self.plan.repetitions if task.stage == 3 else 2,
            "lock": self.plan.lock, "profile": not (self.plan.small or self.plan.loops),
        }  # fmt: skip
        running, told, own_limit = "", set(), time.monotonic() + min(limit, self.left)
        for answer in self.child.ask(request, own_limit):
            if answer["event"] == "begin":
                running = answer["name"]
            elif answer["event"] == "row":
                row = {k: v for k, v in answer.items() if k != "event"}
                told.add(row.get("candidate", ""))
                if "candidate" not in row:  # the request itself failed
                    row = {"candidate": names[0], "wrong": True} | row
                    told |= set(names)
                if not (task.kind == "original" and row["candidate"] not in task.candidates):
                    self._found(task, row)
            elif answer["event"] == "done":
                if answer["sick"]:
                    self.end()
                    return [name for name in names if name not in told]
                return []
            else:
                self.end()
                if answer["event"] == "late" and self.left <= 1.0:
                    self.skipped.append(task.name)
                    return []
                return self._broken(task, names, told, running, answer["event"], limit)
        return []

    def _broken(
        self, task: Task, names: Sequence[str], told: set[str], running: str, event: str, limit: float
    ) -> list[str]:
        """Writes the row of what hung or ended its process; returns what is left of the task."""
        failure = f"not done after {limit:.0f} s" if event == "late" else "the process ended"
        culprit = running or next((name for name in names if name not in told), names[0])
        whole = not running  # while candidates are timed in turns, none can be blamed
        ours = task.kind == "check" or culprit.startswith("pallas_gpu")
        for name in [n for n in names if n not in told] if whole else [culprit]:
            self._found(task, {"candidate": name, "failure": failure, "wrong": ours, "ours": ours})
            told.add(name)
        return [name for name in names if name not in told]

    def _found(self, task: Task, row: dict[str, Any]) -> None:
        of = task.check or task.case
        described = {} if of is None else {"shape": of.name, "dtype": of.dtype, "direction": of.direction}
        part = {"copy": "ceiling", "check": "repetition" if task.stage == 3 else "correctness"}.get(task.kind, "time")
        self.note({"task": task.name, "stage": task.stage, "part": part, **described, **row}, task.operation)
        wrong = bool(row.get("wrong"))
        if wrong:
            self.faults.append(f"{task.name}: {row['candidate']}")
        self.say(f"{task.name}: {_told(row)}{'  WRONG' if wrong else ''}")

    def note(self, row: Mapping[str, Any], kernel: str = "") -> None:
        """Writes a row into the journal."""
        common = {
            "kernel": kernel, "kernel_version": self.versions.get(kernel, ""), "commit": self.identity.commit,
            "jax": self.identity.jax, "device": self.identity.device,
            "evidence": "simulated" if self.plan.small else "measured",
            "date": datetime.date.today().isoformat(),
        }  # fmt: skip
        with self._lock:
            self.journal.add(common | dict(row))

    def log(self, role: str) -> Path:
        return self.journal.folder / f"{role}.log"

    def archive(self) -> None:
        """Writes the archive with all that is known."""
        text = summary(self.journal.rows, self.identity)
        self.journal.archive({"summary.md": text}, [self.log("run"), self.log("compile")])


def _told(row: Mapping[str, Any]) -> str:
    """Returns a row in words."""
    name = row["candidate"]
    if row.get("failure"):
        return f"{name}: {row['failure'][:300]}"
    if row.get("microseconds") is not None:
        more = [f"{row['teraflops']:.4g} TFLOP/s"] if row.get("teraflops") else []
        more += [f"ours is {row['times_as_fast']:.3g} times as fast"] if row.get("times_as_fast") else []
        more += [f"{row['gigabytes_per_second']:.4g} GB/s"] if row.get("gigabytes_per_second") else []
        return f"{name}: {row['microseconds']:.4g} us by {row['clock']}" + "".join(f", {text}" for text in more)
    return (
        f"{name}: error {row['max_error']:.1e} of {row['tolerance']:.0e}, in rows {row['row_error']:.1e} of "
        f"{row['row_tolerance']:.0e}, {row['differing']} of {row['repetitions'] - 1} repetitions differ"
    )


_ASKED = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.draw,power.limit,temperature.gpu"


def clocks() -> dict[str, str]:
    """Returns what nvidia-smi says of the GPU's clocks, or nothing."""
    try:
        command = ["nvidia-smi", f"--query-gpu={_ASKED}", "--format=csv,noheader"]
        told = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True, env=os.environ)
        values = told.stdout.strip().splitlines()[0].split(", ")
    except (OSError, subprocess.SubprocessError, IndexError):
        return {}
    return dict(zip(_ASKED.split(","), values, strict=False))
