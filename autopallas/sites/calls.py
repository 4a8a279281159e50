"""Turns a site's description into the kernel call that computes it; nothing else does.

Sites with the same description share one traced function per direction: 24 equal layers trace the kernel once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import jax

from autopallas.compat import ArrayFunction, PyTree
from autopallas.numerics.promote import usual_promotion
from autopallas.sites.operation import Kernel, Operation
from autopallas.sites.spec import BlockSizes, SiteSpec

__all__ = [
    "SiteDescription",
    "Vmaps",
    "kernel_backward",
    "kernel_forward",
    "mapped",
    "replaced_at",
    "under_vmaps",
    "vjp_at",
    "with_residuals",
]

Arrays: TypeAlias = tuple[jax.Array, ...]


class SiteDescription(Protocol):
    """Interface of an operation's description of one site in a program.  Frozen and hashable."""

    @property
    def operation(self) -> Operation: ...

    @property
    def spec(self) -> SiteSpec:
        """Canonical description that implementations and tables know."""

    @property
    def has_backward(self) -> bool:
        """Whether ``backward`` computes the derivative; otherwise the original's derivative is used."""

    def forward(
        self, kernel: Kernel, block_sizes: BlockSizes | None, operands: Sequence[jax.Array]
    ) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        """Returns (the results as the original has them, residuals for the backward)."""

    def residual_types(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns the shapes and dtypes of the residuals."""

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
        """Returns the cotangents of the operands at the positions ``active``."""

    def __hash__(self) -> int: ...

    def batched(self, axes: Sequence[int | None], size: int) -> SiteDescription:
        """Returns the site under vmap: each operand with an axis, and each result and residual, has it in front."""


def with_residuals(site: SiteDescription) -> SiteDescription:
    """Returns the site as it is where a backward follows; sites with a method of that name save more there."""
    own: Callable[[], SiteDescription] | None = getattr(site, "with_residuals", None)
    return site if own is None else own()


@functools.lru_cache(maxsize=1024)
def kernel_forward(site: SiteDescription, implementation: str, block_sizes: BlockSizes | None) -> ArrayFunction:
    """Returns a jitted function from the operands to (results, residuals)."""
    kernel = site.operation.implementation(implementation)
    assert kernel is not None
    name = f"autopallas_{site.operation.name}"

    def forward(*operands: jax.Array) -> tuple[Arrays, Arrays]:
        with jax.named_scope(name), usual_promotion():
            return site.forward(kernel, block_sizes, operands)

    forward.__name__ = forward.__qualname__ = name
    return jax.jit(forward)


@functools.lru_cache(maxsize=1024)
def kernel_backward(
    site: SiteDescription, implementation: str, block_sizes: BlockSizes | None, active: tuple[int, ...]
) -> ArrayFunction:
    """Returns a jitted function from (operands, results, residuals, cotangents) to the active operands' cotangents."""
    kernel = site.operation.implementation(implementation)
    assert kernel is not None
    name = f"autopallas_{site.operation.name}_backward"

    def backward(operands: Arrays, results: Arrays, residuals: Arrays, cotangents: Arrays) -> Arrays:
        with jax.named_scope(name), usual_promotion():
            return site.backward(kernel, block_sizes, operands, results, residuals, cotangents, active)

    backward.__name__ = backward.__qualname__ = name
    return jax.jit(backward)


def replaced_at(arrays: Sequence[jax.Array], positions: Sequence[int], others: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the arrays with others at some positions, as for a function of active operands alone."""
    given = dict(zip(positions, others, strict=True))
    return [given.get(position, array) for position, array in enumerate(arrays)]


def vjp_at(
    function: ArrayFunction, arrays: Sequence[jax.Array], positions: Sequence[int], has_aux: bool = False
) -> PyTree:
    """Returns what ``jax.vjp`` does for ``function(arrays)``, as a function of the arrays at some positions alone."""

    def varied(*chosen: jax.Array) -> PyTree:
        return function(replaced_at(arrays, positions, chosen))

    chosen = [arrays[position] for position in positions]
    return jax.vjp(varied, *chosen, has_aux=True) if has_aux else jax.vjp(varied, *chosen)


Vmaps: TypeAlias = tuple[tuple[tuple[int | None, ...], int], ...]
"""Each ``vmap`` around a site, the innermost first: for each operand 0 or None, and the size of the axis."""


def under_vmaps(function: ArrayFunction, vmaps: Vmaps) -> ArrayFunction:
    """Returns a function of arrays under each ``vmap``, whose results have the axes in front."""
    for axes, size in vmaps:
        function = jax.vmap(function, in_axes=axes, axis_size=size)
    return function


def mapped(function: ArrayFunction, axes: int) -> ArrayFunction:
    """Maps a function over the first ``axes`` axes of its arrays; an array of size 1 there is shared."""

    def over_the_first(*arguments: PyTree) -> PyTree:
        leaves, structure = jax.tree.flatten(arguments)
        shared = [x.shape[0] == 1 for x in leaves]
        given = [x.reshape(x.shape[1:]) if alone else x for x, alone in zip(leaves, shared, strict=True)]

        def one(*leaves: jax.Array) -> PyTree:
            return mapped(function, axes - 1)(*jax.tree.unflatten(structure, leaves))

        if all(shared):
            return jax.tree.map(lambda x: x[None], one(*given))
        return jax.vmap(one, in_axes=tuple(None if alone else 0 for alone in shared))(*given)

    return over_the_first if axes else function
