"""Declares the operation of linear recurrences."""

from __future__ import annotations

from autopallas.sites.operation import Operation

__all__ = ["OPERATION"]

OPERATION = Operation("recurrence", anchors=frozenset({"scan", "while"}))
