"""Proves of a sum of pads, from its values at points of a prime field, which scan or which gradient of scans it is."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal as OneOf
from typing import NamedTuple

import numpy as np

from autopallas.graph import Graph
from autopallas.kernels.respelling.associative_scan_spec import Forward
from autopallas.kernels.respelling.lanes import STEPS, Lanes, Layout, Pairs, laid_alike, lanes_of
from autopallas.kernels.respelling.moved_values import (
    MOST_INPUTS,
    POINTS,
    Array,
    Leaf,
    MovedValues,
    has_interior,
)
from autopallas.kernels.respelling.prime_field import PRIME, gradient, scanned

__all__ = ["Gradient", "Pulled", "ScanProofs"]

Pulled = tuple[tuple[Forward, int], ...]
"""One scan or two, each with the cotangent of its result."""


class Gradient(NamedTuple):
    """A gradient of what scans are given, or of their decay.

    Attributes:
      pulled: the scans, with the cotangents of their results.
      of_decay: of what it is the gradient.
      cotangents, result: which of the axes of the scan's result these have.
      added: what is added to it, if anything.
      beside: which of the axes that has.
    """

    pulled: Pulled
    of_decay: bool
    cotangents: tuple[Layout, ...]
    result: Layout
    added: int | None
    beside: Layout

    def at(self, image: Mapping[int, int], scans: Mapping[Forward, Forward]) -> Gradient:
        """Returns the same gradient of other values, and of other scans."""
        pulled = tuple((scans[scan], image[d]) for scan, d in self.pulled)
        return self._replace(pulled=pulled, added=None if self.added is None else image[self.added])


class ScanProofs:
    """Proves what sums are, each by itself.

    Attributes:
      of_cotangents: which of the axes of a scan's result a cotangent of it has, as far as gradients are known.
    """

    def __init__(self, values: MovedValues):
        self.graph = values.graph
        self._values = values
        self.of_cotangents: dict[tuple[Forward, int], Layout] = {}
        self._pairs = Pairs(values.graph)
        self._functions: dict[tuple[str, tuple[Leaf, ...]], Array] = {}

    def scan(self, number: int, leaves: tuple[Leaf, ...], axis: int) -> Forward | None:
        """Returns the scan of its inputs that a sum is, if it is one."""
        value = self._values.value(number, axis) if len(leaves) < 3 else None
        if value is None:
            return None
        for decay, *given in itertools.permutations(leaves):
            (first,) = self._values.arrays(given or [decay])  # the first state, which few other values have
            if not (value[:, 0] == first[:, 0]).all():
                continue
            if np.array_equal(value, self._function("scan", decay, *given)) and self._values.region(number) is not None:
                layouts = self._laid(number, axis, [n for n, _ in (decay, *given)])
                if layouts is None:
                    return None
                numbers = decay[0], given[0][0] if given else None
                return Forward(*numbers, number, axis, self._is_shifted(number), layouts)
        return None

    def gradient_of(self, number: int, leaves: tuple[Leaf, ...], scans: Sequence[Forward]) -> Gradient | None:
        """Returns the gradient of one of some scans that a sum is, or of one and of the products, perhaps with one more
        value: what JAX's autodiff had added up before, of a value that is read elsewhere too."""
        value = self._values.value(number, self._values.moved[number]) if scans else None
        if value is None:
            return None
        products = {scan.decay: scan for scan in scans if scan.given is None}
        pairs = [(scan, products[scan.decay]) for scan in scans if scan.given is not None and scan.decay in products]
        axes = dict(leaves)
        last, zero = _step(value, -1), (0,) * POINTS
        added = {zero, *(_step(own, -1) for own in self._values.arrays(leaves))}
        for pulled in itertools.chain.from_iterable(self._pulled(leaves, *own) for own in [*zip(scans), *pairs]):
            alone = len(pulled) == 1 and pulled[0][0].given is not None
            for of_decay in (False, True) if alone else (True,):
                expected = self._last_step(pulled, axes, of_decay)
                if tuple([(x - y) % PRIME for x, y in zip(last, expected, strict=True)]) not in added:
                    continue  # few other values have the same last step
                rest = (value - self._expected(pulled, axes, of_decay)) % PRIME
                arrays = self._values.arrays(leaves)
                more = [leaf[0] for leaf, own in zip(leaves, arrays, strict=True) if (own == rest).all()]
                if (more or not rest.any()) and self._values.region(number) is not None:
                    return self._with_axes(number, axes, pulled, of_decay, more[0] if rest.any() else None)
        return None

    def _last_step(self, pulled: Pulled, axes: Mapping[int, int], of_decay: bool) -> tuple[int, ...]:
        """Returns the last step of a gradient of what scans are given, or of their decay, at the points of the field:
        the cotangent, or its product with the state before."""
        ends = [_step(own, -1) for own in self._values.arrays([(d, axes[d]) for _, d in pulled])]
        if not of_decay:
            return ends[0]
        before = [_step(self._states_of(scan), -2) for scan, _ in pulled]
        terms = [[x * h for x, h in zip(*own, strict=True)] for own in zip(ends, before, strict=True)]
        return tuple(map(sum, zip(*terms, strict=True)))

    def _expected(self, pulled: Pulled, axes: Mapping[int, int], of_decay: bool) -> Array:
        """Returns a gradient of what scans are given, or of their decay, at the points of the field."""
        gradients = [self._function("gradient", self._decay(scan), (d, axes[d])) for scan, d in pulled]
        if not of_decay:
            return gradients[0]
        found = np.zeros_like(gradients[0])
        for (scan, _), own in zip(pulled, gradients, strict=True):
            before = np.roll(self._states_of(scan), 1, -1)
            before[:, 0] = 1 if scan.given is None else 0
            found += own * before % PRIME
        return found % PRIME

    def _states_of(self, scan: Forward) -> Array:
        return self._function("scan", *[(n, scan.axis_of(place)) for place, n in enumerate(scan.inputs)])

    def _with_axes(
        self, number: int, leaves: Collection[int], pulled: Pulled, of_decay: bool, added: int | None
    ) -> Gradient | None:
        """Returns a gradient, if its axes are those of the scan, or sums over them."""
        graph, (scan, cotangent) = self.graph, pulled[0]
        shape = graph.shape(scan.result)
        known = dict(zip(scan.inputs, scan.layouts, strict=True)) | {scan.result: tuple(range(len(shape)))}
        is_read = added in (*known, cotangent)  # so it may be among what is summed over other axes
        lanes = self._lanes(number, self._values.moved[number], None if is_read else added)
        if lanes is None or is_read and lanes.summed:
            return None
        known |= {d: self.of_cotangents[own, d] for own, d in pulled if (own, d) in self.of_cotangents}
        axes = {lanes.same(STEPS): scan.axis}
        for n, layout in ((n, layout) for n, layout in known.items() if n in leaves):
            for d, own in enumerate(layout):
                if graph.shape(n)[d] != 1 and axes.setdefault(lanes.same((n, d)), own) != own:
                    return None
        unknown = [lanes.same((cotangent, d)) for d, size in enumerate(graph.shape(cotangent)) if size != 1]
        left = [d for d, size in enumerate(shape) if size != 1 and d not in axes.values()]
        axes |= dict(zip([own for own in unknown if own not in axes], left, strict=False))
        values = (*(d for _, d in pulled), number, *(() if added is None else (added,)))
        layouts = [_layout(graph, lanes, n, axes, shape) for n in values]
        cotangents, result = [own for own in layouts[: len(pulled)] if own is not None], layouts[len(pulled)]
        if result is None or any(own is None for own in layouts):
            return None
        beside = () if added is None else layouts[-1] or ()
        if added is not None and set(beside) - {-1} != set(result) - {-1}:
            return None
        missing = {d for d, size in enumerate(shape) if size != 1} - set(result)
        if missing != {axes.get(own) for own in lanes.summed}:
            return None
        if len(pulled) > 1 and not all(self._is_laid_alike(own, cotangents, result) for own, _ in pulled):
            return None
        return Gradient(pulled, of_decay, tuple(cotangents), result, added, beside)

    def _is_laid_alike(self, scan: Forward, cotangents: Sequence[Layout], result: Layout) -> bool:
        """Returns whether a scan, cotangents and a result have the same axes."""
        shape = self.graph.shape(scan.result)
        inputs = zip(scan.inputs, scan.layouts, strict=True)
        return all(laid_alike(self.graph.shape(n), own, shape) for n, own in inputs) and all(
            len(own) == len(shape) and laid_alike(shape, own, shape) for own in (*cotangents, result)
        )

    def _lanes(self, number: int, axis: int, added: int | None = None) -> Lanes | None:
        values, nodes = self._values, self._values.region(number)
        return None if nodes is None else lanes_of(self.graph, number, axis, nodes, values.read, self._pairs, added)

    def _laid(self, number: int, axis: int, inputs: Sequence[int]) -> tuple[Layout, ...] | None:
        """Returns which axes of a result each of its inputs has; None where that is not known."""
        lanes, shape = self._lanes(number, axis), self.graph.shape(number)
        if lanes is None or lanes.summed:
            return None
        axes = {lanes.same((number, d)): d for d, size in enumerate(shape) if size != 1}
        layouts = [_layout(self.graph, lanes, n, axes, shape) for n in inputs]
        found = tuple(own for own in layouts if own is not None)
        covered = set(axes.values()) <= {d for own in found for d in own}
        return found if covered and len(found) == len(layouts) else None

    def _is_shifted(self, number: int) -> bool:
        """Returns whether nothing on the way to a result takes every second step, as a tree does."""
        found = self._values.region(number)
        assert found is not None
        pads = any(has_interior(node) for node in found if node.name == "pad")
        strided = (node.params["strides"] for node in found if node.name == "slice")
        return not pads and all(by is None or set(map(int, by)) == {1} for by in strided)

    def _decay(self, scan: Forward) -> Leaf:
        return scan.decay, scan.axis_of(0)

    def _pulled(self, leaves: tuple[Leaf, ...], *scans: Forward) -> Iterator[Pulled]:
        """Yields scans with what may be their cotangents, of the inputs of a sum."""
        known = {n for scan in scans for n in (*scan.inputs, scan.result)}
        rest = [n for n, _ in leaves if n not in known] or [n for n, _ in leaves]
        if len(scans) == 1 and len(rest) <= MOST_INPUTS:
            yield from (tuple(zip(scans, (d,), strict=True)) for d in rest)
        elif len(rest) <= len(scans):
            given = itertools.permutations(rest) if len(rest) == len(scans) else [rest * len(scans)]
            for cotangents in given:
                yield tuple(zip(scans, cotangents, strict=True))

    def _function(self, name: OneOf["scan", "gradient"], *inputs: Leaf) -> Array:
        """Returns a recurrence of inputs, or its gradient, at the points of the field."""
        key = name, inputs
        if key not in self._functions:
            arrays = self._values.arrays(inputs)
            self._functions[key] = _states(*arrays) if name == "scan" else gradient(*arrays)
        return self._functions[key]


def _step(array: Array, place: int) -> tuple[int, ...]:
    """Returns one step of a value, at each point."""
    return tuple(array[:, place].tolist())


def _states(decay: Array, given: Array | None = None) -> Array:
    """Returns the recurrence of a and b, or the products of a."""
    return scanned(decay, np.where(np.arange(decay.shape[-1]) == 0, decay, 0) if given is None else given)


def _layout(
    graph: Graph, lanes: Lanes, number: int, axes: Mapping[int, int], whole_shape: Sequence[int]
) -> Layout | None:
    """Returns which axes a value has; None where one of them is none of the known ones, or part of one."""
    shape = graph.shape(number)
    found = tuple(-1 if size == 1 else axes.get(lanes.same((number, d)), -2) for d, size in enumerate(shape))
    alike = all(d < 0 or whole_shape[d] == size for d, size in zip(found, shape, strict=True))
    return found if -2 not in found and alike else None
