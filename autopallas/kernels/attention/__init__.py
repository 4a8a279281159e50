"""Softmax attention: one operation, its description, and its implementations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopallas.kernels.exports import public_functions

if TYPE_CHECKING:
    from autopallas.kernels.attention.api import attention

__all__ = ["attention"]

__getattr__ = public_functions(__name__)
