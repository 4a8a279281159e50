"""Describes a place in a program that a custom pattern matches: what the site primitive runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast, overload

import jax
import jax.numpy as jnp
import numpy as np

from autopallas.compat import ArrayFunction, PyTree, Shaped
from autopallas.custom.registry import Pattern
from autopallas.sites.device import Device
from autopallas.sites.operation import Implementation, Kernel, Operation, Supported, Unsupported
from autopallas.sites.spec import BlockSizes, SiteSpec

__all__ = ["OwnOperation", "OwnSite", "OwnSpec"]


@dataclass(frozen=True)
class OwnSpec:
    """One use of a custom pattern: its name, the types of its operands and result, and its scalars."""

    name: str
    operands: tuple[tuple[tuple[int, ...], str], ...]
    result: tuple[tuple[int, ...], str]
    scalars: tuple[tuple[str, float], ...]

    def assumptions(self) -> tuple[str, ...]:
        return ("the replacement computes what its reference does, also where it was not compared",)

    def programs(self) -> str:
        return ""

    def to_dict(self) -> dict[str, object]:
        operands = [_short(shape, dtype) for shape, dtype in self.operands]
        return {"operands": operands, "result": _short(*self.result), "scalars": dict(self.scalars)}

    def __str__(self) -> str:
        operands = ", ".join(_short(shape, dtype) for shape, dtype in self.operands)
        scalars = "".join(f", {name}={value:.6g}" for name, value in self.scalars)
        return f"{self.name}({operands}{scalars}) -> {_short(*self.result)}"


def _short(shape: tuple[int, ...], dtype: str) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


@dataclass(frozen=True)
class OwnOperation(Operation):
    """The operation of a custom pattern, whose only implementation is the replacement."""

    pattern: Pattern | None = None

    @overload
    def implementation(self, name: Literal["reference"]) -> Implementation: ...

    @overload
    def implementation(self, name: str) -> Implementation | None: ...

    def implementation(self, name: str) -> Implementation | None:
        """Returns the pattern, which only :class:`OwnSite` uses: it has a replacement, whatever its name."""
        return cast("Implementation | None", self.pattern)

    def supports(self, name: str, spec: SiteSpec, device: Device) -> Supported | Unsupported:
        assert self.pattern is not None
        if device.platform not in self.pattern.platforms:
            return Unsupported(f"the pattern is for {', '.join(self.pattern.platforms)}")
        return Supported()

    def candidates(
        self, spec: SiteSpec, device: Device, implementation: str | Sequence[str] | None
    ) -> Iterator[tuple[str, Supported | Unsupported]]:
        """Yields one Unsupported answer, since there are no block sizes to search for."""
        yield self.name, Unsupported("an own pattern has no block sizes to search for")


@dataclass(frozen=True)
class OwnSite:
    """One place in a program that a custom pattern matches.

    Attributes:
      pattern: the pattern.
      spec: the types and scalars, without mapped axes.
      uses: for each operand of the site, which argument of the reference it is.
      maps: the axes that vmap added, innermost first: per argument of the reference (an axis or None), and their size.
    """

    pattern: Pattern
    spec: OwnSpec
    uses: tuple[int, ...]
    maps: tuple[tuple[tuple[int | None, ...], int], ...] = ()

    @property
    def operation(self) -> OwnOperation:
        return OwnOperation(self.pattern.name, {}, pattern=self.pattern)

    @property
    def has_backward(self) -> bool:
        return self.pattern.differentiable

    def residual_types(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return ()

    def _arguments(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns one array per argument; several operands are one where a backward distinguishes a value's uses."""
        return [operands[self.uses.index(i)] for i in range(len(self.spec.operands))]

    def _function(self, kernel: Kernel) -> ArrayFunction:
        assert isinstance(kernel, Pattern)

        def function(*arguments: jax.Array) -> jax.Array:
            result: jax.Array = kernel.replacement(*arguments, **dict(self.spec.scalars))
            return result

        for axes, size in self.maps:
            function = jax.vmap(function, in_axes=axes, axis_size=size)
        return function

    def forward(
        self, kernel: Kernel, block_sizes: BlockSizes | None, operands: Sequence[jax.Array]
    ) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        return (self._function(kernel)(*self._arguments(operands)),), ()

    def backward(
        self,
        kernel: Kernel,
        block_sizes: BlockSizes | None,
        operands: Sequence[jax.Array],
        results: Sequence[jax.Array],
        residuals: Sequence[jax.Array],
        cotangents: Sequence[jax.Array],
        active: Sequence[int],
    ) -> tuple[jax.Array, ...]:
        """Returns cotangents.  Of several uses of one argument, the first gets the whole and the others get zeros."""
        arguments = self._arguments(operands)
        wanted = list(dict.fromkeys(self.uses[i] for i in active))

        def varied(*chosen: jax.Array) -> PyTree:
            filled = list(arguments)
            for position, x in zip(wanted, chosen, strict=True):
                filled[position] = x
            return self._function(kernel)(*filled)

        _, pull = jax.vjp(varied, *(arguments[i] for i in wanted))
        found = dict(zip(wanted, pull(cotangents[0]), strict=True))
        return tuple(found.pop(self.uses[i]) if self.uses[i] in found else jnp.zeros_like(operands[i]) for i in active)

    def batched(self, axes: Sequence[int | None], size: int) -> OwnSite:
        own = tuple(axes[self.uses.index(i)] for i in range(len(self.spec.operands)))
        return replace(self, maps=(*self.maps, (own, size)))


def spec_of(pattern: Pattern, operands: Sequence[Shaped], result: Shaped, scalars: dict[str, float]) -> OwnSpec:
    """Returns the spec for operands and a result of given abstract values."""

    def described(aval: Shaped) -> tuple[tuple[int, ...], str]:
        return tuple(aval.shape), np.dtype(aval.dtype).name

    return OwnSpec(
        pattern.name,
        tuple(described(a) for a in operands),
        described(result),
        tuple((name, scalars[name]) for name in pattern.scalars),
    )
