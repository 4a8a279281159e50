"""Probes kernels: compiles each one alone, and runs it once on dummy inputs, before it is spliced into a program.

So a kernel that cannot be compiled, or that hangs the compiler, costs one failure per machine, and none in the user's
program.  This also holds where no frame of this package exists when that program is compiled, as under somebody else's
jit or grad.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from autopallas import compat
from autopallas.autotune.free_memory import free_bytes
from autopallas.autotune.trial import Trial
from autopallas.compile.outside_trace import KERNELS, is_within, isolated, within
from autopallas.compile.subprocess import Child, ChildError, lacks_memory, tried
from autopallas.options import Options
from autopallas.sites.calls import kernel_backward, kernel_forward
from autopallas.sites.device import Device
from autopallas.sites.interpret import interpretation, settled
from autopallas.sites.operation import HOME
from autopallas.sites.spec import BlockSizes
from autopallas.sites.workload import SiteWorkload
from autopallas.tuning.distributed import agreement
from autopallas.tuning.key import TuningKey
from autopallas.tuning.probe_cache import ProbeResult, ProbeResults, probe_key

__all__ = ["Prober"]

SECONDS = 60.0
"""Time limit for the probe of one kernel."""

_probing = threading.Lock()


class Prober:
    """Known failures, and what probes find out, for the sites of one program.

    Args:
      device: where the program will run.
      options: the options in force.
      runs: whether anything may be compiled or run.
    """

    def __init__(self, device: Device, options: Options, runs: bool = True):
        self._device = device
        self.runs = runs
        self._lock = options.lock is not None
        self._alone = jax.process_count() == 1
        self._verdicts = ProbeResults.current()
        self._child: Child | None = None
        self.found: list[tuple[SiteWorkload, str, str, str]] = []
        """New failures: (match, implementation, stage, error)."""

    def __enter__(self) -> Prober:
        return self

    def __exit__(self, *error: object) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None

    def wanted(self, implementation: str) -> bool:
        """Returns whether a kernel is probed.  Plain JAX and interpreted kernels on a CPU are not: a probe would cost a
        second compilation, of code that fails no more often than the program around it."""
        return self._device.platform != "cpu" or (implementation in HOME and not interpretation())

    def objection(
        self, match: SiteWorkload, name: str, block_sizes: BlockSizes, again: bool, measured: bool
    ) -> tuple[str, str] | None:
        """Returns None if an implementation may be used for a site, else the stage that fails, and the error.

        Args:
          match: the site.
          name: the implementation.
          block_sizes: its block sizes.
          again: whether to ignore a failure that is remembered.
          measured: whether it was compiled and run just now.
        """
        probing = self.runs and not self._lock and self.wanted(name)
        if not probing and not self._verdicts.known():
            return None
        key = probe_key(match, name, block_sizes, self._device)
        if not self._alone:
            return self._agreed(match, name, block_sizes, key, probing)
        known = self._verdicts.own(key) if self._lock else self._verdicts.get(key)
        if known is not None and known.outcome == "fails" and not again:
            return known.stage, known.error
        if not probing or (known is not None and known.outcome == "works"):
            return None
        return self._found_out(match, name, block_sizes, key, measured)

    def record_failure(self, match: SiteWorkload, name: str, block_sizes: BlockSizes, stage: str, error: str) -> None:
        """Remembers a failure."""
        self.found.append((match, name, stage, error))
        if self._alone:
            self._verdicts.put(ProbeResult.of(probe_key(match, name, block_sizes, self._device), stage, error))

    # ------------------------------------------------------------------ one probe

    def _found_out(
        self, match: SiteWorkload, name: str, block_sizes: BlockSizes, key: TuningKey, measured: bool
    ) -> tuple[str, str] | None:
        if is_within(KERNELS):  # a kernel calls an optimized function with this site, which is compiled with it
            return None
        with _probing, within(KERNELS):
            known = self._verdicts.get(key)  # another thread may have probed the same kernel meanwhile
            if known is not None:
                return None if known.outcome == "works" else (known.stage, known.error)
            fault = None if measured else self._probed(match, name, block_sizes)
            self._verdicts.put(ProbeResult.of(key, *fault) if fault else ProbeResult.of(key))
            if fault:
                self.found.append((match, name, *fault))
            return fault

    def _probed(self, match: SiteWorkload, name: str, block_sizes: BlockSizes) -> tuple[str, str] | None:
        free = free_bytes()
        needed = Trial.bytes_needed(match) + block_sizes.temporary_bytes(match.spec, match.direction)
        run = free is None or needed <= free
        try:
            program = isolated(lambda: _exported(match, name, block_sizes, self._device), SECONDS)
        except TimeoutError:
            return "hang", f"tracing and lowering took more than {SECONDS:g} seconds"
        except Exception as error:
            return "lowering", f"{type(error).__name__}: {error}"
        try:
            child = self._process()
            fault = child.tried(program, run, SECONDS) if child is not None else None
            if child is not None and not (fault and lacks_memory(fault[1])):
                return fault
            # There is no other process, or this one left it no memory of the device.
            return isolated(lambda: tried(program, run), SECONDS)
        except TimeoutError:
            self.__exit__()
            return "hang", f"compiling and running it took more than {SECONDS:g} seconds"
        except ChildError as error:
            self.__exit__()
            return "compile", f"the process that compiled it died: {error}"

    def _process(self) -> Child | None:
        """Returns a child on the same kind of device; None if this process has to do the work itself."""
        if self._child is None and self._device.platform != "tpu":  # a TPU belongs to one process
            try:
                child = Child(compat.numeric_setting()[0])
            except ChildError:
                return None
            if child.device[1] != self._device.kind:
                child.end()
                return None
            self._child = child
        return self._child

    # ------------------------------------------------------------------ several processes

    def _agreed(
        self, match: SiteWorkload, name: str, block_sizes: BlockSizes, key: TuningKey, probing: bool
    ) -> tuple[str, str] | None:
        """Returns what all processes found out: a failure in one counts for all."""
        shared = agreement()
        if not probing:
            return None
        if shared is None:
            return "probe", "the processes of this program cannot agree on whether it works"
        known = self._verdicts.get(key)
        fault = (known.stage, known.error) if known is not None and known.outcome == "fails" else None
        if known is None:
            fault = self._found_out(match, name, block_sizes, key, False)
        return shared.unanimous(key, fault, jax.process_count())


def _exported(match: SiteWorkload, name: str, block_sizes: BlockSizes, device: Device) -> bytes:
    """Exports all kernels of a site as one program."""
    functions = [_kernels(part, name, block_sizes) for part in match.passes]
    counts = [len(part.original.in_avals) for part in match.passes]

    def run(*operands: jax.Array) -> list[jax.Array]:
        results, begin = [], 0
        for function, count in zip(functions, counts, strict=True):
            results += function(operands[begin : begin + count])
            begin += count
        return results

    types = [jax.ShapeDtypeStruct(t.shape, t.dtype) for part in match.passes for t in part.original.in_avals]
    with device.targeted(), settled():
        return compat.exported(run, types, device.platform)


def _kernels(
    part: SiteWorkload, name: str, block_sizes: BlockSizes
) -> Callable[[Sequence[jax.Array]], list[jax.Array]]:
    """Returns the forward and backward of one pass.  The backward is included even if the program does not hold it,
    since a transformation around the program may ask for it."""

    def run(operands: Sequence[jax.Array]) -> list[jax.Array]:
        results, residuals = kernel_forward(part.site, name, block_sizes)(*operands)
        active = tuple(i for i, t in enumerate(part.original.in_avals) if jnp.issubdtype(t.dtype, jnp.inexact))
        found = {tuple(position for position, _ in backward.gradients) for backward in part.backwards}
        if part.site.has_backward and active and all(jnp.issubdtype(r.dtype, jnp.inexact) for r in results):
            for wanted in sorted(found) or [active]:
                pull = kernel_backward(part.site, name, block_sizes, wanted)
                results = (*results, *pull(operands, results[: len(part.original.out_avals)], residuals, results))
        return [*results, *residuals]

    return run
