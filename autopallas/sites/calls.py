"""The one way from a site's description to the kernel that computes it.

Sites with the same description share one traced function each way: 24 equal layers cost one trace of the kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import jax

from autopallas.compat import ArrayFunction
from autopallas.sites.operation import Kernel, Operation
from autopallas.sites.spec import BlockSizes, SiteSpec

__all__ = ["SiteDescription", "kernel_backward", "kernel_forward", "with_residuals"]

Arrays: TypeAlias = tuple[jax.Array, ...]


class SiteDescription(Protocol):
    """What an operation must say of one place in a program.  Frozen and hashable."""

    @property
    def operation(self) -> Operation: ...

    @property
    def spec(self) -> SiteSpec:
        """The canonical description that implementations and tables know."""

    @property
    def has_backward(self) -> bool:
        """Whether ``backward`` gives the derivative; else it is the original's."""

    def forward(
        self, kernel: Kernel, block_sizes: BlockSizes | None, operands: Sequence[jax.Array]
    ) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        """(results as the original has them, residuals for the backward)."""

    def residual_types(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of the residuals."""

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
        """Cotangents of the operands at the positions ``active``."""

    def __hash__(self) -> int: ...

    def batched(self, axes: Sequence[int | None], size: int) -> SiteDescription:
        """The place under vmap: each operand with an axis, and each result and residual, has it in front."""


def with_residuals(site: SiteDescription) -> SiteDescription:
    """The place where a backward follows, for which some sites save more: those with a method of that name."""
    own: Callable[[], SiteDescription] | None = getattr(site, "with_residuals", None)
    return site if own is None else own()


@functools.lru_cache(maxsize=1024)
def kernel_forward(site: SiteDescription, implementation: str, block_sizes: BlockSizes | None) -> ArrayFunction:
    """(results, residuals) as a jitted function of the operands."""
    kernel = site.operation.implementation(implementation)
    assert kernel is not None
    name = f"autopallas_{site.operation.name}"

    def forward(*operands: jax.Array) -> tuple[Arrays, Arrays]:
        with jax.named_scope(name):
            return site.forward(kernel, block_sizes, operands)

    forward.__name__ = forward.__qualname__ = name
    return jax.jit(forward)


@functools.lru_cache(maxsize=1024)
def kernel_backward(
    site: SiteDescription, implementation: str, block_sizes: BlockSizes | None, active: tuple[int, ...]
) -> ArrayFunction:
    """Cotangents of the active operands as a jitted function of (operands, results, residuals, cotangents)."""
    kernel = site.operation.implementation(implementation)
    assert kernel is not None
    name = f"autopallas_{site.operation.name}_backward"

    def backward(operands: Arrays, results: Arrays, residuals: Arrays, cotangents: Arrays) -> Arrays:
        with jax.named_scope(name):
            return site.backward(kernel, block_sizes, operands, results, residuals, cotangents, active)

    backward.__name__ = backward.__qualname__ = name
    return jax.jit(backward)
