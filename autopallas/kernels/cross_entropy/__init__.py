"""Logits and what a loss reads of them: one operation, its description, and its implementations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autopallas.sites.operation import Operation

if TYPE_CHECKING:
    from autopallas.kernels.cross_entropy.api import cross_entropy

__all__ = ["OPERATION", "cross_entropy"]

OPERATION = Operation(
    "cross_entropy",
    order={"cpu": ("xla",), "gpu": ("pallas_gpu", "xla"), "tpu": ("pallas_tpu", "xla")},
)


def __getattr__(name: str) -> Any:
    if name == "cross_entropy":
        from autopallas.kernels.cross_entropy.api import cross_entropy

        return cross_entropy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
