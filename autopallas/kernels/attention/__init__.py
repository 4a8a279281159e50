"""Softmax attention: one operation, its description, and its implementations."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autopallas.kernels.attention.api import attention

__all__ = ["attention"]


def __getattr__(name: str) -> object:
    if name == "attention":
        from autopallas.kernels.attention.api import attention

        return attention
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
