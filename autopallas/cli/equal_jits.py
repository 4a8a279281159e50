"""Shares optimized functions between equal uses of ``jax.jit``, as ``jax.jit`` itself shares what it traces.

A program may write ``jax.jit(step)(state)`` in a loop: JAX finds what it compiled by the function and the settings.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Hashable

from autopallas import compat
from autopallas.compat import ArrayFunction

__all__ = ["shared"]

_ATTRIBUTE = "_autopallas_jits"


class _Kept:
    """The optimized functions of one function, which holds them itself, so that they live as long as it does.

    Attributes:
      function: the function; what copies its attributes is another one.
      by_settings: an optimized function for each of the settings of ``jax.jit``.
    """

    def __init__(self, function: ArrayFunction | None = None):
        self.function = function
        self.by_settings: dict[Hashable, ArrayFunction] = {}

    def __reduce__(self) -> tuple[type[_Kept], tuple[()]]:
        """Pickles and copies as none at all."""
        return _Kept, ()


def shared(jitted: ArrayFunction, make: Callable[[], ArrayFunction]) -> ArrayFunction:
    """Returns what was made for an equal ``jax.jit`` function before, or makes it.

    Args:
      jitted: what ``jax.jit`` returned.
      make: makes an optimized function of it.
    """
    function = getattr(jitted, "__wrapped__", None)
    settings = compat.jit_key(jitted)
    if settings is None or not isinstance(function, (types.FunctionType, functools.partial)):
        return make()  # other objects may count their attributes, or refuse new ones
    kept = vars(function).get(_ATTRIBUTE)
    if not isinstance(kept, _Kept) or kept.function is not function:
        kept = _Kept(function)
        setattr(function, _ATTRIBUTE, kept)
    if settings not in kept.by_settings:
        kept.by_settings[settings] = make()
    return kept.by_settings[settings]
