"""Linear recurrences: loops whose state is multiplied by a decay and added to, step by step."""

from __future__ import annotations

from autopallas.kernels.recurrence.operation import OPERATION

__all__ = ["OPERATION"]
