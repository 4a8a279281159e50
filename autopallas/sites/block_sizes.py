"""Makes the class of an operation's block sizes from their names and defaults, where its declaration lists these."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from typing import ClassVar, cast

from autopallas.sites.spec import BlockSizesClass, SiteSpec, Sizes

__all__ = ["Candidates", "DeclaredBlockSizes", "aligned", "block_sizes_class", "dividing", "evened"]

Candidates = Callable[..., Sequence[Sizes]]
"""``candidates(spec)`` returns all block sizes that are valid for a spec, the best guess first."""

_LEAST = 64
"""Smaller blocks stay as they are: a vector more or less is a good part of their time."""


def aligned(block: int, length: int, multiple: int = 8) -> int:
    """Returns the size rounded up to a multiple, and at most the length of an axis.

    Example:
      >>> aligned(250, 1000), aligned(250, 100)
      (256, 100)
    """
    return min(length, -(-block // multiple) * multiple)


def dividing(block: int, length: int, multiple: int = 1) -> int:
    """Returns the size next to ``block``, at most a quarter away, of which ``length`` is a multiple; else ``block``.

    A shorter last block has loops of its own, for each block of the other axis, and a loop takes as long to compile as
    any other: along two axes a multiple is half or a quarter of the kernels.

    Args:
      block: a size of blocks.
      length: that of an axis.
      multiple: what the size is a multiple of, as ``block`` is.

    Example:
      >>> dividing(256, 1500), dividing(256, 1536), dividing(256, 1009), dividing(256, 1500, multiple=64)
      (300, 256, 256, 256)
    """
    if not _LEAST <= block < length or length % block == 0:
        return block
    counts = range(-(-4 * length // (5 * block)), 4 * length // (3 * block) + 1)
    near = (length // count for count in counts if length % (count * multiple) == 0)
    return min(near, key=lambda size: (size % 8 > 0, size % 4 > 0, abs(size - block)), default=block)


def evened(block: int, length: int, multiple: int = 8) -> int:
    """Returns the least size, up to a multiple, of as few blocks as cover an axis with ``block``, and at most that.

    Where the last of such blocks ends with the axis, they have one size, and the others repeat as little as may be.

    Example:
      >>> evened(256, 1023), evened(128, 197), evened(256, 512), evened(256, 100)
      (256, 104, 256, 100)
    """
    if block >= length or length % block == 0:
        return min(block, length)
    return min(block, aligned(-(-length // -(-length // block)), length, multiple))


@dataclass(frozen=True)
class DeclaredBlockSizes:
    """Base class of block sizes that a declaration lists: those that its candidates hold are valid for a spec."""

    listed: ClassVar[Candidates | None] = None

    def to_dict(self) -> dict[str, int]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def fitted(self, spec: SiteSpec) -> DeclaredBlockSizes:
        """Returns the same if they are valid for a spec, else the best guess."""
        valid = self.candidates(spec)
        return self if self in valid or not valid else valid[0]

    def temporary_bytes(self, spec: SiteSpec, direction: str = "forward") -> int:
        """Returns 0: only compiling tells what an implementation needs beside operands and results."""
        return 0

    @classmethod
    def get_default(cls) -> DeclaredBlockSizes:
        return cls()

    @classmethod
    def candidates(cls, spec: SiteSpec) -> tuple[DeclaredBlockSizes, ...]:
        """Returns the block sizes that are valid for a spec, best guess first; none where there are none.

        Raises:
          ValueError: the declaration's function gives something else.
        """
        return (cls(),) if cls.listed is None else tuple(map(cls._checked, cls.listed(spec)))

    @classmethod
    def _checked(cls, given: Sizes) -> DeclaredBlockSizes:
        kinds = {f.name: type(getattr(cls(), f.name)) for f in fields(cls)}
        if not isinstance(given, Mapping) or not given.keys() <= kinds.keys():
            raise ValueError(f"candidates gives {given!r}; give a mapping with names out of {', '.join(kinds)}")
        for name, value in given.items():
            if type(value) is not kinds[name]:
                raise ValueError(f"candidates gives {name}={value!r}; give a Python {kinds[name].__name__}")
        return cls(**given)


def block_sizes_class(name: str, defaults: Sizes, candidates: Candidates | None = None) -> BlockSizesClass:
    """Returns the class of an operation's block sizes.

    Args:
      name: the operation's name.
      defaults: the block sizes by name, with their default values.
      candidates: returns all block sizes that are valid for a spec, as mappings, the best guess first; what one leaves
        out has its default.  None: the defaults are valid for every spec.
    """
    own = [(size, type(value), field(default=value)) for size, value in defaults.items()]
    listed = {"listed": None if candidates is None else staticmethod(candidates)}
    kind = make_dataclass(f"{name}_block_sizes", own, bases=(DeclaredBlockSizes,), frozen=True, namespace=listed)
    return cast(BlockSizesClass, kind)
