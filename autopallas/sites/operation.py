"""Defines operations and their implementations, and how one is chosen; all operations share this code.

An operation is a folder in ``autopallas/kernels`` whose module ``operation`` has an ``OPERATION``; there is no list of
operations.  An operation that is declared in full has defaults for everything that its folder lacks: see
:class:`autopallas.sites.declared.DeclaredOperation`.  A folder may also hold a part of an operation that has another
folder; its declaration then has that operation's name.  The patterns that users declare are operations without a
folder, which are registered here.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar, cast, overload

import jax
import numpy as np

from autopallas.compat import ArrayFunction
from autopallas.errors import UnsupportedError, warn
from autopallas.numerics.classes import Numerics
from autopallas.sites.device import Device
from autopallas.sites.providers import PROVIDERS, ProvidedImplementation
from autopallas.sites.spec import BlockSizes, BlockSizesClass, SiteSpec, Sizes

if TYPE_CHECKING:
    from autopallas.sites.calls import SiteDescription
    from autopallas.sites.division import Divisible, Division, PositionOperand
    from autopallas.tuning.table import Found, Key, Rows

__all__ = [
    "HOME",
    "IMPLEMENTATIONS",
    "NOT_EXPORTED",
    "Implementation",
    "Kernel",
    "Operation",
    "Supported",
    "Unsupported",
    "folder_names",
    "implementation_names",
    "operation_folders",
    "operation_named",
    "operation_names",
    "provided",
    "register",
    "registered",
    "unregister",
]

IMPLEMENTATIONS = ("pallas_tpu", "pallas_gpu", "cudnn", "xla", "xla_heads", "reference")

HOME = {"pallas_tpu": "tpu", "pallas_gpu": "gpu", "cudnn": "gpu", "xla_heads": "cpu"}
"""Platform of each implementation that is written for one platform."""

NOT_EXPORTED: Mapping[str, str] = {"cudnn": "xla"}
"""Substitutes, in exported programs, for implementations whose calls ``jax.export`` does not promise to keep."""


def _order() -> Mapping[str, tuple[str, ...]]:
    return {"cpu": ("xla",), "gpu": ("pallas_gpu", "xla"), "tpu": ("pallas_tpu", "xla")}


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Supported:
    """Answer that the implementation can compute this spec on this device."""


@dataclass(frozen=True, slots=True)
class Unsupported:
    """Answer that the implementation cannot compute this spec on this device, with the reason."""

    reason: str


class Kernel(Protocol):
    """Functions of canonical arrays that a site runs; their arguments and results depend on the operation."""

    @property
    def forward(self) -> ArrayFunction:
        """``forward(spec, block_sizes, ...)`` computes the results."""

    @property
    def backward(self) -> ArrayFunction:
        """``backward(spec, block_sizes, ...)`` computes the gradients."""


class Implementation(Kernel, Protocol):
    """The module of an implementation, or what an operation provides instead of one."""

    @property
    def supports(self) -> Callable[..., Supported | Unsupported]:
        """``supports(spec, device)`` tells whether it can compute the spec there."""


class BlockSizesModule(Protocol):
    """Interface of an operation's module ``block_sizes``."""

    @property
    def BlockSizes(self) -> BlockSizesClass:
        """Class of the operation's block sizes."""


class TunedBlockSizes(Protocol):
    """Interface of an operation's module ``tuned_block_sizes``.  Specs are the operation's."""

    @property
    def TABLE(self) -> Mapping[str, Rows]:
        """Rows by device."""

    @property
    def find(self) -> Callable[..., Found | None]:
        """Finds the row for a spec: see :meth:`autopallas.tuning.table.Table.find`."""

    @property
    def infer_block_sizes(self) -> Callable[..., BlockSizes]:
        """Returns block sizes from the table, or the default."""

    @property
    def table_key(self) -> Callable[..., Key]:
        """Returns the key under which the table files a spec."""


class Example(Protocol):
    """Interface of an operation's module ``example``.

    It may also have ``repeats(site)``: how often one call of a search computes a site, in a loop; and
    ``original(site)``: what a search measures in the place of the site's equations, where these are only slow in a
    program, or None; and ``read(site, results, operands)``: the results as a search's functions give them, where what
    reads them in a program decides how they are computed.
    """

    @property
    def operands(self) -> Callable[..., Sequence[np.ndarray]]:
        """``operands(site, types, key)`` returns an array for each operand of a site of the operation."""

    def program(self) -> tuple[ArrayFunction, tuple[jax.ShapeDtypeStruct, ...]]:
        """Returns a small typical program, and the types of its arguments."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation.

    The implementation ``name`` of an operation is the module ``autopallas.kernels.<folder>.<name>``, imported when it
    is first asked for.  It offers ``supports(spec, device)``, ``forward(spec, block_sizes, ...)`` and
    ``backward(spec, block_sizes, ...)``; a module that does not exist counts as Unsupported.

    Attributes:
      name: its name in options, reports, tables and caches, and of its module in ``patterns``.
      order: the implementations to ask on each platform, in order.
      priority: patterns of operations with a higher priority look first, and win where several match.
      anchors: names of primitives, without any of which a program has neither a site nor a near miss, so that it is not
        searched; none where that cannot be said.
      folder: its folder in ``kernels``; by default it has the operation's name.  A declaration in a folder of another
        name is a part of the operation: it is selected, counted, filed and reported as the operation is, but has a
        description, a site and implementations of its own.
    """

    name: str
    order: Mapping[str, tuple[str, ...]] = field(default_factory=_order)
    priority: int = 0
    folder: str = ""
    anchors: frozenset[str] = frozenset()

    @property
    def package(self) -> str:
        """Name of its folder as a Python package."""
        return f"autopallas.kernels.{self.folder or self.name}"

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the kinds of its sites, each of which options can name; none where all sites are of one kind."""
        return ()

    @property
    def version(self) -> str:
        """Hash of what implementations outside of this package do; empty for an operation with a folder."""
        return ""

    def module(self, name: str) -> object | None:
        """Returns a module of the operation's folder, or of a provider; None where there is none of that name."""
        if (own := self.provided(name)) is not None:
            return importlib.import_module(own.module)
        try:
            return importlib.import_module(f"{self.package}.{name}")
        except ModuleNotFoundError as error:
            if error.name in (self.package, f"{self.package}.{name}"):
                return None
            raise

    @overload
    def part(self, name: Literal["block_sizes"]) -> BlockSizesModule: ...

    @overload
    def part(self, name: Literal["tuned_block_sizes"]) -> TunedBlockSizes: ...

    @overload
    def part(self, name: Literal["example"]) -> Example: ...

    def part(self, name: str) -> object:
        """Returns a module of the operation's folder that must exist.

        Raises:
          ImportError: the folder has no module of that name.
        """
        found = self.module(name)
        if found is None:
            raise ImportError(f"{self.name} has no module {name}")
        return found

    @overload
    def implementation(self, name: Literal["reference"]) -> Implementation: ...

    @overload
    def implementation(self, name: str) -> Implementation | None: ...

    def implementation(self, name: str) -> Implementation | None:
        """Returns the module of an implementation, or None where this operation has none of that name."""
        return cast("Implementation | None", self.module(name))

    @overload
    def hook(self, module: str, function: Literal["candidates"]) -> Callable[..., Sequence[BlockSizes]] | None: ...

    @overload
    def hook(self, module: str, function: Literal["default_block_sizes"]) -> Callable[..., BlockSizes] | None: ...

    @overload
    def hook(self, module: str, function: Literal["running_sizes"]) -> Callable[..., Sizes] | None: ...

    @overload
    def hook(
        self, module: str, function: Literal["divide"]
    ) -> Callable[[SiteDescription, Division], tuple[SiteDescription, tuple[PositionOperand, ...]]] | None: ...

    @overload
    def hook(
        self, module: str, function: Literal["with_sharded_groups"]
    ) -> Callable[[SiteDescription], Divisible | None] | None: ...

    def hook(self, module: str, function: str) -> Callable[..., object] | None:
        """Returns a function by which one of the operation's modules overrides a default, or None."""
        found: Callable[..., object] | None = getattr(self.module(module), function, None)
        return found

    def provided(self, name: str) -> ProvidedImplementation | None:
        """Returns the implementation of that name that another package brings, or None."""
        if name in _OWN:
            return None
        return provided().get((self.name, name))

    def program(self) -> tuple[ArrayFunction, tuple[jax.ShapeDtypeStruct, ...]]:
        """Returns a small typical program that computes the operation, and the types of its arguments: ``program`` of
        the module ``example``."""
        return self.part("example").program()

    def only_restates(self, name: str) -> bool:
        """Returns whether an implementation is the reference under another name, from which nothing is to be gained."""
        return name == "reference"

    def may_gain(self, name: str, objective: str, spec: SiteSpec, platform: str = "") -> bool:
        """Returns whether an implementation may gain what an objective asks for, so that a first step may wait for a
        measurement: its module states as ``GAINS``, or as ``gains(spec)``, what it is written for, and as ``GAINS_ON``
        by platform where that is something else; where it states nothing, it may gain anything."""
        module = self.implementation(name)
        own: Callable[[SiteSpec], Sequence[str]] | None = getattr(module, "gains", None)
        stated: Sequence[str] = getattr(module, "GAINS", (objective,))
        elsewhere: Mapping[str, Sequence[str]] = getattr(module, "GAINS_ON", {})
        return objective in elsewhere.get(platform, stated if own is None else own(spec))

    def supports(self, name: str, spec: SiteSpec, device: Device) -> Supported | Unsupported:
        """Returns whether the named implementation can compute ``spec`` on ``device``."""
        try:
            module = self.implementation(name)
        except ImportError as error:
            return Unsupported(f"{name} cannot be imported: {error}")
        if module is None:
            return Unsupported(f"{self.name} has no implementation {name}")
        return module.supports(spec, device)

    def numerics(self, name: str, spec: SiteSpec) -> Numerics:
        """Returns how the results of the named implementation relate to the original's, for values and gradients: what
        its module states as ``NUMERICS``, or as ``numerics(spec)``; "tolerance" where it states nothing."""
        module = self.implementation(name)
        own: Callable[[SiteSpec], Numerics] | None = getattr(module, "numerics", None)
        stated: Numerics = getattr(module, "NUMERICS", "tolerance")
        return stated if own is None else own(spec)

    def running_sizes(self, name: str, spec: SiteSpec, block_sizes: BlockSizes, device: Device) -> Sizes:
        """Returns the sizes with which the named implementation computes where it is given block sizes.

        Kernels cut an axis into blocks that divide it, and make blocks smaller until they fit into the memory of a
        device.  A module whose kernels do has ``running_sizes(spec, block_sizes, device)``, by which its kernels choose
        too.  Where the backward has blocks of its own, they are the forward's.

        Returns:
          Sizes by name; none where the implementation reads no block sizes.
        """
        if not self.reads_block_sizes(name):
            return {}
        own = self.hook(name, "running_sizes")
        return block_sizes.to_dict() if own is None else own(spec, block_sizes, device)

    def reads_block_sizes(self, name: str) -> bool:
        """Returns whether the named implementation reads block sizes: all do but the reference, and those whose modules
        state ``TILES = False``."""
        return not self.only_restates(name) and bool(getattr(self.implementation(name), "TILES", True))

    def usual(self, device: Device) -> str:
        """Returns the first implementation in the platform's order that this operation has."""
        order = self.requested(None, device)
        return next((name for name in order if self.has(name)), order[-1])

    def has(self, name: str) -> bool:
        """Returns whether an implementation has a module, without importing it."""
        if self.provided(name) is not None:
            return True
        return importlib.util.find_spec(f"{self.package}.{name}") is not None

    def requested(self, implementation: str | Sequence[str] | None, device: Device) -> tuple[str, ...]:
        """Returns the names to try, in order."""
        if implementation is None:
            further = (own.name for (op, _), own in provided().items() if op == self.name)
            further = (name for name in further if device.platform in provided()[self.name, name].platforms)
            return (*self.order.get(device.platform, ("xla",)), *further)
        names = (implementation,) if isinstance(implementation, str) else tuple(implementation)
        for name in names:
            if name not in IMPLEMENTATIONS and name not in implementation_names():
                known = ", ".join(implementation_names())
                raise UnsupportedError(f"no implementation is called {name!r}; there are {known}")
        if not names:
            known = ", ".join(implementation_names())
            raise UnsupportedError(f"an empty list names no implementation; there are {known}")
        return names

    def candidates(
        self, spec: SiteSpec, device: Device, implementation: str | Sequence[str] | None
    ) -> Iterator[tuple[str, Supported | Unsupported]]:
        """Yields the requested implementations in order, each with its answer."""
        for name in self.requested(implementation, device):
            yield name, self.supports(name, spec, device)

    def first_that_works(
        self,
        spec: SiteSpec,
        device: Device,
        implementation: str | Sequence[str] | None,
        call: Callable[[str], T],
    ) -> T:
        """Runs ``call(name)`` with the first requested implementation that supports ``spec`` and does not fail.

        Raises:
          UnsupportedError: a single named implementation does not support the spec, or every one in the list failed.
            An error inside a single named implementation is raised as it is.
        """
        failures: list[str] = []
        for name, answer in self.candidates(spec, device, implementation):
            if isinstance(answer, Unsupported):
                failures.append(f"{name}: {answer.reason}")
                continue
            try:
                result = call(name)
            except Exception as error:
                if isinstance(implementation, str):
                    raise
                failures.append(f"{name}: {type(error).__name__}: {error}")
                continue
            if failures and implementation is not None:
                warn(f"{self.name}: {'; '.join(failures)}; using {name}")
            return result
        raise UnsupportedError(f"{self.name} on {device.platform}: " + "; ".join(failures))


_OWN = frozenset({*IMPLEMENTATIONS, "block_sizes", "tuned_block_sizes", "example", "cases", "api", "operation"})
"""Names of modules of an operation's folder, which no provider has."""


def provided() -> Mapping[tuple[str, str], ProvidedImplementation]:
    """Returns the implementations that other packages bring, by (operation, name); loads them at the first call."""
    return PROVIDERS.loaded(folder_names(), _OWN)


def implementation_names() -> tuple[str, ...]:
    """Returns the names of all implementations, also of those that other packages bring."""
    return (*IMPLEMENTATIONS, *dict.fromkeys(name for _, name in provided()))


@functools.cache
def folder_names() -> tuple[str, ...]:
    """Returns the names of the folders in ``kernels`` that declare an operation or a part of one."""
    kernels = Path(__file__).parents[1] / "kernels"
    return tuple(sorted(path.parent.name for path in kernels.glob("*/operation.py")))


@functools.cache
def operation_names() -> tuple[str, ...]:
    """Returns the names of all operations, those with the highest priority first."""
    names = [folder for folder in folder_names() if operation_named(folder).name == folder]
    return tuple(sorted(names, key=lambda name: -operation_named(name).priority))


@functools.cache
def operation_folders(name: str) -> tuple[str, ...]:
    """Returns the folders of an operation in ``kernels``: its own, and then those of its parts; none where there is no
    such operation."""
    folders = [folder for folder in folder_names() if operation_named(folder).name == name]
    return tuple(sorted(folders, key=lambda folder: folder != name))


def operation_named(name: str) -> Operation:
    """Returns the operation that a folder in ``kernels`` declares, the one of that name or a part of another one; else
    the registered operation of that name."""
    if name not in folder_names():
        for operation in _REGISTERED.all():
            if operation.name == name:
                return operation
    return _of_folder(name)


@functools.cache
def _of_folder(name: str) -> Operation:
    found: Operation = importlib.import_module(f"autopallas.kernels.{name}.operation").OPERATION
    return found


class _Registered:
    """The operations of this process that have no folder, in the order of their registration."""

    def __init__(self) -> None:
        self._operations: tuple[Operation, ...] = ()
        self._lock = threading.Lock()

    def add(self, operation: Operation) -> None:
        with self._lock:  # registering a name again, as in a notebook, replaces the operation
            self._operations = (*(o for o in self._operations if o.name != operation.name), operation)

    def remove(self, operation: Operation) -> None:
        with self._lock:
            self._operations = tuple(o for o in self._operations if o is not operation)

    def all(self) -> tuple[Operation, ...]:
        return self._operations


_REGISTERED = _Registered()


def registered() -> tuple[Operation, ...]:
    """Returns the operations without a folder that programs are searched for."""
    return _REGISTERED.all()


def register(operation: Operation) -> None:
    """Registers an operation that has no folder, instead of one of the same name."""
    _REGISTERED.add(operation)


def unregister(operation: Operation) -> None:
    """Removes a registered operation."""
    _REGISTERED.remove(operation)
