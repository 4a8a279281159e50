"""What specs have in common: the canonical description of one site, which patterns produce and kernels consume."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import numpy as np

__all__ = ["Dtype", "NoBlockSizes", "Spec"]

Dtype: TypeAlias = np.dtype[Any]


@dataclass(frozen=True)
class Spec:
    """The base of a declared operation's spec.

    A field ``<operand>_dtype`` gives the dtype of an operand, None for one that the site lacks; ``result_dtype`` that
    of the result.  Sizes are whole numbers.
    """

    def dtypes(self) -> tuple[Dtype, ...]:
        """All dtypes among the fields."""
        return tuple(value for f in fields(self) if isinstance(value := getattr(self, f.name), np.dtype))

    @property
    def accumulation_dtype(self) -> Dtype:
        """float32, or float64 where anything is float64."""
        return np.dtype(np.float64 if np.dtype(np.float64) in self.dtypes() else np.float32)

    @property
    def widest_dtype(self) -> Dtype:
        """The dtype under which tables file the site."""
        return max(self.dtypes(), key=lambda dtype: dtype.itemsize)

    def assumptions(self) -> tuple[str, ...]:
        """What has to hold for the result to be the original's, in words."""
        return ()

    def programs(self) -> str:
        """The elementwise programs that the site carries, one instruction a line."""
        return ""

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain data: numbers and strings."""
        plain = (bool, int, float, str, type(None))
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value if isinstance(value, plain) else str(value) for name, value in values.items()}


@dataclass(frozen=True, slots=True)
class NoBlockSizes:
    """The block sizes of what has none, or chooses them itself."""

    def to_dict(self) -> dict[str, int]:
        return {}

    def fitted(self, spec: Any) -> NoBlockSizes:
        return self

    def temporary_bytes(self, spec: Any, direction: str = "forward") -> int:
        """What an implementation plans for, beside operands and results, is known by compiling it alone."""
        return 0

    @classmethod
    def get_default(cls) -> NoBlockSizes:
        return cls()

    @classmethod
    def candidates(cls, spec: Any) -> tuple[NoBlockSizes, ...]:
        return (cls(),)
