"""Grouped matmul: the declaration of the operation."""

from __future__ import annotations

from autopallas.sites.operation import Operation

__all__ = ["OPERATION"]

OPERATION = Operation("grouped_matmul", priority=10)
