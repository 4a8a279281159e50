"""Writes the elementwise part of a site as programs over the score, positions and side inputs."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import TypeAlias

import numpy as np
from jax import lax

from autopallas import compat
from autopallas.compat import Dtype, Primitive
from autopallas.graph import Ref
from autopallas.numerics.casts import kind_of
from autopallas.patterns.advice import BETWEEN_PRODUCTS, SIDE_DTYPES
from autopallas.patterns.carry import DEEPEST, Carrier
from autopallas.patterns.expressions import Apply, Expression, operation
from autopallas.patterns.match import Mismatch
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

__all__ = ["InstructionParams", "ProgramBuilder", "Register"]

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
            if self._depth > DEEPEST:
                raise Mismatch(
                    f"there are more than {DEEPEST} operations between the contraction and the exponential",
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
            if kind_of(dtype) in "iu":
                value = int(number)
            elif kind_of(dtype) == "b":
                value = bool(number)
            return self._input(Constant(value, dtype))
        index = self._index(ref, dtype)
        if index is not None:
            return self._input(index)
        if not self.carrier.cut_here(expression):
            return self._elementwise(ref, dtype)
        if not (kind_of(dtype) in "iubf" or dtype.name == "bfloat16"):
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
            if kind_of(dtype) == "b":
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
        dimension = self.carrier.iota(ref)
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
