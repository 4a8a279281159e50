"""Tables of declared operations: how a site is filed follows from its operation's declaration.

The bucket has the size of each letter that an array of the site has.  The last of the letters of rows, of which there
are many and along which time grows evenly, is filed in four ranges; every other one by the nearest power of two.  The
invariants are what else decides how long a site takes: the dtypes of its arrays of several axes, which vectors it has,
and its parameters without floating numbers, which kernels read as data.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields
from typing import cast

import numpy as np

from autopallas.sites.declared import DeclaredOperation
from autopallas.sites.elementwise import ElementwiseProgram
from autopallas.sites.spec import BlockSizes, Spec
from autopallas.tuning.row import Key
from autopallas.tuning.table import Table

__all__ = ["DeclaredTable"]

_ROWS = (32768, 8192, 1024, 1)
"""Smallest numbers of rows of the ranges."""
_ENDING = "_dtype"


class DeclaredTable(Table[Spec, BlockSizes]):
    """The rows of a declared operation.  Its folder has one in a module ``tuned_block_sizes``::

        TABLE = DeclaredTable(OPERATION)
        table_key, find, infer_block_sizes = TABLE.key, TABLE.find, TABLE.infer_block_sizes

    Buckets are not listed, so that no row is the "nearest" one: what was measured at other sizes says nothing.
    """

    def __init__(self, operation: DeclaredOperation):
        self._declared = operation
        self._kind = operation.part("block_sizes").BlockSizes
        super().__init__(operation, (), _unfiled, cast("type[BlockSizes]", self._kind))

    def key(self, spec: Spec, implementation: str, direction: str) -> Key:
        own = self._declared
        dtypes = [dtype for name, dtype in self._dtypes(spec) if self._has_several_axes(name)]
        widest = max(dtypes, key=lambda dtype: dtype.itemsize)
        sizes = (f"{letter}{self._size(letter, size)}" for letter, size in own.letters(spec).items())
        return implementation, direction, widest.name, " ".join(sizes), ", ".join(self._invariants(spec, widest))

    def _guess(self, spec: Spec) -> BlockSizes:
        return self._kind.candidates(spec)[0]

    def _size(self, letter: str, size: int) -> str:
        rows = self._declared.rows.split()
        if rows and letter == rows[-1]:
            return f">={next(least for least in _ROWS if size >= least)}" if size else "0"
        return str(2 ** round(math.log2(size))) if size else "0"

    def _dtypes(self, spec: Spec) -> Iterator[tuple[str, np.dtype]]:
        """Yields the arrays that a site has, each with its dtype."""
        for name in (*self._declared.operands, "result", *self._declared.further):
            dtype: np.dtype | None = getattr(spec, f"{name}{_ENDING}", None)
            if dtype is not None:
                yield name, dtype

    def _has_several_axes(self, name: str) -> bool:
        """Returns whether an array has more than one axis, without that of the letter that all operands have."""
        own = self._declared
        letters = {**own.operands, **own.further, "result": own.result}[name].split()
        return len(set(letters) - {own.first_row}) > 1 or not any(
            len(set(other.split()) - {own.first_row}) > 1 for other in (*own.operands.values(), own.result)
        )

    def _invariants(self, spec: Spec, widest: np.dtype) -> Iterator[str]:
        for name, dtype in self._dtypes(spec):
            told = self._has_several_axes(name) and dtype != widest
            yield f"{name} {dtype.name}" if told else name
        sizes = set(self._declared.sizes.values())
        for field in fields(spec):
            value = getattr(spec, field.name)
            if field.name in sizes or field.name.endswith(_ENDING) or isinstance(value, float | np.floating):
                continue
            if isinstance(value, ElementwiseProgram):  # in which order it computes is no matter
                steps = " ".join(sorted(value.primitives - {"convert_element_type", "mul"}))
                read = " and ".join(sorted({given.dtype.name for given in value.inputs}))
                yield f"{field.name} of {steps or 'mul'} in {read}"
            elif value not in (None, False, ()):
                yield f"{field.name} {value}"


def _unfiled(*_: object) -> tuple[str, dict[str, int], str]:
    raise AssertionError("a declared table has keys of its own")
