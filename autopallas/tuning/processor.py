"""Finds this processor's vector extensions, which decide how fast a CPU multiplies 16-bit numbers."""

from __future__ import annotations

import functools
import platform
from pathlib import Path

from autopallas.sites.device import Device

__all__ = ["alike", "alike_in_float32", "parsed", "told", "vector_extensions"]

_PRODUCTS = {
    "avx2": "widened on x86",
    "avx512": "widened on x86",
    "avx512_bf16": "16 bits on x86",
    "avx512_fp16": "16 bits on x86, two kinds",
    "amx": "16 bits on x86",
    "neon": "widened on ARM",
    "neon_bf16": "16 bits on ARM",
}
"""How XLA multiplies 16-bit numbers with each extension; results for one extension serve others of the same kind.

Processors with float16 arithmetic beside products of bfloat16 are others than those without: with JAX 0.10.2, train
steps of losses in bfloat16 that gain 1.66 and 1.94 on one without (N 512 and 2,048, V 32,000 and 1,024) had 0.87 and
0.82 of the original's speed on one with it.
"""

_X86 = (
    ("amx", "amx_bf16"),
    ("avx512_fp16", "avx512_fp16"),
    ("avx512_bf16", "avx512_bf16"),
    ("avx512", "avx512f"),
    ("avx2", "avx2"),
)
_ARM = (("neon_bf16", "bf16"), ("neon", "asimd"))
"""Names used here, and the kernel's flags that they stand for, the greatest first."""


@functools.cache
def vector_extensions() -> str | None:
    """Returns the greatest extension that decides the speed of products: "avx2", "avx512", "avx512_bf16",
    "avx512_fp16", "amx", "neon" or "neon_bf16"; None if it is not known."""
    if platform.system() == "Darwin":
        return "neon" if platform.machine() == "arm64" else None
    try:
        return parsed(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None


def parsed(text: str) -> str | None:
    """Parses the extension from a Linux kernel's list of processors; if they differ, the greatest that all have.

    Example:
      >>> parsed("flags\\t\\t: fpu avx avx2 avx512f"), parsed("Features\\t: fp asimd"), parsed("flags\\t\\t: sse2")
      ('avx512', 'neon', None)
    """
    known: tuple[tuple[str, str], ...] = ()
    common: set[str] | None = None
    for line in text.splitlines():
        label, _, flags = line.partition(":")
        names = {"flags": _X86, "Features": _ARM}.get(label.strip())
        if names is not None:
            known = names
            common = set(flags.split()) if common is None else common & set(flags.split())
    return next((name for name, flag in known if flag in (common or ())), None)


def told(device: Device) -> dict[str, str]:
    """Returns what a report says of the processor, beside the versions: on a CPU its vector extensions."""
    return {"vector extensions": vector_extensions() or "unknown"} if device.platform == "cpu" else {}


def alike(one: str | None, other: str | None) -> bool:
    """Returns whether two extensions compute products of 16-bit numbers alike; False if one is not known.

    Example:
      >>> alike("avx2", "avx512"), alike("avx2", "avx512_bf16"), alike(None, None)
      (True, False, False)
    """
    return one in _PRODUCTS and other in _PRODUCTS and _PRODUCTS[one] == _PRODUCTS[other]


def alike_in_float32(one: str | None, other: str | None) -> bool:
    """Returns whether two extensions differ in nothing that decides how fast products in float32 are.

    Example:
      >>> alike_in_float32("avx512_bf16", "avx512_fp16"), alike_in_float32("avx2", "avx512")
      (True, False)
    """
    widest = {"avx512_fp16": "avx512_bf16"}
    return widest.get(one or "", one) == widest.get(other or "", other)
