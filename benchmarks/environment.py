"""What a figure depends on besides the program: settings, versions, the machine."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import jax

ALLOCATOR_SETTINGS: Mapping[str, str] = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": str(8 * 2**30),
}
"""glibc keeps freed memory instead of handing it back.  XLA:CPU allocates its temporary buffer anew at every call;
without these settings the kernel then maps and clears it page by page each time, and the naive forms, which have the
largest buffers, look slower than their arithmetic is."""

_RECORDED = ("MALLOC_", "XLA_", "JAX_", "AUTOPALLAS_", "OMP_", "CUDA_", "NVIDIA_TF32", "LIBTPU_")


def restart_with_allocator_settings() -> None:
    """Replaces this process by itself under :data:`ALLOCATOR_SETTINGS`; returns where they hold or mean nothing."""
    if platform.libc_ver()[0] != "glibc" or all(name in os.environ for name in ALLOCATOR_SETTINGS):
        return
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**ALLOCATOR_SETTINGS, **os.environ})


def without_allocator_settings() -> dict[str, str]:
    """This process's environment with the allocator as it comes: for the measurement of resident memory."""
    return {name: value for name, value in os.environ.items() if name not in ALLOCATOR_SETTINGS}


def flags() -> dict[str, str]:
    """The variables in force that decide how fast programs are or which run, without folders of this machine."""
    named = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_RECORDED)}
    return {name: value for name, value in named.items() if not name.endswith(("_DIR", "_HOME"))}


def versions() -> dict[str, str]:
    """Versions of what computes."""
    packages = {name: metadata.version(name) for name in ("jax", "jaxlib", "numpy")}
    return {"python": platform.python_version(), **packages}


def backend() -> str:
    """The platform: "cpu", "gpu" or "tpu"."""
    return jax.default_backend()


def device() -> str:
    """The device's own name."""
    return str(jax.devices()[0].device_kind)


def backend_and_device() -> tuple[str, str]:
    """:func:`backend` and :func:`device`, asked in a process of its own: this one leaves a GPU's memory to others."""
    code = "import jax; print(jax.default_backend()); print(jax.devices()[0].device_kind)"
    variables = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run([sys.executable, "-c", code], env=variables, check=True, stdout=subprocess.PIPE, text=True)
    platform_name, kind = done.stdout.splitlines()[-2:]
    return platform_name, kind


def processor() -> str:
    """The host's processor and how many of its cores this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return f"{name}, {cores} cores"


def vector_extensions() -> str:
    """Which of the extensions that decide a processor's matmul speed it has, for the reader of a figure."""
    try:
        line = next(x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("flags"))
    except (OSError, StopIteration):
        return ""
    present = set(line.partition(":")[2].split())
    return " ".join(name for name in ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16") if name in present)
