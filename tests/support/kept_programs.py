"""Keeps what the tests compile for the next run, in which most of their programs are the same.

JAX finds a program by all of its code, all settings of the compiler and the version of XLA, but not by the instructions
that the processor has: so each processor has a folder of its own.  Processes that tests start compile for themselves.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
from jax._src import lru_cache

__all__ = ["forget_old", "keep"]

FOLDER = Path(__file__).parents[2] / "build" / "compiled"
DAYS = 7
"""Programs are forgotten, and compiled again, so long after they were compiled."""


def keep() -> None:
    """Has JAX keep each program that this process compiles."""
    lru_cache.LRUCache.put = _put
    jax.config.update("jax_compilation_cache_dir", str(FOLDER / _processor()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _put(self: Any, key: str, value: bytes) -> None:
    """Writes a file as a whole: other workers may read it meanwhile, and tests end processes at any time."""
    path = Path(str(self.path)) / f"{key}-cache"
    if not path.exists():
        handle, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(value)
        os.replace(name, path)


def _processor() -> str:
    """Returns a name that processors with different instructions do not share."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        told = "".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))
        return hashlib.sha256(told.encode()).hexdigest()[:16]
    return platform.machine()


def forget_old() -> None:
    """Removes programs that were compiled more than a week ago."""
    oldest = time.time() - DAYS * 24 * 3600
    for path in FOLDER.glob("*/*"):
        with contextlib.suppress(OSError):  # another process may have removed it
            if path.stat().st_mtime < oldest:
                path.unlink()
