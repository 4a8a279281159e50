"""Index notation for the values of a graph: one use of a value consists of the value and a view.

A view gives an index of the value for each dimension: ``index = offset + mixed radix of the atoms``, major first.
Atoms are axis labels, shared by all values of one site.  A layout operation only maps a view of its result to a view of
its operand: when views are pulled back through transposes, reshapes, broadcasts and slices, layout vanishes.  Labels
belong to uses, not to values, which keeps T and S apart in ``softmax(x @ x.T) @ x``.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence, Set
from typing import NamedTuple, TypeAlias

import numpy as np
from jax import numpy as jnp

from autopallas.graph.custom_rules import ELEMENTWISE, is_elementwise_call
from autopallas.graph.equation_keys import Node
from autopallas.graph.keys import enters_mesh
from autopallas.graph.numbering import Graph
from autopallas.numerics.casts import rounds

Atom: TypeAlias = int
Dimension: TypeAlias = tuple[int, tuple[Atom, ...]]
View: TypeAlias = tuple[Dimension, ...]

_IDENTITY = frozenset(
    {"copy", "copy_p", "name", "sharding_constraint", "optimization_barrier", "pvary", "pcast", "layout_constraint"}
    | {"reshard"}
)
_LAYOUT = _IDENTITY | {
    "transpose", "reshape", "broadcast_in_dim", "squeeze", "expand_dims", "slice", "concatenate", "split", "tile",
    "stack", "unstack", "reduce_precision", "convert_element_type",
}  # fmt: skip


class Ref(NamedTuple):
    """One use of a value: the value's number, and the view under which it is read."""

    value: int
    view: View


class Space:
    """The axis labels of one site.

    A reshape that cuts inside an atom refines it, for the whole site; ``_parts`` records the new atoms.  So views are
    read through :meth:`resolve`, and keys are computed after all refinements.
    """

    def __init__(self, graph: Graph, through: bool = False):
        self.graph = graph
        self.through = through
        """Whether the result of a custom rule's call is read as that of its primal body, and a sum or maximum over one
        element as that element."""
        self.sizes: dict[Atom, int] = {}
        self.refinements = 0
        self._parts: dict[Atom, tuple[Atom, ...]] = {}
        self._origin: dict[Atom, Atom] = {}
        self._canonical: dict[Ref, tuple[int, Ref]] = {}
        self._met: dict[int, dict[Ref, None]] = {}  # by the value of their canonical form
        self._inside: dict[Hashable, list[Dimension]] = {}

    # ------------------------------------------------------------------ atoms

    def fresh(self, size: int) -> tuple[Atom, ...]:
        """Returns a new label; none for an axis of size 1."""
        if size == 1:
            return ()
        atom = len(self.sizes)
        self.sizes[atom] = size
        self._origin[atom] = atom
        return (atom,)

    def resolve(self, atoms: Sequence[Atom]) -> tuple[Atom, ...]:
        """Returns the atoms after all refinements."""
        if not self._parts or self._parts.keys().isdisjoint(atoms):
            return tuple(atoms)
        found: list[Atom] = []
        for atom in atoms:
            found += self.resolve(self._parts[atom]) if atom in self._parts else (atom,)
        return tuple(found)

    def origin(self, atom: Atom) -> Atom:
        """Returns the label that was first given to the axis of which ``atom`` is a part."""
        return self._origin[atom]

    def extent(self, atoms: Sequence[Atom]) -> int:
        return math.prod(self.sizes[a] for a in self.resolve(atoms))

    def view(self, view: View) -> View:
        """Returns a view after all refinements."""
        return tuple([(offset, self.resolve(atoms)) for offset, atoms in view]) if self._parts else view

    def atoms(self, ref: Ref) -> frozenset[Atom]:
        if not self._parts:
            return frozenset([a for _, atoms in ref.view for a in atoms])
        return frozenset([a for _, atoms in ref.view for a in self.resolve(atoms)])

    def full(self, value: int) -> Ref:
        """Returns a use of the whole value, under new labels."""
        return Ref(value, tuple((0, self.fresh(n)) for n in self.graph.shape(value)))

    def same(self, a: Ref, b: Ref) -> bool:
        return a.value == b.value and self.view(a.view) == self.view(b.view)

    def pattern(self, ref: Ref, fixed: Set[Atom]) -> tuple[int, Hashable]:
        """Returns a key that is equal for uses of one value that differ only in the names of labels not in ``fixed``.

        A property that holds for all values of an element's labels, and involves no labels except the fixed ones, holds
        under other names too.  So a walk that remembers patterns meets each value only a few times, although every
        contraction on the way to it introduces labels.
        """
        names: dict[Atom, tuple[int, int]] = {}
        found = []
        for offset, atoms in ref.view:
            own: list[Atom | tuple[int, int]] = []
            for atom in self.resolve(atoms):
                own.append(atom if atom in fixed else names.setdefault(atom, (len(names), self.sizes[atom])))
            found.append((offset, tuple(own)))
        return ref.value, tuple(found)

    def cut(self, atoms: Sequence[Atom], sizes: Sequence[int]) -> list[Dimension] | None:
        """Regroups atoms into dimensions of the given sizes, refining where a boundary falls inside an atom."""
        self.graph.steps.spend()
        groups: list[Dimension] = []
        rest = list(self.resolve(atoms))
        for size in sizes:
            group: list[Atom] = []
            have = 1
            while have < size:
                if not rest or size % have:
                    return None
                atom, wanted = rest.pop(0), size // have
                if wanted % self.sizes[atom]:
                    if self.sizes[atom] % wanted:
                        return None
                    major, minor = self.fresh(wanted)[0], self.fresh(self.sizes[atom] // wanted)[0]
                    self._parts[atom] = (major, minor)
                    self.refinements += 1
                    self._origin[major] = self._origin[minor] = self._origin[atom]
                    atom = major
                    rest.insert(0, minor)
                group.append(atom)
                have *= self.sizes[atom]
            if have != size:
                return None
            groups.append((0, tuple(group)))
        return groups

    # ------------------------------------------------------------------ pulling views through equations

    def chain(self, ref: Ref) -> Iterator[Ref]:
        """Yields ``ref``, then the same elements seen one layout operation further back, and so on."""
        current: Ref | None = ref
        while current is not None:
            yield current
            current = self._step(current)

    def canonical(self, ref: Ref) -> Ref:
        """Returns the same elements with all layout operations undone."""
        known = self._canonical.get(ref)
        if known is None or known[0] != self.refinements:  # a reshape that could not be undone may be undone now
            last = ref
            for found in self.chain(ref):
                last = found
            known = self._canonical[ref] = self.refinements, last
            self._met.setdefault(last.value, {})[ref] = None
        return known[1]

    def unrepeated(self, ref: Ref) -> Ref:
        """Returns the same elements before they were repeated along further axes, in the latest such layout."""
        fewest = len(self.atoms(self.canonical(ref)))
        return next(at for at in self.chain(ref) if len(self.atoms(at)) == fewest)

    def met(self, ref: Ref) -> Iterator[Ref]:
        """Yields the uses, met so far, that hold the elements of ``ref`` in its layout or another one."""
        wanted = self.canonical(ref)
        for other in [*self._met[wanted.value]]:
            self.graph.steps.spend()
            if self.same(self.canonical(other), wanted):
                yield other

    def operands(self, ref: Ref) -> list[Ref] | None:
        """Returns the canonical operands of an elementwise equation, or of a dot without contraction, or None."""
        found = self.uses(ref)
        return None if found is None else [self.canonical(operand) for operand in found]

    def uses(self, ref: Ref) -> list[Ref] | None:
        """Like :meth:`operands`, but as the equation reads them, with their layout operations still to undo."""
        node = self.graph.definitions.get(ref.value)
        if node is None:
            return None
        self.graph.steps.spend()
        if node.name in ELEMENTWISE or is_elementwise_call(node.equation):
            shape = self.graph.shape(ref.value)
            found: list[Ref] = []
            complete = len(ref.view) == len(shape)
            for value in node.inputs:
                own = self.graph.shape(value)
                if own == shape and complete:  # the usual case: nothing is repeated
                    found.append(Ref(value, ref.view))
                    continue
                if own and (len(own) != len(shape) or any(m not in (1, n) for m, n in zip(own, shape, strict=True))):
                    return None
                dimensions = zip(own, shape, ref.view, strict=False)  # a scalar operand has no dimensions
                view = tuple((0, ()) if m == 1 != n else dimension for m, n, dimension in dimensions)
                found.append(Ref(value, view))
            return found
        if is_product(node):
            left, right, _ = self.dot(ref)
            return [left, right]
        return None

    def dot(self, ref: Ref, contracted: Sequence[Dimension] | None = None) -> tuple[Ref, Ref, list[Dimension]]:
        """Returns views of both operands of a dot_general, and the dimensions that it contracts: ``contracted``, or by
        default the same ones each time that the value is seen under the same view."""
        self.graph.steps.spend()
        node = self.graph.definitions[ref.value]
        (left_contracting, right_contracting), (left_batch, right_batch) = node.params["dimension_numbers"]
        left_shape, right_shape = (self.graph.shape(i) for i in node.inputs)
        left_free = [d for d in range(len(left_shape)) if d not in (*left_contracting, *left_batch)]
        right_free = [d for d in range(len(right_shape)) if d not in (*right_contracting, *right_batch)]
        if contracted is None:
            contracted = self.inside(ref, [left_shape[d] for d in left_contracting])
        left: dict[int, Dimension] = {}
        right: dict[int, Dimension] = {}
        batch = len(left_batch)
        for i, (a, b) in enumerate(zip(left_batch, right_batch, strict=True)):
            left[a] = right[b] = ref.view[i]
        for i, d in enumerate(left_free):
            left[d] = ref.view[batch + i]
        for i, d in enumerate(right_free):
            right[d] = ref.view[batch + len(left_free) + i]
        for dimension, a, b in zip(contracted, left_contracting, right_contracting, strict=True):
            left[a] = right[b] = dimension
        return (
            Ref(node.inputs[0], tuple(left[d] for d in range(len(left_shape)))),
            Ref(node.inputs[1], tuple(right[d] for d in range(len(right_shape)))),
            list(contracted),
        )

    def contraction(self, ref: Ref) -> tuple[Ref, Ref, list[Dimension]] | None:
        """Returns (a, b, contracted dimensions) if the value is a dot_general or sum(a * b), else None.

        The operands are as the equation reads them, with their layout operations still to undo.
        """
        node = self.graph.definitions.get(ref.value)
        if node is None:
            return None
        if node.name == "dot_general":
            if is_product(node):
                return None
            return self.dot(ref)
        if node.name != "reduce_sum":
            return None
        operand, dimensions = self.reduced(ref)
        product = self.canonical(operand)
        while self.graph.name(product.value) == "convert_element_type":
            inner = self.operands(product)
            assert inner is not None
            if not rounds(self.graph.dtype(inner[0].value), self.graph.dtype(product.value)):
                return None
            product = inner[0]
        definition = self.graph.definitions.get(product.value)
        if definition is None or not (definition.name == "mul" or is_product(definition)):
            return None
        factors = self.uses(product)
        if factors is None or not all(f.view for f in factors):
            return None
        return factors[0], factors[1], dimensions

    def reduced(self, ref: Ref) -> tuple[Ref, list[Dimension]]:
        """Returns the operand of a reduction, and the dimensions that are reduced: the same ones each time that the
        value is seen under the same view."""
        self.graph.steps.spend()
        node = self.graph.definitions[ref.value]
        axes, shape, kept = node.params["axes"], self.graph.shape(node.inputs[0]), iter(ref.view)
        gone = dict(zip(axes, self.inside(ref, [shape[d] for d in axes]), strict=True))
        view = tuple(gone[d] if d in gone else next(kept) for d in range(len(shape)))
        return Ref(node.inputs[0], view), [gone[d] for d in axes]

    def inside(self, ref: Ref, sizes: Sequence[int]) -> list[Dimension]:
        """Returns dimensions that a value's operands have and the value lacks, such as those over which it sums.

        They are the same ones each time that it is seen under the same view: new ones would be refined anew.
        """
        key = ref.value, self.view(ref.view)
        if key not in self._inside:
            self._inside[key] = [(0, self.fresh(n)) for n in sizes]
        return [*self._inside[key]]

    def _step(self, ref: Ref) -> Ref | None:
        """Goes one layout operation back; returns None if there is none or it cannot be undone."""
        node = self.graph.definitions.get(ref.value)
        if self.through and node is not None:
            if ref.value in self.graph.inner:
                return Ref(self.graph.inner[ref.value], ref.view)
            if node.name in ("reduce_sum", "reduce_max"):
                before, kept = self.graph.shape(node.inputs[0]), iter(ref.view)
                if any(before[d] != 1 for d in node.params["axes"]):
                    return None
                single = [(0, ()) if d in node.params["axes"] else next(kept) for d in range(len(before))]
                return Ref(node.inputs[0], tuple(single))
        if node is None or node.name not in _LAYOUT:
            return None
        self.graph.steps.spend()
        name, view, params = node.name, ref.view, node.params
        if enters_mesh(node.equation):
            return None
        if name in _IDENTITY:
            return Ref(node.inputs[node.outputs.index(ref.value)], view)
        source = node.inputs[0]
        if name == "convert_element_type":
            return Ref(source, view) if self.graph.dtype(source) == self.graph.dtype(ref.value) else None
        if name == "reduce_precision":
            own = jnp.finfo(self.graph.dtype(source))
            same = (params["exponent_bits"], params["mantissa_bits"]) == (own.nexp, own.nmant)
            return Ref(source, view) if same else None
        before, after = self.graph.shape(source), self.graph.shape(ref.value)
        if 0 in before or 0 in after:
            return None
        pulled: Sequence[Dimension] | None = None
        if name == "transpose":
            where = {int(i): view[o] for o, i in enumerate(params["permutation"])}
            pulled = [where[d] for d in range(len(view))]
        elif name == "broadcast_in_dim":
            targets = params["broadcast_dimensions"]
            pulled = [(0, ()) if n == 1 else view[d] for n, d in zip(before, targets, strict=True)]
        elif name in ("reshape", "squeeze", "expand_dims"):
            pulled = self._pull_reshape(view, after, before)
        elif name == "slice":
            strides = params["strides"] or (1,) * len(view)
            if all(by == 1 or not self.resolve(atoms) for by, (_, atoms) in zip(strides, view, strict=True)):
                starts = params["start_indices"]
                pulled = [(by * o + s, atoms) for by, s, (o, atoms) in zip(strides, starts, view, strict=True)]
        elif name == "split":
            axis, part = params["axis"], node.outputs.index(ref.value)
            start = int(sum(params["sizes"][:part]))
            pulled = [(o + start, a) if d == axis else (o, a) for d, (o, a) in enumerate(view)]
        elif name == "tile":
            pulled = self._pull_tile(view, params["reps"], before, after)
        elif name == "concatenate":
            return self._pull_concatenate(node, view)
        elif name == "unstack":
            axis = params["axis"]
            pulled = [*view[:axis], (node.outputs.index(ref.value), ()), *view[axis:]]
        elif name == "stack":
            axis = params["axis"]
            piece, atoms = view[axis]
            return None if self.resolve(atoms) else Ref(node.inputs[piece], (*view[:axis], *view[axis + 1 :]))
        return None if pulled is None else Ref(source, tuple(pulled))

    def _pull_reshape(self, view: View, after: Sequence[int], before: Sequence[int]) -> list[Dimension] | None:
        outer = [(n, dimension) for n, dimension in zip(after, view, strict=True) if n != 1]
        pulled: list[Dimension] = []
        position = 0  # in outer
        dimension = 0  # in before
        while dimension < len(before):
            if before[dimension] == 1:
                pulled.append((0, ()))
                dimension += 1
                continue
            inside, outside = [before[dimension]], [outer[position]]
            dimension, position = dimension + 1, position + 1
            while (have := math.prod(inside)) != (want := math.prod(n for n, _ in outside)):
                if have < want:
                    inside.append(before[dimension])
                    dimension += 1
                else:
                    outside.append(outer[position])
                    position += 1
            if len(inside) == len(outside) == 1:
                pulled.append(outside[0][1])
                continue
            if not any(self.resolve(atoms) for _, (_, atoms) in outside):  # a single element
                index = int(np.ravel_multi_index([o for _, (o, _) in outside], [n for n, _ in outside]))
                pulled += [(int(i), ()) for i in np.unravel_index(index, inside)]
                continue
            if any(offset or self.extent(atoms) != n for n, (offset, atoms) in outside):
                return None
            groups = self.cut([a for _, (_, atoms) in outside for a in atoms], [n for n in inside if n != 1])
            if groups is None:
                return None
            left = iter(groups)
            pulled += [(0, ()) if n == 1 else next(left) for n in inside]
        return pulled

    def _pull_tile(
        self, view: View, repetitions: Sequence[int], before: Sequence[int], after: Sequence[int]
    ) -> list[Dimension] | None:
        pulled: list[Dimension] = []
        for n, times, total, (offset, atoms) in zip(before, repetitions, after, view, strict=True):
            if times != 1 and not self.resolve(atoms):
                offset %= n  # a single element
            elif times != 1:
                if offset or self.extent(atoms) != total:
                    return None
                groups = self.cut(atoms, [k for k in (times, n) if k != 1])
                if groups is None:
                    return None
                offset, atoms = groups[-1] if n != 1 else (0, ())
            pulled.append((offset, atoms))
        return pulled

    def _pull_concatenate(self, node: Node, view: View) -> Ref | None:
        """Returns the view in the one piece that it lies in, or None."""
        axis = node.params["dimension"]
        offset, atoms = view[axis]
        low, high = offset, offset + self.extent(atoms)
        start = 0
        for value in node.inputs:
            size = self.graph.shape(value)[axis]
            if start <= low and high <= start + size:
                return Ref(value, tuple((low - start, atoms) if d == axis else e for d, e in enumerate(view)))
            start += size
        return None


def is_product(node: Node) -> bool:
    """Returns whether a node is a dot without contraction: an elementwise product of broadcast operands."""
    return node.name == "dot_general" and not node.params["dimension_numbers"][0][0]
