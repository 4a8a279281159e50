"""Defines what specs have in common: the canonical description of a site, from patterns to kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeAlias

import numpy as np

from autopallas.compat import Dtype

if TYPE_CHECKING:
    from autopallas.sites.declared import DeclaredOperation

__all__ = [
    "BlockSizes",
    "BlockSizesClass",
    "Dtype",
    "NoBlockSizes",
    "SiteSpec",
    "Sizes",
    "Spec",
    "kind_of",
    "plain_fields",
]

Sizes: TypeAlias = Mapping[str, int | bool | str]
"""Block sizes by name."""


class SiteSpec(Protocol):
    """Interface of a site's canonical description, common to all operations: a frozen dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[object]]]

    @property
    def widest_dtype(self) -> Dtype:
        """Dtype under which tables file the site."""

    def assumptions(self) -> tuple[str, ...]:
        """Returns in words what has to hold for the result to equal the original's."""

    def programs(self) -> str:
        """Returns the elementwise programs of the site as text, one instruction per line."""

    def to_dict(self) -> dict[str, object]:
        """Returns the fields as plain data."""

    def __hash__(self) -> int: ...


class BlockSizes(Protocol):
    """Interface of an operation's block sizes: a frozen dataclass of plain values.  Specs are that operation's."""

    __dataclass_fields__: ClassVar[dict[str, Field[object]]]

    @property
    def fitted(self) -> Callable[..., BlockSizes]:
        """``fitted(spec)`` returns the same, adjusted to be valid for the shape."""

    @property
    def temporary_bytes(self) -> Callable[..., int]:
        """``temporary_bytes(spec, direction)`` estimates the temporary memory."""

    @classmethod
    def get_default(cls) -> BlockSizes:
        """Returns block sizes that are right almost everywhere."""

    def to_dict(self) -> Sizes:
        """Returns the sizes by name."""

    def __hash__(self) -> int: ...


class BlockSizesClass(Protocol):
    """Interface of a class of block sizes."""

    __dataclass_fields__: ClassVar[dict[str, Field[object]]]

    def __call__(self, **sizes: int | bool | str) -> BlockSizes: ...

    def get_default(self) -> BlockSizes:
        """Returns block sizes that are right almost everywhere."""

    @property
    def candidates(self) -> Callable[..., Sequence[BlockSizes]]:
        """``candidates(spec)`` returns the block sizes that a search should try, best guess first."""


@dataclass(frozen=True)
class Spec:
    """Base class of a declared operation's spec.

    A field ``<operand>_dtype`` gives the dtype of an operand, or None if the site lacks it; ``result_dtype`` gives the
    dtype of the result.  Sizes are whole numbers.
    """

    operation: ClassVar[DeclaredOperation | None] = None
    """Operation that the spec is of, where it has no folder to be found by."""

    def dtypes(self) -> tuple[Dtype, ...]:
        """Returns all dtypes among the fields."""
        return tuple(value for f in fields(self) if isinstance(value := getattr(self, f.name), np.dtype))

    @property
    def accumulation_dtype(self) -> Dtype:
        """float32, or float64 where any field is float64."""
        return np.dtype(np.float64 if np.dtype(np.float64) in self.dtypes() else np.float32)

    @property
    def widest_dtype(self) -> Dtype:
        """Dtype under which tables file the site."""
        return max(self.dtypes(), key=lambda dtype: dtype.itemsize)

    def assumptions(self) -> tuple[str, ...]:
        """Returns in words what has to hold for the result to equal the original's."""
        return ()

    def programs(self) -> str:
        """Returns the elementwise programs of the site as text, one instruction per line."""
        return ""

    def to_dict(self) -> dict[str, object]:
        """Returns the fields as plain data: numbers and strings."""
        return plain_fields(self)


def kind_of(spec: SiteSpec) -> str:
    """Returns the kind of a site, where its operation has several: the spec's field ``kind``."""
    found = getattr(spec, "kind", "")
    return found if isinstance(found, str) else ""


def plain_fields(spec: SiteSpec) -> dict[str, object]:
    """Returns the fields of a spec as plain data: numbers and strings; anything else becomes its string."""
    plain = (bool, int, float, str, type(None))
    values = {f.name: getattr(spec, f.name) for f in fields(spec)}
    return {name: value if isinstance(value, plain) else str(value) for name, value in values.items()}


@dataclass(frozen=True, slots=True)
class NoBlockSizes:
    """Block sizes of an implementation that has none, or that chooses them itself."""

    def to_dict(self) -> dict[str, int]:
        return {}

    def fitted(self, spec: SiteSpec) -> NoBlockSizes:
        return self

    def temporary_bytes(self, spec: SiteSpec, direction: str = "forward") -> int:
        """Returns 0: only compiling tells what an implementation needs beside operands and results."""
        return 0

    @classmethod
    def get_default(cls) -> NoBlockSizes:
        return cls()

    @classmethod
    def candidates(cls, spec: SiteSpec) -> tuple[NoBlockSizes, ...]:
        return (cls(),)
