"""Leaves out roundings to bfloat16 that a program takes back at once, as XLA does."""

from __future__ import annotations

import functools
from collections.abc import Set
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from jax import lax

from autopallas.sites.elementwise import (
    Constant,
    ElementwiseProgram,
    Input,
    Instruction,
    Score,
    Side,
    conversion_params,
    parameters,
)

__all__ = ["NARROW", "WIDE", "rounding_first", "unrounded"]

NARROW, WIDE = np.dtype(jnp.bfloat16), np.dtype(np.float32)
"""The dtype whose roundings are left out, and the one in which is computed instead."""
_ARITHMETIC = frozenset({
    "abs", "add", "add_any", "clamp", "div", "exp", "expm1", "integer_pow", "log", "log1p", "logistic", "max", "min",
    "mul", "neg", "select_n", "sqrt", "square", "sub", "tanh",
})  # fmt: skip
"""Operations that do the same in either dtype, and whose parameters name none."""


@functools.cache
def unrounded(program: ElementwiseProgram, narrow: Set[Input]) -> ElementwiseProgram | None:
    """Returns a program that reads numbers in float32 which the original rounds to bfloat16.

    A program such as ``(s * scale).astype(float32)`` of bfloat16 scores takes each rounding back at once, and XLA's
    compilers compute it without.  An exponential would multiply these roundings: of a score of 60 one is up to 0.13,
    and its exponential off by that part of itself.  bfloat16 arithmetic between the numbers and the casts is computed
    in float32 too.

    Args:
      program: the program.
      narrow: the inputs, scores and side inputs in bfloat16, of which it is to read float32 numbers.

    Returns:
      The program; None where one of these inputs, or what is computed of it in bfloat16, is also read in another way:
      compared, returned, or converted to another dtype.
    """
    moved = _moved(program, narrow)
    if moved is None:
        return None
    return program if not moved else _rewritten(program, moved)


@functools.cache
def rounding_first(program: ElementwiseProgram, narrow: Set[Input]) -> ElementwiseProgram:
    """Returns a program that reads those numbers in float32 too, and rounds them to bfloat16 before anything else.

    No compiler leaves such a rounding out.
    """
    count = len(program.inputs)
    rounding = (("exponent_bits", 8), ("mantissa_bits", 7))
    casts: list[Instruction] = []
    registers: dict[int, int] = {}
    for register, given in enumerate(program.inputs):
        if given in narrow:
            casts.append(Instruction(lax.reduce_precision_p, rounding, (register,), WIDE))
            cast = parameters(conversion_params(NARROW))
            casts.append(Instruction(lax.convert_element_type_p, cast, (count + len(casts) - 1,), NARROW))
            registers[register] = count + len(casts) - 1

    def moved(register: int) -> int:
        return registers.get(register, register) if register < count else register + len(casts)

    return ElementwiseProgram(
        tuple(_widened(given) if given in narrow else given for given in program.inputs),
        (*casts, *(replace(i, arguments=tuple(map(moved, i.arguments))) for i in program.instructions)),
        moved(program.result),
    )


def _widened(given: Input) -> Input:
    assert isinstance(given, Score | Side)
    return replace(given, dtype=WIDE)


def _moved(program: ElementwiseProgram, narrow: Set[Input]) -> set[int] | None:
    """Returns the registers to be held in float32; None where that is not possible."""
    count = len(program.inputs)
    reached = {register for register, given in enumerate(program.inputs) if given in narrow}
    users: dict[int, list[int]] = {}
    for register, instruction in enumerate(program.instructions, count):
        if instruction.dtype == NARROW and not reached.isdisjoint(instruction.arguments):
            reached.add(register)
        for argument in instruction.arguments:
            users.setdefault(argument, []).append(register)
    moved: set[int] = set()
    for register in sorted(reached, reverse=True):
        if register == program.result or (
            register >= count and program.instructions[register - count].primitive.name not in _ARITHMETIC
        ):
            continue
        if all(user in moved or _widens(program.instructions[user - count]) for user in users.get(register, ())):
            moved.add(register)
    return moved if all(register in moved for register in reached if register < count) else None


def _widens(instruction: Instruction) -> bool:
    return instruction.primitive is lax.convert_element_type_p and instruction.dtype == WIDE


def _rewritten(program: ElementwiseProgram, moved: Set[int]) -> ElementwiseProgram:
    """Returns the program with these registers in float32, and without the casts of what is float32 then."""
    inputs = [_widened(given) if register in moved else given for register, given in enumerate(program.inputs)]
    old = len(inputs)
    # Registers of instructions are negative until the number of inputs is known.
    registers: dict[int, int] = {n: n for n in range(old)}
    widened: dict[int, int] = {}
    instructions: list[Instruction] = []

    def put(instruction: Instruction) -> int:
        instructions.append(instruction)
        return -len(instructions)

    def in_float32(register: int) -> int:
        if register in moved or dtypes[register] != NARROW:
            return registers[register]
        if register not in widened:
            given = program.inputs[register] if register < old else None
            if isinstance(given, Constant):
                inputs.append(Constant(float(np.asarray(given.value, NARROW)), WIDE))
                widened[register] = len(inputs) - 1
            else:
                cast = parameters(conversion_params(WIDE))
                widened[register] = put(Instruction(lax.convert_element_type_p, cast, (registers[register],), WIDE))
        return widened[register]

    dtypes = [x.dtype for x in (*program.inputs, *program.instructions)]
    for register, instruction in enumerate(program.instructions, old):
        if register in moved:
            arguments = tuple(map(in_float32, instruction.arguments))
            registers[register] = put(replace(instruction, arguments=arguments, dtype=WIDE))
        elif _widens(instruction) and instruction.arguments[0] in moved:
            registers[register] = registers[instruction.arguments[0]]
        else:
            arguments = tuple(registers[argument] for argument in instruction.arguments)
            registers[register] = put(replace(instruction, arguments=arguments))

    result = registers[program.result]
    read = {argument for instruction in instructions for argument in instruction.arguments} | {result}
    kept = [n for n, given in enumerate(inputs) if n in read or not isinstance(given, Constant)]
    places = {n: place for place, n in enumerate(kept)}
    places |= {-1 - n: len(kept) + n for n in range(len(instructions))}
    return ElementwiseProgram(
        tuple(inputs[n] for n in kept),
        tuple(replace(i, arguments=tuple(places[a] for a in i.arguments)) for i in instructions),
        places[result],
    )
