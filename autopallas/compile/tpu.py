"""Compiles ahead of time for TPUs, on a machine without one, and tells what a program needs and roughly costs.

The TPU's compiler comes with the extra ``tpu-check``.  It runs in a child process, because it ends the process on some
programs, and because the simulation of the scheduled program has to be requested before it is loaded.  A function is
traced and lowered here, which needs no TPU software, and passed on as a serialized module.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import IO, Any, Literal

from autopallas.compat import ArrayFunction, PyTree
from autopallas.compile.lowering import lowered
from autopallas.compile.subprocess import end
from autopallas.kernels import tpu
from autopallas.kernels.tpu_schedule_tracing import simulated
from autopallas.sites.device import Device

__all__ = [
    "GENERATIONS",
    "Child",
    "Compilation",
    "Compiler",
    "Generation",
    "Operation",
    "compile_for",
    "lowered_for",
    "missing",
]


@dataclass(frozen=True, slots=True)
class Generation:
    """One generation of TPUs, as one device of it appears to JAX.

    Attributes:
      name: its name for ``--target``.
      kind: the ``device_kind`` of its devices.
      topology: the smallest topology that the compiler knows.
      cores: TensorCores in one device, in that topology.
      bytes_per_second: nominal bandwidth of a device's memory.
      operations_per_second: nominal peak of a device's matrix units, bfloat16.
      clock: nominal cycles per second, which convert simulated cycles to time.
      simulates: whether the compiler can simulate its programs.
    """

    name: str
    kind: str
    topology: str
    cores: int
    bytes_per_second: float
    operations_per_second: float
    clock: float
    simulates: bool = True

    @property
    def device(self) -> Device:
        """Device that implementations and tables are asked about."""
        return Device("tpu", self.kind)


# Bandwidths and peaks are the published ones of a chip, divided by its devices; clocks follow from the peaks.
GENERATIONS: Mapping[str, Generation] = MappingProxyType(
    {
        g.name: g
        for g in (
            Generation("tpu-v4", "TPU v4", "v4:2x2x1", 1, 1.228e12, 275e12, 1.05e9, simulates=False),
            Generation("tpu-v5e", "TPU v5 lite", "v5e:2x2", 1, 8.19e11, 197e12, 1.5e9),
            Generation("tpu-v5p", "TPU v5", "v5p:2x2x1", 2, 2.765e12, 459e12, 1.75e9),
            Generation("tpu-v6e", "TPU v6 lite", "v6e:2x2", 1, 1.64e12, 918e12, 1.75e9),
            Generation("tpu-v7x", "TPU7x", "tpu7x:2x2x1", 1, 3.69e12, 1153e12, 2.2e9),
        )
    }
)
"""All generations that programs can be compiled for."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a compiled program.

    Attributes:
      name: its name in the compiled module; a Pallas kernel's begins with the name given to its ``pallas_call``.
      kernel: whether it is a Pallas kernel.
      vmem_bytes: what it allocates in VMEM, as the compiler reports it; for a kernel blocks, their second buffers, and
        scratch.
      cycles: simulated cycles of one run; None if it was not simulated.
      runs: how often the loops around it run it.
    """

    name: str
    kernel: bool
    vmem_bytes: int
    cycles: int | None
    runs: int


@dataclass(frozen=True, slots=True)
class Compilation:
    """Information from the compiler about one function on one generation.

    Attributes:
      generation: the generation for which it was compiled.
      failure: None, or the compiler's error.
      stage: None, or where it failed.  "memory": it exceeds VMEM or the device's memory.  "died": the compiler ended
        the process.  "time": it was not done in time.
      temporary_bytes, argument_bytes, output_bytes: bytes of the device's memory.
      bytes_accessed, operations_counted: device memory read and written, and arithmetic; for kernels as stated by
        their ``cost_estimate``.
      operations: those for which the compiler allocated VMEM or simulated a schedule.
      seconds: the time that compiling took.
      note: why nothing was simulated, or an empty string.
    """

    generation: Generation
    failure: str | None = None
    stage: Literal["memory", "compile", "died", "time"] | None = None
    temporary_bytes: int = 0
    argument_bytes: int = 0
    output_bytes: int = 0
    bytes_accessed: int = 0
    operations_counted: int = 0
    operations: tuple[Operation, ...] = ()
    seconds: float = 0.0
    note: str = ""

    @property
    def vmem_bytes(self) -> int:
        """Largest number of bytes that one operation allocates in VMEM."""
        return max((operation.vmem_bytes for operation in self.operations), default=0)

    @property
    def cycles(self) -> int | None:
        """Simulated cycles of all operations, one after the other; None if a kernel was not simulated.

        Data read at run time counts as 0 in the simulation.
        """
        counted = [o for o in self.operations if o.cycles is not None]
        if self.failure is not None or not counted or any(o.kernel and o.cycles is None for o in self.operations):
            return None
        return sum((o.cycles or 0) * o.runs for o in counted)

    @property
    def seconds_of_memory(self) -> float:
        """Lower bound of the time from the memory's bandwidth."""
        moved = max(self.bytes_accessed, self.argument_bytes + self.output_bytes)
        return moved / self.generation.bytes_per_second

    @property
    def bound_seconds(self) -> float:
        """Lower bound of the time from bandwidth and arithmetic."""
        return max(self.seconds_of_memory, self.operations_counted / self.generation.operations_per_second)

    @property
    def estimated_seconds(self) -> float | None:
        """Time of simulated cycles or of memory traffic, whichever is slower; None if nothing was simulated."""
        cycles = self.cycles
        return None if cycles is None else max(cycles / self.generation.clock, self.seconds_of_memory)


def missing() -> str | None:
    """Returns why nothing can be compiled for TPUs here, or None."""
    for package in ("libtpu", "flatbuffers"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed; the extra tpu-check has it: in a clone, pip install '.[tpu-check]'"
    return None


def lowered_for(function: ArrayFunction, arguments: Sequence[PyTree], generation: str | Generation) -> bytes:
    """Lowers a function for one generation, and serializes it.  Needs no TPU software.

    Args:
      function: the function to trace with ``arguments``; its questions to Pallas about the TPU are answered for the
        generation.
      arguments: arrays, or anything with shape and dtype, in pytrees.
      generation: the generation, or its name.

    Raises:
      Exception: what tracing and lowering raise, such as a block shape that Pallas does not take.
    """
    target = _generation(generation)
    return lowered(function, arguments, target.device, target.cores)


def compile_for(
    function: ArrayFunction,
    arguments: Sequence[PyTree],
    generation: str | Generation,
    *,
    simulate: bool = False,
    seconds: float = 300.0,
) -> Compilation:
    """Compiles a function for a generation of TPUs that need not be present.

    Args:
      function: a function of ``arguments``, jitted or not.
      arguments: arrays, or anything with shape and dtype, in pytrees.
      generation: the generation, such as "tpu-v6e".
      simulate: whether to simulate the schedule too, which takes seconds per thousand steps of a kernel's grid.
      seconds: how long the compiler may take.

    Returns:
      Memory, VMEM and, if simulated, cycles.  An error of the compiler is a result too: ``failure`` and ``stage``.

    Raises:
      ValueError: there is no such generation.
      RuntimeError: the compiler is not installed.
      Exception: what tracing and lowering raise.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jnp.ones((128, 128))
      >>> if missing() is None:
      ...     assert compile_for(lambda x: x @ x, (x,), "tpu-v5e").failure is None
    """
    with Compiler(generation, simulate=simulate) as compiler:
        return compiler.compile(function, arguments, seconds=seconds)


def _generation(name: str | Generation) -> Generation:
    if isinstance(name, Generation):
        return name
    if name not in GENERATIONS:
        raise ValueError(f"no generation of TPUs is called {name!r}; there are {', '.join(GENERATIONS)}")
    return GENERATIONS[name]


@dataclass
class Compiler:
    """The TPU's compiler in a child process, for many programs of one generation: ``with Compiler(...) as compiler``.

    Attributes:
      generation: the generation, or its name.
      simulate: whether to simulate schedules.  A program on which the simulation fails is compiled without it.
      steps: how many steps of a kernel's grid to simulate, if they are alike; the reported cycles are those of all, and
        the beginning and end of a kernel count as often as this part.  None: all steps.
    """

    generation: str | Generation
    simulate: bool = False
    steps: int | None = 8
    _children: dict[bool, Child] = field(default_factory=dict)

    @property
    def target(self) -> Generation:
        """The generation itself."""
        return _generation(self.generation)

    @property
    def version(self) -> str:
        """Name and version of the compiler, as tables have them."""
        return f"libtpu {metadata.version('libtpu')}"

    def __enter__(self) -> Compiler:
        self.generation = self.target
        if (reason := missing()) is not None:
            raise RuntimeError(reason)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self._children.values():
            child.end()
        self._children.clear()

    def compile(
        self,
        function: ArrayFunction,
        arguments: Sequence[PyTree],
        *,
        seconds: float = 300.0,
        simulate: bool | None = None,
    ) -> Compilation:
        """Compiles a function, as :func:`compile_for` does.

        For a function with kernels, the simulation runs a program that computes their tables and takes some of their
        steps (:mod:`autopallas.kernels.tpu_schedule_tracing`); memory is that of the function itself.  ``simulate``
        overrides the compiler's own setting.
        """
        if simulate is False or not (self.simulate and self.target.simulates):
            return self.compile_lowered(
                lowered_for(function, arguments, self.target), seconds=seconds, simulate=simulate
            )
        begin = time.monotonic()

        def left() -> float:
            return max(seconds - (time.monotonic() - begin), min(seconds, 30.0))

        # A simulation reserves what kernels ask for beside what they take, so each gets less than half.
        vmem = tpu.generation(self.target.device).vmem
        with simulated(self.steps, vmem // 2 - vmem // 32) as record:
            module = lowered_for(function, arguments, self.target)
        if not (record.kernels or record.altered or record.unknown):
            return self.compile_lowered(module, seconds=seconds)
        found = self._asked(lowered_for(function, arguments, self.target), False, seconds)
        if found.failure is not None:
            return found
        if record.unknown:
            return replace(found, note=f"{record.unknown[0]} follows data, which a simulation reads as zeros")
        other = self.compile_lowered(module, seconds=left())
        if other.stage == "memory":
            # In main memory arrays need blocks that they did not need before, so it allows a quarter more.
            taken = max((o.vmem_bytes for o in found.operations if o.kernel), default=0)
            with simulated(self.steps, taken + taken // 4) as record:
                module = lowered_for(function, arguments, self.target)
            other = self.compile_lowered(module, seconds=left())
        if other.failure is not None:
            return replace(found, note=f"what would be simulated does not compile: {other.failure}")
        return replace(
            found,
            operations=tuple(_whole(operation, record.parts) for operation in other.operations),
            bytes_accessed=other.bytes_accessed,
            operations_counted=other.operations_counted,
            seconds=found.seconds + other.seconds,
            note=other.note,
        )

    def compile_lowered(self, module: bytes, *, seconds: float = 300.0, simulate: bool | None = None) -> Compilation:
        """Compiles a result of :func:`lowered_for`."""
        generation, simulate = self.target, self.simulate if simulate is None else simulate
        note = f"programs for {generation.kind} cannot be simulated" if simulate else ""
        begin = time.monotonic()
        if simulate and generation.simulates:
            found = self._asked(module, True, seconds)
            if found.stage not in ("died", "time"):
                return found
            note = f"the simulation failed: {found.failure}"
        left = max(seconds - (time.monotonic() - begin), min(seconds, 30.0))
        found = self._asked(module, False, left)
        return Compilation(**{name: getattr(found, name) for name in _FIELDS if name != "note"}, note=note)

    def _asked(self, module: bytes, simulate: bool, seconds: float) -> Compilation:
        generation = self.target
        if simulate not in self._children:
            self._children[simulate] = Child(partial(_started, generation.topology, simulate))
        child = self._children[simulate]
        begin = time.monotonic()
        answer = child.ask(module, seconds)
        took = round(time.monotonic() - begin, 3)
        if "failure" in answer:
            if answer["stage"] in ("died", "time"):
                child.end()
                del self._children[simulate]
            return Compilation(generation, answer["failure"], answer["stage"], seconds=took)
        operations = tuple(Operation(**operation) for operation in answer.pop("operations"))
        return Compilation(generation, operations=operations, seconds=took, **answer)


def _whole(operation: Operation, parts: Mapping[str, float]) -> Operation:
    """Scales the cycles of an operation of which a part was simulated to those of the whole."""
    part = parts.get(re.sub(r"(\.\d+)*$", "", operation.name), 1.0) if operation.kernel else 1.0
    return operation if operation.cycles is None else replace(operation, cycles=round(operation.cycles * part))


_PROCESS = Path(__file__).with_name("tpu_process.py")
_FIELDS = tuple(Compilation.__dataclass_fields__)


class Child:
    """One child process: a module's file goes in, a line of JSON comes out.

    Args:
      start: starts the process; takes a folder that lives as long as it does, and a file for its standard error.
    """

    def __init__(self, start: Callable[[Path, IO[bytes]], subprocess.Popen[bytes]]):
        self._folder = tempfile.TemporaryDirectory(prefix="autopallas-")
        folder = Path(self._folder.name)
        self._log = folder / "log"
        with open(self._log, "wb") as log:
            self._process = start(folder, log)

    def ask(self, module: bytes, seconds: float) -> dict[str, Any]:
        """Returns the child's answer; a failure if it dies or takes too long."""
        path = Path(self._folder.name) / "module"
        path.write_bytes(module)
        sender, receiver = self._process.stdin, self._process.stdout
        assert sender is not None
        assert receiver is not None
        try:
            sender.write(json.dumps(str(path)).encode() + b"\n")
            sender.flush()
        except OSError:
            return {"stage": "died", "failure": self._last_words()}
        line = _line(receiver, time.monotonic() + seconds)
        if line is None:
            return {"stage": "time", "failure": f"the compiler was not done after {seconds:.0f} seconds"}
        if not line.endswith(b"\n"):
            return {"stage": "died", "failure": self._last_words()}
        return dict(json.loads(line))

    def _last_words(self) -> str:
        status = self._process.wait()
        text = self._log.read_text(errors="replace")
        fatal = [line for line in text.splitlines() if re.match(r"F\d{4} ", line)]
        said = (fatal or text.strip().splitlines()[-1:] or [""])[0]
        return f"the compiler ended with status {status}: {said.strip()[:400]}"

    def end(self) -> None:
        end(self._process)
        self._folder.cleanup()


def _started(topology: str, simulate: bool, folder: Path, log: IO[bytes]) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # otherwise a lock file ends the second of two processes
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_STDERR_LOG_LEVEL": "3",
        "JAX_ENABLE_X64": "1",  # keeps the module's types as they are
    }
    if simulate:
        given = os.environ.get("LIBTPU_INIT_ARGS", "")
        environment["LIBTPU_INIT_ARGS"] = f"{given} --xla_jf_dump_static_llo_profile_to={folder}".strip()
    return subprocess.Popen(
        [sys.executable, "-P", str(_PROCESS), topology],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        env=environment,
    )


def _line(stream: IO[bytes], until: float) -> bytes | None:
    """Reads the next line; returns it without its end if the stream ends, and None if it does not come in time."""
    got = b""
    while not got.endswith(b"\n"):
        ready, _, _ = select.select([stream], [], [], max(until - time.monotonic(), 0.0))
        if not ready:
            return None
        part = os.read(stream.fileno(), 65536)
        if not part:
            break
        got += part
    return got
