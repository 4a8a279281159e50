"""A grouped matmul whose groups are divided among devices: each computes the rows of its own groups.

A device's groups are neighbours, and so are their rows.  They are brought to the front for the kernel, and back to
their place behind it; what belongs to other devices is zero, so that the parts add up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from autopallas.kernels.grouped_matmul.operands import Gradients, Operands
from autopallas.kernels.grouped_matmul.site import GroupedMatmulSite
from autopallas.kernels.grouped_matmul.spec import GroupedMatmulSpec
from autopallas.sites.calls import SiteDescription
from autopallas.sites.division import Division, PositionOperands, ShardableAxes
from autopallas.sites.index_notation import Label, Labels, Operand
from autopallas.sites.operation import Kernel
from autopallas.sites.spec import BlockSizes

__all__ = ["ShardedGroupsSite", "with_sharded_groups"]

Array: TypeAlias = jax.Array


@dataclass(frozen=True)
class ShardedGroupsSite(GroupedMatmulSite):
    """Such a grouped matmul.  Every device knows the sizes of all groups.

    Attributes:
      everywhere: the label of all groups, on all devices.
      across: of what one device computes, the mesh axes over which the groups are divided; none where they are not.
    """

    everywhere: Labels = ()
    across: tuple[str, ...] = ()

    @property
    def _size_labels(self) -> Labels:
        return self.everywhere

    def shardable_axes(self) -> ShardableAxes:
        """The groups may be divided too; what each device has of the product is summed up here."""
        parts = super().shardable_axes()
        labels, combined = parts.labels | set(self.group_labels), frozenset(self.group_labels)
        return replace(parts, labels=labels, combined=(combined,))

    def divided(self, division: Division, extras: PositionOperands) -> ShardedGroupsSite:
        across = tuple(axis for label in self.group_labels for axis in division.of(label))
        return replace(super().divided(division, extras), across=across)

    def standalone(self, division: Division) -> GroupedMatmulSite:  # type: ignore[override]  # of no group's peers
        """Returns the first device's groups, which have the first of the sizes."""
        own = {f.name: getattr(self, f.name) for f in fields(GroupedMatmulSite)}
        sizes = _renamed(self.group_sizes, self.everywhere[0], self.group_labels[0])
        return GroupedMatmulSite(**own | {"sizes": division.local(self.sizes), "group_sizes": sizes})

    def running(self, kernel: Kernel) -> Kernel:
        """Returns an implementation, of the groups here."""
        return _Kernel(kernel, self.across)


def with_sharded_groups(site: SiteDescription) -> ShardedGroupsSite | None:
    """Returns the same site with groups that may be divided too; None where its groups are not along one axis.

    How the original does that depends on the platform.
    """
    if not isinstance(site, GroupedMatmulSite) or type(site) is not GroupedMatmulSite or len(site.group_labels) != 1:
        return None
    (group,), label = site.group_labels, len(site.sizes)
    own = {f.name: getattr(site, f.name) for f in fields(site)}
    own |= {"sizes": (*site.sizes, site.sizes[group]), "group_sizes": _renamed(site.group_sizes, group, label)}
    return ShardedGroupsSite(**own, everywhere=(label,))


@dataclass(frozen=True, slots=True)
class _Kernel:
    """An implementation, run by each device on its groups.  Without epilogues, which are of the sum of the parts."""

    part: Kernel
    across: tuple[str, ...]

    def _here(self, spec: GroupedMatmulSpec, operands: Operands) -> tuple[Operands, Array]:
        """The groups here have these operands, with their rows in front, and in each batch so many rows before them."""
        first, second, sizes, _ = operands
        group = lax.axis_index(self.across) * spec.groups if self.across else jnp.zeros((), jnp.int32)
        others = jnp.where(jnp.arange(sizes.shape[1]) < group, sizes, 0)
        own, before = lax.dynamic_slice_in_dim(sizes, group, spec.groups, 1), jnp.sum(others, 1, dtype=jnp.int32)
        first = _moved(first, -before)
        return Operands(first, _moved(second, -before) if spec.use == "drhs" else second, own), before

    def forward(self, spec: GroupedMatmulSpec, block_sizes: BlockSizes | None, operands: Operands) -> Array:
        """The result is that of all devices, but for a product with groups."""
        here, before = self._here(spec, operands)
        out = self.part.forward(spec, block_sizes, here)
        if spec.use == "drhs":
            return jnp.asarray(out)
        out = _moved(out, before)
        return lax.psum(out, self.across) if self.across else out

    def backward(
        self,
        spec: GroupedMatmulSpec,
        block_sizes: BlockSizes | None,
        operands: Operands,
        cotangent: Array,
        wanted: Sequence[bool],
    ) -> Gradients:
        """The gradients are those of this device."""
        here, before = self._here(spec, operands)
        rows = spec.use == "drhs"
        cotangent = cotangent if rows else _moved(cotangent, -before)
        dfirst, dsecond = self.part.backward(spec, block_sizes, here, cotangent, wanted)
        dfirst = None if dfirst is None else _moved(dfirst, before)
        return Gradients(dfirst, _moved(dsecond, before) if rows and dsecond is not None else dsecond)


def _renamed(source: Operand, label: Label, new: Label) -> Operand:
    view = tuple((offset, tuple(new if a == label else a for a in labels)) for offset, labels in source.view)
    return Operand(source.position, view)


def _moved(rows: Array, by: Array) -> Array:
    """[B, M, ...] with the rows of each batch moved; those that leave at one end come back at the other."""
    if math.prod(by.shape) == 1:
        return jnp.roll(rows, by.reshape(()), axis=1)
    return jax.vmap(lambda one, by: jnp.roll(one, by, axis=0))(jnp.broadcast_to(rows, (*by.shape, *rows.shape[1:])), by)
