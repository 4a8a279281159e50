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

Autodiff adds up what comes to a value from all that reads it.  So a gradient may begin with what came from elsewhere.

A scan of a and b gives the products of a too.  Where the program reads both results, these are two scans, whose
gradient of a is one sum.  The derivative of ``cumprod`` is that of such products.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal as OneOf
from typing import NamedTuple
from weakref import WeakKeyDictionary

import jax.numpy as jnp
import numpy as np

from autopallas.graph import Graph, Node
from autopallas.graph.body_links import is_at_hand
from autopallas.graph.edit import surviving
from autopallas.graph.loop_slices import is_zero, uniform
from autopallas.kernels.respelling.lanes import LAYOUTS, STEPS, Lanes, Layout, Pairs, axes_moved, laid_alike, lanes_of
from autopallas.kernels.respelling.prime_field import PRIME, computed, gradient, scanned, whole

__all__ = ["Backward", "Forward", "scans_of"]

Array = np.ndarray

_POINTS = 2
"""How many points of the field are tried."""
_LONGEST = 2**16
_SHORTEST = 8
_MOST_NODES = 4096
"""Largest number of equations that one result is computed by."""
_MOST_INPUTS = 6
"""Most inputs of a scan, or of one of its gradients."""
_MOST_RELATED = 32
"""Most values by which two sums are compared."""
_SUMS = frozenset({"add", "add_any"})
_ELEMENTWISE = _SUMS | {"mul", "sub", "neg", "copy", "copy_p"}
_MOVES = frozenset({"slice", "pad", "split"})
_ONE_STEP = -1
"""In place of an axis, of values that have one step, and perhaps no axis of steps."""


@dataclass(frozen=True, slots=True)
class Forward:
    """``h[t] = a[t] h[t-1] + b[t]``, where ``h[0] = b[0]``; or ``h[t] = a[t] h[t-1]``, where ``h[0] = a[0]``.

    Attributes:
      decay, given, result: the numbers of a, b and h; of products no b.
      axis: the axis of time.
      shifted: whether it is written with shifts of all steps, and not as ``lax.associative_scan`` has it.
      layouts: of each input, which of the result's axes it has.
    """

    decay: int
    given: int | None
    result: int
    axis: int
    shifted: bool
    layouts: tuple[Layout, ...]

    @property
    def inputs(self) -> tuple[int, ...]:
        """What is scanned."""
        return (self.decay,) if self.given is None else (self.decay, self.given)

    def at(self, image: Mapping[int, int]) -> Forward:
        """Returns the same scan of other values."""
        given = None if self.given is None else image[self.given]
        return replace(self, decay=image[self.decay], given=given, result=image[self.result])


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
      layouts: of the cotangents, which of the axes of h they have; and of each of the results, which is a sum over the
        axes that it lacks.
      added: what is added to each of the results, None where nothing is, and which of the axes of h that has.
    """

    scan: Forward
    cotangent: int
    reads_result: bool
    of_given: int | None
    of_decay: int | None
    products: tuple[Forward, int] | None = None
    layouts: tuple[tuple[Layout, ...], tuple[Layout, ...]] = ((), ())
    added: tuple[tuple[int | None, Layout], ...] = ()

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

    @property
    def reads(self) -> tuple[int, ...]:
        """What the gradients are computed from, and what is added to them."""
        own = (*self.scan.inputs, *self.cotangents, *(self.scanned if self.reads_result else ()))
        return (*own, *(n for n, _ in self.added if n is not None))


_REMEMBERED: WeakKeyDictionary[Graph, Mapping[int, Forward | Backward]] = WeakKeyDictionary()


def scans_of(graph: Graph) -> Mapping[int, Forward | Backward]:
    """Returns the scans of a graph, and their gradients, each by the number of its first result."""
    known = _REMEMBERED.get(graph)
    if known is None:
        known = _REMEMBERED[graph] = _found(graph)
    return known


def _found(graph: Graph) -> dict[int, Forward | Backward]:
    along: dict[int, set[int]] = {}  # by how many places something is shifted, by the number of steps
    for node in graph.nodes:
        for by, steps in _shifts(graph, node):
            for size in (steps, steps - by):  # what is taken off again is padded before or after that
                along.setdefault(size, set()).add(by)
    shifted = any(own >= _FIRST_SHIFTS for steps, own in along.items() if steps >= _SHORTEST)
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
        leaving = regions.leaving(set[int]().union(*(regions_of[scan.result][0] for scan, _ in left)), left)
        still = [one for one in left if not regions.escapes(regions_of[one[0].result][0], nodes, leaving)]
        if len(still) == len(left):
            return still
        left = still
    return [
        one for one in left if not regions.escapes(*(own := regions_of[one[0].result]), regions.leaving(own[0], [one]))
    ]


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


def _shifts(graph: Graph, node: Node) -> list[tuple[int, int]]:
    """Returns by how many places a node may shift what it is given, filling with one number, and how many steps there
    are then."""
    if node.name == "pad":
        sizes = graph.shape(node.outputs[0])
        config = zip(node.params["padding_config"], sizes, strict=True)
        return [(int(x), steps) for (low, high, _), steps in config for x in (low, high) if int(x) > 0]
    if node.name == "concatenate" and len(node.inputs) == 2:
        axis = int(node.params["dimension"])
        steps = graph.shape(node.outputs[0])[axis]
        return [(graph.shape(n)[axis], steps) for n in node.inputs if uniform(graph, n) is not None]
    return []


# ---------------------------------------------------------------------- regions and their values

_Leaf = tuple[int, int]
"""A value, and the axis of its steps."""
_Pulled = tuple[tuple[Forward, int], ...]
"""One scan or two, each with the cotangent of its result."""


class _Gradient(NamedTuple):
    """A gradient of what scans are given, or of their decay.

    Attributes:
      pulled: the scans, with the cotangents of their results.
      of_decay: of what it is the gradient.
      cotangents, result: which of the axes of the scan's result these have.
      added: what is added to it, if anything.
      beside: which of the axes that has.
    """

    pulled: _Pulled
    of_decay: bool
    cotangents: tuple[Layout, ...]
    result: Layout
    added: int | None
    beside: Layout

    def at(self, image: Mapping[int, int], scans: Mapping[Forward, Forward]) -> _Gradient:
        """Returns the same gradient of other values, and of other scans."""
        pulled = tuple((scans[scan], image[d]) for scan, d in self.pulled)
        return self._replace(pulled=pulled, added=None if self.added is None else image[self.added])


_Outcome = Forward | _Gradient | None


def _step(array: Array, place: int) -> tuple[int, ...]:
    """Returns one step of a value, at each point."""
    return tuple(array[:, place].tolist())


class _Regions:
    """Follows values along the axis on which slices and pads move them, and proves what sums of pads are.

    Attributes:
      moved: by number, the axis, for values that a slice or a pad stands above, or ``_ONE_STEP``; what is proved counts
        as an input of what follows.
      same: by number, the value that a pad of nothing gives back.
      inputs: by number, the inputs of a moved value, and the axis of each, in the order in which what computes it first
        reads them; None where these are many.
      scans: by the result.
      of_given, of_decay: the gradients, by the scan's result and cotangent, and those of the products where a's
        gradient is the sum of both.
    """

    def __init__(self, graph: Graph, shifted: bool):
        self.graph = graph
        self._shifted = shifted
        self.moved: dict[int, int] = {}
        self.same: dict[int, int] = {}
        self.inputs: dict[int, tuple[_Leaf, ...] | None] = {}
        self._forms: dict[int, Hashable] = {}
        """By number, what stands for the equations that compute a moved value of its inputs: the same for those of
        equal layers, whatever the inputs are."""
        self._numbered: dict[Hashable, int] = {}
        """By what a node does, and the forms of what it reads: the form of its results."""
        self._outcomes: dict[Hashable, tuple[_Outcome, tuple[int, ...], Sequence[Forward]]] = {}
        """What sums were found to be, by what tells that: with the values and the scans that this names."""
        self._computed: set[_Leaf] = set()
        """The inputs whose values are what they are computed by, and not any numbers."""
        self._taken_over: set[int] = set()
        """The sums of which it was asked what they are, and that were not evaluated for that."""
        self.scans: dict[int, Forward] = {}
        self._of_decays: dict[int, list[Forward]] = {}
        self.of_given: dict[_Pulled, int] = {}
        self.of_decay: dict[_Pulled, int] = {}
        self.values: dict[_Leaf, Array | None] = {}
        self._of_results: dict[int, tuple[Layout, int | None, Layout]] = {}
        """By the results that are gradients, which of their scan's axes they have, what is added, and its axes."""
        self._of_cotangents: dict[tuple[Forward, int], Layout] = {}
        self._reading: dict[int, tuple[int, ...]] = {}
        """By the first result of one of ``LAYOUTS``, the axes along which it reads."""
        self._reads: dict[int, list[_Leaf | None]] = {}
        """By the first result of a node, what the node reads, until one of these is made an input."""
        self._wholes: dict[int, int | None] = {}
        self._alike: dict[int, list[int]] = {}
        """By number, the pads of nothing that give it back."""
        self._pairs = Pairs(graph)
        self._shifts_of: dict[int, int | None] = {}
        self._regions: dict[int, list[Node] | None] = {}
        self._functions: dict[tuple[str, tuple[_Leaf, ...]], Array] = {}
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
            self._note_inputs(node)
            sums = node.name in _SUMS and (shifted or any(self._is_padded(n) for n in node.inputs))
            if sums or shifted and node.name == "mul":
                (number,) = node.outputs
                leaves = self._leaves(number, axis)
                if leaves is not None and self._is_known(number, leaves, axis):
                    self._make_input(number)

    def _is_padded(self, number: int) -> bool:
        """Returns whether a value is a pad, perhaps with its axes in another order."""
        if self.graph.name(number) in LAYOUTS:
            number = self.graph.definitions[number].inputs[0]
        return self.graph.name(number) == "pad"

    def _make_input(self, number: int) -> None:
        del self.moved[number]
        self._halved.discard(number)
        for alike in (number, *self._alike.get(number, ())):
            for user in self.graph.users[alike]:
                self._reads.pop(user.outputs[0], None)

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
        readers, todo = set[int](), [number]
        while todo:  # what was read of it so far has another form than what is read from here on
            for user in self.graph.users[todo.pop()]:
                todo += [n for n in user.outputs if self._forms.pop(n, None) is not None]
                readers.update(user.outputs)
        for leaf in self._computed:
            if leaf[0] in readers:
                self.value(*leaf)  # while it is still known by what it is computed
        own = number, self.moved[number]
        if not self._taken_over.isdisjoint((number, *readers)):
            self.value(*own)
        if own in self.values:
            self._computed.add(own)
        self._make_input(number)
        for user in self.graph.users[number]:
            if _takes_off(user) and user.outputs[0] in self.inputs:
                self._note_inputs(user)

    def _note_identity(self, node: Node) -> None:
        """Notes a pad that adds nothing, as gradients of slices have it."""
        if node.name == "pad" and not any(int(x) for three in node.params["padding_config"] for x in three):
            number = self.same[node.outputs[0]] = self.same.get(node.inputs[0], node.inputs[0])
            self._alike.setdefault(number, []).append(node.outputs[0])

    def _axis(self, node: Node) -> int | None:
        """Returns the axis along which a node's results are moved, or None for a node of another kind."""
        name = node.name
        if name in _ELEMENTWISE:
            return self._elementwise_axis(node)
        if name in LAYOUTS:
            return self._axis_of_layout(node)
        if name == "concatenate":
            axis = int(node.params["dimension"])
            moved = {self._at(n, axis) for n in node.inputs if n in self.moved}
            return axis if moved == {axis} else None
        axes = self._own_axes(node)
        return self.moved.get(node.inputs[0]) if axes == set() else _one(axes)

    def _own_axes(self, node: Node) -> set[int] | None:
        """Returns the axes along which a slice or a pad moves what it is given; None for another node."""
        graph, name = self.graph, node.name
        if name not in _MOVES:
            return None
        shape = graph.shape(node.inputs[0])
        if name == "pad":
            if self._whole(node.inputs[1]) is None:
                return None
            return {d for d, three in enumerate(node.params["padding_config"]) if any(int(x) for x in three)}
        if name == "split":
            return {int(node.params["axis"])}
        strides = node.params["strides"] or (1,) * len(shape)
        limits = zip(node.params["start_indices"], node.params["limit_indices"], strides, shape, strict=True)
        return {d for d, (start, stop, by, size) in enumerate(limits) if (start, stop, by) != (0, size, 1)}

    def _at(self, number: int, axis: int) -> int:
        """Returns the axis of a moved value's steps, which is any of size 1 where it has one step."""
        own, shape = self.moved[number], self.graph.shape(number)
        return axis if own == _ONE_STEP and 0 <= axis < len(shape) and shape[axis] == 1 else own

    def _elementwise_axis(self, node: Node) -> int | None:
        """Returns the axis of sums and products, whose other axes may have size 1 in some operands."""
        graph = self.graph
        shape = graph.shape(node.outputs[0])
        arrays = [n for n in node.inputs if n not in graph.literals]
        axes = {self.moved[n] for n in arrays if n in self.moved}
        if not axes or any(len(graph.shape(n)) != len(shape) for n in arrays):
            return None
        known = axes - {_ONE_STEP}
        if not known:
            return _ONE_STEP if all(n in self.moved for n in arrays) else None
        axis = min(known)
        alike = all(graph.shape(n)[axis] == shape[axis] for n in arrays)
        return axis if len(known) == 1 and alike else None

    def _axis_of_layout(self, node: Node) -> int | None:
        """Returns the axis of what moves, adds or sums other axes."""
        moved = {n: self.moved[n] for n in node.inputs if n in self.moved}
        if self._shifted and not moved and len(node.inputs) == 1:
            axis = self._shifted_along(node.inputs[0])
            moved = {} if axis is None else dict.fromkeys(node.inputs, axis)
        if not moved or any(n in self.graph.literals for n in node.inputs):
            return None
        (number, axis), *_ = moved.items()
        if axis == _ONE_STEP or self.graph.shape(number)[axis] == 1:
            if any(n not in moved or moved[n] >= 0 and self.graph.shape(n)[moved[n]] != 1 for n in node.inputs):
                return None
            self._reading[node.outputs[0]] = tuple(moved[n] for n in node.inputs)
            return _ONE_STEP
        found = axes_moved(self.graph, node, moved)
        if found is None or any(found[1][i] != moved.get(n, found[1][i]) for i, n in enumerate(node.inputs)):
            return None
        self._reading[node.outputs[0]] = found[1]
        return found[0]

    def _shifted_along(self, number: int) -> int | None:
        """Returns the axis along which some nodes shift an input, which others repeat as it is."""
        if number not in self._shifts_of:
            axes = {_one(self._own_axes(user)) for user in self.graph.users[number]} - {None}
            self._shifts_of[number] = axes.pop() if len(axes) == 1 else None
        return self._shifts_of[number]

    def _read(self, node: Node) -> list[_Leaf | None]:
        """Returns what a node reads, each with the axis of its steps; None for literals, zeros, and what a pad or a
        concatenation fills with."""
        known = self._reads.get(node.outputs[0])
        if known is None:
            known = self._reads[node.outputs[0]] = self._read_anew(node)
        return known

    def _read_anew(self, node: Node) -> list[_Leaf | None]:
        graph, fills = self.graph, {"concatenate": node.inputs, "pad": node.inputs[1:]}.get(node.name, ())
        axis = self.moved[node.outputs[0]]
        axes = self._reading.get(node.outputs[0], (axis,) * len(node.inputs))
        found: list[_Leaf | None] = []
        for number, at in zip(node.inputs, axes, strict=True):
            own = self.same.get(number, number)
            if number in fills and self._whole(number) is not None or own in graph.literals:
                found.append(None)
            elif own in self.moved and self._at(own, at) == at:
                found.append((own, self.moved[own]))
            else:
                found.append(None if is_zero(graph, own) else (own, at))
        return found

    def _whole(self, number: int) -> int | None:
        """Returns the whole number that a value is in each of its elements, or None."""
        if number not in self._wholes:
            self._wholes[number] = whole(self.graph, number)
        return self._wholes[number]

    def _is_inside(self, leaf: _Leaf) -> bool:
        """Returns whether a value is moved along an axis, and no input."""
        return self.moved.get(leaf[0]) == leaf[1] and leaf[0] in self.graph.definitions

    def _note_inputs(self, node: Node) -> None:
        """Notes the inputs of a node's results, and their forms."""
        graph, leaves = self.graph, dict[_Leaf, int]()
        said = graph.parameters(node.equation) if node.params else 0
        read: list[Hashable] | None = None if said is None else []
        for number, leaf in zip(node.inputs, self._read(node), strict=True):
            if leaf is None:
                part: Hashable = self._whole(number), graph.shape(number)
            else:
                inside = self._is_inside(leaf)
                own = self.inputs[leaf[0]] if inside else (leaf,)
                if own is None:
                    self.inputs.update(dict.fromkeys(node.outputs))
                    return
                places = tuple([leaves.setdefault(one, len(leaves)) for one in own])
                form = self._forms.get(leaf[0]) if inside else ()
                part = None if form is None else (form, leaf[1], places, number == leaf[0], graph.shape(number))
            if part is None or read is None:
                read = None
            else:
                read.append(part)
        self.inputs.update(dict.fromkeys(node.outputs, tuple(leaves) if len(leaves) <= _MOST_INPUTS else None))
        if read is not None:
            result = node.outputs[0]
            key = node.name, said, self.moved[result], graph.shape(result), *read
            form = self._numbered.setdefault(key, len(self._numbered))
            self._forms.update({n: (form, i) for i, n in enumerate(node.outputs)})

    def region(self, number: int) -> list[Node] | None:
        """Returns the nodes that compute a sum of pads, in order; None if there are too many."""
        if number not in self._regions:
            self._regions[number] = self._walked(number)
        return self._regions[number]

    def _walked(self, number: int) -> list[Node] | None:
        nodes: dict[int, Node] = {}
        todo, seen = [(number, self.moved[number])], set[_Leaf]()
        while todo:
            leaf = todo.pop()
            if leaf in seen or not self._is_inside(leaf):
                continue
            seen.add(leaf)
            node = self.graph.definitions[leaf[0]]
            nodes[min(node.outputs)] = node
            if len(nodes) > _MOST_NODES:
                return None
            todo += filter(None, self._read(node))
        self.graph.steps.spend(len(nodes))
        return [node for _, node in sorted(nodes.items())]

    def _leaves(self, number: int, axis: int) -> tuple[_Leaf, ...] | None:
        """Returns the inputs of a sum of floats, if they all have its steps and dtype."""
        graph = self.graph
        if axis == _ONE_STEP or not jnp.issubdtype(graph.dtype(number), jnp.inexact):  # integers wrap
            return None
        steps = graph.shape(number)[axis]
        if not _SHORTEST <= steps <= _LONGEST:
            return None
        found = self.inputs[number]
        if not found or len({n for n, _ in found}) < len(found):
            return None
        alike = (at >= 0 and graph.shape(n)[at] == steps and graph.dtype(n) == graph.dtype(number) for n, at in found)
        return tuple(sorted(found)) if all(alike) else None

    def _is_known(self, number: int, leaves: tuple[_Leaf, ...], axis: int) -> bool:
        """Returns whether a sum is a scan of its inputs, or a gradient of scans so far, and notes that.

        What was found for one sum is taken over by another one of the same form, whose inputs are related alike.
        """
        by_result = {scan.result: scan for n, _ in leaves for scan in self._of_decays.get(n, ())}
        scans = [scan for _, scan in sorted(by_result.items())]
        related = self._related(number, leaves, scans)
        known = None if related is None else self._outcomes.get(related[0])
        if known is None:
            outcome = self._scan(number, leaves, axis) or self._gradient_of(number, leaves, scans)
            if related is not None:
                self._outcomes[related[0]] = outcome, related[1], scans
        else:
            assert related is not None
            outcome, there, scans_there = known
            image = dict(zip(there, related[1], strict=True))
            if isinstance(outcome, Forward):
                outcome = outcome.at(image)
            elif outcome is not None:
                outcome = outcome.at(image, dict(zip(scans_there, scans, strict=True)))
            if scans or len(leaves) < 3:
                self._taken_over.add(number)
        if outcome is None or self.region(number) is None:
            return False
        if isinstance(outcome, Forward):
            self.scans[number] = outcome
            self._of_decays.setdefault(outcome.decay, []).append(outcome)
        else:
            (self.of_decay if outcome.of_decay else self.of_given)[outcome.pulled] = number
            self._of_cotangents.update(zip(outcome.pulled, outcome.cotangents, strict=True))
            self._of_results[number] = outcome.result, outcome.added, outcome.beside
        self._computed.add((number, axis))
        return True

    def _related(
        self, number: int, leaves: tuple[_Leaf, ...], scans: Sequence[Forward]
    ) -> tuple[Hashable, tuple[int, ...]] | None:
        """Returns what tells whether a sum is a scan, or a gradient of some scans, and the values that this names by
        their places; None where that is not known."""
        form, order = self._forms.get(number), self.inputs[number]
        if form is None or order is None or {*order} != {*leaves}:
            return None
        places = {leaf: i for i, leaf in enumerate(order)}

        def place(leaf: _Leaf) -> int:
            return places.setdefault(leaf, len(places))

        said: list[Hashable] = [form, tuple([places[leaf] for leaf in leaves])]
        for scan in scans:
            inputs = [place((n, self._axis_of(scan, i))) for i, n in enumerate(scan.inputs)]
            result = place((scan.result, scan.axis))
            pulled = [
                (places[leaf], own) for leaf in leaves if (own := self._of_cotangents.get((scan, leaf[0]))) is not None
            ]
            said += [tuple(inputs), result, scan.layouts, tuple(pulled)]
        todo = list(places)
        for leaf in todo:
            if leaf not in self._computed:
                said.append((self.graph.shape(leaf[0]), leaf[1]))
                continue
            form, order = self._forms.get(leaf[0]), self.inputs[leaf[0]]
            if form is None or order is None or len(todo) > _MOST_RELATED:
                return None
            todo += [other for other in order if other not in places]
            said.append((form, tuple(map(place, order))))
        numbers = [n for n, _ in places]
        first = {n: i for i, n in reversed([*enumerate(numbers)])}
        return (*said, tuple([first[n] for n in numbers])), (number, *numbers)

    def _scan(self, number: int, leaves: tuple[_Leaf, ...], axis: int) -> Forward | None:
        """Returns the scan of its inputs that a sum is, if it is one."""
        value = self.value(number, axis) if len(leaves) < 3 else None
        if value is None:
            return None
        for decay, *given in itertools.permutations(leaves):
            (first,) = self._arrays(given or [decay])  # the first state, which few other values have
            if not (value[:, 0] == first[:, 0]).all():
                continue
            if np.array_equal(value, self.function("scan", decay, *given)) and self.region(number) is not None:
                layouts = self._laid(number, axis, [n for n, _ in (decay, *given)])
                if layouts is None:
                    return None
                numbers = decay[0], given[0][0] if given else None
                return Forward(*numbers, number, axis, self._is_shifted(number), layouts)
        return None

    def _lanes(self, number: int, axis: int, added: int | None = None) -> Lanes | None:
        nodes = self.region(number)
        return None if nodes is None else lanes_of(self.graph, number, axis, nodes, self._read, self._pairs, added)

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
        found = self.region(number)
        assert found is not None
        pads = any(_interior(node) for node in found if node.name == "pad")
        strided = (node.params["strides"] for node in found if node.name == "slice")
        return not pads and all(by is None or set(map(int, by)) == {1} for by in strided)

    def _gradient_of(self, number: int, leaves: tuple[_Leaf, ...], scans: Sequence[Forward]) -> _Gradient | None:
        """Returns the gradient of one of some scans that a sum is, or of one and of the products, perhaps with one more
        value: what JAX's autodiff had added up before, of a value that is read elsewhere too."""
        value = self.value(number, self.moved[number]) if scans else None
        if value is None:
            return None
        products = {scan.decay: scan for scan in scans if scan.given is None}
        pairs = [(scan, products[scan.decay]) for scan in scans if scan.given is not None and scan.decay in products]
        axes = dict(leaves)
        last, zero = _step(value, -1), (0,) * _POINTS
        added = {zero, *(_step(own, -1) for own in self._arrays(leaves))}
        for pulled in itertools.chain.from_iterable(self._pulled(leaves, *own) for own in [*zip(scans), *pairs]):
            alone = len(pulled) == 1 and pulled[0][0].given is not None
            for of_decay in (False, True) if alone else (True,):
                expected = self._last_step(pulled, axes, of_decay)
                if tuple([(x - y) % PRIME for x, y in zip(last, expected, strict=True)]) not in added:
                    continue  # few other values have the same last step
                rest = (value - self._expected(pulled, axes, of_decay)) % PRIME
                more = [leaf[0] for leaf, own in zip(leaves, self._arrays(leaves), strict=True) if (own == rest).all()]
                if (more or not rest.any()) and self.region(number) is not None:
                    return self._with_axes(number, axes, pulled, of_decay, more[0] if rest.any() else None)
        return None

    def _last_step(self, pulled: _Pulled, axes: Mapping[int, int], of_decay: bool) -> tuple[int, ...]:
        """Returns the last step of a gradient of what scans are given, or of their decay, at the points of the field:
        the cotangent, or its product with the state before."""
        ends = [_step(own, -1) for own in self._arrays([(d, axes[d]) for _, d in pulled])]
        if not of_decay:
            return ends[0]
        before = [_step(self._states_of(scan), -2) for scan, _ in pulled]
        terms = [[x * h for x, h in zip(*own, strict=True)] for own in zip(ends, before, strict=True)]
        return tuple(map(sum, zip(*terms, strict=True)))

    def _expected(self, pulled: _Pulled, axes: Mapping[int, int], of_decay: bool) -> Array:
        """Returns a gradient of what scans are given, or of their decay, at the points of the field."""
        gradients = [self.function("gradient", self._decay(scan), (d, axes[d])) for scan, d in pulled]
        if not of_decay:
            return gradients[0]
        found = np.zeros_like(gradients[0])
        for (scan, _), own in zip(pulled, gradients, strict=True):
            before = np.roll(self._states_of(scan), 1, -1)
            before[:, 0] = 1 if scan.given is None else 0
            found += own * before % PRIME
        return found % PRIME

    def _states_of(self, scan: Forward) -> Array:
        return self.function("scan", *[(n, self._axis_of(scan, place)) for place, n in enumerate(scan.inputs)])

    def _with_axes(
        self, number: int, leaves: Collection[int], pulled: _Pulled, of_decay: bool, added: int | None
    ) -> _Gradient | None:
        """Returns a gradient, if its axes are those of the scan, or sums over them."""
        graph, (scan, cotangent) = self.graph, pulled[0]
        shape = graph.shape(scan.result)
        known = dict(zip(scan.inputs, scan.layouts, strict=True)) | {scan.result: tuple(range(len(shape)))}
        is_read = added in (*known, cotangent)  # so it may be among what is summed over other axes
        lanes = self._lanes(number, self.moved[number], None if is_read else added)
        if lanes is None or is_read and lanes.summed:
            return None
        known |= {d: self._of_cotangents[own, d] for own, d in pulled if (own, d) in self._of_cotangents}
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
        return _Gradient(pulled, of_decay, tuple(cotangents), result, added, beside)

    def _is_laid_alike(self, scan: Forward, cotangents: Sequence[Layout], result: Layout) -> bool:
        """Returns whether a scan, cotangents and a result have the same axes."""
        shape = self.graph.shape(scan.result)
        inputs = zip(scan.inputs, scan.layouts, strict=True)
        return all(laid_alike(self.graph.shape(n), own, shape) for n, own in inputs) and all(
            len(own) == len(shape) and laid_alike(shape, own, shape) for own in (*cotangents, result)
        )

    def _decay(self, scan: Forward) -> _Leaf:
        return scan.decay, self._axis_of(scan, 0)

    def _axis_of(self, scan: Forward, place: int) -> int:
        """Returns the axis of the steps in one of a scan's inputs."""
        return scan.layouts[place].index(scan.axis)

    def _pulled(self, leaves: tuple[_Leaf, ...], *scans: Forward) -> Iterator[_Pulled]:
        """Yields scans with what may be their cotangents, of the inputs of a sum."""
        known = {n for scan in scans for n in (*scan.inputs, scan.result)}
        rest = [n for n, _ in leaves if n not in known] or [n for n, _ in leaves]
        if len(scans) == 1 and len(rest) <= _MOST_INPUTS:
            yield from (tuple(zip(scans, (d,), strict=True)) for d in rest)
        elif len(rest) <= len(scans):
            given = itertools.permutations(rest) if len(rest) == len(scans) else [rest * len(scans)]
            for cotangents in given:
                yield tuple(zip(scans, cotangents, strict=True))

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
            laid = [self._of_results[n] for n in one.results]
            layouts = tuple(self._of_cotangents[each] for each in own), tuple(layout for layout, _, _ in laid)
            one = replace(one, layouts=layouts, added=tuple((more, layout) for _, more, layout in laid))
            home, body = (self.graph.definitions[n].body for n in (scan.result, one.results[0]))
            at_hand = all(n in alive and is_at_hand(self.graph, n, home, body) for n in one.scanned)
            found.append(replace(one, reads_result=at_hand))
        return found

    def value(self, number: int, axis: int) -> Array | None:
        """Returns a value along its axis at random points of the field, [points, steps]; None where it is not computed
        by integers."""
        values, graph = self.values, self.graph
        todo = [(number, axis)]
        while todo:
            leaf = todo[-1]
            if leaf not in values and (self._is_inside(leaf) or leaf in self._computed):
                node = graph.definitions[leaf[0]]
                read = self._read(node)
                waiting = [own for own in read if own is not None and own not in values]
                if waiting:
                    todo += waiting
                    continue
                graph.steps.spend()
                at = None if leaf[1] == _ONE_STEP else leaf[1]
                given = [
                    values[own] if own is not None else self._filled(n, at)
                    for n, own in zip(node.inputs, read, strict=True)
                ]
                known = [x for x in given if x is not None]
                found = {(n, leaf[1]): None for n in node.outputs}
                results = computed(node, at, known) if len(known) == len(given) else None
                values.update(found if results is None else dict(zip(found, results, strict=True)))
            elif leaf not in values:
                n, at = leaf
                random = np.random.default_rng((n, at + 1))
                values[leaf] = None if at < 0 else random.integers(0, PRIME, (_POINTS, graph.shape(n)[at]), np.int64)
            todo.pop()
        return values[number, axis]

    def _filled(self, number: int, axis: int | None) -> Array | None:
        """Returns a value that is one number, along an axis, [points, steps]."""
        shape, found = self.graph.shape(number), self._whole(number)
        if found is None:
            return None
        one = np.asarray(found % PRIME, np.int64)
        return np.broadcast_to(one, (_POINTS, 1 if axis is None or not shape else shape[axis]))

    def own(self, results: Sequence[int]) -> tuple[set[int], set[int]]:
        """Returns (the values on the way to results, the identities of the nodes that compute all of them)."""
        inside: set[int] = set()
        nodes: set[int] = set()
        for number in results:
            found = self._regions[number]
            assert found is not None
            inside.update(n for node in found if not self._lays_out(node) for n in node.outputs)
            nodes.update(id(node) for node in found)
        return inside - set(results), nodes

    def _lays_out(self, node: Node) -> bool:
        """Returns whether a node moves the axes of an input, which costs nothing to do once more."""
        return node.name in LAYOUTS and len(node.inputs) == 1 and node.inputs[0] not in self.moved

    def leaving(self, inside: set[int], scans: Sequence[_Scan]) -> set[int]:
        """Returns those of some values that leave their body, and that the program needs beside scans and gradients.

        What a loop over layers stacks, and its backward reads step by step, leaves the loop's body too.
        """
        found = inside & self.graph.returned
        if not found or self.graph.has_plain_bodies:
            return found
        reads: dict[int, tuple[int, ...]] = {}
        for scan, backwards in scans:
            reads[scan.result] = scan.inputs
            for one in backwards:
                reads.update(dict.fromkeys(one.results, one.reads))
        return found & surviving(self.graph, reads, reads)

    def escapes(self, inside: set[int], nodes: set[int], leaving: set[int]) -> bool:
        """Returns whether the program needs a value elsewhere than in some nodes; ``leaving`` are those that it needs
        outside of their body."""
        return any(
            n in leaving
            or any(id(user) not in nodes and not self._alive.isdisjoint(user.outputs) for user in self.graph.users[n])
            for n in inside
        )

    def reaches(self, backward: Backward) -> bool:
        """Returns whether the body with the gradients has all that they are computed from, or can be given it."""
        own, body = self.graph.definitions, self.graph.definitions[backward.results[0]].body
        return all(is_at_hand(self.graph, n, own[backward.scan.result].body, body) for n in backward.reads)

    def function(self, name: OneOf["scan", "gradient"], *inputs: _Leaf) -> Array:
        """Returns a recurrence of inputs, or its gradient, at the points of the field."""
        key = name, inputs
        if key not in self._functions:
            arrays = self._arrays(inputs)
            self._functions[key] = _states(*arrays) if name == "scan" else gradient(*arrays)
        return self._functions[key]

    def _arrays(self, inputs: Sequence[_Leaf]) -> list[Array]:
        return [own for leaf in inputs if (own := self.value(*leaf)) is not None]


def _states(decay: Array, given: Array | None = None) -> Array:
    """Returns the recurrence of a and b, or the products of a."""
    return scanned(decay, np.where(np.arange(decay.shape[-1]) == 0, decay, 0) if given is None else given)


def _one(axes: set[int] | None) -> int | None:
    return min(axes) if axes is not None and len(axes) == 1 else None


def _layout(
    graph: Graph, lanes: Lanes, number: int, axes: Mapping[int, int], whole_shape: Sequence[int]
) -> Layout | None:
    """Returns which axes a value has; None where one of them is none of the known ones, or part of one."""
    shape = graph.shape(number)
    found = tuple(-1 if size == 1 else axes.get(lanes.same((number, d)), -2) for d, size in enumerate(shape))
    alike = all(d < 0 or whole_shape[d] == size for d, size in zip(found, shape, strict=True))
    return found if -2 not in found and alike else None
