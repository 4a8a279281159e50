"""Compiles ahead of time for an H100, on a machine without a GPU, and tells what the program needs.

XLA's compiler for CUDA, ptxas and libdevice come with the extra ``gpu-check``.  They run in a child process, since the
environment has to tell them what to write down before they are loaded.  A function is traced and lowered here, which
needs none of them, and passed on as a serialized module.  Without a GPU there is no autotuning, so the code that XLA
generates here for other programs says nothing about their speed.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO

from autopallas import compat
from autopallas.compat import ArrayFunction, PyTree
from autopallas.compile.lowering import lowered
from autopallas.compile.tpu import Child
from autopallas.sites.device import Device

__all__ = ["H100", "Compilation", "Compiler", "Kernel", "compile_for", "lowered_for", "missing"]

H100 = Device("gpu", "NVIDIA H100 80GB HBM3")
"""Device that programs are compiled for."""

_PROCESS = Path(__file__).with_name("gpu_process.py")
_TARGET = Path(__file__).parent.parent / "tuning" / "h100.txtpb"


@dataclass(frozen=True, slots=True)
class Kernel:
    """One Mosaic kernel of a compiled program, as ptxas reports it.

    Attributes:
      name: the name of its ``plgpu.kernel``.
      registers: registers of each thread, before warpgroups give some to each other.
      spill_bytes: bytes written to and read from local memory, because registers ran out.
      stack_bytes: the size of a thread's frame; above 0 if registers are indexed at run time.
      shared_bytes: the size of a block's shared memory.
      instructions: the number of instructions in the program.
      operations: how often instructions of interest occur in it: HGMMA (wgmma), HMMA (the slow way), UTMALDG and
        UTMASTG (TMA), LDL and STL (spills), ...
      warnings: numbers of ptxas' warnings that wgmma is serialized, such as C7511 and C7512.
      listing: its machine code as nvdisasm prints it, with the scheduler's control words.
    """

    name: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    instructions: int
    operations: Mapping[str, int]
    warnings: tuple[str, ...]
    listing: str = field(default="", repr=False)

    def faults(self, multiplies: bool = True) -> tuple[str, ...]:
        """Returns in words what a kernel must not have, with matrix products or without; empty if all is well."""
        found = []
        if self.spill_bytes or self.operations.get("LDL", 0):
            found.append(f"{self.name} spills {self.spill_bytes} bytes of registers")
        if self.warnings:
            found.append(f"{self.name}: wgmma is serialized ({', '.join(self.warnings)})")
        if multiplies and not self.operations.get("HGMMA", 0):
            found.append(f"{self.name} has no HGMMA instruction")
        if self.operations.get("HMMA", 0):
            found.append(f"{self.name} multiplies with HMMA, at half the rate")
        return tuple(found)

    def __str__(self) -> str:
        counts = " ".join(f"{name} {count}" for name, count in self.operations.items())
        return (
            f"{self.name}: {self.registers} registers, {self.shared_bytes} bytes of shared memory, "
            f"{self.instructions} instructions ({counts})"
        )


@dataclass(frozen=True, slots=True)
class Compilation:
    """Information from the compiler about one function.

    Attributes:
      failure: None, or the compiler's error.
      temporary_bytes, argument_bytes, output_bytes: bytes of the device's memory.
      copied_bytes: bytes that transposes and copies write.
      calls: the number of calls of Mosaic kernels.
      kernels: the kernels among them that differ.
      seconds: the time that compiling took.
    """

    failure: str | None = None
    temporary_bytes: int = 0
    argument_bytes: int = 0
    output_bytes: int = 0
    copied_bytes: int = 0
    calls: int = 0
    kernels: tuple[Kernel, ...] = ()
    seconds: float = 0.0

    def faults(self, multiplies: bool = True) -> tuple[str, ...]:
        """Returns the compiler's error, or the faults of all kernels, which have matrix products or have none."""
        if self.failure is not None:
            return (self.failure,)
        if not self.kernels:
            return ("there is no kernel in it",)
        return tuple(fault for kernel in self.kernels for fault in kernel.faults(multiplies))


def missing() -> str | None:
    """Returns why nothing can be compiled for GPUs here, or None."""
    if (reason := compat.missing_mosaic_gpu()) is not None:
        return reason
    for package in ("jax_cuda13_plugin", "flatbuffers"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed; the extra gpu-check has it: in a clone, pip install '.[gpu-check]'"
    if _toolkit() is None:
        return "nvidia-cuda-nvcc is not installed; the extra gpu-check has it: in a clone, pip install '.[gpu-check]'"
    return None


def lowered_for(function: ArrayFunction, arguments: Sequence[PyTree]) -> bytes:
    """Lowers a function for an H100, and serializes it.  Needs no GPU software.

    Args:
      function: the function to trace with ``arguments``.
      arguments: arrays, or anything with shape and dtype, in pytrees.

    Raises:
      Exception: what tracing and lowering raise, such as too much shared memory.
    """
    return lowered(function, arguments, H100)


def compile_for(function: ArrayFunction, arguments: Sequence[PyTree], *, seconds: float = 300.0) -> Compilation:
    """Compiles a function for an H100, which need not be present.

    Args:
      function: a function of ``arguments``, jitted or not.
      arguments: arrays, or anything with shape and dtype, in pytrees.
      seconds: how long the compiler may take.

    Returns:
      Memory and the resources of its Mosaic kernels.  An error of the compiler is a result too: ``failure``.

    Raises:
      RuntimeError: the compiler is not installed.
      Exception: what tracing and lowering raise.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jnp.ones((128, 128))
      >>> if missing() is None:
      ...     assert compile_for(lambda x: x @ x, (x,)).failure is None
    """
    with Compiler() as compiler:
        return compiler.compile(function, arguments, seconds=seconds)


@dataclass
class Compiler:
    """The GPU's compiler in a child process, for many programs: ``with Compiler() as compiler``."""

    _children: list[Child] = field(default_factory=list)

    def __enter__(self) -> Compiler:
        if (reason := missing()) is not None:
            raise RuntimeError(reason)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._children:
            self._children.pop().end()

    def compile(self, function: ArrayFunction, arguments: Sequence[PyTree], *, seconds: float = 300.0) -> Compilation:
        """Compiles a function, as :func:`compile_for` does."""
        module = lowered_for(function, arguments)
        begin = time.monotonic()
        answer = self._child().ask(module, seconds)
        if answer.get("repeated"):
            self._children.pop().end()
            begin = time.monotonic()
            answer = self._child().ask(module, seconds)
        took = round(time.monotonic() - begin, 3)
        if "failure" in answer:
            if answer.get("stage") in ("died", "time"):
                self._children.pop().end()
            return Compilation(answer["failure"], seconds=took)
        told = answer.pop("kernels")
        kernels = tuple(Kernel(**kernel | {"warnings": tuple(kernel["warnings"])}) for kernel in told)
        return Compilation(kernels=kernels, seconds=took, **answer)

    def _child(self) -> Child:
        if not self._children:
            self._children.append(Child(_started))
        return self._children[0]


def _toolkit() -> Path | None:
    """Returns the folder in which the wheels put ptxas and libdevice, or None."""
    spec = importlib.util.find_spec("nvidia")
    places = [Path(place) / "cu13" for place in (spec and spec.submodule_search_locations) or ()]
    return next((place for place in places if (place / "bin" / "ptxas").exists()), None)


def _started(folder: Path, log: IO[bytes]) -> subprocess.Popen[bytes]:
    toolkit = _toolkit()
    assert toolkit is not None
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_cuda_data_dir={toolkit}"
    dump = folder / "mosaic"
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_X64": "1",  # keeps the module's types as they are
        "MOSAIC_GPU_DUMP_TO": str(dump),
        "PATH": f"{toolkit / 'bin'}:{os.environ.get('PATH', '')}",
        "XLA_FLAGS": flags.strip(),
    }
    return subprocess.Popen(
        [sys.executable, "-P", str(_PROCESS), str(_TARGET), str(dump)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        env=environment,
    )
