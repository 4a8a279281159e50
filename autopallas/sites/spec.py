"""What specs have in common: the canonical description of one site, which patterns produce and kernels consume."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from typing import ClassVar, Protocol, TypeAlias

import numpy as np

from autopallas.compat import Dtype

__all__ = ["BlockSizes", "BlockSizesClass", "Dtype", "NoBlockSizes", "SiteSpec", "Sizes", "Spec", "plain_fields"]

Sizes: TypeAlias = Mapping[str, int | bool | str]
"""Block sizes by name."""


class SiteSpec(Protocol):
    """The canonical description of a site, as far as every operation's is alike: a frozen dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[object]]]

    def assumptions(self) -> tuple[str, ...]:
        """What has to hold for the result to be the original's, in words."""

    def programs(self) -> str:
        """The elementwise programs that the site carries, one instruction a line."""

    def to_dict(self) -> dict[str, object]:
        """The fields as plain data."""

    def __hash__(self) -> int: ...


class BlockSizes(Protocol):
    """The block sizes of some operation: a frozen dataclass of plain values.  Their specs are that operation's."""

    __dataclass_fields__: ClassVar[dict[str, Field[object]]]

    @property
    def fitted(self) -> Callable[..., BlockSizes]:
        """``fitted(spec)``: the same, valid for the shape."""

    @property
    def temporary_bytes(self) -> Callable[..., int]:
        """``temporary_bytes(spec, direction)``: estimate of the temporary memory."""

    @classmethod
    def get_default(cls) -> BlockSizes:
        """What is right almost everywhere."""

    def to_dict(self) -> Mapping[str, int]:
        """The sizes by name."""

    def __hash__(self) -> int: ...


class BlockSizesClass(Protocol):
    """The class of them."""

    __dataclass_fields__: ClassVar[dict[str, Field[object]]]

    def __call__(self, **sizes: int | bool | str) -> BlockSizes: ...

    def get_default(self) -> BlockSizes:
        """What is right almost everywhere."""

    @property
    def candidates(self) -> Callable[..., Sequence[BlockSizes]]:
        """``candidates(spec)``: what a search should try, best guess first."""


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

    def to_dict(self) -> dict[str, object]:
        """The fields as plain data: numbers and strings."""
        return plain_fields(self)


def plain_fields(spec: SiteSpec) -> dict[str, object]:
    """The fields of a spec as plain data: numbers and strings, and all else as the string that it prints as."""
    plain = (bool, int, float, str, type(None))
    values = {f.name: getattr(spec, f.name) for f in fields(spec)}
    return {name: value if isinstance(value, plain) else str(value) for name, value in values.items()}


@dataclass(frozen=True, slots=True)
class NoBlockSizes:
    """The block sizes of what has none, or chooses them itself."""

    def to_dict(self) -> dict[str, int]:
        return {}

    def fitted(self, spec: SiteSpec) -> NoBlockSizes:
        return self

    def temporary_bytes(self, spec: SiteSpec, direction: str = "forward") -> int:
        """What an implementation plans for, beside operands and results, is known by compiling it alone."""
        return 0

    @classmethod
    def get_default(cls) -> NoBlockSizes:
        return cls()

    @classmethod
    def candidates(cls, spec: SiteSpec) -> tuple[NoBlockSizes, ...]:
        return (cls(),)
