"""Compiles and runs programs in a process of its own, which can be ended where a thread could not.

``python -m autopallas.compile.subprocess`` reads exported programs from standard input and answers each with one
line of JSON.  :class:`Child` starts it, and it ends with the process that started it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import queue
import signal
import struct
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any, BinaryIO, cast

if TYPE_CHECKING:
    import jax

__all__ = ["Child", "ChildError", "end", "lacks_memory", "tried"]

_HEADER = struct.Struct(">Q?d")
"""Length of the program that follows, whether to run it, and the seconds that this may take."""
_STARTING_SECONDS = 60.0
_GRACE_SECONDS = 5.0
_OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "MemoryError", "out of memory", "Out of memory")


def lacks_memory(error: str) -> bool:
    """Returns whether an error, with its type in front, says that memory did not suffice."""
    return any(words in error for words in _OUT_OF_MEMORY)


class ChildError(RuntimeError):
    """Raised if the process cannot be started, or is gone; only blames a program that it was working on."""


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process, whatever it does, and closes the pipes to its input and output."""
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):  # what was not sent can no longer be sent
                stream.close()


class Child:
    """A running child.

    Args:
      x64: whether it has 64-bit types.

    Raises:
      ChildError: it cannot be started here.
    """

    def __init__(self, x64: bool):
        import jax

        if not sys.executable or os.environ.get("PYTHONEXECUTABLE"):
            raise ChildError("there is no Python to start")
        settings = {"PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path), "JAX_ENABLE_X64": str(int(x64))}
        settings["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # the memory belongs to this process
        config: Any = jax.config
        if config.jax_platforms:
            settings["JAX_PLATFORMS"] = config.jax_platforms
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "autopallas.compile.subprocess"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | settings,
                start_new_session=True,
            )
        except OSError as error:
            raise ChildError(str(error)) from None
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        threading.Thread(target=self._listen, name="autopallas-child", daemon=True).start()
        try:
            self.device = self._answer(_STARTING_SECONDS) or []
        except TimeoutError:
            raise ChildError("it does not start") from None

    def tried(self, program: bytes, run: bool, seconds: float) -> tuple[str, str] | None:
        """Compiles a program, and runs it on dummy inputs; returns None, or (the stage that failed, how).

        Raises:
          TimeoutError: it took longer than ``seconds``, and was ended.
          ChildError: the process ended by itself.
        """
        stream = cast(BinaryIO, self._process.stdin)
        try:
            stream.write(_HEADER.pack(len(program), run, seconds) + program)
            stream.flush()
        except OSError as error:
            raise ChildError(str(error)) from None
        answer = self._answer(seconds)
        return None if answer is None else (str(answer[0]), str(answer[1]))

    def end(self) -> None:
        """Ends the process, whatever it is doing."""
        if self._process.poll() is None:
            with contextlib.suppress(OSError):
                if hasattr(os, "killpg"):
                    os.killpg(self._process.pid, signal.SIGKILL)  # together with what the compiler may have started
                else:
                    self._process.kill()
        self._process.wait()
        with contextlib.suppress(OSError):
            cast(BinaryIO, self._process.stdin).close()

    def _listen(self) -> None:
        for line in cast(BinaryIO, self._process.stdout):
            self._lines.put(line)
        self._lines.put(None)

    def _answer(self, seconds: float) -> list[str] | None:
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            self.end()
            raise TimeoutError(f"no result after {seconds:g} seconds") from None
        if line is None:
            self.end()
            raise ChildError(f"it ended with status {self._process.returncode}")
        answer: list[str] | None = json.loads(line)
        return answer


def tried(program: bytes, run: bool) -> tuple[str, str] | None:
    """Compiles an exported program, and runs it on dummy inputs; returns None, or (the stage that failed, how)."""
    import jax
    from jax import export

    stage = "compile"
    try:
        exported = export.deserialize(bytearray(program))
        types = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in exported.in_avals]
        compiled = jax.jit(exported.call).lower(*types).compile()
        if run:
            stage = "run"
            jax.block_until_ready(compiled(*map(_dummy, types)))
    except Exception as error:
        words = f"{type(error).__name__}: {error}"[:1000]
        return "memory" if stage == "run" and lacks_memory(words) else stage, words
    return None


def _dummy(kind: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns harmless values: small numbers, true, and the integer that is a valid position in any array."""
    import jax.numpy as jnp

    value = 0.5 if jnp.issubdtype(kind.dtype, jnp.inexact) else kind.dtype == jnp.bool_
    return jnp.full(kind.shape, value, kind.dtype)


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # so that libraries that print do not answer
    import jax

    device = jax.devices()[0]
    print(json.dumps([device.platform, device.device_kind]), file=answers, flush=True)
    while header := sys.stdin.buffer.read(_HEADER.size):
        length, run, seconds = _HEADER.unpack(header)
        program = sys.stdin.buffer.read(length)
        faulthandler.dump_traceback_later(seconds + _GRACE_SECONDS, exit=True)  # in case the other process is gone
        print(json.dumps(tried(program, run)), file=answers, flush=True)
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    _serve()
