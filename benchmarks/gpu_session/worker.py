"""The child process that touches the device: ``python -m benchmarks.gpu_session.worker [small|lower]``.

It reads requests, a line of JSON each, and answers with lines of JSON: "begin" names what it runs next, so that the
parent knows what hangs; "row" is a result; "done" ends the answer, and says whether the device is "sick": after an
error in a kernel no program runs any more in this process.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from autopallas import compat
from autopallas.sites.device import Device, gpu_properties
from autopallas.sites.interpret import mode, settled
from benchmarks import environment
from benchmarks.gpu import BYTES_PER_SECOND, OPERATIONS_PER_SECOND
from benchmarks.gpu_benchmark import ORIGINAL, Check, Timed
from benchmarks.gpu_session.clock import Times, timed
from benchmarks.gpu_session.errors import ROW_TOLERANCE, compared, poison, same_bits
from benchmarks.gpu_session.tasks import OPERATIONS, Task, has_products, tasks

Send = Callable[[str, Mapping[str, Any]], None]

_AGAINST_ORIGINAL = 2 * ROW_TOLERANCE
"""Largest error of a row against the original in its own dtype, which is rounded too; a row that cancels to almost
nothing is measured against the root mean square of all, since the original's dq had errors of 0.35 of such rows."""


@cache
def _named(small: bool, lower: bool) -> dict[str, Task]:
    from autopallas.compile.gpu import H100

    return {task.name: task for task in tasks(small, H100 if lower else Device.current(), OPERATIONS)}


def serve(small: bool, lower: bool) -> None:
    """Answers requests until there are none."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps what libraries print out of the answers

    def send(event: str, content: Mapping[str, Any]) -> None:
        answers.write(json.dumps({"event": event, **content}) + "\n")
        answers.flush()

    for line in sys.stdin:
        request = json.loads(line)
        sick = False
        try:
            with mode(True) if small else nullcontext():
                if request["do"] == "hello":
                    send("row", _hello())
                elif request["do"] == "compile":
                    send("row", _compile(_named(small, lower)[request["task"]], request["name"], lower))
                else:
                    sick = _run(_named(small, lower)[request["task"]], request, send)
        except Exception as problem:
            traceback.print_exc()
            send("row", {"failure": _words(problem)})
        send("done", {"sick": sick})


def _hello() -> dict[str, Any]:
    device = Device.of(jax.devices()[0])
    found = gpu_properties(device.kind)
    return {
        "platform": device.platform,
        "kind": device.kind,
        "capability": found.capability if found is not None else "",
        "processors": found.processors if found is not None else 0,
        "cuda": compat.cuda_runtime(),
        "runtime": str(getattr(jax.devices()[0].client, "platform_version", "")),
        "flags": environment.flags(),
        "versions": environment.versions(),
    }


def _words(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {problem}"[:1500]


def _healthy() -> bool:
    try:
        return float(jax.block_until_ready(jnp.arange(8.0) + 1)[3]) == 4.0
    except Exception:
        return False


def _program(task: Task, name: str) -> tuple[Callable[..., Any], Any]:
    """Returns a function and its arguments, or what makes them."""
    if task.check is not None:
        return (task.check.function if name == "function" else task.check.reference), task.check.arguments
    assert task.case is not None
    return task.case.candidates[name], task.case.arguments


def _types(arguments: Any) -> Any:
    made = jax.eval_shape(arguments) if callable(arguments) else arguments
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), made)


def _compiled(function: Callable[..., Any], arguments: Any) -> Any:
    return jax.jit(function).lower(*_types(arguments)).compile()


def _compile(task: Task, name: str, lower: bool) -> dict[str, Any]:
    """Compiles one program into the cache; ``lower``: only lowers it, for a Hopper GPU that is not here."""
    begin, failure = time.monotonic(), None
    try:
        function, arguments = _program(task, name)
        if lower:
            _lower(function, _types(arguments))
        else:
            _compiled(function, arguments)
    except Exception as problem:
        traceback.print_exc()
        failure = _words(problem)
    return {"program": name, "seconds": round(time.monotonic() - begin, 2), "failure": failure}


def _lower(function: Callable[..., Any], types: Any) -> None:
    """Lowers a function for an H100, which need not be here."""
    from autopallas.compile.gpu import H100
    from autopallas.kernels.gpu import processors

    described = AbstractDevice(device_kind=H100.kind, num_cores=processors(H100), platform="gpu")
    with H100.targeted(), settled(), use_abstract_mesh(AbstractMesh((), (), abstract_device=described)):
        jax.jit(function).trace(*types).lower(lowering_platforms=("cuda",))


def _run(task: Task, request: Mapping[str, Any], send: Send) -> bool:
    if task.kind == "copy":
        return _copy(send, request)
    if task.check is not None:
        return _check(task.check, request, send)
    assert task.case is not None
    return _Timing(task, task.case, request, send).run()


@contextmanager
def _turn(request: Mapping[str, Any]) -> Iterator[None]:
    """Waits until nobody else runs anything on the device, where the request names the file that tells."""
    if not request["lock"]:
        yield
        return
    with open(request["lock"], "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _copy(send: Send, request: Mapping[str, Any]) -> bool:
    array = jnp.ones((2**16 if request["small"] else 2**29,), jnp.bfloat16)
    copy = _compiled(lambda x: -x, (array,))
    jax.block_until_ready(copy(array))
    with _turn(request):
        found = timed({"copy": copy}, (array,), profile=request["profile"])["copy"]
    assert found.spread is not None
    rate = 2 * array.nbytes / found.spread.median / 1e9
    send("row", {"candidate": "copy", **_figures(found), "gigabytes_per_second": _digits(rate)})
    return False


def _check(check: Check, request: Mapping[str, Any], send: Send) -> bool:
    """Compares a result with the reference, and repeats it; results must agree in every bit."""
    row: dict[str, Any] = {"candidate": "autopallas", "tolerance": check.tolerance, "row_tolerance": ROW_TOLERANCE}
    send("begin", {"name": "autopallas"})
    try:
        run, exact = (_compiled(f, check.arguments) for f in (check.function, check.reference))
        with _turn(request):
            made = check.arguments() if callable(check.arguments) else check.arguments
            poison(jax.tree.leaves(jax.eval_shape(check.function, *made)))
            first = jax.tree.leaves(jax.block_until_ready(run(*made)))
            wanted = jax.tree.leaves(exact(*made))
            errors = compared(first, wanted)
            del wanted
            row |= {"max_error": errors.largest, "total_error": errors.total, "row_error": errors.row}
            repetitions = request["repetitions"]
            same = [same_bits(first, jax.tree.leaves(run(*made))) for _ in range(repetitions - 1)]
            row |= {"repetitions": repetitions, "differing": sum(not bool(x) for x in same)}
        row["wrong"] = bool(errors.largest > check.tolerance or errors.row > ROW_TOLERANCE or row["differing"])
    except Exception as problem:
        traceback.print_exc()
        row |= {"failure": _words(problem), "wrong": True}
    send("row", row)
    return "failure" in row and not _healthy()


_KEPT: dict[tuple[str, str], tuple[Any, float]] = {}
"""Our kernels that were compiled, by (operation and case, candidate), and in how many seconds: originals are timed
beside them."""


@dataclass
class _Timing:
    """Times the candidates of a case that are asked for; each is compiled, and runs once, before any is timed.

    What XLA has no products of is compiled before the turn: where it has, it times their forms while it compiles.

    Attributes:
      task, case, request: what is timed.
      send: tells what happens.
      rows: by candidate.
      failed: the candidates whose row was sent with a failure.
    """

    task: Task
    case: Timed
    request: Mapping[str, Any]
    send: Send
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)

    def run(self) -> bool:
        """Returns whether the device is sick."""
        for name in self.request["names"]:
            self.rows[name] = {"candidate": name, "ours": name in self.case.block_sizes}
            if name in self.case.block_sizes:
                self.rows[name]["block_sizes"] = self.case.block_sizes[name].to_dict()
                if not has_products(self.task.operation):
                    self._attempt(name, self._compiled)
        with _turn(self.request):
            return self._timed()

    def _attempt(self, name: str, run: Callable[[str], Any]) -> Any:
        self.send("begin", {"name": name})
        try:
            return run(name)
        except Exception as problem:
            traceback.print_exc()
            self.failed.add(name)
            self.send("row", self.rows[name] | {"failure": _words(problem), "wrong": self.rows[name]["ours"]})
            return None

    def _compiled(self, name: str) -> Any:
        case = self.case
        place = f"{self.task.operation} {case.name} {case.dtype} {case.direction}", name
        if place not in _KEPT:
            begin = time.monotonic()
            made = _compiled(case.candidates[name], case.arguments)
            _KEPT[place] = made, time.monotonic() - begin
        made, seconds = _KEPT[place] if name in case.block_sizes else _KEPT.pop(place)
        self.rows[name]["compile_seconds"] = round(seconds, 2)
        return made

    def _timed(self) -> bool:
        case, rows = self.case, self.rows
        given = case.arguments() if callable(case.arguments) else case.arguments

        def once(name: str) -> Any:
            made = self._compiled(name)
            rows[name]["temporary_bytes"] = int(made.memory_analysis().temp_size_in_bytes)
            jax.block_until_ready(made(*given))
            return made

        ready: dict[str, Any] = {}
        for name in rows:
            if name not in self.failed:
                made = self._attempt(name, once)
                ready |= {} if made is None else {name: made}
            if name in self.failed and not _healthy():
                return True
        self.send("begin", {"name": ""})
        settings: Any = {"profile": self.request["profile"], "seconds": self.request["seconds"]}
        found = timed(ready, given, **settings) if ready else {}
        best = next((name for name in ready if name in case.block_sizes), None)
        for name, times in found.items():
            row = rows[name] | _figures(times)
            spread = times.spread
            assert spread is not None
            row["teraflops"] = _digits(case.operations / spread.median / 1e12)
            if case.bytes_moved / BYTES_PER_SECOND > case.operations / OPERATIONS_PER_SECOND:
                row["gigabytes_per_second"] = _digits(case.bytes_moved / spread.median / 1e9)
            if name == ORIGINAL and best is not None:
                ours = found[best].spread
                assert ours is not None
                kernels, originals = (jax.tree.leaves(ready[n](*given)) for n in (best, ORIGINAL))
                errors = compared(kernels, originals, smallest=1.0)
                row |= {"best": best, "times_as_fast": _digits(spread.median / ours.median), "row_error": errors.row}
                row["wrong"] = errors.row > _AGAINST_ORIGINAL
            self.send("row", row)
        return False


def _figures(times: Times) -> dict[str, Any]:
    """Returns microseconds by both clocks, and those of each kernel."""
    spread = times.spread
    assert spread is not None
    micro = [_digits(x * 1e6) for x in (spread.median, spread.lower, spread.upper)]
    loops = sorted(times.loop)
    return {
        **dict(zip(("microseconds", "microseconds_lower", "microseconds_upper"), micro, strict=True)),
        "clock": times.clock,
        "loop_microseconds": _digits(loops[len(loops) // 2] * 1e6) if loops else None,
        "kernels": {name[:120]: _digits(t * 1e6) for name, t in list(times.kernels.items())[:12]},
    }


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


if __name__ == "__main__":
    asked = sys.argv[1] if len(sys.argv) > 1 else ""
    serve(small=asked == "small", lower=asked == "lower")
