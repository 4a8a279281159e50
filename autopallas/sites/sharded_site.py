"""Sharded sites: the devices of a mesh compute a site in parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias, cast

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from autopallas import array_types
from autopallas.compat import ArrayFunction, PyTree, Shaped
from autopallas.sites.calls import SiteDescription, replaced_at, with_residuals
from autopallas.sites.division import Divisible, Division, PositionOperand, Prelude, ShardableAxes
from autopallas.sites.index_notation import View
from autopallas.sites.operation import Kernel, Operation
from autopallas.sites.spec import BlockSizes, SiteSpec

__all__ = ["ShardedSite", "divisible"]

Arrays: TypeAlias = tuple[jax.Array, ...]
Specs: TypeAlias = PartitionSpec | tuple["Specs", ...]


@dataclass(frozen=True)
class ShardedSite:
    """A site with its sharding.  Its operands and results are whole arrays.

    Attributes:
      site: the site as the program has it.
      division: which labels are sharded, and over which mesh axes.
      mesh: the mesh; an abstract one where the types of the operands tell their sharding.
    """

    site: Divisible
    division: Division
    mesh: Mesh | AbstractMesh

    @cached_property
    def _per_device(self) -> tuple[SiteDescription, tuple[PositionOperand, ...]]:
        divide = self.site.operation.hook("sharded", "divide")
        if divide is None:
            return self.site.per_device(self.division)
        return divide(self.site, self.division)

    @cached_property
    def _axes(self) -> ShardableAxes:
        return self.site.shardable_axes()

    @property
    def prelude(self) -> Prelude | None:
        """Computation on the operands that runs before they are sharded, or None."""
        return getattr(self.site, "prelude", None)

    def given(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the arrays of which each device gets a part: the operands, or what the prelude makes of them."""
        return list(operands) if self.prelude is None else self.prelude(operands)

    def given_types(self, types: Sequence[Shaped]) -> list[Shaped]:
        """Returns the types of the arrays of :meth:`given`, from the types of the operands."""
        if self.prelude is None:
            return list(types)
        given: list[Shaped] = jax.eval_shape(self.given, list(map(array_types.shape_of, types)))
        return given

    def moved(self, active: Sequence[int], types: Sequence[Shaped]) -> tuple[int, ...]:
        """Returns the positions of the arrays of :meth:`given` that have a derivative by the operands ``active``."""
        if self.prelude is None:
            return tuple(active)
        reads = enumerate(zip(self.prelude.reads, types, strict=True))
        return tuple(i for i, (own, t) in reads if own & set(active) and jnp.issubdtype(t.dtype, jnp.inexact))

    @property
    def operation(self) -> Operation:
        return self.site.operation

    @property
    def spec(self) -> SiteSpec:
        """Spec of what one device computes."""
        return self._per_device[0].spec

    @property
    def has_backward(self) -> bool:
        return self.site.has_backward

    def residual_types(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        types = self.site.residual_types()
        if not self._explicit:
            return types
        return tuple(
            jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=self._type(self.division.spec(view)))
            for t, view in zip(types, self._axes.residuals, strict=True)
        )

    def result_shardings(self) -> tuple[NamedSharding, ...]:
        """Returns the shardings that the types of the results state."""
        return tuple(self._type(self.division.spec(view)) for view in self._axes.results)

    def _type(self, spec: PartitionSpec) -> NamedSharding:
        """Returns the sharding that an array's type states: the explicit axes, not those that the compiler manages."""
        explicit = {
            n for n, kind in zip(self.mesh.axis_names, self.mesh.axis_types, strict=True) if kind == AxisType.Explicit
        }
        named = [() if d is None else (d,) if isinstance(d, str) else d for d in spec]
        kept = [tuple(axis for axis in axes if axis in explicit) for axes in named]
        return NamedSharding(self.mesh, PartitionSpec(*(axes or None for axes in kept)))

    @property
    def standalone(self) -> SiteDescription:
        """Site that one device computes by itself."""
        return self.site.standalone(self.division)

    def local(self, types: Sequence[Shaped], results: bool = False) -> list[jax.ShapeDtypeStruct]:
        """Returns one device's types of the operands, with further operands after the site's own, or of the results."""
        types = types if results else self.given_types(types)
        views = self._result_views if results else self._operand_views(len(types))
        shapes = [self._shape(t, view) for t, view in zip(types, views, strict=True)]
        if not results:
            sizes = self.division.local(self.site.sizes)
            shapes += [jax.ShapeDtypeStruct(tuple(sizes[a] for a in c.labels), c.dtype) for c in self._per_device[1]]
        return shapes

    def _shape(self, kind: Shaped, view: View) -> jax.ShapeDtypeStruct:
        counts = [1] * len(kind.shape)
        for dimension, (_, labels) in enumerate(view):
            for label in labels:
                counts[dimension] *= self.division.count(label)
        return jax.ShapeDtypeStruct(tuple(n // c for n, c in zip(kind.shape, counts, strict=True)), kind.dtype)

    # ------------------------------------------------------------------ what the site primitive runs

    @property
    def _explicit(self) -> bool:
        return AxisType.Explicit in self.mesh.axis_types

    @property
    def _result_views(self) -> tuple[View, ...]:
        return self._axes.results

    def _operand_views(self, count: int) -> list[View]:
        views: list[View] = [()] * count
        for use in self._axes.operands:
            views[use.position] = use.view
        return views

    def _mapped(self, function: ArrayFunction, in_specs: Specs, out_specs: Specs) -> ArrayFunction:
        # Without names shard_map takes all axes, except those that an enclosing vmap, if it is being traced, takes.
        names = {"axis_names": divisible(self.mesh)} if AxisType.Manual in self.mesh.axis_types else {}
        mapped: ArrayFunction = jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False, **names
        )

        def placed(*arguments: PyTree) -> PyTree:
            return mapped(*jax.tree.map(self._given, arguments, in_specs))

        return placed if self._explicit else mapped

    def _given(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        """Shards an array in advance, as a shard_map over explicit axes requires."""
        return array_types.divided_like(x, jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._type(spec)))

    def _specs(self, views: Sequence[View]) -> tuple[PartitionSpec, ...]:
        return tuple(self.division.spec(view) for view in views)

    def _extras(self) -> tuple[jax.Array, ...]:
        return tuple(counted.array(self.site.sizes) for counted in self._per_device[1])

    def forward(
        self, kernel: Kernel, block_sizes: BlockSizes | None, operands: Sequence[jax.Array]
    ) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        local, extras = self._per_device
        parts = self._axes
        missing = [
            self.division.lacking([view], combined)
            for view, combined in zip(parts.results, parts.combined, strict=True)
        ]

        def part(*operands: jax.Array) -> tuple[Arrays, Arrays]:
            results, residuals = local.forward(kernel, block_sizes, operands)
            return tuple(map(_total, results, missing)), tuple(residuals)

        given = self.given(operands)
        views = [*self._operand_views(len(given)), *(c.view for c in extras)]
        out = self._specs(parts.results), self._specs(parts.residuals)
        found: tuple[Arrays, Arrays] = self._mapped(part, self._specs(views), out)(*given, *self._extras())
        return found

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
        if self.prelude is None:
            return self._backward(kernel, block_sizes, operands, results, residuals, cotangents, active)
        moved: tuple[int, ...] = ()

        def before(*chosen: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
            nonlocal moved
            arrays = self.given(replaced_at(operands, active, chosen))
            moved = self.moved(active, arrays)
            return [arrays[i] for i in moved], arrays

        own, pull, arrays = jax.vjp(before, *(operands[i] for i in active), has_aux=True)
        gradients = self._backward(kernel, block_sizes, arrays, results, residuals, cotangents, moved)
        divided = [array_types.divided_like(g, jax.typeof(x)) for g, x in zip(gradients, own, strict=True)]
        return tuple(pull(divided))

    def _backward(
        self,
        kernel: Kernel,
        block_sizes: BlockSizes | None,
        operands: Sequence[jax.Array],
        results: Sequence[jax.Array],
        residuals: Sequence[jax.Array],
        cotangents: Sequence[jax.Array],
        active: Sequence[int],
    ) -> tuple[jax.Array, ...]:
        local, extras = self._per_device
        parts = self._axes
        views = self._operand_views(len(operands))
        missing = [self.division.lacking([views[i]]) for i in active]

        def part(operands: Arrays, results: Arrays, residuals: Arrays, cotangents: Arrays) -> Arrays:
            found = local.backward(kernel, block_sizes, operands, results, residuals, cotangents, active)
            return tuple(map(_total, found, missing))

        results_specs = self._specs(parts.results)
        given = self._specs([*views, *(c.view for c in extras)]), results_specs, self._specs(parts.residuals)
        mapped = self._mapped(part, (*given, results_specs), self._specs([views[i] for i in active]))
        whole = (*operands, *self._extras())
        gradients: tuple[jax.Array, ...] = mapped(whole, tuple(results), tuple(residuals), tuple(cotangents))
        return gradients

    # ------------------------------------------------------------------ transformations

    def with_residuals(self) -> ShardedSite:
        """Returns the site as it is where a backward follows."""
        return replace(self, site=cast(Divisible, with_residuals(self.site)))

    def batched(self, axes: Sequence[int | None], size: int) -> ShardedSite:
        """Returns the site under vmap; every device has the new axis as a whole."""
        return replace(self, site=cast(Divisible, self.site.batched(axes, size)))

    def divided_further(self, axes: tuple[str, ...]) -> ShardedSite | None:
        """Returns the site with the axis that vmap added last sharded as well; None where that is impossible."""
        label, named = len(self.site.sizes) - 1, {axis for _, own in self.division.axes for axis in own}
        axes = tuple(axis for axis in axes if dict(self.division.sizes)[axis] > 1)
        if not axes:
            return self
        division = replace(self.division, axes=(*self.division.axes, (label, axes)))
        fits = label in self.site.shardable_axes().labels and self.site.sizes[label] % division.count(label) == 0
        return replace(self, division=division) if fits and named.isdisjoint(axes) else None


def divisible(mesh: Mesh | AbstractMesh) -> frozenset[str]:
    """Returns the axes of a mesh that no enclosing shard_map has taken."""
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, kind in pairs if kind != AxisType.Manual)


def _total(part: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return jax.lax.psum(part, axes) if axes else part
