"""Follows values along the axis on which slices and pads move them, and evaluates them at points of a prime field.

An input is a value that no slice or pad along the axis stands above: what the scan is given, or the cotangent of its
result.  So is one that the first slice of every second step reads, if none has been taken above it, such as numbers
that are shifted by one before they are scanned: whatever computes them, the tree begins there.  Doubling by hand shifts
all steps by 1, 2, 4, ... and fills with ones and zeros, which are no inputs.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import jax.numpy as jnp
import numpy as np

from autopallas.graph import Graph, Node
from autopallas.graph.loop_slices import is_zero
from autopallas.kernels.respelling.lanes import LAYOUTS, axes_moved
from autopallas.kernels.respelling.prime_field import PRIME, computed, whole

__all__ = ["MOST_INPUTS", "POINTS", "SHORTEST", "SUMS", "Array", "Leaf", "MovedValues", "has_interior"]

Array = np.ndarray

POINTS = 2
"""How many points of the field are tried."""
_LONGEST = 2**16
SHORTEST = 8
_MOST_NODES = 4096
"""Largest number of equations that one result is computed by."""
MOST_INPUTS = 6
"""Most inputs of a scan, or of one of its gradients."""
SUMS = frozenset({"add", "add_any"})
_ELEMENTWISE = SUMS | {"mul", "sub", "neg", "copy", "copy_p"}
_MOVES = frozenset({"slice", "pad", "split"})
_ONE_STEP = -1
"""In place of an axis, of values that have one step, and perhaps no axis of steps."""
Leaf = tuple[int, int]
"""A value, and the axis of its steps."""


class MovedValues:
    """Values along the axis on which slices and pads move them, node by node in the order of the program.

    Attributes:
      moved: by number, the axis, for values that a slice or a pad stands above, or -1 for those of one step; what is
        proved is made an input of what follows.
      inputs: by number, the inputs of a moved value, and the axis of each, in the order in which what computes it first
        reads them; None where these are many.
      forms: by number, what stands for the equations that compute a moved value of its inputs: the same for those of
        equal layers, whatever the inputs are.
      computed: the inputs whose values are what they are computed by, and not any numbers.
      taken_over: the sums of which it was asked what they are, and that were not evaluated for that.
    """

    def __init__(self, graph: Graph, shifted: bool):
        self.graph = graph
        self._shifted = shifted
        self.moved: dict[int, int] = {}
        self.inputs: dict[int, tuple[Leaf, ...] | None] = {}
        self.forms: dict[int, Hashable] = {}
        self.computed: set[Leaf] = set()
        self.taken_over: set[int] = set()
        self._same: dict[int, int] = {}
        """By number, the value that a pad of nothing gives back."""
        self._alike: dict[int, list[int]] = {}
        """By number, the pads of nothing that give it back."""
        self._numbered: dict[Hashable, int] = {}
        """By what a node does, and the forms of what it reads: the form of its results."""
        self._values: dict[Leaf, Array | None] = {}
        self._reading: dict[int, tuple[int, ...]] = {}
        """By the first result of one of ``LAYOUTS``, the axes along which it reads."""
        self._reads: dict[int, list[Leaf | None]] = {}
        """By the first result of a node, what the node reads, until one of these is made an input."""
        self._wholes: dict[int, int | None] = {}
        self._shifts_of: dict[int, int | None] = {}
        self._regions: dict[int, list[Node] | None] = {}
        self._halved: set[int] = set()
        """The values above which every second step was taken."""

    def follow(self, node: Node) -> int | None:
        """Notes what a node's results are, and returns the axis along which they are moved, if they are."""
        self._enter(node)
        axis = self._axis(node)
        if axis is None:
            self._note_identity(node)
            return None
        self.moved.update(dict.fromkeys(node.outputs, axis))
        if _halves(node) or not self._halved.isdisjoint(node.inputs):
            self._halved.update(node.outputs)
        self._note_inputs(node)
        return axis

    def is_padded(self, number: int) -> bool:
        """Returns whether a value is a pad, perhaps with its axes in another order."""
        if self.graph.name(number) in LAYOUTS:
            number = self.graph.definitions[number].inputs[0]
        return self.graph.name(number) == "pad"

    def make_input(self, number: int) -> None:
        """Makes a moved value an input of what follows."""
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
                todo += [n for n in user.outputs if self.forms.pop(n, None) is not None]
                readers.update(user.outputs)
        for leaf in self.computed:
            if leaf[0] in readers:
                self.value(*leaf)  # while it is still known by what it is computed
        own = number, self.moved[number]
        if not self.taken_over.isdisjoint((number, *readers)):
            self.value(*own)
        if own in self._values:
            self.computed.add(own)
        self.make_input(number)
        for user in self.graph.users[number]:
            if _takes_off(user) and user.outputs[0] in self.inputs:
                self._note_inputs(user)

    def _note_identity(self, node: Node) -> None:
        """Notes a pad that adds nothing, as gradients of slices have it."""
        if node.name == "pad" and not any(int(x) for three in node.params["padding_config"] for x in three):
            number = self._same[node.outputs[0]] = self._same.get(node.inputs[0], node.inputs[0])
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

    def read(self, node: Node) -> list[Leaf | None]:
        """Returns what a node reads, each with the axis of its steps; None for literals, zeros, and what a pad or a
        concatenation fills with."""
        known = self._reads.get(node.outputs[0])
        if known is None:
            known = self._reads[node.outputs[0]] = self._read_anew(node)
        return known

    def _read_anew(self, node: Node) -> list[Leaf | None]:
        graph, fills = self.graph, {"concatenate": node.inputs, "pad": node.inputs[1:]}.get(node.name, ())
        axis = self.moved[node.outputs[0]]
        axes = self._reading.get(node.outputs[0], (axis,) * len(node.inputs))
        found: list[Leaf | None] = []
        for number, at in zip(node.inputs, axes, strict=True):
            own = self._same.get(number, number)
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

    def _is_inside(self, leaf: Leaf) -> bool:
        """Returns whether a value is moved along an axis, and no input."""
        return self.moved.get(leaf[0]) == leaf[1] and leaf[0] in self.graph.definitions

    def _note_inputs(self, node: Node) -> None:
        """Notes the inputs of a node's results, and their forms."""
        graph, leaves = self.graph, dict[Leaf, int]()
        said = graph.parameters(node.equation) if node.params else 0
        read: list[Hashable] | None = None if said is None else []
        for number, leaf in zip(node.inputs, self.read(node), strict=True):
            if leaf is None:
                part: Hashable = self._whole(number), graph.shape(number)
            else:
                inside = self._is_inside(leaf)
                own = self.inputs[leaf[0]] if inside else (leaf,)
                if own is None:
                    self.inputs.update(dict.fromkeys(node.outputs))
                    return
                places = tuple([leaves.setdefault(one, len(leaves)) for one in own])
                form = self.forms.get(leaf[0]) if inside else ()
                part = None if form is None else (form, leaf[1], places, number == leaf[0], graph.shape(number))
            if part is None or read is None:
                read = None
            else:
                read.append(part)
        self.inputs.update(dict.fromkeys(node.outputs, tuple(leaves) if len(leaves) <= MOST_INPUTS else None))
        if read is not None:
            result = node.outputs[0]
            key = node.name, said, self.moved[result], graph.shape(result), *read
            form = self._numbered.setdefault(key, len(self._numbered))
            self.forms.update({n: (form, i) for i, n in enumerate(node.outputs)})

    def region(self, number: int) -> list[Node] | None:
        """Returns the nodes that compute a sum of pads, in order; None if there are too many."""
        if number not in self._regions:
            self._regions[number] = self._walked(number)
        return self._regions[number]

    def _walked(self, number: int) -> list[Node] | None:
        nodes: dict[int, Node] = {}
        todo, seen = [(number, self.moved[number])], set[Leaf]()
        while todo:
            leaf = todo.pop()
            if leaf in seen or not self._is_inside(leaf):
                continue
            seen.add(leaf)
            node = self.graph.definitions[leaf[0]]
            nodes[min(node.outputs)] = node
            if len(nodes) > _MOST_NODES:
                return None
            todo += filter(None, self.read(node))
        self.graph.steps.spend(len(nodes))
        return [node for _, node in sorted(nodes.items())]

    def leaves_of(self, number: int, axis: int) -> tuple[Leaf, ...] | None:
        """Returns the inputs of a sum of floats, if they all have its steps and dtype."""
        graph = self.graph
        if axis == _ONE_STEP or not jnp.issubdtype(graph.dtype(number), jnp.inexact):  # integers wrap
            return None
        steps = graph.shape(number)[axis]
        if not SHORTEST <= steps <= _LONGEST:
            return None
        found = self.inputs[number]
        if not found or len({n for n, _ in found}) < len(found):
            return None
        alike = (at >= 0 and graph.shape(n)[at] == steps and graph.dtype(n) == graph.dtype(number) for n, at in found)
        return tuple(sorted(found)) if all(alike) else None

    def value(self, number: int, axis: int) -> Array | None:
        """Returns a value along its axis at random points of the field, [points, steps]; None where it is not computed
        by integers."""
        values, graph = self._values, self.graph
        todo = [(number, axis)]
        while todo:
            leaf = todo[-1]
            if leaf not in values and (self._is_inside(leaf) or leaf in self.computed):
                node = graph.definitions[leaf[0]]
                read = self.read(node)
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
                values[leaf] = None if at < 0 else random.integers(0, PRIME, (POINTS, graph.shape(n)[at]), np.int64)
            todo.pop()
        return values[number, axis]

    def _filled(self, number: int, axis: int | None) -> Array | None:
        """Returns a value that is one number, along an axis, [points, steps]."""
        shape, found = self.graph.shape(number), self._whole(number)
        if found is None:
            return None
        one = np.asarray(found % PRIME, np.int64)
        return np.broadcast_to(one, (POINTS, 1 if axis is None or not shape else shape[axis]))

    def arrays(self, inputs: Sequence[Leaf]) -> list[Array]:
        """Returns those of some values that are computed by integers."""
        return [own for leaf in inputs if (own := self.value(*leaf)) is not None]


def _halves(node: Node) -> bool:
    """Returns whether a node takes every second step, or puts steps between others."""
    if node.name == "slice":
        return any(by != 1 for by in node.params["strides"] or ())
    return node.name == "pad" and has_interior(node)


def _takes_off(node: Node) -> bool:
    """Returns whether a pad takes steps off at the ends, or none."""
    three = node.params["padding_config"] if node.name == "pad" else [(1, 1, 1)]
    return all(int(low) <= 0 >= int(high) and not int(inside) for low, high, inside in three)


def has_interior(node: Node) -> bool:
    """Returns whether a pad puts steps between others."""
    return any(int(inside) > 0 for _, _, inside in node.params["padding_config"])


def _one(axes: set[int] | None) -> int | None:
    return min(axes) if axes is not None and len(axes) == 1 else None
