"""Small elementwise programs over a tile, which bring masks, biases, scales and caps into a kernel.

The elementwise part of a reference computation (for example, from the dot that gives the scores to the argument of
the exponential) is not decoded into features.  It is carried, equation by equation, as an
:class:`ElementwiseProgram`; a kernel evaluates it on each tile from the tile's scores, the positions of its rows and
columns, and side inputs.

Programs are frozen, hashable and comparable, which jaxprs are not, so they can be part of a specification and of a
cache key.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.typing import ArrayLike, DTypeLike

from autopallas import compat, jaxprs
from autopallas.compat import ArrayFunction, ClosedJaxpr, Dtype, Jaxpr, JaxprEqn, Var
from autopallas.compat import Literal as JaxprLiteral

custom_p = Primitive("custom_derivative")
"""Stands in a program for a function with its own derivative; its parameters ``value`` and ``tangent`` are programs.

It is never bound.  Side input n of both programs is argument n; in the tangent's program the tangents of the floating
arguments follow.
"""

Axis: TypeAlias = Literal["query", "key"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Score:
    """Scores of the tile: the result of the contraction, in the dtype that the original declared for it."""

    dtype: Dtype


@dataclass(frozen=True, slots=True)
class Index:
    """Position ``offset + (p // stride) % extent``, where ``p`` is the position of the row (query) or column (key).

    ``stride`` and ``extent`` select one factor of a merged axis, such as the height or the width of an image.
    """

    axis: Axis
    dtype: Dtype
    offset: int = 0
    stride: int = 1
    extent: int = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Side:
    """Side input: an array of the program (a mask, a bias, lengths, segment ids), by position in the spec's sides."""

    position: int
    dtype: Dtype


@dataclass(frozen=True, slots=True)
class Constant:
    """A scalar."""

    value: bool | int | float
    dtype: Dtype

    def __eq__(self, other: object) -> bool:  # True == 1 == 1.0 and nan != nan, so plain equality will not do
        return isinstance(other, Constant) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> tuple[bytes, Dtype]:
        return np.asarray(self.value, self.dtype).tobytes(), self.dtype


Input: TypeAlias = Score | Index | Side | Constant


@dataclass(frozen=True, slots=True)
class Instruction:
    """One elementwise equation.  ``arguments`` number the registers: inputs first, then instructions in order."""

    primitive: Primitive
    params: tuple[tuple[str, Hashable], ...]
    arguments: tuple[int, ...]
    dtype: Dtype


@dataclass(frozen=True, slots=True)
class ElementwiseProgram:
    """A straight line of elementwise instructions over broadcast operands.

    Example: the causal scores ``where(i >= j, s / 8, -inf)`` print as::

        program(score: float32, query: int32, key: int32, 8.0: float32, -inf: float32)
          %5 = ge query key
          %6 = div score 8.0
          %7 = select_n %5 -inf %6
          return %7
    """

    inputs: tuple[Input, ...]
    instructions: tuple[Instruction, ...]
    result: int

    @property
    def dtype(self) -> Dtype:
        """Dtype of the result."""
        if self.result < len(self.inputs):
            return self.inputs[self.result].dtype
        return self.instructions[self.result - len(self.inputs)].dtype

    @property
    def sides(self) -> tuple[int, ...]:
        """Positions of the side inputs that the program reads, ascending."""
        return tuple(sorted({i.position for i in self.inputs if isinstance(i, Side)}))

    @property
    def scales_last(self) -> bool:
        """Whether the result, apart from casts and its sign, is a product or quotient, other than the score times a
        constant: of a computed number, such as a masked score, or of a side input, or a negated one."""
        count, at, negated = len(self.inputs), self.result, False
        while at >= count and self.instructions[at - count].primitive.name in ("convert_element_type", "neg"):
            negated |= self.instructions[at - count].primitive.name == "neg"
            (at,) = self.instructions[at - count].arguments
        if at < count or self.instructions[at - count].primitive.name not in ("mul", "div"):
            return False
        arguments = self.instructions[at - count].arguments
        return negated or any(a >= count or isinstance(self.inputs[a], Side) for a in arguments)

    @property
    def multiplies_score(self) -> bool:
        """Whether a side input meets the score in a product, a quotient or a power, so that the derivative with respect
        to it grows with the score; in a function with its own derivative it may."""
        reads = [frozenset([type(i)]) for i in self.inputs]
        for instruction in self.instructions:
            own, name = [reads[a] for a in instruction.arguments], instruction.primitive.name
            reads.append(frozenset().union(*own))
            if name in ("mul", "div") and instruction.arguments[0] != instruction.arguments[1]:
                if any(Score in x and Side in y for x, y in (own, own[::-1])):
                    return True
            elif {Score, Side} <= reads[-1] and name in ("mul", "div", "integer_pow", "pow", "square", custom_p.name):
                return True
        return False

    @property
    def depends_on_score(self) -> bool:
        return any(isinstance(i, Score) for i in self.inputs)

    @property
    def primitives(self) -> frozenset[str]:
        """Names of the primitives used; a backend that lacks one can refuse the program before compiling."""
        own = {i.primitive.name for i in self.instructions}
        inner = (p.primitives for i in self.instructions if i.primitive is custom_p for _, p in _programs(i))
        return frozenset(own.union(*inner))

    def evaluate(
        self,
        score: jax.Array | None,
        query: jax.Array | None,
        key: jax.Array | None,
        sides: Sequence[jax.Array],
    ) -> jax.Array:
        """Evaluates the program on one tile.

        Args:
          score: the tile's scores, or None if the program reads none.
          query: integer positions of the rows, in a shape that broadcasts against the tile, or None.
          key: integer positions of the columns, likewise.
          sides: every side input of the spec, already cut to the tile, each broadcastable against it.

        Returns:
          An array of the broadcast shape of what was read, smaller than the tile if nothing tile-sized was read.
        """
        positions = {"query": query, "key": key}

        def load(i: Input) -> jax.Array:
            match i:
                case Score():
                    assert score is not None
                    return score.astype(i.dtype)
                case Index():
                    p = positions[i.axis]
                    assert p is not None
                    if i.stride != 1:
                        p = p // i.stride
                    if i.extent != 2**31 - 1:
                        p = p % i.extent
                    return (p + i.offset).astype(i.dtype) if i.offset else p.astype(i.dtype)
                case Side():
                    return sides[i.position]
                case Constant():
                    return jnp.asarray(i.value, i.dtype)

        return self.run(load, _selecting())

    def run(self, load: Callable[[Input], T], apply: Callable[[Instruction, list[T]], T]) -> T:
        """Interprets the program over any domain: arrays, numpy arrays, intervals."""
        registers = [load(i) for i in self.inputs]
        for instruction in self.instructions:
            registers.append(apply(instruction, [registers[a] for a in instruction.arguments]))
        return registers[self.result]

    def __str__(self) -> str:
        def name(i: Input) -> str:
            match i:
                case Score():
                    return "score"
                case Index():
                    part = f"//{i.stride}" * (i.stride != 1) + f"%{i.extent}" * (i.extent != 2**31 - 1)
                    return f"{i.axis}{part}" + f"{i.offset:+d}" * bool(i.offset)
                case Side():
                    return f"side{i.position}"
                case Constant():
                    return str(i.value)

        names = [name(i) for i in self.inputs]
        head = ", ".join(f"{n}: {i.dtype}" for n, i in zip(names, self.inputs, strict=True))
        lines = [f"program({head})"]
        for instruction in self.instructions:
            arguments = " ".join(names[a] for a in instruction.arguments)
            shown = ", ".join(f"{k}={v}" for k, v in instruction.params if v is not None and v is not False)
            shown = shown.replace("\n", "\n    ")
            names.append(f"%{len(names)}")
            lines.append(f"  {names[-1]} = {instruction.primitive.name}{f'[{shown}]' if shown else ''} {arguments}")
        return "\n".join([*lines, f"  return {names[self.result]}"])


@functools.cache
def honoured(program: ElementwiseProgram, is_exponent: bool = False) -> ElementwiseProgram:
    """Adds roundings that XLA cannot leave out: after each operation of the program in 16 bits, and after the products
    of the score, in more bits, of which an exponent is a sum; with ``is_exponent`` the result is such a summand.

    XLA computes operations in 16 bits in float32.  It keeps the float32 value where it fuses the operation with a
    float32 consumer, and rounds it elsewhere.  So it does with a product, which it may add to something in the same
    instruction.  So without the roundings a sum of ``exp(z - max(z))`` may hold an exponential that is not 1 where z is
    the maximum, and a gradient other exponentials than the sum by which it divides them.
    """
    registers = list(range(len(program.inputs)))
    instructions: list[Instruction] = []

    def put(instruction: Instruction) -> int:
        instructions.append(instruction)
        return len(program.inputs) + len(instructions) - 1

    wide, summands = np.dtype(np.float32), _products_in_exponents(program, is_exponent)
    for register, instruction in enumerate(program.instructions, len(program.inputs)):
        result = put(replace(instruction, arguments=tuple(registers[a] for a in instruction.arguments)))
        dtype = instruction.dtype
        if dtype in (jnp.bfloat16, np.float16) and instruction.primitive.name in _ROUNDING:
            # With float16's own exponents, XLA makes zeros of numbers below the normal ones, as a mean's gradients.
            rounding = {"exponent_bits": jnp.finfo(wide).nexp, "mantissa_bits": jnp.finfo(dtype).nmant}
            for primitive, params, of_result in (
                (jax.lax.convert_element_type_p, conversion_params(wide), wide),
                (jax.lax.reduce_precision_p, rounding, wide),
                (jax.lax.convert_element_type_p, conversion_params(dtype), dtype),
            ):
                result = put(Instruction(primitive, parameters(params), (result,), of_result))
        elif dtype in (np.float32, np.float64) and register in summands:  # as :func:`rounded`
            same = put(Instruction(jax.lax.eq_p, (), (result, result), np.dtype(np.bool_)))
            negative = put(Instruction(jax.lax.neg_p, (), (result,), dtype))
            result = put(Instruction(jax.lax.select_n_p, (), (same, negative, result), dtype))
        registers.append(result)
    return ElementwiseProgram(program.inputs, tuple(instructions), registers[program.result])


def _products_in_exponents(program: ElementwiseProgram, is_exponent: bool) -> set[int]:
    """Returns the registers of products of the score of which the arguments of exponentials are sums."""
    first, found = len(program.inputs), set[int]()
    reads = [isinstance(i, Score) for i in program.inputs]
    for instruction in program.instructions:
        reads.append(any(reads[a] for a in instruction.arguments))
    todo = [a for i in program.instructions if i.primitive.name in ("exp", "exp2") for a in i.arguments]
    todo += [program.result] if is_exponent else []
    seen = set(todo)
    for register in todo:  # which grows meanwhile
        name = program.instructions[register - first].primitive.name if register >= first else ""
        if name in ("mul", "div") and reads[register]:
            found.add(register)
        elif name in _SUMS:
            new = {*program.instructions[register - first].arguments} - seen
            seen |= new
            todo += new
    return found


_SUMS = frozenset({"add", "add_any", "sub", "neg", "convert_element_type", "select_n", "max", "min", "stop_gradient"})
"""Operations through which a summand of an exponent is followed."""


@functools.cache
def reproducible(program: ElementwiseProgram) -> ElementwiseProgram:
    """Writes the program such that a compiler rounds it alike in a forward and in a backward.

    The backward's program also computes the derivatives with respect to side inputs, such as a temperature, for which
    XLA may decide otherwise: to divide by a number or to multiply by its reciprocal, to leave the product unrounded in
    a sum or not.  The scores then differ by a rounding, which of a score of 10,000 is 0.001, and so are the
    probabilities off.  Therefore, in float32 and float64, a divisor that is known without the score, and is no
    constant, is inverted first; and a product of a side input within a sum, and a factor that is computed from side
    inputs alone, are rounded.
    """
    reads = [frozenset([type(i)]) for i in program.inputs]
    for instruction in program.instructions:
        reads.append(frozenset().union(*(reads[a] for a in instruction.arguments)))
    registers = list(enumerate(program.instructions, len(program.inputs)))
    added = [False] * len(reads)
    for register, instruction in reversed(registers):
        if instruction.primitive.name in ("add", "sub") or (instruction.primitive.name == "neg" and added[register]):
            for argument in instruction.arguments:
                added[argument] = True

    def has_inverse(instruction: Instruction) -> bool:
        divisor = reads[instruction.arguments[-1]]
        return instruction.primitive.name == "div" and Score not in divisor and divisor != {Constant}

    def known(register: int) -> bool:
        return Side in reads[register] and Score not in reads[register]

    dtypes = [i.dtype for i in (*program.inputs, *program.instructions)]
    factors = {a for i in program.instructions if i.primitive.name == "mul" for a in i.arguments if known(a)}

    def keeps(instruction: Instruction, register: int) -> bool:
        is_product = instruction.primitive.name == "mul" or has_inverse(instruction)
        if instruction.primitive.name == "convert_element_type" and dtypes[instruction.arguments[0]] == np.bool_:
            return False  # a truth value is exact
        return register in factors or (is_product and added[register] and Side in reads[register])

    wide = [(r, i) for r, i in registers if i.dtype in (np.float32, np.float64)]
    inverted = {i for r, i in wide if has_inverse(i)}
    kept = {i for r, i in wide if keeps(i, r)}
    if not inverted and not kept:
        return program

    def apply(instruction: Instruction, arguments: list[jax.Array]) -> jax.Array:
        inverts = instruction in inverted
        found = arguments[0] * (1 / rounded(arguments[1])) if inverts else bind(instruction, arguments)
        return rounded(found) if instruction in kept else found

    def function(*values: jax.Array) -> jax.Array:
        return program.run(dict(zip(program.inputs, values, strict=True)).__getitem__, apply)

    return traced(function, *program.inputs)


def rounded(x: jax.Array) -> jax.Array:
    """Returns the same numbers, which no compiler leaves unrounded where it computes with them further.

    The cotangent of a NaN passes too: a constant in its place would take 0.
    """
    return jnp.where(x == x, x, -x)


_ROUNDING = frozenset({"add", "add_any", "sub", "mul", "div", "tanh", "exp", "log", "integer_pow", "square", "sqrt"})
"""Operations whose results may lie between two numbers of their dtype."""


def conversion_params(dtype: Dtype) -> dict[str, Hashable]:
    """Returns the parameters of a cast."""
    return {"new_dtype": dtype, "sharding": None, "weak_type": False}


def parameters(params: Mapping[str, Hashable]) -> tuple[tuple[str, Hashable], ...]:
    """Returns a primitive's parameters as an instruction has them: sorted, and without placement."""
    return tuple((name, None if name in _PLACEMENT else value) for name, value in sorted(params.items()))


_PLACEMENT = frozenset({"sharding", "out_sharding"})


def _chosen(which: jax.Array, *cases: jax.Array) -> jax.Array:
    return (which & cases[1]) | (~which & cases[0]) if len(cases) == 2 else cases[0]


_LOGICAL: dict[str, Callable[..., jax.Array]] = {"select_n": _chosen, "max": jnp.logical_or, "min": jnp.logical_and}
"""Functions to use on booleans, since Mosaic neither selects nor compares booleans."""


def bind(instruction: Instruction, arguments: list[jax.Array]) -> jax.Array:
    """Applies an instruction to arrays that broadcast against each other."""
    shape = jnp.broadcast_shapes(*(jnp.shape(a) for a in arguments))
    operands = [jnp.broadcast_to(a, shape) for a in arguments]
    if instruction.primitive is custom_p:
        return _custom(instruction, operands)
    if instruction.primitive.name == "add_any":  # adds cotangents; kernels need not know it
        return jax.lax.add(*operands)
    if all(x.dtype == jnp.bool_ for x in operands) and (logical := _LOGICAL.get(instruction.primitive.name)):
        return logical(*operands)
    result: jax.Array = instruction.primitive.bind(*operands, **dict(instruction.params))
    return result


def _selecting() -> Callable[[Instruction, list[jax.Array]], jax.Array]:
    """Returns :func:`bind`, but for products with truth values, such as one-hot labels, which select.

    So XLA compiles a product with what is converted from a truth value of its shape, in 32 and 64 bits: it is 0 where
    that is false, also of an infinite score.
    """
    truths: list[tuple[jax.Array, jax.Array]] = []

    def apply(instruction: Instruction, arguments: list[jax.Array]) -> jax.Array:
        found, name = bind(instruction, arguments), instruction.primitive.name
        if instruction.dtype not in (np.float32, np.float64):
            return found
        if name == "convert_element_type" and arguments[0].dtype == bool:
            truths.append((found, arguments[0]))
        elif name == "mul":
            for factor, other in (arguments, arguments[::-1]):
                truth = next((truth for number, truth in truths if number is factor), None)
                if truth is not None and truth.shape == found.shape:
                    return jnp.where(truth, other, jnp.zeros((), other.dtype))
        return found

    return apply


def _programs(instruction: Instruction) -> list[tuple[str, ElementwiseProgram]]:
    return [(name, value) for name, value in instruction.params if isinstance(value, ElementwiseProgram)]


def _custom(instruction: Instruction, operands: list[jax.Array]) -> jax.Array:
    """Evaluates a function with its own derivative on arrays of one shape."""
    programs = dict(_programs(instruction))
    floating = [i for i, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.floating)]

    def evaluated(name: str, inputs: Sequence[jax.Array]) -> jax.Array:
        return jnp.broadcast_to(programs[name].evaluate(None, None, None, inputs), operands[0].shape)

    @jax.custom_jvp
    def function(*inputs: jax.Array) -> jax.Array:
        return evaluated("value", inputs)

    @function.defjvp
    def rule(inputs: Sequence[jax.Array], tangents: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
        return function(*inputs), evaluated("tangent", [*inputs, *(tangents[i] for i in floating)])

    result: jax.Array = function(*operands)
    return result


def traced(function: ArrayFunction, *inputs: Input, rules: bool = True) -> ElementwiseProgram:
    """Returns the program of an elementwise function, which takes one scalar argument per input.

    Args:
      function: the function.
      inputs: what the program reads.
      rules: whether the program is to be differentiated, so that functions in it keep derivatives of their own; else
        they become their values, which any kernel can evaluate.

    Example: ``traced(lambda i, j: i >= j, Index("query", int32), Index("key", int32))`` is the causal mask.
    """
    closed = _live(compat.make_jaxpr(function, *(jax.ShapeDtypeStruct((), i.dtype) for i in inputs)))
    loaded: list[Input] = list(inputs)
    instructions: list[tuple[Primitive, tuple[tuple[str, Hashable], ...], list[tuple[str, int]], Dtype]] = []
    environment: dict[Var, tuple[str, int]] = {v: ("input", n) for n, v in enumerate(closed.jaxpr.invars)}

    def constant(value: ArrayLike, dtype: DTypeLike) -> tuple[str, int]:
        loaded.append(Constant(np.asarray(value).item(), np.dtype(dtype)))
        return "input", len(loaded) - 1

    def inline(jaxpr: Jaxpr, environment: dict[Var, tuple[str, int]]) -> list[tuple[str, int]]:
        def read(atom: Var | JaxprLiteral) -> tuple[str, int]:
            if isinstance(atom, Var):
                return environment[atom]
            return constant(atom.val, atom.aval.dtype)

        for equation in jaxpr.eqns:
            arguments = [read(a) for a in equation.invars]
            has_rule = equation.primitive.name == "custom_jvp_call"
            if equation.primitive.name in ("jit", "pjit") or (has_rule and not rules):
                body = equation.params["call_jaxpr" if has_rule else "jaxpr"]
                inner = dict(zip(body.jaxpr.invars, arguments, strict=True))
                inner |= {v: constant(c, v.aval.dtype) for v, c in zip(body.jaxpr.constvars, body.consts, strict=True)}
                results = inline(body.jaxpr, inner)
                environment |= dict(zip(equation.outvars, results, strict=True))
                continue
            (result,) = equation.outvars
            if equation.primitive.name in _NOTHING:
                environment[result] = arguments[0]
                continue
            environment[result] = ("instruction", len(instructions))
            primitive, params = equation.primitive, parameters(equation.params)
            if has_rule:
                primitive, params = custom_p, parameters(_rule(equation))
            instructions.append((primitive, params, arguments, np.dtype(result.aval.dtype)))
        return [read(a) for a in jaxpr.outvars]

    environment |= {v: constant(c, v.aval.dtype) for v, c in zip(closed.jaxpr.constvars, closed.consts, strict=True)}
    (result,) = inline(closed.jaxpr, environment)

    def number(register: tuple[str, int]) -> int:
        return register[1] if register[0] == "input" else len(loaded) + register[1]

    return ElementwiseProgram(
        tuple(loaded),
        tuple(Instruction(p, params, tuple(map(number, arguments)), d) for p, params, arguments, d in instructions),
        number(result),
    )


def _live(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Leaves out what no result is computed from, such as a function's value where only its derivative is asked for."""
    jaxpr, _ = compat.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    return ClosedJaxpr(jaxpr, closed.consts)


def _rule(equation: JaxprEqn) -> dict[str, ElementwiseProgram]:
    """Returns the programs of a function with its own derivative, and of that."""
    variables = [Var(atom.aval) for atom in equation.invars]
    own, info = equation.replace(invars=variables), jaxprs.debug_info("autopallas", len(variables), 1)
    call = compat.jaxpr_as_fun(ClosedJaxpr(compat.new_jaxpr([], variables, own.outvars, [own], frozenset(), info), []))
    sides = [Side(n, np.dtype(v.aval.dtype)) for n, v in enumerate(variables)]
    floating = [n for n, side in enumerate(sides) if jnp.issubdtype(side.dtype, jnp.floating)]

    def value(*given: jax.Array) -> jax.Array:
        return compat.jaxpr_as_fun(equation.params["call_jaxpr"])(*given)[0]

    def tangent(*given: jax.Array) -> jax.Array:
        values, tangents = given[: len(sides)], given[len(sides) :]

        def chosen(*some: jax.Array) -> jax.Array:
            merged = dict(zip(floating, some, strict=True))
            return call(*(merged.get(n, x) for n, x in enumerate(values)))[0]

        found: jax.Array = jax.jvp(chosen, tuple(values[n] for n in floating), tuple(tangents))[1]
        return found

    of_tangents = [Side(len(sides) + i, sides[n].dtype) for i, n in enumerate(floating)]
    # A rule may call the function itself.
    return {"value": traced(value, *sides, rules=False), "tangent": traced(tangent, *sides, *of_tangents, rules=False)}


_NOTHING = frozenset({"broadcast_in_dim", "reduce_sum", "reshape", "squeeze"})
"""Primitives that occur in derivatives beside elementwise ones, and that leave a scalar unchanged."""
