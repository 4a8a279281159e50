"""Declares mixtures of experts as a part of the grouped matmul."""

from __future__ import annotations

from dataclasses import dataclass

from autopallas.kernels.grouped_matmul.operation import OPERATION as GROUPED_MATMUL
from autopallas.sites.operation import IMPLEMENTATIONS, Operation, provided

__all__ = ["OPERATION"]


@dataclass(frozen=True, slots=True)
class _Mixtures(Operation):
    """Part of the grouped matmul, with one implementation for each implementation of that."""

    def module(self, name: str) -> object | None:
        """Returns a module of the folder; for an implementation, one that computes products by the grouped matmul's."""
        if name not in IMPLEMENTATIONS and (GROUPED_MATMUL.name, name) not in provided():
            return Operation.module(self, name)
        if GROUPED_MATMUL.implementation(name) is None:
            return None
        from autopallas.kernels.mixture_of_experts.sorted_rows import SortedRows

        return SortedRows(name)

    def has(self, name: str) -> bool:
        return GROUPED_MATMUL.has(name)


OPERATION = _Mixtures(GROUPED_MATMUL.name, GROUPED_MATMUL.order, GROUPED_MATMUL.priority, folder="mixture_of_experts")
