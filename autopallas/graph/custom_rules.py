"""Reads elementwise functions with their own derivative, such as ``jax.nn.relu``: they are equations, not bodies.

What such a function and its derivative compute is read into programs, so that two functions can be compared, and so
that a kernel can evaluate both programs on a tile.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from autopallas import array_types, compat, jaxprs
from autopallas.compat import ClosedJaxpr, Jaxpr, JaxprAtom, JaxprEqn, JaxprLike, Literal, Var
from autopallas.sites.elementwise import Constant, ElementwiseProgram, Input, Instruction, Side, parameters

__all__ = [
    "CUSTOM_RULES",
    "ELEMENTWISE",
    "Rule",
    "called_program",
    "derivative_of",
    "is_elementwise_call",
    "restates_casts",
    "rule_key",
    "rule_of",
    "same_rule",
]

ELEMENTWISE = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp convert_element_type cos cosh div eq
    erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite le log log1p log2 logistic lt max min mul ne neg
    nextafter not one_minus_square or pow reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor""".split()
)
"""Primitives that compute each element of their result from the same element of their operands."""

_WITHIN = frozenset({"bitcast_convert_type", "polynomial"})
"""Further primitives that do so where no shape changes, read in functions with a derivative of their own: such a one is
``exp(-x * x)`` in JAX 0.12's derivative of ``erf``."""
CUSTOM_RULES = frozenset({"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"})
"""Primitives that call a function with a derivative of its own."""
_CALL = "custom_jvp_call"
_LONGEST = 160


It = TypeVar("It")


@dataclass(frozen=True, slots=True)
class Rule:
    """A function of its operands, and the tangent of its result as a function of operands and their tangents.

    Only floating operands have tangents.  Inputs are numbered like side inputs, with tangents after operands.
    """

    value: ElementwiseProgram
    tangent: ElementwiseProgram


def is_elementwise_call(equation: JaxprEqn) -> bool:
    """Returns whether an equation calls an elementwise function with its own derivative."""
    return equation.primitive.name == _CALL and called_program(equation) is not None


def called_program(equation: JaxprEqn) -> ElementwiseProgram | None:
    """Returns the program of such a call; None if it is not elementwise, or reads more than its operands."""
    if equation.params["num_consts"] or equation.params["symbolic_zeros"] or equation.effects:
        return None
    if len(equation.outvars) != 1:
        return None
    return _program(_Identified(equation.params["call_jaxpr"]))


def same_rule(a: JaxprEqn, b: JaxprEqn) -> bool:
    """Returns whether two elementwise calls of equal values have equal derivatives."""
    if a.params["jvp_jaxpr_fun"] is b.params["jvp_jaxpr_fun"]:
        return True
    rule = rule_of(a)
    return rule is not None and rule == rule_of(b)


def rule_of(equation: JaxprEqn) -> Rule | None:
    """Returns the function and its derivative; None if the derivative is not elementwise."""
    value = called_program(equation)
    if value is None:
        return None
    types = tuple((tuple(a.aval.shape), str(a.aval.dtype)) for a in equation.invars)
    tangent = _tangent(_Identified(equation.params["jvp_jaxpr_fun"], equation, types))
    return None if tangent is None else Rule(value, tangent)


def rule_key(equation: JaxprEqn) -> Hashable:
    """Returns a key that is equal for calls of equal derivatives, and None for any other equation.

    A graph's key of a call says what it computes, not how it is differentiated.  A derivative that is not elementwise
    equals itself alone.
    """
    if not is_elementwise_call(equation):
        return None
    rule = rule_of(equation)
    return _Identified(equation.params["jvp_jaxpr_fun"]) if rule is None else rule


class _Identified(Generic[It]):
    """Cache key that compares an object by identity, together with whatever else distinguishes two uses of it."""

    __slots__ = ("it", "types", "use")

    def __init__(self, it: It, use: JaxprEqn | None = None, types: tuple[Hashable, ...] = ()):
        self.it, self.use, self.types = it, use, types

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identified) and self.it is other.it and self.types == other.types

    def __hash__(self) -> int:
        return hash((id(self.it), self.types))


def restates_casts(equation: JaxprEqn, order: int = 2) -> bool:
    """Returns whether a custom derivative rule adds nothing, so that the call only groups equations.

    That is so if the function only casts its operands, or returns them as they are, and if its derivative is the one
    that JAX would take.  Derivatives are compared up to the ``order``, since a rule may call the function itself.

    Example:
      >>> @jax.custom_vjp
      ... def wide(x):
      ...     return x.astype(jnp.float32)
      >>> wide.defvjp(lambda x: (wide(x), None), lambda _, g: (g.astype(jnp.bfloat16),))
      >>> restates_casts(jax.make_jaxpr(wide)(jnp.ones(3, jnp.bfloat16)).eqns[0])
      True
    """
    if equation.primitive.name not in _RULED or equation.effects:
        return False
    held = jaxprs.bodies(equation)
    if len(held) != 1 or len(jaxprs.open_jaxpr(held[0][2])[0].invars) != len(equation.invars):
        return False
    return _restates_casts(_Identified(held[0][2], equation, tuple(map(id, equation.params.values()))), order)


@lru_cache(maxsize=128)
def _restates_casts(call_of: _Identified[JaxprLike], order: int) -> bool:
    equation, body = call_of.use, call_of.it
    assert equation is not None
    if not _only_casts(body, order):
        return False
    if order == 0:
        return True
    inputs = [Var(atom.aval) for atom in equation.invars]
    info = jaxprs.debug_info("autopallas", len(inputs), len(equation.outvars))
    again = equation.replace(invars=inputs)
    call = ClosedJaxpr(compat.new_jaxpr([], inputs, again.outvars, [again], frozenset(), info), [])
    try:
        ruled, own = (_pulled_back(compat.jaxpr_as_fun(f), inputs, again.outvars, order - 1) for f in (call, body))
    except Exception:  # a user's rule may do anything, and perhaps nobody asked for the derivative
        return False
    return ruled is not None and ruled == own


_RULED = frozenset({"custom_vjp_call", "custom_vjp_call_jaxpr"})
_CASTS = frozenset({"convert_element_type", "reduce_precision", "copy", "copy_p", "optimization_barrier"})


def _only_casts(body: JaxprLike, order: int) -> bool:
    jaxpr, consts = jaxprs.open_jaxpr(body)
    if consts:
        return False
    for equation in jaxpr.eqns:
        held = jaxprs.bodies(equation)
        if equation.primitive.name in ("jit", "pjit") and len(held) == 1:
            if not _only_casts(held[0][2], order):
                return False
        elif equation.primitive.name in _RULED:
            if not restates_casts(equation, order):
                return False
        elif equation.primitive.name not in _CASTS or equation.effects:
            return False
    return True


_Path: TypeAlias = int | tuple[Hashable, ...]
"""Number of a cotangent, or (the path so far, a cast, its parameters)."""


def _pulled_back(
    function: Callable[..., list[jax.Array]], inputs: Sequence[Var], results: Sequence[Var], order: int
) -> list[_Path | None] | None:
    """Returns, for each floating operand's cotangent, the result's cotangent that it comes from, with the casts on the
    way; None if one is something else."""
    shapes = [array_types.typed_like(v.aval) for v in inputs]
    active = [i for i, v in enumerate(inputs) if jnp.issubdtype(v.aval.dtype, jnp.floating)]
    if not all(jnp.issubdtype(v.aval.dtype, jnp.floating) for v in results):
        return None

    def pulled(operands: Sequence[jax.Array], cotangents: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        def chosen(*given: jax.Array) -> list[jax.Array]:
            filled = list(operands)
            for i, x in zip(active, given, strict=True):
                filled[i] = x
            return function(*filled)

        found: tuple[jax.Array, ...] = jax.vjp(chosen, *(operands[i] for i in active))[1](list(cotangents))
        return found

    kinds = [array_types.cotangent_like(v.aval) for v in results]
    jaxpr, _ = jaxprs.open_jaxpr(compat.make_jaxpr(pulled, shapes, kinds))
    known: dict[Var, _Path] = {v: i - len(shapes) for i, v in enumerate(jaxpr.invars) if i >= len(shapes)}

    def follow(jaxpr: Jaxpr, known: dict[Var, _Path]) -> list[_Path | None]:
        for equation in jaxpr.eqns:
            path = None if isinstance(equation.invars[0], Literal) else known.get(equation.invars[0])
            held = jaxprs.bodies(equation)
            if equation.primitive.name in ("jit", "pjit") and len(held) == 1 or restates_casts(equation, order):
                inner = jaxprs.open_jaxpr(held[0][2])[0]
                given = (None if isinstance(a, Literal) else known.get(a) for a in equation.invars)
                found = follow(inner, {v: p for v, p in zip(inner.invars, given, strict=True) if p is not None})
                known.update((v, p) for v, p in zip(equation.outvars, found, strict=True) if p is not None)
            elif path is not None and equation.primitive.name in ("copy", "copy_p"):
                known[equation.outvars[0]] = path
            elif path is not None and equation.primitive.name in _CASTS and len(equation.outvars) == 1:
                kept = {k: v for k, v in equation.params.items() if k.endswith(("_dtype", "_bits"))}
                known[equation.outvars[0]] = (path, equation.primitive.name, tuple(sorted(kept.items(), key=repr)))
        return [None if isinstance(a, Literal) else known.get(a) for a in jaxpr.outvars]

    paths = follow(jaxpr, known)
    return None if None in paths else paths


@lru_cache(maxsize=128)
def _program(body: _Identified[JaxprLike]) -> ElementwiseProgram | None:
    jaxpr, consts = jaxprs.open_jaxpr(body.it)
    return None if consts else _read(jaxpr)


@lru_cache(maxsize=128)
def derivative_of(equation: JaxprEqn) -> ClosedJaxpr:
    """Traces the tangent of the result of an equation, as JAX would differentiate it: a program of its operands and the
    tangents of the floating ones."""
    inputs = [Var(atom.aval) for atom in equation.invars]
    info = jaxprs.debug_info("autopallas", len(inputs), 1)
    again = equation.replace(invars=inputs)
    once = compat.jaxpr_as_fun(ClosedJaxpr(compat.new_jaxpr([], inputs, again.outvars, [again], frozenset(), info), []))
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in inputs]
    active = [i for i, s in enumerate(shapes) if jnp.issubdtype(s.dtype, jnp.floating)]

    def moved(operands: Sequence[jax.Array], tangents: Sequence[jax.Array]) -> jax.Array:
        def function(*chosen: jax.Array) -> jax.Array:
            filled = list(operands)
            for i, x in zip(active, chosen, strict=True):
                filled[i] = x
            return once(*filled)[0]

        tangent: jax.Array = jax.jvp(function, tuple(operands[i] for i in active), tuple(tangents))[1]
        return tangent

    return compat.make_jaxpr(moved, shapes, [shapes[i] for i in active])


@lru_cache(maxsize=128)
def _tangent(function: _Identified[Callable[..., object]]) -> ElementwiseProgram | None:
    equation = function.use
    assert equation is not None
    try:
        jaxpr, consts = jaxprs.open_jaxpr(derivative_of(equation))
    except Exception:  # a user's rule may do anything, and perhaps nobody asked for the derivative
        return None
    return None if consts else _read(jaxpr)


_Register: TypeAlias = Input | int
"""An input, or the number of an instruction."""
_Order: TypeAlias = tuple[int, ...]
"""For each axis of a value, the axis of the inputs that it is; empty for numbers and for arrays of equal numbers."""


def _read(jaxpr: Jaxpr) -> ElementwiseProgram | None:
    """Reads an elementwise jaxpr as a program over its inputs; returns None if it is something else.

    Axes may be permuted on the way, as in a derivative that ``vmap`` mapped over another axis than the first, if each
    element of the result is computed from the same element of the inputs.
    """
    inputs: dict[Input, None] = {Side(i, np.dtype(v.aval.dtype)): None for i, v in enumerate(jaxpr.invars)}
    lines: list[tuple[Instruction, list[_Register]]] = []

    def load(value: Input) -> Input:
        inputs.setdefault(value)
        return value

    def inline(jaxpr: Jaxpr, arguments: Sequence[tuple[_Register, _Order]]) -> list[tuple[_Register, _Order]]:
        """Appends the jaxpr's instructions; registers are inputs, or numbers of instructions."""
        known = dict(zip(jaxpr.invars, arguments, strict=True))

        def read(atom: JaxprAtom) -> tuple[_Register, _Order]:
            if not isinstance(atom, Literal):
                return known[atom]
            value = np.asarray(atom.val)
            if value.shape or atom.aval.shape:
                raise _NotElementwise
            return load(Constant(value.item(), np.dtype(atom.aval.dtype))), ()

        for equation in jaxpr.eqns:
            name, given = equation.primitive.name, [read(atom) for atom in equation.invars]
            registers, order = [register for register, _ in given], given[0][1] if given else ()
            held = jaxprs.bodies(equation)
            if equation.effects or len(lines) > _LONGEST:
                raise _NotElementwise
            if name in ("jit", "pjit", _CALL) and len(held) == 1:
                inner, consts = jaxprs.open_jaxpr(held[0][2])
                if consts:
                    raise _NotElementwise
                results = inline(inner, given)
            elif name == "broadcast_in_dim" and (
                not equation.invars[0].aval.shape or isinstance(registers[0], Constant)
            ):
                results = given[:1]
            elif name == "transpose":
                axes = equation.params["permutation"]
                results = [(registers[0], tuple(order[axis] for axis in axes) if order else ())]
            elif name in ELEMENTWISE or name in _WITHIN and _keeps_shape(equation):
                orders = {own for _, own in given} - {()}
                if len(orders) > 1:
                    raise _NotElementwise
                dtype = np.dtype(equation.outvars[0].aval.dtype)
                lines.append((Instruction(equation.primitive, parameters(equation.params), (), dtype), registers))
                results = [(len(lines) - 1, next(iter(orders), ()))]
            else:
                raise _NotElementwise
            known.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    try:
        arguments = [(given, tuple(range(v.aval.ndim))) for given, v in zip(inputs, jaxpr.invars, strict=True)]
        ((result, order),) = inline(jaxpr, arguments)
        if order != tuple(range(len(order))):
            raise _NotElementwise
        numbers = {value: i for i, value in enumerate(inputs)}

        def number(register: _Register) -> int:
            return len(numbers) + register if isinstance(register, int) else numbers[register]

        program = ElementwiseProgram(
            tuple(inputs),
            tuple(Instruction(i.primitive, i.params, tuple(map(number, a)), i.dtype) for i, a in lines),
            number(result),
        )
        hash(program)
    except (_NotElementwise, TypeError, ValueError):
        return None
    return program


def _keeps_shape(equation: JaxprEqn) -> bool:
    shapes = {tuple(atom.aval.shape) for atom in equation.invars} - {()}
    return shapes <= {tuple(equation.outvars[0].aval.shape)}


class _NotElementwise(Exception):
    pass
