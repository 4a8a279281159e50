"""Starts child processes that touch the device, asks them, and ends them when they hang."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Literal, TypeAlias

from autopallas.compile.subprocess import end
from benchmarks import environment

__all__ = ["Child", "Role", "settings"]

Role: TypeAlias = Literal["time", "check", "compile", "compile checks"]
"""What a child does: it alone times on the GPU; others share its memory."""

_ROOT = Path(__file__).parents[2]
_MEMORY = "0.88"
"""Share of the GPU's memory that the process that times takes; kernels that are probed have the rest."""
_WITHOUT_AUTOTUNING = "--xla_gpu_autotune_level=0"
"""What is checked is not timed, and XLA's search for the fastest form of each product takes most of a compilation."""


def settings(role: Role, cache: Path, small: bool, shared: bool = False) -> dict[str, str]:
    """Returns the environment of a child; one that times takes the GPU's memory, unless that is ``shared``.

    Programs that one child compiles ahead are found in the cache by another that has the same flags.
    """
    found = environment.without_allocator_settings()
    found["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_ROOT), found.get("PYTHONPATH", ""))))
    found |= {
        "JAX_COMPILATION_CACHE_DIR": str(cache.absolute()),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
        "TF_CPP_MIN_LOG_LEVEL": found.get("TF_CPP_MIN_LOG_LEVEL", "1"),
    }
    if small:
        # The interpreter's warpgroups wait for each other in threads, of which XLA has few on small machines.
        return found | {"JAX_PLATFORMS": "cpu", "NPROC": "32"}
    found.pop("JAX_PLATFORMS", None)
    if role == "time" and not shared:
        return {"XLA_PYTHON_CLIENT_MEM_FRACTION": _MEMORY, **found}
    if role not in ("time", "compile"):
        found["XLA_FLAGS"] = f"{found.get('XLA_FLAGS', '')} {_WITHOUT_AUTOTUNING}".strip()
    return found | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


class Child:
    """A worker: a request goes in, lines of JSON come out.

    Args:
      mode: "", "small" or "lower", as :mod:`.worker` takes it.
      environ: its environment.
      log: file to which its standard error is appended.
    """

    def __init__(self, mode: str, environ: Mapping[str, str], log: Path):
        with open(log, "ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpu_session.worker", *filter(None, [mode])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env=dict(environ),
                cwd=_ROOT,
            )
        self._left = b""

    def ask(self, request: Mapping[str, Any], until: float) -> Iterator[dict[str, Any]]:
        """Yields the lines of the answer; the last is "done", or "late", or "died"."""
        sender, receiver = self._process.stdin, self._process.stdout
        assert sender is not None
        assert receiver is not None
        try:
            sender.write(json.dumps(request).encode() + b"\n")
            sender.flush()
        except OSError:
            yield {"event": "died"}
            return
        while True:
            line = self._line(receiver, until)
            if line is None:
                yield {"event": "late"}
                return
            if not line:
                yield {"event": "died"}
                return
            answer: dict[str, Any] = json.loads(line)
            yield answer
            if answer["event"] == "done":
                return

    def _line(self, stream: IO[bytes], until: float) -> bytes | None:
        """Returns the next line; nothing at the end, None when it is too late."""
        while b"\n" not in self._left:
            left = until - time.monotonic()
            if left <= 0 or not select.select([stream], [], [], left)[0]:
                return None
            part = os.read(stream.fileno(), 2**16)
            if not part:
                return b""
            self._left += part
        line, _, self._left = self._left.partition(b"\n")
        return line

    def end(self) -> None:
        """Ends the process, whatever it does."""
        end(self._process)
