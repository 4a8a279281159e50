"""Softmax attention: one operation, its description, and its implementations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autopallas.sites.operation import Operation

if TYPE_CHECKING:
    from autopallas.kernels.attention.api import attention

__all__ = ["OPERATION", "attention"]

OPERATION = Operation(
    "attention",
    order={"cpu": ("xla",), "gpu": ("pallas_gpu", "cudnn", "xla"), "tpu": ("pallas_tpu", "xla")},
)


def __getattr__(name: str) -> Any:
    if name == "attention":
        from autopallas.kernels.attention.api import attention

        return attention
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
