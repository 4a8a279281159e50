"""Digests by which programs are told apart: a jaxpr's text names neither the arrays that it holds nor its callbacks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from weakref import ReferenceType, ref

import numpy as np

from autopallas import compat, jaxprs
from autopallas.compat import JaxprLike
from autopallas.graph.custom_rules import CUSTOM_RULES
from autopallas.graph.equal_programs import same_programs

__all__ = ["bits", "digest"]

_NO_VALUES = frozenset({"policy"})
"""Parameters that do not change what an equation computes."""


def digest(programs: Iterable[JaxprLike], further: bytes = b"") -> str:
    """Returns 16 hexadecimal digits that are equal for equal programs.

    Programs are equal if they have the same text, hold equal arrays and call the same functions.  Rules of derivatives
    do not count.

    Args:
      programs: open or closed jaxprs.
      further: what else has to be equal.

    Example:
      >>> held = [compat.make_jaxpr(lambda x, c=c: x + c, 1.0) for c in (np.ones(3), np.ones(3), np.zeros(3))]
      >>> len({digest([program]) for program in held})
      2
    """
    found = hashlib.sha256(further)
    todo = list(programs)
    for program in todo:
        found.update(_text(program).encode())
    while todo:
        jaxpr, held = jaxprs.open_jaxpr(todo.pop())
        for array in held:
            found.update(_held(array))
        for equation in jaxpr.eqns:
            todo += [body for _, _, body in jaxprs.bodies(equation)]
            if equation.primitive.name not in CUSTOM_RULES:
                for name, value in equation.params.items():
                    if callable(value) and not isinstance(value, type) and name not in _NO_VALUES:
                        found.update(f"{name} {id(value)}".encode())  # the equation holds it
    return found.hexdigest()[:16]


_MOST_RECENT = 8
_recent: tuple[tuple[ReferenceType[JaxprLike], str], ...] = ()
"""The programs whose text was written last: those of equal layers have the same, and take far longer to write than to
compare."""


def _text(program: JaxprLike) -> str:
    """Returns a program's text."""
    global _recent
    for reference, text in _recent:
        other = reference()
        if other is not None and type(other) is type(program) and same_programs(other, program):
            return text
    text = str(program)
    _recent = ((ref(program), text), *_recent[: _MOST_RECENT - 1])
    return text


def bits(array: np.generic | np.ndarray) -> bytes:
    """Returns what tells an array from others: its elements have more digits than their text."""
    return f"{array.dtype} {array.shape}".encode() + np.ascontiguousarray(array).tobytes()


def _held(value: object) -> bytes:
    """Returns what tells an array from others that programs hold; itself, where its elements are not at hand."""
    here = not compat.is_tracer(value) and getattr(value, "is_fully_addressable", True)
    return bits(np.asarray(value)) if here else str(id(value)).encode()
