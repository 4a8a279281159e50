"""Logits and what a loss reads of them: the declaration of the operation."""

from __future__ import annotations

from autopallas.sites.operation import Operation

__all__ = ["OPERATION"]

OPERATION = Operation("cross_entropy", priority=20, anchors=frozenset({"exp", "exp2", "logistic"}))
