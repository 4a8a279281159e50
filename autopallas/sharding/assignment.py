"""Derives the sharding of a site's labels from the shardings of its operands and results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopallas.sharding.propagation import Divided, Found
from autopallas.sites.division import Division, ShardableAxes
from autopallas.sites.index_notation import Label, View

__all__ = ["Indivisible", "assign"]


class Indivisible(Exception):
    """Raised where no kernel can compute a site sharded as it is; the message says why."""


@dataclass(frozen=True, slots=True)
class _Use:
    """One array of a site: its dimensions, the mesh axes of each label, and its role."""

    view: View
    labels: Mapping[Label, tuple[str, ...]]
    is_result: bool = False
    is_between: bool = False

    def has(self, label: Label) -> bool:
        return any(label in labels for _, labels in self.view)


def assign(
    parts: ShardableAxes,
    sizes: Sequence[int],
    shapes: Sequence[Sequence[int]],
    found: Found,
    mesh: Mapping[str, int],
    gathers: bool = False,
) -> Division:
    """Chooses the mesh axes of each label of a site, so that no data moves that the original would not move as well.

    Args:
      parts: which labels each array has.
      sizes: the size of each label.
      shapes: the shapes of the operands.
      found: how operands and results are sharded.
      mesh: the sizes of the mesh axes.
      gathers: whether operands that are sharded further are taken to be gathered, since the caller checks the traffic.

    Raises:
      Indivisible: no such choice exists.
    """
    uses = []
    for operand in parts.operands:
        divided = found.operands.get(operand.position, None)
        labels = _by_label(operand.view, shapes[operand.position], divided, sizes, mesh)
        uses.append(_Use(operand.view, labels))
    for position, view in enumerate(parts.results):
        divided = found.results.get(position, ((),) * len(view))
        uses.append(_Use(view, _by_label(view, None, divided, sizes, mesh), True))
    for position, view in enumerate(parts.between):
        labels = _by_label(view, None, found.between.get(position, None), sizes, mesh)
        uses.append(_Use(view, labels, is_between=True))
    if parts.whole and any(use.labels for use in uses):
        raise Indivisible(parts.whole)
    chosen = _chosen(parts, uses, found.exact)
    taken = {axis for axes in chosen.values() for axis in axes}
    gathered: set[Label] = set()
    for use in uses:
        if use.is_between:
            for label, axes in use.labels.items():
                if axes != chosen.get(label, ()):
                    raise Indivisible(f"an axis that it computes as a whole is divided over the mesh axis {axes[0]!r}")
            continue
        if use.is_result:  # it may be sharded further, or gathered, after the computation
            for label, axes in use.labels.items() if parts.between else ():
                if not taken.isdisjoint(axes[_common(axes, chosen.get(label, ())) :]):
                    raise Indivisible("a sum of parts is divided over the mesh axis of the parts")
            for label, axes in use.labels.items() if found.exact and not parts.between else ():
                if not taken.issuperset(axes[_common(axes, chosen.get(label, ())) :]):
                    raise Indivisible(f"an axis that it computes as a whole is divided over the mesh axis {axes[0]!r}")
            continue
        for label, axes in use.labels.items():
            extra = axes[_common(axes, chosen.get(label, ())) :]
            # The original also gathers an operand whose mesh axis shards something else.  But where two operands are
            # sharded alike, the original sums partial results.
            if extra and label in parts.rows:
                raise Indivisible(f"what is divided over the mesh axis {extra[0]!r} is gathered along tokens")
            known = bool(parts.between)  # that the original does not sum partial results
            if extra and not gathers and (label in gathered and not known or not set(extra) <= taken):
                raise Indivisible(f"an axis over which it sums or looks is divided over the mesh axis {extra[0]!r}")
            if extra:
                gathered.add(label)
    division = Division(tuple(mesh.items()), tuple(sorted((a, axes) for a, axes in chosen.items() if axes)))
    _check(parts, division, sizes, shapes)
    return division


def _common(first: Sequence[str], second: Sequence[str]) -> int:
    """Counts the leading entries that are equal."""
    count = 0
    while count < min(len(first), len(second)) and first[count] == second[count]:
        count += 1
    return count


def _by_label(
    view: View, shape: Sequence[int] | None, divided: Divided | None, sizes: Sequence[int], mesh: Mapping[str, int]
) -> dict[Label, tuple[str, ...]]:
    if divided is None:
        raise Indivisible("the parts of an operand are not whole mesh axes, or differ between its uses")
    found: dict[Label, tuple[str, ...]] = {}
    for dimension, ((_, labels), axes) in enumerate(zip(view, divided, strict=True)):
        extent = 1
        for label in labels:
            extent *= sizes[label]
        axes = tuple(axis for axis in axes if mesh[axis] > 1)
        if axes and shape is not None and shape[dimension] != extent:
            raise Indivisible("it reads a slice of a divided axis")
        left = list(axes)
        for label in labels:
            size, own = sizes[label], []
            while left and size > 1:
                if size % mesh[left[0]]:
                    raise Indivisible(f"the mesh axis {left[0]!r} does not divide an axis into equal parts")
                size //= mesh[left[0]]
                own.append(left.pop(0))
            if own:
                found[label] = tuple(own)
            if size > 1 and left:
                break
        if left:
            raise Indivisible(f"the mesh axis {left[0]!r} does not divide an axis into equal parts")
    return found


def _chosen(parts: ShardableAxes, uses: Sequence[_Use], exact: bool) -> dict[Label, tuple[str, ...]]:
    """Chooses the mesh axes of each label that may be sharded; labels of results come first.

    The intermediate values decide, if there are any; otherwise the results, if their shardings are ``exact``; otherwise
    the operands.
    """
    chosen: dict[Label, tuple[str, ...]] = {}
    taken: set[str] = set()
    ordered = [u for u in uses if u.is_result] + [u for u in uses if not u.is_result]
    asked: dict[Label, list[tuple[str, ...]]] = {}
    for use in ordered:
        for label, axes in use.labels.items():
            asked.setdefault(label, []).append(axes)
    # Operands show how the computation itself is sharded; a result may have been resharded afterwards.
    for label in (a for a in asked if a in parts.labels):
        between = {u.labels.get(label, ()) for u in uses if u.is_between and u.has(label)}
        if len(between) > 1:
            raise Indivisible("the products in it are divided in different ways")
        given = {u.labels.get(label, ()) for u in uses if u.is_result and u.has(label)}
        if len(given) > 1 and exact and not between:
            raise Indivisible("its results are divided in different ways")
        own = [u.labels[label] for u in uses if not (u.is_result or u.is_between) and label in u.labels]
        if between:
            own = list(between)
        elif parts.between and len({u.labels.get(label, ()) for u in uses if not u.is_result and u.has(label)}) > 1:
            own = []
        elif given and exact:
            own = list(given)
        if not own:
            continue
        longest = max(own, key=len)
        free = []
        for axis in longest:
            if axis in taken:
                break
            free.append(axis)
        taken |= set(free)
        chosen[label] = tuple(free)
    return chosen


def _check(parts: ShardableAxes, division: Division, sizes: Sequence[int], shapes: Sequence[Sequence[int]]) -> None:
    """Raises unless each device's part of every array is one block, and all uses of an operand are sharded alike."""
    specs: dict[int, object] = {}
    views = [(o.view, o.position) for o in parts.operands]
    views += [(view, -1) for view in (*parts.results, *parts.residuals)]
    for view, position in views:
        for dimension, (_, labels) in enumerate(view):
            whole = True
            extent = 1
            for label in labels:
                extent *= sizes[label]
                if sizes[label] % division.count(label):
                    raise Indivisible("the mesh does not divide an axis into equal parts")
                if division.count(label) > 1 and not whole:
                    raise Indivisible("a part of an array would not be one block of it")
                whole = whole and sizes[label] == division.count(label)
            if position >= 0 and division.divides(labels) and shapes[position][dimension] != extent:
                raise Indivisible("it reads a slice of a divided axis")
        if position >= 0 and specs.setdefault(position, division.spec(view)) != division.spec(view):
            raise Indivisible("one operand is divided in different ways in its different uses")
