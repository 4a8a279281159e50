"""The patterns that are declared in this process, and what each consists of."""

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
      name: how reports call it.
      reference: plain JAX; the equations that it traces to are what is looked for.
      replacement: what runs instead.
      shapes: types of the operands for which the reference was declared; other sizes are found too.
      scalars: names of the keyword arguments that may have any value.
      differentiable: whether JAX can differentiate the replacement, or else differentiates the reference.
      platforms: where it is used.
      inputs: gives operands of certain types, for the check before first use; None: random numbers.
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
        """Functions that are traced from now on do not look for it any more."""
        _DECLARED.remove(self)

    def __repr__(self) -> str:
        return f"<autopallas.pattern {self.name}>"


class _Declared:
    """The patterns of this process, in the order of their declaration."""

    def __init__(self) -> None:
        self._patterns: tuple[Pattern, ...] = ()
        self._lock = threading.Lock()

    def add(self, pattern: Pattern) -> None:
        with self._lock:  # a name that is declared again, as in a notebook, is meant to change
            self._patterns = (*(p for p in self._patterns if p.name != pattern.name), pattern)

    def remove(self, pattern: Pattern) -> None:
        with self._lock:
            self._patterns = tuple(p for p in self._patterns if p is not pattern)

    def all(self) -> tuple[Pattern, ...]:
        return self._patterns


_DECLARED = _Declared()


def declared() -> tuple[Pattern, ...]:
    """The own patterns that programs are searched for."""
    return _DECLARED.all()


def register(pattern: Pattern) -> None:
    """Functions that are traced from now on look for it, in place of one of the same name."""
    _DECLARED.add(pattern)
