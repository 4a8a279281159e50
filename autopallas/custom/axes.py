"""Checks the letters that a custom pattern declares for the axes of its operands and result."""

from __future__ import annotations

import keyword
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax

from autopallas.errors import OptionError

__all__ = ["Axes"]


class Axes(NamedTuple):
    """The letters of a pattern's axes, as its declaration gives them; empty where it declares none."""

    operands: dict[str, str]
    result: str
    sizes: dict[str, str]
    rows: str
    extents: dict[str, int]
    """Size of each letter in the pattern's example."""

    @staticmethod
    def of(
        operands: Mapping[str, str] | None,
        result: str | None,
        sizes: Mapping[str, str] | None,
        rows: str,
        types: Sequence[jax.ShapeDtypeStruct],
        scalars: Sequence[str],
    ) -> Axes:
        """Returns the letters.

        Raises:
          OptionError: they contradict each other, or the example's shapes.
        """
        if operands is None and result is None and not sizes and not rows:
            return Axes({}, "", {}, "", {})
        if not isinstance(operands, Mapping) or not isinstance(result, str):
            raise OptionError('letters of axes are given for all arrays: operands={"x": "M N"}, result="M N"')
        if sizes is not None and not isinstance(sizes, Mapping):
            raise OptionError(f'sizes is {sizes!r}; give names for letters, such as {{"M": "rows"}}')
        if len(operands) != len(types):
            raise OptionError(f"operands has {len(operands)} names, and shapes has {len(types)} examples")
        extents: dict[str, int] = {}
        for (name, letters), kind in zip(operands.items(), types, strict=True):
            if not isinstance(letters, str) or len(letters.split()) != len(kind.shape):
                raise OptionError(f"{name} has the letters {letters!r}, and its example the shape {kind.shape}")
            for letter, size in zip(letters.split(), kind.shape, strict=True):
                if extents.setdefault(letter, size) != size:
                    raise OptionError(f"the letter {letter} stands for {extents[letter]} and {size} in the example")
        if unknown := [x for x in (*result.split(), *(sizes or {})) if x not in extents]:
            raise OptionError(f"no operand has an axis {unknown[0]}")
        if unknown := [x for x in rows.split() if x not in result.split()]:
            raise OptionError(f"rows has {unknown[0]}, which the result lacks; rows are computed independently")
        named = {letter: (sizes or {}).get(letter, letter) for letter in extents}
        for letters in (*operands.values(), result, rows):
            if len(set(letters.split())) != len(letters.split()):
                raise OptionError(f"{letters!r} has a letter twice")
        fields = [*named.values(), *(f"{name}_dtype" for name in (*operands, "result")), *scalars]
        for name in (*operands, *fields):
            if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
                raise OptionError(f"{name!r} is no name for an operand or a size")
        if len(set(fields)) != len(fields):
            raise OptionError(f"operands, sizes and scalars need different names, and they have {', '.join(fields)}")
        return Axes(dict(operands), result, named, rows, extents)

    def check_result(self, shape: tuple[int, ...]) -> None:
        """Raises OptionError if the reference's result does not have the letters' sizes."""
        wanted = tuple(self.extents[letter] for letter in self.result.split())
        if self.operands and shape != wanted:
            raise OptionError(f"result has the letters {self.result!r}, which are {wanted}, and the reference {shape}")
