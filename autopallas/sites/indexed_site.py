"""Sites in index notation: what follows from how a site reads its operands and writes its results.

These are the axis that ``vmap`` adds, the parts that devices compute, and the types of residuals.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import ClassVar, Self

import jax

from autopallas.compat import Dtype
from autopallas.sites.division import Division, PositionOperand, PositionOperands, ShardableAxes
from autopallas.sites.index_notation import Label, Labels, Operand, Reader, Source, View
from autopallas.sites.operation import Kernel

__all__ = ["IndexedSite"]


class IndexedSite(Reader):
    """Base class of sites whose operands are read, and results written, in index notation.

    A subclass is a frozen dataclass whose fields hold the sources.  It says what cannot be derived from these:
    ``fields_under_vmap``, ``shardable_labels``, and its ``spec``, ``forward`` and ``backward``
    (:class:`autopallas.sites.calls.SiteDescription`).  What else differs from the default it overrides.

    Attributes:
      sizes: the size of each label.
      types: the dtype of each operand.
      VIEWS: the names of the fields that hold views of results and residuals; ``vmap`` puts its axis in front of each.
    """

    sizes: tuple[int, ...]
    types: tuple[Dtype, ...]
    VIEWS: ClassVar[tuple[str, ...]] = ("result",)

    @property
    def result_views(self) -> tuple[View, ...]:
        """View of each result; by default that of the only one, the field ``result``."""
        result: View = getattr(self, "result")  # noqa: B009 (a field of the subclass)
        return (result,)

    @property
    def residuals(self) -> tuple[tuple[View, Dtype], ...]:
        """View and dtype of each residual; by default there is none."""
        return ()

    @property
    def has_backward(self) -> bool:
        return True

    def running(self, kernel: Kernel) -> Kernel:
        """Returns an implementation as ``forward`` and ``backward`` run it; by default as it is."""
        return kernel

    def extent(self, labels: Iterable[Label]) -> int:
        """Returns the product of the sizes of labels."""
        return math.prod(self.sizes[label] for label in labels)

    def residual_types(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns the shapes and dtypes of the residuals."""
        shapes = [tuple(self.extent(labels) for _, labels in view) for view, _ in self.residuals]
        return tuple(jax.ShapeDtypeStruct(s, dtype) for s, (_, dtype) in zip(shapes, self.residuals, strict=True))

    # ------------------------------------------------------------------ on several devices

    def shardable_labels(self) -> frozenset[Label]:
        """Returns the labels that may be sharded."""
        raise NotImplementedError

    def shardable_axes(self) -> ShardableAxes:
        """Returns which labels each array has, and which may be sharded; results are summed over those they lack."""
        operands = tuple(source for source in self.sources if isinstance(source, Operand))
        results, residuals = self.result_views, tuple(view for view, _ in self.residuals)
        return ShardableAxes(operands, results, residuals, self.shardable_labels(), (frozenset(),) * len(results))

    def per_device(self, division: Division) -> tuple[Self, tuple[PositionOperand, ...]]:
        """Returns the site that each device computes, and the positions that it reads from further operands."""
        extras = PositionOperands(len(self.types))
        site = self.divided(division, extras)
        if extras.counted:
            site = replace(site, types=(*self.types, *extras.types))
        return site, tuple(extras.counted)

    def divided(self, division: Division, extras: PositionOperands) -> Self:
        """Returns one device's part, which reads positions along sharded labels from ``extras``."""
        site = self.with_sources(lambda source: extras.source(source, division))
        return replace(site, sizes=division.local(self.sizes))

    def standalone(self, division: Division) -> Self:
        """Returns what one device computes without the others; by default the same, since none needs another."""
        return self.per_device(division)[0]

    # ------------------------------------------------------------------ gradients of examples

    def spread(self, axes: Mapping[int, int], of_one: Set[int], labels: Labels) -> Self | None:
        """Returns the site that reads some operands, by position, with labels of the result that they lacked: along an
        axis of their own, or along one that has been of size 1, for those in ``of_one``.  None where there is none."""

        def change(source: Source) -> Source:
            if not isinstance(source, Operand) or source.position not in axes:
                return source
            axis, view = axes[source.position], source.view
            return replace(source, view=(*view[:axis], (0, labels), *view[axis + (source.position in of_one) :]))

        return self.with_sources(change)

    # ------------------------------------------------------------------ under vmap

    def fields_under_vmap(self, axes: Sequence[int | None], label: Labels) -> Mapping[str, object]:
        """Returns further fields that change, by name, as they are with a new label: what axis it belongs to.

        Args:
          axes: for each operand, 0 if it has the label, in front, or None.
          label: the new label; none for an axis of size 1.
        """
        raise NotImplementedError

    def batched(self, axes: Sequence[int | None], size: int) -> Self:
        """Returns the site under vmap: operands with an axis have it in front, and so has each result."""
        label: Labels = (len(self.sizes),) if size != 1 else ()
        site = self.with_sources(lambda source: source.batched(axes, label))
        views = {name: ((0, label), *getattr(self, name)) for name in self.VIEWS}
        sizes = (*self.sizes, *(size for _ in label))
        return replace(site, sizes=sizes, **views, **self.fields_under_vmap(axes, label))
