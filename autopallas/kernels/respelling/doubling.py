"""Recognises what ``lax.associative_scan`` and doubling by hand compute by their values: recurrences
``h[t] = a[t] h[t-1] + b[t]``, and products ``p[t] = a[t] p[t-1]``.

To JAX an associative scan is no equation, but some seventeen for each level: slices, products, sums, pads and
concatenations, and as many again in the gradient.  No arrangement of these is matched.  Along one axis they compute
polynomials of their inputs with integer coefficients, and two polynomials that agree at random points of a large prime
field are the same (Schwartz and Zippel: for T steps the chance of an error is below T / 2^31 for each point and each
element, and two points are tried).

An input is a value that no slice or pad along the axis stands above: what the scan is given, or the cotangent of its
result.  So is one that the first slice of every second step reads, if none has been taken above it, such as numbers
that are shifted by one before they are scanned: whatever computes them, the tree begins there.  Doubling by hand shifts
all steps by 1, 2, 4, ... and fills with ones and zeros, which are no inputs.

A scan of a and b gives the products of a too.  Where the program reads both results, these are two scans, whose
gradient of a is one sum.  The derivative of ``cumprod`` is that of such products.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import jax.numpy as jnp
import numpy as np

from autopallas.graph import Graph, Node
from autopallas.graph.edit import surviving
from autopallas.graph.loop_slices import is_zero, uniform

__all__ = ["Backward", "Forward", "scans_of"]

Array = np.ndarray

_PRIME = 2**31 - 1
_POINTS = 2
"""How many points of the field are tried."""
_LONGEST = 2**16
_SHORTEST = 8
_MOST_NODES = 4096
"""Largest number of equations that one result is computed by."""
_MOST_INPUTS = 6
"""Most inputs of a scan, or of one of its gradients."""
_SUMS = frozenset({"add", "add_any"})
_ELEMENTWISE = _SUMS | {"mul", "sub", "neg", "copy", "copy_p"}
_MOVES = frozenset({"slice", "pad", "split"})


@dataclass(frozen=True, slots=True)
class Forward:
    """``h[t] = a[t] h[t-1] + b[t]``, where ``h[0] = b[0]``; or ``h[t] = a[t] h[t-1]``, where ``h[0] = a[0]``.

    Attributes:
      decay, given, result: the numbers of a, b and h; of products no b.
      axis: the axis of time.
      shifted: whether it is written with shifts of all steps, and not as ``lax.associative_scan`` has it.
    """

    decay: int
    given: int | None
    result: int
    axis: int
    shifted: bool

    @property
    def inputs(self) -> tuple[int, ...]:
        """What is scanned."""
        return (self.decay,) if self.given is None else (self.decay, self.given)


@dataclass(frozen=True, slots=True)
class Backward:
    """The gradients of a scan: ``g[t] = d[t] + a[t+1] g[t+1]``, of b, and ``g[t] h[t-1]``, of a, where products begin
    after a one.

    Attributes:
      scan: the scan.
      cotangent: the number of d, h's cotangent.
      reads_result: whether what is scanned is at hand; else it is computed once more.
      of_given: the number of b's gradient.
      of_decay: the number of a's gradient; None if the program does not compute it.
      products: the products of a, and their cotangent, of whose gradient a's is the sum with the scan's; None where a
        has the scan's alone.
    """

    scan: Forward
    cotangent: int
    reads_result: bool
    of_given: int | None
    of_decay: int | None
    products: tuple[Forward, int] | None = None

    @property
    def results(self) -> tuple[int, ...]:
        return tuple(n for n in (self.of_given, self.of_decay) if n is not None)

    @property
    def cotangents(self) -> tuple[int, ...]:
        """The cotangents of the scan and of the products."""
        return (self.cotangent,) if self.products is None else (self.cotangent, self.products[1])

    @property
    def scanned(self) -> tuple[int, ...]:
        """The results of both."""
        return (self.scan.result,) if self.products is None else (self.scan.result, self.products[0].result)


_REMEMBERED: WeakKeyDictionary[Graph, Mapping[int, Forward | Backward]] = WeakKeyDictionary()


def scans_of(graph: Graph) -> Mapping[int, Forward | Backward]:
    """Returns the scans of a graph, and their gradients, each by the number of its first result."""
    if graph not in _REMEMBERED:
        _REMEMBERED[graph] = _found(graph)
    return _REMEMBERED[graph]


def _found(graph: Graph) -> dict[int, Forward | Backward]:
    shifted = {by for node in graph.nodes for by in _shifts(graph, node)} >= _FIRST_SHIFTS
    if not shifted and not any(node.name == "pad" and _interior(node) for node in graph.nodes):
        return {}
    regions = _Regions(graph, shifted)
    found: dict[int, Forward | Backward] = {}
    for scan, backwards in _together(regions, [(scan, regions.backwards(scan)) for scan in regions.scans.values()]):
        if all(regions.reaches(backward) for backward in backwards):
            found[scan.result] = scan
            found.update((backward.results[0], backward) for backward in backwards)
    return found


_Scan = tuple[Forward, Sequence[Backward]]
_MOST_ROUNDS = 8


def _together(regions: _Regions, scans: Sequence[_Scan]) -> list[_Scan]:
    """Returns the scans of whose inner values the program needs none but in these scans.

    Scans of the same decays share the products of these, which the program has once.
    """
    regions_of = {scan.result: regions.own([scan.result, *(n for b in own for n in b.results)]) for scan, own in scans}
    left = list(scans)
    for _ in range(_MOST_ROUNDS):
        nodes = set[int]().union(*(regions_of[scan.result][1] for scan, _ in left))
        still = [one for one in left if not regions.escapes(regions_of[one[0].result][0], nodes)]
        if len(still) == len(left):
            return still
        left = still
    return [one for one in left if not regions.escapes(*regions_of[one[0].result])]


def _halves(node: Node) -> bool:
    """Returns whether a node takes every second step, or puts steps between others."""
    if node.name == "slice":
        return any(by != 1 for by in node.params["strides"] or ())
    return node.name == "pad" and _interior(node)


def _takes_off(node: Node) -> bool:
    """Returns whether a pad takes steps off at the ends, or none."""
    three = node.params["padding_config"] if node.name == "pad" else [(1, 1, 1)]
    return all(int(low) <= 0 >= int(high) and not int(inside) for low, high, inside in three)


def _interior(node: Node) -> bool:
    return any(int(inside) > 0 for _, _, inside in node.params["padding_config"])


_FIRST_SHIFTS = frozenset({1, 2, 4})


def _shifts(graph: Graph, node: Node) -> tuple[int, ...]:
    """Returns by how many places a node may shift what it is given, filling with one number."""
    if node.name == "pad":
        return tuple(int(x) for low, high, _ in node.params["padding_config"] for x in (low, high) if int(x) > 0)
    if node.name == "concatenate" and len(node.inputs) == 2:
        axis = int(node.params["dimension"])
        return tuple(graph.shape(n)[axis] for n in node.inputs if uniform(graph, n) is not None)
    return ()


# ---------------------------------------------------------------------- regions and their values

_Pulled = tuple[tuple[Forward, int], ...]
"""One scan or two, each with the cotangent of its result."""


class _Regions:
    """Follows values along the axis on which slices and pads move them, and proves what sums of pads are.

    Attributes:
      moved: by number, the axis, for values that a slice or a pad stands above; what is proved counts as an input of
        what follows.
      same: by number, the value that a pad of nothing gives back.
      inputs: by number, the inputs of a moved value; None where these are many.
      scans: by the result.
      of_given, of_decay: the gradients, by the scan's result and cotangent, and those of the products where a's
        gradient is the sum of both.
    """

    def __init__(self, graph: Graph, shifted: bool):
        self.graph = graph
        self.moved: dict[int, int] = {}
        self.same: dict[int, int] = {}
        self.inputs: dict[int, frozenset[int] | None] = {}
        self.scans: dict[int, Forward] = {}
        self._of_decays: dict[int, list[Forward]] = {}
        self.of_given: dict[_Pulled, int] = {}
        self.of_decay: dict[_Pulled, int] = {}
        self.values: list[dict[int, Array | None]] = [{} for _ in range(_POINTS)]
        self._regions: dict[int, list[Node] | None] = {}
        self._functions: dict[tuple[str, int, tuple[int, ...]], Array] = {}
        self._alive = surviving(graph)
        self._halved: set[int] = set()
        """The values above which every second step was taken."""
        for node in graph.nodes:
            self._enter(node)
            axis = self._axis(node)
            if axis is None:
                self._note_identity(node)
                continue
            self.moved.update(dict.fromkeys(node.outputs, axis))
            if _halves(node) or not self._halved.isdisjoint(node.inputs):
                self._halved.update(node.outputs)
            self.inputs.update(dict.fromkeys(node.outputs, self._inputs(node, axis)))
            sums = node.name in _SUMS and (shifted or any(graph.name(n) == "pad" for n in node.inputs))
            if sums or shifted and node.name == "mul":
                (number,) = node.outputs
                leaves = self._leaves(number, axis)
                if leaves is not None and (self._is_scan(number, leaves, axis) or self._is_gradient(number, leaves)):
                    self._make_input(number)

    def _make_input(self, number: int) -> None:
        del self.moved[number]
        self._halved.discard(number)

    def _enter(self, node: Node) -> None:
        """Makes an input of the value of which a node takes every second step, where none was taken above it.

        JAX's transpose of a pad takes off what was padded before it takes every second step.
        """
        if node.name != "slice" or not _halves(node) or node.inputs[0] in self._halved:
            return
        (number,) = node.inputs
        above = self.graph.definitions.get(number)
        if above is not None and _takes_off(above):
            number = above.inputs[0]
        if number not in self.moved:
            return
        axis = self.moved[number]
        self._make_input(number)
        for user in self.graph.users[number]:
            if _takes_off(user) and user.outputs[0] in self.inputs:
                self.inputs[user.outputs[0]] = self._inputs(user, axis)

    def _note_identity(self, node: Node) -> None:
        """Notes a pad that adds nothing, as gradients of slices have it."""
        if node.name == "pad" and not any(int(x) for three in node.params["padding_config"] for x in three):
            self.same[node.outputs[0]] = self.same.get(node.inputs[0], node.inputs[0])

    def _axis(self, node: Node) -> int | None:
        """Returns the axis along which a node's results are moved, or None for a node of another kind."""
        graph, name = self.graph, node.name
        if name in _ELEMENTWISE:
            axes = {self.moved[n] for n in node.inputs if n in self.moved}
            if len(axes) != 1 or any(
                n not in graph.literals and graph.shape(n) != graph.shape(node.outputs[0]) for n in node.inputs
            ):
                return None
            return axes.pop()
        if name == "concatenate":
            axis = int(node.params["dimension"])
            return axis if {self.moved[n] for n in node.inputs if n in self.moved} == {axis} else None
        if name not in _MOVES:
            return None
        (first, *_), shape = node.inputs, graph.shape(node.inputs[0])
        if name == "pad":
            if _whole(graph, node.inputs[1]) is None:
                return None
            axes = {d for d, three in enumerate(node.params["padding_config"]) if any(int(x) for x in three)}
        elif name == "split":
            axes = {int(node.params["axis"])}
        else:
            strides = node.params["strides"] or (1,) * len(shape)
            limits = zip(node.params["start_indices"], node.params["limit_indices"], strides, shape, strict=True)
            axes = {d for d, (start, stop, by, size) in enumerate(limits) if (start, stop, by) != (0, size, 1)}
        axes |= {self.moved[first]} if first in self.moved else set()
        return axes.pop() if len(axes) == 1 else None

    def _read(self, node: Node) -> Iterator[int]:
        """Yields what a node reads, apart from literals and what a pad or a concatenation fills with."""
        graph, fills = self.graph, node.name in ("concatenate", "pad")
        for number in node.inputs:
            if not fills or _whole(graph, number) is None:
                number = self.same.get(number, number)
                if number not in graph.literals:
                    yield number

    def _is_inside(self, number: int, axis: int) -> bool:
        """Returns whether a value is moved along an axis, and no input."""
        return self.moved.get(number) == axis and number in self.graph.definitions

    def _inputs(self, node: Node, axis: int) -> frozenset[int] | None:
        """Returns the inputs of a node's results; None where they are many."""
        found: set[int] = set()
        for number in self._read(node):
            if not self._is_inside(number, axis):
                found |= set() if is_zero(self.graph, number) else {number}
                continue
            own = self.inputs[number]
            if own is None:
                return None
            found |= own
        return frozenset(found) if len(found) <= _MOST_INPUTS else None

    def region(self, number: int, axis: int) -> list[Node] | None:
        """Returns the nodes that compute a sum of pads, in order; None if there are too many."""
        if number not in self._regions:
            self._regions[number] = self._walked(number, axis)
        return self._regions[number]

    def _walked(self, number: int, axis: int) -> list[Node] | None:
        nodes: dict[int, Node] = {}
        todo, seen = [number], set[int]()
        while todo:
            n = todo.pop()
            if n in seen or not self._is_inside(n, axis):
                continue
            seen.add(n)
            node = self.graph.definitions[n]
            nodes[min(node.outputs)] = node
            if len(nodes) > _MOST_NODES:
                return None
            todo += self._read(node)
        self.graph.steps.spend(len(nodes))
        return [node for _, node in sorted(nodes.items())]

    def _leaves(self, number: int, axis: int) -> tuple[int, ...] | None:
        """Returns the inputs of a sum of floats, if they all have its shape and dtype."""
        graph = self.graph
        if not jnp.issubdtype(graph.dtype(number), jnp.inexact):  # integers wrap
            return None
        if not _SHORTEST <= graph.shape(number)[axis] <= _LONGEST:
            return None
        found = self.inputs[number]
        if not found:
            return None
        alike = (graph.shape(n) == graph.shape(number) and graph.dtype(n) == graph.dtype(number) for n in found)
        return tuple(sorted(found)) if all(alike) else None

    def _is_scan(self, number: int, leaves: tuple[int, ...], axis: int) -> bool:
        for decay, *given in itertools.permutations(leaves) if len(leaves) < 3 else ():

            def states(point: int, inputs: Sequence[int] = (decay, *given)) -> Array:
                return self.function("scan", point, *inputs)

            if self._agrees(number, axis, states):
                scan = Forward(decay, given[0] if given else None, number, axis, self._is_shifted(number, axis))
                self.scans[number] = scan
                self._of_decays.setdefault(decay, []).append(scan)
                return True
        return False

    def _is_shifted(self, number: int, axis: int) -> bool:
        """Returns whether nothing on the way to a result takes every second step, as a tree does."""
        found = self.region(number, axis)
        assert found is not None
        pads = any(_interior(node) for node in found if node.name == "pad")
        strided = (node.params["strides"] for node in found if node.name == "slice")
        return not pads and all(by is None or set(map(int, by)) == {1} for by in strided)

    def _is_gradient(self, number: int, leaves: tuple[int, ...]) -> bool:
        """Returns whether a sum is a gradient of one of the scans so far, or of one and of the products."""
        scans = sorted({scan for n in leaves for scan in self._of_decays.get(n, ())}, key=lambda scan: scan.result)
        products = {scan.decay: scan for scan in scans if scan.given is None}
        pairs = [(scan, products[scan.decay]) for scan in scans if scan.given is not None and scan.decay in products]
        for pulled in itertools.chain.from_iterable(self._pulled(leaves, *own) for own in [*zip(scans), *pairs]):
            scan, cotangent = pulled[0]

            def of_given(point: int, scan: Forward = scan, d: int = cotangent) -> Array:
                return self.function("gradient", point, scan.decay, d)

            def of_decay(point: int, pulled: _Pulled = pulled) -> Array:
                return np.asarray(sum(self._of_decay(point, *own) for own in pulled) % _PRIME)

            if len(pulled) == 1 and scan.given is not None and self._agrees(number, scan.axis, of_given):
                self.of_given[pulled] = number
                return True
            if self._agrees(number, scan.axis, of_decay):
                self.of_decay[pulled] = number
                return True
        return False

    def _pulled(self, leaves: tuple[int, ...], *scans: Forward) -> Iterator[_Pulled]:
        """Yields scans with what may be their cotangents, of the inputs of a sum."""
        known = {n for scan in scans for n in (*scan.inputs, scan.result)}
        rest = [n for n in leaves if n not in known]
        if 0 < len(rest) <= len(scans):
            given = itertools.permutations(rest) if len(rest) == len(scans) else [rest * len(scans)]
            for cotangents in given:
                yield tuple(zip(scans, cotangents, strict=True))

    def _of_decay(self, point: int, scan: Forward, cotangent: int) -> Array:
        """Returns the decay's gradient at a point of the field, as a scan's cotangent gives it."""
        states = self.function("scan", point, *scan.inputs)
        before = np.append(1 if scan.given is None else 0, states[:-1])
        found: Array = self.function("gradient", point, scan.decay, cotangent) * before % _PRIME
        return found

    def _agrees(self, number: int, axis: int, expected: Callable[[int], Array]) -> bool:
        """Returns whether a value is the expected one at each of the points, and not too many nodes compute it."""
        for point in range(_POINTS):
            found = self.value(number, axis, point)
            if found is None or not np.array_equal(found, expected(point)):
                return False
        return self.region(number, axis) is not None

    def backwards(self, scan: Forward) -> list[Backward]:
        """Returns the gradients of a scan, one pair for each cotangent."""
        alive = surviving(self.graph)
        summed = {pulled[0]: pulled for pulled in self.of_decay if len(pulled) > 1}
        found = []
        for pulled in dict.fromkeys((*self.of_given, *self.of_decay)):
            if pulled[0][0] != scan or len(pulled) > 1 and pulled[:1] in self.of_given:
                continue
            own = summed.get(pulled[0], pulled) if pulled not in self.of_decay else pulled
            products = own[1] if len(own) > 1 else None
            one = Backward(scan, pulled[0][1], False, self.of_given.get(pulled), self.of_decay.get(own), products)
            beside = self._known_beside(one.results[0])
            found.append(replace(one, reads_result=all(n in alive and n in beside for n in one.scanned)))
        return found

    def value(self, number: int, axis: int, point: int) -> Array | None:
        """Returns a value along its axis at a random point of the field; None where it is not computed by integers."""
        values, graph = self.values[point], self.graph
        todo = [number]
        while todo:
            n = todo[-1]
            if n not in values and self._is_inside(n, axis):
                node = graph.definitions[n]
                waiting = [i for i in self._read(node) if i not in values and not is_zero(graph, i)]
                if waiting:
                    todo += waiting
                    continue
                graph.steps.spend()
                given = [self._input(i, axis, values) for i in node.inputs]
                known = [x for x in given if x is not None]
                values.update(dict.fromkeys(node.outputs))
                results = _computed(node, axis, known) if len(known) == len(given) else None
                if results is not None:
                    values.update(zip(node.outputs, results, strict=True))
            elif n not in values:
                random = np.random.default_rng((n, point))
                values[n] = random.integers(0, _PRIME, graph.shape(n)[axis], np.int64)
            todo.pop()
        return values[number]

    def _input(self, number: int, axis: int, values: Mapping[int, Array | None]) -> Array | None:
        number = self.same.get(number, number)
        if number in values:
            return values[number]
        shape, whole = self.graph.shape(number), _whole(self.graph, number)
        if whole is None:
            return None
        found = np.asarray(whole % _PRIME, np.int64)
        return np.broadcast_to(found, shape[axis : axis + 1]) if shape else found

    def own(self, results: Sequence[int]) -> tuple[set[int], set[int]]:
        """Returns (the values on the way to results, the identities of the nodes that compute all of them)."""
        inside: set[int] = set()
        nodes: set[int] = set()
        for number in results:
            found = self._regions[number]
            assert found is not None
            inside.update(n for node in found for n in node.outputs)
            nodes.update(id(node) for node in found)
        return inside - set(results), nodes

    def escapes(self, inside: set[int], nodes: set[int]) -> bool:
        """Returns whether the program needs a value elsewhere than in some nodes."""
        return any(
            n in self.graph.returned
            or any(id(user) not in nodes and not self._alive.isdisjoint(user.outputs) for user in self.graph.users[n])
            for n in inside
        )

    def reaches(self, backward: Backward) -> bool:
        """Returns whether the body with the gradients has all that they are computed from."""
        known = self._known_beside(backward.results[0])
        return all(n in known for n in (*backward.scan.inputs, *backward.cotangents))

    def _known_beside(self, number: int) -> Mapping[int, object]:
        """Returns the values of the body that computes a value."""
        return self.graph.positions[self.graph.definitions[number].body]

    def function(self, name: str, point: int, *inputs: int) -> Array:
        """Returns a recurrence of inputs, or its gradient, at a point of the field."""
        key = name, point, inputs
        if key not in self._functions:
            arrays = [own for n in inputs if (own := self.values[point][n]) is not None]
            if name == "scan" and len(inputs) == 1:
                arrays.append(np.append(arrays[0][:1], np.zeros_like(arrays[0][1:])))
            self._functions[key] = _scanned(*arrays) if name == "scan" else _gradient(*arrays)
        return self._functions[key]


def _whole(graph: Graph, number: int) -> int | None:
    """Returns the whole number that a value is in each of its elements, or None."""
    found = uniform(graph, number)
    if found is None or np.imag(found):
        return None
    real = float(np.real(found))
    return int(real) if real.is_integer() and abs(real) < 2**20 else None


def _computed(node: Node, axis: int, given: Sequence[Array]) -> list[Array] | None:
    """Returns the results of a node along the axis, in the field."""
    name, params = node.name, node.params
    if name == "mul":
        return [given[0] * given[1] % _PRIME]
    if name in _SUMS:
        return [(given[0] + given[1]) % _PRIME]
    if name == "sub":
        return [(given[0] - given[1]) % _PRIME]
    if name == "neg":
        return [-given[0] % _PRIME]
    if name in ("copy", "copy_p"):
        return [given[0]]
    if name == "concatenate":
        return [np.concatenate(given)]
    if name == "split":
        return list(np.split(given[0], np.cumsum([int(n) for n in params["sizes"]])[:-1]))
    if name == "slice":
        by = 1 if params["strides"] is None else int(params["strides"][axis])
        return [given[0][int(params["start_indices"][axis]) : int(params["limit_indices"][axis]) : by]]
    if name == "pad":
        low, high, inside = (int(x) for x in params["padding_config"][axis])
        x = given[0]
        fill = given[1].reshape(-1)[:1]
        spread = np.repeat(fill, max(0, len(x) + (len(x) - 1) * inside))
        spread[:: inside + 1] = x
        spread = spread[max(0, -low) : len(spread) - max(0, -high)]
        return [np.concatenate([np.repeat(fill, max(0, low)), spread, np.repeat(fill, max(0, high))])]
    return None


# ---------------------------------------------------------------------- recurrences


def _scanned(decay: Array, given: Array) -> Array:
    """Returns h with ``h[t] = decay[t] h[t-1] + given[t]`` in the field."""
    state, found = 0, []
    for a, b in zip(decay.tolist(), given.tolist(), strict=True):
        state = (a * state + b) % _PRIME
        found.append(state)
    return np.asarray(found, np.int64)


def _gradient(decay: Array, cotangent: Array) -> Array:
    """Returns g with ``g[t] = cotangent[t] + decay[t+1] g[t+1]`` in the field."""
    following = np.append(decay[1:], 0)
    return _scanned(following[::-1], cotangent[::-1])[::-1]
