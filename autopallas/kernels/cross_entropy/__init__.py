"""Logits and what a loss reads of them: one operation, its description, and its implementations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopallas.kernels.exports import public_functions

if TYPE_CHECKING:
    from autopallas.kernels.cross_entropy.api import cross_entropy

__all__ = ["cross_entropy"]

__getattr__ = public_functions(__name__)
