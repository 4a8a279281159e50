"""Turns the elementwise part of a site into programs, and cuts side inputs where they are smallest."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
from jax import lax

from autopallas import compat
from autopallas.compat import Dtype, Primitive
from autopallas.graph import Body, Graph, Ref
from autopallas.graph.body_links import linked
from autopallas.graph.labels import Atom, Dimension
from autopallas.numerics.casts import counts_exactly
from autopallas.patterns.advice import BETWEEN_PRODUCTS, DIAGONAL, IN_THE_BODY, SIDE_DTYPES
from autopallas.patterns.expressions import Apply, Expression, Scope, operation
from autopallas.patterns.match import Match, Mismatch
from autopallas.sites.elementwise import (
    Constant,
    ElementwiseProgram,
    Index,
    Input,
    Instruction,
    Score,
    Side,
    conversion_params,
    parameters,
)
from autopallas.sites.index_notation import Operand, Positions

__all__ = ["Carrier", "ProgramBuilder", "fewest_side_elements", "is_available"]

_DEEPEST = 128
"""Most operations on one path of a program for a kernel; longer paths are left to the compiler."""


def is_available(graph: Graph, value: int, homes: Sequence[Body], body: Body, across: bool) -> bool:
    """Returns whether a body has a variable for a value or, with ``across``, can be given the variable of one of
    ``homes``."""
    if value in graph.positions[body]:
        return True
    return across and any(value in graph.positions[home] and linked(graph, home, body) for home in homes)


def fewest_side_elements(graph: Graph, attempt: Callable[[bool], Match], enough: int) -> Match:
    """Builds the match twice, with local values only and with values from other bodies, and returns the one with fewer
    side-input elements.

    A mask that is at hand, for example, gives way to the smaller values that it is computed from. If the first match
    has fewer than ``enough`` elements, it is returned at once.

    Raises:
      Mismatch: neither can be built.
    """

    def size(match: Match) -> int:
        parts = (part for side in getattr(match.site, "sides", ()) for part in getattr(side, "parts", (side,)))
        sides = {side.position for side in parts if isinstance(side, Operand)}
        return sum(math.prod(graph.shape(match.operands[position])) for position in sides)

    found: list[Match] = []
    for across in (False, True):
        try:
            found.append(attempt(across))
        except Mismatch:
            if across and not found:
                raise
        if found and size(found[0]) < enough:
            return found[0]
    return min(found, key=size)


class Carrier:
    """Collects what one site reads: operands (values of the program) and side inputs of its programs."""

    def __init__(
        self,
        scope: Scope,
        bodies: Sequence[Body],
        axes: tuple[tuple[Atom, ...], tuple[Atom, ...]],
        score: Ref,
        pinned: frozenset[int] = frozenset(),
        across: bool = False,
        homes: Sequence[Body] = (),
        roles: int = 3,
        absorbed: Sequence[Ref] = (),
    ):
        self.scope, self.bodies, self.score = scope, bodies, score
        self.axes = axes
        """Labels of (T, S), along which positions count."""
        self.pinned = pinned
        """Values that must be operands as they are, since their cotangents are asked for."""
        self.across, self.homes = across, homes
        """Whether values that one of ``homes`` has may be brought into the bodies."""
        self.roles = roles
        """Number of leading operands that have a role."""
        self.absorbed = absorbed
        """Products that are added to the scores; the scores here are the sum."""
        self.operands: list[int] = []
        self.sides: list[Operand | Positions] = []
        self._costs: dict[Hashable, float] = {}

    # ------------------------------------------------------------------ operands

    def available(self, value: int) -> bool:
        """Returns whether every body in which a part of the site will stand has a variable for this value, or can be
        given one."""
        return all(is_available(self.scope.graph, value, self.homes, body, self.across) for body in self.bodies)

    def further(self, value: int) -> None:
        """Adds an operand that no program reads, only the original equations do."""
        if not self.available(value):
            raise Mismatch("an operand is computed in an enclosing body and not passed in", value, advice=IN_THE_BODY)
        self.operands.append(value)

    def role(self, ref: Ref, value: int | None = None, name: str = "") -> Operand:
        """Adds an operand with a role (queries, keys, values), even where its value is an operand already.

        Of the values that hold the same elements, ``value`` is taken; by default the furthest back that is at hand.
        ``name`` is how an error message calls the operand.
        """
        found = self._furthest(ref, value, f"the {name} are" if name else "an operand is")
        self.operands.append(found.value)
        return Operand(len(self.operands) - 1, found.view)

    def side_operand(self, ref: Ref) -> Operand:
        """Adds a use of a value as a side input, unless it is one already."""
        found = self._furthest(ref, self.pin(ref))
        if found.value not in self.operands[self.roles :]:
            self.operands.append(found.value)
        return Operand(self.operands.index(found.value, self.roles), found.view)

    def pin(self, ref: Ref) -> int | None:
        return next((step.value for step in self.scope.space.chain(ref) if step.value in self.pinned), None)

    def _at_hand(self, ref: Ref) -> Ref | None:
        """Finds the furthest back of the values that hold the elements of a use and are at hand.

        If there is none between this use and the origin of the elements, such as a mask before a loop, the body may be
        given the elements in another use.
        """
        space = self.scope.space
        found: Ref | None = None
        for step in space.chain(ref):
            if self.available(step.value):
                found = step
        if found is None:
            labels = space.atoms(self.score) | space.atoms(space.canonical(ref))
            others = [
                step
                for other in space.met(ref)
                for step in space.chain(other)
                if self.available(step.value) and space.atoms(step) <= labels
            ]
            found = min(others, key=lambda step: math.prod(self.scope.graph.shape(step.value)), default=None)
        return found

    def _furthest(self, ref: Ref, value: int | None, what: str = "an operand is") -> Ref:
        space = self.scope.space
        if value is None:
            found = self._at_hand(ref)
        else:
            found = next((step for step in space.chain(ref) if step.value == value), None)
        if found is None:
            raise Mismatch(f"{what} computed in an enclosing body and not passed in", ref.value, advice=IN_THE_BODY)
        view = space.view(found.view)
        labels = [a for _, atoms in view for a in atoms]
        if len(set(labels)) != len(labels):
            raise Mismatch(f"{what} read along a diagonal", found.value, advice=DIAGONAL)
        return Ref(found.value, view)

    def source(self, ref: Ref) -> Operand | Positions:
        """Returns a side operand, or positions where the value is an iota."""
        canonical = self.scope.space.canonical(ref)
        if (dimension := self._iota(canonical)) is not None:
            return Positions(dimension, self.scope.graph.dtype(canonical.value))
        return self.side_operand(ref)

    def _iota(self, ref: Ref) -> Dimension | None:
        """Returns the positions that a value counts, if its dtype holds them all; otherwise it is an array like any
        other."""
        node = self.scope.node(ref)
        if node is None or node.name != "iota":
            return None
        axis, graph = node.params["dimension"], self.scope.graph
        if not counts_exactly(graph.dtype(ref.value), graph.shape(ref.value)[axis] - 1):
            return None
        offset, atoms = ref.view[axis]
        return offset, self.scope.space.resolve(atoms)

    def absorbs(self, ref: Ref) -> bool:
        """Returns whether a value is a sum of nothing but products that the scores include already."""
        space, scope = self.scope.space, self.scope
        todo, seen = [ref], 0
        while todo:
            at = space.canonical(todo.pop())
            seen += 1
            if any(at.value == other.value and space.same(at, other) for other in self.absorbed):
                continue
            name, operands = scope.name(at), space.operands(at)
            if operands is None or seen > _DEEPEST or scope.number(at) is not None:
                return False
            if name in ("add", "add_any", "sub"):
                todo += operands
            elif name in ("mul", "div", "neg", "convert_element_type"):
                todo += [o for o in operands if scope.number(o) is None]
            else:
                return False
        return True

    @contextmanager
    def optional(self) -> Iterator[None]:
        """Suppresses a Mismatch that the block raises, and removes the operands and side inputs that the block
        added."""
        operands, sides = len(self.operands), len(self.sides)
        try:
            yield
        except Mismatch:
            del self.operands[operands:], self.sides[sides:]

    def side(self, source: Operand | Positions) -> int:
        if source not in self.sides:
            self.sides.append(source)
        return self.sides.index(source)

    # ------------------------------------------------------------------ where to cut

    def leaf_cost(self, ref: Ref) -> float:
        """Returns the bytes of a value as a side input; infinite if it cannot be one."""
        if self._iota(self.scope.space.canonical(ref)) is not None:
            return 0.0
        if self._at_hand(ref) is None:
            return math.inf
        space, graph = self.scope.space, self.scope.graph
        atoms = space.atoms(space.canonical(ref))
        return float(math.prod(space.sizes[a] for a in atoms) * graph.dtype(ref.value).itemsize)

    def cost(self, ref: Ref, depth: int = 0) -> float:
        """Returns the least bytes of side inputs from which a value can be computed."""
        if self.pin(ref) is not None or self.scope.number(ref) is not None:
            return 0.0
        key = self.scope.key(ref)
        if key not in self._costs:
            self._costs[key] = leaf = self.leaf_cost(ref)
            if leaf > 0 and depth < _DEEPEST and (parts := self.parts(ref)) is not None:
                distinct = {self.scope.key(part): part for part in parts}
                self._costs[key] = min(leaf, sum(self.cost(part, depth + 1) for part in distinct.values()))
        return self._costs[key]

    def parts(self, ref: Ref) -> list[Ref] | None:
        """Returns the operands of an elementwise value that a kernel could compute itself."""
        ref = self.scope.space.canonical(ref)
        node = self.scope.node(ref)
        return None if node is None or node.equation.effects else self.scope.space.uses(ref)

    def cut_here(self, ref: Ref) -> bool:
        """Returns whether a value that does not depend on the scores is best passed in as it is."""
        parts = self.parts(ref)
        if parts is None:
            return True
        distinct = {self.scope.key(part): part for part in parts}
        return sum(self.cost(part) for part in distinct.values()) >= self.leaf_cost(ref)


Register: TypeAlias = tuple[str, int]
"""("input" or "instruction", its number)."""
InstructionParams: TypeAlias = tuple[tuple[str, Hashable], ...]


class ProgramBuilder:
    """Writes one expression as a program over the score, positions and side inputs."""

    def __init__(self, carrier: Carrier):
        self.carrier, self.scope = carrier, carrier.scope
        self._inputs: dict[Input, int] = {}
        self._instructions: list[tuple[Instruction, tuple[Register, ...]]] = []
        self._known: dict[Hashable, Register] = {}
        self._applied: dict[int, tuple[Apply, Register]] = {}
        self._depth = 0

    def build(self, expression: Expression) -> ElementwiseProgram:
        result = self._register(expression)
        return self._program(result)

    def build_not(self, expression: Expression) -> ElementwiseProgram:
        """Builds the negation of a boolean expression."""
        inner = self._register(expression)
        return self._program(self._emit(lax.not_p, (), (inner,), np.dtype(bool)))

    def build_reciprocal(self, expression: Ref) -> ElementwiseProgram:
        dtype = self.scope.graph.dtype(expression.value)
        one = self._input(Constant(1.0, dtype))
        return self._program(self._emit(lax.div_p, (), (one, self._register(expression)), dtype))

    def conjunction(self, terms: Sequence[tuple[Ref, bool]]) -> ElementwiseProgram:
        """Builds the conjunction of boolean values, each as it is (True) or negated (False)."""
        boolean = np.dtype(bool)
        result: Register | None = None
        for ref, positive in terms:
            register = self._register(ref)
            if not positive:
                register = self._emit(lax.not_p, (), (register,), boolean)
            result = register if result is None else self._emit(lax.and_p, (), (result, register), boolean)
        assert result is not None
        return self._program(result)

    # Registers are ("input", i) or ("instruction", i) until the number of inputs is known.

    def _program(self, result: Register) -> ElementwiseProgram:
        def number(register: Register) -> int:
            kind, position = register
            return int(position if kind == "input" else len(self._inputs) + position)

        instructions = tuple(
            Instruction(i.primitive, i.params, tuple(number(a) for a in arguments), i.dtype)
            for i, arguments in self._instructions
        )
        return ElementwiseProgram(tuple(self._inputs), instructions, number(result))

    def _input(self, value: Input) -> Register:
        return "input", self._inputs.setdefault(value, len(self._inputs))

    def _emit(
        self, primitive: Primitive, params: InstructionParams, arguments: tuple[Register, ...], dtype: Dtype
    ) -> Register:
        key = (primitive, params, arguments)
        try:
            if key not in self._known:
                self._instructions.append((Instruction(primitive, params, (), dtype), arguments))
                self._known[key] = ("instruction", len(self._instructions) - 1)
        except TypeError:
            raise Mismatch(
                f"{primitive.name} has a parameter that cannot be compared", advice=BETWEEN_PRODUCTS
            ) from None
        return self._known[key]

    def _register(self, expression: Expression) -> Register:
        self._depth += 1
        try:
            if self._depth > _DEEPEST:
                raise Mismatch(
                    f"there are more than {_DEEPEST} operations between the contraction and the exponential",
                    advice="Compute what does not depend on the scores before the product, and write repeated steps as "
                    "one: a kernel evaluates all that stands between the product and the exponential on each tile.",
                )
            return self._written(expression)
        finally:
            self._depth -= 1

    def _written(self, expression: Expression) -> Register:
        scope, space = self.scope, self.scope.space
        match expression:
            case Constant():
                return self._input(expression)
            case Apply():
                if id(expression) not in self._applied:
                    if (rest := self._without_absorbed(expression.primitive.name, expression.arguments)) is not None:
                        self._applied[id(expression)] = expression, rest
                        return rest
                    arguments = tuple(self._register(a) for a in expression.arguments)
                    params = parameters(expression.params)
                    register = self._emit(expression.primitive, params, arguments, expression.dtype)
                    self._applied[id(expression)] = expression, register
                return self._applied[id(expression)][1]
        assert isinstance(expression, Ref), "only passes over logits have positions and statistics in expressions"
        if self.carrier.pin(expression) is not None:
            source = self.carrier.side_operand(expression)
            return self._input(Side(self.carrier.side(source), scope.graph.dtype(expression.value)))
        ref = space.canonical(expression)
        dtype = scope.graph.dtype(ref.value)
        if ref.value == scope.score:
            if not space.same(ref, self.carrier.score):
                raise Mismatch(
                    "the scores enter the program in two layouts",
                    advice="Read the scores in one layout between the two products: what transposes them belongs in a "
                    "separate function.",
                )
            return self._input(Score(dtype))
        if scope.depends(ref.value):
            return self._elementwise(ref, dtype)
        number = scope.number(ref)
        if number is not None:
            value: bool | int | float = number
            if dtype.kind in "iu":
                value = int(number)
            elif dtype.kind == "b":
                value = bool(number)
            return self._input(Constant(value, dtype))
        index = self._index(ref, dtype)
        if index is not None:
            return self._input(index)
        if not self.carrier.cut_here(expression):
            return self._elementwise(ref, dtype)
        if not (dtype.kind in "iub" or np.issubdtype(dtype, np.floating) or dtype.name == "bfloat16"):
            raise Mismatch(f"a side input has the dtype {dtype}", advice=SIDE_DTYPES)
        if dtype == np.float64 and scope.score is not None and scope.graph.dtype(scope.score) != dtype:
            raise Mismatch(
                "a side input of float64 meets narrower scores, which kernels do not widen",
                advice="Cast it to the dtype of the scores, or the operands of the products to float64.",
            )
        return self._input(Side(self.carrier.side(self.carrier.source(expression)), dtype))

    def _without_absorbed(self, name: str, operands: Sequence[Expression]) -> Register | None:
        """Writes what is left of a sum without an operand that the scores include already; None for any other
        operation."""
        if name not in ("add", "add_any", "sub") or not self.carrier.absorbed:
            return None
        for operand, other in (operands[::-1], operands):
            if isinstance(operand, Ref) and self.carrier.absorbs(operand) and self.scope.mentions_score(other):
                rest = self._register(other)
                if name == "sub" and other is operands[1]:
                    rest = self._emit(lax.neg_p, (), (rest,), self.scope.dtype(other))
                return rest
        return None

    def _elementwise(self, ref: Ref, dtype: Dtype) -> Register:
        space = self.scope.space
        node, operands = self.scope.node(ref), space.uses(ref)
        if node is None or operands is None or node.equation.effects:
            raise Mismatch(f"the scores pass through {self.scope.name(ref)}", advice=BETWEEN_PRODUCTS)
        key = self.scope.key(ref)
        if key in self._known:
            return self._known[key]
        if (rest := self._without_absorbed(node.name, operands)) is not None:
            self._known[key] = rest
            return rest
        if self.scope.depends(ref.value) and not self.carrier_axis(ref):
            raise Mismatch(
                "a function of the scores without the key axis is inside the score program",
                advice="Compute nothing from a row of scores but the maximum and the sum of its softmax: scale and "
                "shift scores by values that do not depend on them.",
            )
        arguments = tuple(self._register(operand) for operand in operands)
        if node.name == "dot_general":  # a dot without contraction is a product
            arguments = tuple(
                a if self.scope.graph.dtype(o.value) == dtype else self._convert(a, dtype)
                for a, o in zip(arguments, operands, strict=True)
            )
            if dtype.kind == "b":
                register = self._emit(lax.and_p, (), arguments, dtype)
            else:
                register = self._emit(lax.mul_p, parameters(compat.multiplication_params()), arguments, dtype)
        else:
            primitive, params = operation(node)
            register = self._emit(primitive, parameters(params), arguments, dtype)
        self._known[key] = register
        return register

    def _convert(self, register: Register, dtype: Dtype) -> Register:
        return self._emit(lax.convert_element_type_p, parameters(conversion_params(dtype)), (register,), dtype)

    def carrier_axis(self, ref: Ref) -> bool:
        return bool(self.scope.space.atoms(ref) & set(self.scope.space.resolve(self.carrier.axes[1])))

    def _index(self, ref: Ref, dtype: Dtype) -> Index | None:
        """Returns a position along T or S, if the value is an iota along a factor of one of them."""
        dimension = self.carrier._iota(ref)
        if dimension is None or not dimension[1]:
            return None
        offset, atoms = dimension
        sizes = self.scope.space.sizes
        for axis, labels in (("query", self.carrier.axes[0]), ("key", self.carrier.axes[1])):
            labels = self.scope.space.resolve(labels)
            for start in range(len(labels) - len(atoms) + 1):
                if labels[start : start + len(atoms)] == atoms:
                    stride = math.prod(sizes[a] for a in labels[start + len(atoms) :])
                    extent = math.prod(sizes[a] for a in atoms)
                    whole = {} if start == 0 else {"extent": extent}
                    return Index(axis, dtype, offset, stride, **whole)  # type: ignore[arg-type]
        return None
