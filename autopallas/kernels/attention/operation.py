"""Softmax attention: the declaration of the operation."""

from __future__ import annotations

from autopallas.sites.operation import Operation

__all__ = ["OPERATION"]

OPERATION = Operation(
    "attention",
    order={"cpu": ("xla", "xla_heads"), "gpu": ("pallas_gpu", "cudnn", "xla"), "tpu": ("pallas_tpu", "xla")},
    priority=30,
    anchors=frozenset({"exp", "exp2", "pow", "logistic", "max"}),
)
