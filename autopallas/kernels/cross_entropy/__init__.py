"""Logits and what a loss reads of them: one operation, its description, and its implementations."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autopallas.kernels.cross_entropy.api import cross_entropy

__all__ = ["cross_entropy"]


def __getattr__(name: str) -> object:
    if name == "cross_entropy":
        from autopallas.kernels.cross_entropy.api import cross_entropy

        return cross_entropy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
