"""Context variables that JAX knows of: what is traced under one value is not run under another."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import itertools
from collections.abc import Iterator
from typing import Generic, TypeVar

import jax

__all__ = ["TraceContext"]

Setting = TypeVar("Setting")

_settings = jax.make_user_context(default_value=())
"""The values of all context variables that are not their defaults, as ((variable, value), ...) in the order of their
creation.  JAX has one variable for all, created with the package: each one more is one more part of every key of every
jit cache, so that what was compiled before it is traced and compiled again."""

_platforms: str | None = getattr(jax.config, "jax_platforms", None)
if importlib.util.find_spec("libtpu") and "tpu" in (_platforms or "tpu"):
    # From JAX 0.11 on this has such a variable of its own.  Imported within a first call, for a kernel, it would have
    # the second call compiled again.
    importlib.import_module("jax.experimental.pallas.tpu")


class TraceContext(Generic[Setting]):
    """A context variable whose value, which has to be hashable, is part of the key of every jit cache."""

    _created = itertools.count()

    def __init__(self, default: Setting) -> None:
        self._default, self._number = default, next(self._created)

    @property
    def value(self) -> Setting:
        """The value in this thread."""
        return next((value for variable, value in _settings.value if variable is self), self._default)

    @contextlib.contextmanager
    def __call__(self, value: Setting) -> Iterator[None]:
        """Returns a context in which the variable has a value."""
        others = [entry for entry in _settings.value if entry[0] is not self]
        own = [] if value == self._default else [(self, value)]
        with _settings(tuple(sorted(others + own, key=lambda entry: entry[0]._number))):
            yield
