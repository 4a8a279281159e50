"""Finds what other packages bring, by entry points of the group "autopallas.operations".

An entry point names a :class:`Provider`, or a function that returns one.  All are loaded together, when a function is
first traced or an implementation of an unknown name is asked for, and never at import.  A provider that fails costs
itself alone: a warning, and a line in every report.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata

import jax

from autopallas.errors import warn

__all__ = ["GROUP", "PROVIDERS", "Fault", "ProvidedImplementation", "Provider", "Providers"]

GROUP = "autopallas.operations"
"""Group of the entry points."""


@dataclass(frozen=True, slots=True)
class ProvidedImplementation:
    """An implementation of one of this package's operations in another package.

    Attributes:
      operation: the operation's name.
      name: the implementation's name, as options and reports have it.
      module: the module that has ``supports``, ``forward`` and ``backward`` as an implementation of this operation has
        them; it is imported when the implementation is first considered.
      platforms: where it takes part in the race without being named: "cpu", "gpu", "tpu".
      version: what its kernels are, such as the version of its package: what was measured of another one is forgotten.
    """

    operation: str
    name: str
    module: str
    platforms: tuple[str, ...]
    version: str = ""


@dataclass(frozen=True, slots=True)
class Provider:
    """What a package brings.

    Attributes:
      implementations: further implementations of this package's operations.
      declare: called once; declares operations, as ``autopallas.pattern`` does.
    """

    implementations: tuple[ProvidedImplementation, ...] = ()
    declare: Callable[[], object] | None = None


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a provider is not used."""

    provider: str
    error: str


Known = Mapping[tuple[str, str], ProvidedImplementation]


class Providers:
    """The providers of this process, loaded once.

    Args:
      entry_points: returns the entry points; those of all installed packages.
    """

    def __init__(self, entry_points: Callable[[], Iterable[metadata.EntryPoint]] | None = None):
        self._entry_points = entry_points or (lambda: metadata.entry_points(group=GROUP))
        self._lock = threading.RLock()  # a provider that declares something may ask for names
        self._begun = False
        self._implementations: dict[tuple[str, str], ProvidedImplementation] = {}
        self._faults: list[Fault] = []

    @property
    def faults(self) -> tuple[Fault, ...]:
        """The providers that failed, as far as they were loaded."""
        return tuple(self._faults)

    def loaded(self, operations: Collection[str], taken: Collection[str]) -> Known:
        """Returns the implementations by (operation, name), and loads the providers first if that was not done.

        Args:
          operations: names of the operations that there are.
          taken: names of this package's implementations, which stay its own.
        """
        with self._lock:
            if not self._begun:
                self._begun = True
                try:
                    found = sorted(self._entry_points(), key=lambda entry: (entry.name, entry.value))
                except Exception as error:  # a broken installation
                    found = []
                    self._failed("entry points", error)
                for entry in found:
                    try:
                        with jax.ensure_compile_time_eval():
                            self._load(entry, operations, taken)
                    except Exception as error:
                        self._failed(entry.name, error)
        return self._implementations

    def _load(self, entry: metadata.EntryPoint, operations: Collection[str], taken: Collection[str]) -> None:
        provider: object = entry.load()
        if callable(provider):
            provider = provider()
        if not isinstance(provider, Provider):
            raise TypeError(f"{entry.value} is a {type(provider).__name__}, not an autopallas.sites.providers.Provider")
        new: dict[tuple[str, str], ProvidedImplementation] = {}
        for own in provider.implementations:
            key = (own.operation, own.name)
            if own.operation not in operations:
                raise ValueError(f"there is no operation {own.operation!r}")
            if not own.name.isidentifier() or own.name in taken:
                raise ValueError(f"{own.name!r} is no name for an implementation, or one of autopallas itself")
            if key in self._implementations or key in new:
                raise ValueError(f"another provider has an implementation {own.name!r} of {own.operation}")
            new[key] = own
        if provider.declare is not None:
            provider.declare()
        self._implementations = self._implementations | new

    def _failed(self, name: str, error: Exception) -> None:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        self._faults.append(Fault(name, reason))
        warn(f"autopallas does without the provider {name}: {reason}")


PROVIDERS = Providers()
