"""How much memory a trial may take."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import jax

__all__ = ["free_bytes"]

_PROCESSES, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def free_bytes() -> int | None:
    """Returns what is left of the device's memory, or of the machine's; None if that is not known.

    Of the machine's memory a container has what its limit leaves, which the machine's own figures do not show.  What
    holds copies of files counts as free, as it is given up when memory is asked for.
    """
    statistics = jax.local_devices()[0].memory_stats()
    if statistics and "bytes_limit" in statistics:
        return int(statistics["bytes_limit"]) - int(statistics.get("bytes_in_use", 0))
    return min([n for n in (_of_machine(), *_of_groups()) if n is not None], default=None)


def _of_machine() -> int | None:
    kibibytes = _fields(_PROCESSES / "meminfo").get("MemAvailable:")
    if kibibytes is not None:
        return kibibytes * 1024
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _of_groups() -> Iterator[int | None]:
    """Yields what the limit of each control group of this process leaves, in both versions of Linux's interface.

    A container sees its own group where the machine has the root.
    """
    for line in _text(_PROCESSES / "self" / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        root = _GROUPS / "memory" if controllers else _GROUPS
        limit, usage, idle = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            if controllers
            else ("memory.max", "memory.current", "inactive_file")
        )
        own = PurePosixPath(path).relative_to("/") if path.startswith("/") else PurePosixPath()
        for part in (own, *own.parents):
            group = root / part
            most, used = _text(group / limit).strip(), _text(group / usage).strip()
            if most.isdecimal() and used.isdecimal():  # "max" where there is none
                yield max(int(most) - int(used) + _fields(group / "memory.stat").get(idle, 0), 0)


def _fields(file: Path) -> dict[str, int]:
    """Returns the numbers of a file that has a name and a number in each line."""
    lines = [line.split() for line in _text(file).splitlines()]
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdecimal()}


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
