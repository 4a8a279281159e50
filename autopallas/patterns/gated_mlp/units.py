"""Reads hidden units as a program of two products: every elementwise step on the way back to them is carried."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple, TypeAlias

from autopallas.graph import Node, Ref
from autopallas.graph.labels import Atom, is_product
from autopallas.patterns.expressions import Scope, operation
from autopallas.patterns.forward import rectified
from autopallas.patterns.gated_mlp.candidates import MOVES, is_elementwise
from autopallas.patterns.inlined_rules import inlined_call
from autopallas.patterns.match import Mismatch
from autopallas.sites.elementwise import Constant, ElementwiseProgram, Input, Instruction, Score, Side, parameters

__all__ = ["Fixed", "Units", "Unlike", "Use"]

_DEEPEST = 32
_LONGEST = 64
"""Most operations of a program."""
MOST_VECTORS = 3

Fixed: TypeAlias = tuple[tuple[Atom, int], ...]
"""Labels of which a use has one index alone, with that index: the parity of columns that alternate."""
_Register: TypeAlias = tuple[str, int]


class Unlike(Exception):
    """Raised where a value is no gated MLP's; the message says why, for debugging."""


class Use(NamedTuple):
    """One use of a value, with the labels of which it has one index alone."""

    ref: Ref
    fixed: Fixed


class Units:
    """The program of the hidden units, and what it reads.

    Attributes:
      products: the uses of the two contractions, in the order in which they were met.
      vectors: the uses of the other arrays.
      rectified: whether each ``max(x, 0)`` is read as ``jax.nn.relu``, and what a softplus or ``jax.nn.relu6`` computes
        as its call, which they may have been before JAX differentiated a loop around them.
    """

    def __init__(self, scope: Scope, rectified: bool = False):
        self.scope, self.space, self.graph = scope, scope.space, scope.graph
        self.rectified = rectified
        self.products: list[Use] = []
        self.vectors: list[Use] = []
        self._cut: dict[tuple[int, int], tuple[Atom, ...]] = {}
        self._inputs: dict[Input, int] = {}
        self._instructions: list[tuple[Instruction, tuple[_Register, ...]]] = []
        self._known: dict[Hashable, _Register] = {}
        self._derived: dict[int, bool] = {}

    def read(self, ref: Ref) -> ElementwiseProgram:
        """Reads the program of a use of the hidden units.  The first product is the score, the second one side input
        0, and the vectors follow as side inputs.

        Raises:
          Unlike: there are not two products, or more vectors than a site may have.
        """
        result = self._register(Use(ref, ()), 0)
        if len(self.products) != 2:
            raise Unlike("there are not two products")

        def number(register: _Register) -> int:
            kind, position = register
            return position if kind == "input" else len(self._inputs) + position

        instructions = tuple(
            Instruction(i.primitive, i.params, tuple(map(number, arguments)), i.dtype)
            for i, arguments in self._instructions
        )
        return ElementwiseProgram(tuple(self._inputs), instructions, number(result))

    def _register(self, use: Use, depth: int) -> _Register:
        if depth > _DEEPEST or len(self._instructions) > _LONGEST:
            raise Unlike("it is too long")
        use = self._canonical(use)
        ref = use.ref
        key = ref.value, self.space.view(ref.view), use.fixed
        if key not in self._known:
            self._known[key] = self._written(use, depth)
        return self._known[key]

    def _written(self, use: Use, depth: int) -> _Register:
        ref, graph = use.ref, self.graph
        node, dtype = graph.definitions.get(ref.value), graph.dtype(ref.value)
        number = self.scope.number(ref)
        if number is not None:
            kind = int if dtype.kind in "iu" else bool if dtype.kind == "b" else float
            return self._input(Constant(kind(number), dtype))
        if node is not None and node.name == "dot_general" and not is_product(node):
            place = self._place(self.products, use)
            if place > 1:
                raise Unlike("there are more than two products")
            return self._input(Side(0, dtype) if place else Score(dtype))
        if not self._is_derived(ref.value, 0):
            place = self._place(self.vectors, use)
            if place >= MOST_VECTORS:
                raise Unlike("there are too many vectors")
            return self._input(Side(1 + place, dtype))
        assert node is not None
        operands = self.space.uses(ref)
        if operands is None or node.equation.effects or is_product(node):
            raise Unlike(f"it passes through {node.name}")
        if self.rectified and (called := inlined_call(graph, node)) is not None:
            node = Node(called[0], called[1], node.outputs, node.body)
            operands = [Ref(called[1][0], ref.view), *(Ref(number, ()) for number in called[1][1:])]
        elif self.rectified and (equation := rectified(node.equation)) is not node.equation:
            node = Node(equation, node.inputs, node.outputs, node.body)
            operands = [operand for operand in operands if self.scope.number(operand) is None]
        arguments = tuple(self._register(Use(operand, use.fixed), depth + 1) for operand in operands)
        try:
            primitive, params = operation(node)
            own = Instruction(primitive, parameters(params), (), dtype)
            hash(own)
        except (Mismatch, TypeError):
            raise Unlike(f"{node.name} cannot be carried") from None
        self._instructions.append((own, arguments))
        return "instruction", len(self._instructions) - 1

    def _input(self, value: Input) -> _Register:
        return "input", self._inputs.setdefault(value, len(self._inputs))

    def _place(self, uses: list[Use], use: Use) -> int:
        """Returns the place of a use among others, to which it is added if it is new."""
        for place, other in enumerate(uses):
            if other.fixed == use.fixed and self.space.same(other.ref, use.ref):
                return place
        uses.append(use)
        return len(uses) - 1

    def _is_derived(self, value: int, depth: int) -> bool:
        """Returns whether a value is computed from a contraction by elementwise steps and changes of layout."""
        if value not in self._derived:
            self._derived[value] = False
            node = self.graph.definitions.get(value)
            if node is not None and depth < 2 * _DEEPEST and len(self._derived) < 512:
                if node.name == "dot_general" and not is_product(node):
                    self._derived[value] = True
                elif node.name in MOVES or is_elementwise(node):
                    self._derived[value] = any(self._is_derived(i, depth + 1) for i in node.inputs)
        return self._derived[value]

    # ------------------------------------------------------------------ alternating columns

    def _canonical(self, use: Use) -> Use:
        """Returns the same elements with all layout operations undone, those that take every other column included."""
        while True:
            ref = self.space.canonical(use.ref)
            further = self._one_of_several(Use(ref, use.fixed))
            if further is None:
                return Use(ref, use.fixed)
            use = further

    def _one_of_several(self, use: Use) -> Use | None:
        """Reads one index of an axis that a reshape or a slice cut out as all of that axis, with a fixed label."""
        node = self.graph.definitions.get(use.ref.value)
        if node is None or node.name not in ("reshape", "slice"):
            return None
        view, fixed = list(use.ref.view), dict(use.fixed)
        if node.name == "slice":
            return self._strided(node, use)
        for axis, (n, (offset, atoms)) in enumerate(zip(self.graph.shape(use.ref.value), view, strict=True)):
            if n > 1 and self.space.extent(atoms) == 1:
                label = self._label(use.ref.value, axis, n)
                view[axis] = 0, label
                fixed[label[0]] = offset
        if len(fixed) == len(use.fixed):
            return None
        return Use(Ref(use.ref.value, tuple(view)), tuple(sorted(fixed.items())))

    def _strided(self, node: Node, use: Use) -> Use | None:
        (source,) = node.inputs
        starts, strides = node.params["start_indices"], node.params["strides"] or ()
        shape, view, fixed = self.graph.shape(source), list(use.ref.view), dict(use.fixed)
        for axis, stride in enumerate(strides):
            offset, atoms = view[axis]
            extent = self.space.extent(atoms)
            if stride == 1:
                view[axis] = offset + starts[axis], atoms
            elif offset or extent * stride != shape[axis] or starts[axis] >= stride:
                return None
            else:
                label = self._label(source, axis, stride)
                view[axis] = 0, (*atoms, *label)
                fixed[label[0]] = starts[axis]
        return Use(Ref(source, tuple(view)), tuple(sorted(fixed.items())))

    def _label(self, value: int, axis: int, size: int) -> tuple[Atom, ...]:
        """Returns the label of an axis of which single indices are read: the same one for all of them."""
        if (value, axis) not in self._cut:
            self._cut[value, axis] = self.space.fresh(size)
        return self._cut[value, axis]
