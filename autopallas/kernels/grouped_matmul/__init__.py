"""Grouped matmul: one operation, its description, and its implementations."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autopallas.kernels.grouped_matmul.api import grouped_matmul

__all__ = ["grouped_matmul"]


def __getattr__(name: str) -> object:
    if name == "grouped_matmul":
        from autopallas.kernels.grouped_matmul.api import grouped_matmul

        return grouped_matmul
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
