"""Grouped matmul: one operation, its description, and its implementations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopallas.kernels.exports import public_functions

if TYPE_CHECKING:
    from autopallas.kernels.grouped_matmul.api import grouped_matmul

__all__ = ["grouped_matmul"]

__getattr__ = public_functions(__name__)
