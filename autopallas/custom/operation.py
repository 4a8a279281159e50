"""Makes a declared operation of a custom pattern: its reference, and its replacement as the one implementation.

Where a pattern declares its axes by letters, they are those of the operation.  Where it does not, the program's arrays
are taken as they are: every axis has a letter of its own, and nothing is known of it.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, ClassVar, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np

from autopallas.compat import Shaped
from autopallas.compile.outside_trace import is_within, within
from autopallas.numerics.classes import Numerics
from autopallas.sites.block_sizes import block_sizes_class
from autopallas.sites.calls import SiteDescription
from autopallas.sites.declared import DeclaredOperation, DeclaredSite, Differentiated
from autopallas.sites.declared_call import shape_in_letters, site_of
from autopallas.sites.device import Device
from autopallas.sites.index_notation import Operand
from autopallas.sites.operation import IMPLEMENTATIONS, Supported, Unsupported
from autopallas.sites.spec import BlockSizes, BlockSizesClass, Dtype, NoBlockSizes, SiteSpec, Spec

if TYPE_CHECKING:
    from autopallas.custom.registry import Pattern

__all__ = ["PatternOperation", "PatternSpec", "ReplacementError", "operation_of", "pattern_of", "site_for"]

Arrays: TypeAlias = Mapping[str, jax.Array]

_MODULES = (*IMPLEMENTATIONS, "block_sizes", "tuned_block_sizes", "example")


class ReplacementError(TypeError):
    """Raised where a replacement returns another type than its reference."""


class PatternSpec(Spec):
    """Base class of the specs of patterns, each of which has a class of its own: sizes, dtypes and scalars."""

    operation: ClassVar[PatternOperation]

    def scalars(self) -> dict[str, float]:
        """Returns the values of the reference's scalars."""
        return {name: getattr(self, name) for name in self.operation.pattern.scalars}

    def assumptions(self) -> tuple[str, ...]:
        """Returns in words what has to hold for the result to equal the original's."""
        return ("the replacement computes what its reference does, also where it was not compared",)

    def to_dict(self) -> dict[str, object]:
        """Returns the spec as plain data; the sizes of letters by their names, where the pattern has letters."""
        own, by_letters = self.operation, bool(self.operation.pattern.operands)

        def short(name: str, letters: str) -> str:
            axes = letters.split() if by_letters else own.extents(self, letters)
            return _short(axes, getattr(self, f"{name}_dtype"))

        operands = [short(name, letters) for name, letters in own.operands.items()]
        data: dict[str, object] = {"operands": operands, "result": short("result", own.result)}
        sizes = {name: getattr(self, name) for name in own.sizes.values()} if by_letters else {}
        return data | {"scalars": self.scalars()} | sizes

    def __str__(self) -> str:
        own = self.operation
        operands = ", ".join(_short(own.shape(self, n), getattr(self, f"{n}_dtype")) for n in own.operands)
        scalars = "".join(f", {name}={value:.6g}" for name, value in self.scalars().items())
        result = _short(own.extents(self, own.result), getattr(self, "result_dtype"))  # noqa: B009 (of every pattern)
        return f"{own.name}({operands}{scalars}) -> {result}"


def _short(axes: Sequence[object], dtype: Dtype) -> str:
    return f"{dtype.name}[{','.join(map(str, axes))}]"


@dataclass(frozen=True, eq=False)
class PatternOperation(DeclaredOperation):
    """The operation of a pattern, or of one that declares no letters for arrays of certain ranks."""

    pattern: Pattern = field(kw_only=True)

    @property
    def package(self) -> str:
        return str(getattr(self.pattern.replacement, "__module__", self.name))

    @property
    def version(self) -> str:
        return self.pattern.version

    @property
    def replacement(self) -> str:
        """Name of the implementation: that of the replacement."""
        name = str(getattr(self.pattern.replacement, "__name__", "replacement"))
        return name if name not in _MODULES else f"{name}_of_pattern"

    def module(self, name: str) -> object | None:
        """Returns the replacement, the reference, or what a declared operation has by default."""
        if name == self.replacement:
            return Differentiated(f"{self.package}.{name}", self._replaced)
        return SimpleNamespace(operands=self._example) if name == "example" else self.default(name)

    def has(self, name: str) -> bool:
        return name in (self.replacement, "reference", "xla")

    def only_restates(self, name: str) -> bool:
        return name == "reference"

    def numerics(self, name: str, spec: SiteSpec) -> Numerics:
        return self.pattern.numerics if name == self.replacement else "identical"

    def supports(self, name: str, spec: SiteSpec, device: Device) -> Supported | Unsupported:
        platforms = self.pattern.platforms
        if device.platform not in platforms:
            return Unsupported(f"the pattern is for {', '.join(platforms)}")
        if is_within((PatternOperation, id(self.pattern))):  # replaced there too, it would call itself without end
            return Unsupported("the replacement calls it itself")
        if not self.block_sizes.candidates(spec):
            return Unsupported("the pattern has no block sizes for these sizes")
        return Supported()

    def requested(self, implementation: str | Sequence[str] | None, device: Device) -> tuple[str, ...]:
        """Returns the replacement, whatever is asked for of other operations."""
        return (self.replacement,)

    def candidates(
        self, spec: SiteSpec, device: Device, implementation: str | Sequence[str] | None
    ) -> Iterator[tuple[str, Supported | Unsupported]]:
        """Yields the replacement, if it has block sizes to search for."""
        if self.pattern.block_sizes:
            yield self.replacement, self.supports(self.replacement, spec, device)
        else:
            yield self.name, Unsupported("an own pattern has no block sizes to search for")

    def _replaced(self, spec: Spec, block_sizes: BlockSizes | None, operands: Arrays) -> jax.Array:
        """Calls the replacement with operands that vary along all their letters."""
        assert isinstance(spec, PatternSpec)
        arrays = [jnp.broadcast_to(operands[name], self.shape(spec, name)) for name in self.operands]
        sizes = {} if block_sizes is None else block_sizes.fitted(spec).to_dict()
        with within((PatternOperation, id(self.pattern))):
            found: jax.Array = self.pattern.replacement(*arrays, **spec.scalars(), **sizes)
        shape, dtype = self.extents(spec, self.result), getattr(spec, "result_dtype")  # noqa: B009
        if (found.shape, found.dtype) != (shape, dtype):
            given, wanted = (f"{d}{list(s)}" for s, d in ((found.shape, found.dtype), (shape, dtype)))
            raise ReplacementError(f"the replacement gives {given} where the reference gives {wanted}")
        return found

    def _example(self, site: DeclaredSite, types: Sequence[Shaped], key: int = 0) -> list[np.ndarray]:
        """Returns operands for a site, those that the pattern gives or random ones; uses of one value get the same."""
        kinds = [types[site.uses.index(own.position)] for _, own in site.operands]
        given = self.pattern.example([jax.ShapeDtypeStruct(k.shape, k.dtype) for k in kinds], key)
        values = {own.position: x for (_, own), x in zip(site.operands, given, strict=True)}
        return [values[value] for value in site.uses]


def pattern_of(site: SiteDescription) -> Pattern | None:
    """Returns the pattern that a site belongs to; None for a site of an operation of this package."""
    return site.operation.pattern if isinstance(site.operation, PatternOperation) else None


@functools.lru_cache(maxsize=1024)
def operation_of(pattern: Pattern, ranks: tuple[int, ...] | None = None) -> PatternOperation:
    """Returns the operation of a pattern, which depends on ranks if it declares no letters.

    Args:
      pattern: the pattern.
      ranks: those of the operands and, last, of the result; None for those of its example.
    """
    types = dict(zip((*pattern.names, "result"), (*pattern.shapes, pattern.example_result), strict=True))
    if pattern.operands:
        letters = {**pattern.operands, "result": pattern.result}
    else:
        known = ranks or tuple(len(kind.shape) for kind in types.values())
        named = zip(types, known, strict=True)
        letters = {name: " ".join(f"{name}_axis{axis}" for axis in range(rank)) for name, rank in named}
    axes = [pair for name, kind in types.items() for pair in zip(letters[name].split(), kind.shape, strict=False)]
    sizes = {letter: pattern.sizes.get(letter, letter) for own in letters.values() for letter in own.split()}
    dtypes = {f"{name}_dtype": np.dtype(kind.dtype) for name, kind in types.items()}
    fields: dict[str, type] = dict.fromkeys(sizes.values(), int) | dict.fromkeys(dtypes, np.dtype)
    fields |= dict.fromkeys(pattern.scalars, float)
    kind = make_dataclass(f"{pattern.name}_spec", fields.items(), bases=(PatternSpec,), frozen=True)
    extents = dict.fromkeys(sizes.values(), 0) | {sizes[letter]: size for letter, size in axes}
    block_sizes = block_sizes_class(pattern.name, pattern.block_sizes, pattern.candidates)
    found = PatternOperation(
        pattern.name,
        {},
        reference=_reference(pattern),
        operands={name: letters[name] for name in pattern.names},
        result=letters["result"],
        sizes=sizes,
        rows=pattern.rows,
        sample=kind(**extents, **dtypes, **pattern.marks),
        block_sizes=block_sizes if pattern.block_sizes else cast(BlockSizesClass, NoBlockSizes),
        mapped=True,
        differentiable=pattern.differentiable,
        pattern=pattern,
    )
    setattr(kind, "operation", found)  # noqa: B010 (which mypy does not know of a class that is made)
    return found


def _reference(pattern: Pattern) -> Callable[..., jax.Array]:
    """Returns the reference as a declared operation has it: a function of the spec, and of operands by name."""

    def reference(spec: PatternSpec, **operands: jax.Array) -> jax.Array:
        found: jax.Array = pattern.reference(*(operands[name] for name in pattern.names), **spec.scalars())
        return found

    names = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("spec", *pattern.names)]
    reference.__signature__ = inspect.Signature(names)  # type: ignore[attr-defined]
    return reference


def site_for(
    pattern: Pattern,
    operands: Sequence[Shaped],
    values: Sequence[int],
    result: Shaped,
    scalars: Mapping[str, float],
) -> DeclaredSite:
    """Returns the site that computes a pattern.

    Args:
      pattern: the pattern.
      operands: the type of each operand.
      values: which value each operand is; several may be one.
      result: the type of the result.
      scalars: the values of the reference's scalars.

    Raises:
      TypeError, ValueError: an operand, or the result, does not have the axes that the pattern declares.
    """
    if pattern.operands:
        arrays = dict(zip(pattern.names, operands, strict=True))
        site = site_of(pattern.operation, arrays, scalars, np.dtype(result.dtype))
        shape = tuple(math.prod(site.sizes[label] for label in labels) for _, labels in site.result)
        if shape != tuple(result.shape):
            letters = shape_in_letters(pattern.operation, pattern.result)
            raise ValueError(f"the result has shape {tuple(result.shape)}; by the operands {letters} has {shape}")
        own = tuple((name, replace(read, position=values[read.position])) for name, read in site.operands)
        return replace(site, operands=own, uses=tuple(range(max(values) + 1)))
    types = [*operands, result]
    operation = operation_of(pattern, tuple(len(kind.shape) for kind in types))
    labels = itertools.count()
    views = [tuple((0, (next(labels),)) for _ in kind.shape) for kind in types]
    dtypes = {f"{name}_dtype": np.dtype(t.dtype) for name, t in zip((*pattern.names, "result"), types, strict=True)}
    spec: Callable[..., Spec] = type(operation.sample)
    return DeclaredSite(
        op=pattern.name,
        form=spec(**dict.fromkeys(operation.sizes.values(), 0), **dtypes, **scalars),
        sizes=tuple(size for kind in types for size in kind.shape),
        operands=tuple((n, Operand(i, view)) for n, i, view in zip(pattern.names, values, views[:-1], strict=True)),
        letters=tuple((letter, (label,)) for label, letter in enumerate(operation.sizes)),
        result=views[-1],
        uses=tuple(range(max(values) + 1)),
    )
