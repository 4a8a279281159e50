"""Compiles kernels ahead, in several processes, into the cache of compiled programs."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from benchmarks.gpu_session.children import Child, Role, settings
from benchmarks.gpu_session.tasks import Task, of_kernels

__all__ = ["Pool"]

_LIMIT = 150.0
"""Seconds after which a program is given up."""


class Limits(Protocol):
    """Interface of a plan: see :class:`.session.Plan`."""

    @property
    def small(self) -> bool: ...

    @property
    def jobs(self) -> int: ...

    @property
    def cache(self) -> Path: ...


class Owner(Protocol):
    """Interface of the session that wants programs compiled."""

    faults: list[str]

    @property
    def plan(self) -> Limits: ...

    @property
    def left(self) -> float: ...

    def done(self, task: Task) -> Mapping[str, Mapping[str, Any]]: ...

    def note(self, row: Mapping[str, Any], kernel: str = "") -> None: ...

    def say(self, line: str) -> None: ...

    def log(self, role: str) -> Path: ...


class Pool:
    """Threads with a child process each.  In a dry run programs are only lowered."""

    def __init__(self, owner: Owner):
        self._owner = owner
        self._wanted: deque[tuple[Task, str]] = deque()
        self._begun: set[tuple[str, str]] = set()
        self._threads: list[threading.Thread] = []

    def add(self, tasks: Iterable[Task]) -> None:
        """Compiles the kernels of tasks that have no rows yet, those with a priority first."""
        for task in sorted(tasks, key=lambda task: (task.stage, task.case.priority if task.case is not None else 0)):
            known = self._owner.done(task)
            for name in of_kernels(task):
                if name == "reference" and self._owner.plan.small:
                    continue
                if (task.name, name) in self._begun or name in known or (task.check is not None and known):
                    continue
                self._begun.add((task.name, name))
                self._wanted.append((task, name))
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        while len(self._threads) < min(self._owner.plan.jobs, len(self._wanted)):
            self._threads.append(threading.Thread(target=self._work, daemon=True))
            self._threads[-1].start()

    def finish(self) -> None:
        """Waits until all is compiled, or the time is up."""
        for thread in self._threads:
            thread.join()

    def stop(self) -> None:
        """Begins nothing more, and waits for what has begun."""
        self._wanted.clear()
        self.finish()

    def _work(self) -> None:
        child: Child | None = None
        role: Role | None = None
        try:
            while self._owner.left > 0:
                try:
                    task, name = self._wanted.popleft()
                except IndexError:
                    return
                plan = self._owner.plan
                wanted: Role = "compile checks" if task.kind == "check" else "compile"
                if child is not None and role != wanted and not plan.small:
                    child.end()
                    child = None
                if child is None:
                    mode, role = "lower" if plan.small else "", wanted
                    child = Child(mode, settings(role, plan.cache, plan.small), self._owner.log("compile"))
                row = _asked(child, task, name, self._owner.left)
                if row is None:
                    return
                if row.pop("ended", False):
                    child.end()
                    child = None
                self._note(task, name, row)
        finally:
            if child is not None:
                child.end()

    def _note(self, task: Task, name: str, row: dict[str, Any]) -> None:
        ours = name == "function" or name.startswith("pallas_gpu")
        wrong = ours and row["failure"] is not None
        self._owner.note({"part": "compile", "of": task.name, "stage": 1, **row, "wrong": wrong}, task.operation)
        if wrong:
            self._owner.faults.append(f"compiling {task.name}: {name}")
        if row["failure"]:
            self._owner.say(f"compiling {task.name}: {name}: {row['failure'][:300]}{'  WRONG' if wrong else ''}")


def _asked(child: Child, task: Task, name: str, left: float) -> dict[str, Any] | None:
    """Returns the child's row; "ended" if the child is of no use any more; None if the time of all is up."""
    until = time.monotonic() + min(_LIMIT, left)
    row: dict[str, Any] = {"program": name, "failure": "the process ended"}
    for answer in child.ask({"do": "compile", "task": task.name, "name": name}, until):
        if answer["event"] == "row":
            row |= {key: value for key, value in answer.items() if key != "event"}
        elif answer["event"] == "late":
            return (
                None if left < _LIMIT else {"program": name, "failure": f"not done after {_LIMIT:.0f} s", "ended": True}
            )
        elif answer["event"] == "died":
            return row | {"ended": True}
    return row
