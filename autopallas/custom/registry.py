"""Keeps the patterns that are declared in this process, and defines what each consists of."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
from jax.typing import ArrayLike

from autopallas.compat import ArrayFunction, PyTree

__all__ = ["PLATFORMS", "Pattern", "declared", "register"]

PLATFORMS = ("cpu", "gpu", "tpu")


@dataclass(frozen=True, eq=False)
class Pattern:
    """A reference computation and its replacement; made by :func:`autopallas.pattern`.

    Calling it calls the replacement.

    Attributes:
      name: its name in reports.
      reference: plain JAX; programs are searched for the equations that it traces to.
      replacement: the function that runs instead.
      shapes: types of the operands for which the reference was declared; other sizes are found too.
      scalars: names of the keyword arguments that may have any value.
      differentiable: whether JAX can differentiate the replacement; otherwise it differentiates the reference.
      platforms: where it is used.
      inputs: returns operands of given types, for the check before first use; None: random numbers.
    """

    name: str
    reference: ArrayFunction
    replacement: ArrayFunction
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    scalars: tuple[str, ...] = ()
    differentiable: bool = False
    platforms: tuple[str, ...] = PLATFORMS
    inputs: Callable[[Sequence[jax.ShapeDtypeStruct]], Sequence[ArrayLike]] | None = None

    def __call__(self, *operands: PyTree, **scalars: PyTree) -> PyTree:
        return self.replacement(*operands, **scalars)

    def remove(self) -> None:
        """Removes the pattern: functions that are traced from now on do not look for it any more."""
        _DECLARED.remove(self)

    def __repr__(self) -> str:
        return f"<autopallas.pattern {self.name}>"


class _Declared:
    """The patterns of this process, in the order of their declaration."""

    def __init__(self) -> None:
        self._patterns: tuple[Pattern, ...] = ()
        self._lock = threading.Lock()

    def add(self, pattern: Pattern) -> None:
        with self._lock:  # declaring a name again, as in a notebook, replaces the pattern
            self._patterns = (*(p for p in self._patterns if p.name != pattern.name), pattern)

    def remove(self, pattern: Pattern) -> None:
        with self._lock:
            self._patterns = tuple(p for p in self._patterns if p is not pattern)

    def all(self) -> tuple[Pattern, ...]:
        return self._patterns


_DECLARED = _Declared()


def declared() -> tuple[Pattern, ...]:
    """Returns the custom patterns that programs are searched for."""
    return _DECLARED.all()


def register(pattern: Pattern) -> None:
    """Registers a pattern: functions traced from now on look for it, instead of one of the same name."""
    _DECLARED.add(pattern)
